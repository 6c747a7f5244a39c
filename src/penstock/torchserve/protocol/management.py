"""TorchServe's management API: its operations, and the values of their parameters. Pure.

An operation reads the parameters that it documents. As in TorchServe, the first value of a
repeated parameter counts, unknown parameters are ignored, and the default replaces a number that cannot be used; `warn`
receives a line about it. Other invalid values, and text or fractions where a JSON body has a number, raise ApiError,
which states what was found and what was expected.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.errors import BadRequest
from penstock.serving.protocols.bodies import decode_json, split_type
from penstock.torchserve.archive.manifest import RUNTIMES
from penstock.torchserve.protocol import api
from penstock.values import convert, found, shorten

Query = Mapping[str, list[str]]  # as urllib.parse.parse_qs gives it, blank values kept
Warn = Callable[[str], None]

MAX_INT: Final = 2**31 - 1  # the largest number that a client of TorchServe can send
PAGE_SIZE: Final = 100  # models on one page of the list: the default and the maximum

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # int() itself refuses more digits
_SHOWN: Final = 40  # characters of an invalid name that a message shows


# ---- operations

NO_MODEL: Final[api.OpenApiResponse] = (404, "Model not found or Model version not found", "error")
NO_WORKFLOW: Final[api.OpenApiResponse] = (404, "Workflow not found", "error")
BAD: Final[api.OpenApiResponse] = (400, "Bad request", "error")
REFUSED: Final[api.OpenApiResponses] = (BAD, (404, "Archive not found", "error"), (409, "Registered already", "error"))
CHANGED: Final[api.OpenApiResponses] = (
    (200, "The change is made", "status"),
    (202, "The change continues in the background", "status"),
    (206, "The change is partly made", "status"),
)
UNREGISTERED: Final[api.OpenApiResponse] = (200, "Unregistered", "status")
IGNORED: Final = tuple(api.QueryParameter(x, "Accepted, without effect", "integer") for x in ("timeout", "number_gpu"))
S3_KMS: Final = api.QueryParameter("s3_sse_kms", "Whether KMS encrypts the archive in S3", "boolean", False)


def _page_of(what: str) -> tuple[api.QueryParameter, ...]:
    limit = f"{what} per page, from 1 to {PAGE_SIZE}; other values mean {PAGE_SIZE}"
    return (
        api.QueryParameter("limit", limit, "integer", PAGE_SIZE, least=1),
        api.QueryParameter("next_page_token", "The nextPageToken of the previous page", "integer", 0, least=0),
    )


LIST: Final = api.Operation(
    "GET",
    "/models",
    "listModels",
    "Lists the registered models by name, with the archive of each default version.",
    _page_of("Models"),
    responses=((200, "OK", "page"), BAD),
)
REGISTER: Final = api.Operation(
    "POST",
    "/models",
    "registerModel",
    "Registers a version of a model. A JSON body takes the same parameters as the query.",
    (
        api.QueryParameter("url", "Name of an archive in the model store, or the URL of an archive", required=True),
        api.QueryParameter("model_name", "Name of the model, by default the archive's"),
        api.QueryParameter("handler", "Entry point, by default the archive's"),
        api.QueryParameter("runtime", "Runtime, by default the archive's", values=RUNTIMES),
        api.QueryParameter("batch_size", "Maximum batch size", "integer", 1, least=1),
        api.QueryParameter("max_batch_delay", "Maximum wait for a batch to fill, ms", "integer", 100, least=0),
        api.QueryParameter("initial_workers", "Workers to start", "integer", 0, least=0),
        api.QueryParameter("synchronous", "Whether to wait until the workers are ready", "boolean", True),
        api.QueryParameter("response_timeout", "Maximum run time of a batch, s", "integer", 120, least=1),
        api.QueryParameter("startup_timeout", "Maximum load time of a worker, s", "integer", 120, least=1),
        S3_KMS,
    ),
    body="object",
    responses=(*CHANGED, *REFUSED),
)
DESCRIBE: Final = api.Operation(
    "GET",
    "/models/{model_name}",
    "describeModel",
    "Describes the default version of a model: settings, workers, queue.",
    (api.QueryParameter("customized", "Whether to include the handler's own description", "boolean", False),),
    responses=((200, "OK", "models"), NO_MODEL, (503, "No worker can describe the model", "error")),
)
SCALE: Final = api.Operation(
    "PUT",
    "/models/{model_name}",
    "setAutoScale",
    "Sets the number of workers of the default version of a model.",
    (
        api.QueryParameter("min_worker", "Workers to run", "integer", 1, least=-MAX_INT),
        api.QueryParameter("max_worker", "At least min_worker, by default the same", "integer", least=-MAX_INT),
        api.QueryParameter("model_version", "Version to scale, by default the default version"),
        api.QueryParameter("synchronous", "Whether to wait until the workers are ready", "boolean", False),
        *IGNORED,
    ),
    responses=(*CHANGED, BAD, NO_MODEL),
)
UNREGISTER: Final = api.Operation(
    "DELETE",
    "/models/{model_name}",
    "unregisterModel",
    "Unregisters the default version of a model, if it is the only one.",
    (api.QueryParameter("synchronous", "Accepted, without effect", "boolean"), IGNORED[0]),
    responses=(
        UNREGISTERED,
        (403, "The default version cannot be removed while other versions exist", "error"),
        NO_MODEL,
        (408, "The workers did not end in time", "error"),
    ),
)
SET_DEFAULT: Final = api.Operation(
    "PUT",
    "/models/{model_name}/{model_version}/set-default",
    "setDefault",
    "Makes a version the default, which serves requests without a version.",
    responses=((200, "Set", "status"), NO_MODEL),
)
TRAFFIC: Final = api.Operation(
    "PUT",
    "/models/{model_name}/traffic",
    "setTraffic",
    "Splits requests without a version by weight: a JSON object of version to weight.",
    body="object",
    responses=((200, "Split", "status"), BAD, NO_MODEL),
)
TOKEN: Final = api.Operation(
    "GET",
    "/token",
    "newToken",
    "Creates a new key for an API and writes it to the key file. The request needs the key of the token API.",
    (api.QueryParameter("type", "The API whose key is replaced", required=True, values=("management", "inference")),),
    responses=((200, "Created; the body is an empty line", "bytes"), BAD),
)
LIST_WORKFLOWS: Final = api.Operation(
    "GET",
    "/workflows",
    "listWorkflows",
    "Lists the registered workflows by name, each with its archive.",
    _page_of("Workflows"),
    responses=((200, "OK", "object"), BAD),
)
REGISTER_WORKFLOW: Final = api.Operation(
    "POST",
    "/workflows",
    "registerWorkflow",
    "Registers a workflow and the models of its nodes. A JSON body takes the same parameters as the query.",
    (
        api.QueryParameter("url", "Name of an archive in the workflow store, or the URL of an archive", required=True),
        api.QueryParameter("workflow_name", "Name of the workflow, by default the archive's"),
        api.QueryParameter("response_timeout", "Maximum run time of a batch of any node, s", "integer", 120, least=1),
        api.QueryParameter("startup_timeout", "Maximum load time of a worker of any node, s", "integer", 120, least=1),
        S3_KMS,
    ),
    body="object",
    responses=((200, "Every node has its workers", "status"), *REFUSED),
)
DESCRIBE_WORKFLOW: Final = api.Operation(
    "GET",
    "/workflows/{workflow_name}",
    "describeWorkflow",
    "Describes a workflow: its default settings and its graph.",
    responses=((200, "OK", "object"), NO_WORKFLOW),
)
UNREGISTER_WORKFLOW: Final = api.Operation(
    "DELETE",
    "/workflows/{workflow_name}",
    "unregisterWorkflow",
    "Unregisters a workflow and the models of its nodes.",
    responses=(UNREGISTERED, NO_WORKFLOW),
)


def of_version(operation: api.Operation) -> api.Operation:
    """The operation for a path that names a version, made from the operation for the default version."""
    return api.Operation(
        operation.method,
        operation.path + "/{model_version}",
        f"version_{operation.id}",
        operation.description.replace("the default version", "a version").replace(", if it is the only one", ""),
        tuple(parameter for parameter in operation.parameters if parameter.name != "model_version"),
        responses=operation.responses,
    )


# ---- parameters


def read_query(operation: api.Operation, query: Query, warn: Warn) -> dict[str, Any]:
    """The operation's parameters: a number or text that is missing is None, a boolean its default."""
    return _read(operation, {name: values[0] for name, values in query.items() if values}, warn)


