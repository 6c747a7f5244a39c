from __future__ import annotations

import pytest

from penstock.testing.clock import VirtualClock


def test_time_passes_only_when_it_is_told_to() -> None:
    clock = VirtualClock(5.0)
    assert clock() == 5.0
    clock.advance(1.5)
    assert clock() == clock.now == 6.5


def test_timers_fire_in_order_at_their_own_time_and_may_set_others() -> None:
    clock = VirtualClock()
    fired: list[tuple[str, float]] = []
    clock.call_at(3.0, lambda: fired.append(("c", clock())))
    clock.call_at(1.0, lambda: clock.call_at(2.0, lambda: fired.append(("b", clock()))))
    clock.call_at(9.0, lambda: fired.append(("late", clock())))
    clock.advance(4.0)
    assert fired == [("b", 2.0), ("c", 3.0)]
    assert clock() == 4.0


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        VirtualClock().advance(-1.0)
