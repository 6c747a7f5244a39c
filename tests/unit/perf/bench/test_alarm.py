from __future__ import annotations

import asyncio
import sys
import time

import pytest

from penstock.perf.bench import alarm
from penstock.perf.bench.alarm import LoopTimer, TimerFile, make_alarm

KINDS = [LoopTimer, *([TimerFile] if sys.platform == "linux" else [])]


def loops() -> list[object]:
    found: list[object] = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    try:
        import uvloop
    except ImportError:
        return found
    return [*found, pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.mark.parametrize("new_loop", loops())
@pytest.mark.parametrize("kind", KINDS)
def test_an_alarm_rings_once_for_each_time_that_is_set(
    kind: type[LoopTimer] | type[TimerFile], new_loop: object
) -> None:
    rung: list[float] = []

    async def run() -> list[float]:
        rang = asyncio.Event()

        def ring() -> None:
            rung.append(time.perf_counter())
            rang.set()

        made = kind(ring)
        asked = []
        for after_s in (0.01, -1.0, 0.0005, 0.02):
            asked.append(time.perf_counter() + after_s)
            made.at(asked[-1] + 1000)  # replaced
            made.at(asked[-1])
            await rang.wait()
            rang.clear()
        await asyncio.sleep(0.01)
        made.at(time.perf_counter() + 0.005)
        made.close()
        await asyncio.sleep(0.02)
        return asked

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        asked = runner.run(run())
    assert len(rung) == 4
    slack = 0.0015 if kind is LoopTimer else 0.0  # a loop's timer counts whole milliseconds
    assert all(when >= at - slack for when, at in zip(rung, asked, strict=True)), "never early"


@pytest.mark.parametrize("new_loop", loops())
@pytest.mark.parametrize("kind", KINDS)
def test_an_alarm_may_be_set_anew_by_what_it_calls(kind: type[LoopTimer] | type[TimerFile], new_loop: object) -> None:
    async def run() -> int:
        rung = 0
        over = asyncio.Event()

        def ring() -> None:
            nonlocal rung
            rung += 1
            if rung < 50:
                made.at(time.perf_counter() + 0.0002)
            else:
                over.set()

        made = kind(ring)
        made.at(time.perf_counter())
        await over.wait()
        await asyncio.sleep(0.005)
        made.close()
        return rung

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        assert runner.run(run()) == 50


async def test_without_a_timer_file_the_loops_own_timer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ring: object) -> TimerFile:
        raise OSError(38, "timerfd_create")

    monkeypatch.setattr(alarm, "TimerFile", refuse)
    made = make_alarm(lambda: None)
    assert isinstance(made, LoopTimer)
    made.close()
