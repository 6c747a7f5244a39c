"""Tuning finds the optimum in a fifth of the time, reports what is impossible, and keeps results of an early end."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Slo, parse_slo
from penstock.perf.tune.rates import EFFORTS
from penstock.perf.tune.runner import BatchCurve, MeasuredRun
from penstock.perf.tune.space import CandidateSettings, SearchSpace, parse_settings, parse_space
from penstock.perf.tune.tuner import TuningResult, tune
from support.synthetic import SyntheticSystem, drawn

TESTS = str(Path(__file__).parents[3])
SLO = parse_slo("p99<=100ms")
SPACE = parse_space("batch=1..8,instances=1..4")
DEFAULT = parse_settings("batch=1,instances=1")
BEST = "batch=4,instances=2"


def able(settings: CandidateSettings) -> float:
    """Highest at BEST; the baseline sustains a tenth."""
    batch, instances = int(settings.get("batch") or 0), int(settings.get("instances") or 0)
    if not batch:
        return 100
    return 1000 * 0.7 ** (abs(batch.bit_length() - 3) + abs(instances.bit_length() - 2))


def tuned(system: Any, space: SearchSpace, slo: Slo, **options: Any) -> TuningResult:
    return tune(system, space, slo, **options)


# ---- the result


def test_the_verdict_has_the_choice_the_gain_and_the_reasons_against_others(hill: Any) -> None:
    result = tuned(hill(able), SPACE, SLO, default=DEFAULT, price=3.6, command="penstock tune ...")
    verdict = result.verdict
    assert result.chosen is not None
    assert (result.chosen.text, verdict.chosen, verdict.default) == (BEST, BEST, DEFAULT.text)
    assert (result.confirmed, result.ended, verdict.notes) == (True, "done", [])
    assert verdict.met
    assert verdict.proven
    assert 850 <= result.rate <= 900
    assert verdict.gain == pytest.approx(1 / 0.343 - 1, rel=0.1)
    assert verdict.interval is not None
    assert verdict.interval[0] <= verdict.gain <= verdict.interval[1]
    assert verdict.cost_per_million == pytest.approx(1000 / verdict.goodput) if verdict.goodput else False
    whys = {runner.settings: runner.why for runner in verdict.runners_up}
    assert BEST not in whys
    assert "% less" in whys[DEFAULT.text]
    assert "(wanted p99<=100ms)" in whys["batch=4,instances=4"]
    assert {step.settings for step in verdict.trajectory} >= {BEST, DEFAULT.text}
    assert verdict.command == "penstock tune ..."


def test_a_baseline_that_is_better_is_kept(hill: Any) -> None:
    space = parse_space("batch=1,2,instances=1")
    result = tuned(hill(lambda s: 1000 if not s.items else 500), space, SLO)
    assert result.chosen == CandidateSettings()
    assert (result.verdict.chosen, result.verdict.default, result.verdict.gain) == ("baseline", "baseline", 0.0)
    assert "no settings were shown to be better than the default" in result.verdict.notes
    assert "(wanted p99<=100ms)" in result.verdict.runners_up[0].why
    same = tuned(hill(lambda s: 500), space, SLO)
    assert same.chosen == CandidateSettings(), "others are not better"
    assert same.unproven == result.unproven == "no settings were shown to be better than the default"


def test_a_load_generator_that_is_the_limit_is_reported(hill: Any) -> None:
    class Limited(hill):  # type: ignore[misc]
        def measure(self, settings: CandidateSettings, rate: float, *args: Any) -> Any:
            self.invalid = 1 if rate > 600 else 0
            return super().measure(settings, rate, *args)

    result = tuned(Limited(able), SPACE, SLO, default=DEFAULT)
    assert 0 < result.rate <= 600
    assert any("the load generator, not the model, was the limit at 6" in note for note in result.verdict.notes)


def test_settings_whose_repeats_break_the_promise_of_short_runs_are_not_chosen(hill: Any) -> None:
    bench = hill(able, lambda b, settings, rate, s: 0.5 if s >= 4 and (settings, rate) in b.asked[:-1] else 0.01)
    result = tuned(bench, SPACE, SLO, default=DEFAULT, search="climb")
    assert (result.chosen, result.verdict.met) == (None, False)
    assert f"no settings meet p99<=100ms with certainty: the nearest, {BEST}, at " in result.verdict.notes[0]


def test_the_cheapest_of_equally_good_settings_is_chosen(hill: Any) -> None:
    bench = hill(lambda settings: 1000 if settings.items else 500)
    result = tuned(bench, SPACE, SLO, search="grid")
    assert result.unproven == ""
    assert result.chosen == parse_settings("batch=1,instances=1")
    assert any("equally good" in runner.why and "more expensive" in runner.why for runner in result.verdict.runners_up)


# ---- impossible goals


def test_for_an_slo_that_no_settings_meet_the_nearest_are_named(hill: Any) -> None:
    bench = hill(able, lambda _, settings, *__: 0.15 if settings.text == "batch=2,instances=1" else 0.3)
    result = tuned(bench, SPACE, SLO, default=DEFAULT, search="grid")
    verdict = result.verdict
    assert (result.chosen, result.rate, verdict.met, verdict.gain) == (None, 0.0, False, None)
    assert verdict.chosen == "batch=2,instances=1"
    assert "no settings meet p99<=100ms: the nearest, batch=2,instances=1, reach p99 15" in verdict.notes[0]
    assert "/s: p99" in verdict.runners_up[0].why


def test_an_slo_below_the_time_of_one_row_is_reported_without_any_load(hill: Any) -> None:
    bench = hill(able)
    bench.curves[CandidateSettings()] = BatchCurve(points=((1, 0.5),))
    result = tuned(bench, SPACE, SLO)
    assert result.chosen is None
    assert "offline, a batch of one takes 500 ms" in result.verdict.notes[0]
    assert bench.asked == []


@pytest.mark.parametrize(("least", "met"), [(5000, False), (500, True)])
def test_for_a_throughput_that_no_settings_reach_the_nearest_are_named(hill: Any, least: int, met: bool) -> None:
    verdict = tuned(hill(able), SPACE, parse_slo(f"p99<=100ms,throughput>={least}/s"), default=DEFAULT).verdict
    assert (verdict.met, verdict.chosen) == (met, BEST)
    assert met or f"the nearest, {BEST}, sustain 8" in verdict.notes[0]


def test_an_slo_that_bounds_nothing_is_refused(hill: Any) -> None:
    with pytest.raises(ConfigError, match="bounds no latency and no errors"):
        tuned(hill(able), SPACE, parse_slo("throughput>=10/s"))


def test_a_default_that_violates_the_slo_is_reported(hill: Any) -> None:
    bench = hill(able)
    bench.fails.add(CandidateSettings())
    result = tuned(bench, SPACE, SLO)
    assert result.verdict.met
    assert (result.verdict.gain, result.verdict.default_goodput) == (None, None)
    assert "the default (baseline) does not meet the SLO: no room for it" in result.verdict.notes


def test_an_error_of_the_bench_ends_the_tuning(hill: Any) -> None:
    class Gone(hill):  # type: ignore[misc]
        def prepare(self, settings: CandidateSettings) -> None:
            raise PenstockError("the server died")

    with pytest.raises(PenstockError, match="the server died"):
        tuned(Gone(able), SPACE, SLO)


# ---- an early end


@pytest.mark.parametrize("budget_s", [0.0, 2.0, 10.0, 40.0, 80.0])
def test_an_exhausted_budget_leaves_the_best_so_far(hill: Any, budget_s: float) -> None:
    result = tuned(hill(able), SPACE, SLO, default=DEFAULT, budget_s=budget_s)
    assert result.ended == "budget"
    assert result.spent_s <= budget_s + 30
    assert any("the time budget was used up" in note for note in result.verdict.notes)
    if budget_s >= 10:
        assert result.chosen is not None
        assert result.rate <= 900
    else:
        assert result.chosen is None or not result.confirmed
    if not budget_s:
        assert result.unproven == "nothing was measured: the time budget was used up"


def test_a_budget_too_short_for_the_search_reserves_time_for_the_proof(hill: Any) -> None:
    full = tuned(slow(hill), SPACE, SLO, default=DEFAULT)
    for share in (0.5, 0.7, 0.9):
        result = tuned(slow(hill), SPACE, SLO, default=DEFAULT, budget_s=share * full.spent_s)
        assert (result.ended, result.confirmed) == ("budget", True)
        assert result.spent_s <= share * full.spent_s + 40
        assert result.rate <= 90
        assert result.unproven == "", "it is shown to be better than the default, too"


@pytest.mark.parametrize(
    ("share", "note"),
    [
        (0.05, "the default may sustain more than was measured, so the gain may be smaller"),
        (0.2, "the default (batch=1,instances=1) is not confirmed: its rate is from one run of the search"),
        (0.4, "there was no time left to prove the choice; give a longer --budget"),
    ],
)
def test_gaps_in_the_knowledge_of_the_default_are_reported(hill: Any, share: float, note: str) -> None:
    full = tuned(slow(hill), SPACE, SLO, default=DEFAULT)
    notes = tuned(slow(hill), SPACE, SLO, default=DEFAULT, budget_s=share * full.spent_s).verdict.notes
    assert [text for text in notes if text.startswith(note)]
    assert not [note for note in full.verdict.notes if "default" in note]


def test_with_little_time_the_proof_stays_below_the_highest_rate(hill: Any) -> None:
    """At the highest rate every other long run misses the SLO by chance, so that several rounds prove nothing."""

    def edge(bench: Any, settings: CandidateSettings, rate: float, seconds: float) -> float:
        unlucky = seconds >= 8 and rate >= 0.86 * able(settings) and not len(bench.asked) % 2
        return 0.013 if unlucky else 0.01

    space = parse_space("batch=4,instances=2")
    result = tuned(hill(able, edge), space, SLO, default=DEFAULT, budget_s=200.0)
    assert (result.confirmed, result.verdict.proven) == (True, True)
    assert result.rate < 860


def test_a_default_that_only_the_search_measured_has_the_rate_of_the_table(hill: Any) -> None:
    full = tuned(slow(hill), SPACE, SLO, default=DEFAULT)
    for share in range(40, 100, 5):
        system = slow(hill)
        verdict = tuned(system, SPACE, SLO, default=DEFAULT, budget_s=share / 100 * full.spent_s).verdict
        kept = [rate for settings, rate in system.asked if settings == DEFAULT and rate <= 0.9 * able(DEFAULT) / 10]
        assert (verdict.default_goodput is None) <= (not kept), share


def slow(hill: Any) -> Any:
    """A system with a tenth of the rate, hence long runs, and 5 s more for each."""

    class Slow(hill):  # type: ignore[misc]
        def measure(self, *args: Any) -> MeasuredRun:
            found: MeasuredRun = super().measure(*args)
            return msgspec.structs.replace(found, cost_s=found.cost_s + 5)

    return Slow(lambda settings: able(settings) / 10)


def test_a_system_that_fails_later_leaves_the_best_so_far(hill: Any) -> None:
    class Failing(hill):  # type: ignore[misc]
        def measure(self, *args: Any) -> MeasuredRun:
            found: MeasuredRun = super().measure(*args)
            if len(self.asked) == 12:
                raise PenstockError("the machine is too busy")
            return found

    result = tuned(Failing(able), SPACE, SLO, default=DEFAULT)
    assert (result.ended, result.confirmed, result.verdict.proven) == ("failed", False, False)
    assert result.chosen is not None
    note = "the search ended early: the machine is too busy; this is the best of the measurements so far"
    assert note in result.verdict.notes


@pytest.mark.parametrize("at", [1, 2, 10, 25])
def test_ctrl_c_reports_the_best_so_far(hill: Any, at: int) -> None:
    bench = hill(able)
    bench.interrupt_at = at
    result = tuned(bench, SPACE, SLO, default=DEFAULT)
    assert result.ended == "interrupted"
    assert any("it was interrupted" in note for note in result.verdict.notes)
    assert (result.chosen is None) == (at == 1)


# ---- the truth


@pytest.mark.slow
def test_the_optimum_is_found_in_a_fifth_of_the_time() -> None:
    """The figures of the exhaustive search come from benchmarks/tuner_truth.py, which has more seeds and all
    strategies."""
    seed, best_rate, exhaustive_s = 0, 345.6, 15_678
    machine, slo = drawn(seed)
    space = parse_space("batch=1..32,instances=1..16,precision=fp32,fp16,bf16")
    default = parse_settings("batch=32,instances=1,precision=fp32")
    bench = SyntheticSystem(machine, slo)
    result = tuned(bench, space, slo, default=default, seed=seed)
    assert result.chosen is not None
    assert slo.latency_s is not None
    assert result.spent_s <= 0.2 * exhaustive_s
    assert bench.true_p99_s(result.chosen, result.rate, 20_000) <= 1.05 * slo.latency_s
    assert bench.true_p99_s(result.chosen, 0.95 * best_rate, 20_000) <= slo.latency_s


def test_more_effort_measures_longer(hill: Any) -> None:
    quick = tuned(hill(able), SPACE, SLO, default=DEFAULT, effort=EFFORTS["quick"])
    long = tuned(hill(able), SPACE, SLO, default=DEFAULT, effort=EFFORTS["thorough"])
    assert quick.spent_s < long.spent_s / 2
