"""PipelineRunner: formation of batches, waiting, backpressure, and metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from penstock import metrics
from penstock.errors import QueueFull
from penstock.pipeline.engine import FLUSH_S
from penstock.pipeline.graph import NodeStep
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp

A, B, C = NodeStep("Words", {"word": "a"}), NodeStep("Words", {"word": "b"}), NodeStep("Words", {"word": "c"})


async def test_a_node_runs_when_nothing_more_is_on_its_way(stage, doors) -> None:
    """A node waits up to `wait_s` for items that are inside, and not at all without any."""
    more = {"max_batch": 4, "wait_s": 60.0}
    s = await stage(
        {
            "a": (NodeStep("Door", {"gate": "a"}), "b", {"max_batch": 1, "instances": 2}),
            "b": (NodeStep("BatchWords"), "", more),
        }
    )
    doors.door("a").set()
    assert await s.results("1") == ["1"]  # at once
    doors.door("a").clear()
    pair = [s.put("1"), s.put("2")]
    await doors.until("a", 3)
    doors.door("a").set()
    outcomes = await asyncio.wait_for(asyncio.gather(*pair), 20.0)
    assert [o.fields["result"] for o in outcomes] == ["1", "2"]


async def test_items_of_other_shapes_do_not_share_a_batch_of_a_model(stage) -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Model(BatchOp):
        takes = "tensor"

        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            seen.append([d.shape for d in data])
            return data

    catalog.register("Shapes", Model)
    s = await stage({"a": ("Identity", "b"), "b": ("Shapes", {"max_batch": 8, "wait_s": 0.05})})
    data = [np.zeros((1, 3 + i % 2)) for i in range(12)]
    await s.results(*data)
    assert sum(map(len, seen)) == 12
    assert all(len(set(shapes)) == 1 for shapes in seen)


async def test_the_path_of_an_item_is_recorded(stage, make_graph) -> None:
    graph = make_graph({"a": ("Identity", "b"), "b": (NodeStep("BatchWords"), {"max_batch": 8})}, trace=True)
    s = await stage(graph)
    outcomes = await asyncio.gather(*[s.put(str(i)) for i in range(4)])
    for o in outcomes:
        assert [h.node for h in o.hops] == ["a", "b"]
        assert all(h.size >= 1 and h.wait_s >= 0 and h.run_s >= 0 for h in o.hops)
    assert [o.hops[0].size for o in outcomes] == [4] * 4
    assert len({o.hops[0].batch_id for o in outcomes}) == 1


async def test_a_path_contains_wait_and_run_times(stage, make_graph, doors) -> None:
    s = await stage(make_graph({"a": (NodeStep("Door", {"gate": "a"}), {"max_batch": 1})}, trace=True))
    first = s.put("1")
    await doors.until("a", 1)
    second = s.put("2")
    begin_s = time.monotonic()
    await asyncio.sleep(0)
    least_s = time.monotonic() - begin_s
    doors.open_all()
    assert (await first).hops[0].run_s >= least_s
    assert (await second).hops[0].wait_s >= least_s > 0


# ---- bounds


async def test_a_full_pipeline_rejects_immediately_hazard_6(stage, make_graph, doors) -> None:
    graph = make_graph({"a": ("Identity", "b"), "b": NodeStep("Door", {"gate": "b"})}, in_flight=5)
    s = await stage(graph)
    inside = [s.put(str(i)) for i in range(5)]
    with pytest.raises(QueueFull, match="5 items are inside"):
        s.put("6")
    doors.open_all()
    await asyncio.gather(*inside)
    assert await s.results("6") == ["6"]


async def test_a_slow_last_node_limits_the_nodes_before_it(stage, make_graph, doors) -> None:
    graph = make_graph(
        {
            "a": ("Identity", "b", {"max_batch": 4}),
            "b": ("Identity", "c", {"max_batch": 2, "queue": 3}),
            "c": (NodeStep("Door", {"gate": "c"}), {"max_batch": 1, "queue": 2}),
        },
        in_flight=64,
    )
    s = await stage(graph)
    inside = [s.put(str(i)) for i in range(64)]
    await doors.until("c", 1)
    for _ in range(50):
        await asyncio.sleep(0.002)
        told = s.runner.statistics()["nodes"]
        assert told["c"]["queued"] + told["c"]["running"] <= 2 + 2
        assert told["b"]["queued"] <= 3
    doors.open_all()
    assert len(await asyncio.gather(*inside)) == 64


async def test_a_node_does_not_wait_for_items_that_are_blocked_by_it(stage, make_graph) -> None:
    graph = make_graph(
        {"a": ("Identity", "b", {"max_batch": 1}), "b": ("BatchWords", {"max_batch": 8, "queue": 2, "wait_s": 60.0})}
    )
    s = await stage(graph)
    assert await s.results(*"123456") == list("123456")


async def test_a_waiting_node_is_woken_when_an_expected_batch_is_cancelled(stage, make_graph, doors) -> None:
    graph = make_graph(
        {"a": (NodeStep("Door", {"gate": "a"}), "b"), "b": ("BatchWords", {"max_batch": 8, "wait_s": 60.0})}
    )
    s = await stage(graph)
    gone = s.put("gone")
    await doors.until("a", 1)
    journey = s.last
    waits = s.put("1", node="b")
    await asyncio.sleep(0.02)
    assert not waits.done()
    journey.cancel()
    doors.open_all()
    assert (await asyncio.wait_for(waits, 10.0)).error is None
    assert not gone.done()


async def test_nodes_count_what_they_do(stage) -> None:
    metrics.drain()
    s = await stage({"a": (A, "b"), "b": "Picky"})
    await s.results("1", "x", "3")
    await asyncio.sleep(2 * FLUSH_S)
    found = {(d.name, tuple(sorted(d.labels.items()))): d for d in metrics.drain() or []}

    def value(name: str, **labels: str) -> float:
        return found[(name, tuple(sorted(labels.items())))].value

    assert value("pipeline_items_total", node="a", outcome="ok") == 3
    assert value("pipeline_items_total", node="b", outcome="ok") == 2
    assert value("pipeline_items_total", node="b", outcome="failed") == 1
    assert value("pipeline_batches_total", node="a", size="3") == 1
    assert value("pipeline_queue_items", node="b") == 0
    assert value("pipeline_running_items", node="b") == 0
    assert found[("pipeline_run", (("node", "a"),))].kind == "timer"


async def test_metrics_of_ops_are_reported(stage) -> None:
    class Counts(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            metrics.counter("faces", 2)
            return data

    catalog.register("Counts", Counts)
    metrics.drain()
    s = await stage({"a": "Counts"})
    await s.results("1", "2")
    assert [d.value for d in metrics.drain() or [] if d.name == "faces"] == [4]


async def test_a_wait_below_a_millisecond_does_not_spin_hazard_7(stage, make_graph, doors) -> None:
    graph = make_graph(
        {"a": (NodeStep("Door", {"gate": "a"}), "b"), "b": ("BatchWords", {"max_batch": 8, "wait_s": 0.0007})}
    )
    s = await stage(graph)
    other = s.put("2")
    await doors.until("a", 1)
    batcher = s.runner.node("b").engine.batcher
    turns = []
    poll = batcher.scheduler.poll
    batcher.scheduler.poll = lambda now, *ahead: (turns.append(now), poll(now, *ahead))[1]
    started = asyncio.get_running_loop().time()
    assert (await s.put("1", node="b")).fields["result"] == "1"
    assert asyncio.get_running_loop().time() - started >= 0.0007
    assert len(turns) <= 6  # its coming, its timer, its end: not one more for each turn of the loop
    doors.open_all()
    await other


async def test_a_full_batch_passes_a_queue_head_of_another_shape_hazard_8(stage, doors):
    class Shaped(BatchOp):
        takes = "tensor"

        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            return data

    catalog.register("Shaped", Shaped)
    s = await stage({"a": (NodeStep("Door", {"gate": "a"}), "b"), "b": ("Shaped", {"max_batch": 2, "wait_s": 60.0})})
    coming = s.put("1")  # so that a lone item waits
    await doors.until("a", 1)
    head = s.put(np.zeros((1, 3)), node="b")
    pair = [s.put(np.zeros((1, 4)), node="b") for _ in range(2)]
    for future in pair:
        assert (await asyncio.wait_for(future, 10.0)).error is None
    assert not head.done()
    doors.open_all()
    assert (await asyncio.wait_for(head, 10.0)).error is None
    assert (await asyncio.wait_for(coming, 10.0)).error is None


async def test_batches_without_a_model_never_wait(stage, doors) -> None:
    s = await stage({"a": (NodeStep("Door", {"gate": "a"}), "b"), "b": (B, {"wait_s": 60.0})})
    other = s.put("2")
    await doors.until("a", 1)
    assert (await asyncio.wait_for(s.put("1", node="b"), 10.0)).fields["result"] == "1b"
    doors.open_all()
    await other


async def test_capacity_is_twice_the_concurrency_and_small_for_slices(stage) -> None:
    s = await stage(
        {
            "a": (A, "b", {"instances": 8}),
            "b": ("BatchWords", "c", {"instances": 2, "max_batch": 4}),
            "c": (C, {"instances": 3, "max_batch": 2, "queue": 5}),
        }
    )
    told = s.runner.statistics()["nodes"]
    assert {name: node["capacity"] for name, node in told.items()} == {"a": 64, "b": 16, "c": 5}
    assert s.runner.width == (64 + 32) + (16 + 8) + (5 + 6)


async def test_urgent_items_go_first_at_every_node(stage, doors) -> None:
    s = await stage({"a": ("Identity", "b"), "b": (NodeStep("Door", {"gate": "b"}), {"max_batch": 1, "queue": 10})})
    first = s.put("first")
    await doors.until("b", 1)
    others = [s.put("low", priority=2), s.put("middle", priority=1), s.put("urgent", priority=0)]
    for _ in range(2000):
        if s.runner.statistics()["nodes"]["b"]["queued"] == 3:
            break
        await asyncio.sleep(0.001)
    doors.open_all()
    await asyncio.gather(first, *others)
    assert doors.met["b"] == [["first"], ["urgent"], ["middle"], ["low"]]


async def test_room_freed_by_an_expired_item_is_used_immediately(stage, doors) -> None:
    """The item moves to a queue that does not change, so only its end signals that there is room."""
    late = {"max_batch": 1, "queue": 1, "deadline_s": 0.05, "on_error": "skip"}
    s = await stage(
        {
            "a": (NodeStep("Door", {"gate": "a"}), "b", {"max_batch": 1}),
            "b": (NodeStep("Door", {"gate": "b"}), "c", late),
            "c": (NodeStep("Door", {"gate": "c"}), {"max_batch": 1, "queue": 9}),
        }
    )
    for name in "ab":
        doors.door(name).set()
    items = [s.put("1")]
    await doors.until("c", 1)
    doors.door("b").clear()
    items += [s.put(data) for data in "234"]
    assert await doors.until("a", 4) == [["1"], ["2"], ["3"], ["4"]]
    doors.open_all()
    assert [(await item).error for item in items] == [None] * 4
