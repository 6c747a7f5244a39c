"""`[models.NAME.autoscale]` on a real server: workers come with the load, leave after it, and none may be left."""

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.waiting import wait_for

SOURCE = """
    import os
    import time
    from pathlib import Path

    class Work:
        def predict(self, items):
            time.sleep(0.05)
            return [os.getpid()] * len(items)

    class First(Work):
        def load(self, device):  # only the first instance loads
            Path("loads").open("a").write("x")
            if len(Path("loads").read_text()) > 1:
                raise RuntimeError("no second one")

    class Waits:
        async def predict(self, items):
            import asyncio
            await asyncio.sleep(0.05)
            return [os.getpid()] * len(items)
"""


def settings(model: str, **autoscale: Any) -> list[str]:
    """The flags of a server whose model takes one request at a time."""
    keys = {"batching.max_batch_size": 1, **{f"autoscale.{key}": value for key, value in autoscale.items()}}
    return [word for key, value in keys.items() for word in ("--set", f"models.{model}.{key}={json.dumps(value)}")]


def ask_many(server: Any, model: str, requests: int) -> set[int]:
    """The workers that answered; every request is answered."""

    def ask(_: int) -> int:
        status, body = server.post(f"/predictions/{model}", b"1")
        assert status == 200, body
        return int(body)

    with ThreadPoolExecutor(12) as pool:
        return set(pool.map(ask, range(requests)))


def test_workers_follow_the_load_between_min_and_max(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "Work", *settings("work", max=3, slo_s=0.2, idle_s=1.0))
    assert len(ask_many(server, "work", 2)) == 1
    assert 2 <= len(ask_many(server, "work", 300)) <= 3
    assert server.metric("penstock_workers", model="work") > 1
    wait_for(lambda: server.metric("penstock_workers", model="work") == 1)
    assert len(ask_many(server, "work", 2)) == 1
    _, body = server.get("/v2/models/work/stats")
    assert json.loads(body)["model_stats"][0]["inference_stats"]["fail"]["count"] == 0
    assert server.stop()[0] == 0


def test_the_schedule_starts_workers_without_a_request(serve: Callable[..., Any]) -> None:
    schedule = 'models.work.autoscale.schedule={"00:00" = 2, "12:00" = 2}'
    server = serve(SOURCE, "Work", *settings("work", max=3, timezone="UTC"), "--set", schedule)
    wait_for(lambda: server.metric("penstock_workers_up", model="work") == 2)


def test_async_workers_follow_the_load_too(serve: Callable[..., Any]) -> None:
    server = serve(
        SOURCE,
        "Waits",
        *settings("waits", max=3, slo_s=0.2, idle_s=1.0),
        "--set",
        "models.waits.batching.concurrency=2",
    )
    assert 2 <= len(ask_many(server, "waits", 300)) <= 3
    wait_for(lambda: server.metric("penstock_workers", model="waits") == 1)


def test_no_worker_is_left_and_the_next_request_waits_for_one(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "Work", *settings("work", max=2, idle_s=0.5, scale_to_zero=True))
    for _ in range(2):
        wait_for(lambda: server.metric("penstock_workers", model="work") == 0)
        assert server.get("/readyz")[0] == 200
        assert server.metric("penstock_model_state", model="work", state="IDLE") == 1
        assert len(ask_many(server, "work", 5)) <= 2


def test_instances_that_never_load_leave_the_first_one_in_peace(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(SOURCE, "First", *settings("first", max=3, slo_s=0.2, idle_s=1.0))
    assert len(ask_many(server, "first", 150)) == 1
    assert "no second one" in server.said()
    assert len((tmp_path / "loads").read_text()) < 30
    wait_for(lambda: server.metric("penstock_workers", model="first") == 1)
    assert len(ask_many(server, "first", 2)) == 1


def test_the_number_cannot_be_set_by_hand(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "Work", *settings("work", max=2), "--set", "server.management=true")
    url, headers = server.urls["management"] + "/models/work/scale", {"content-type": "application/json"}
    request = urllib.request.Request(url, b'{"instances": 2}', headers, method="PUT")
    status, body = server.fetch(request)
    assert (status, b"autoscale.max" in body) == (409, True), (status, body)
