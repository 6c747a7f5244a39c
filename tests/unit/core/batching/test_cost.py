import pytest

from penstock.core.batching.cost import Cost


def learned(samples: list[tuple[int, float]]) -> Cost:
    cost = Cost()
    for rows, seconds in samples:
        cost.add(rows, seconds)
    return cost


def test_a_line_is_found() -> None:
    cost = learned([(n, 0.005 + 0.0002 * n) for n in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)])
    assert cost.ready
    assert (cost.a, cost.b) == pytest.approx((0.005, 0.0002), rel=1e-6)
    assert cost.knee == pytest.approx(25)
    for rows, seconds, weight in cost.points:
        assert seconds == pytest.approx(0.005 + 0.0002 * rows, rel=1e-6)
        assert weight > 0
    assert cost.high(10) == pytest.approx(cost.t(10) * cost.ratio)


def test_the_first_two_samples_are_thrown_away_and_six_more_are_needed() -> None:
    cost = learned([(1, 100.0), (1, 100.0)] + [(4, 1.0)] * 5)
    assert not cost.ready
    cost.add(4, 1.0)
    assert cost.ready
    assert cost.t(4) == pytest.approx(1.0)


def test_one_size_claims_no_set_up_cost() -> None:
    cost = learned([(8, 2.0)] * 20)
    assert cost.ready
    assert not cost.fitted
    assert (cost.a, cost.b) == pytest.approx((0.0, 0.25))
    assert [cost.t(n) for n in (1, 8, 64)] == pytest.approx([0.25, 2.0, 2.0]), "what is possible at least"
    assert cost.high(64) == pytest.approx(2.0 * cost.ratio)


def test_a_falling_line_becomes_a_proportional_one() -> None:
    cost = learned([(n, 1.0 / n) for n in (1, 2, 4, 8, 16) for _ in range(4)])
    assert cost.b > 0
    assert cost.a >= 0


def test_a_line_through_negative_set_up_becomes_a_proportional_one() -> None:
    cost = learned([(n, n * n * 0.01) for n in (1, 2, 4, 8, 16) for _ in range(4)])
    assert cost.a == 0


def test_a_straggler_is_clipped_in_the_mean_and_counted_in_the_ratio() -> None:
    cost = learned([(4, 1.0)] * 20)
    before = cost.ratio
    cost.add(4, 50.0)
    assert cost.t(4) < 1.1
    assert cost.ratio > before


def test_the_ratio_settles_near_the_upper_end_of_the_spread() -> None:
    cost = learned([(4, 1.0 + 0.2 * (k % 10) / 9) for k in range(3000)])
    assert 1.05 < cost.ratio < 1.15


@pytest.mark.parametrize("bad", [(0, 1.0), (-1, 1.0), (1, float("nan")), (1, float("inf")), (1, -1.0)])
def test_an_impossible_measurement_is_ignored(bad: tuple[int, float]) -> None:
    good = [(n, 0.1 + 0.01 * n) for n in (1, 2, 4, 8) for _ in range(3)]
    one, two = learned(good), learned(good)
    two.add(*bad)
    assert (one.a, one.b, one.ratio) == (two.a, two.b, two.ratio)


def test_a_change_of_speed_is_learned_within_some_dozen_batches() -> None:
    cost = learned([(n, 0.005 + 0.0002 * n) for n in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)])
    for k in range(100):
        n = (1, 8, 64)[k % 3]
        cost.add(n, 2 * (0.005 + 0.0002 * n))
    assert cost.t(64) == pytest.approx(2 * (0.005 + 0.0128), rel=0.05)
