import threading
from typing import Any

import pytest

from penstock.core.portal import loop_thread
from penstock.core.portal.loop_thread import LoopThread

PATIENCE_S = 20.0


async def answer() -> int:
    return 1


def test_a_call_that_comes_while_the_loop_ends_is_refused_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = []

    def call() -> None:
        try:
            outcomes.append(thread.run(answer()))
        except RuntimeError as e:
            outcomes.append(e)

    cancel_tasks = loop_thread._cancel_tasks

    def cancel_and_call(loop: Any) -> None:  # the loop has run for the last time, and is not closed yet
        cancel_tasks(loop)
        late.start()
        late.join(0.5)

    late = threading.Thread(target=call, daemon=True)
    thread = LoopThread("test")
    assert thread.run(answer()) == 1
    monkeypatch.setattr(loop_thread, "_cancel_tasks", cancel_and_call)
    thread.stop()
    late.join(PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError]


def test_a_call_that_came_before_the_end_is_answered_or_cancelled() -> None:
    for _ in range(50):
        thread = LoopThread("test")
        outcomes: list[Any] = []

        def call(thread: LoopThread = thread, outcomes: list[Any] = outcomes) -> None:
            try:
                while True:
                    outcomes.append(thread.run(answer()))
            except BaseException as e:
                outcomes.append(e)

        callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
        for caller in callers:
            caller.start()
        thread.stop()
        for caller in callers:
            caller.join(PATIENCE_S)
            assert not caller.is_alive()
