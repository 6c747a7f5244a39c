"""The routes of TorchServe's management API: list, register, describe, scale and unregister models, renew tokens."""

import logging
from typing import Final

from penstock.serving.http.responses import MethodNotAllowed
from penstock.serving.protocols.route import HttpRequest
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.archive.manifest import RUNTIMES
from penstock.torchserve.config.properties import ListenerConfig
from penstock.torchserve.http.routes import MODEL_READY, Action, change_result, is_ready, json_result
from penstock.torchserve.protocol.api import model_page
from penstock.torchserve.protocol.management import (
    PAGE_SIZE,
    read_customized,
    read_page,
    read_registration,
    read_scaling,
    read_weights,
)
from penstock.torchserve.protocol.openapi import JSON, OpenApiResponse, OpenApiResponses, Operation, QueryParameter
from penstock.types import ItemResult

log = logging.getLogger("penstock.frontends")

NO_MODEL: Final[OpenApiResponse] = (404, "Model not found or Model version not found", "error")
BAD: Final[OpenApiResponse] = (400, "Bad request", "error")
CHANGED: Final[OpenApiResponses] = (
    (200, "The change is made", "status"),
    (202, "The change continues in the background", "status"),
    (206, "The change is partly made", "status"),
)
IGNORED: Final = (
    QueryParameter("timeout", "Accepted, without effect", "integer"),
    QueryParameter("number_gpu", "Accepted, without effect", "integer"),
)

LIST: Final = Operation(
    "GET",
    "/models",
    "listModels",
    "Lists the registered models by name, with the archive of each default version.",
    (
        QueryParameter("limit", "Models per page, from 1 to 100; other values mean 100", "integer", PAGE_SIZE),
        QueryParameter("next_page_token", "The nextPageToken of the previous page", "integer", 0),
    ),
    responses=((200, "OK", "page"), BAD),
)
REGISTER: Final = Operation(
    "POST",
    "/models",
    "registerModel",
    "Registers a version of a model. A JSON body takes the same parameters as the query.",
    (
        QueryParameter("url", "Name of an archive in the model store, or the URL of an archive", required=True),
        QueryParameter("model_name", "Name of the model, by default the archive's"),
        QueryParameter("handler", "Entry point, by default the archive's"),
        QueryParameter("runtime", "Runtime, by default the archive's", values=RUNTIMES),
        QueryParameter("batch_size", "Maximum batch size", "integer", 1),
        QueryParameter("max_batch_delay", "Maximum wait for a batch to fill, ms", "integer", 100),
        QueryParameter("initial_workers", "Workers to start", "integer", 0),
        QueryParameter("synchronous", "Whether to wait until the workers are ready", "boolean", True),
        QueryParameter("response_timeout", "Maximum run time of a batch, s", "integer", 120),
        QueryParameter("startup_timeout", "Maximum load time of a worker, s", "integer", 120),
        QueryParameter("s3_sse_kms", "Whether KMS encrypts the archive in S3", "boolean", False),
    ),
    body="object",
    responses=(*CHANGED, BAD, (404, "Archive not found", "error"), (409, "Registered already", "error")),
)
DESCRIBE: Final = Operation(
    "GET",
    "/models/{model_name}",
    "describeModel",
    "Describes the default version of a model: settings, workers, queue.",
    (QueryParameter("customized", "Whether to include the handler's own description", "boolean", False),),
    responses=((200, "OK", "models"), NO_MODEL, (503, "No worker can describe the model", "error")),
)
SCALE: Final = Operation(
    "PUT",
    "/models/{model_name}",
    "setAutoScale",
    "Sets the number of workers of the default version of a model.",
    (
        QueryParameter("min_worker", "Workers to run", "integer", 1),
        QueryParameter("max_worker", "At least min_worker, by default the same", "integer"),
        QueryParameter("model_version", "Version to scale, by default the default version"),
        QueryParameter("synchronous", "Whether to wait until the workers are ready", "boolean", False),
        *IGNORED,
    ),
    responses=(*CHANGED, BAD, NO_MODEL),
)
UNREGISTER: Final = Operation(
    "DELETE",
    "/models/{model_name}",
    "unregisterModel",
    "Unregisters the default version of a model, if it is the only one.",
    (QueryParameter("synchronous", "Accepted, without effect", "boolean"), IGNORED[0]),
    responses=(
        (200, "Unregistered", "status"),
        (403, "The default version cannot be removed while other versions exist", "error"),
        NO_MODEL,
        (408, "The workers did not end in time", "error"),
    ),
)
SET_DEFAULT: Final = Operation(
    "PUT",
    "/models/{model_name}/{model_version}/set-default",
    "setDefault",
    "Makes a version the default, which serves requests without a version.",
    responses=((200, "Set", "status"), NO_MODEL),
)
TRAFFIC: Final = Operation(
    "PUT",
    "/models/{model_name}/traffic",
    "setTraffic",
    "Splits requests without a version by weight: a JSON object of version to weight.",
    body="object",
    responses=((200, "Split", "status"), BAD, NO_MODEL),
)
READY: Final = Operation(
    "GET",
    "/v1/models/{model_name}",
    "modelReady",
    MODEL_READY,
    responses=((200, "OK", "ready"), NO_MODEL),
)
TOKEN: Final = Operation(
    "GET",
    "/token",
    "newToken",
    "Creates a new key for an API and writes it to the key file. The request needs the key of the token API.",
    (QueryParameter("type", "The API whose key is replaced", required=True, values=("management", "inference")),),
    responses=((200, "Created; the body is an empty line", "bytes"), BAD),
)


