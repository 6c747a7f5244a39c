import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ItemFailed
from penstock.torchserve.handlers.responses import error_response
from penstock.torchserve.protocol.api import ApiError, no_worker
from penstock.torchserve.workflow import RunningWorkflow, make_workflow
from penstock.types import Item, ItemResult
from support.backend import Call, FakeBackend

DIAMOND = {"begin": ["a", "b"], "a": ["join"], "b": ["join"]}


def text(call: Call) -> str:
    return bytes(call.item.payload).decode()


def adding(word: str) -> Callable[[Call], None]:
    """A model that adds a word to its input."""
    return lambda call: call.reply(f"{text(call)} {word}".encode())


class Flow:
    """A workflow over a fake backend; `nodes` maps a node's name to its model."""

    def __init__(self, dag: dict[str, list[str]], nodes: dict[str, Callable[[Call], None]], **common: int) -> None:
        self.spec = make_workflow("w", {"models": {k.replace("_", "-"): v for k, v in common.items()}, "dag": dag})
        self.backend = FakeBackend({f"w__{name}": model for name, model in nodes.items()})
        self.running = RunningWorkflow(self.spec, dict.fromkeys(self.spec.nodes, "1"), self.backend)
        self.results: list[ItemResult] = []

    async def ask(self, body: bytes = b"x", kind: str = "text/plain") -> ItemResult:
        """The only result of a request."""
        before, arrived = len(self.results), asyncio.Event()

        def sink(result: ItemResult) -> None:
            self.results.append(result)
            arrived.set()

        self.running.submit(Item(body, "torchserve", kind, headers=[(b"X-A", b"1")]), sink)
        await asyncio.wait_for(arrived.wait(), 5)
        await asyncio.sleep(0)
        assert len(self.results) == before + 1
        return self.results[-1]

    def asked(self) -> list[str]:
        return [call.item.codec for call in self.backend.calls]


async def test_a_chain_passes_each_answer_to_the_next_node():
    flow = Flow({"a": ["b"], "b": ["c"]}, {name: adding(name) for name in "abc"})
    result = await flow.ask()
    assert (result.body, result.content_type, result.status, result.reason) == (
        b"x a b c",
        "application/json",
        200,
        "OK",
    )
    assert flow.asked() == ["torchserve", "torchserve_raw", "torchserve_raw"]
    first, *others = (call.item for call in flow.backend.calls)
    assert first.content_type == "text/plain"
    assert all(item.content_type == "" and item.headers == [(b"X-A", b"1")] for item in others)
    assert len({item.request_id for item in (first, *others)}) == 3


async def test_a_join_receives_the_answer_of_each_node_by_name():
    found: list[Any] = []

    def join(call: Call) -> None:
        found.append(msgspec.msgpack.decode(call.item.payload))
        call.reply(b"joined")

    flow = Flow(DIAMOND, {"begin": adding("0"), "a": adding("a"), "b": adding("b"), "join": join})
    assert (await flow.ask()).body == b"joined"
    assert found == [{"a": b"x 0 a", "b": b"x 0 b"}]
    assert flow.asked()[-1] == "torchserve_inputs"


async def test_several_last_nodes_give_one_json_object():
    nodes = {"begin": adding("0"), "a": lambda c: c.reply(b'{"k": [1, null]}'), "b": lambda c: c.reply(b"2")}
    result = await Flow({"begin": ["a", "b"]}, nodes).ask()
    assert json.loads(result.body) == {"a": {"k": [1, None]}, "b": 2}
    result = await Flow({"begin": ["a", "b"]}, {**nodes, "b": adding("no json")}).ask()
    assert isinstance(result.error, ApiError)
    assert result.error.message.startswith("Node b returned no JSON")


async def test_the_parts_of_a_streamed_answer_are_joined():
    def parts(call: Call) -> None:
        call.reply(b"1", final=False)
        call.reply(b"2", final=False)
        call.reply(b"3")

    assert (await Flow({"a": ["b"]}, {"a": parts, "b": adding("b")}).ask()).body == b"123 b"


def failing(times: int, answer: Callable[[Call], None]) -> Callable[[Call], None]:
    """A model whose first calls have this answer; later ones succeed."""
    left = [times]

    def model(call: Call) -> None:
        left[0] -= 1
        answer(call) if left[0] >= 0 else call.reply(b"ok")

    return model


