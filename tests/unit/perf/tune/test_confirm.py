"""The proof interleaves finalists, lowers rates until the upper bound meets the SLO, and bounds the gain."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from penstock.perf.bench.measurement import Measurement, parse_slo
from penstock.perf.tune.confirm import MOST_LOWERED, Finalist, confirm, gain, violated
from penstock.perf.tune.rates import Effort
from penstock.perf.tune.runner import BudgetExhausted, Journal, MeasuredRun, TrialRunner
from penstock.perf.tune.space import parse_settings

SLO = parse_slo("p99<=100ms,error<=1%")
A, B, C = (parse_settings(f"batch={n}") for n in (1, 2, 4))


def proven(bench: Any, *finalists: Finalist, limit_s: float = 1e9, repeats: int = 3) -> None:
    confirm(TrialRunner(bench, Journal(), limit_s=limit_s), SLO, Effort(repeats=repeats), finalists)


def test_finalists_run_in_turn_and_each_round_begins_with_another(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    proven(bench, Finalist(A, 500), Finalist(B, 400), Finalist(C, 300))
    assert [settings for settings, _ in bench.asked] == [A, B, C, B, C, A, C, A, B]


@pytest.mark.parametrize(("rate", "lowered"), [(850, 0), (950, 2)])
def test_a_rate_that_violates_the_slo_is_lowered_until_it_is_met(hill: Any, rate: float, lowered: int) -> None:
    one = Finalist(A, rate)  # sustains 900
    proven(hill(lambda _: 1000), one)
    assert (one.met, one.lowered, len(one.runs)) == (True, lowered, 3)
    assert one.rate == 850 if not lowered else one.rate < 900


def test_the_rate_of_an_overloaded_finalist_is_lowered_to_its_throughput(hill: Any) -> None:
    bench, one = hill(lambda _: 100), Finalist(A, 900)
    proven(bench, one)
    assert one.met
    assert [rate for _, rate in bench.asked[::3]] == pytest.approx([900, 100, 93.5, 85.6], abs=0.1)


def test_a_finalist_that_fell_behind_waits_until_those_ahead_are_proven(hill: Any) -> None:
    bench = hill(lambda settings: 1000 if settings == A else 300)
    first, second = Finalist(A, 950), Finalist(B, 940)  # A sustains 900
    proven(bench, first, second)
    assert (first.met, first.lowered, second.met) == (True, 2, False)
    assert [settings for settings, _ in bench.asked].count(B) == 3
    assert "(wanted p99<=100ms)" in second.why


def test_a_finalist_that_fell_behind_has_its_turn_when_those_ahead_fail(hill: Any) -> None:
    first, second = Finalist(A, 950), Finalist(B, 940)
    bench = hill(lambda settings: 1000 if settings == A else 100, lambda _, s, *__: 0.2 if s == A else 0.01)
    proven(bench, first, second)
    assert (first.met, second.met) == (False, True)
    assert second.rate < 100


def test_a_finalist_that_never_meets_the_slo_is_dropped_with_a_reason(hill: Any) -> None:
    bench, one = hill(lambda _: 1000, base_s=0.2), Finalist(A, 900)
    proven(bench, one)
    assert one.met is False
    assert "(wanted p99<=100ms)" in one.why
    assert len(bench.asked) == 3 * (MOST_LOWERED + 1)


def test_repeats_with_a_large_spread_are_not_certain_although_their_mean_is_fine(hill: Any) -> None:
    bench = hill(lambda _: 1e9, lambda b, *_: 0.09 if len(b.asked) % 3 == 1 else 0.02)
    runs = [bench.measure(A, 100, 10, seed) for seed in range(3)]
    assert violated(SLO, runs, 0) is None
    assert "% of all responses are late" in str(violated(SLO, runs, 1))
    assert violated(SLO, runs, -1) is None


def test_the_bound_of_three_repeats_has_the_promised_confidence(hill: Any) -> None:
    """If the true mean lies just above the SLO, at most about one proof in twenty passes."""
    rng, passed = random.Random(7), 0
    bench = hill(lambda _: 1e9)
    for _ in range(400):
        runs = []
        for _ in range(3):
            bench.base_s = 0.101 * (1 + rng.gauss(0, 0.1))
            runs.append(bench.measure(A, 100, 10, 0))
        passed += violated(SLO, runs, 1) is None
    assert passed <= 0.075 * 400


def test_a_rare_slow_batch_counts_by_its_share_of_responses(hill: Any) -> None:
    """One of eight repeats has a p99 of seven times the SLO from 2 % of its responses; 0.3 % of all are late."""
    bench = hill(lambda _: 1e9, base_s=0.02)
    runs = [bench.measure(A, 100, 10, seed) for seed in range(7)]
    bench.base_s = 0.141
    slow = bench.measure(A, 100, 10, 7)
    latency = msgspec.structs.replace(slow.run.latency, p99_s=0.7)
    runs.append(MeasuredRun(run=msgspec.structs.replace(slow.run, latency=latency), cost_s=10))
    assert sum(run.run.latency.p99_s or 0 for run in runs) / 8 > 0.1
    assert violated(SLO, runs, 0) is None
    assert violated(SLO, runs, 1) is None


def test_contenders_repeat_while_their_outcome_is_uncertain(hill: Any) -> None:
    bench, one = hill(lambda _: 1e9, lambda b, *_: 0.13 if len(b.asked) in (3, 4) else 0.05), Finalist(A, 500)
    proven(bench, one)
    assert (one.met, one.rate, len(one.runs)) == (True, 500, 9)


def test_an_invalid_repeat_is_measured_again(hill: Any) -> None:
    bench, one, other = hill(lambda _: 1000), Finalist(A, 500), Finalist(B, 500)
    bench.invalid = 1
    proven(bench, one)
    assert (one.met, len(one.runs), len(bench.asked)) == (True, 3, 4)
    bench.invalid = 100
    proven(bench, other)
    assert (other.met, other.why) == (False, "invalid: the generator was too slow")


def test_a_p99_is_certain_only_with_enough_responses(hill: Any) -> None:
    """299 timely responses prove with 95 % confidence that at most 1 % are late; fewer do not."""
    bench = hill(lambda _: 1e9, base_s=1e-6)
    few = [bench.measure(A, 10, 9.9, seed) for seed in range(3)]
    assert violated(SLO, few, 0) is None
    assert violated(SLO, few, 1) == "297 responses are too few to decide (wanted p99<=100ms, which takes 299)"
    assert violated(SLO, [*few[:2], bench.measure(A, 10, 10.1, 3)], 1) is None
    one = Finalist(A, 0.5)
    proven(hill(lambda _: 2, base_s=1e-6), one)
    assert one.met
    assert sum(run.run.answered for run in one.runs) >= 299


def test_goodput_counts_late_responses_that_the_slo_permits(hill: Any) -> None:
    """A mean can be kept although a quarter of the responses exceed it."""
    bench, one = hill(lambda _: 1e9, base_s=0.5), Finalist(A, 100)
    one.runs = [bench.measure(A, rate, 10, 0) for rate in (98, 100, 103)]
    assert one.runs[0].late_share == pytest.approx(0.25)
    assert one.goodput == pytest.approx(301 / 3)


def test_a_reference_far_behind_needs_to_meet_the_slo_only_on_the_mean(hill: Any) -> None:
    """At 89.9/s 0.98 % of its responses are late: it meets the SLO, but not with certainty."""
    able = {A: 1000, B: 100, C: 2}
    found: dict[str, tuple[bool | None, float, int]] = {}
    for name, best, reference in (("far behind", A, True), ("no reference", A, False), ("nothing better", C, True)):
        bench, other = hill(lambda settings: able[settings]), Finalist(B, 89.9, reference=reference)
        first = Finalist(best, 850)
        proven(bench, first, other)
        assert first.met is (best == A)
        found[name] = other.met, other.rate, len(other.runs)
    assert found["far behind"] == (True, 89.9, 3)
    assert found["no reference"][0] is False
    met, rate, _ = found["nothing better"]
    assert met
    assert rate < 89.9


def test_a_reference_that_is_not_refuted_at_its_bar_ends_the_proof(hill: Any) -> None:
    """At its highest rate, far below the leader's, it meets the SLO on the mean but not with certainty."""
    able = {A: 1000, B: 100}
    bench, leader, other = hill(lambda settings: able[settings]), Finalist(A, 850), Finalist(B, 30, reference=True)
    other.highest_bar = 89.9
    proven(bench, leader, other, limit_s=20_000)
    assert (leader.met, other.met, other.rate, leader.beats(other)) == (True, True, 89.9, False)
    assert len(other.runs) <= 9


