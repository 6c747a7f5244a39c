"""Documents in the form of OpenAPI 3.0.1 of TorchServe's routes, each made of the operations it is given. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal

from msgspec import Struct

JSON: Final = "application/json"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

Form = Literal["bytes", "error", "metrics", "models", "description", "object", "page", "ready", "status"]
AnswerOf = tuple[int, str, Form]  # status, description, form of the body
Answers = tuple[AnswerOf, ...]


class Parameter(Struct, frozen=True):
    """A parameter of the query; those of a path are read off the path."""

    name: str
    description: str
    kind: Literal["string", "integer", "boolean"] = "string"
    default: str | int | bool | None = None
    required: bool = False
    values: tuple[str, ...] = ()  # empty: any


class Operation(Struct, frozen=True):
    """One method of one path, as it stands in a table of routes."""

    method: str
    path: str
    id: str
    description: str
    parameters: tuple[Parameter, ...] = ()
    takes: Form | None = None  # form of the body it takes; "bytes": whatever the model understands
    answers: Answers = ()
    deprecated: bool = False


def operations_document(
    title: str, version: str, operations: Iterable[Operation], description: str = ""
) -> dict[str, Any]:
    """The document as a JSON value."""
    info = {"title": title, "description": description or None, "version": version}
    paths: dict[str, dict[str, Any]] = {}
    forms: set[Form] = {"error"}
    for operation in operations:
        paths.setdefault(operation.path.replace("...}", "}"), {})[operation.method.lower()] = _operation(operation)
        forms.update(form for _, _, form in operation.answers)
        if operation.takes is not None:
            forms.add(operation.takes)
    schemas = {form: _SCHEMAS[form] for form in sorted(forms - {"bytes", "metrics"})}
    return {"openapi": "3.0.1", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(operation: Operation) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)", operation.path)
    answers = (*operation.answers, (500, "Internal Server Error", "error"))
    found: dict[str, Any] = {
        "description": operation.description,
        "operationId": operation.id,
        "parameters": [
            *({"in": "path", "name": name, "required": True, "schema": {"type": "string"}} for name in names),
            *(_parameter(parameter) for parameter in operation.parameters),
        ],
        "responses": {str(status): {"description": text, "content": _content(form)} for status, text, form in answers},
    }
    if operation.takes is not None:
        found["requestBody"] = {"content": _content(operation.takes), "required": operation.takes != "object"}
    if operation.deprecated:
        found["deprecated"] = True
    return found


def _parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind, "default": parameter.default}
    if parameter.values:
        schema["enum"] = list(parameter.values)
    found = {"in": "query", "name": parameter.name, "description": parameter.description}
    return {**found, "required": parameter.required, "schema": schema}


def _content(form: Form) -> dict[str, Any]:
    if form == "bytes":
        return {"*/*": {"schema": {"type": "string", "format": "binary"}}}
    if form == "metrics":
        return {METRICS: {"schema": {"type": "string"}}}
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{form}"}}}


def _schema(required: str, optional: str = "", **properties: Any) -> dict[str, Any]:
    """An object of texts, but for `properties`; the names of either list are separated by blanks."""
    names = [*required.split(), *optional.split()]
    texts = {name: {"type": "string"} for name in names}
    return {"type": "object", "required": required.split(), "properties": {**texts, **properties}}


_NUMBER: Final = {"type": "integer"}
_YES: Final = {"type": "boolean"}
_MODEL: Final = _schema(
    "modelName modelVersion modelUrl runtime minWorkers maxWorkers batchSize maxBatchDelay workers jobQueueStatus",
    "deviceType",
    minWorkers=_NUMBER,
    maxWorkers=_NUMBER,
    batchSize=_NUMBER,
    maxBatchDelay=_NUMBER,
    responseTimeout=_NUMBER,
    startupTimeout=_NUMBER,
    loadedAtStartup=_YES,
    workers={
        "type": "array",
        "items": _schema("id startTime status", "gpuUsage", gpu=_YES, pid=_NUMBER, memoryUsage=_NUMBER),
    },
    jobQueueStatus=_schema("remainingCapacity pendingRequests", remainingCapacity=_NUMBER, pendingRequests=_NUMBER),
    customizedMetadata={},
)
_SCHEMAS: Final[dict[Form, dict[str, Any]]] = {
    "error": _schema("code type message", code=_NUMBER),
    "status": _schema("status"),
    "page": _schema("models", "nextPageToken", models={"type": "array", "items": _schema("modelName modelUrl")}),
    "models": {"type": "array", "items": _MODEL},
    "ready": _schema("name ready", ready=_YES),
    "description": _schema("openapi info paths", info={"type": "object"}, paths={"type": "object"}),
    "object": {"type": "object"},
}
