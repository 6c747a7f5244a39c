"""TorchServe's gRPC services: names and messages, the status and text of every error, the calls, and their listener.

A client's metadata and deadline do not reach the handler. A request whose client left before it began is not run.
"""

import base64
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from penstock import tracing
from penstock.core.contracts import Backend, Ticket
from penstock.errors import BadOutput, BadRequest, PenstockError, QueueFull
from penstock.serving import protocols
from penstock.serving.grpc.call import GrpcCall
from penstock.serving.grpc.dispatch import HEALTH as HEALTH
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService, HealthService, ReflectionService
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.serving.grpc.messages import Code, GrpcError, code_of, parts_of
from penstock.serving.http.responses import log_failure
from penstock.serving.protocols.oip_grpc import CONTENTS
from penstock.serving.protocols.oip_messages import unsupported
from penstock.serving.protocols.oip_protobuf import ProtoSet
from penstock.serving.protocols.oip_tensors import check_form, from_bytes
from penstock.torchserve import sequence_headers
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config import ListenerConfig
from penstock.torchserve.http.flavor import api_error, new_id
from penstock.torchserve.protocol.api import ApiError, ChangeResult, Group, RegisterRequest, json_text, page, read_error
from penstock.torchserve.protocol.management import PAGE_SIZE, check_registration
from penstock.types import Item, ItemResult, Sink

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
OPEN_INFERENCE: Final = "org.pytorch.serve.grpc.openinference"
STANDARD: Final = "inference.GRPCInferenceService"  # its messages have the same fields
PROTOS: Final = ProtoSet(__package__, protocols.__name__)
message_class = PROTOS.message
service_descriptor = PROTOS.service

CODEC: Final = "torchserve_inputs"

_Prediction: Final = message_class(f"{INFERENCE}.PredictionResponse")
_Status: Final = message_class("google.rpc.Status")
_Ping: Final = message_class(f"{INFERENCE}.TorchServeHealthResponse")
_Live: Final = message_class(f"{OPEN_INFERENCE}.ServerLiveResponse")
_Ready: Final = message_class(f"{OPEN_INFERENCE}.ServerReadyResponse")
_ModelReady: Final = message_class(f"{OPEN_INFERENCE}.ModelReadyResponse")
_Metadata: Final = message_class(f"{OPEN_INFERENCE}.ModelMetadataResponse")
_Infer: Final = message_class(f"{OPEN_INFERENCE}.ModelInferResponse")
_encode = msgspec.msgpack.Encoder().encode
_HTTP: Final = "org.pytorch.serve.http."
_MODEL: Final = "org.pytorch.serve.archive.model."
_JAVA_CLASSES: Final = {
    "DownloadArchiveException": "org.pytorch.serve.archive.DownloadArchiveException",
    "IllegalArgumentException": "java.lang.IllegalArgumentException",
    "InvalidKeyException": _MODEL + "InvalidKeyException",
    "InvalidModelException": _MODEL + "InvalidModelException",
    "ModelException": _MODEL + "ModelException",
    "ModelNotFoundException": _MODEL + "ModelNotFoundException",
    "ModelVersionNotFoundException": _MODEL + "ModelVersionNotFoundException",
}  # all other kinds are in _HTTP
_UNKNOWN: Final = ("ModelNotFoundException", "ModelVersionNotFoundException")
DISABLED: Final = GrpcError(Code.PERMISSION_DENIED, f"Model API disabled\n{_MODEL}ModelException")


# ---- errors


def management_error(error: ApiError) -> GrpcError:
    """The error of a management call, or of a call that asks about a model."""
    return GrpcError(code_of(error.status), f"{error.message}\n{_JAVA_CLASSES.get(error.kind, _HTTP + error.kind)}")


def submit_error(error: ApiError) -> GrpcError:
    """The error of a prediction that never reached a worker: always INTERNAL."""
    name = _JAVA_CLASSES[error.kind] if error.kind in _UNKNOWN else "InternalServerException.()"
    return GrpcError(Code.INTERNAL, f"{error.message}\n{name}")


def prediction_error(status: int, message: str) -> GrpcError:
    """The error of a prediction that reached a worker: always of one Java class."""
    return GrpcError(code_of(status), f"{message}\n{_HTTP}InternalServerException")


