"""One batch of a model that works on many side by side, without a worker around it."""

import sys
import threading
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.transports.concurrent import ConcurrentBatch
from penstock.core.wire.messages import Unsent
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import BadOutput, Cancelled, ItemFailed, PenstockError
from penstock.types import BatchPart, Item, Step


class Late:
    """Keeps what it was given until the test answers."""

    __penstock_concurrency__ = 8

    def predict(self, items: list[Any]) -> list[Any]:
        return items

    def __penstock_submit__(self, values: list[Any], budgets_s: list[float | None], answer: Any) -> Any:
        self.values, self.budgets_s, self.answer, self.ended = values, budgets_s, answer, 0
        return self.end

    def end(self) -> None:
        self.ended += 1


class Helpers:
    """In place of processes that preprocess: keeps what it was given until the test answers."""

    def soon(self, values: list[Any], done: Any) -> None:
        self.values, self.done = values, done


class Stage:
    def __init__(self, model: Any, items: list[Item], helpers: Any = None) -> None:
        self.model = model
        wrapped = PythonModel(model)
        wrapped.load("cpu")
        wrapped.helpers = helpers
        self.runner = BatchRunner(wrapped, wrapped.metadata("m", "1"), BatchingConfig())
        self.parts: list[BatchPart] = []
        self.lock = threading.Lock()
        self.batch = ConcurrentBatch(self.runner, 7, self.runner.decode(items), self.note)
        self.batch.start()

    def note(self, batch: ConcurrentBatch, places: list[int]) -> None:
        with self.lock:
            self.parts.append(batch.part(places))

    @property
    def told(self) -> list[tuple[list[int], list[Any], bool]]:
        return [
            (part.at or [], [r.error or r.body for r in part.results if r is not None], part.final)
            for part in self.parts
        ]


def test_parts_are_sent_at_once_and_the_last_one_is_final() -> None:
    stage = Stage(Late(), [Item(n) for n in range(4)])
    assert stage.model.values == [0, 1, 2, 3]
    stage.model.answer([(2, "c"), (0, "a")])
    stage.model.answer([])
    stage.model.answer([(1, "b")])
    stage.model.answer([(3, "d")])
    assert stage.told == [([2, 0], ["c", "a"], False), ([1], ["b"], False), ([3], ["d"], True)]
    assert [part.batch_id for part in stage.parts] == [7, 7, 7]


def test_an_unencodable_result_fails_only_its_item() -> None:
    stage = Stage(Late(), [Item(b"0", "native", "application/json"), Item(b"1", "native", "application/json")])
    stage.model.answer([(0, object()), (1, 1)])
    ((_, (bad, good), _),) = stage.told
    assert type(bad) is BadOutput
    assert good == b"1"


def test_a_model_can_answer_before_it_reads_the_whole_batch() -> None:
    class Eager(Late):
        def __penstock_submit__(self, values: list[Any], budgets_s: list[float | None], answer: Any) -> Any:
            for place, value in enumerate(values):
                answer([(place, value)])
            return super().__penstock_submit__(values, budgets_s, answer)

    stage = Stage(Eager(), [Item(0), Item(1)])
    assert [final for _, _, final in stage.told] == [False, True]
    stage.batch.cancel()
    assert stage.model.ended == 0
    assert len(stage.parts) == 2


def test_a_cancel_that_raises_ends_the_batch_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Sticks(Late):
        def end(self) -> None:
            raise RuntimeError("stuck")

    stage = Stage(Sticks(), [Item(0)])
    stage.batch.cancel()
    assert [final for _, _, final in stage.told] == [True]
    assert "stuck" in caplog.text


def test_preprocess_and_postprocess_are_called_as_for_any_model() -> None:
    class Halves(Late):
        def preprocess(self, item: Any) -> Any:
            if item % 2:
                raise ValueError("odd")
            return item // 2

        def postprocess(self, result: Any) -> Any:
            if result == "end":
                sys.exit(3)
            return [result]

    stage = Stage(Halves(), [Item(4), Item(5), Item(6), Item(8)])
    (places, (bad,), final) = stage.told[0]
    assert (places, final, isinstance(bad, PenstockError)) == ([1], False, True)
    assert stage.model.values == [2, 3, 4]
    stage.model.answer([(0, "x"), (1, "y")])
    assert stage.told[1] == ([0, 2], [["x"], ["y"]], False)
    stage.model.answer([(2, "end")])
    ((_, (ended,), _),) = stage.told[2:]
    assert ended.message == "postprocess raised SystemExit"


