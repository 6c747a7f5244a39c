"""LocalPipeline: a pipeline for the threads of a program."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.core.arrays import nbytes_of
from penstock.errors import BadRequest, DeadlineExceeded, LoadFailed, ModelNotReady, QueueFull
from penstock.pipeline.collate import shape_of
from penstock.pipeline.graph import Graph, NodeStep
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp
from penstock.pipeline.traversal import ItemOutcome

A, B = NodeStep("Words", {"word": "a"}), NodeStep("Words", {"word": "b"})
Make = Callable[..., LocalPipeline]


@pytest.fixture
def make(known: None, make_graph: Callable[..., Graph]) -> Iterator[Make]:
    made: list[LocalPipeline] = []

    def begin(nodes: dict[str, Any] | None = None, *, lazy: bool = False, **keys: Any) -> LocalPipeline:
        graph = make_graph(nodes or {"a": (A, "b"), "b": B}, **keys)
        made.append(LocalPipeline(graph, lazy=lazy))
        return made[-1]

    yield begin
    for pipeline in made:
        pipeline.close()


def gate(name: str, **keys: Any) -> tuple[NodeStep, str, dict[str, Any]]:
    return NodeStep("Door", {"gate": name}), "", {"max_batch": 1, **keys}


def test_one_item_and_many(make: Make) -> None:
    pipeline = make()
    assert pipeline.infer({"data": "1"}).fields["result"] == "1ab"
    assert pipeline.infer({"data": "1"}, "b").fields["result"] == "1b"
    found = pipeline.infer_many([{"data": "1"}, ({"data": "2"}, "b"), ({"data": "3"}, None)])
    assert [o.fields["result"] for o in found] == ["1ab", "2b", "3ab"]
    assert pipeline.infer_many([]) == []


def test_a_bad_item_of_a_call_fails_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    pipeline = make({"a": ("Picky", "b"), "b": B})
    found = pipeline.infer_many([{"data": "1"}, {"data": "x"}, ({"data": "2"}, "nod"), {"data": "3"}])
    assert [o.error.code if o.error else o.fields["result"] for o in found] == [
        "1b",
        "item_failed",
        "bad_request",
        "3b",
    ]
    assert isinstance(found[2].error, BadRequest)


def test_a_call_may_have_more_items_than_fit_inside(make: Make) -> None:
    pipeline = make(in_flight=3)
    assert pipeline.width == 3
    found = pipeline.infer_many([{"data": str(i)} for i in range(500)])
    assert [o.fields["result"] for o in found] == [f"{i}ab" for i in range(500)]


def test_many_threads_call_at_once(make: Make) -> None:
    pipeline = make(in_flight=8)
    wrong: list[Any] = []

    def call(me: int) -> None:
        for i in range(20):
            outcome = pipeline.infer({"data": f"{me}.{i}"})
            if outcome.fields.get("result") != f"{me}.{i}ab":
                wrong.append(outcome)

    crew = [threading.Thread(target=call, args=(n,)) for n in range(16)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert not wrong


def test_a_future_and_its_callback_get_the_outcome(make: Make) -> None:
    pipeline = make()
    told: list[ItemOutcome] = []
    future = pipeline.submit({"data": "1"}, told.append)
    outcome = future.result(20.0)
    assert outcome.fields["result"] == "1ab"
    assert told == [outcome]

    async def wait() -> Any:
        return await pipeline.submit({"data": "2"})

    assert asyncio.run(wait()).fields["result"] == "2ab"


def test_a_callback_is_called_once_on_a_thread_of_the_pipeline(make: Make) -> None:
    pipeline = make()
    heard: list[tuple[Any, str]] = []
    over = threading.Event()

    def done(outcome: ItemOutcome) -> None:
        heard.append((outcome.fields.get("result"), threading.current_thread().name))
        over.set()

    pipeline.start({"data": "1"}, done)
    assert over.wait(20.0)
    assert heard == [("1ab", "penstock-b-0")]
    over.clear()
    pipeline.start({"data": "1"}, lambda o: (heard.append((o.error, "")), over.set()), "nowhere")
    assert over.wait(20.0)
    assert isinstance(heard[1][0], BadRequest)


async def test_an_item_expires_in_time_behind_others_in_a_busy_node(
    make: Make, doors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.core.engine.direct.LATE_S", 60.0)  # when the loop sees to what waits in any case
    pipeline = make({"a": (A, "door"), "door": gate("g")})
    first = pipeline.submit({"data": "1"})
    await doors.until("g", 1)
    second = pipeline.submit({"data": "2"})
    queued: Any = 0
    while not queued:
        await asyncio.sleep(0.001)
        queued = pipeline.statistics()["nodes"]["door"]["queued"]  # type: ignore[index]
    late = pipeline.submit({"data": "late"}, budget_s=0.05)
    assert isinstance(late.result(20.0).error, DeadlineExceeded)
    doors.open_all()
    assert [future.result(20.0).fields["result"] for future in (first, second)] == ["1a", "2a"]


def test_a_blocking_call_is_rejected_in_a_callback(make: Make) -> None:
    pipeline = make()
    heard: list[Any] = []
    over = threading.Event()

    def done(outcome: ItemOutcome) -> None:
        try:
            pipeline.infer({"data": "2"})
        except RuntimeError as e:
            heard.append(e)
        over.set()

    pipeline.start({"data": "1"}, done)
    assert over.wait(20.0)
    assert "would wait for itself" in str(heard[0])


async def test_cancelled_items_do_not_run(make: Make, doors: Any) -> None:
    pipeline = make({"a": ("Identity", "b"), "b": gate("b")}, in_flight=2)
    first = pipeline.submit({"data": "1"})
    await doors.until("b", 1)
    told: list[ItemOutcome] = []
    inside = pipeline.start({"data": "inside"}, told.append)
    in_line = pipeline.start({"data": "in line"}, told.append)
    future = pipeline.submit({"data": "future"})
    for gone in (inside, in_line, future):
        gone.cancel()
    last = pipeline.submit({"data": "2"})
    await asyncio.to_thread(pipeline.statistics)
    doors.open_all()
    assert (await first).error is None
    assert (await last).error is None
    assert doors.met["b"] == [["1"], ["2"]]
    assert told == []


def test_a_pipeline_that_does_not_load_reports_the_reason(known, make_graph) -> None:
    class Broken(ItemOp):
        def load(self, device: str) -> None:
            raise OSError("no such device")

    catalog.register("Broken", Broken)
    graph = make_graph({"net": "Broken"})
    with pytest.raises(LoadFailed, match=r"node 'net': .*no such device"):
        LocalPipeline(graph)
    with LocalPipeline(graph, lazy=True) as lazy:
        found = lazy.infer_many([{"data": 1}, {"data": 2}])
        assert [type(o.error) for o in found] == [LoadFailed] * 2
        with pytest.raises(LoadFailed):
            lazy.wait_until_loaded()


def test_a_lazy_pipeline_loads_at_the_first_call(make: Make) -> None:
    before = set(threading.enumerate())
    pipeline = make(lazy=True)
    assert set(threading.enumerate()) <= before
    assert pipeline.infer({"data": "1"}).fields["result"] == "1ab"


def test_a_closed_pipeline_rejects_calls(make: Make) -> None:
    pipeline = make()
    pipeline.close()
    pipeline.close()
    with pytest.raises(ModelNotReady, match="the pipeline is closed"):
        pipeline.infer({"data": "1"})


async def test_closing_answers_queued_items(make: Make, doors: Any) -> None:
    pipeline = make({"a": gate("a")}, in_flight=1)
    futures = [pipeline.submit({"data": str(i)}) for i in range(4)]
    await doors.until("a", 1)
    closing = asyncio.create_task(asyncio.to_thread(pipeline.close, 20.0))
    await asyncio.sleep(0.02)
    doors.open_all()
    await closing
    assert [f.result(0).fields["result"] for f in futures] == list("0123")


async def test_closing_without_a_drain_time_rejects_queued_items(make: Make, doors: Any) -> None:
    pipeline = make({"a": gate("a")}, in_flight=1)
    futures = [pipeline.submit({"data": str(i)}) for i in range(3)]
    await doors.until("a", 1)
    await asyncio.to_thread(pipeline.close, 0.0)
    assert all(f.result(0).error is not None for f in futures)


def test_threads_end_with_it(make: Make) -> None:
    before = set(threading.enumerate())
    pipeline = make()
    assert set(threading.enumerate()) - before
    pipeline.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_loads_its_own_pipeline(make: Make) -> None:
    pipeline = make()
    assert pipeline.infer({"data": "1"}).error is None
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = 0 if pipeline.infer({"data": "2"}).fields["result"] == "2ab" else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert pipeline.infer({"data": "3"}).fields["result"] == "3ab"


def test_statistics_contain_each_node(make: Make) -> None:
    pipeline = make()
    pipeline.infer({"data": "1"})
    told: Any = pipeline.statistics()
    assert (told["in_flight"], told["waiting"], list(told["nodes"])) == (0, 0, ["a", "b"])
    assert told["nodes"]["a"]["policy"] == "linger"


async def test_a_full_queue_rejects_items_immediately(make: Make, doors: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.pipeline.local.MAX_WAITING", 3)
    pipeline = make({"a": gate("a")}, in_flight=1)
    inside = pipeline.submit({"data": "0"})
    await doors.until("a", 1)
    waiting = [pipeline.submit({"data": str(i)}) for i in range(1, 4)]
    with pytest.raises(QueueFull, match=r"3 items \(3 bytes\) wait for room"):
        await pipeline.submit({"data": "4"})
    doors.open_all()
    assert [(await f).fields["result"] for f in (inside, *waiting)] == list("0123")


def test_closing_during_loading_rejects_waiting_items(known, make_graph) -> None:
    loading, go_on = threading.Event(), threading.Event()

    class Slow(ItemOp):
        def load(self, device: str) -> None:
            loading.set()
            go_on.wait(30.0)

    catalog.register("Slow", Slow)
    pipeline = LocalPipeline(make_graph({"a": "Slow"}), lazy=True)
    future = pipeline.submit({"data": "1"})
    assert loading.wait(20.0)
    pipeline.close(0.0)
    assert future.result(0).error is not None
    go_on.set()


class Strange:
    """A value with a shape, but without a dtype and bytes."""

    shape = (1, 2)

    @property
    def nbytes(self) -> int:
        raise ValueError("it has none")


def test_an_invalid_item_does_not_affect_the_next(make: Make) -> None:
    pipeline = make()
    for start in (["a"], {"a": 1}, 7, np.array(["a"], object)):
        refused = pipeline.infer({"data": "1", "node_name": start}, budget_s=20.0).error
        assert isinstance(refused, BadRequest)
        assert f"is a {type(start).__name__}, which is no node" in refused.message
    long = pipeline.infer({"data": "1", "node_name": "a" * 10**6}, budget_s=20.0).error
    assert long is not None
    assert len(long.message) < 300
    given: Any = [1]
    broken = pipeline.infer(given, budget_s=20.0).error
    assert broken is not None
    assert broken.message.startswith("internal error: AttributeError")
    unknown = pipeline.infer({"data": Strange()}, budget_s=20.0).error
    assert unknown is not None
    assert unknown.message == "internal error: ValueError: it has none"
    assert pipeline.infer({"data": "1"}, budget_s=20.0).fields["result"] == "1ab"
    assert pipeline.statistics()["in_flight"] == 0


def test_an_item_whose_result_cannot_be_passed_on_fails_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    catalog.register("GivesStrange", GivesStrange)
    pipeline = make({"a": (NodeStep("GivesStrange"), "b"), "b": B})
    found = pipeline.infer_many([{"data": data} for data in ("1", "strange", "2")], budget_s=20.0)
    assert [o.fields.get("result") for o in found] == ["1b", None, "2b"]
    assert found[1].error is not None
    assert found[1].error.message == "node 'a': internal error: ValueError: it has none"
    assert pipeline.statistics()["in_flight"] == 0
    assert "hand_over_failed node=a" in caplog.text


class GivesStrange(ItemOp):
    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        return Strange() if data == "strange" else data


def test_only_the_beginning_of_long_values_is_inspected() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert nbytes_of(deep) == 0
    assert shape_of(deep) == "list"
    image = np.zeros((1, 3), np.uint8)
    assert nbytes_of([image, b"12", "345"]) == 8
    assert nbytes_of([b"1234"] * 10**6) == 4 * 10**6
    assert len(shape_of([1] * 10**6)) < 200
    assert nbytes_of([]) == 0


async def test_the_bytes_that_wait_are_bounded_inside_and_outside(make: Make, doors: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.pipeline.local.MAX_WAITING_BYTES", 300)
    pipeline = make({"a": gate("a", queue_bytes=200, queue=100)})
    futures = [pipeline.submit({"data": bytes(100)}) for _ in range(20)]
    await doors.until("a", 1)
    node = pipeline.statistics()["nodes"]["a"]  # type: ignore[index]
    assert node["queued_bytes"] <= 200
    refused = [future for future in futures if future.done()]
    assert 20 - len(refused) <= 1 + 2 + 3  # one runs, and 200 and 300 bytes wait
    for future in refused:
        with pytest.raises(QueueFull, match=r"3 items \(300 bytes\) wait for room"):
            future.result()
    doors.open_all()
    for future in futures[: 20 - len(refused)]:
        assert (await asyncio.wrap_future(future)).error is None
    assert (await asyncio.wrap_future(pipeline.submit({"data": bytes(100)}))).error is None  # nothing leaked


async def test_an_item_that_waits_outside_is_answered_at_its_deadline(make: Make, doors: Any) -> None:
    pipeline = make({"a": gate("a")}, in_flight=1)
    inside = pipeline.submit({"data": "0"})
    await doors.until("a", 1)
    late = await asyncio.to_thread(pipeline.infer, {"data": "1"}, None, 0.1)
    assert isinstance(late.error, DeadlineExceeded)
    doors.open_all()
    assert (await asyncio.wrap_future(inside)).error is None
    assert doors.met["a"] == [["0"]]
