from __future__ import annotations

import math
import random

import numpy as np
import pytest

from penstock.perf.bench.compare import bootstrap, difference, ratio, student_at, student_tails


def test_students_distribution_matches_the_tables() -> None:
    for free, t in ((1, 12.706), (4, 2.776), (10, 2.228), (30, 2.042), (120, 1.980)):
        assert student_at(0.05, free) == pytest.approx(t, abs=6e-4)
        assert student_tails(t, free) == pytest.approx(0.05, abs=5e-5)
    assert student_tails(0.0, 5) == 1.0
    assert student_tails(1e9, 5) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (5, 5), (10, 7), (40, 12)])
def test_differences_equal_those_of_scipy(n: int, m: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    random_ = random.Random(n)
    first, second = ([random_.gauss(mean, 0.2) for _ in range(size)] for mean, size in ((1.0, n), (1.2, m)))
    found = difference(first, second, confidence=0.9)
    truth = stats.ttest_ind(second, first, equal_var=False, trim=0.2)
    interval = truth.confidence_interval(0.9)
    assert found is not None
    assert found.chance == pytest.approx(truth.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)


def test_fewer_than_three_values_have_no_difference() -> None:
    assert difference([1.0, 1.1], [2.0, 2.1, 2.2]) is None
    assert ratio([1.0, 1.1, 1.2], []) is None


def test_values_without_spread_are_certain() -> None:
    same, other = difference([5.0] * 3, [5.0] * 4), difference([5.0] * 3, [6.0] * 4)
    assert same is not None
    assert (same.change, same.low, same.high, same.chance) == (0.0, 0.0, 0.0, 1.0)
    assert other is not None
    assert (other.change, other.chance) == (1.0, 0.0)


def test_one_repeat_that_met_a_hiccup_does_not_decide() -> None:
    steady = [1.0, 1.01, 0.99, 1.0, 1.02]
    hiccup = [1.0, 1.01, 0.99, 1.0, 3.0]
    slower = [1.1, 1.11, 1.09, 1.1, 1.12]
    still, caught = difference(steady, hiccup), difference(hiccup, slower)
    assert still is not None
    assert still.chance > 0.3
    assert caught is not None
    assert caught.chance < 0.01


def test_a_ratio_is_a_share_of_the_first_side() -> None:
    found = ratio([1.0, 1.01, 0.99] * 3, [1.1, 1.111, 1.089] * 3)
    assert found is not None
    assert found.change == pytest.approx(0.1, abs=1e-3)
    assert 0.08 < found.low < 0.1 < found.high < 0.12


def test_nothing_at_all_on_one_side_is_a_ratio_too() -> None:
    gone, mixed = ratio([100.0, 101.0, 99.0], [0.0, 0.0, 0.0]), ratio([0.0, 0.0, 100.0], [100.0, 0.0, 1.0])
    assert gone is not None
    assert gone.change == pytest.approx(-1.0)
    assert gone.chance < 1e-6
    assert mixed is not None
    assert math.isfinite(mixed.high)
    assert mixed.chance > 0.1


def test_bootstrap_intervals_of_five_values_have_their_coverage() -> None:
    held = 0
    for seed in range(200):
        values = np.random.default_rng(seed).normal(1.0, 0.1, 5)
        low, high = bootstrap([values], lambda drawn: drawn.mean(axis=1), seed=seed)
        held += low <= 1.0 <= high
    assert held >= 180  # 190 expected; the plain percentile bootstrap reaches about 165


def test_bootstrap_of_two_sides_and_again_with_the_same_seed() -> None:
    sides = [[100.0, 102.0, 98.0, 101.0], [140.0, 139.0, 143.0, 141.0]]

    def gain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.median(b, axis=1) / np.median(a, axis=1) - 1

    low, high = bootstrap(sides, gain, seed=3)
    assert (low, high) == bootstrap(sides, gain, seed=3)
    assert 0.33 < low < 0.4 < high < 0.47


def test_one_value_has_an_infinite_interval() -> None:
    assert bootstrap([[5.0], [6.0, 7.0]], lambda a, b: a[:, 0] - b[:, 0], seed=1) == (-math.inf, math.inf)
