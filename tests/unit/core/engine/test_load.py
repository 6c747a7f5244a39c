"""Whether callers keep a processor busy is told by processor times, not by what the model's own threads use."""

import threading
import time
from types import SimpleNamespace

import pytest

from penstock.core import os_threads
from penstock.core.engine import load
from penstock.core.engine.load import CallersLoad


class Clock:
    """A clock of the time, of the process's processor time, and of one model's thread."""

    now = process = model = 0.0

    def run(self, seconds: float, callers: float, model: float = 0.0) -> None:
        """Lets time pass, in which the callers and the model use such shares of a processor."""
        self.now += seconds
        self.process += seconds * (callers + model)
        self.model += seconds * model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    times = SimpleNamespace(
        monotonic=lambda: made.now, process_time=lambda: made.process, clock_gettime=lambda clock: made.model
    )
    monkeypatch.setattr(load, "time", times)
    return made


@pytest.mark.parametrize(
    ("callers", "model", "busy"),
    [(0.9, 0.0, True), (0.5, 0.5, True), (0.3, 0.7, False), (0.0, 1.0, False), (0.2, 0.0, False), (0.0, 0.0, False)],
)
def test_only_the_share_of_the_callers_counts(clock: Clock, callers: float, model: float, busy: bool) -> None:
    callers_load = CallersLoad()
    callers_load.running = True
    for _ in range(50):
        clock.run(0.02, callers, model)
        callers_load.look([7])
    assert callers_load.busy is busy


def test_busy_callers_that_rest_while_a_batch_waits_are_seen_at_once_and_one_idle_run_changes_nothing(
    clock: Clock,
) -> None:
    callers_load = CallersLoad()
    for _ in range(50):
        clock.run(0.02, 0.9)
        assert callers_load.look([]) is (clock.now > 0.059)
    clock.run(0.005, 0.1)
    assert not callers_load.look([])
    callers_load.running = True
    clock.run(0.02, 0.1, model=0.9)
    assert callers_load.look([])
    callers_load.running = False
    clock.run(0.0005, 0.0)  # too short to tell
    assert callers_load.look([])


def test_a_thread_has_a_clock_of_its_own() -> None:
    clocks: list[int] = []
    threads = [threading.Thread(target=lambda: clocks.append(os_threads.processor_clock())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    mine = os_threads.processor_clock()
    assert mine not in clocks
    before = time.clock_gettime(mine)
    assert 0 <= time.thread_time() - before < 1


def test_a_thread_of_the_model_that_has_just_ended_is_left_out() -> None:
    clocks: list[int] = []
    ended = threading.Thread(target=lambda: clocks.append(os_threads.processor_clock()))
    ended.start()
    ended.join()
    callers_load = CallersLoad()
    time.sleep(2 * load.LEAST_S)
    callers_load.look([*clocks, os_threads.processor_clock()])
