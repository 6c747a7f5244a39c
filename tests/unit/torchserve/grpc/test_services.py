"""Every call of every service, without the key, with a wrong one, an expired one, and the right one."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from penstock.testing.backend import Call
from penstock.torchserve.admin.tokens import Tokens

GUARDS = {
    "Ping": "inference", "Predictions": "inference", "StreamPredictions": "inference",
    "StreamPredictions2": "inference", "ServerLive": "inference", "ServerReady": "inference",
    "ServerMetadata": "inference", "ModelReady": "inference", "ModelMetadata": "inference", "ModelInfer": "inference",
    "DescribeModel": "management", "ListModels": "management", "RegisterModel": "management",
    "ScaleWorker": "management", "SetDefault": "management", "UnregisterModel": "management",
}  # fmt: skip
REFUSED = (
    "PERMISSION_DENIED",
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly",
)
PASSED = ("OK", "")
HOUR_S = 3600.0


@pytest.fixture
def guarded(grpc_site, administration, tmp_path, monkeypatch):
    """The listener, the keys of its groups, and a clock to be moved."""
    clock = [datetime(2026, 1, 1, tzinfo=UTC)]
    tokens = Tokens(tmp_path, HOUR_S, lambda: clock[0])
    tokens.publish()
    monkeypatch.setattr(administration, "check_token", tokens.check)
    keys = {group: each["key"] for group, each in json.loads(tokens.file.read_text()).items()}
    return grpc_site, keys, clock


async def outcome(ask, call, *authorization):
    """(status, text) of a call with these headers, whatever it answers."""
    try:
        await ask(call, metadata=[("authorization", each) for each in authorization])
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()
    return PASSED


def test_the_table_names_every_call_that_needs_a_key(grpc_calls):
    assert set(GUARDS) == set(grpc_calls) - {"Check", "Watch"}


@pytest.mark.parametrize("model_api", [True, False])
@pytest.mark.parametrize("call", GUARDS)
async def test_every_call_needs_the_key_of_its_group(guarded, call, model_api):
    site, keys, clock = guarded
    key = keys[GUARDS[call]]
    other = keys["management" if GUARDS[call] == "inference" else "inference"]
    async with site({"m": Call.reply}, model_api=model_api) as ask:
        wrong = ["", key, f"Bearer {key}x", f"Bearer {key[:-1]}", f"Basic {key}", f"bearer {key}", f"Bearer  {key}"]
        wrong += ["Bearer", "Bearer ", f"Bearer {other}", f"Bearer {keys['API']}"]
        for authorization in wrong:
            assert await outcome(ask, call, authorization) == REFUSED, authorization
        assert await outcome(ask, call) == REFUSED
        assert await outcome(ask, call, "Bearer wrong", f"Bearer {key}") == REFUSED
        assert (ask.administration.asked, ask.backend.calls) == ([], [])
        assert await outcome(ask, call, f"Bearer {key}") != REFUSED
        clock[0] += timedelta(seconds=HOUR_S)
        assert await outcome(ask, call, f"Bearer {key}") == REFUSED


async def test_a_probe_needs_no_key(guarded):
    site, _, _ = guarded
    async with site() as ask:
        assert await outcome(ask, "Check") == PASSED


async def test_a_call_without_the_key_is_refused_before_its_request_is_read(guarded):
    site, _, _ = guarded
    async with site(max_request_bytes=1000) as ask:
        assert await ask.refusal("Predictions", raw=b"x" * 10_000) == REFUSED


async def test_with_the_key_a_request_must_be_one(guarded):
    site, keys, _ = guarded
    metadata = [("authorization", f"Bearer {keys['inference']}")]
    async with site(max_request_bytes=1000) as ask:
        for call in ("Predictions", "StreamPredictions"):
            told = ("INVALID_ARGUMENT", "the request is no org.pytorch.serve.grpc.inference.PredictionsRequest")
            assert await ask.refusal(call, metadata, raw=b"\xff\xff") == told
        code, _text = await ask.refusal("Predictions", metadata, raw=b"x" * 10_000)
        assert code == "RESOURCE_EXHAUSTED"


async def test_a_service_of_another_group_is_not_there(grpc_site):
    async with grpc_site(groups=frozenset({"management"})) as ask:
        assert (await ask.refusal("Ping"))[0] == "UNIMPLEMENTED"
        assert (await ask.refusal("ServerLive"))[0] == "UNIMPLEMENTED"
    async with grpc_site(groups=frozenset({"inference"})) as ask:
        assert (await ask.refusal("ListModels"))[0] == "UNIMPLEMENTED"


async def test_health_follows_the_models(grpc_site, administration):
    async with grpc_site() as ask:
        name = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
        assert ((await ask("Check")).status, (await ask("Check", service=name)).status) == (1, 1)
        administration.is_healthy = False
        assert ((await ask("Check")).status, (await ask("Check", service=name)).status) == (2, 2)
        assert await ask.refusal("Check", service="no") == ("NOT_FOUND", "there is no service 'no'")
        assert (await ask.refusal("Watch"))[0] == "UNIMPLEMENTED"
