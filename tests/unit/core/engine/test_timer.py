import asyncio
import time

import pytest

from penstock.core.engine import timer as module
from penstock.core.engine.timer import Timer


@pytest.fixture(params=["timerfd", "loop"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "loop":
        monkeypatch.setattr(module, "_libc", lambda: None)


@pytest.mark.usefixtures("kind")
async def test_the_timer_fires_at_the_earliest_requested_time() -> None:
    fired: list[float] = []
    event = asyncio.Event()
    timer = Timer(asyncio.get_running_loop(), lambda: (fired.append(time.monotonic()), event.set()))
    start = time.monotonic()
    timer.at(start + 30.0)
    timer.at(start + 0.01)
    await asyncio.wait_for(event.wait(), 5)
    timer.close()
    assert len(fired) == 1
    assert fired[0] >= start + 0.0099


@pytest.mark.usefixtures("kind")
async def test_a_closed_timer_is_silent() -> None:
    fired: list[int] = []
    timer = Timer(asyncio.get_running_loop(), lambda: fired.append(1))
    timer.at(time.monotonic() + 0.005)
    timer.close()
    await asyncio.sleep(0.02)
    assert not fired
