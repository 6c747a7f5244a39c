"""The routes of TorchServe's management API: registers, scales, describes and unregisters models, makes tokens."""

from __future__ import annotations

from typing import Final

from penstock.serving.http.answers import MethodNotAllowed
from penstock.serving.http.template import HttpRequest
from penstock.torchserve.http.actions import Action, answer, authorization, done_answer
from penstock.torchserve.http.base import Administration, Face
from penstock.torchserve.protocol import admin
from penstock.torchserve.protocol.openapi import JSON, AnswerOf, Answers, Operation, Parameter
from penstock.types import ItemResult

NO_MODEL: Final[AnswerOf] = (404, "Model not found or Model version not found", "error")
BAD: Final[AnswerOf] = (400, "Bad request", "error")
CHANGED: Final[Answers] = (
    (200, "The change is made", "status"),
    (202, "The change goes on in the background", "status"),
    (206, "A part of the change is made", "status"),
)
IGNORED: Final = (
    Parameter("timeout", "Accepted, without effect", "integer"),
    Parameter("number_gpu", "Accepted, without effect", "integer"),
)

LIST: Final = Operation(
    "GET",
    "/models",
    "listModels",
    "Lists the registered models by name, with the archive of each one's default version.",
    (
        Parameter("limit", "Models of a page, from 1 to 100; anything else is 100", "integer", admin.PAGE),
        Parameter("next_page_token", "The nextPageToken of the page before", "integer", 0),
    ),
    answers=((200, "OK", "page"), BAD),
)
REGISTER: Final = Operation(
    "POST",
    "/models",
    "registerModel",
    "Registers a version of a model. A JSON body may say what the query says, under the same names.",
    (
        Parameter("url", "Name of an archive in the model store, or where to load one from", required=True),
        Parameter("model_name", "Name of the model, in place of that of the archive"),
        Parameter("handler", "Entry point, in place of that of the archive"),
        Parameter("runtime", "Runtime, in place of that of the archive", values=admin.RUNTIMES),
        Parameter("batch_size", "Largest batch", "integer", 1),
        Parameter("max_batch_delay", "Longest wait for a batch to fill, ms", "integer", 100),
        Parameter("initial_workers", "Workers to start", "integer", 0),
        Parameter("synchronous", "Whether to answer when the workers are up", "boolean", True),
        Parameter("response_timeout", "Longest run of a batch, s", "integer", 120),
        Parameter("startup_timeout", "Longest load of a worker, s", "integer", 120),
        Parameter("s3_sse_kms", "Whether the archive lies encrypted by KMS in S3", "boolean", False),
    ),
    takes="object",
    answers=(*CHANGED, BAD, (404, "Archive not found", "error"), (409, "Registered already", "error")),
)
DESCRIBE: Final = Operation(
    "GET",
    "/models/{model_name}",
    "describeModel",
    "Describes the default version of a model: settings, workers, queue.",
    (Parameter("customized", "Whether to ask the handler for a description, too", "boolean", False),),
    answers=((200, "OK", "models"), NO_MODEL, (503, "No worker can describe the model", "error")),
)
SCALE: Final = Operation(
    "PUT",
    "/models/{model_name}",
    "setAutoScale",
    "Sets the number of workers of the default version of a model.",
    (
        Parameter("min_worker", "Workers to run", "integer", 1),
        Parameter("max_worker", "Not less than min_worker, by default the same", "integer"),
        Parameter("model_version", "Version to scale, by default the default version"),
        Parameter("synchronous", "Whether to answer when the workers are up", "boolean", False),
        *IGNORED,
    ),
    answers=(*CHANGED, BAD, NO_MODEL),
)
UNREGISTER: Final = Operation(
    "DELETE",
    "/models/{model_name}",
    "unregisterModel",
    "Unregisters the default version of a model, if there is no other.",
    (Parameter("synchronous", "Accepted, without effect", "boolean"), IGNORED[0]),
    answers=(
        (200, "Unregistered", "status"),
        (403, "The default version cannot go while there are others", "error"),
        NO_MODEL,
        (408, "The workers did not end in time", "error"),
    ),
)
SET_DEFAULT: Final = Operation(
    "PUT",
    "/models/{model_name}/{model_version}/set-default",
    "setDefault",
    "Makes a version the one that is asked when a request names none.",
    answers=((200, "Set", "status"), NO_MODEL),
)
TRAFFIC: Final = Operation(
    "PUT",
    "/models/{model_name}/traffic",
    "setTraffic",
    "Shares the requests that name no version out to versions by weight: a JSON object of version to weight.",
    takes="object",
    answers=((200, "Shared out", "status"), BAD, NO_MODEL),
)
READY: Final = Operation(
    "GET",
    "/v1/models/{model_name}",
    "modelReady",
    "Tells whether the default version of a model has a worker.",
    answers=((200, "OK", "ready"), NO_MODEL),
)
TOKEN: Final = Operation(
    "GET",
    "/token",
    "newToken",
    "Makes a new key of an API and writes it to the key file; the key that is presented is that of the token API.",
    (Parameter("type", "The API whose key is made anew", required=True, values=("management", "inference")),),
    answers=((200, "Made; the answer is an empty line", "bytes"), BAD),
)


