from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.core.contracts import Backend
from penstock.errors import ConfigError
from penstock.torchserve.admin.files import last_snapshot
from penstock.torchserve.admin.model_spec import VersionRequest
from penstock.torchserve.admin.startup import load_startup
from penstock.torchserve.config import load_properties, read_properties
from penstock.torchserve.protocol.api import ApiError, RegisterRequest

ServerSetup = Any  # see conftest.py

ECHO_LATE = """
def handle(data, context):
    if data is None:
        time.sleep(0.3)
        return
    return [d["body"] for d in data]
"""


def kept(server: ServerSetup) -> dict[str, Any]:
    """What the last snapshot has of the models."""
    models: dict[str, Any] = json.loads(read_properties(str(newest(server)))["model_snapshot"].value)["models"]
    return models


def newest(server: ServerSetup) -> Any:
    file = last_snapshot(server.folder / "logs")
    assert file is not None
    return file


async def test_the_components_implement_the_interfaces(server: ServerSetup) -> None:
    components = server.open()
    administration = components.administrator
    backend: Backend = components.backend
    assert administration.healthy()
    assert backend.ready()


async def test_all_models_of_the_store_are_loaded(server: ServerSetup) -> None:
    for name in ("a", "b"):
        server.archive(name)
    (server.store / "notes.txt").write_text("no model")
    components = server.open(load_models=["all"], default_workers_per_model=1)
    assert await load_startup(components) == 0
    assert (await server.ask("a"), await server.ask("b")) == ("1.0 hi", "1.0 hi")
    (description,) = await components.administrator.describe("a", None)
    assert description["loadedAtStartup"] is True
    assert newest(server).name.endswith("-startup.cfg")
    assert sorted(kept(server)) == ["a", "b"]


async def test_models_are_loaded_by_name_and_file(server: ServerSetup) -> None:
    for name in ("a", "b", "c"):
        server.archive(name)
    components = server.open(load_models=["x=a.mar", "b.mar", "y = b.mar", "z="], default_workers_per_model=1)
    assert await load_startup(components) == 0
    assert [name for name, _ in components.administrator.models()] == ["b", "x", "y"]


async def test_without_load_models_no_model_is_loaded(server: ServerSetup) -> None:
    server.archive("a")
    components = server.open()
    assert await load_startup(components) == 0
    assert components.administrator.models() == []
    assert components.administrator.healthy()


async def test_the_configuration_sets_the_settings_of_each_model(server: ServerSetup) -> None:
    server.archive("a")
    own = {"defaultVersion": True, "marName": "a.mar", "minWorkers": 2, "maxWorkers": 3, "batchSize": 4}
    components = server.open(load_models=["a.mar"], models={"a": {"1.0": own}})
    await load_startup(components)
    (description,) = await components.administrator.describe("a", None)
    assert [description[key] for key in ("minWorkers", "maxWorkers", "batchSize")] == [2, 3, 4]
    assert len(description["workers"]) == 2


async def test_the_default_is_one_worker_per_core_up_to_the_maximum(
    server: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 2, 3, 4}, raising=False)
    server.archive("a")
    components = server.open(load_models=["a.mar"], max_workers=3, number_of_gpu=0)
    await load_startup(components)
    (description,) = await components.administrator.describe("a", None)
    assert description["minWorkers"] == 3


async def test_a_model_that_fails_to_load_is_logged_and_the_others_serve(
    server: ServerSetup, caplog: pytest.LogCaptureFixture
) -> None:
    server.archive("good")
    server.archive("bad", code="def handle(data, context):\n    raise RuntimeError('no')\n")
    (server.store / "broken.mar").write_bytes(b"no zip")
    components = server.open(load_models=["broken.mar", "bad.mar", "good.mar"], default_workers_per_model=1)
    assert await load_startup(components) == 1
    assert await server.ask("good") == "1.0 hi"
    assert "Failed to load model: broken.mar" in caplog.text
    assert "RuntimeError: no" in caplog.text
    assert not components.administrator.healthy()  # the bad one is tried again and again
    with pytest.raises(ApiError, match="has no worker"):
        await server.ask("bad")
    assert sorted(kept(server)) == ["bad", "good"]


