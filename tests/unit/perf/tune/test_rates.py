"""The rates that settings sustain within an SLO: the search for one, and the proof."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.perf.bench.measurement import Load, Measurement, parse_slo
from penstock.perf.tune.rates import MOST_LOWERED, Effort, Finalist, RateProber, TuningTrial, confirm, gain, neat
from penstock.perf.tune.runner import BudgetExhausted, Journal, MeasuredRun, TrialRunner, violated
from penstock.perf.tune.space import CandidateSettings, parse_settings

SLO = parse_slo("p99<=100ms")
ANY = CandidateSettings()


def prober(bench: Any, effort: Effort | None = None) -> RateProber:
    return RateProber(TrialRunner(bench, Journal()), SLO, effort or Effort())


def constant(rate: float) -> Callable[[CandidateSettings], float]:
    return lambda _: rate


@pytest.mark.parametrize("start", [1, 50, 450, 900, 5_000, 100_000])
def test_the_rate_is_found_from_any_guess(hill: Any, start: float) -> None:
    bench, trial = hill(constant(1000)), TuningTrial(ANY)  # 10 ms / (1 - rate / 1000) is 100 ms at 900/s
    prober(bench).narrow(trial, start, 0.04)
    assert trial.rate <= 900 <= trial.bad_rate
    assert trial.bad_rate <= trial.rate * 1.04
    assert len(bench.asked) <= 15


def test_the_throughput_of_an_overloaded_probe_gives_the_next_rate(hill: Any) -> None:
    bench, trial = hill(constant(1000)), TuningTrial(ANY)
    prober(bench).narrow(trial, 20_000, 0.1)
    assert [rate for _, rate in bench.asked[:2]] == [20_000, 930]


def test_an_slo_that_even_a_light_load_violates_is_reported_with_its_figures(hill: Any) -> None:
    bench, trial = hill(constant(1000), base_s=0.2), TuningTrial(ANY)
    prober(bench).narrow(trial, 700, 0.04)
    assert trial.good is None
    assert trial.bad_rate < 60
    assert "p99 2" in trial.out
    assert "(wanted p99<=100ms)" in trial.out
    assert len(bench.asked) <= 6
    *_, before, light = (rate for _, rate in bench.asked)
    assert light <= 0.05 * before, "requests rarely overlap there"


def test_settings_without_responses_are_ruled_out_by_two_runs_with_requests(hill: Any) -> None:
    class Silent(hill):  # type: ignore[misc]
        def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> Any:
            self.asked.append((settings, rate, rate * seconds))
            load = Load(mode="open", rate=rate, seconds=seconds)
            return MeasuredRun(
                run=Measurement(load=load, seconds=seconds, requests=9, errors={"timeout": 9}), cost_s=seconds
            )

    for start in (0.1, 500):
        bench, trial = Silent(constant(1)), TuningTrial(ANY)
        prober(bench).narrow(trial, start, 0.04)
        assert "/s: p99 n/a" in trial.out
        assert len(bench.asked) == 2
        assert all(requests >= 7.9 for *_, requests in bench.asked)


def test_settings_that_no_longer_load_sustain_nothing(hill: Any) -> None:
    bench, trial = hill(constant(1000)), TuningTrial(ANY)
    assert prober(bench).probe(trial, 500)
    assert trial.rate == 500
    bench.fails.add(ANY)
    assert not prober(bench).probe(trial, 600)
    assert (trial.rate, trial.estimate, trial.out) == (0.0, 0.0, "no room for it")


def test_a_settled_rate_is_verified_by_a_long_run(hill: Any) -> None:
    """Short runs do not show that it cannot sustain more than 500/s."""

    class Tires(hill):  # type: ignore[misc]
        def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> Any:
            self.able = constant(1000 if seconds < 3 else 555.6)  # 100 ms at 500/s
            return super().measure(settings, rate, seconds, seed)

    bench, trial, effort = Tires(constant(0)), TuningTrial(ANY), Effort(probe_samples=100, sure_s=4, sure_samples=100)
    found = prober(bench, effort)
    found.settle(trial, 600)
    assert found.settled(trial)
    assert 480 <= trial.rate <= 500


def test_an_invalid_run_is_repeated_once(hill: Any) -> None:
    bench, trial = hill(constant(1000)), TuningTrial(ANY)
    bench.invalid = 1
    assert prober(bench).probe(trial, 500)
    assert len(bench.asked) == 2
    bench.invalid = 2
    assert not prober(bench).probe(trial, 600)
    assert trial.why_bad == "invalid: the generator was too slow"


@pytest.mark.parametrize(("rate", "looks"), [(905, 2), (940, 1)])
def test_only_a_narrow_miss_is_repeated_with_a_long_run(hill: Any, rate: float, looks: int) -> None:
    """At 905/s the p99 is 105 ms, at 940/s 2.8 % are late; the server is faster in long runs."""

    bench, trial = hill(constant(1000), lambda *run: 0.009 if run[-1] >= 4 else 0.01), TuningTrial(ANY)
    assert prober(bench).probe(trial, rate) is (looks == 2)
    assert len(bench.asked) == looks


def test_of_two_contradictory_runs_the_longer_one_counts(hill: Any) -> None:
    fast, slow, trial = hill(constant(1000)), hill(constant(800)), TuningTrial(ANY)
    assert trial.add(fast.measure(ANY, 880, 1, 0), SLO)
    assert not trial.add(slow.measure(ANY, 840, 10, 0), SLO)
    assert (trial.rate, trial.bad_rate) == (0, 840)
    assert trial.add(fast.measure(ANY, 850, 1, 0), SLO)
    assert (trial.rate, trial.bad_rate) == (0, 840)
    assert trial.add(fast.measure(ANY, 850, 20, 0), SLO)
    assert (trial.rate, trial.bad_rate) == (850, float("inf"))


def test_runs_have_enough_samples_and_time_for_queues_to_build_up() -> None:
    effort = Effort(probe_s=2, probe_samples=500, latencies=20, most_s=30)
    assert effort.probe(1000, parse_slo("p99<=10ms")) == 2
    assert effort.probe(100, parse_slo("p99<=10ms")) == 5
    assert effort.probe(1000, parse_slo("p99<=500ms")) == 10
    assert effort.probe(1, parse_slo("p99<=10ms")) == 30
    assert effort.probe(1000, parse_slo("error<=1%")) == 2
    assert effort.probe(0.1, parse_slo("p99<=10ms")) == 80, "8 requests are expected in it"
    assert effort.proves(1, parse_slo("p99<=10ms")) == pytest.approx(120, rel=0.01), "three such runs determine a p99"
    assert effort.proves(1, parse_slo("p95<=10ms")) == 30
    assert effort.proves(1000, parse_slo("p99<=10ms")) == 2 * effort.sure(1000, parse_slo("p99<=10ms"))


def test_a_proof_run_lasts_until_a_growing_queue_violates_the_slo() -> None:
    quick = Effort(sure_s=1.0, sure_samples=300, latencies=3.0, most_s=6.0, proof=1.0, repeats=2)
    assert quick.sure(900, parse_slo("p99<=400ms")) == pytest.approx(1.2)
    assert quick.proves(900, parse_slo("p99<=400ms")) == pytest.approx(6.0), "a rate 10 % too high adds 600 ms"
    assert quick.proves(900, parse_slo("p99<=20ms")) == pytest.approx(1.0)
    assert quick.proves(900, parse_slo("p99<=2s")) == quick.most_s


def test_rates_have_three_digits() -> None:
    assert [neat(rate) for rate in (1234.5, 0.123456, 99.96)] == [1230, 0.123, 100]


# ---- the proof


PROOF_SLO = parse_slo("p99<=100ms,error<=1%")
A, B, C = (parse_settings(f"batch={n}") for n in (1, 2, 4))


def proven(bench: Any, *finalists: Finalist, limit_s: float = 1e9, repeats: int = 3) -> None:
    confirm(TrialRunner(bench, Journal(), limit_s=limit_s), PROOF_SLO, Effort(repeats=repeats), finalists)


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
    assert violated(PROOF_SLO, runs, 0) is None
    assert "% of all responses are late" in str(violated(PROOF_SLO, runs, 1))
    assert violated(PROOF_SLO, runs, -1) is None


def test_the_bound_of_three_repeats_has_the_promised_confidence(hill: Any) -> None:
    """If the true mean lies just above the PROOF_SLO, at most about one proof in twenty passes."""
    rng, passed = random.Random(7), 0
    bench = hill(lambda _: 1e9)
    for _ in range(400):
        runs = []
        for _ in range(3):
            bench.base_s = 0.101 * (1 + rng.gauss(0, 0.1))
            runs.append(bench.measure(A, 100, 10, 0))
        passed += violated(PROOF_SLO, runs, 1) is None
    assert passed <= 0.075 * 400


def test_a_rare_slow_batch_counts_by_its_share_of_responses(hill: Any) -> None:
    """One of eight repeats has a p99 of seven times the PROOF_SLO from 2 % of its responses; 0.3 % of all are late."""
    bench = hill(lambda _: 1e9, base_s=0.02)
    runs = [bench.measure(A, 100, 10, seed) for seed in range(7)]
    bench.base_s = 0.141
    slow = bench.measure(A, 100, 10, 7)
    latency = msgspec.structs.replace(slow.run.latency, p99_s=0.7)
    runs.append(MeasuredRun(run=msgspec.structs.replace(slow.run, latency=latency), cost_s=10))
    assert sum(run.run.latency.p99_s or 0 for run in runs) / 8 > 0.1
    assert violated(PROOF_SLO, runs, 0) is None
    assert violated(PROOF_SLO, runs, 1) is None


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
    assert violated(PROOF_SLO, few, 0) is None
    assert violated(PROOF_SLO, few, 1) == "297 responses are too few to decide (wanted p99<=100ms, which takes 299)"
    assert violated(PROOF_SLO, [*few[:2], bench.measure(A, 10, 10.1, 3)], 1) is None
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
    """At 89.9/s 0.98 % of its responses are late: it meets the PROOF_SLO, but not with certainty."""
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
    """At its highest rate, far below the leader's, it meets the PROOF_SLO on the mean but not with certainty."""
    able = {A: 1000, B: 100}
    bench, leader, other = hill(lambda settings: able[settings]), Finalist(A, 850), Finalist(B, 30, reference=True)
    other.highest_bar = 89.9
    proven(bench, leader, other, limit_s=20_000)
    assert (leader.met, other.met, other.rate, leader.beats(other)) == (True, True, 89.9, False)
    assert len(other.runs) <= 9


def test_repeats_that_agree_by_chance_are_no_proof(hill: Any) -> None:
    bench = hill(lambda _: 1e9, base_s=0.09)  # of 400 responses each, 3 are late
    assert violated(PROOF_SLO, [bench.measure(A, 40, 10, seed) for seed in range(3)], 0) is None
    assert "up to 1.6 %" in str(violated(PROOF_SLO, [bench.measure(A, 40, 10, seed) for seed in range(3)], 1))


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
