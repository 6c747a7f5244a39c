from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.bulk.limits import BURST_S, RateLimit


@given(st.floats(1, 1e7), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e5)), min_size=1, max_size=60))
def test_in_any_time_no_more_is_spent_than_the_rate_the_burst_and_one_cost(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    limit, now, spent = RateLimit(per_minute), 100.0, list[tuple[float, float]]()
    for pause, cost in steps:
        now += pause
        if limit.wait_s(now) == 0.0:
            limit.spend(cost)
            spent.append((now, cost))
    rate = per_minute / 60
    for i, (since, _) in enumerate(spent):
        for j in range(i, len(spent)):
            total = sum(cost for _, cost in spent[i:j])
            assert total <= (rate * (spent[j][0] - since + BURST_S)) * 1.001 + 1e-6


@given(st.floats(1, 1e7), st.lists(st.floats(0, 1e5), max_size=30))
def test_after_the_wait_something_may_be_spent(per_minute: float, costs: list[float]) -> None:
    limit, now = RateLimit(per_minute), 0.0
    for cost in costs:
        limit.wait_s(now)
        limit.spend(cost)
    now += limit.wait_s(now) * 1.0001
    assert limit.wait_s(now) == 0.0


def test_a_clock_that_jumps_back_gives_nothing() -> None:
    limit = RateLimit(60)
    limit.wait_s(1000.0)
    limit.spend(5)
    waits = [limit.wait_s(now) for now in (1000.0, 0.0, 1000.0)]
    assert waits[0] == waits[1] == waits[2]
