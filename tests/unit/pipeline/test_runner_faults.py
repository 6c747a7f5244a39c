"""PipelineRunner: items that fail, hang or die at a node, and the answers of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import BadOutput, BadRequest, DeadlineExceeded, ItemFailed, ModelNotReady, RunTimeout
from penstock.pipeline.graph import NodeStep
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp

A, B, C = NodeStep("Words", {"word": "a"}), NodeStep("Words", {"word": "b"}), NodeStep("Words", {"word": "c"})


async def test_one_bad_item_fails_alone_hazard_1(stage) -> None:
    s = await stage({"a": (NodeStep("BatchWords", {"word": "!"}), {"max_batch": 8})})
    data = ["1", "2", "x", "4", "5", "6", "7"]
    assert await s.results(*data) == ["1!", "2!", "item_failed", "4!", "5!", "6!", "7!"]


async def test_a_bad_item_does_not_make_its_neighbours_skip_steps_hazard_4(stage) -> None:
    steps = ("Picky", NodeStep("BatchWords", {"word": "1"}), B, NodeStep("BatchWords", {"word": "2"}))
    s = await stage({"a": (steps, {"max_batch": 8})})
    assert await s.results("x", "g", "h") == ["item_failed", "g1b2", "h1b2"]
    assert await s.results("-", "g", "x", "h") == [None, "g1b2", "item_failed", "h1b2"]


async def test_an_error_names_node_op_and_place(stage) -> None:
    s = await stage({"dec": (A, "pick"), "pick": ((A, "Picky"), "")})
    outcome = (await asyncio.gather(s.put("1"), s.put("x")))[1]
    assert isinstance(outcome.error, ItemFailed)
    assert str(outcome.error) == "node 'pick', op 'Picky' raised ValueError"
    assert outcome.error.detail.startswith("node 'pick', op 'Picky', item 1 of its batch\nTraceback")
    assert "this has an x" in outcome.error.detail
    assert outcome.node == "pick"
    assert outcome.fields == {"data": "x", "result": "xa"}  # as they were before this node


async def test_too_few_rows_fail_the_batch_and_mix_no_results(stage) -> None:
    s = await stage({"a": ("TooFew", {"max_batch": 4})})
    outcomes = await asyncio.gather(*[s.put(str(i)) for i in range(3)])
    assert all(isinstance(o.error, BadOutput) for o in outcomes)
    assert str(outcomes[0].error) == "node 'a': op 'TooFew' returned 0 results for 1 items, expected one for each item"


async def test_a_batch_that_must_not_be_split_fails_as_a_whole(stage) -> None:
    s = await stage({"a": (("Identity", "BatchWords"), {"retry_split": False})})
    assert await s.results("1", "x", "2") == ["item_failed"] * 3
    assert await s.results("1", "2") == ["1", "2"]


async def test_an_exception_as_a_result_fails_that_item(stage) -> None:

    class Places(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            return [KeyError("no") if d == "x" else d for d in data]

    catalog.register("Places", Places)
    s = await stage({"a": "Places"})
    assert await s.results("1", "x", "2") == ["1", "item_failed", "2"]


async def test_a_skipped_node_passes_on_its_input(stage) -> None:
    s = await stage({"a": (A, "b"), "b": ("Picky", "c", {"on_error": "skip"}), "c": C})
    assert await s.results("x", "1") == ["xac", "1ac"]


async def test_an_op_that_hangs_fails_only_its_own_items(stage, doors) -> None:
    s = await stage(
        {
            "a": ("Identity", "b"),
            "b": (
                NodeStep("Door", {"gate": "b"}),
                "",
                {"run_timeout_s": 0.4, "instances": 1, "max_batch": 1, "idempotent": False},
            ),
        }
    )
    stuck = s.put("stuck")
    await doors.until("b", 1)
    outcome = await asyncio.wait_for(stuck, 10.0)
    assert isinstance(outcome.error, RunTimeout)
    assert str(outcome.error) == "node 'b': the run exceeded run_timeout_s=0.4, and its worker was replaced"
    doors.open_all()
    assert await s.results("1", "2") == ["1", "2"]


async def test_a_node_without_an_instance_rejects_items(stage, monkeypatch) -> None:
    s = await stage({"a": A})
    monkeypatch.setattr(s.runner.node("a").engine.handle, "state", "DRAINING")
    with pytest.raises(ModelNotReady, match="node 'a': model 'a' is draining"):
        s.put("1")
    assert s.runner.in_flight == 0


async def test_of_a_hanging_batch_only_the_hanging_item_fails(stage, doors) -> None:

    class Hangs(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            if "h" in data:
                doors.door("h").wait(30.0)
            return data

    catalog.register("Hangs", Hangs)
    s = await stage({"a": ("Identity", "b"), "b": ("Hangs", {"run_timeout_s": 0.2, "max_batch": 4})})
    assert await s.results("1", "h", "3", "4") == ["1", "run_timeout", "3", "4"]
    assert await s.results("5") == ["5"]


async def test_a_hang_is_reported_once_after_its_time_and_not_repeated_without_retry_split(
    stage, doors, caplog
) -> None:
    more = {"run_timeout_s": 0.3, "max_batch": 4}
    step = NodeStep("BatchWords", {"gate": "a"})
    s = await stage({"a": (step, "b c", more), "b": A, "c": A})
    alone = await s.results("h")
    assert (alone, doors.met["a"]) == (["run_timeout"], [["h"]])  # it ran once
    s = await stage({"a": (("Identity", step), "", more | {"retry_split": False})})
    first = s.put("1")
    await doors.until("a", 2)
    outcomes = await asyncio.wait_for(asyncio.gather(first, *map(s.put, "234")), 10.0)
    assert [o.error.code for o in outcomes] == ["run_timeout"] * 4
    assert doors.met["a"][1:] == [["1"], ["2", "3", "4"]]


async def test_a_batch_that_runs_out_of_memory_is_halved_and_the_limit_is_remembered(stage, doors) -> None:
    class Large(BatchOp):
        def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
            if len(data) > 2:
                raise MemoryError
            return data

    catalog.register("Large", Large)
    s = await stage({"a": ("Large", {"max_batch": 8, "retry_split": False})})
    assert await s.results(*"12345678") == list("12345678")
    assert s.runner.statistics()["nodes"]["a"]["ceiling"] == 3  # between 2, which ran, and 4, which did not


async def test_an_op_that_ends_its_thread_fails_only_its_own_items(stage, make_graph) -> None:

    class Exits(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            if data == "die":
                raise SystemExit
            return data

    catalog.register("Exits", Exits)
    nodes = {
        "a": ("Identity", "b", {"max_batch": 2}),
        "b": ("Exits", "c", {"max_batch": 1, "queue": 2, "instances": 2}),
        "c": (C, {"max_batch": 1, "queue": 1}),
    }
    s = await stage(make_graph(nodes, in_flight=64))
    found = await s.results(*[str(i) if i != 7 else "die" for i in range(30)])
    assert found == [f"{i}c" if i != 7 else "item_failed" for i in range(30)]


async def test_a_node_that_takes_too_long_is_skipped(stage, doors) -> None:
    soft = {"max_batch": 1, "on_error": "skip", "deadline_s": 0.05}
    s = await stage({"a": (A, "b"), "b": (NodeStep("Door", {"gate": "b"}), "c", soft), "c": C})
    first = s.put("1")
    await doors.until("b", 1)
    assert await s.results("2") == ["2ac"]
    late = await s.put("3", budget_s=0.02)  # the caller's own time is over: nobody waits for what is left
    assert isinstance(late.error, DeadlineExceeded)
    doors.open_all()
    assert (await first).fields["result"] == "1ac"


async def test_an_error_keeps_a_users_class(stage) -> None:
    class Blurred(BadRequest):
        def __init__(self, sharpness: float) -> None:
            super().__init__(f"the image is blurred: {sharpness}")

    class Sharp(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            raise Blurred(0.1)

    catalog.register("Sharp", Sharp)
    outcome = await (await stage({"a": "Sharp"})).put("1")
    assert str(outcome.error) == "node 'a', op 'Sharp': the image is blurred: 0.1"
    assert type(outcome.error) is BadRequest  # callers may lack the user's class
    assert type(outcome.error.original.error) is Blurred
    assert outcome.error.detail.startswith("node 'a', op 'Sharp', item 0")


async def test_a_callback_that_raises_does_not_affect_other_answers(stage) -> None:
    s = await stage({"a": A})

    def bad(outcome: Any) -> None:
        raise KeyError("of the caller")

    s.runner.submit({"data": "0"}, bad)
    assert await s.results("1", "2") == ["1a", "2a"]
    assert s.runner.in_flight == 0
