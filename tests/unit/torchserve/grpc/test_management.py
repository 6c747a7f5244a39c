import json

import pytest

from penstock.errors import OutOfMemory
from penstock.torchserve.protocol.api import ApiError, ChangeResult, RegisterRequest

NO_MODEL = "Model not found: no\norg.pytorch.serve.archive.model.ModelNotFoundException"


async def test_a_model_is_described_in_the_json_of_http(grpc_site, administration):
    async with grpc_site() as ask:
        text = (await ask("DescribeModel", model_name="m")).msg
        assert text.startswith('[\n  {\n    "modelName": "m",')
        assert text.endswith("]")
        await ask("DescribeModel", model_name="m", model_version="2.0", customized=True)
        found = json.loads((await ask("DescribeModel", model_name="m", model_version="all", customized=True)).msg)
        assert [each["modelVersion"] for each in found] == ["1.0", "2.0"]
        assert administration.asked == [
            ("describe", "m", None, False),
            ("describe", "m", "2.0", True),
            ("describe", "m", "all", False),
        ]


@pytest.mark.parametrize(
    ("fields", "found", "token"),
    [
        ({}, slice(100), "100"),
        ({"limit": 1, "next_page_token": 2}, slice(2, 3), "3"),
        ({"limit": 101}, slice(100), "100"),
        ({"limit": -1, "next_page_token": -1}, slice(100), "100"),
        ({"limit": 100, "next_page_token": 100}, slice(100, 150), None),
    ],
)
async def test_models_are_listed_in_pages(grpc_site, administration, fields, found, token):
    administration.names = [f"m{i:03}" for i in range(150)]
    async with grpc_site() as ask:
        page = json.loads((await ask("ListModels", **fields)).msg)
    assert [each["modelName"] for each in page["models"]] == administration.names[found]
    assert page.get("nextPageToken") == token


async def test_a_registration_has_the_fields_of_the_request(grpc_site, administration):
    fields = {
        "url": "m.mar", "model_name": "n", "handler": "h.py:f", "runtime": "python3", "batch_size": 2,
        "max_batch_delay": 3, "initial_workers": 4, "synchronous": True, "response_timeout": 5, "startup_timeout": 6,
        "s3_sse_kms": True,
    }  # fmt: skip
    administration.done = ChangeResult("registered")
    async with grpc_site() as ask:
        assert (await ask("RegisterModel", **fields)).msg == "registered"
        assert administration.asked == [("register", RegisterRequest(**fields))]


async def test_numbers_that_are_not_above_zero_mean_not_given(grpc_site, administration):
    async with grpc_site() as ask:
        await ask("RegisterModel", url="m.mar", initial_workers=0, batch_size=-1)
        await ask("ScaleWorker", model_name="m", min_worker=0, max_worker=-3)
        assert administration.asked == [
            ("register", RegisterRequest(url="m.mar", synchronous=False)),
            ("scale", "m", None, None, None, False),
        ]


@pytest.mark.parametrize(
    ("call", "fields", "asked"),
    [
        (
            "ScaleWorker",
            {"model_name": "m", "model_version": "2.0", "min_worker": 2, "max_worker": 3, "synchronous": True},
            ("scale", "m", "2.0", 2, 3, True),
        ),
        ("ScaleWorker", {"model_name": "m", "min_worker": 2, "timeout": -1}, ("scale", "m", None, 2, None, False)),
        ("SetDefault", {"model_name": "m", "model_version": "2.0"}, ("set_default", "m", "2.0")),
        ("UnregisterModel", {"model_name": "m"}, ("unregister", "m", None)),
        ("UnregisterModel", {"model_name": "m", "model_version": "2.0"}, ("unregister", "m", "2.0")),
    ],
)
async def test_changes_return_the_text_of_http(grpc_site, administration, call, fields, asked):
    administration.done = ChangeResult("what was done", 202)
    async with grpc_site() as ask:
        assert (await ask(call, **fields)).msg == "what was done"
        assert administration.asked == [asked]


@pytest.mark.parametrize(
    ("call", "fields", "refusal"),
    [
        ("DescribeModel", {"model_name": "no"}, ("NOT_FOUND", NO_MODEL)),
        ("ScaleWorker", {"model_name": "no"}, ("NOT_FOUND", NO_MODEL)),
        ("SetDefault", {"model_name": "no", "model_version": "1"}, ("NOT_FOUND", NO_MODEL)),
        ("UnregisterModel", {"model_name": "no"}, ("NOT_FOUND", NO_MODEL)),
        (
            "RegisterModel",
            {},
            ("INVALID_ARGUMENT", "Parameter url is required.\norg.pytorch.serve.http.BadRequestException"),
        ),
        (
            "UnregisterModel",
            {},
            ("INVALID_ARGUMENT", "Parameter url is required.\norg.pytorch.serve.http.BadRequestException"),
        ),
    ],
)
async def test_invalid_requests_name_the_java_class(grpc_site, call, fields, refusal):
    async with grpc_site() as ask:
        assert await ask.refusal(call, **fields) == refusal


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (
            ApiError("ConflictStatusException", "there already"),
            ("ABORTED", "there already\norg.pytorch.serve.http.ConflictStatusException"),
        ),
        (OutOfMemory("no room"), ("INTERNAL", "Out of resources\norg.pytorch.serve.http.InternalServerException")),
        (RuntimeError("secret"), ("INTERNAL", "internal error")),
    ],
)
async def test_a_failed_change_is_reported(grpc_site, administration, caplog, error, refusal):
    administration.error = error
    async with grpc_site() as ask:
        assert await ask.refusal("RegisterModel", url="m.mar") == refusal
        assert ("event=bug" in caplog.text) == isinstance(error, RuntimeError)


async def test_changes_need_the_model_api(grpc_site, administration):
    async with grpc_site(enable_model_api=False) as ask:
        for call in ("RegisterModel", "UnregisterModel"):
            assert await ask.refusal(call) == (
                "PERMISSION_DENIED",
                "Model API disabled\norg.pytorch.serve.archive.model.ModelException",
            )
        assert administration.asked == []
        await ask("ScaleWorker", model_name="m")
        await ask("SetDefault", model_name="m", model_version="1.0")
