import asyncio
import gc
import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.admin.files import last_snapshot
from penstock.torchserve.config import read_properties
from penstock.torchserve.protocol.api import ApiError, ChangeResult, RegisterRequest
from penstock.types import Item

ServerSetup = Any  # see conftest.py
Refused = Callable[[pytest.ExceptionInfo[ApiError]], tuple[int, str, str]]

NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence"
    " inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
FAILS = "def handle(data, context):\n    raise RuntimeError('no')\n"
MEMORY = "def handle(data, context):\n    raise MemoryError\n"
SLOW_LOAD = "import time\ndef handle(data, context):\n    time.sleep(60)\n"
SLOW = """
import time
def handle(data, context):
    if data is not None:
        time.sleep(0.3)
        return ["done"] * len(data)
"""


@pytest.fixture
def admin(server: ServerSetup) -> Administrator:
    admin: Administrator = server.open().administrator
    return admin


def last_models(server: ServerSetup) -> dict[str, Any]:
    file = last_snapshot(server.folder / "logs")
    assert file is not None
    models: dict[str, Any] = json.loads(read_properties(str(file))["model_snapshot"].value)["models"]
    return models


# ---- register


async def test_a_model_is_registered_with_its_workers_and_answers(server: ServerSetup, admin: Administrator) -> None:
    done = await admin.register(RegisterRequest(url=server.archive("m"), initial_workers=2))
    assert done == ChangeResult('Model "m" Version: 1.0 registered with 2 initial workers')
    assert await server.ask("m") == "1.0 hi"
    assert await server.ask("m", "1.0") == "1.0 hi"
    assert last_models(server)["m"]["1.0"]["minWorkers"] == 2


async def test_a_model_without_workers_is_listed_and_refuses_requests(
    server: ServerSetup, admin: Administrator, refused: Refused
) -> None:
    done = await admin.register(RegisterRequest(url=server.archive("m")))
    assert done == ChangeResult(
        'Model "m" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
    )
    assert admin.models() == [("m", "m.mar")]
    assert admin.healthy()
    for version, named in ((None, 'Model "m"'), ("1.0", 'Model "m" Version 1.0')):
        with pytest.raises(ApiError) as found:
            await server.ask("m", version)
        assert refused(found) == (503, "ServiceUnavailableException", f"{named} {NO_WORKER}")
    with pytest.raises(ApiError) as found:
        await admin.describe("m", None, customized=True)
    assert refused(found) == (
        503,
        "ServiceUnavailableException",
        'Model "m" has no worker to serve describe request. Please use scale workers API to add workers.',
    )


async def test_a_background_registration_is_described_at_once(server: ServerSetup, admin: Administrator) -> None:
    registration = RegisterRequest(url=server.archive("m"), initial_workers=1, synchronous=False)
    assert await admin.register(registration) == ChangeResult("Processing worker updates...", 202)
    (description,) = await admin.describe("m", None)
    assert description["minWorkers"] == 1
    await server.until(lambda: server.components.backend.model_ready("m", None))
    assert await server.ask("m") == "1.0 hi"
    (description,) = await admin.describe("m", None)
    assert [w["status"] for w in description["workers"]] == ["READY"]


@pytest.mark.parametrize(("code", "status"), [(FAILS, 500), (MEMORY, 507), ("(", 500), ("", 500)])
async def test_a_model_that_fails_to_start_is_not_registered(
    server: ServerSetup, admin: Administrator, refused: Refused, code: str, status: int
) -> None:
    with pytest.raises(ApiError) as found:
        await admin.register(RegisterRequest(url=server.archive("m", code=code), initial_workers=1))
    text = "Failed to start workers for model m version: 1.0"
    assert refused(found) == (status, "InternalServerException", text)
    assert admin.models() == []
    assert list((server.folder / "cache").iterdir()) == []
    server.archive("m")
    await admin.register(RegisterRequest(url="m.mar", initial_workers=1))
    assert await server.ask("m") == "1.0 hi"


