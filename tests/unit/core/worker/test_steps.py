"""The states that a step model advances together."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.worker.steps import RETRY_STEPS, ActiveSteps, StepLimits, StepOutcome, limits_of
from penstock.errors import BadOutput, BadRequest, DeadlineExceeded, ItemFailed, LoadFailed
from penstock.types import Step


class Countdown:
    """An item is its number of steps, or a tuple (verb, number); each step gives the number that is left."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.evicted: list[Any] = []
        self.answer: Any = None  # instead of the steps
        self.memory = 1000  # states that fit

    def admit(self, item: Any) -> dict[str, Any]:
        verb, left = item if isinstance(item, tuple) else ("", item)
        if verb == "refused":
            raise BadRequest("no such item")
        return {"item": item, "verb": verb, "left": left}

    def step(self, states: list[dict[str, Any]]) -> Any:
        self.calls.append([state["item"] for state in states])
        if len(states) > self.memory:
            raise MemoryError
        for state in states:
            if state["verb"] == "raises":
                raise ValueError(state["item"])
        if self.answer is not None:
            return self.answer
        steps: list[Any] = []
        for state in states:
            state["left"] -= 1
            steps.append(
                KeyError("bad") if state["verb"] == "returns" else Step(state["left"], done=state["left"] <= 0)
            )
        return steps

    def evict(self, state: dict[str, Any]) -> None:
        self.evicted.append(state["item"])


def made(max_active: int = 4, max_steps: int = 100, **keys: bool) -> tuple[Countdown, ActiveSteps]:
    model = Countdown()
    return model, ActiveSteps(model, StepLimits(max_active, max_steps, **keys))


def kinds(outcomes: list[StepOutcome]) -> list[tuple[Any, Any, bool]]:
    """Outcomes with the class of an exception in its place."""
    return [(key, type(part) if isinstance(part, BaseException) else part, done) for key, part, done in outcomes]


def test_a_new_item_joins_the_active_ones_at_the_next_step() -> None:
    model, steps = made()
    steps.add("a", 3)
    assert steps.advance(0.0) == [("a", 2, False)]
    steps.add("b", 1)
    assert steps.advance(0.0) == [("a", 1, False), ("b", 0, True)]
    assert steps.advance(0.0) == [("a", 0, True)]
    assert model.calls == [[3], [3, 1], [3]]
    assert model.evicted == [1, 3]
    assert steps.idle


def test_items_without_a_place_wait_in_order() -> None:
    model, steps = made(max_active=2)
    for key in range(4):
        steps.add(key, 2)
    assert [key for _ in range(4) for key, _, done in steps.advance(0.0) if done] == [0, 1, 2, 3]
    assert [len(call) for call in model.calls] == [2, 2, 2, 2]


def test_a_state_without_a_part_is_not_reported() -> None:
    model, steps = made()
    steps.add("a", 5)
    model.answer = [Step()]
    assert steps.advance(0.0) == []
    model.answer = (Step(done=True),)
    assert steps.advance(0.0) == [("a", None, True)]


def test_an_item_that_is_not_admitted_fails_alone() -> None:
    model, steps = made()
    steps.add("a", ("refused", 1))
    steps.add("b", 1)
    assert kinds(steps.advance(0.0)) == [("a", BadRequest, True), ("b", 0, True)]
    assert model.evicted == [1]


def test_a_step_that_raises_is_repeated_in_halves_and_only_the_guilty_item_fails() -> None:
    model, steps = made()
    items = [2, ("raises", 2), 3, 4]
    for item in items:
        steps.add(item, item)
    found = steps.advance(0.0)
    assert kinds(found) == [(2, 1, False), (("raises", 2), ValueError, True), (3, 2, False), (4, 3, False)]
    assert model.evicted == [("raises", 2)]
    assert model.calls == [items, items[:2], items[:1], items[1:2], items[2:]]
    assert kinds(steps.advance(0.0)) == [(2, 0, True), (3, 1, False), (4, 2, False)]


def test_without_split_all_items_of_a_step_that_raises_fail() -> None:
    model, steps = made(split=False)
    steps.add("a", 2)
    steps.add("b", ("raises", 2))
    assert kinds(steps.advance(0.0)) == [("a", ValueError, True), ("b", ValueError, True)]
    assert len(model.calls) == 1
    assert steps.idle


def test_an_exception_in_place_of_a_step_fails_this_item() -> None:
    _, steps = made()
    steps.add("a", ("returns", 2))
    steps.add("b", 2)
    assert kinds(steps.advance(0.0)) == [("a", KeyError, True), ("b", 1, False)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([Step()], "1 results for 2 states"),
        ([Step()] * 3, "3 results for 2 states"),
        ({"a": Step()}, "returned a dict, expected a list of 2"),
        (None, "returned a NoneType"),
    ],
    ids=["too few", "too many", "unknown states", "none"],
)
def test_results_that_fit_no_state_fail_the_states_of_this_step_with_what_was_found(answer: Any, text: str) -> None:
    model, steps = made()
    model.step = lambda states: answer  # type: ignore[method-assign]
    steps.add("a", 2)
    steps.add("b", 2)
    for _, error, done in steps.advance(0.0):
        assert type(error) is BadOutput
        assert text in error.message
        assert done
    assert len(model.evicted) == 2
    model.step = lambda states: [Step(1, done=True)]  # type: ignore[method-assign]
    steps.add("c", 1)
    assert steps.advance(0.0) == [("c", 1, True)]


