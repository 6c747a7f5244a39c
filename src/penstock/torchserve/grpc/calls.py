"""gRPC calls to a model: the parts of an answer, and the status and text of every error."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

import grpc

from penstock.core.contracts import Backend
from penstock.errors import PenstockError, QueueFull
from penstock.serving.http.responses import log_failure
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.protocol.api import ApiError, read_error
from penstock.types import Item, ItemResult

Code = grpc.StatusCode

UNREAD_BYTES: Final = 16 * 2**20  # parts of an answer that wait for a slow client

_CODES: Final = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    413: Code.RESOURCE_EXHAUSTED,
    416: Code.OUT_OF_RANGE,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}

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


class GrpcError(Exception):
    """Ends a call with this status and text."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def code_of(status: int) -> grpc.StatusCode:
    """The gRPC code for an HTTP status of 400 or above."""
    return _CODES.get(status) or (Code.FAILED_PRECONDITION if status < 500 else Code.INTERNAL)


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


def model_of(name: str, version: str, parameter: str = "model_name") -> tuple[str, str | None]:
    """Model and version of a request. Raises GrpcError for a request without a model."""
    if not name:
        raise GrpcError(Code.INTERNAL, f"Parameter {parameter} is required.\nBadRequestException.()")
    return name, version or None


class _AnswerParts:
    """The sink of one request. It copies bodies, which may be views that are valid only during the call."""

    def __init__(self) -> None:
        self._waiting: deque[ItemResult] = deque()
        self._bytes = 0  # of the waiting parts
        self._overflow = False  # the client left too much unread: unsent parts are dropped
        self._arrival: asyncio.Future[None] | None = None

    def put(self, result: ItemResult) -> None:
        if self._overflow:
            return
        if self._waiting and self._bytes - len(self._waiting[0].body) > UNREAD_BYTES:
            self._overflow = True
            self._waiting.clear()
            return
        result.body = bytes(result.body)
        self._bytes += len(result.body)
        self._waiting.append(result)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> ItemResult:
        if not self._waiting and not self._overflow:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._overflow:
            raise QueueFull(f"the client left more than {UNREAD_BYTES} bytes of its answer unread")
        result = self._waiting.popleft()
        self._bytes -= len(result.body)
        return result


async def answer_parts(backend: Backend, model: str, version: str | None, item: Item) -> AsyncGenerator[bytes, None]:
    """The parts of the answer, one or more. Raises GrpcError. If the caller leaves, the request is cancelled."""
    answer = _AnswerParts()
    try:
        ticket = backend.submit(model, version, item, answer.put)
    except PenstockError as error:
        found = api_error(error, backend, model, version)
        log_5xx(model, version, item.request_id, found.status, error)
        raise submit_error(found) from error
    final = False
    try:
        while not final:
            result = await answer.next()
            final = result.final
            yield _body(result, backend, model, version, item)
    except QueueFull as error:
        raise prediction_error(429, error.message) from error
    finally:
        if not final:
            ticket.cancel()


async def whole_answer(backend: Backend, model: str, version: str | None, item: Item) -> bytes:
    """The answer with its parts joined. Raises GrpcError."""
    return b"".join([part async for part in answer_parts(backend, model, version, item)])


def log_5xx(model: str, version: str | None, request_id: str, status: int, error: PenstockError) -> None:
    """Logs a failure of the server, as HTTP does."""
    if status >= 500:
        log_failure((model, version), request_id, status, error)


def _body(result: ItemResult, backend: Backend, model: str, version: str | None, item: Item) -> bytes:
    """The body of a part. gRPC ignores a status that the handler set, but not an error that it raised with a status."""
    if result.error is not None:
        found = api_error(result.error, backend, model, version)
        log_5xx(model, version, item.request_id, found.status, result.error)
        raise prediction_error(found.status, found.message) from result.error
    body: bytes = result.body
    message = read_error(result.status, body) if result.status >= 400 else None
    if message is not None:
        log_5xx(model, version, item.request_id, result.status, PenstockError(message))
        raise prediction_error(result.status, message)
    return body