def log_5xx(model: str, version: str | None, item: Item, status: int, error: PenstockError) -> None:
    """Logs a failure of the server, as HTTP does."""
    if status >= 500:
        log_failure((model, version), item.request_id, status, error, item.trace)


# ---- requests to a model


def model_of(name: str, version: str, parameter: str = "model_name") -> tuple[str, str | None]:
    """Model and version of a request. Raises GrpcError for a request without a model."""
    if not name:
        raise GrpcError(Code.INTERNAL, f"Parameter {parameter} is required.\nBadRequestException.()")
    return name, version or None


async def response_parts(call: GrpcCall, model: str, version: str | None, item: Item) -> AsyncGenerator[bytes, None]:
    """The parts of the response, one or more. Raises GrpcError. If the caller leaves, the request is cancelled."""
    listener = call.owner.listener
    if tracing.tracer is not None:
        item.source = call

    def submit(sink: Sink) -> Ticket:
        try:
            return listener.backend.submit(model, version, item, sink)
        except PenstockError as error:
            found = api_error(error, model, version)
            log_5xx(model, version, item, found.status, error)
            raise submit_error(found) from error

    try:
        async with aclosing(parts_of(submit, listener.budget)) as results:
            async for result in results:
                yield _body(result, model, version, item)
    except QueueFull as error:
        raise prediction_error(429, error.message) from error


async def whole_response(call: GrpcCall, model: str, version: str | None, item: Item) -> bytes:
    """The response with its parts joined. Raises GrpcError."""
    return b"".join([part async for part in response_parts(call, model, version, item)])


def _body(result: ItemResult, model: str, version: str | None, item: Item) -> bytes:
    """The body of a part. gRPC ignores a status that the handler set, but not an error that it raised with a status."""
    body: bytes = result.body
    if result.error is not None:
        found = api_error(result.error, model, version)
        error, status, message = result.error, found.status, found.message
    else:
        read = read_error(result.status, body) if result.status >= 400 else None
        if read is None:
            return body
        error, status, message = PenstockError(read), result.status, read
    log_5xx(model, version, item, status, error)
    raise prediction_error(status, message) from result.error


# ---- services


