"""What TorchServe's management API is asked and answers, for HTTP and gRPC alike. Pure.

Source: the endpoints, texts and status codes of TorchServe 0.12.0.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from penstock.errors import PenstockError

STATUS_OF: Final = {
    "BadRequestException": 400,
    "ModelException": 400,
    "InvalidModelException": 400,
    "InvalidKeyException": 400,
    "DownloadArchiveException": 400,
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
    "ServiceUnavailableException": 503,
    "OutOfMemoryException": 507,
}


class ApiError(PenstockError):
    """An error as TorchServe's clients know it: `kind` stands as "type" in its JSON, and gives the status."""

    code = "torchserve"

    def __init__(self, kind: str, message: str, *, status: int | None = None, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.kind = kind
        self.status = STATUS_OF[kind] if status is None else status

    def __reduce__(self) -> tuple[object, ...]:
        return (ApiError, (self.kind, self.message))


class Registration(Struct, kw_only=True, omit_defaults=True):
    """What `POST /models` asks for: the query, or the JSON body with the same keys. None: not said."""

    url: str | None = None
    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None  # ms
    initial_workers: int | None = None
    synchronous: bool | None = None  # None: as the front-end has it: true over HTTP, false over gRPC
    response_timeout: int | None = None  # s
    startup_timeout: int | None = None  # s
    s3_sse_kms: bool = False


class Done(Struct, frozen=True):
    """A change that was made, or begun: the text of `{"status": ...}`, and 200, 202 or 206."""

    message: str
    status: int = 200
