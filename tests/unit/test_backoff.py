"""The pauses between attempts that fail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backoff import Backoff, doubled_s

bounds = st.floats(1e-3, 60.0)


@given(bounds, bounds, st.integers(1, 2000))
def test_pauses_double_up_to_the_longest_until_an_attempt_succeeds(first_s: float, more_s: float, count: int) -> None:
    backoff = Backoff(first_s, first_s + more_s)
    pauses = [backoff.next_s() for _ in range(min(count, 40))]
    assert pauses == pytest.approx([min(first_s * 2**k, first_s + more_s) for k in range(len(pauses))])
    assert doubled_s(first_s, len(pauses), first_s + more_s) == pytest.approx(pauses[-1])
    assert first_s <= doubled_s(first_s, count, first_s + more_s) <= first_s + more_s
    backoff.reset()
    assert backoff.next_s() == first_s


def test_a_lower_bound_holds_for_one_pause_and_the_next_one_begins_there() -> None:
    backoff = Backoff(0.1, 30.0)
    assert [backoff.next_s(0.3) for _ in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert [backoff.next_s() for _ in range(3)] == pytest.approx([0.3, 0.6, 1.2])
    assert backoff.next_s(0.01) == 0.01
    assert backoff.next_s() == 0.1
