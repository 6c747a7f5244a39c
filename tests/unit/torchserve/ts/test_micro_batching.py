from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock import metrics
from penstock.torchserve.ts.base_handler import BaseHandler
from penstock.torchserve.ts.micro_batching import HANDLER_METHODS, MicroBatching


class Handler(BaseHandler):
    """Adds one in each step; says in which thread, and on which piece, each step worked."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = MicroBatching(self)  # type: ignore[method-assign]
        self.seen: list[tuple[str, int | None, int, str]] = []
        self.meet: threading.Barrier | None = None

    def step(self, name: str, data: list[Any]) -> list[Any]:
        self.seen.append((name, self.handle.get_micro_batch_idx(), len(data), threading.current_thread().name))
        if name == "inference" and self.meet is not None:
            self.meet.wait(10)
        return [n + 1 for n in data]

    def preprocess(self, data: Any) -> Any:
        return self.step("preprocess", [row["body"] for row in data])

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if "bad" in data:
            raise ValueError("bad")
        return self.step("inference", data)

    def postprocess(self, data: Any) -> Any:
        return self.step("postprocess", data)

    def get_insights(self, tensor_data: Any, raw: Any, target: Any) -> Any:
        return [("why", tensor_data)]

    def describe_handle(self) -> Any:
        return "described"


class Bad:
    """What the first step makes into something that the second refuses."""

    def __add__(self, other: int) -> str:
        return "bad"


@pytest.fixture
def handler():
    made = Handler()
    yield made
    made.handle.shutdown()
    names = tuple(f"penstock-{step}" for step in HANDLER_METHODS)
    assert not [t for t in threading.enumerate() if t.name.startswith(names)]


def rows(*values: Any) -> list[dict[str, Any]]:
    return [{"body": v} for v in values]


def test_micro_batches_keep_the_order_of_the_batch(handler, make_context):
    handler.handle.micro_batch_size = 2
    handler.handle.parallelism = {"preprocess": 3, "inference": 2}
    context = make_context()
    assert handler.handle(rows(*range(5)), context) == [3, 4, 5, 6, 7]
    assert sorted(s[:3] for s in handler.seen if s[0] == "inference") == [
        ("inference", 0, 2), ("inference", 1, 2), ("inference", 2, 1),
    ]  # fmt: skip
    assert handler.context is context
    assert [d.name for d in metrics.drain() or []] == ["HandlerTime"]
    assert handler.handle.get_micro_batch_idx() is None


def test_micro_batches_of_one_step_run_concurrently(handler, make_context):
    handler.meet = threading.Barrier(3)
    handler.handle.parallelism = {"inference": 3}
    assert handler.handle(rows(1, 2, 3), make_context()) == [4, 5, 6]


def test_the_number_of_threads_may_change_between_batches(handler, make_context):
    for count in (1, 4, 2):
        handler.handle.parallelism = {"inference": count}
        handler.meet = threading.Barrier(count)
        assert handler.handle(rows(*range(8)), make_context()) == list(range(3, 11))
        assert len({thread for step, _, _, thread in handler.seen if step == "inference"}) == count
        handler.seen.clear()
    assert handler.handle.parallelism == {"preprocess": 1, "inference": 2, "postprocess": 1}
    handler.meet = None
    handler.handle.shutdown()
    assert handler.handle(rows(1), make_context()) == [4]


def test_an_error_in_a_micro_batch_fails_only_its_batch(handler, make_context):
    context = make_context()
    with pytest.raises(ValueError, match="bad"):
        handler.handle(rows(1, Bad(), 2), context)
    assert handler.handle(rows(1, 2), context) == [4, 5]


def test_explanations_and_descriptions_are_not_split(handler, make_context):
    assert handler.handle(rows(1, 2), make_context(None, {"explain": "True"})) == [("why", [2, 3])]
    assert handler.handle(rows(1), make_context(None, {"describe": "True"})) == ["described"]


@pytest.mark.parametrize("parallelism", [{"inference": 0}, {"thinking": 1}])
def test_invalid_numbers_of_threads_are_refused(handler, parallelism):
    with pytest.raises(ValueError, match="parallelism"):
        handler.handle.parallelism = parallelism
