"""OpenAPI 3.0.1 documents of TorchServe's routes. Pure."""

import re
from collections.abc import Iterable
from typing import Any, Final, Literal

from msgspec import Struct

JSON: Final = "application/json"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

Schema = Literal["bytes", "error", "metrics", "models", "description", "object", "page", "ready", "status"]
OpenApiResponse = tuple[int, str, Schema]  # status, description, schema of the body
OpenApiResponses = tuple[OpenApiResponse, ...]


class QueryParameter(Struct, frozen=True):
    """A parameter of the query string; path parameters follow from the path."""

    name: str
    description: str
    kind: Literal["string", "integer", "boolean"] = "string"
    default: str | int | bool | None = None
    required: bool = False
    values: tuple[str, ...] = ()  # empty: any
    least: int | None = None  # of a number; None: it is not read


class Operation(Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    id: str
    description: str
    parameters: tuple[QueryParameter, ...] = ()
    body: Schema | None = None  # of the request; "bytes": any type that the model accepts
    responses: OpenApiResponses = ()
    deprecated: bool = False


def operations_document(
    title: str, version: str, operations: Iterable[Operation], description: str = ""
) -> dict[str, Any]:
    """The OpenAPI document of these operations, as a JSON value."""
    info = {"title": title, "description": description or None, "version": version}
    paths: dict[str, dict[str, Any]] = {}
    used: set[Schema] = {"error"}
    for operation in operations:
        paths.setdefault(operation.path.replace("...}", "}"), {})[operation.method.lower()] = _operation(operation)
        used.update(schema for _, _, schema in operation.responses)
        if operation.body is not None:
            used.add(operation.body)
    schemas = {name: _SCHEMAS[name] for name in sorted(used - {"bytes", "metrics"})}
    return {"openapi": "3.0.1", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(operation: Operation) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)", operation.path)
    responses = (*operation.responses, (500, "Internal Server Error", "error"))
    found: dict[str, Any] = {
        "description": operation.description,
        "operationId": operation.id,
        "parameters": [
            *({"in": "path", "name": name, "required": True, "schema": {"type": "string"}} for name in names),
            *(_parameter(parameter) for parameter in operation.parameters),
        ],
        "responses": {
            str(status): {"description": text, "content": _content(schema)} for status, text, schema in responses
        },
    }
    if operation.body is not None:
        found["requestBody"] = {"content": _content(operation.body), "required": operation.body != "object"}
    if operation.deprecated:
        found["deprecated"] = True
    return found


def _parameter(parameter: QueryParameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind, "default": parameter.default}
    if parameter.values:
        schema["enum"] = list(parameter.values)
    found = {"in": "query", "name": parameter.name, "description": parameter.description}
    return {**found, "required": parameter.required, "schema": schema}


def _content(schema: Schema) -> dict[str, Any]:
    if schema == "bytes":
        return {"*/*": {"schema": {"type": "string", "format": "binary"}}}
    if schema == "metrics":
        return {METRICS: {"schema": {"type": "string"}}}
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _schema(required: str, optional: str = "", **properties: Any) -> dict[str, Any]:
    """An object schema. Blanks separate the names in both lists; each is a string, or has its type behind a colon."""
    named = [name.partition(":")[::2] for name in f"{required} {optional}".split()]
    found = {name: {"type": kind or "string"} for name, kind in named}
    needed = [name for name, _ in named[: len(required.split())]]
    return {"type": "object", "required": needed, "properties": {**found, **properties}}


_WORKER: Final = _schema("id startTime status", "gpuUsage gpu:boolean pid:integer memoryUsage:integer")
_MODEL: Final = _schema(
    "modelName modelVersion modelUrl runtime minWorkers:integer maxWorkers:integer batchSize:integer"
    " maxBatchDelay:integer workers jobQueueStatus",
    "deviceType responseTimeout:integer startupTimeout:integer loadedAtStartup:boolean",
    workers={"type": "array", "items": _WORKER},
    jobQueueStatus=_schema("remainingCapacity:integer pendingRequests:integer"),
    customizedMetadata={},
)
_SCHEMAS: Final[dict[Schema, dict[str, Any]]] = {
    "error": _schema("code:integer type message"),
    "status": _schema("status"),
    "page": _schema("models", "nextPageToken", models={"type": "array", "items": _schema("modelName modelUrl")}),
    "models": {"type": "array", "items": _MODEL},
    "ready": _schema("name ready:boolean"),
    "description": _schema("openapi info:object paths:object"),
    "object": {"type": "object"},
}