def test_a_result_that_is_no_step_fails_its_own_state() -> None:
    model, steps = made()
    steps.add("a", 2)
    steps.add("b", 2)
    model.answer = ["text", Step(1)]
    (_, error, _), second = steps.advance(0.0)
    assert type(error) is BadOutput
    assert "str for a state" in error.message
    assert second == ("b", 1, False)


def test_a_cancelled_item_is_evicted_and_frees_its_place_for_the_next_step() -> None:
    model, steps = made(max_active=1)
    for key in "abc":
        steps.add(key, 5)
    steps.advance(0.0)
    steps.cancel("b")
    steps.cancel("a")
    steps.cancel("unknown")
    assert steps.advance(0.0) == [("c", 4, False)]
    assert model.evicted == [5]


def test_an_item_ends_at_its_deadline_also_while_it_waits() -> None:
    _, steps = made(max_active=1)
    steps.add("a", 50, deadline_s=2.0)
    steps.add("b", 50, deadline_s=1.0)
    steps.add("c", 50)
    assert steps.advance(0.5) == [("a", 49, False)]
    assert kinds(steps.advance(1.0)) == [("b", DeadlineExceeded, True), ("a", 48, False)]
    assert kinds(steps.advance(2.0)) == [("a", DeadlineExceeded, True), ("c", 49, False)]


def test_an_item_that_never_ends_fails_after_max_steps() -> None:
    model, steps = made(max_steps=3)
    steps.add("a", 1000)
    steps.add("b", 3)
    found = [kinds(steps.advance(0.0)) for _ in range(3)]
    assert found[2] == [("a", 997, False), ("a", ItemFailed, True), ("b", 0, True)]
    assert model.evicted == [1000, 3]


def test_items_take_as_many_places_as_they_cost() -> None:
    model, steps = made(max_active=4)
    model.cost = lambda item: item  # type: ignore[attr-defined]
    steps = ActiveSteps(model, StepLimits(4, 100))
    for key, places in enumerate((3, 2, 1, 5, 0)):
        steps.add(key, places)
    assert [key for key, _, _ in steps.advance(0.0)] == [0], "the second does not fit, and the third may not overtake"
    steps.cancel(0)
    found = kinds(steps.advance(0.0))
    assert found == [(3, BadRequest, True), (4, BadOutput, True), (1, 1, False), (2, 0, True)]


def test_a_step_that_runs_out_of_memory_is_halved_and_the_size_that_fits_is_remembered() -> None:
    model, steps = made(max_active=8, max_steps=10**6, split=False)
    model.memory = 4
    for key in range(8):
        steps.add(key, 10_000)
    assert [part for _, part, _ in steps.advance(0.0)] == [9_999] * 8
    assert [len(call) for call in model.calls] == [8, 4, 4]
    model.calls.clear()
    steps.advance(0.0)
    assert [len(call) for call in model.calls] == [4, 4]
    for key in range(5):
        steps.cancel(key)
    for key in range(8, 12):
        steps.add(key, 10_000)
    steps.advance(0.0)
    assert steps.active == 4, "no more are admitted than fit"
    model.memory = 8
    for _ in range(RETRY_STEPS):
        steps.advance(0.0)
    assert steps.active == 7


def test_a_state_that_alone_runs_out_of_memory_fails() -> None:
    model, steps = made()
    model.memory = 0
    steps.add("a", 1)
    assert kinds(steps.advance(0.0)) == [("a", MemoryError, True)]


def test_an_evict_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, steps = made()
    model.evict = lambda state: 1 / 0  # type: ignore[method-assign]
    steps = ActiveSteps(model, StepLimits(4, 100))
    steps.add("a", 1)
    assert steps.advance(0.0) == [("a", 0, True)]
    assert "evict_failed" in caplog.text


def test_the_limits_come_from_the_configuration_or_the_model() -> None:
    model = Countdown()
    keys: dict[str, Any] = {"max_steps": 9, "split": True, "idempotent": False}
    assert limits_of(model, max_active=None, **keys) == StepLimits(32, 9, False, False)
    model.max_active = 5  # type: ignore[attr-defined]
    assert limits_of(model, max_active=None, **keys).max_active == 5
    assert limits_of(model, max_active=7, **keys).max_active == 7
    model.max_active = "many"  # type: ignore[attr-defined]
    with pytest.raises(LoadFailed, match="found 'many'"):
        limits_of(model, max_active=None, **keys)