class Preprocessing(Late):
    values = None

    def preprocess(self, item: Any) -> Any:
        raise AssertionError("a helper does it")


def test_the_model_receives_a_batch_when_helpers_have_preprocessed_it() -> None:
    helpers, items = Helpers(), [Item(n, budget_s=10.0 if n else None) for n in range(3)]
    stage = Stage(Preprocessing(), items, helpers)
    assert (helpers.values, stage.model.values) == ([0, 1, 2], None)
    helpers.done(["a", Unsent(ItemFailed("no")), "c"])
    assert stage.model.values == ["a", "c"]
    none, left_s = stage.model.budgets_s
    assert none is None
    assert 0 < left_s < 10
    stage.model.answer([(1, "z"), (0, "x")])
    ((_, (error,), _), *told) = stage.told
    assert (error.message, told) == ("no", [([2, 0], ["z", "x"], True)])


@pytest.mark.parametrize("first", ["cancel", "preprocess"])
def test_a_batch_that_is_cancelled_before_it_is_preprocessed_is_not_run(first: str) -> None:
    helpers = Helpers()
    stage = Stage(Preprocessing(), [Item(0), Item(1)], helpers)
    if first == "cancel":
        stage.batch.cancel()
        assert stage.told == []
        helpers.done(["a", "b"])
        assert stage.model.values is None
    else:
        helpers.done(["a", "b"])
        stage.batch.cancel()
        assert stage.model.ended == 1
    ((places, errors, final),) = stage.told
    assert (places, final, {type(e) for e in errors}) == ([0, 1], True, {Cancelled})


def test_answers_of_many_threads_are_sent_once_each() -> None:
    stage = Stage(Late(), [Item(n) for n in range(400)])
    threads = [
        threading.Thread(target=lambda k=k: [stage.model.answer([(n, k)]) for n in range(k, 400)]) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place for places, _, _ in stage.told for place in places) == list(range(400))
    assert [final for _, _, final in stage.told].count(True) == 1
    assert stage.parts[-1].final


def test_concurrency_requires_a_submit_method() -> None:
    class Plain:
        __penstock_concurrency__ = 8

        def predict(self, items: list[Any]) -> list[Any]:
            return items

    model = PythonModel(Plain())
    model.load("cpu")
    assert (model.concurrency, model.submit) == (1, None)


def streamed(stage: Stage) -> list[list[Any]]:
    """The results of the streamed parts that are to be sent now."""
    parts = stage.batch.streamed()
    assert not any(part.final or part.at for part in parts)
    return [[r and (type(r.error) if r.error else r.body) for r in part.results] for part in parts]


def test_steps_are_sent_as_parts_and_their_last_one_ends_the_item() -> None:
    stage = Stage(Late(), [Item(0), Item(1)])
    stage.model.answer([(1, Step("a")), (0, Step("b"))])
    stage.model.answer([(1, Step("c", done=True))])
    assert streamed(stage) == [[None, "a"], ["b", None], [None, "c"]]
    assert streamed(stage) == []
    assert stage.told == [([], [], False), ([1], [None], False)]
    stage.model.answer([(1, Step("late")), (0, ValueError("no"))])
    assert streamed(stage) == []
    ((_, (error,), final),) = stage.told[2:]
    assert type(error) is ItemFailed
    assert final


def test_a_step_without_a_part_is_a_sign_of_life() -> None:
    stage = Stage(Late(), [Item(0)])
    stage.model.answer([(0, Step())])
    assert streamed(stage) == [[None]]
    stage.model.answer([(0, Step(done=True))])
    assert streamed(stage) == []
    assert stage.told[-1] == ([0], [None], True)


def test_streamed_parts_are_encoded_and_one_that_cannot_be_is_an_error() -> None:
    stage = Stage(Late(), [Item(b"0", "native", "application/json"), Item([1, 2], many=True, rows=2)])
    stage.model.answer([(0, Step([1])), (2, Step("x")), (0, Step(object()))])
    assert streamed(stage) == [[b"[1]", None], [None, [None, "x"]], [BadOutput, None]]