FAILURES: dict[str, Callable[[Call], None]] = {
    "an error": lambda call: call.sink(ItemResult(error=ItemFailed("Prediction failed"))),
    "an error with a status": lambda call: call.sink(ItemResult(error_response(513, "no").body, status=513)),
    "silence": lambda call: None,
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=list(FAILURES))
async def test_a_failure_is_tried_again_as_often_as_the_node_allows(failure: Callable[[Call], None]):
    flow = Flow({"a": ["b"]}, {"a": failing(2, failure), "b": adding("b")}, retry_attempts=2, timeout_ms=20)
    assert (await flow.ask()).body == b"ok b"
    flow = Flow({"a": ["b"]}, {"a": failing(3, failure), "b": adding("b")}, retry_attempts=2, timeout_ms=20)
    result = await flow.ask()
    assert isinstance(result.error, ApiError)
    assert (result.error.status, result.error.message) == (500, "Error executing a")
    assert len(flow.backend.calls) == 3
    assert flow.running.in_flight == 0


async def test_the_status_that_a_handler_sets_is_ignored():
    assert (await Flow({"a": []}, {"a": lambda c: c.reply(b"body", status=404)}).ask()).status == 200


async def test_a_late_answer_is_dropped():
    calls: list[Call] = []
    flow = Flow({"a": []}, {"a": calls.append}, retry_attempts=0, timeout_ms=10)
    assert (await flow.ask()).error is not None
    (call,) = calls
    assert call.cancelled
    call.reply(b"late")
    assert len(flow.results) == 1


async def test_a_model_without_workers_fails_the_request_at_once():
    def none(call: Call) -> None:
        raise AssertionError("never called")

    flow = Flow({"a": ["b"]}, {"a": adding("a"), "b": none})
    submit = flow.backend.submit

    def refuse(model: str, *rest: Any, **more: Any) -> Any:
        if model == "w__b":
            raise no_worker(model, None)
        return submit(model, *rest, **more)

    flow.backend.submit = refuse  # type: ignore[method-assign]
    error = (await flow.ask()).error
    assert isinstance(error, ApiError)
    assert (error.status, error.message) == (500, no_worker("w__b", None).message)


async def test_a_failure_on_one_branch_cancels_the_other():
    waiting: list[Call] = []
    nodes = {"begin": adding("0"), "a": FAILURES["an error"], "b": waiting.append, "join": adding("join")}
    flow = Flow(DIAMOND, nodes, retry_attempts=0)
    assert (await flow.ask()).error is not None
    assert waiting[0].cancelled


async def test_a_client_that_leaves_cancels_the_node_at_work():
    waiting: list[Call] = []
    flow = Flow({"a": ["b"]}, {"a": waiting.append, "b": adding("b")})
    ticket = flow.running.submit(Item(b"x", "torchserve"), flow.results.append)
    for _ in range(3):
        await asyncio.sleep(0)
    assert flow.running.in_flight == 1
    ticket.cancel()
    assert waiting[0].cancelled
    assert (flow.running.in_flight, flow.results) == (0, [])


async def test_closing_answers_the_requests_in_flight_and_refuses_further_ones():
    waiting: list[Call] = []
    flow = Flow({"a": ["b"]}, {"a": waiting.append, "b": adding("b")})
    flow.running.submit(Item(b"x", "torchserve"), flow.results.append)
    await asyncio.sleep(0)
    closing = asyncio.create_task(flow.running.close(5))
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(ApiError, match="no worker"):
        flow.running.submit(Item(b"x", "torchserve"), flow.results.append)
    waiting[0].reply(b"a")
    await closing
    assert [result.body for result in flow.results] == [b"a b"]


@given(st.data())
def test_any_graph_gives_each_node_the_answers_of_the_nodes_before_it_once(data: st.DataObject):
    count = data.draw(st.integers(1, 7))
    before = {n: data.draw(st.sets(st.integers(0, n - 1), min_size=1)) for n in range(1, count)}
    dag = {f"n{n}": [f"n{after}" for after in before if n in before[after]] for n in range(count)}
    runs: list[str] = []

    def node(name: str) -> Callable[[Call], None]:
        def answer(call: Call) -> None:
            runs.append(name)
            joined = call.item.codec == "torchserve_inputs"
            inputs = msgspec.msgpack.decode(call.item.payload) if joined else {"body": bytes(call.item.payload)}
            found = {key: json.loads(value) for key, value in sorted(inputs.items())}
            call.reply(json.dumps([name, found]).encode())

        return answer

    def expected(n: int) -> Any:
        answers = {f"n{m}": expected(m) for m in sorted(before.get(n, ()))}
        found = answers if len(answers) > 1 else {"body": next(iter(answers.values()), 0)}
        return [f"n{n}", found]

    async def ask() -> Any:
        flow = Flow(dag, {name: node(name) for name in dag})
        return json.loads((await flow.ask(b"0")).body)

    found = asyncio.run(ask())
    last = [n for n in range(count) if not dag[f"n{n}"]]
    assert found == (expected(last[0]) if len(last) == 1 else {f"n{n}": expected(n) for n in last})
    assert sorted(runs) == sorted(dag)
