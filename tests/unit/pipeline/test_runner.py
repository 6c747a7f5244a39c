"""Runner: items through graphs, one outcome each, whatever becomes of their neighbours."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from penstock import metrics
from penstock.errors import (
    BadOutput,
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    ItemFailed,
    LoadFailed,
    ModelNotReady,
    QueueFull,
    WorkerDied,
)
from penstock.ops import catalog
from penstock.ops.base import BatchOp, ItemOp
from penstock.pipeline.graph import Each, Step
from penstock.pipeline.meter import FLUSH_S
from penstock.pipeline.runner import Runner

A, B, C = Step("Words", {"word": "a"}), Step("Words", {"word": "b"}), Step("Words", {"word": "c"})


def chain(make_graph: Any, **last: Any) -> Any:
    return make_graph({"a": (A, "b", {}), "b": (B, "c", {}), "c": (C, "", last)})


# ---- the way


async def test_an_item_goes_through_all_nodes_in_their_order(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    assert await s.results("1", "2") == ["1abc", "2abc"]


async def test_what_the_caller_gave_is_not_changed(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    given = {"data": "1", "tag": [1]}
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    s.runner.submit(given, future.set_result)
    outcome = await future
    assert given == {"data": "1", "tag": [1]}
    assert outcome.fields == {"data": "1ab", "result": "1abc", "tag": [1]}
    assert outcome.fields["tag"] is given["tag"]
    assert outcome.node == "c"


async def test_an_item_may_begin_at_any_node(stage, make_graph) -> None:
    s = await stage(chain(make_graph))
    assert await s.results("1", node="b") == ["1bc"]
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    s.runner.submit({"data": "1", "node_name": "c"}, future.set_result)
    assert (await future).fields["result"] == "1c"


async def test_an_unknown_node_is_refused_with_the_nearest(stage, make_graph) -> None:
    s = await stage(make_graph({"decode": (A, "resnet", {}), "resnet": (B, "", {})}))
    with pytest.raises(BadRequest, match=r"'resnt'.*no node.*did you mean 'resnet'.*decode, resnet"):
        s.put("1", node="resnt")
    with pytest.raises(BadRequest, match="no node"):
        s.runner.submit({"data": "1", "node_name": 7}, lambda o: None)
    assert s.runner.in_flight == 0


async def test_the_name_of_a_node_means_nothing_where_there_is_one_node(stage, make_graph) -> None:
    s = await stage(make_graph({"only": (A, "", {})}))
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    s.runner.submit({"data": "1", "node_name": "cpu_decoder"}, future.set_result)
    assert (await future).fields["result"] == "1a"


async def test_nodes_work_at_the_same_time(stage, make_graph, doors) -> None:
    graph = make_graph({"a": (Step("Door", {"gate": "a"}), "b", {}), "b": (Step("Door", {"gate": "b"}), "", {})})
    s = await stage(graph)
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
        {"n": ((Step("Picky"), Step("Words", {"word": "!"}, "or"), Step("Words", {"word": "?"})), "", {})}
    )
    s = await stage(graph)
    # "-" gives no result, so that the second step runs on the same data
    assert await s.results("1", "-") == ["1?", "-!?"]


async def test_an_item_without_a_result_ends_before_a_node_that_swaps(stage, make_graph) -> None:
    s = await stage(make_graph({"a": ("Picky", "b", {}), "b": (B, "", {})}))
    one, two = await asyncio.gather(s.put("-"), s.put("1"))
    assert (one.error, one.node, one.fields) == (None, "b", {"data": "-"})
    assert two.fields["result"] == "1b"


async def test_a_node_with_or_runs_only_for_items_without_a_result(stage, make_graph) -> None:
    s = await stage(make_graph({"a": ("Picky", "b", {}), "b": (B, "c", {"filter": "or"}), "c": (C, "", {})}))
    assert await s.results("1", "-") == ["1c", "-bc"]


async def test_a_node_with_run_runs_on_the_data_that_there_was(stage, make_graph) -> None:
    s = await stage(make_graph({"a": (A, "b", {}), "b": (B, "", {"filter": "run"})}))
    assert await s.results("1") == ["1b"]


# ---- branches and joins


def fork(make_graph: Any, **b: Any) -> Any:
    inputs = [("b", "result", "data"), ("c", "result", "other"), ("a", "own", "own")]
    a = (A, Step("Own", {"key": "own", "value": "mine"}))
    return make_graph(
        {
            "a": (a, "b c", {}),
            "b": (B, "d", b),
            "c": (C, "d", {}),
            "d": (Step("Words", {"word": "d"}), "", {"inputs": inputs}),
        }
    )


async def test_a_join_waits_for_all_that_it_takes_fields_of(stage, make_graph) -> None:
    s = await stage(fork(make_graph))
    outcome = await s.put("1")
    assert outcome.fields == {"data": "1ab", "other": "1ac", "own": "mine", "result": "1abd"}


async def test_a_join_takes_fields_of_a_node_far_before(stage, make_graph) -> None:
    graph = make_graph(
        {
            "a": (A, "b", {}),
            "b": (B, "c", {}),
            "c": (C, "", {"inputs": [("b", "result", "data"), ("a", "result", "first")]}),
        }
    )
    outcome = await (await stage(graph)).put("1")
    assert outcome.fields == {"data": "1ab", "first": "1a", "result": "1abc"}


async def test_an_item_that_fails_on_a_branch_fails_whole_and_once(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    graph = make_graph(
        {
            "a": (A, "b c", {}),
            "b": ("Picky", "d", {}),
            "c": ("Picky", "d", {}),
            "d": (C, "", {"inputs": [("b", "result", "data"), ("c", "result", "other")]}),
        }
    )
    s = await stage(graph)
    assert await s.results("x", "1", "-") == ["item_failed", "1ac", None]
    assert s.runner.in_flight == 0


async def test_a_join_that_misses_a_field_names_it(stage, make_graph) -> None:
    graph = make_graph({"a": (A, "b", {}), "b": (B, "", {"inputs": [("a", "boxes", "data")]})})
    outcome = await (await stage(graph)).put("1")
    assert isinstance(outcome.error, ItemFailed)
    assert str(outcome.error) == "node 'b' takes field 'boxes' of node 'a', which has only: data, result"


async def test_an_item_cannot_begin_where_a_join_would_wait_for_ever(stage, make_graph) -> None:
    s = await stage(fork(make_graph))
    with pytest.raises(BadRequest, match=r"cannot begin at node 'b': node 'd' takes what node 'a' gives"):
        s.put("1", node="b")
    assert await s.results("1", node="d") == ["1d"]


async def test_an_item_is_done_when_all_outputs_are(stage, make_graph, doors) -> None:
    graph = make_graph(
        {
            "a": (A, "b c", {}),
            "b": ((B, Step("Own", {"key": "label", "value": "cat"})), "", {}),
            "c": ((Step("Door", {"gate": "c"}), Step("Own", {"key": "score", "value": "0.9"})), "", {}),
        }
    )
    s = await stage(graph)
    future = s.put("1")
    await doors.until("c", 1)
    assert not future.done()
    doors.open_all()
    fields = (await future).fields
    assert (fields["label"], fields["score"], fields["result"]) == ("cat", "0.9", "1a")  # of the last output


async def test_arrays_that_two_branches_see_cannot_be_written(stage, make_graph, monkeypatch) -> None:
    class Writes(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            data += 1
            return data

    monkeypatch.setitem(catalog._registered, "Writes", Writes)
    shared = make_graph({"a": ("Identity", "b c", {}), "b": ("Writes", "", {}), "c": ("Identity", "", {})})
    alone = make_graph({"a": ("Identity", "b", {}), "b": ("Writes", "", {})})
    assert (await (await stage(shared)).put(np.zeros(2))).error is not None
    assert (await (await stage(alone)).put(np.zeros(2))).fields["result"].tolist() == [1, 1]


# ---- failures


async def test_one_bad_item_fails_alone_hazard_1(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    s = await stage(make_graph({"a": (Step("BatchWords", {"word": "!"}), "", {"max_batch": 8})}))
    data = ["1", "2", "x", "4", "5", "6", "7"]
    assert await s.results(*data) == ["1!", "2!", "item_failed", "4!", "5!", "6!", "7!"]


async def test_a_bad_item_does_not_let_its_neighbours_pass_steps_by_hazard_4(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    steps = ("Picky", Step("BatchWords", {"word": "1"}), B, Step("BatchWords", {"word": "2"}))
    s = await stage(make_graph({"a": (steps, "", {"max_batch": 8})}))
    assert await s.results("x", "g", "h") == ["item_failed", "g1b2", "h1b2"]
    assert await s.results("-", "g", "x", "h") == [None, "g1b2", "item_failed", "h1b2"]


async def test_an_error_names_node_op_and_place(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    s = await stage(make_graph({"dec": (A, "pick", {}), "pick": ((A, "Picky"), "", {})}))
    outcome = (await asyncio.gather(s.put("1"), s.put("x")))[1]
    assert isinstance(outcome.error, ItemFailed)
    assert str(outcome.error) == "op 'Picky' raised ValueError"
    assert outcome.error.detail.startswith("node 'pick', op 'Picky', item 1 of its batch\nTraceback")
    assert "this has an x" in outcome.error.detail
    assert outcome.node == "pick"
    assert outcome.fields == {"data": "x", "result": "xa"}  # as they were before this node


async def test_an_error_of_the_caller_stays_one(stage, make_graph, monkeypatch) -> None:
    class Refuses(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            raise BadRequest("expected an image, found 0 bytes")

    monkeypatch.setitem(catalog._registered, "Refuses", Refuses)
    outcome = await (await stage(make_graph({"a": ("Refuses", "", {})}))).put(b"")
    assert type(outcome.error) is BadRequest
    assert str(outcome.error) == "expected an image, found 0 bytes"


async def test_a_field_that_is_missing_is_named(stage, make_graph) -> None:
    s = await stage(make_graph({"a": (A, "", {})}))
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    s.runner.submit({"image": 1}, future.set_result)
    outcome = await future
    assert isinstance(outcome.error, BadRequest)
    assert str(outcome.error) == "op 'Words' found no field 'data', only: image"


async def test_too_few_rows_fail_the_batch_and_nobody_gets_another_s(stage, make_graph) -> None:
    s = await stage(make_graph({"a": ("TooFew", "", {"max_batch": 4})}))
    outcomes = await asyncio.gather(*[s.put(str(i)) for i in range(3)])
    assert all(isinstance(o.error, BadOutput) for o in outcomes)
    assert str(outcomes[0].error) == "op 'TooFew' returned 2 results for 3 items, expected one for each item"


async def test_a_batch_that_may_not_be_split_fails_whole(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    s = await stage(make_graph({"a": (("Identity", "BatchWords"), "", {"retry_split": False})}))
    assert await s.results("1", "x", "2") == ["item_failed"] * 3
    assert await s.results("1", "2") == ["1", "2"]


async def test_an_exception_in_place_of_a_result_fails_that_item(stage, make_graph, monkeypatch, caplog) -> None:
    caplog.set_level(logging.CRITICAL)

    class Places(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            return [KeyError("no") if d == "x" else d for d in data]

    monkeypatch.setitem(catalog._registered, "Places", Places)
    s = await stage(make_graph({"a": ("Places", "", {})}))
    assert await s.results("1", "x", "2") == ["1", "item_failed", "2"]


async def test_a_node_that_may_be_skipped_hands_on_what_it_got(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    s = await stage(make_graph({"a": (A, "b", {}), "b": ("Picky", "c", {"on_error": "skip"}), "c": (C, "", {})}))
    assert await s.results("x", "1") == ["xac", "1ac"]


async def test_an_op_that_hangs_costs_its_own_items_only(stage, make_graph, doors, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    graph = make_graph(
        {
            "a": ("Identity", "b", {}),
            "b": (
                Step("Door", {"gate": "b"}),
                "",
                {"run_timeout_s": 0.2, "instances": 1, "max_batch": 1, "idempotent": False},
            ),
        }
    )
    s = await stage(graph)
    stuck = s.put("stuck")
    await doors.until("b", 1)
    outcome = await asyncio.wait_for(stuck, 10.0)
    assert isinstance(outcome.error, WorkerDied)
    assert "node 'b'" in str(outcome.error)
    doors.open_all()
    assert await s.results("1", "2") == ["1", "2"]


# ---- time


async def test_an_item_whose_time_is_over_is_not_run(stage, make_graph, doors) -> None:
    s = await stage(make_graph({"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", {"max_batch": 1})}))
    first = s.put("1")
    await doors.until("b", 1)
    late = await s.put("late", budget_s=0.05)
    assert isinstance(late.error, DeadlineExceeded)
    assert late.node == "b"
    doors.open_all()
    assert (await first).error is None
    assert doors.met["b"] == [["1"]]
    with pytest.raises(DeadlineExceeded):
        s.put("2", budget_s=0.0)


async def test_a_node_may_have_a_deadline_of_its_own(stage, make_graph, doors) -> None:
    more = {"max_batch": 1, "deadline_s": 0.05}
    s = await stage(make_graph({"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", more)}))
    first = s.put("1")
    await doors.until("b", 1)
    assert isinstance((await s.put("late")).error, DeadlineExceeded)
    doors.open_all()
    assert (await first).error is None


async def test_an_item_that_is_cancelled_is_not_run_and_hears_nothing(stage, make_graph, doors) -> None:
    s = await stage(make_graph({"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", {"max_batch": 1})}))
    first = s.put("1")
    await doors.until("b", 1)
    gone = s.put("gone")
    s.last.cancel()
    s.last.cancel()
    doors.open_all()
    assert (await first).error is None
    assert await s.results("2") == ["2"]
    assert not gone.done()
    assert ["gone"] not in doors.met["b"]
    assert s.runner.in_flight == 0


# ---- batches


async def test_a_node_runs_when_nothing_more_is_on_its_way(stage, make_graph, doors) -> None:
    """Items that are inside are waited for, up to `wait_s`; without any there is nothing to wait for."""
    more = {"max_batch": 4, "wait_s": 60.0}
    graph = make_graph(
        {"a": (Step("Door", {"gate": "a"}), "b", {"max_batch": 1, "instances": 2}), "b": (Step("BatchWords"), "", more)}
    )
    s = await stage(graph)
    doors.door("a").set()
    assert await s.results("1") == ["1"]  # at once
    doors.door("a").clear()
    pair = [s.put("1"), s.put("2")]
    await doors.until("a", 3)
    doors.door("a").set()
    outcomes = await asyncio.wait_for(asyncio.gather(*pair), 20.0)
    assert [o.fields["result"] for o in outcomes] == ["1", "2"]


async def test_items_of_other_shapes_do_not_share_a_batch_of_a_model(stage, make_graph, monkeypatch) -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Model(BatchOp):
        takes = "tensor"

        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            seen.append([d.shape for d in data])
            return data

    monkeypatch.setitem(catalog._registered, "Shapes", Model)
    s = await stage(make_graph({"a": ("Identity", "b", {}), "b": ("Shapes", "", {"max_batch": 8, "wait_s": 0.05})}))
    data = [np.zeros((1, 3 + i % 2)) for i in range(12)]
    await s.results(*data)
    assert sum(map(len, seen)) == 12
    assert all(len(set(shapes)) == 1 for shapes in seen)


async def test_the_way_of_an_item_is_told(stage, make_graph) -> None:
    graph = make_graph({"a": ("Identity", "b", {}), "b": (Step("BatchWords"), "", {"max_batch": 8})}, trace=True)
    s = await stage(graph)
    outcomes = await asyncio.gather(*[s.put(str(i)) for i in range(4)])
    for o in outcomes:
        assert [h.node for h in o.hops] == ["a", "b"]
        assert all(h.size >= 1 and h.wait_s >= 0 and h.run_s >= 0 for h in o.hops)
    assert [o.hops[0].size for o in outcomes] == [4] * 4
    assert len({o.hops[0].batch_id for o in outcomes}) == 1


# ---- bounds


async def test_a_full_pipeline_refuses_at_once_hazard_6(stage, make_graph, doors) -> None:
    graph = make_graph({"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", {})}, in_flight=5)
    s = await stage(graph)
    inside = [s.put(str(i)) for i in range(5)]
    with pytest.raises(QueueFull, match="5 items are inside"):
        s.put("6")
    doors.open_all()
    await asyncio.gather(*inside)
    assert await s.results("6") == ["6"]


async def test_a_slow_last_node_keeps_what_is_before_it_from_starting(stage, make_graph, doors) -> None:
    graph = make_graph(
        {
            "a": ("Identity", "b", {"max_batch": 4}),
            "b": ("Identity", "c", {"max_batch": 2, "queue": 3}),
            "c": (Step("Door", {"gate": "c"}), "", {"max_batch": 1, "queue": 2}),
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


async def test_bytes_that_wait_are_bounded_but_one_large_item_passes(stage, make_graph, doors) -> None:
    graph = make_graph(
        {
            "a": ("Identity", "b", {"max_batch": 1}),
            "b": (Step("Door", {"gate": "b"}), "", {"max_batch": 1, "queue": 50, "queue_bytes": 2500}),
        }
    )
    s = await stage(graph)
    inside = [s.put(np.zeros(1000, np.uint8)) for _ in range(20)]
    await doors.until("b", 1)
    for _ in range(50):
        await asyncio.sleep(0.002)
        assert s.runner.statistics()["nodes"]["b"]["queued_bytes"] <= 3000
    doors.open_all()
    await asyncio.gather(*inside)
    assert (await s.put(np.zeros(10_000, np.uint8))).error is None


# ---- life


async def test_a_node_that_does_not_load_is_named(known, make_graph, monkeypatch) -> None:
    class Broken(ItemOp):
        def load(self, device: str) -> None:
            raise OSError("no such device")

    monkeypatch.setitem(catalog._registered, "Broken", Broken)
    runner = Runner(make_graph({"a": (A, "net", {}), "net": ("Broken", "", {})}))
    with pytest.raises(LoadFailed, match=r"node 'net': .*OSError: no such device"):
        await runner.start()
    with pytest.raises(ModelNotReady):
        runner.submit({"data": 1}, lambda o: None)


async def test_an_unknown_op_and_a_wrong_parameter_are_told_at_start(known, make_graph) -> None:
    with pytest.raises(ConfigError, match=r"node 'a': unknown op 'Wodrs'.*did you mean 'Words'"):
        await Runner(make_graph({"a": ("Wodrs", "", {})})).start()
    with pytest.raises(ConfigError, match=r"node 'a': Words has no parameter 'wrod'"):
        await Runner(make_graph({"a": (Step("Words", {"wrod": "1"}), "", {})})).start()


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"alias_of": "a"}, "alias of 'a'"),
        ({"each": Each("box", "crop", ("label",))}, "a fan-out"),
        ({"when": "score > 1"}, "when"),
        ({"require": "any"}, 'require = "any"'),
        ({"filter": "half_chance"}, "filter 'half_chance'"),
    ],
)
def test_what_is_not_run_yet_is_refused(make_graph, more, what) -> None:
    with pytest.raises(ConfigError, match=f"node 'b': not supported yet: {what}"):
        Runner(make_graph({"a": (A, "b", {}), "b": (B, "", more)}))


def test_a_filter_of_a_step_that_is_not_run_yet_is_refused(make_graph) -> None:
    with pytest.raises(ConfigError, match="node 'a', op 'Words': not supported yet: filter 'Target'"):
        Runner(make_graph({"a": ((A, Step("Words", {}, "Target")), "", {})}))


def test_a_join_must_say_what_it_takes(make_graph) -> None:
    with pytest.raises(ConfigError, match=r"node 'd' follows b, c and says not what it takes of each"):
        Runner(make_graph({"a": (A, "b c", {}), "b": (B, "d", {}), "c": (C, "d", {}), "d": (A, "", {})}))


async def test_closing_answers_what_was_accepted(stage, make_graph, doors) -> None:
    s = await stage(make_graph({"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", {"max_batch": 1})}))
    inside = [s.put(str(i)) for i in range(5)]
    await doors.until("b", 1)
    closing = asyncio.create_task(s.runner.close(20.0))
    await asyncio.sleep(0)
    with pytest.raises(ModelNotReady, match="closed"):
        s.put("6")
    doors.open_all()
    await closing
    assert [(await f).fields["result"] for f in inside] == list("01234")


async def test_closing_without_patience_tells_who_still_waits(stage, make_graph, doors) -> None:
    s = await stage(make_graph({"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", {"max_batch": 1})}))
    inside = [s.put(str(i)) for i in range(3)]
    await doors.until("b", 1)
    await s.runner.close(0.0)
    errors = [(await asyncio.wait_for(f, 5.0)).error for f in inside]
    assert all(e is not None for e in errors)


async def test_a_node_does_not_linger_for_items_that_wait_for_room_before_it(stage, make_graph) -> None:
    graph = make_graph(
        {
            "a": ("Identity", "b", {"max_batch": 1}),
            "b": ("BatchWords", "", {"max_batch": 8, "queue": 2, "wait_s": 60.0}),
        }
    )
    s = await stage(graph)
    assert await s.results(*"123456") == list("123456")


async def test_who_lingers_hears_of_a_batch_that_nobody_waits_for_any_more(stage, make_graph, doors) -> None:
    graph = make_graph(
        {"a": (Step("Door", {"gate": "a"}), "b", {}), "b": ("BatchWords", "", {"max_batch": 8, "wait_s": 60.0})}
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


async def test_nodes_count_what_they_do(stage, make_graph, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    metrics.drain()
    s = await stage(make_graph({"a": (A, "b", {}), "b": ("Picky", "", {})}))
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


async def test_what_ops_count_goes_the_same_way(stage, make_graph, monkeypatch) -> None:
    class Counts(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            metrics.counter("faces", 2)
            return data

    monkeypatch.setitem(catalog._registered, "Counts", Counts)
    metrics.drain()
    s = await stage(make_graph({"a": ("Counts", "", {})}))
    await s.results("1", "2")
    assert [d.value for d in metrics.drain() or [] if d.name == "faces"] == [4]


async def test_a_wait_below_a_millisecond_is_slept_and_not_spun_hazard_7(stage, make_graph, doors) -> None:
    graph = make_graph(
        {
            "a": (Step("Door", {"gate": "a"}), "b", {}),
            "b": ("BatchWords", "", {"max_batch": 8, "wait_s": 0.0007}),
        }
    )
    s = await stage(graph)
    other = s.put("2")
    await doors.until("a", 1)
    batcher = s.runner._hosts["b"].batcher
    turns = []
    poll = batcher.scheduler.poll
    batcher.scheduler.poll = lambda now: (turns.append(now), poll(now))[1]
    started = asyncio.get_running_loop().time()
    assert (await s.put("1", node="b")).fields["result"] == "1"
    assert asyncio.get_running_loop().time() - started >= 0.0007
    assert len(turns) <= 6  # its coming, its timer, its end: not one more for each turn of the loop
    doors.open_all()
    await other


async def test_a_full_batch_does_not_wait_behind_a_head_of_another_shape_hazard_8(
    stage, make_graph, doors, monkeypatch
):
    class Shaped(BatchOp):
        takes = "tensor"

        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            return data

    monkeypatch.setitem(catalog._registered, "Shaped", Shaped)
    graph = make_graph(
        {"a": (Step("Door", {"gate": "a"}), "b", {}), "b": ("Shaped", "", {"max_batch": 2, "wait_s": 60.0})}
    )
    s = await stage(graph)
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


async def test_work_without_a_model_is_never_held_for_more(stage, make_graph, doors) -> None:
    nodes = {"a": (Step("Door", {"gate": "a"}), "b", {}), "b": (B, "", {"wait_s": 60.0})}
    s = await stage(make_graph(nodes))
    other = s.put("2")
    await doors.until("a", 1)
    assert (await asyncio.wait_for(s.put("1", node="b"), 10.0)).fields["result"] == "1b"
    doors.open_all()
    await other


async def test_room_is_twice_what_runs_at_once_and_few_for_slices(stage, make_graph) -> None:
    nodes = {
        "a": (A, "b", {"instances": 8}),
        "b": ("BatchWords", "c", {"instances": 2, "max_batch": 4}),
        "c": (C, "", {"instances": 3, "max_batch": 2, "queue": 5}),
    }
    s = await stage(make_graph(nodes))
    told = s.runner.statistics()["nodes"]
    assert {name: node["capacity"] for name, node in told.items()} == {"a": 64, "b": 16, "c": 5}
    assert s.runner.width == (64 + 32) + (16 + 8) + (5 + 6)


async def test_a_node_whose_instance_is_gone_says_so(stage, make_graph, monkeypatch) -> None:
    s = await stage(make_graph({"a": (A, "", {})}))
    monkeypatch.setattr(s.runner._hosts["a"].handle, "state", "DRAINING")
    with pytest.raises(ModelNotReady, match="node 'a': model 'a' is draining"):
        s.put("1")
    assert s.runner.in_flight == 0


async def test_a_batch_that_hangs_is_run_again_in_halves(stage, make_graph, doors, monkeypatch, caplog) -> None:
    """Who is in two such batches fails with the one that hangs."""
    caplog.set_level(logging.CRITICAL)

    class Hangs(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            if "h" in data:
                doors.door("h").wait(30.0)
            return data

    monkeypatch.setitem(catalog._registered, "Hangs", Hangs)
    graph = make_graph({"a": ("Identity", "b", {}), "b": ("Hangs", "", {"run_timeout_s": 0.2, "max_batch": 4})})
    s = await stage(graph)
    assert await s.results("1", "h", "3", "4") == ["worker_died", "worker_died", "3", "4"]
    assert await s.results("5") == ["5"]


async def test_what_is_urgent_goes_first_at_every_node(stage, make_graph, doors) -> None:
    nodes = {"a": ("Identity", "b", {}), "b": (Step("Door", {"gate": "b"}), "", {"max_batch": 1, "queue": 10})}
    s = await stage(make_graph(nodes))
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


async def test_a_batch_without_memory_is_run_in_halves_and_remembered(stage, make_graph, doors, monkeypatch) -> None:
    class Large(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            if len(data) > 2:
                raise MemoryError
            return data

    monkeypatch.setitem(catalog._registered, "Large", Large)
    s = await stage(make_graph({"a": ("Large", "", {"max_batch": 8, "retry_split": False})}))
    assert await s.results(*"12345678") == list("12345678")
    assert s.runner.statistics()["nodes"]["a"]["ceiling"] == 3  # between 2, which ran, and 4, which did not