async def test_a_model_that_dies_in_the_background_stays_registered(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("good"), initial_workers=1))
    code = "import os\ndef handle(data, context):\n    os._exit(3)\n"
    await admin.register(RegisterRequest(url=server.archive("bad", code=code), initial_workers=1, synchronous=False))
    await server.until(lambda: any(s.state == "FAILED" for s in server.engine.statuses()))
    assert not admin.healthy()
    (description,) = await admin.describe("bad", None)
    assert [w["status"] for w in description["workers"]] == ["UNLOADING"]
    assert await server.ask("good") == "1.0 hi"
    assert await admin.unregister("bad", None) == ChangeResult('Model "bad" unregistered')
    assert admin.healthy()


async def test_concurrent_registrations_of_a_version_succeed_once(
    server: ServerSetup, admin: Administrator, refused: Refused
) -> None:
    registration = RegisterRequest(url=server.archive("m"), initial_workers=1)
    results = await asyncio.gather(*(admin.register(registration) for _ in range(2)), return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["ApiError", "ChangeResult"]
    with pytest.raises(ApiError) as found:
        await admin.register(registration)
    assert refused(found) == (
        409,
        "ConflictStatusException",
        "Model version 1.0 is already registered for model m",
    )
    assert await server.ask("m") == "1.0 hi"


async def test_a_model_can_have_another_name_than_its_archive(server: ServerSetup, admin: Administrator) -> None:
    server.archive("m")
    for name in ("a", "b"):
        await admin.register(RegisterRequest(url="m.mar", model_name=name, initial_workers=1))
    assert admin.models() == [("a", "m.mar"), ("b", "m.mar")]
    await admin.unregister("a", None)
    assert await server.ask("b") == "1.0 hi"  # its files are still there


@pytest.mark.parametrize(
    ("url", "status", "kind"),
    [
        ("", 404, "ModelNotFoundException"),
        ("none.mar", 404, "ModelNotFoundException"),
        ("../m.mar", 404, "ModelNotFoundException"),
        ("/etc", 404, "ModelNotFoundException"),
        ("http://127.0.0.1:9/m.mar", 404, "ModelNotFoundException"),
        ("broken.mar", 400, "InvalidModelException"),
    ],
)
async def test_an_invalid_or_forbidden_archive_is_refused(
    server: ServerSetup, refused: Refused, url: str, status: int, kind: str
) -> None:
    admin = server.open(allowed_urls=["https://models\\.example\\.com/.*"]).administrator
    (server.store / "broken.mar").write_bytes(b"no zip")
    with pytest.raises(ApiError) as found:
        await admin.register(RegisterRequest(url=url, initial_workers=1))
    assert refused(found)[:2] == (status, kind)
    assert admin.models() == []


@pytest.mark.parametrize(
    ("yaml", "shown"),
    [
        ("{", "not valid YAML"),
        ('a: !!int ""', "not valid YAML"),
        ("a: !!timestamp x", "not valid YAML"),
        ("- 1\n- 2", "found a list"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("asyncCommunication: true\nsequenceBatching: true", "exclude"),
        ("a: " + "x" * 2**20, "more than"),
    ],
)
async def test_an_invalid_yaml_is_refused(server: ServerSetup, admin: Administrator, yaml: str, shown: str) -> None:
    with pytest.raises(ApiError, match=shown) as found:
        await admin.register(RegisterRequest(url=server.archive("m", yaml=yaml)))
    assert (found.value.status, found.value.kind) == (400, "InvalidModelException")


async def test_the_yaml_sets_the_settings_of_the_model(server: ServerSetup, admin: Administrator) -> None:
    server.archive("m", yaml="minWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 7\nresponseTimeout: 33\nown: {a: 1}")
    await admin.register(RegisterRequest(url="m.mar", batch_size=5))
    (description,) = await admin.describe("m", None)
    assert [description[k] for k in ("minWorkers", "batchSize", "maxBatchDelay", "responseTimeout")] == [2, 5, 7, 33]
    assert len(description["workers"]) == 2


async def test_too_many_workers_are_refused_before_any_starts(server: ServerSetup, admin: Administrator) -> None:
    server.archive("m")
    for workers in (9, 10**6):
        with pytest.raises(ApiError, match=f"initial_workers: found {workers}, expected 0 to 8") as found:
            await admin.register(RegisterRequest(url="m.mar", initial_workers=workers))
        assert found.value.status == 400
    assert admin.models() == []


async def test_too_many_versions_are_refused(server: ServerSetup) -> None:
    admin = server.open(max_versions=1).administrator
    await admin.register(RegisterRequest(url=server.archive("a"), initial_workers=1))
    with pytest.raises(ApiError, match="max_versions"):
        await admin.register(RegisterRequest(url=server.archive("b"), initial_workers=1))
    assert admin.models() == [("a", "a.mar")]


# ---- scale


async def test_scaling_starts_and_stops_workers(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m")))

    async def workers() -> list[str]:
        (description,) = await admin.describe("m", None)
        return [w["id"] for w in description["workers"]]

    done = await admin.scale("m", None, min_worker=3, synchronous=True)
    assert done == ChangeResult("Workers scaled to 3 for model: m")
    assert await workers() == ["9000", "9001", "9002"]
    assert await admin.scale("m", "1.0", min_worker=1, synchronous=True) == ChangeResult(
        "Workers scaled to 1 for model: m, version: 1.0"
    )
    assert await workers() == ["9000"]
    await admin.scale("m", None, min_worker=2, max_worker=4, synchronous=True)
    assert await workers() == ["9000", "9003"]
    await admin.scale("m", None, min_worker=1, max_worker=4, synchronous=True)
    assert await workers() == ["9000", "9003"]  # there are not too many
    assert await server.ask("m") == "1.0 hi"
    await admin.scale("m", None, min_worker=0, synchronous=True)
    assert await workers() == []
    assert admin.healthy()
    with pytest.raises(ApiError, match="has no worker"):
        await server.ask("m")
    await admin.scale("m", None, synchronous=True)
    assert await server.ask("m") == "1.0 hi"


async def test_an_asynchronous_scale_completes_later(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m")))
    assert await admin.scale("m", None, min_worker=1) == ChangeResult("Processing worker updates...", 202)
    await server.until(lambda: server.components.backend.model_ready("m", None))


@pytest.mark.parametrize(
    ("least", "most", "shown"),
    [
        (-1, None, "min_worker: found -1, expected 0 to 8"),
        (9, None, "min_worker: found 9, expected 0 to 8"),
        (10**6, None, "min_worker: found 1000000"),
        (2, 1, r"max_worker cannot be less than min_worker\."),
        (None, 0, r"max_worker cannot be less than min_worker\."),
        (0, -1, r"max_worker cannot be less than min_worker\."),
    ],
)
async def test_an_invalid_number_of_workers_changes_nothing(
    server: ServerSetup, admin: Administrator, least: int | None, most: int | None, shown: str
) -> None:
    await admin.register(RegisterRequest(url=server.archive("m"), initial_workers=1))
    with pytest.raises(ApiError, match=shown) as found:
        await admin.scale("m", None, min_worker=least, max_worker=most, synchronous=True)
    assert found.value.status == 400
    (description,) = await admin.describe("m", None)
    assert (description["minWorkers"], len(description["workers"])) == (1, 1)


async def test_a_failed_scale_is_reported_and_changes_nothing(
    server: ServerSetup, admin: Administrator, refused: Refused
) -> None:
    await admin.register(RegisterRequest(url=server.archive("m")))
    (folder,) = (f for f in (server.folder / "cache").iterdir() if f.is_dir())
    (folder / "service.py").write_text(FAILS)
    for version, named in ((None, "null"), ("1.0", "1.0")):
        with pytest.raises(ApiError) as found:
            await admin.scale("m", version, min_worker=1, synchronous=True)
        text = f"Failed to start workers for model m version: {named}"
        assert refused(found) == (500, "InternalServerException", text)
    (description,) = await admin.describe("m", None)
    assert (description["minWorkers"], description["workers"]) == (0, [])
    assert admin.healthy()


# ---- versions


async def test_requests_go_to_the_default_version(server: ServerSetup, admin: Administrator) -> None:
    for version in ("1.0", "2.0"):
        url = server.archive("m", version, file=f"m{version}.mar")
        await admin.register(RegisterRequest(url=url, initial_workers=1))
    assert (await server.ask("m"), await server.ask("m", "2.0")) == ("1.0 hi", "2.0 hi")
    assert await admin.set_default("m", "2.0") == ChangeResult(
        'Default version successfully updated for model "m" to "2.0"'
    )
    assert await server.ask("m") == "2.0 hi"
    assert {v: s["defaultVersion"] for v, s in last_models(server)["m"].items()} == {"1.0": False, "2.0": True}
    assert [d["modelVersion"] for d in await admin.describe("m", "all")] == ["1.0", "2.0"]
    assert [d["modelVersion"] for d in await admin.describe("m", None)] == ["2.0"]


async def test_the_default_is_not_unregistered_while_other_versions_exist(
    server: ServerSetup, admin: Administrator, refused: Refused
) -> None:
    for version in ("1.0", "2.0"):
        await admin.register(RegisterRequest(url=server.archive("m", version, file=f"m{version}.mar")))
    for version in ("1.0", None):  # type: ignore[assignment]
        with pytest.raises(ApiError) as found:
            await admin.unregister("m", version)
        assert refused(found) == (403, "InvalidModelVersionException", "Cannot remove default version for model m")
    assert await admin.unregister("m", "2.0") == ChangeResult('Model "m" unregistered')
    assert await admin.unregister("m", None) == ChangeResult('Model "m" unregistered')
    assert last_models(server) == {}


@pytest.mark.parametrize("change", ["scale", "set_default", "unregister", "describe", "set_traffic"])
async def test_unknown_models_and_versions_are_not_found(
    server: ServerSetup, admin: Administrator, refused: Refused, change: str
) -> None:
    await admin.register(RegisterRequest(url=server.archive("m")))
    last = {"9": 1.0} if change == "set_traffic" else "9"
    with pytest.raises(ApiError) as found:
        await getattr(admin, change)("m", last)
    colon = "" if change == "set_default" else ":"  # TorchServe has two texts
    text = f"Model version{colon} 9 does not exist for model{colon} m"
    assert refused(found) == (404, "ModelVersionNotFoundException", text)
    with pytest.raises(ApiError) as found:
        await getattr(admin, change)("x", last)
    assert refused(found) == (404, "ModelNotFoundException", "Model not found: x")


# ---- unregister


async def test_accepted_requests_are_answered_before_a_model_is_removed(
    server: ServerSetup, admin: Administrator
) -> None:
    await admin.register(RegisterRequest(url=server.archive("m", code=SLOW), initial_workers=1, batch_size=2))
    requests = [asyncio.create_task(server.ask("m")) for _ in range(4)]
    await asyncio.sleep(0)
    unregister = asyncio.create_task(admin.unregister("m", None))
    await asyncio.sleep(0.01)
    with pytest.raises(ApiError, match="Model not found: m"):
        await server.ask("m")
    assert await asyncio.gather(*requests) == ["done"] * 4
    assert await unregister == ChangeResult('Model "m" unregistered')
    assert list((server.folder / "cache").iterdir()) == []


async def test_unregistering_stops_a_load_in_progress(
    server: ServerSetup, admin: Administrator, refused: Refused
) -> None:
    url = server.archive("m", code=SLOW_LOAD)
    others = {p.pid for p in psutil.Process().children()}
    register = asyncio.create_task(admin.register(RegisterRequest(url=url, initial_workers=1)))
    await server.until(lambda: bool(admin.models()))
    await asyncio.sleep(0.1)
    pids = {p.pid for p in psutil.Process().children()} - others
    async with asyncio.timeout(5):
        assert await admin.unregister("m", None) == ChangeResult('Model "m" unregistered')
        with pytest.raises(ApiError) as found:
            await register
    assert refused(found)[:2] == (409, "ConflictStatusException")
    assert not pids & {p.pid for p in psutil.Process().children()}
    assert list((server.folder / "cache").iterdir()) == []
    server.archive("m")
    await admin.register(RegisterRequest(url="m.mar", initial_workers=1))
    assert await server.ask("m") == "1.0 hi"


async def test_unregistering_fails_a_pending_scale(server: ServerSetup, admin: Administrator, refused: Refused) -> None:
    url = server.archive("m", code=SLOW_LOAD)
    await admin.register(RegisterRequest(url=url, initial_workers=1, synchronous=False))
    scale = asyncio.create_task(admin.scale("m", None, min_worker=2, synchronous=True))
    await asyncio.sleep(0.05)
    await admin.unregister("m", None)
    with pytest.raises(ApiError) as found:
        await scale
    assert refused(found)[0] == 409


async def test_a_version_number_is_free_while_the_old_version_drains(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m", code=SLOW), initial_workers=1))
    request = asyncio.create_task(server.ask("m"))
    await asyncio.sleep(0.05)
    unregister = asyncio.create_task(admin.unregister("m", None))
    await asyncio.sleep(0)
    await admin.register(RegisterRequest(url=server.archive("m", file="new.mar"), initial_workers=1))
    assert await server.ask("m") == "1.0 hi"
    assert await request == "done"
    await unregister
    assert await server.ask("m") == "1.0 hi"


# ---- health


async def test_health_follows_the_death_and_restart_of_a_worker(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m"), initial_workers=2))
    (description,) = await admin.describe("m", None)
    os.kill(description["workers"][1]["pid"], signal.SIGKILL)
    await asyncio.wait_for(server.until(lambda: not admin.healthy()), 1.0)
    assert not server.components.backend.ready()
    await server.until(admin.healthy)
    (after,) = await admin.describe("m", None)
    assert [w["id"] for w in after["workers"]] == ["9000", "9001"]


async def test_only_default_versions_count_for_health(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m"), initial_workers=1))
    other = server.archive("m", "2.0", file="m2.mar")
    await admin.register(RegisterRequest(url=other, initial_workers=1))
    (description,) = await admin.describe("m", "2.0")
    os.kill(description["workers"][0]["pid"], signal.SIGKILL)
    await server.until(lambda: not server.components.backend.model_ready("m", "2.0"))
    assert admin.healthy()


# ---- describe and list


async def test_a_description_has_all_keys_of_torchserve(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m"), initial_workers=1))
    (found,) = await admin.describe("m", None, customized=True)
    (worker,) = found.pop("workers")
    assert found == {
        "modelName": "m",
        "modelVersion": "1.0",
        "modelUrl": "m.mar",
        "runtime": "python",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 120,
        "startupTimeout": 120,
        "maxRetryTimeoutInSec": 300,
        "clientTimeoutInMills": 0,
        "parallelType": "",
        "parallelLevel": 0,
        "deviceType": "cpu",
        "continuousBatching": False,
        "useJobTicket": False,
        "useVenv": False,
        "stateful": False,
        "sequenceMaxIdleMSec": 0,
        "sequenceTimeoutMSec": 0,
        "maxNumSequence": 0,
        "maxSequenceJobQueueSize": 0,
        "loadedAtStartup": False,
        "jobQueueStatus": {"remainingCapacity": 100, "pendingRequests": 0},
        "customizedMetadata": {"kind": "echo"},
    }
    assert worker.pop("memoryUsage") > 2**20
    assert worker.pop("pid") in {p.pid for p in psutil.Process().children()}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", worker.pop("startTime"))
    assert worker == {"id": "9000", "status": "READY", "gpu": False, "gpuUsage": "N/A"}


async def test_metadata_that_is_not_an_object_becomes_empty(server: ServerSetup, admin: Administrator) -> None:
    code = "def handle(data, context):\n    return None if data is None else ['word']\n"
    await admin.register(RegisterRequest(url=server.archive("m", code=code), initial_workers=1))
    (found,) = await admin.describe("m", None, customized=True)
    assert found["customizedMetadata"] == {}


async def test_models_are_listed_by_name(server: ServerSetup, admin: Administrator) -> None:
    for name in ("c", "a", "b"):
        await admin.register(RegisterRequest(url=server.archive(name)))
    assert admin.models() == [("a", "a.mar"), ("b", "b.mar"), ("c", "c.mar")]


# ---- limits


async def test_a_full_queue_refuses_at_once(server: ServerSetup, refused: Refused) -> None:
    admin = server.open(job_queue_size=1).administrator
    await admin.register(RegisterRequest(url=server.archive("m", code=SLOW), initial_workers=1))
    tasks = [asyncio.create_task(server.ask("m")) for _ in range(8)]
    done, _ = await asyncio.wait(tasks)
    errors = [task.exception() for task in done if task.exception() is not None]
    assert 4 <= len(errors) <= 7
    for error in errors:
        assert isinstance(error, ApiError)
        assert (error.status, error.message) == (503, f'Model "m" {NO_WORKER}')


async def test_with_job_tickets_no_request_is_queued(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(
        RegisterRequest(url=server.archive("m", code=SLOW, yaml="useJobTicket: true"), initial_workers=1)
    )
    first = asyncio.create_task(server.ask("m"))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="has no worker"):
        await server.ask("m")
    assert await first == "done"
    assert await server.ask("m") == "done"


async def test_a_refused_request_releases_its_memory(server: ServerSetup, admin: Administrator) -> None:
    await admin.register(RegisterRequest(url=server.archive("m")))
    for model in ("m", "x"):
        slab = server.engine.allocate(2**20)
        with pytest.raises(ApiError):
            server.components.backend.submit(model, None, Item(slab, codec="torchserve"), lambda _: None)
    assert server.engine.reading().pool_used_bytes == 0


# ---- the end, and the whole


async def test_a_stopping_server_refuses_changes_and_writes_the_last_snapshot(
    server: ServerSetup, admin: Administrator
) -> None:
    await admin.register(RegisterRequest(url=server.archive("m"), initial_workers=1))
    await server.close()
    file = last_snapshot(server.folder / "logs")
    assert file is not None
    assert file.name.endswith("-shutdown.cfg")
    assert list(last_models(server)) == ["m"]
    for change in (
        admin.register(RegisterRequest(url="m.mar")),
        admin.scale("m", None),
        admin.set_default("m", "1.0"),
        admin.unregister("m", None),
    ):
        with pytest.raises(ApiError, match="stopping") as found:
            await change
        assert found.value.status == 503
    assert list((server.folder / "cache").iterdir()) == []


async def test_a_change_completes_after_its_caller_leaves(server: ServerSetup, admin: Administrator) -> None:
    task = asyncio.create_task(admin.register(RegisterRequest(url=server.archive("m"), initial_workers=1)))
    await server.until(lambda: bool(admin.models()))
    task.cancel()
    await server.until(lambda: server.components.backend.model_ready("m", None) if admin.models() else False)
    assert await server.ask("m") == "1.0 hi"


async def test_tokens_can_be_disabled(server: ServerSetup, refused: Refused) -> None:
    admin = server.open(disable_token_authorization=True).administrator
    admin.check_token("inference", None)
    with pytest.raises(ApiError) as found:
        admin.new_token("inference", None)
    assert refused(found)[:2] == (404, "ResourceNotFoundException")
    assert not (server.folder / "key_file.json").exists()


async def test_rounds_of_registering_leave_nothing_behind(server: ServerSetup, admin: Administrator) -> None:
    server.archive("m")
    server.archive("n")

    async def one_round(i: int) -> None:
        await admin.register(RegisterRequest(url="m.mar", initial_workers=i % 2))
        await admin.register(RegisterRequest(url="n.mar"))
        await asyncio.gather(admin.unregister("m", None), admin.unregister("n", None))

    def held() -> tuple[int, int, int]:
        gc.collect()  # also what other tests left, which could end at any time
        return process.num_fds(), len(asyncio.all_tasks()), len(process.children())

    process = psutil.Process()
    await one_round(1)
    before = held()
    rounds = 1000 if os.environ.get("CHAOS") == "full" else 10
    for i in range(rounds):
        await one_round(i)
    assert all(now <= was for now, was in zip(held(), before, strict=True))
    assert list((server.folder / "cache").iterdir()) == []
    assert server.engine.reading().models == []
    assert len(list((server.folder / "logs" / "config").iterdir())) <= 100


# ---- requests that come before the workers


LATE = """
import os, time
def handle(data, context):
    while data is None and not os.path.exists("go"):
        time.sleep(0.01)
    return None if data is None else ["late"] * len(data)
"""


async def loading(server: ServerSetup, admin: Administrator) -> Callable[[], None]:
    """Registers m in the background; it is loaded once the function is called."""
    url = server.archive("m", code=LATE)
    await admin.register(RegisterRequest(url=url, initial_workers=1, synchronous=False))
    await server.until(lambda: any(s.state == "LOADING" for s in server.engine.all_statuses()))
    (folder,) = (f for f in (server.folder / "cache").iterdir() if f.is_dir())
    return (folder / "go").touch


async def test_requests_wait_for_the_first_worker(server: ServerSetup, admin: Administrator) -> None:
    go = await loading(server, admin)
    requests = [asyncio.create_task(server.ask("m")) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in requests)
    (description,) = await admin.describe("m", None)
    assert description["jobQueueStatus"] == {"remainingCapacity": 97, "pendingRequests": 3}
    go()
    assert await asyncio.gather(*requests) == ["late"] * 3


async def test_pending_requests_are_bounded_by_the_queue_size(server: ServerSetup) -> None:
    admin = server.open(job_queue_size=2).administrator
    go = await loading(server, admin)
    requests = [asyncio.create_task(server.ask("m")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="has no worker"):
        await server.ask("m")
    go()
    assert await asyncio.gather(*requests) == ["late"] * 2


async def test_pending_requests_of_a_removed_model_are_answered(
    server: ServerSetup, admin: Administrator, refused: Refused
) -> None:
    await loading(server, admin)
    request = asyncio.create_task(server.ask("m", "1.0"))
    await asyncio.sleep(0)
    await admin.unregister("m", None)
    with pytest.raises(ApiError) as found:
        await request
    assert refused(found) == (503, "ServiceUnavailableException", f'Model "m" Version 1.0 {NO_WORKER}')


async def test_a_pending_request_can_be_cancelled(server: ServerSetup, admin: Administrator) -> None:
    go = await loading(server, admin)
    shown: list[object] = []
    slab = server.engine.allocate(2**20)
    ticket = server.components.backend.submit("m", None, Item(slab, codec="torchserve"), shown.append)
    ticket.cancel()
    ticket.cancel()
    assert server.engine.reading().pool_used_bytes == 0
    go()
    await server.until(lambda: server.components.backend.model_ready("m", None))
    assert await server.ask("m") == "late"
    assert shown == []


async def test_a_pending_request_can_expire(server: ServerSetup, admin: Administrator) -> None:
    go = await loading(server, admin)
    shown: list[Any] = []
    item = Item(b"", codec="torchserve", headers=[], budget_s=0.02)
    server.components.backend.submit("m", None, item, shown.append)
    await asyncio.sleep(0.05)
    go()
    await server.until(lambda: bool(shown))
    assert shown[0].error.code == "deadline_exceeded"


# ---- how requests are run


COUNT = """
def handle(data, context):
    return None if data is None else [str(len(data))] * len(data)
"""


async def test_a_lone_request_does_not_wait_for_others(server: ServerSetup, admin: Administrator) -> None:
    url = server.archive("m", code=COUNT, yaml="batchSize: 2\nmaxBatchDelay: 60000")
    await admin.register(RegisterRequest(url=url, initial_workers=1))
    async with asyncio.timeout(10):
        assert await server.ask("m") == "1"


async def test_with_a_strict_delay_a_request_waits_for_others(server: ServerSetup, admin: Administrator) -> None:
    url = server.archive("m", code=COUNT, yaml="batchSize: 2\nmaxBatchDelay: 60000\nstrict_delay: true")
    await admin.register(RegisterRequest(url=url, initial_workers=1))
    first = asyncio.create_task(server.ask("m"))
    await asyncio.sleep(0.2)
    assert not first.done()
    async with asyncio.timeout(10):
        assert await server.ask("m") == "2"
        assert await first == "2"


async def test_a_hanging_request_ends_its_worker_and_the_next_is_answered(
    server: ServerSetup, admin: Administrator
) -> None:
    code = SLOW.replace("time.sleep(0.3)", "time.sleep(float(bytes(data[0]['body'])))")
    await admin.register(RegisterRequest(url=server.archive("m", code=code), initial_workers=1, response_timeout=1))
    result = await server.result("m", body=b"60")
    assert result.error.code == "run_timeout"
    await server.until(lambda: server.components.backend.model_ready("m", None))
    assert await server.ask("m", body=b"0") == "done"


async def test_a_request_past_the_client_timeout_expires(server: ServerSetup, admin: Administrator) -> None:
    url = server.archive("m", code=SLOW, yaml="clientTimeoutInMills: 100")
    await admin.register(RegisterRequest(url=url, initial_workers=1))
    results = await asyncio.gather(*(server.result("m") for _ in range(4)))
    codes = [None if r.error is None else r.error.code for r in results]
    assert codes[0] is None
    assert codes[-1] == "queue_timeout"
