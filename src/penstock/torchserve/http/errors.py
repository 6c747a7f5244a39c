"""The table from Penstock's errors to TorchServe's, for HTTP and gRPC."""

from typing import Final

from penstock.core.contracts import Backend
from penstock.errors import (
    BadOutput,
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    OutOfMemory,
    PayloadTooLarge,
    PenstockError,
    Quarantined,
    QueueFull,
    SequenceLost,
    SequenceNotFound,
    WorkerDied,
)
from penstock.serving.http.responses import (
    ExpectationFailed,
    HeadTooLarge,
    MalformedHttp,
    MethodNotAllowed,
    NotImplementedHere,
    RequestTimeout,
    RouteNotFound,
)
from penstock.torchserve.protocol.api import ApiError, no_worker

UNKNOWN_ROUTE: Final = "Requested resource is not found, please refer to API document."
WRONG_METHOD: Final = "Requested method is not allowed, please refer to API document."
NO_HTTP: Final = "Invalid HTTP message."

# class -> (type, status unless the type determines it, text unless the error's own); the nearest ancestor counts
_TABLE: Final[dict[type[PenstockError], tuple[str, int | None, str | None]]] = {
    BadRequest: ("BadRequestException", None, None),
    PayloadTooLarge: ("BadRequestException", 413, None),
    Quarantined: ("BadRequestException", 422, None),
    MalformedHttp: ("BadRequestException", None, NO_HTTP),
    HeadTooLarge: ("BadRequestException", None, NO_HTTP),
    ExpectationFailed: ("BadRequestException", 417, None),
    Forbidden: ("IllegalArgumentException", None, None),
    RouteNotFound: ("ResourceNotFoundException", None, UNKNOWN_ROUTE),
    MethodNotAllowed: ("MethodNotAllowedException", None, WRONG_METHOD),
    RequestTimeout: ("RequestTimeoutException", None, None),
    DeadlineExceeded: ("RequestTimeoutException", None, None),
    Conflict: ("ConflictStatusException", None, None),
    SequenceNotFound: ("ServiceUnavailableException", None, None),
    SequenceLost: ("ServiceUnavailableException", None, None),
    WorkerDied: ("InternalServerException", None, "Worker died."),
    PenstockError: ("InternalServerException", None, None),
    NotImplementedHere: ("InternalServerException", 501, None),
    ItemFailed: ("InternalServerException", 503, "Prediction failed"),
    BadOutput: ("InternalServerException", 503, None),
    OutOfMemory: ("InternalServerException", 507, "Out of resources"),
}


def api_error(error: PenstockError, backend: Backend, model: str = "", version: str | None = None) -> ApiError:
    """The error that a client of TorchServe receives for a request to this model and version."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ModelNotFound):
        return _not_found(backend, model, version)
    if isinstance(error, (QueueFull, ModelNotReady, Cancelled)) and model:
        return no_worker(model, version)
    if isinstance(error, (QueueFull, ModelNotReady, Cancelled)):
        return ApiError("ServiceUnavailableException", error.message)
    kind, status, text = next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)
    return ApiError(kind, error.message if text is None else text, status=status)


def _not_found(backend: Backend, model: str, version: str | None) -> ApiError:
    """The error for an unknown model, or for an unknown version of a known model."""
    if version is not None:
        try:
            backend.model_ready(model, None)
        except PenstockError:
            pass
        else:
            message = f"Model version: {version} does not exist for model: {model}"
            return ApiError("ModelVersionNotFoundException", message)
    return ApiError("ModelNotFoundException", f"Model not found: {model}")