def management_actions(administration: Administration, face: Face) -> tuple[Action, ...]:
    """All routes that need the management key; the token's own route is `token_action`."""
    look, change = _Looking(administration), _Changing(administration)
    register = change.register if face.model_api else _not_allowed
    unregister = change.unregister if face.model_api else _not_allowed
    return (
        Action(LIST, look.list),
        Action(REGISTER, register),
        Action(DESCRIBE, look.describe),
        Action(SCALE, change.scale),
        Action(UNREGISTER, unregister),
        Action(TRAFFIC, change.traffic),  # before a version of this name
        Action(_of_version(DESCRIBE), look.describe),
        Action(_of_version(SCALE), change.scale),
        Action(_of_version(UNREGISTER), unregister),
        Action(SET_DEFAULT, change.set_default),
        Action(READY, look.ready),
    )


def token_action(administration: Administration) -> Action:
    """The route that makes keys: it takes a key of its own."""

    async def new_token(request: HttpRequest) -> ItemResult:
        administration.new_token(request.query.get("type", [""])[0], authorization(request))
        return ItemResult(body=b"\n", content_type=JSON)

    return Action(TOKEN, new_token)


def _of_version(operation: Operation) -> Operation:
    return Operation(
        operation.method,
        operation.path + "/{model_version}",
        f"version_{operation.id}",
        operation.description.replace("the default version", "a version").replace(", if there is no other", ""),
        tuple(parameter for parameter in operation.parameters if parameter.name != "model_version"),
        answers=operation.answers,
    )


async def _not_allowed(request: HttpRequest) -> ItemResult:
    raise MethodNotAllowed("changing models is off: enable_model_api")


def names(request: HttpRequest) -> tuple[str, str | None]:
    """Model and version of the path."""
    return request.names["model_name"], request.names.get("model_version")


class _Looking:
    """What changes nothing."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    async def list(self, request: HttpRequest) -> ItemResult:
        models, token = self._administration.models(*admin.read_page(request.query))
        found = [{"modelName": name, "modelUrl": url} for name, url in models]
        return answer({"nextPageToken": None if token is None else str(token), "models": found})

    async def describe(self, request: HttpRequest) -> ItemResult:
        model, version = names(request)
        customized = version != "all" and admin.read_customized(request.query)
        return answer(await self._administration.describe(model, version, customized=customized))

    async def ready(self, request: HttpRequest) -> ItemResult:
        model = names(request)[0].partition(":")[0]
        described = await self._administration.describe(model, None)
        ready = any(worker["status"] == "READY" for worker in described[0]["workers"])
        return answer({"name": model, "ready": ready})


class _Changing:
    """What changes the models."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    async def register(self, request: HttpRequest) -> ItemResult:
        registration = admin.read_registration(request.query, request.content_type, request.body)
        if registration.synchronous is None:
            registration.synchronous = True
        return done_answer(await self._administration.register(registration))

    async def scale(self, request: HttpRequest) -> ItemResult:
        model, version = names(request)
        scaling = admin.read_scaling(request.query)
        done = await self._administration.scale(
            model,
            version or scaling.version,
            min_worker=scaling.min_worker,
            max_worker=scaling.max_worker,
            synchronous=scaling.synchronous,
        )
        return done_answer(done)

    async def set_default(self, request: HttpRequest) -> ItemResult:
        model, version = request.names["model_name"], request.names["model_version"]
        return done_answer(await self._administration.set_default(model, version))

    async def traffic(self, request: HttpRequest) -> ItemResult:
        weights = admin.read_weights(request.body)
        return done_answer(await self._administration.set_traffic(request.names["model_name"], weights))

    async def unregister(self, request: HttpRequest) -> ItemResult:
        return done_answer(await self._administration.unregister(*names(request)))