def test_repeats_that_agree_by_chance_are_no_proof(hill: Any) -> None:
    bench = hill(lambda _: 1e9, base_s=0.09)  # of 400 responses each, 3 are late
    assert violated(SLO, [bench.measure(A, 40, 10, seed) for seed in range(3)], 0) is None
    assert "up to 1.6 %" in str(violated(SLO, [bench.measure(A, 40, 10, seed) for seed in range(3)], 1))


def test_a_single_valid_repeat_is_no_proof(hill: Any) -> None:
    class Busy(hill):  # type: ignore[misc]
        def measure(self, *args: Any) -> Any:
            self.invalid = int(len(self.asked) > 0)
            return super().measure(*args)

    one = Finalist(A, 500)
    proven(Busy(lambda _: 1000), one)
    assert (one.met, len(one.runs)) == (False, 1)


def test_an_exhausted_budget_leaves_what_is_known(hill: Any) -> None:
    one, other = Finalist(A, 500), Finalist(B, 500)
    with pytest.raises(BudgetExhausted):
        proven(hill(lambda _: 1000), one, other, limit_s=15)
    assert one.met is None
    assert len(one.runs) >= 1
    with pytest.raises(BudgetExhausted):
        proven(hill(lambda _: 1000), one := Finalist(A, 500), other := Finalist(B, 500), limit_s=60)
    assert (one.met, other.met) == (True, None), "the second has only two repeats"


def test_settings_that_no_longer_load_are_dropped(hill: Any) -> None:
    bench, one, other = hill(lambda _: 1000), Finalist(A, 500), Finalist(B, 400)
    bench.fails.add(A)
    proven(bench, one, other)
    assert (one.met, one.why, other.met) == (False, "no room for it", True)


def test_a_gain_has_the_interval_of_its_repeats(hill: Any) -> None:
    bench, chosen, default = hill(lambda _: 1e9), Finalist(A, 100), Finalist(B, 100)
    chosen.runs = [bench.measure(A, rate, 10, 0) for rate in (195, 200, 205)]
    default.runs = [bench.measure(B, rate, 10, 0) for rate in (98, 100, 102)]
    more, interval = gain(chosen, default, seed=1)
    assert interval is not None
    low, high = interval
    assert more == pytest.approx(1.0)
    assert 0.9 < low < more < high < 1.1
    assert gain(chosen, default, seed=1) == (more, (low, high))
    same = gain(default, default, seed=1)[1]
    assert same is not None
    assert same[0] <= 0 <= same[1]
    default.runs = default.runs[:1]
    assert gain(chosen, default, seed=1)[1] is None
    default.runs = [msgspec.structs.replace(r, run=Measurement(load=r.run.load)) for r in default.runs]
    assert gain(chosen, default, seed=1)[0] == pytest.approx(1.0), "without responses its rate counts"