def read_request(
    operation: api.Operation, query: Query, content_type: str, body: bytes | memoryview, warn: Warn
) -> dict[str, Any]:
    """The operation's parameters, from its JSON body if it has one, else from its query."""
    if len(body) and split_type(content_type)[0] == "application/json":
        return _read(operation, _object(body, '{"url": "archive"}'), warn, strict=True)
    return read_query(operation, query, warn)


def read_registration(query: Query, content_type: str, body: bytes | memoryview, warn: Warn) -> api.RegisterRequest:
    """The parameters of `POST /models`."""
    return check_registration(api.RegisterRequest(**read_request(REGISTER, query, content_type, body, warn)))


def read_workflow(query: Query, content_type: str, body: bytes | memoryview, warn: Warn) -> api.WorkflowRequest:
    """The parameters of `POST /workflows`."""
    return api.WorkflowRequest(**read_request(REGISTER_WORKFLOW, query, content_type, body, warn))


def check_registration(registration: api.RegisterRequest) -> api.RegisterRequest:
    """The registration, unchanged. Raises ApiError if it has no URL or an unknown runtime."""
    if registration.url is None:
        raise _bad_request("Parameter url is required.")
    if registration.runtime is not None and registration.runtime not in RUNTIMES:
        raise _bad_request(f"Invalid RuntimeType value: {registration.runtime[:_SHOWN]}")
    return registration


