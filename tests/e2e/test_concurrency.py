"""Models whose batches run side by side in one worker, under a real server: nobody waits for a longer answer."""

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.errors import LoadFailed

SOURCE = """
    import asyncio
    import os
    import time

    import penstock

    class Meeting:
        async def predict(self, items):                 # answers once four requests are inside
            self.inside = getattr(self, "inside", 0) + len(items)
            while self.inside < 4:
                await asyncio.sleep(0.005)
            return items

    def numbered(items, k):
        return [{"name": item["name"], "part": k} if k <= item.get("most", k) else None for item in items]

    def ended(items, k):
        return all(k >= item["most"] if "most" in item else os.path.exists(item["gate"]) for item in items)

    class Overlapping:
        async def predict(self, items):
            k = 0
            while not ended(items, k):
                k += 1
                await asyncio.sleep(0.002)
                yield numbered(items, k)

    @penstock.model(concurrency=8)
    class Turns:
        def predict(self, items):
            k = 0
            while not ended(items, k):
                k += 1
                time.sleep(0.002)
                yield numbered(items, k)

    @penstock.model(run_timeout_s=1.0, max_batch_size=1)
    class Blocking:
        async def predict(self, items):
            for item in items:
                if item == "block":
                    time.sleep(60)
                await asyncio.sleep(60 if item == "wait" else 0)
            return items
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "Meeting", "Overlapping", "Turns", "Blocking")


def lines(server: Any, model: str, item: dict[str, Any], accept: str) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    headers = {"content-type": "application/json", "accept": accept}
    connection.request("POST", f"/predictions/{model}", json.dumps(item), headers)
    with contextlib.closing(connection), connection.getresponse() as answer:
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith((b"{", b"data: {")):
                yield json.loads(line.removeprefix(b"data: "))


def together(server: Any, model: str, bodies: list[bytes]) -> list[tuple[int, bytes]]:
    """The answers to concurrent requests."""
    found: dict[int, tuple[int, bytes]] = {}

    def ask(i: int, body: bytes) -> None:
        found[i] = server.post(f"/predictions/{model}", body)

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[i] for i in range(len(bodies))]


def test_calls_of_an_async_predict_overlap(server: Any) -> None:
    assert together(server, "meeting", [b"1", b"2", b"3", b"4"]) == [(200, b"%d" % n) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("accept", ["text/event-stream", "*/*"])
@pytest.mark.parametrize("model", ["overlapping", "turns"])
def test_a_short_stream_ends_while_a_long_one_goes_on(server: Any, tmp_path: Any, model: str, accept: str) -> None:
    gate = tmp_path / "gate"
    long = lines(server, model, {"name": "long", "gate": str(gate)}, accept)
    assert next(long) == {"name": "long", "part": 1}
    short = lines(server, model, {"name": "short", "most": 3}, accept)
    assert [line["part"] for line in short] == [1, 2, 3]
    assert next(long)["part"] > 1
    gate.touch()
    assert [line["part"] for line in long]


def test_a_call_that_waits_too_long_ends_alone_and_a_blocked_loop_ends_its_worker(server: Any) -> None:
    died = server.metric("penstock_worker_events_total", state="died", model="blocking")
    (late, body), (ok, _) = together(server, "blocking", [b'"wait"', b'"short"'])
    assert (late, json.loads(body)["error"]["code"], ok) == (504, "run_timeout", 200)
    assert server.metric("penstock_worker_events_total", state="died", model="blocking") == died
    assert server.post("/predictions/blocking", b'"block"')[0] == 504
    assert server.post("/predictions/blocking", b'"short"') == (200, b"short")
    assert server.metric("penstock_worker_events_total", state="died", model="blocking") > died


@pytest.mark.parametrize("transport", ["thread", "inline"])
async def test_only_worker_processes_run_batches_side_by_side(transport: str) -> None:
    async with Engine() as engine:
        config = ModelConfig(target="here", transport=transport, batching=BatchingConfig(concurrency=4))
        with pytest.raises(LoadFailed, match="concurrency = 4 needs transport = 'process'"):
            await engine.load("n", config, target=lambda items: items)