NONE = {"n": {"1.0": {"marName": "none.mar"}}, "a": {"1.0": {"marName": "a.mar"}}}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"load_models": ["a.mar", "n=none.mar"]}, "load_models: found no none.mar in"),
        ({"load_models": ["/no/folder"]}, "load_models: found no /no/folder in"),
        ({"load_models": [""], "model_snapshot": {"models": NONE}}, "model_snapshot: found no none.mar in"),
    ],
)
async def test_a_missing_archive_aborts_the_start(server: ServerSetup, keys: dict[str, Any], text: str) -> None:
    server.archive("a")
    components = server.open(**keys)
    with pytest.raises(ConfigError) as found:
        await load_startup(components)
    assert found.value.message.startswith(text)
    assert components.administrator.models() == []
    await server.close()
    assert last_snapshot(server.folder / "logs") is None


async def test_an_archive_that_cannot_be_downloaded_does_not_abort_the_start(server: ServerSetup) -> None:
    assert await load_startup(server.open(load_models=["http://127.0.0.1:9/a.mar"])) == 1


async def test_an_unexpected_error_of_one_model_does_not_affect_the_others(
    server: ServerSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        server.archive(name)
    components = server.open(load_models=["a.mar", "b.mar"], default_workers_per_model=1)
    opened = components.opener.open

    async def broken(request: VersionRequest) -> Any:
        if request.registration.url == "a.mar":
            raise KeyError("a bug")
        return await opened(request)

    monkeypatch.setattr(components.opener, "open", broken)
    assert await load_startup(components) == 1
    assert await server.ask("b") == "1.0 hi"
    assert components.administrator.healthy()
    assert "change_failed error=KeyError: 'a bug'" in caplog.text


async def test_the_first_listed_version_is_the_default(server: ServerSetup) -> None:
    urls = [server.archive("a", version, file=f"a{version}.mar") for version in ("2.0", "1.0", "3.0")]
    components = server.open(load_models=urls, default_workers_per_model=1)
    await load_startup(components)
    assert await server.ask("a") == "2.0 hi"


async def test_a_server_continues_from_its_snapshot(server: ServerSetup) -> None:
    admin = server.open(default_response_timeout=60).administrator
    for version in ("1.0", "2.0"):
        url = server.archive("a", version, file=f"a{version}.mar")
        await admin.register(RegisterRequest(url=url, initial_workers=1, batch_size=3, response_timeout=9))
    await admin.set_default("a", "2.0")
    await admin.register(RegisterRequest(url="a1.0.mar", model_name="b", handler="service"))
    await admin.scale("b", None, min_worker=1, max_worker=2, synchronous=True)
    await server.close()

    file = newest(server)
    assert file.name.endswith("-shutdown.cfg")
    found = load_properties(str(file), env={})
    assert found.model_store == str(server.store)
    components = server.open(model_snapshot=found.model_snapshot)
    assert await load_startup(components) == 0
    assert (await server.ask("a"), await server.ask("a", "1.0"), await server.ask("b")) == (
        "2.0 hi",
        "1.0 hi",
        "1.0 hi",
    )
    (description,) = await components.administrator.describe("a", None)
    assert [description[key] for key in ("batchSize", "responseTimeout", "minWorkers")] == [3, 9, 1]
    (description,) = await components.administrator.describe("b", None)
    assert (description["minWorkers"], description["maxWorkers"]) == (1, 2)


async def test_a_snapshot_written_by_users_is_loaded(server: ServerSetup) -> None:
    server.archive("m")
    state = {"defaultVersion": True, "marName": "m.mar", "minWorkers": 1, "maxWorkers": 5, "batchSize": 2}
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {"m": {"1.0": {**state, "maxBatchDelay": -10000}}}}
    components = server.open(model_snapshot=snapshot, load_models=["none.mar"])
    assert await load_startup(components) == 0
    (description,) = await components.administrator.describe("m", None)
    assert [description[k] for k in ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")] == [1, 5, 2, 100]


@pytest.mark.parametrize(
    "snapshot",
    [
        {},
        {"models": None},
        {"models": {"m": None}},
        {"models": {"m": {"1.0": None}}},
        {"models": {"m": {"1.0": {"marName": 5}}}},
    ],
)
async def test_an_empty_snapshot_starts_nothing(server: ServerSetup, snapshot: dict[str, Any]) -> None:
    components = server.open(model_snapshot=snapshot)
    assert await load_startup(components) == 0
    assert components.administrator.models() == []


async def test_without_snapshots_none_is_written(server: ServerSetup) -> None:
    await load_startup(server.open(snapshots=False))
    await server.close()
    assert not (server.folder / "logs").exists()


async def test_a_snapshot_has_the_keys_of_file_and_command_line(server: ServerSetup) -> None:
    config = server.folder / "config.properties"
    config.write_text("job_queue_size=7\nload_models=all\nkeystore_pass=$$SECRET$$\n")
    components = server.open(enable_model_api=True, file=str(config))
    await load_startup(components)
    found = {key: each.value for key, each in read_properties(str(newest(server))).items()}
    del found["model_snapshot"]
    assert found == {
        "job_queue_size": "7",
        "keystore_pass": "$$SECRET$$",
        "model_store": str(server.store),
        "enable_model_api": "true",
    }


async def test_a_server_is_healthy_once_archives_are_open_and_answers_pending_requests(server: ServerSetup) -> None:
    server.archive("a", code="import time\n" + ECHO_LATE)
    (server.store / "broken.mar").write_bytes(b"no zip")
    components = server.open(load_models=["a.mar", "broken.mar"], default_workers_per_model=1)
    assert not components.administrator.healthy()
    load = asyncio.create_task(load_startup(components))
    await server.until(components.administrator.healthy)
    assert not load.done()
    assert not components.administrator.ready()
    assert await server.ask("a") == "hi"
    assert await load == 1
    assert components.administrator.ready()


async def test_with_ready_ping_a_server_is_unhealthy_until_its_models_are_loaded(server: ServerSetup) -> None:
    server.archive("a", code="import time\n" + ECHO_LATE)
    components = server.open(load_models=["a.mar"], default_workers_per_model=1, ready_ping=True)
    load = asyncio.create_task(load_startup(components))
    await server.until(lambda: not components.models.opening)
    assert not components.administrator.healthy()
    assert await load == 0
    assert components.administrator.healthy()


async def test_a_cancelled_start_leaves_nothing_behind(server: ServerSetup) -> None:
    server.archive("a", code="import time\ndef handle(data, context):\n    time.sleep(60)\n")
    components = server.open(load_models=["a.mar"], default_workers_per_model=1)
    load = asyncio.create_task(load_startup(components))
    await server.until(lambda: bool(server.engine.all_statuses()))
    load.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(load, return_exceptions=True)
        await server.close()
    assert list((server.folder / "cache").iterdir()) == []


async def test_a_snapshot_restores_the_traffic_split(server: ServerSetup) -> None:
    admin = server.open().administrator
    for version in ("1.0", "2.0"):
        url = server.archive("a", version, file=f"a{version}.mar")
        await admin.register(RegisterRequest(url=url, initial_workers=1))
    await admin.set_traffic("a", {"1.0": 1, "2.0": 3})
    await server.close()
    found = load_properties(str(newest(server)), env={})
    await load_startup(server.open(model_snapshot=found.model_snapshot))
    assert sorted([await server.ask("a") for _ in range(4)]) == ["1.0 hi", "2.0 hi", "2.0 hi", "2.0 hi"]
