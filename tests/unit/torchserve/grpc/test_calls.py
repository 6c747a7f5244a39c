"""The status and text of each error of a gRPC call."""

from __future__ import annotations

import pytest

from penstock.serving.grpc.messages import GrpcError, code_of
from penstock.torchserve.grpc.services import (
    management_error,
    model_of,
    prediction_error,
    submit_error,
)
from penstock.torchserve.protocol.api import STATUS_OF, ApiError


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"), (401, "UNAUTHENTICATED"), (403, "PERMISSION_DENIED"), (404, "NOT_FOUND"),
        (405, "FAILED_PRECONDITION"), (408, "FAILED_PRECONDITION"), (409, "ABORTED"), (413, "RESOURCE_EXHAUSTED"),
        (416, "OUT_OF_RANGE"), (429, "RESOURCE_EXHAUSTED"), (499, "CANCELLED"), (500, "INTERNAL"),
        (501, "UNIMPLEMENTED"), (503, "UNAVAILABLE"), (504, "DEADLINE_EXCEEDED"), (507, "INTERNAL"), (599, "INTERNAL"),
    ],
)  # fmt: skip
def test_each_status_has_its_code(status, code):
    assert code_of(status).name == code


@pytest.mark.parametrize(
    ("kind", "code", "name"),
    [
        ("BadRequestException", "INVALID_ARGUMENT", "org.pytorch.serve.http.BadRequestException"),
        ("ConflictStatusException", "ABORTED", "org.pytorch.serve.http.ConflictStatusException"),
        ("ModelNotFoundException", "NOT_FOUND", "org.pytorch.serve.archive.model.ModelNotFoundException"),
        ("DownloadArchiveException", "INVALID_ARGUMENT", "org.pytorch.serve.archive.DownloadArchiveException"),
        ("IllegalArgumentException", "PERMISSION_DENIED", "java.lang.IllegalArgumentException"),
    ],
)
def test_a_management_error_names_its_java_class(kind, code, name):
    found = management_error(ApiError(kind, "what happened"))
    assert (found.code.name, found.details) == (code, f"what happened\n{name}")


@pytest.mark.parametrize("kind", STATUS_OF)
def test_a_prediction_without_a_worker_is_internal(kind):
    found = submit_error(ApiError(kind, "why"))
    named = {
        "ModelNotFoundException": "org.pytorch.serve.archive.model.ModelNotFoundException",
        "ModelVersionNotFoundException": "org.pytorch.serve.archive.model.ModelVersionNotFoundException",
    }.get(kind, "InternalServerException.()")
    assert (found.code.name, found.details) == ("INTERNAL", f"why\n{named}")


def test_a_failed_prediction_has_the_code_of_its_status():
    found = prediction_error(503, "Prediction failed")
    details = "Prediction failed\norg.pytorch.serve.http.InternalServerException"
    assert (found.code.name, found.details) == ("UNAVAILABLE", details)


def test_a_call_without_a_model_names_the_missing_parameter():
    with pytest.raises(GrpcError) as found:
        model_of("", "1.0", "name")
    assert (found.value.code.name, found.value.details) == (
        "INTERNAL",
        "Parameter name is required.\nBadRequestException.()",
    )