def read_scaling(query: Query, warn: Warn) -> dict[str, Any]:
    """The parameters of `PUT /models/{m}[/{ver}]`, as arguments of `Administrator.scale`.

    `version` serves paths without a version.
    """
    given = read_query(SCALE, query, warn)
    if (given["min_worker"] or 0) < 0:
        raise _invalid("min_worker", given["min_worker"], f"a whole number from 0 to {MAX_INT}")
    return {"version": given.pop("model_version"), **given}


def read_page(query: Query, warn: Warn) -> tuple[int, int]:
    """(page size, index of the first model) of `GET /models`. The largest page has 100 models."""
    given = read_query(LIST, query, warn)
    return min(given["limit"] or PAGE_SIZE, PAGE_SIZE), given["next_page_token"] or 0


def read_weights(body: bytes | memoryview) -> dict[str, float]:
    """{version: weight} of `PUT /models/{m}/traffic`: numbers from 0, at least one above 0."""
    example = '{"1.0": 9, "2.0": 1}'
    weights: dict[str, float] = {}
    for version, weight in _object(body, example).items():
        where = f"the weight of version '{shorten(version)}'"
        weights[version] = convert(weight, Annotated[float, Meta(ge=0, le=MAX_INT)], where, error=_bad_request)
    if not math.fsum(weights.values()) > 0.0:
        raise _bad_request(f"no version has a weight above 0; expected an object such as {example}")
    return weights


def unknown_parameters(operation: api.Operation, query: Query) -> list[str]:
    """The parameters without effect, for the log: at most ten, truncated."""
    known = [parameter.name for parameter in operation.parameters]
    return [name[:_SHOWN] for name in query if name not in known][:10]


# ---- values

_bad_request = partial(api.ApiError, "BadRequestException")


def _read(operation: api.Operation, values: Mapping[str, Any], warn: Warn, *, strict: bool = False) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for parameter in operation.parameters:
        name, value = parameter.name, values.get(parameter.name)
        if parameter.kind == "boolean":
            read[name] = parameter.default if value is None else _boolean(name, value)
        elif parameter.kind == "string":  # an empty URL is an archive that does not exist
            text = value if isinstance(value, str | None) else convert(value, str, name, error=_bad_request)
            read[name] = text if parameter.required else text or None
        elif parameter.least is not None:
            read[name] = None if value is None else _integer(name, value, parameter.least, warn, strict)
    return read


def _object(body: bytes | memoryview, example: str) -> dict[str, Any]:
    try:
        value = decode_json(body)
    except BadRequest as exc:
        raise _bad_request(f"{exc.message}; expected an object such as {example}") from None
    if not isinstance(value, dict):
        raise _bad_request(f"the JSON body: found {found(value)}, expected an object such as {example}")
    return value


def _boolean(name: str, value: Any) -> bool:
    """TorchServe's rule: "true" in any case is true, every other word is false."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise _invalid(name, value, "true or false")
    return value.lower() == "true"


def _integer(name: str, value: Any, least: int, warn: Warn, strict: bool) -> int | None:
    """The integer; None, the default, if it cannot be used. Negative numbers are 0 if 0 is valid.

    With `strict`, raises ApiError for anything that is not a whole number of 32 bits.
    """
    number = _whole(value)
    if number is not None and least <= number <= MAX_INT:
        return number
    expected = f"a whole number from {least} to {MAX_INT}"
    small = number is not None and -MAX_INT <= number < least
    if strict and not small:
        raise _invalid(name, value, expected)
    used = 0 if small and least == 0 else None
    instead = "the default" if used is None else used
    warn(f"parameter={name} found={found(value)} expected={expected} used={instead}")
    return used


def _whole(value: Any) -> int | None:
    """The integer in a JSON value or a text; None if there is none."""
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():  # from clients whose language has one number type
        return int(value)
    return None


def _invalid(name: str, value: Any, expected: str) -> api.ApiError:
    return _bad_request(f"{name}: found {found(value)}, expected {expected}")