def management_actions(administration: Administrator, config: ListenerConfig) -> tuple[Action, ...]:
    """All routes that need the management key; `token_action` is the route with a key of its own."""
    api = _ManagementApi(administration)
    register = api.register if config.properties.enable_model_api else not_allowed
    unregister = api.unregister if config.properties.enable_model_api else not_allowed
    return (
        Action(LIST, api.list),
        Action(REGISTER, register),
        Action(DESCRIBE, api.describe),
        Action(SCALE, api.scale),
        Action(UNREGISTER, unregister),
        Action(TRAFFIC, api.traffic),  # matches before a version named "traffic"
        Action(_of_version(DESCRIBE), api.describe),
        Action(_of_version(SCALE), api.scale),
        Action(_of_version(UNREGISTER), unregister),
        Action(SET_DEFAULT, api.set_default),
        Action(READY, api.ready),
    )


def token_action(administration: Administrator) -> Action:
    """The route that renews keys, authorized by the API key."""

    async def new_token(request: HttpRequest) -> ItemResult:
        authorization = next((value for name, value in request.headers if name.lower() == b"authorization"), None)
        administration.new_token(request.query.get("type", [""])[0], authorization)
        return ItemResult(body=b"\n", content_type=JSON)

    return Action(TOKEN, new_token)


def _of_version(operation: Operation) -> Operation:
    return Operation(
        operation.method,
        operation.path + "/{model_version}",
        f"version_{operation.id}",
        operation.description.replace("the default version", "a version").replace(", if it is the only one", ""),
        tuple(parameter for parameter in operation.parameters if parameter.name != "model_version"),
        responses=operation.responses,
    )


async def not_allowed(request: HttpRequest) -> ItemResult:
    raise MethodNotAllowed("changing models and workflows is off: enable_model_api")


def _warn(replaced: str) -> None:
    log.warning("event=number_replaced %s", replaced)


def names(request: HttpRequest) -> tuple[str, str | None]:
    return request.names["model_name"], request.names.get("model_version")


class _ManagementApi:
    def __init__(self, administration: Administrator) -> None:
        self._administration = administration

    async def list(self, request: HttpRequest) -> ItemResult:
        return json_result(model_page(*self._administration.models(*read_page(request.query, _warn))))

    async def describe(self, request: HttpRequest) -> ItemResult:
        model, version = names(request)
        customized = version != "all" and read_customized(request.query)
        return json_result(await self._administration.describe(model, version, customized=customized))

    async def ready(self, request: HttpRequest) -> ItemResult:
        model = names(request)[0].partition(":")[0]
        return json_result({"name": model, "ready": await is_ready(self._administration, model)})

    async def register(self, request: HttpRequest) -> ItemResult:
        registration = read_registration(request.query, request.content_type, request.body, _warn)
        if registration.synchronous is None:
            registration.synchronous = True
        return change_result(await self._administration.register(registration))

    async def scale(self, request: HttpRequest) -> ItemResult:
        model, version = names(request)
        scaling = read_scaling(request.query, _warn)
        if version:
            scaling["version"] = version
        return change_result(await self._administration.scale(model, **scaling))

    async def set_default(self, request: HttpRequest) -> ItemResult:
        model, version = request.names["model_name"], request.names["model_version"]
        return change_result(await self._administration.set_default(model, version))

    async def traffic(self, request: HttpRequest) -> ItemResult:
        weights = read_weights(request.body)
        return change_result(await self._administration.set_traffic(request.names["model_name"], weights))

    async def unregister(self, request: HttpRequest) -> ItemResult:
        return change_result(await self._administration.unregister(*names(request)))
