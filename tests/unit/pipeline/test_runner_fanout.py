"""Fan-out: an item's elements go through the body as children, and come back in order."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.errors import BadRequest, DeadlineExceeded, ItemFailed
from penstock.pipeline.engine import NodeEngine
from penstock.pipeline.graph import Each, Graph
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp


class Letters(ItemOp):
    """The letters of the data as the field `part`."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        fields["part"] = list(data)
        return data


class Part(ItemOp):
    """The part, in capitals, and its count. Raises for an "x"; a "-" has no count, and a "0" no result."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        part = fields["part"]
        if "x" in part:
            raise ValueError("this has an x")
        if part != "-":
            fields["count"] = data.count(part)
        return None if part == "0" else part.upper()


class Batches(BatchOp):
    """The batches of parts that a gate lets through."""

    def __init__(self) -> None:
        self.gates = gates

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
        self.gates.meet("body", [each["part"] for each in fields])
        self.gates.door("body").wait(30.0)
        return data


gates: Any = None


@pytest.fixture(autouse=True)
def _known(doors: Any) -> None:
    global gates
    gates = doors
    for op in (Letters, Part, Batches):
        catalog.register(op.__name__, op)


def fan_out(make_graph: Any, body: Any = "Part", each: Each | None = None, **keys: Any) -> Graph:
    """letters -> read, each part through crop -> end."""
    split = each or Each("crop", "part", ("result",))
    nodes = {"letters": ("Letters", "read"), "read": ("Identity", "end", {"each": split}), "end": "Identity"}
    found: Graph = make_graph({**nodes, "crop": (body, keys)})
    return found


async def queued(stage: Any, rows: int) -> None:
    """Returns when so many children wait for the body."""
    async with asyncio.timeout(20.0):
        while stage.runner.node("crop").engine.queued_rows < rows:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ended(stage: Any, data: Any, **keys: Any) -> Any:
    return await asyncio.wait_for(stage.put(data, **keys), 20.0)


async def test_the_fields_of_children_come_back_in_the_order_of_their_elements(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, each=Each("crop", "part", ("result", "count")), instances=2, max_batch=2))
    outcome = await ended(s, "abcabca")
    assert outcome.fields["result"] == list("ABCABCA")
    assert outcome.fields["count"] == [3, 2, 2, 3, 2, 2, 3]
    assert outcome.fields["part"] == list("abcabca")


async def test_an_item_without_elements_has_empty_lists_and_never_enters_the_body(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, "Batches", Each("crop", "part", ("result", "count"))))
    outcome = await ended(s, "")
    assert (outcome.fields["result"], outcome.fields["count"]) == ([], [])
    assert "body" not in gates.met


@pytest.mark.parametrize("split", ["result", "data"])
async def test_rows_of_an_array_are_elements_and_children_cannot_change_them(stage, make_graph, split) -> None:
    seen: list[np.ndarray[Any, Any]] = []

    class Row(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            seen.append(data)
            return data * 2

    catalog.register("Row", Row)
    graph = make_graph({"a": ("Identity", {"each": Each("b", split, ("result",))}), "b": "Row"})
    outcome = await ended(await stage(graph), np.arange(6).reshape(3, 2))
    assert [row.tolist() for row in outcome.fields["result"]] == [[0, 2], [4, 6], [8, 10]]
    assert [row.shape for row in seen] == [(2,)] * 3
    assert not any(row.flags.writeable for row in seen)


async def test_children_of_several_items_share_batches_and_take_turns(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, "Batches", max_batch=4, queue=4))
    large, small = s.put("a" * 40), s.put("bcd")
    await gates.until("body", 1)
    gates.open_all()
    await asyncio.wait_for(small, 20.0)
    assert not large.done(), "three crops do not wait for forty"
    await asyncio.wait_for(large, 20.0)
    mixed = [set(batch) for batch in gates.met["body"] if {"a"} < set(batch)]
    assert mixed, gates.met["body"]


async def test_a_small_item_gets_into_the_next_batch(stage, make_graph, monkeypatch) -> None:
    monkeypatch.setattr(NodeEngine, "row_s", 1.0)
    s = await stage(fan_out(make_graph, "Batches", max_batch=4))
    large = s.put("a" * 40)
    await gates.until("body", 1)
    small = s.put("bc")
    await queued(s, 6)
    gates.open_all()
    await asyncio.wait_for(asyncio.gather(large, small), 20.0)
    assert gates.met["body"][1] == ["b", "c", "a", "a"]


async def test_a_large_item_does_not_flood_the_queue(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, "Batches", max_batch=4, queue=6))
    large = s.put("a" * 500)
    await gates.until("body", 1)
    await asyncio.sleep(0)
    assert s.runner.node("crop").engine.queued_rows <= 6
    gates.open_all()
    assert len((await asyncio.wait_for(large, 20.0)).fields["result"]) == 500


async def test_a_cancelled_item_takes_its_children_with_it(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, "Batches", max_batch=1, queue=2))
    s.put("abcdefgh")
    first, other = s.last, s.put("z")
    await gates.until("body", 1)
    first.cancel()
    gates.open_all()
    await asyncio.wait_for(other, 20.0)
    ran = [part for batch in gates.met["body"] for part in batch]
    assert len(ran) <= 3, "one runs, one may have been sent ahead, and the other item's"
    assert s.runner.node("read").engine.parents == 0


async def test_the_deadline_of_an_item_holds_for_its_children(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, "Batches", Each("crop", "part", ("result",), on_item_error="null"), queue=1))
    outcome = await ended(s, "abcdefgh", budget_s=0.1)
    assert isinstance(outcome.error, DeadlineExceeded)
    assert s.runner.node("read").engine.parents == 0
    gates.open_all()


async def test_children_have_the_priority_of_their_item(stage, make_graph) -> None:
    s = await stage(fan_out(make_graph, "Batches", max_batch=1, queue=8))
    bulk = s.put("abc", priority=1)
    await gates.until("body", 1)
    urgent = s.put("z")
    await queued(s, 2)
    gates.open_all()
    await asyncio.wait_for(asyncio.gather(bulk, urgent), 20.0)
    order = [part for batch in gates.met["body"] for part in batch]
    assert order == ["a", "z", "b", "c"]


@pytest.mark.parametrize(
    ("mode", "expected"), [("null", ["A", None, "C"]), ("drop", ["A", "C"]), ("fail_parent", None)]
)
async def test_a_failed_child_counts_as_the_fan_out_says(stage, make_graph, mode, expected) -> None:
    s = await stage(fan_out(make_graph, each=Each("crop", "part", ("result", "part"), on_item_error=mode)))
    outcome = await ended(s, "axc")
    if expected is not None:
        assert outcome.fields["result"] == expected
        assert outcome.fields["part"] == [part and part.lower() for part in expected]
        return
    assert isinstance(outcome.error, ItemFailed)
    text = "node 'read', element 1 of 'part': node 'crop', op 'Part' raised ValueError"
    assert (str(outcome.error), outcome.node) == (text, "read")
    assert "this has an x" in outcome.error.detail


async def test_an_error_in_a_fan_out_in_a_fan_out_names_the_way_to_its_element(stage) -> None:
    s = await stage(
        {
            "words": ("Identity", {"each": Each("word", "result", ("result",))}),
            "word": ("Letters", {"each": Each("crop", "part", ("result",))}),
            "crop": ("Part", {"max_batch": 2}),
        }
    )
    assert (await ended(s, ["ab", ""])).fields["result"] == [["A", "B"], []]
    text = "node 'words', element 2 of 'result': node 'word', element 1 of 'part': node 'crop', op 'Part' raised"
    assert str((await ended(s, ["ab", "", "cx"])).error).startswith(text)


@pytest.mark.parametrize(
    ("data", "each", "kind", "message"),
    [
        (
            "abc",
            Each("crop", "part", ("result",), max_fanout=2),
            BadRequest,
            "'part' has 3 elements, expected at most 2",
        ),
        (
            "abc",
            Each("crop", "data", ("result",)),
            ItemFailed,
            "field 'data' is str, expected a list, a tuple or an arr",
        ),
        ("abc", Each("crop", "box", ("result",)), ItemFailed, "there is no field 'box' to split, only: data, part"),
        (
            "a-c",
            Each("crop", "part", ("count",)),
            ItemFailed,
            "element 1 of 'part': ended at node 'crop' without the f",
        ),
        (
            "a0",
            Each("crop", "part", ("result",)),
            ItemFailed,
            "element 1 of 'part': ended at node 'crop' without the f",
        ),
    ],
)
async def test_an_item_that_cannot_be_split_or_gathered_fails_alone(
    stage, make_graph, data, each, kind, message
) -> None:
    s = await stage(fan_out(make_graph, each=each))
    bad, good = await asyncio.wait_for(asyncio.gather(s.put(data), s.put("ab")), 20.0)
    assert isinstance(bad.error, kind)
    assert message in str(bad.error)
    assert str(bad.error).startswith("node 'read'")
    if each.split == "part":
        assert good.error is None


@pytest.mark.parametrize("value", [b"bytes", {"a": 1}, 3, np.float32(2), None, np.array(4)])
async def test_only_lists_tuples_and_arrays_with_rows_are_split(stage, make_graph, value) -> None:
    class Box(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            fields["box"] = value
            return data

    catalog.register("Box", Box)
    graph = make_graph({"a": ("Box", {"each": Each("b", "box", ("box",))}), "b": "Identity"})
    outcome = await ended(await stage(graph), "a")
    assert f"field 'box' is {type(value).__name__}, expected a list, a tuple or an array with rows" in str(
        outcome.error
    )


async def test_a_trace_has_the_nodes_of_children(stage, make_graph) -> None:
    graph = fan_out(make_graph)
    s = await stage(replace(graph, trace=True))
    outcome = await ended(s, "abc")
    assert [hop.node for hop in outcome.hops] == ["letters", "read", "crop", "crop", "crop", "end"]
