"""What TorchServe's HTTP and gRPC APIs share: types, errors, JSON and the OpenAPI description of a route. Pure.

Source: the endpoints, texts, status codes and responses of TorchServe 0.12.0.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from penstock.errors import PenstockError

Group = Literal["inference", "management", "metrics"]

MAX_SHOWN: Final = 100  # characters of a client's name that a message shows
STATUS_OF: Final = {
    "BadRequestException": 400,
    "ModelException": 400,
    "InvalidModelException": 400,
    "InvalidKeyException": 400,
    "DownloadArchiveException": 400,
    "InvalidDAGException": 400,
    "InvalidWorkflowException": 400,
    "IllegalArgumentException": 403,
    "InvalidModelVersionException": 403,
    "ResourceNotFoundException": 404,
    "ModelNotFoundException": 404,
    "ModelVersionNotFoundException": 404,
    "WorkflowNotFoundException": 404,
    "MethodNotAllowedException": 405,
    "RequestTimeoutException": 408,
    "ConflictStatusException": 409,
    "InternalServerException": 500,
    "WorkflowException": 500,
    "ServiceUnavailableException": 503,
}


class ApiError(PenstockError, code="torchserve"):
    """An error in TorchServe's terms: `kind` is the "type" in its JSON and determines the status."""

    status: int

    def __init__(self, kind: str, message: str, *, status: int | None = None, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.kind = kind
        self.status = STATUS_OF[kind] if status is None else status

    def __reduce__(self) -> tuple[object, ...]:
        return ApiError, (self.kind, self.message), {"status": self.status, "detail": self.detail}


def no_worker(model: str, version: str | None, detail: str = "") -> ApiError:
    """The error of a request that no worker can take: there are no workers, or the queue is full."""
    named = f'Model "{model}"' if version is None else f'Model "{model}" Version {version}'
    return ApiError(
        "ServiceUnavailableException",
        f"{named} has no worker to serve inference request. Please use scale workers API to add workers. If this is a"
        " sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize",
        detail=detail,
    )


class RegisterRequest(Struct, kw_only=True, omit_defaults=True):
    """The parameters of `POST /models`, from the query or the JSON body. None means not given."""

    url: str | None = None
    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None  # ms
    initial_workers: int | None = None
    synchronous: bool = True
    response_timeout: int | None = None  # s
    startup_timeout: int | None = None  # s
    s3_sse_kms: bool = False


class WorkflowRequest(Struct, kw_only=True, omit_defaults=True):
    """The parameters of `POST /workflows`, from the query or the JSON body. None means not given."""

    url: str | None = None
    workflow_name: str | None = None
    response_timeout: int | None = None  # s, of each node
    startup_timeout: int | None = None  # s, of each node
    s3_sse_kms: bool = False


class ChangeResult(Struct, frozen=True):
    """The result of a change: the text of `{"status": ...}`, and 200 (made), 202 (in progress) or 206 (partly made)."""

    message: str
    status: int = 200


# ---- JSON


def json_body(value: Any) -> bytes:
    """The value (plain objects or structs) as TorchServe writes it: indented by two, no nulls, a final newline."""
    return msgspec.json.format(msgspec.json.encode(_without_nulls(msgspec.to_builtins(value))), indent=2) + b"\n"


def json_text(value: Any) -> str:
    """The same JSON as TorchServe's gRPC API returns it: text without the final newline."""
    return json_body(value)[:-1].decode()


def page(kind: Literal["model", "workflow"], entries: Sequence[tuple[str, str]], limit: int, start: int) -> Any:
    """The object of `GET /models` or `GET /workflows`: the entries from `start`, and the next page's token."""
    end = start + limit
    found = [{f"{kind}Name": name, f"{kind}Url": url} for name, url in entries[start:end]]
    return {"nextPageToken": str(end) if end <= len(entries) else None, f"{kind}s": found}


def error_body(status: int, kind: str, message: str, *, kserve: bool = False) -> bytes:
    """The JSON body of an error, with `kserve` also in KServe's form, {"error": message}.

    Unpaired surrogates, which a client's JSON may contain, become "?".
    """
    text = message.encode("utf-8", "replace").decode()
    return json_body({"code": status, "type": kind, "message": text, "error": text if kserve else None})


def read_error(status: int, body: bytes) -> str | None:
    """The message of an `error_body` with this status; None for any other body."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found.message if found.code == status else None


class _ErrorBody(Struct, forbid_unknown_fields=True):
    code: int
    type: str
    message: str


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


# ---- OpenAPI

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
