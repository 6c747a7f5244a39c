"""Backpressure: a node may start what the queues ahead have room for, and blocked nodes are woken."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.batching.entry import INF
from penstock.pipeline.engine import QUEUE_BYTES, Backpressure
from penstock.pipeline.graph import Each, Graph, Node, NodeInput


class FakeScheduler:
    queued_rows = queued_bytes = running_rows = 0
    ends_s, row_s = INF, 0.0

    def next_end(self) -> tuple[float, int]:
        return (self.ends_s, self.running_rows) if self.running_rows else (INF, 0)

    def seconds(self, rows: int) -> float:
        return rows * self.row_s


class FakeBatcher:
    def __init__(self) -> None:
        self.scheduler = FakeScheduler()
        self.woken = 0

    @property
    def pending(self) -> int:
        return self.scheduler.queued_rows + self.scheduler.running_rows

    def wake(self) -> None:
        self.woken += 1


class FakeEngine:
    chained = ()
    pressed = False
    row_bytes = 0.0
    full_of_bytes = False
    parents = parent_bytes = 0
    concurrency = 2

    def __init__(self, node: Node) -> None:
        self.name, self.node = node.name, node
        self.capacity = node.queue or 4
        self.batcher = FakeBatcher()

    @property
    def running_rows(self) -> int:
        return self.batcher.scheduler.running_rows

    def wake(self) -> None:
        self.batcher.wake()

    def has(self, **numbers: Any) -> None:
        for name, number in numbers.items():
            setattr(self.batcher.scheduler, name, number)


def begin(**nodes: Node) -> tuple[Any, dict[str, Any]]:
    flow = Backpressure(Graph("g", nodes, next(iter(nodes))))
    hosts: Any = {name: FakeEngine(node) for name, node in nodes.items()}
    flow.connect(hosts)
    return flow, hosts


@pytest.fixture
def chain() -> tuple[Any, dict[str, Any]]:
    return begin(a=Node("a", next=("b",)), b=Node("b", next=("c",)), c=Node("c"))


def test_a_node_may_start_as_many_items_as_the_next_has_room_for(chain) -> None:
    flow, h = chain
    assert flow.credit(h["a"]) == 4
    h["b"].has(queued_rows=1)
    h["a"].has(running_rows=2)
    assert flow.credit(h["a"]) == 1
    assert flow.credit(h["c"]) > 10**6  # an output
    assert not flow.blocked


def test_a_blocked_node_is_woken_when_an_item_leaves(chain) -> None:
    flow, h = chain
    h["b"].has(queued_rows=4)
    assert flow.credit(h["a"]) == 0
    assert flow.blocked
    assert h["a"].batcher.woken == 0
    flow.dispatched(h["b"])
    assert h["a"].batcher.woken == 1
    assert not flow.blocked


def test_a_node_under_backpressure_does_not_wait_for_more_items(chain) -> None:
    flow, h = chain
    h["a"].has(queued_rows=3)
    h["b"].has(queued_rows=4)
    assert flow.coming(h["b"], 1.0)[1] == 1
    flow.credit(h["a"])
    assert h["b"].batcher.woken == 1
    assert flow.coming(h["b"], 1.0) == (INF, 0)
    flow.dispatched(h["b"])
    assert flow.coming(h["b"], 1.0)[1] == 1


def test_bytes_bound_what_waits_but_one_item_always_passes(chain) -> None:
    flow, h = chain
    h["b"].row_bytes = QUEUE_BYTES / 2.5
    assert flow.credit(h["a"]) == 2
    h["b"].has(queued_rows=1, queued_bytes=int(h["b"].row_bytes))
    assert flow.credit(h["a"]) == 1
    h["a"].has(running_rows=1)
    assert flow.credit(h["a"]) == 0
    h["a"].has(running_rows=0)
    h["b"].has(queued_rows=0, queued_bytes=0)
    h["b"].row_bytes = QUEUE_BYTES * 3
    assert flow.credit(h["a"]) == 1


def test_items_that_a_join_holds_are_not_in_its_queue() -> None:
    flow, h = begin(
        a=Node("a", next=("b", "c")),
        b=Node("b", next=("d",)),
        c=Node("c", next=("d",)),
        d=Node("d", inputs=(NodeInput("b", "result", "data"), NodeInput("c", "result", "other"))),
    )
    h["b"].has(running_rows=2)
    h["c"].has(running_rows=1)
    assert (flow.credit(h["b"]), flow.credit(h["c"])) == (1, 1)  # either may be the last to come
    h["b"].has(running_rows=0)  # two items now wait in the join for c
    assert flow.credit(h["c"]) == 3


def test_an_item_with_a_result_passes_by_a_node_with_the_filter_or() -> None:
    flow, h = begin(a=Node("a", next=("b",)), b=Node("b", next=("c",), filter="or"), c=Node("c"))
    h["c"].has(queued_rows=3)
    assert flow.credit(h["a"]) == 1
    h["a"].has(running_rows=1)
    assert flow.credit(h["b"]) == 0


def test_arrivals_are_estimated_from_running_batches(chain) -> None:
    flow, h = chain
    assert flow.coming(h["c"], 1.0) == (INF, 0)
    h["b"].has(row_s=0.01)
    h["a"].has(running_rows=3, ends_s=1.2)
    at_s, rows = flow.coming(h["c"], 1.0)
    assert (round(at_s, 3), rows) == (1.23, 3)
    h["b"].has(running_rows=1, ends_s=1.1)
    assert flow.coming(h["c"], 1.0) == (1.1, 1)
    h["b"].has(ends_s=0.9)  # late: it may end at any moment
    assert flow.coming(h["c"], 1.0) == (1.0, 1)


def test_a_waiting_node_is_woken_when_no_more_items_come(chain) -> None:
    flow, h = chain
    h["a"].has(running_rows=1, ends_s=1.2)
    flow.coming(h["c"], 1.0)
    assert flow.blocked
    flow.wake()
    assert (h["c"].batcher.woken, flow.blocked) == (1, set())


@pytest.fixture
def fan_out() -> tuple[Any, dict[str, Any]]:
    boxes = Node("boxes", next=("end",), each=Each("crop", "box", ("result",)))
    return begin(boxes=boxes, crop=Node("crop", next=("read",)), read=Node("read"), end=Node("end"))


def test_as_many_items_begin_a_fan_out_as_its_body_could_run_with_one_child_each(fan_out) -> None:
    flow, h = fan_out
    h["end"].capacity = 100
    assert flow.credit(h["boxes"]) == 6, "four wait for the body, two run in it"
    h["boxes"].parents = 3
    h["boxes"].has(running_rows=1)
    h["crop"].has(queued_rows=4)
    assert flow.credit(h["boxes"]) == 2, "children of others in the queue do not keep an item from its turn"
    h["boxes"].parents = 6
    assert flow.credit(h["boxes"]) < 1
    assert h["boxes"] in flow.blocked


def test_items_in_a_fan_out_count_where_they_go_next_and_their_bytes_are_bounded(fan_out) -> None:
    flow, h = fan_out
    h["boxes"].parents = 3
    assert flow.credit(h["boxes"]) == 1, "the output has room for four"
    h["boxes"].parents, h["boxes"].parent_bytes = 1, QUEUE_BYTES
    assert flow.credit(h["boxes"]) < 1


def test_children_begin_while_the_body_has_room(fan_out) -> None:
    flow, h = fan_out
    assert flow.room("crop") == 4
    h["crop"].has(queued_rows=4)
    assert flow.room("crop") == 0
    assert h["crop"].pressed, "it runs what it has instead of waiting for more"
