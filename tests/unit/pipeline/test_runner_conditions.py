"""PipelineRunner with conditions, joins of skipped branches, and aliases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.pipeline.engine import NodeEngine
from penstock.pipeline.graph import NodeStep


def words(name: str) -> NodeStep:
    return NodeStep("Words", {"word": name})


def line(make_graph: Any, **b: Any) -> Any:
    return make_graph({"a": (words("a"), "b"), "b": (words("b"), "c", b), "c": (words("c"), "")})


@pytest.mark.parametrize(
    ("otherwise", "result"), [("skip", "1ac"), ("skip_branch", "1a"), ("stop", "1a"), ("fail", "bad_request")]
)
async def test_an_item_that_does_not_meet_the_condition(stage, make_graph, otherwise, result) -> None:
    s = await stage(line(make_graph, when="data == '2a'", otherwise=otherwise))
    assert await s.results("1", "2") == [result, "2abc"]


async def test_an_item_cancelled_before_its_first_condition_does_not_run(stage) -> None:
    s = await stage({"a": (words("a"), {"when": "data"})})
    s.put("1")
    s.last.cancel()
    assert await s.results("2") == ["2a"]


async def test_a_failure_of_a_condition_fails_one_item_or_skips_the_node(stage, make_graph) -> None:
    s = await stage(line(make_graph, when="data > 3"))
    outcome = await s.put("1")
    assert outcome.error.code == "item_failed"
    assert outcome.error.message.startswith("node 'b': the condition 'data > 3' raised TypeError")
    s = await stage(line(make_graph, when="data > 3", on_error="skip"))
    assert await s.results("1") == ["1ac"]


def route(make_graph: Any, **join: Any) -> Any:
    """Numbers below 5 take b, others c; both end at d."""
    return make_graph(
        {
            "a": ("Identity", "b c"),
            "b": (words("b"), "d", {"when": "data < '5'", "otherwise": "skip_branch"}),
            "c": (words("c"), "d", {"when": "data >= '5'", "otherwise": "skip_branch"}),
            "d": (words("d"), "", join),
        }
    )


async def test_exclusive_conditions_route_an_item_to_one_of_several_nodes(stage, make_graph) -> None:
    s = await stage(route(make_graph, inputs=(("b", "result", "data"), ("c", "result", "data"))))
    assert await s.results("1", "7") == ["1bd", "7cd"]


async def test_a_default_value_is_not_shared_between_items(stage) -> None:
    s = await stage(
        {
            "a": ("Identity", "b c"),
            "b": (words("b"), "c", {"when": "data == '1'", "otherwise": "skip_branch"}),
            "c": ("Identity", {"inputs": (("a", "result", "data"), ("b", "boxes", "boxes", []))}),
        }
    )
    one, other = [(await s.put("2")).fields["boxes"] for _ in range(2)]
    assert one == other == []
    assert one is not other


# ---- aliases


def twice(make_graph: Any, **keys: Any) -> Any:
    """rec, then a node, then rec again."""
    rec = {"max_batch": 2, "queue": 2, **keys}
    return make_graph(
        {
            "rec": (words("r"), "mid", rec),
            "mid": (words("m"), "rec.2", {"queue": 1}),
            "rec.2": (words("r"), {"alias_of": "rec", **rec}),
        }
    )


async def test_an_alias_shares_the_instances_of_its_node(stage, make_graph) -> None:
    s = await stage(twice(make_graph))
    assert await s.results(*map(str, range(8))) == [f"{i}rmr" for i in range(8)]
    engines = {name: s.runner.node(name).engine for name in ("rec", "mid", "rec.2")}
    assert engines["rec"] is engines["rec.2"]
    assert s.runner.statistics()["nodes"].keys() == {"rec", "mid"}


async def test_an_alias_downstream_of_its_node_never_waits_for_itself(stage, make_graph) -> None:
    s = await stage(twice(make_graph, instances=1))
    waiting = list(range(60))
    found: list[Any] = []
    while waiting or found:
        while waiting and s.runner.in_flight < s.runner.width:
            found.append(s.put(str(waiting.pop(0))))
        assert (await asyncio.wait_for(found.pop(0), 20.0)).fields["result"].endswith("rmr")


async def test_items_of_a_node_and_its_alias_share_batches(stage, make_graph, doors) -> None:
    door = NodeStep("Door", {"gate": "rec"})
    graph = make_graph(
        {
            "a": ("Identity", "rec rec.2"),
            "rec": (door, "end", {"max_batch": 8}),
            "rec.2": (door, "end", {"alias_of": "rec", "max_batch": 8}),
            "end": (words("e"), {"inputs": (("rec", "result", "data"), ("rec.2", "result", "x"))}),
        },
        trace=True,
    )
    s = await stage(graph)
    outcomes = [s.put(str(i)) for i in range(3)]
    await doors.until("rec", 1)
    doors.open_all()
    hops = [hop for outcome in outcomes for hop in (await outcome).hops]
    assert {hop.node for hop in hops} == {"a", "rec", "rec.2", "end"}
    batches = {hop.batch_id for hop in hops if hop.node == "rec"} & {h.batch_id for h in hops if h.node == "rec.2"}
    assert batches, "one batch held items of both"
    assert isinstance(s.runner.node("rec").engine, NodeEngine)
