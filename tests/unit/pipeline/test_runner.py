"""PipelineRunner: each item has exactly one outcome, whatever happens to its neighbours."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError, DeadlineExceeded, ItemFailed
from penstock.pipeline.graph import NodeStep
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp
from penstock.pipeline.runner import PipelineRunner

A, B, C = NodeStep("Words", {"word": "a"}), NodeStep("Words", {"word": "b"}), NodeStep("Words", {"word": "c"})


def chain(make_graph: Any, **last: Any) -> Any:
    return make_graph({"a": (A, "b"), "b": (B, "c"), "c": (C, "", last)})


# ---- the way


async def test_an_item_goes_through_all_nodes_in_their_order(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    assert await s.results("1", "2") == ["1abc", "2abc"]
    assert s.last.kept == {}, "what no join takes is let go on the way"


async def test_the_callers_fields_are_not_changed(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    given = {"data": "1", "tag": [1]}
    outcome = await s.send(given)
    assert given == {"data": "1", "tag": [1]}
    assert outcome.fields == {"data": "1ab", "result": "1abc", "tag": [1]}
    assert outcome.fields["tag"] is given["tag"]
    assert outcome.node == "c"


async def test_later_changes_by_the_caller_do_not_affect_the_item(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    given = {"data": "1"}
    future = s.send(given)
    given["data"] = "2"
    assert (await future).fields["result"] == "1abc"


async def test_an_item_may_begin_at_any_node(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    assert await s.results("1", node="b") == ["1bc"]
    assert (await s.send({"data": "1", "node_name": "c"})).fields["result"] == "1c"


async def test_an_unknown_node_is_refused_with_the_nearest(stage) -> None:
    s = await stage({"decode": (A, "resnet"), "resnet": B})
    with pytest.raises(BadRequest, match=r"'resnt'.*no node.*did you mean 'resnet'.*decode, resnet"):
        s.put("1", node="resnt")
    with pytest.raises(BadRequest, match="no node"):
        s.runner.submit({"data": "1", "node_name": 7}, lambda o: None)
    assert s.runner.in_flight == 0


async def test_node_name_has_no_effect_with_a_single_node(stage) -> None:
    s = await stage({"only": A})
    assert (await s.send({"data": "1", "node_name": "cpu_decoder"})).fields["result"] == "1a"


async def test_nodes_run_concurrently(stage, doors) -> None:
    s = await stage({"a": (NodeStep("Door", {"gate": "a"}), "b"), "b": NodeStep("Door", {"gate": "b"})})
    doors.door("a").set()
    first = s.put("1")
    await doors.until("b", 1)
    doors.door("a").clear()
    second = s.put("2")
    await doors.until("a", 2)  # while the first one is still in b
    assert not first.done()
    doors.open_all()
    assert [(await f).fields["result"] for f in (first, second)] == ["1", "2"]


async def test_steps_that_have_a_filter(stage, make_graph) -> None:
    graph = make_graph(
        {"n": ((NodeStep("Picky"), NodeStep("Words", {"word": "!"}, "or"), NodeStep("Words", {"word": "?"})), "")}
    )
    s = await stage(graph)
    # "-" gives no result, so that the second step runs on the same data
    assert await s.results("1", "-") == ["1?", "-!?"]


async def test_an_item_without_a_result_ends_before_a_node_that_swaps(stage) -> None:
    s = await stage({"a": ("Picky", "b"), "b": B})
    one, two = await asyncio.gather(s.put("-"), s.put("1"))
    assert (one.error, one.node, one.fields) == (None, "b", {"data": "-"})
    assert two.fields["result"] == "1b"


async def test_a_node_with_or_runs_only_for_items_without_a_result(stage) -> None:
    s = await stage({"a": ("Picky", "b"), "b": (B, "c", {"filter": "or"}), "c": C})
    assert await s.results("1", "-") == ["1c", "-bc"]


async def test_a_node_with_run_runs_on_the_data_that_there_was(stage) -> None:
    s = await stage({"a": (A, "b"), "b": (B, {"filter": "run"})})
    assert await s.results("1") == ["1b"]


# ---- branches and joins


def fork(make_graph: Any, **b: Any) -> Any:
    inputs = [("b", "result", "data"), ("c", "result", "other"), ("a", "own", "own")]
    a = (A, NodeStep("Own", {"key": "own", "value": "mine"}))
    return make_graph(
        {"a": (a, "b c"), "b": (B, "d", b), "c": (C, "d"), "d": (NodeStep("Words", {"word": "d"}), {"inputs": inputs})}
    )


async def test_a_join_waits_for_all_nodes_whose_fields_it_takes(stage, make_graph) -> None:
    s = await stage(fork(make_graph))
    outcome = await s.put("1")
    assert outcome.fields == {"data": "1ab", "other": "1ac", "own": "mine", "result": "1abd"}


async def test_a_join_keeps_the_context_of_an_item(stage, make_graph) -> None:
    s = await stage(fork(make_graph))
    context = {"user": 7}
    outcome = await s.send({"data": "1", "context": context, "more": 2})
    assert outcome.fields["context"] is context
    assert "more" not in outcome.fields


async def test_an_item_that_ends_before_one_branch_is_not_run_on_the_other(stage, doors) -> None:
    doors.open_all()
    s = await stage({"a": ("Picky", "b c"), "b": B, "c": (NodeStep("Door", {"gate": "c"}), {"filter": "run"})})
    ended = await s.put("-")
    assert (ended.node, "result" in ended.fields) == ("b", False)
    assert await s.results("2") == ["2"]
    assert doors.met["c"] == [["2"]]


async def test_a_join_may_take_fields_of_an_earlier_node(stage, make_graph) -> None:
    graph = make_graph(
        {"a": (A, "b"), "b": (B, "c"), "c": (C, {"inputs": [("b", "result", "data"), ("a", "result", "first")]})}
    )
    outcome = await (await stage(graph)).put("1")
    assert outcome.fields == {"data": "1ab", "first": "1a", "result": "1abc"}


async def test_a_join_that_misses_a_field_names_it(stage, make_graph) -> None:
    graph = make_graph({"a": (A, "b"), "b": (B, {"inputs": [("a", "boxes", "data")]})})
    outcome = await (await stage(graph)).put("1")
    assert isinstance(outcome.error, ItemFailed)
    assert str(outcome.error) == "node 'b' takes field 'boxes' of node 'a', which has only: data, result"


async def test_an_item_cannot_begin_where_a_join_would_wait_forever(stage, make_graph) -> None:
    s = await stage(fork(make_graph))
    with pytest.raises(BadRequest, match=r"cannot begin at node 'b': node 'd' needs a field of node 'a'"):
        s.put("1", node="b")
    assert await s.results("1", node="d") == ["1d"]


async def test_an_item_is_done_when_all_outputs_are(stage, doors) -> None:
    s = await stage(
        {
            "a": (A, "b c"),
            "b": ((B, NodeStep("Own", {"key": "label", "value": "cat"})), ""),
            "c": ((NodeStep("Door", {"gate": "c"}), NodeStep("Own", {"key": "score", "value": "0.9"})), ""),
        }
    )
    future = s.put("1")
    await doors.until("c", 1)
    assert not future.done()
    doors.open_all()
    fields = (await future).fields
    assert (fields["label"], fields["score"], fields["result"]) == ("cat", "0.9", "1a")  # of the last output


async def test_arrays_that_two_branches_share_are_read_only(stage, make_graph) -> None:
    class Writes(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            array = data[0] if isinstance(data, list) else data
            array += 1
            return data

    catalog.register("Writes", Writes)
    shared = make_graph({"a": ("Identity", "b c"), "b": "Writes", "c": "Identity"})
    joined = make_graph(
        {
            "a": ("Identity", "b c"),
            "b": ("Writes", "c"),
            "c": ("Identity", {"inputs": [("a", "result", "data"), ("b", "result", "other")]}),
        }
    )
    alone = make_graph({"a": ("Identity", "b"), "b": "Writes"})
    for graph in (shared, joined):
        for data in (np.zeros(2), [np.zeros(2), "text"]):
            assert isinstance((await (await stage(graph)).put(data)).error, ItemFailed)
    assert (await (await stage(alone)).put(np.zeros(2))).fields["result"].tolist() == [1, 1]
    assert (await (await stage(alone)).put([np.zeros(2)])).fields["result"][0].tolist() == [1, 1]


# ---- time


async def test_an_expired_item_does_not_run(stage, doors) -> None:
    s = await stage({"a": ("Identity", "b"), "b": (NodeStep("Door", {"gate": "b"}), {"max_batch": 1})})
    first = s.put("1")
    await doors.until("b", 1)
    late = await s.put("late", budget_s=0.3)
    assert isinstance(late.error, DeadlineExceeded)
    assert late.node == "b"
    doors.open_all()
    assert (await first).error is None
    assert doors.met["b"] == [["1"]]
    with pytest.raises(DeadlineExceeded):
        s.put("2", budget_s=0.0)


async def test_a_node_may_have_its_own_deadline(stage, doors) -> None:
    more = {"max_batch": 1, "deadline_s": 0.05}
    s = await stage({"a": ("Identity", "b"), "b": (NodeStep("Door", {"gate": "b"}), "", more)})
    first = s.put("1")
    await doors.until("b", 1)
    late = [s.put("late"), s.put("later", budget_s=20.0)]
    assert [type((await item).error) for item in (first, *late)] == [DeadlineExceeded] * 3
    doors.open_all()
    assert await s.results("3") == ["3"]


@pytest.mark.parametrize("hangs", ["a", "b", "join"])
async def test_a_deadline_is_kept_while_any_node_runs(stage, doors, hangs) -> None:
    nodes = {
        "a": (NodeStep("Door", {"gate": "a"}), "b c"),
        "b": (NodeStep("Door", {"gate": "b"}), "join"),
        "c": ("Identity", "join"),
        "join": (NodeStep("Door", {"gate": "join"}), {"inputs": [("b", "result", "data"), ("c", "result", "c")]}),
    }
    for name in {"a", "b", "join"} - {hangs}:
        doors.door(name).set()
    s = await stage(nodes)
    start = asyncio.get_running_loop().time()
    outcome = await asyncio.wait_for(s.put("1", budget_s=0.2), 10.0)
    assert isinstance(outcome.error, DeadlineExceeded)
    assert f"node '{hangs}'" in str(outcome.error)
    assert 0.19 < asyncio.get_running_loop().time() - start < 5.0
    assert s.runner.in_flight == 0
    doors.open_all()
    assert await s.results("2", budget_s=20.0) == ["2"]


async def test_an_item_that_is_cancelled_in_a_queue_leaves_it(stage, doors) -> None:
    s = await stage({"a": (NodeStep("Door", {"gate": "a"}), {"max_batch": 1})})
    first = s.put("1")
    await doors.until("a", 1)
    gone, journey, last = s.put("gone"), s.last, s.put("2")
    assert s.runner.node("a").engine.queued_rows == 2
    journey.cancel()
    assert s.runner.node("a").engine.queued_rows == 1
    doors.open_all()
    assert [(await item).error for item in (first, last)] == [None, None]
    assert not gone.done()
    assert doors.met["a"] == [["1"], ["2"]]


# ---- life


async def test_an_unknown_op_and_a_wrong_parameter_are_told_at_start(known, make_graph) -> None:
    with pytest.raises(ConfigError, match=r"node 'a': unknown op 'Wodrs'.*did you mean 'Words'"):
        await PipelineRunner(make_graph({"a": "Wodrs"})).start()
    with pytest.raises(ConfigError, match=r"node 'a': Words has no parameter 'wrod'"):
        await PipelineRunner(make_graph({"a": NodeStep("Words", {"wrod": "1"})})).start()
