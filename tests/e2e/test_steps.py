"""A step model under a real server: requests join and leave between steps."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.errors import ConfigError, ItemFailed, LoadFailed
from support.waiting import wait_for

SOURCE = """
    import os
    import time

    import penstock

    class Gated:
        max_active = 2

        def admit(self, item):
            return item

        def step(self, states):
            time.sleep(0.001)
            return [penstock.Step(*self.advance(state)) for state in states]

        def advance(self, item):
            item["steps"] = item.get("steps", 0) + 1
            done = item["steps"] >= item["most"] if "most" in item else os.path.exists(item["gate"])
            return {"name": item["name"], "step": item["steps"]}, done
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "Gated")


def lines(server: Any, item: dict[str, Any], **headers: str) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    named = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    connection.request("POST", "/predictions/gated", json.dumps(item), named)
    with contextlib.closing(connection), connection.getresponse() as answer:
        assert answer.status == 200, answer.read()
        for line in answer:
            yield json.loads(line)


def test_short_answers_come_while_a_long_one_is_active(server: Any, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    long = lines(server, {"name": "long", "gate": str(gate)})
    assert next(long) == {"name": "long", "step": 1}
    assert [line["step"] for line in lines(server, {"name": "short", "most": 3})] == [1, 2, 3]
    assert next(long)["step"] > 1
    gate.touch()
    assert [line["step"] for line in long]


def test_events_end_with_the_error_of_an_item_past_its_deadline(server: Any) -> None:
    body = json.dumps({"name": "a", "most": 10**6}).encode()
    status, text = server.post("/predictions/gated", body, accept="text/event-stream", x_deadline_ms="100")
    assert status == 200
    events = text.decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == {"name": "a", "step": 1}
    assert events[-2].startswith("event: error")
    assert "deadline_exceeded" in events[-2]


def test_the_mode_is_visible_in_the_metadata(server: Any) -> None:
    list(lines(server, {"name": "a", "most": 5}))
    parameters = json.loads(server.get("/v2/models/gated")[1])["parameters"]
    assert (parameters["mode"], parameters["max_batch_size"]) == ("continuous", 2)


def test_steps_are_counted_in_the_metrics(server: Any) -> None:
    before = server.metric("step_items_total")
    list(lines(server, {"name": "a", "most": 7}))
    wait_for(lambda: server.metric("step_items_total") >= before + 7)
    assert server.metric("step_seconds_count") > 0


class Numbers:
    """Counts up to an item."""

    max_active = 3

    def admit(self, item: int) -> list[int]:
        if item < 0:
            raise ValueError(item)
        return [item, 0]

    def step(self, states: list[list[int]]) -> list[Any]:
        from penstock import Step

        for state in states:
            state[1] += 1
        return [Step(state[1], done=state[1] >= state[0]) for state in states]


@pytest.mark.parametrize("transport", ["process", "thread"])
async def test_an_engine_streams_the_parts_of_a_step_model(transport: str) -> None:
    async with Engine() as engine:
        await engine.load("n", ModelConfig(target="here", transport=transport), target=Numbers)

        async def parts(n: int) -> list[int]:
            return [part async for part in engine.stream("n", n)]

        found = await asyncio.gather(*(parts(n) for n in range(1, 20)))
        assert found == [list(range(1, n + 1)) for n in range(1, 20)]
        with pytest.raises(ItemFailed):
            await parts(-1)
        many = await engine.infer_many("n", [3, -1, 2, 5, 1])
        assert [type(value) for value in many] == [type(None), ItemFailed, *[type(None)] * 3]
        mode = engine.metadata("n", None)[0].parameters.get("mode")
        assert mode == ("continuous" if transport == "process" else None)


async def test_the_mode_batch_runs_a_step_model_batch_by_batch() -> None:
    async with Engine() as engine:
        batching = BatchingConfig(mode="batch", max_batch_size=4)
        await engine.load("n", ModelConfig(target="here", batching=batching), target=Numbers)
        assert [part async for part in engine.stream("n", 4)] == [1, 2, 3, 4]
        assert "mode" not in engine.metadata("n", None)[0].parameters


async def test_a_model_without_steps_cannot_be_continuous() -> None:
    async with Engine() as engine:
        batching = BatchingConfig(mode="continuous")
        config = ModelConfig(target="here", transport="thread", batching=batching)
        with pytest.raises((LoadFailed, ConfigError), match=r"admit\(item\) and step\(states\)"):
            await engine.load("n", config, target=lambda items: items)
