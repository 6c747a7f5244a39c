"""Urgent requests beside bulk ones, and bulk requests that share batches, against real workers. Orders, no times."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.errors import QueueTimeout
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, decode_answer, encode_arrays
from penstock.types import Item, ItemResult
from support.waiting import wait_for

PATIENCE_S = 60.0
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]


async def test_an_urgent_request_goes_before_bulk_rows_that_came_earlier() -> None:
    ran: list[list[str]] = []
    gate, runs, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def model(items: list[str]) -> list[str]:
        ran.append(list(items))
        loop.call_soon_threadsafe(runs.set)
        gate.wait(PATIENCE_S)
        return items

    config = ModelConfig(target="here", transport="thread", batching=BatchingConfig(max_batch_size=4))
    async with Engine() as engine, asyncio.timeout(PATIENCE_S):
        await engine.load("m", config, target=model)
        handle = engine._registry.route("m", None)
        assert handle.batcher is not None
        handle.batcher.scheduler.prime([(n, 100.0 + n) for n in (1, 2, 4) for _ in range(3)])  # nothing ends soon
        bulk = [asyncio.create_task(engine.infer("m", f"bulk {k}", priority=1)) for k in range(8)]
        await runs.wait()
        lone = asyncio.create_task(engine.infer("m", "lone"))
        await asyncio.sleep(0)
        assert handle.status().queue == 5
        gate.set()
        assert await lone == "lone"
        assert await asyncio.gather(*bulk) == [f"bulk {k}" for k in range(8)]
    assert ran == [[f"bulk {k}" for k in range(4)], ["lone", "bulk 4", "bulk 5", "bulk 6"], ["bulk 7"]]


MODEL = """
    import os
    import time

    def rows(items):
        with open("ran", "a") as log:
            print(*(len(item["x"]) for item in items), file=log, flush=True)
        while not os.path.exists("go"):
            time.sleep(0.001)
        return [{"y": item["x"] * 2} for item in items]
"""


def test_prebatches_that_do_not_fit_are_cut_and_answered_whole(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(MODEL, "rows", "--max-batch-size", "8")

    def ask(first: int) -> list[int]:
        x = np.arange(first, first + 5)
        head, buffers = encode_arrays({"x": x})
        body = b"".join([head, *(bytes(b) for b in buffers)])
        length = {HEADER_LENGTH.replace("-", "_"): str(len(head)), "x_priority": "1"}
        status, answer = server.post("/v2/models/rows/infer", body, "application/octet-stream", **length)
        assert status == 200, answer
        found: list[int] = decode_answer(answer, None).outputs["y"].tolist()
        return found

    with ThreadPoolExecutor(9) as pool:
        answers = [pool.submit(ask, 100)]
        wait_for(lambda: (tmp_path / "ran").exists())  # the first one alone holds the worker
        answers += [pool.submit(ask, 100 * k) for k in range(2, 10)]
        wait_for(lambda: server.metric("penstock_requests_in_flight") >= 9)
        (tmp_path / "go").touch()
        for k, answer in enumerate(answers):
            assert answer.result(PATIENCE_S) == [2 * (100 * (k + 1) + j) for j in range(5)]
    batches = [[int(n) for n in line.split()] for line in (tmp_path / "ran").read_text().splitlines()]
    assert sum(map(sum, batches)) == 45
    assert [5, 3] in batches
    assert len(batches) <= 7, f"nine requests of 5 rows, cut: {batches}"


GATED = """
    import os
    import time

    def gated(items):
        with open("ran", "a") as log:
            print(*items, file=log, flush=True)
        while not os.path.exists("go"):
            time.sleep(0.001)
        return items
"""


@pytest.mark.parametrize("known", [False, True], ids=["cold", "the_run_time_is_known"])
async def test_a_worker_process_with_a_long_run_has_nothing_that_must_wait(tmp_path: Path, known: bool) -> None:
    source = GATED.replace('"ran"', repr(str(tmp_path / "ran"))).replace('"go"', repr(str(tmp_path / "go")))
    (tmp_path / "app.py").write_text(inspect.cleandoc(source))
    config = ModelConfig(target=f"{tmp_path}/app.py:gated", batching=BatchingConfig(max_batch_size=1))
    async with Engine() as engine, asyncio.timeout(PATIENCE_S):
        await engine.load("m", config)
        if known:
            handle = engine._registry.route("m", None)
            assert handle.batcher is not None
            handle.batcher.scheduler.prime([(1, 100.0)] * 12)
        first = asyncio.create_task(engine.infer("m", "first"))
        await asyncio.to_thread(wait_for, lambda: (tmp_path / "ran").exists())
        late: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()
        engine.submit("m", None, Item("late", wait_s=0.05), late.set_result)
        bulk = asyncio.create_task(engine.infer("m", "bulk", priority=1))
        assert isinstance((await late).error, QueueTimeout), "it is not in the worker's pipe"
        urgent = asyncio.create_task(engine.infer("m", "urgent"))
        await asyncio.sleep(0)
        (tmp_path / "go").touch()
        assert await asyncio.gather(first, bulk, urgent) == ["first", "bulk", "urgent"]
    assert (tmp_path / "ran").read_text().split() == ["first", "urgent", "bulk"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_timeout_counts_the_wait_alone(serve: Callable[..., Any], tmp_path: Path, protocol: str) -> None:
    server = serve(MODEL, "rows", ports=PORTS)
    listener = {"http": "inference", "grpc": "grpc"}[protocol]
    triton = pytest.importorskip(f"tritonclient.{protocol}")

    def ask(timeout_us: int) -> str:
        x = triton.InferInput("x", [1], "INT64")
        x.set_data_from_numpy(np.array([7]))
        with triton.InferenceServerClient(server.urls[listener].partition("//")[2]) as client:
            try:
                return str(client.infer("rows", [x], timeout=timeout_us).as_numpy("y"))
            except InferenceServerException as error:
                return f"{error.status()} {error.message()}"

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(ask, 2_000_000)
        wait_for(lambda: (tmp_path / "ran").exists())
        status = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}[protocol]
        assert ask(2_500_000).startswith(f"{status} the request expired in the queue after 2500000 us")
        (tmp_path / "go").touch()
        assert started.result(PATIENCE_S) == "[14]", "it was started in time"
    assert server.metric("penstock_rejections_total", reason="timeout") == 1
