"""The largest rate within an SLO is found to the requested precision and verified, or reported as missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.perf.bench.measurement import Load, Measurement, parse_slo
from penstock.perf.tune.rates import Effort, RateProber, TuningTrial, neat
from penstock.perf.tune.runner import Journal, MeasuredRun, TrialRunner
from penstock.perf.tune.space import CandidateSettings

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
