from __future__ import annotations

import pytest

from penstock.torchserve.grpc.errors import code_of, failed, not_taken, refused, required
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
def test_management_is_told_the_class_of_the_error(kind, code, name):
    found = refused(ApiError(kind, "what happened"))
    assert (found.code.name, found.details) == (code, f"what happened\n{name}")


@pytest.mark.parametrize("kind", STATUS_OF)
def test_a_prediction_that_is_not_taken_is_internal(kind):
    found = not_taken(ApiError(kind, "why"))
    named = {
        "ModelNotFoundException": "org.pytorch.serve.archive.model.ModelNotFoundException",
        "ModelVersionNotFoundException": "org.pytorch.serve.archive.model.ModelVersionNotFoundException",
    }.get(kind, "InternalServerException.()")
    assert (found.code.name, found.details) == ("INTERNAL", f"why\n{named}")


def test_a_prediction_that_fails_has_the_code_of_its_status():
    found = failed(503, "Prediction failed")
    told = "Prediction failed\norg.pytorch.serve.http.InternalServerException"
    assert (found.code.name, found.details) == ("UNAVAILABLE", told)


def test_a_call_without_a_model_is_told_which_parameter_is_missing():
    found = required("name")
    assert (found.code.name, found.details) == ("INTERNAL", "Parameter name is required.\nBadRequestException.()")
