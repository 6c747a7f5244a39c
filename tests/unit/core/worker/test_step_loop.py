"""The loop that steps a model in a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock import metrics
from penstock.config.schema import BatchingConfig
from penstock.core.worker.step_loop import StepLoop
from penstock.types import Step

WAIT_S = 20.0


class Gated:
    """Steps once for every permit; an item is its number of steps."""

    max_active = 2

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.entered: list[int] = []
        self.began = threading.Semaphore(0)

    def admit(self, item: int) -> list[int]:
        return [item]

    def step(self, states: list[list[int]]) -> list[Step]:
        self.entered.append(len(states))
        self.began.release()
        assert self.permits.acquire(timeout=WAIT_S)
        for state in states:
            state[0] -= 1
        return [Step(state[0] or None, done=not state[0]) for state in states]


class Caller:
    """Records what one submission receives."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        self.found: list[tuple[int, Any]] = []
        self.changed = threading.Condition()

    def answer(self, pairs: list[tuple[int, Any]]) -> None:
        with self.changed:
            self.found += pairs
            self.changed.notify_all()

    def until(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


@pytest.fixture
def running() -> Iterator[Callable[..., tuple[Gated, StepLoop]]]:
    started: list[tuple[Gated, StepLoop, threading.Thread]] = []

    def start(**batching: Any) -> tuple[Gated, StepLoop]:
        model = Gated()
        loop = StepLoop(model, BatchingConfig(**batching))
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        started.append((model, loop, thread))
        return model, loop

    yield start
    for model, loop, thread in started:
        loop.stop()
        model.permits.release(1000)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_cancelled_submission_is_answered_no_more(running: Callable[..., tuple[Gated, StepLoop]]) -> None:
    model, loop = running()
    first, second = Caller(loop), Caller(loop)
    cancel = loop.submit([100], [None], first.answer)
    assert model.began.acquire(timeout=WAIT_S)
    cancel()
    loop.submit([2], [None], second.answer)
    model.permits.release(3)
    second.until(lambda: len(second.found) == 2)
    assert first.found == [(0, Step(99))]
    assert model.entered[:3] == [1, 1, 1]


def test_no_more_than_one_step_is_computed_ahead_of_what_is_sent(
    running: Callable[..., tuple[Gated, StepLoop]],
) -> None:
    model, loop = running()
    caller = Caller(loop)
    sent, blocked = threading.Event(), threading.Event()
    loop.submit([100], [None], caller.answer)
    assert model.began.acquire(timeout=WAIT_S)

    def send() -> None:
        blocked.set()
        sent.wait(WAIT_S)

    loop.soon(send)
    assert blocked.wait(WAIT_S)
    model.permits.release(2)
    assert not model.began.acquire(timeout=0.05), "the next step waits until the parts are sent"
    assert caller.found == []
    sent.set()
    caller.until(lambda: len(caller.found) == 2)


def test_a_batch_runs_to_its_end_in_rows_of_parts() -> None:
    model = Gated()
    model.permits.release(100)
    loop = StepLoop(model, BatchingConfig())
    assert list(loop.predict([2, 1, 2])) == [[1, None, None], [None, None, 1], [None, None, None]]
    rows = loop.predict([50, 50])
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    metrics.drain()