class InferenceService:
    """TorchServe's inference service. Methods have the names of the calls."""

    NAME: Final = f"{INFERENCE}.InferenceAPIsService"

    def __init__(self, administration: Administrator) -> None:
        self._administration = administration

    async def Ping(self, request: Any, context: Any) -> Any:
        status = "Healthy" if self._administration.healthy() else "Unhealthy"
        return _Ping(health=json_text({"status": status}))

    async def Predictions(self, request: Any, context: Any) -> Any:
        """The whole response, also of a handler that sends parts."""
        return _Prediction(prediction=await whole_response(context, *_submission(request)))

    async def StreamPredictions(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """One message per part that the handler sends."""
        async with aclosing(response_parts(context, *_submission(request))) as parts:
            async for part in parts:
                yield _Prediction(prediction=part)

    async def StreamPredictions2(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """One message per part of each response, in the order of the requests. A failed request ends with a status in a
        message; the call goes on. Requests without a sequence share one that the server names."""
        id_name, start_name, _ = sequence_headers()
        own = ""
        async for request in requests:
            if isinstance(request, GrpcError):
                raise request
            headers = []
            if not request.sequence_id and not own:
                own = f"ts-seq-{new_id()}"
                headers.append((start_name, b"true"))
            id = request.sequence_id or own
            model, version, item = _submission(request)
            item.headers = [(id_name, id.encode()), *headers]
            try:
                async with aclosing(response_parts(context, model, version, item)) as parts:
                    async for part in parts:
                        yield _Prediction(prediction=part, sequence_id=id)
            except GrpcError as error:
                status = _Status(code=int(error.code), message=error.details.partition("\n")[0])
                yield _Prediction(sequence_id=id, status=status)


def _submission(request: Any) -> tuple[str, str | None, Item]:
    """(model, version, item) of a prediction request."""
    item = Item(_encode(dict(request.input)), CODEC, request_id=new_id())
    return (*model_of(request.model_name, request.model_version), item)


class _Output(Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class _HandlerResponse(Struct):
    id: str | int
    model_name: str
    model_version: str | int
    outputs: list[_Output]


class OpenInferenceService:
    """The Open Inference service. The handler gets and returns the JSON of KServe V2, in which input of type BYTES is
    Base64. ServerMetadata is not served.

    `codec` is the HTTP listener's: both decode JSON alike. With `quoted`, output of type BYTES has quotes, as in
    TorchServe.
    """

    NAME: Final = f"{OPEN_INFERENCE}.GRPCInferenceService"

    def __init__(self, backend: Backend, administration: Administrator, codec: str, *, quoted: bool = True) -> None:
        self._backend = backend
        self._administration = administration
        self._codec = codec
        self._quoted = quoted

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return _Live(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Always ready, whatever the state of the models."""
        return _Ready(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return _ModelReady(ready=self._is_ready(*model_of(request.name, request.version, "name")))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        name, version = model_of(request.name, request.version)
        self._is_ready(name, version)  # raises for an unknown model or version
        described = await self._administration.describe(name, "all")
        return _Metadata(name=name, versions=[each["modelVersion"] for each in described])

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """The handler returns `{"id", "model_name", "model_version", "outputs"}`."""
        model, version = model_of(request.model_name, request.model_version)
        for holder in (request, *request.inputs, *request.outputs):
            for error in filter(None, map(unsupported, holder.parameters)):
                raise GrpcError(Code.INVALID_ARGUMENT, error.message)
        given = {"id": request.id, "model_name": model, "inputs": _inputs(request)}
        item = Item(json.dumps(given).encode(), self._codec, "application/json", request_id=new_id())
        body = await whole_response(context, model, version, item)
        try:
            return _infer_response(body, self._quoted)
        except BadOutput as error:
            log_5xx(model, version, item, 500, error)
            raise prediction_error(500, error.message) from error

    def _is_ready(self, name: str, version: str | None) -> bool:
        try:
            return self._backend.model_ready(name, version)
        except PenstockError as error:
            raise management_error(api_error(error, name, version)) from error


def _inputs(request: Any) -> list[dict[str, Any]]:
    """The inputs as KServe's V2 JSON. Raises BadRequest."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(f"found {len(raw)} raw_input_contents, expected one for each of {len(request.inputs)} inputs")
    found = []
    for i, tensor in enumerate(request.inputs):
        each = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
        values = _raw_values(tensor, raw[i]) if raw else _typed_values(tensor)
        if values is not None:
            is_bytes = tensor.datatype == "BYTES"
            each["data"] = [base64.b64encode(v).decode() for v in values] if is_bytes else list(values)
        found.append(each)
    return found


def _typed_values(tensor: Any) -> Any:
    field = CONTENTS.get(tensor.datatype)
    return None if field is None else getattr(tensor.contents, field)


def _raw_values(tensor: Any, data: bytes) -> Any:
    """Raises BadRequest."""
    name = f"input '{tensor.name[:100]}'"
    if tensor.HasField("contents"):
        raise BadRequest(f"{name} has contents, and the request raw_input_contents; send one of them")
    shape = list(tensor.shape)
    check_form(name, tensor.datatype, shape, BadRequest)
    return from_bytes(name, tensor.datatype, shape, memoryview(data)).ravel().tolist()


def _infer_response(body: bytes, quoted: bool) -> Any:
    """Raises BadOutput."""
    try:
        given = msgspec.convert(json.loads(body), _HandlerResponse)
        response = _Infer(id=str(given.id), model_name=given.model_name, model_version=str(given.model_version))
        for output in given.outputs:
            tensor = response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
            values = output.data
            if output.datatype == "BYTES":
                plain = not quoted and all(isinstance(value, str) for value in values)
                values = [(value if plain else json.dumps(value)).encode() for value in values]
            getattr(tensor.contents, CONTENTS[output.datatype]).extend(values)
            tensor.contents.SetInParent()
        return response
    except (ValueError, TypeError, RecursionError, KeyError, msgspec.ValidationError) as error:
        text = f"the handler's response is not an Open Inference response: {type(error).__name__}: {str(error)[:200]}"
        raise BadOutput(text) from error


# ---- management and the listener

GATED: Final = frozenset({"RegisterModel", "UnregisterModel"})  # need enable_model_api

_Response: Final = message_class(f"{MANAGEMENT}.ManagementResponse")


class ManagementService:
    """Methods have the names of the calls. A number that is not above 0 means not given."""

    NAME: Final = f"{MANAGEMENT}.ManagementAPIsService"

    def __init__(self, administration: Administrator) -> None:
        self._administration = administration

    async def DescribeModel(self, request: Any, context: Any) -> Any:
        """The JSON of `GET /models/{m}[/{version}|/all]`."""
        version = request.model_version or None
        customized = request.customized and version != "all"
        described = await self._administration.describe(request.model_name, version, customized=customized)
        return _Response(msg=json_text(described))

    async def ListModels(self, request: Any, context: Any) -> Any:
        """The JSON of `GET /models`."""
        limit = request.limit if 1 <= request.limit <= PAGE_SIZE else PAGE_SIZE
        found = page("model", self._administration.models(), limit, max(request.next_page_token, 0))
        return _Response(msg=json_text(found))

    async def RegisterModel(self, request: Any, context: Any) -> Any:
        """Returns before the workers are up, unless `synchronous` is set."""
        sent = {name: getattr(request, name) for name in RegisterRequest.__struct_fields__}
        given = {k: v for k, v in sent.items() if isinstance(v, bool) or (v if isinstance(v, str) else v > 0)}
        return _changed(await self._administration.register(check_registration(RegisterRequest(**given))))

    async def ScaleWorker(self, request: Any, context: Any) -> Any:
        """Cannot scale to zero workers: 0 means the default, 1."""
        change = await self._administration.scale(
            request.model_name,
            request.model_version or None,
            min_worker=max(request.min_worker, 0) or None,
            max_worker=max(request.max_worker, 0) or None,
            synchronous=request.synchronous,
        )
        return _changed(change)

    async def SetDefault(self, request: Any, context: Any) -> Any:
        return _changed(await self._administration.set_default(request.model_name, request.model_version))

    async def UnregisterModel(self, request: Any, context: Any) -> Any:
        if not request.model_name:
            raise ApiError("BadRequestException", "Parameter url is required.")
        return _changed(await self._administration.unregister(request.model_name, request.model_version or None))


def _changed(change: ChangeResult) -> Any:
    return _Response(msg=change.message)


def make_grpc_listener(
    backend: Backend,
    administration: Administrator,
    config: ListenerConfig,
    limits: GrpcLimits,
    tls: ssl.SSLContext | None = None,
) -> GrpcListener:
    """The services of the groups of `config`, with reflection."""

    def authorize(guard: str, authorization: bytes | None) -> None:
        try:
            administration.check_token(cast(Group, guard), authorization)
        except ApiError as error:
            raise GrpcError(Code.PERMISSION_DENIED, error.message) from None

    def failure(error: PenstockError) -> GrpcError:
        found = api_error(error)
        log_5xx("", None, Item(None), found.status, error)
        return management_error(found)

    services = _services(backend, administration, config)
    dispatcher = CallDispatcher(PROTOS, services, authorize, failure)
    return GrpcListener(backend, dispatcher, limits, tls)


def _services(backend: Backend, administration: Administrator, config: ListenerConfig) -> list[GrpcService]:
    services = []
    if "inference" in config.groups:
        services.append(GrpcService(InferenceService.NAME, [InferenceService(administration)], "inference"))
        if config.properties.ts_open_inference_protocol:
            for name in (OpenInferenceService.NAME, STANDARD):
                quoted = name != STANDARD
                open_inference = OpenInferenceService(backend, administration, config.codec, quoted=quoted)
                services.append(GrpcService(name, [open_inference], "inference"))
    if "management" in config.groups:
        refused = {} if config.properties.enable_model_api else dict.fromkeys(GATED, DISABLED)
        management = ManagementService(administration)
        services.append(GrpcService(ManagementService.NAME, [management], "management", refused=refused))
    names = [service.name for service in services]
    health = GrpcService(HealthService.NAME, [HealthService(PROTOS, names, administration.healthy)])
    reflection = ReflectionService(PROTOS, [*names, HealthService.NAME])
    return [*services, health, GrpcService(ReflectionService.NAME, [reflection])]
