"""TorchServe's gRPC services: their names and messages, the status and text of every error, and a model's responses."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from penstock.core.contracts import Backend, Ticket
from penstock.errors import PenstockError, QueueFull
from penstock.serving import protocols
from penstock.serving.grpc.dispatch import HEALTH as HEALTH
from penstock.serving.grpc.messages import Code, GrpcError, code_of, parts_of
from penstock.serving.http.listener import Listener
from penstock.serving.http.responses import log_failure
from penstock.serving.protocols.oip_grpc import ProtoSet
from penstock.torchserve.http.flavor import api_error
from penstock.torchserve.protocol.api import ApiError, read_error
from penstock.types import Item, ItemResult, Sink

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
OPEN_INFERENCE: Final = "org.pytorch.serve.grpc.openinference"
STANDARD: Final = "inference.GRPCInferenceService"  # its messages have the same fields
PROTOS: Final = ProtoSet(__package__, protocols.__name__)
message_class = PROTOS.message
service_descriptor = PROTOS.service

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


def log_5xx(model: str, version: str | None, request_id: str, status: int, error: PenstockError) -> None:
    """Logs a failure of the server, as HTTP does."""
    if status >= 500:
        log_failure((model, version), request_id, status, error)


# ---- requests to a model


def model_of(name: str, version: str, parameter: str = "model_name") -> tuple[str, str | None]:
    """Model and version of a request. Raises GrpcError for a request without a model."""
    if not name:
        raise GrpcError(Code.INTERNAL, f"Parameter {parameter} is required.\nBadRequestException.()")
    return name, version or None


async def response_parts(
    listener: Listener, model: str, version: str | None, item: Item
) -> AsyncGenerator[bytes, None]:
    """The parts of the response, one or more. Raises GrpcError. If the caller leaves, the request is cancelled."""
    backend = listener.backend

    def submit(sink: Sink) -> Ticket:
        try:
            return backend.submit(model, version, item, sink)
        except PenstockError as error:
            found = api_error(error, backend, model, version)
            log_5xx(model, version, item.request_id, found.status, error)
            raise submit_error(found) from error

    try:
        async with aclosing(parts_of(submit, listener.budget)) as results:
            async for result in results:
                yield _body(result, backend, model, version, item)
    except QueueFull as error:
        raise prediction_error(429, error.message) from error


async def whole_response(listener: Listener, model: str, version: str | None, item: Item) -> bytes:
    """The response with its parts joined. Raises GrpcError."""
    return b"".join([part async for part in response_parts(listener, model, version, item)])


def _body(result: ItemResult, backend: Backend, model: str, version: str | None, item: Item) -> bytes:
    """The body of a part. gRPC ignores a status that the handler set, but not an error that it raised with a status."""
    body: bytes = result.body
    if result.error is not None:
        found = api_error(result.error, backend, model, version)
        error, status, message = result.error, found.status, found.message
    else:
        read = read_error(result.status, body) if result.status >= 400 else None
        if read is None:
            return body
        error, status, message = PenstockError(read), result.status, read
    log_5xx(model, version, item.request_id, status, error)
    raise prediction_error(status, message) from result.error
