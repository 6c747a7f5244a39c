"""The one table from what went wrong to the status and text that gRPC clients of TorchServe know."""

from __future__ import annotations

from typing import Final

import grpc

from penstock.torchserve.protocol.api import ApiError

Code = grpc.StatusCode

_CODES: Final = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    413: Code.RESOURCE_EXHAUSTED,
    416: Code.OUT_OF_RANGE,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}

_HTTP: Final = "org.pytorch.serve.http."
_MODEL: Final = "org.pytorch.serve.archive.model."
_CLASSES: Final = {
    "DownloadArchiveException": "org.pytorch.serve.archive.DownloadArchiveException",
    "IllegalArgumentException": "java.lang.IllegalArgumentException",
    "InvalidKeyException": _MODEL + "InvalidKeyException",
    "InvalidModelException": _MODEL + "InvalidModelException",
    "ModelException": _MODEL + "ModelException",
    "ModelNotFoundException": _MODEL + "ModelNotFoundException",
    "ModelVersionNotFoundException": _MODEL + "ModelVersionNotFoundException",
    "WorkflowNotFoundException": "org.pytorch.serve.archive.workflow.WorkflowNotFoundException",
}  # all others are those of _HTTP
_UNKNOWN: Final = ("ModelNotFoundException", "ModelVersionNotFoundException")


class Refusal(Exception):
    """Ends a call with this status and text."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def code_of(status: int) -> grpc.StatusCode:
    """The code of gRPC for a status of HTTP from 400 on."""
    found = _CODES.get(status)
    if found is not None:
        return found
    return Code.FAILED_PRECONDITION if status < 500 else Code.INTERNAL


def refused(error: ApiError) -> Refusal:
    """What a call of the management service is told, and one that asks for a model."""
    return Refusal(code_of(error.status), f"{error.message}\n{_CLASSES.get(error.kind, _HTTP + error.kind)}")


def not_taken(error: ApiError) -> Refusal:
    """What a prediction is told that no worker was given: INTERNAL, whatever it is."""
    name = _CLASSES[error.kind] if error.kind in _UNKNOWN else "InternalServerException.()"
    return Refusal(Code.INTERNAL, f"{error.message}\n{name}")


def failed(status: int, message: str) -> Refusal:
    """What a prediction is told that a worker was given: all its errors are of one class."""
    return Refusal(code_of(status), f"{message}\n{_HTTP}InternalServerException")


def required(parameter: str) -> Refusal:
    """What a call is told that names no model."""
    return Refusal(Code.INTERNAL, f"Parameter {parameter} is required.\nBadRequestException.()")
