"""A challenger costs one probe, curves rule out settings without load, and every strategy finds the optimum."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.measurement import parse_slo
from penstock.perf.tune.rates import Effort
from penstock.perf.tune.runner import BatchCurve, Journal, TrialRunner
from penstock.perf.tune.search import STRATEGIES, SearchState, strategy
from penstock.perf.tune.space import CandidateSettings, SearchSpace, parse_settings, parse_space

SLO = parse_slo("p99<=100ms")
SMALL = parse_space("batch=1..8,instances=1..4")
ONE, TWO, FOUR = (parse_settings(f"batch=8,instances={m}") for m in (1, 2, 4))


def state(bench: Any) -> SearchState:
    return SearchState(TrialRunner(bench, Journal()), SMALL, SLO, Effort(), 0)


def by_instances(*able: float) -> Callable[[CandidateSettings], float]:
    """The sustainable rates of 1, 2 and 4 instances."""
    return lambda settings: dict(zip((1, 2, 4), able, strict=True))[int(settings.get("instances", 1) or 1)]


def test_a_losing_challenger_costs_one_probe_and_has_a_reason(hill: Any) -> None:
    bench = hill(by_instances(1000, 700, 1200))
    found = state(bench)
    found.measure(ONE)
    before = len(bench.asked)
    assert not found.challenge(TWO)
    assert len(bench.asked) == before + 1
    assert "wanted p99<=100ms" in found.trial(TWO).why_bad
    assert not found.challenge(TWO)
    assert len(bench.asked) == before + 1, "it lost at this rate before"


def test_a_winning_challenger_becomes_the_best_with_its_own_rate(hill: Any) -> None:
    found = state(hill(by_instances(1000, 2000, 1200)))
    found.measure(ONE)
    assert found.challenge(TWO)
    assert found.best is found.trial(TWO)
    assert 1600 < found.trial(TWO).rate <= 1800 <= found.trial(TWO).bad_rate


def test_more_expensive_settings_must_be_better_and_cheaper_ones_only_as_good(hill: Any) -> None:
    found = state(hill(lambda _: 1000))
    found.measure(TWO, 0.01)
    assert not found.challenge(FOUR)
    assert found.challenge(ONE)
    assert found.best is found.trial(ONE)


def test_settings_that_a_curve_rules_out_are_never_measured(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    bench.curves[CandidateSettings()] = BatchCurve(points=((1, 0.2), (8, 0.3)))
    found = state(bench)
    assert found.open() == []
    assert found.trial(ONE).out == "offline, a batch of one takes 200 ms"
    assert bench.asked == []


def test_memory_rules_out_only_settings_that_cannot_fit(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    bench.curves[CandidateSettings()] = BatchCurve(
        points=((1, 0.001), (8, 0.002)), memory_bytes=3 * 2**20, limit_bytes=8 * 2**20
    )
    found = state(bench)
    assert found.trial(FOUR).out == "needs 12 MiB, the machine has 8 MiB"
    assert not found.trial(TWO).out
    assert not found.trial(FOUR.put(batch=4)).out, "the memory of smaller batches is unknown"


def test_settings_that_cannot_reach_the_best_by_their_curve_are_not_probed(hill: Any) -> None:
    bench = hill(by_instances(600, 1000, 1200))
    bench.curves[CandidateSettings()] = BatchCurve(
        points=((1, 0.002), (8, 0.012))
    )  # 500/s one by one, 667/s eight at a time
    found = state(bench)
    found.measure(TWO)
    before = len(bench.asked)
    assert not found.challenge(ONE.put(batch=1))
    assert len(bench.asked) == before
    assert found.trial(ONE.put(batch=1)).why_bad == "at most 500/s by its curve"


@pytest.mark.parametrize("space", ["batch=1..8", "instances=1..4", "batch=4,auto,instances=1..4"])
def test_a_curve_does_not_rule_out_values_that_the_app_chooses(hill: Any, space: str) -> None:
    """The app may have more than one instance, and larger batches than the curve."""
    bench = hill(lambda settings: 5_000 if "1" in settings.text else 10_000)
    bench.curves[CandidateSettings()] = BatchCurve(points=((1, 0.002), (4, 0.004)))
    found = SearchState(TrialRunner(bench, Journal()), parse_space(space), SLO, Effort(), 0)
    one, *others = [settings for settings in found.space if not isinstance(settings.get("batch", "auto"), int)] or list(
        found.space
    )
    found.measure(one)
    assert found.best is not None
    assert found.best.rate > 4_000
    assert all(found.bound(settings) is None and found.can_win(settings) for settings in others)
    assert found.guess(others[-1]) >= found.guess(one)


def test_settings_that_are_refused_or_do_not_load_are_ruled_out(hill: Any) -> None:
    bench = hill(by_instances(1000, 2000, 4000))
    bench.refused[FOUR] = "outputs differ by 3 %"
    bench.fails.add(TWO)
    found = state(bench)
    found.measure(ONE)
    assert not found.challenge(FOUR)
    assert not found.challenge(TWO)
    assert (found.trial(FOUR).out, found.trial(TWO).out) == ("outputs differ by 3 %", "no room for it")
    assert FOUR not in bench.prepared


def test_a_guess_follows_the_measurements_and_the_curve(hill: Any) -> None:
    bench = hill(by_instances(400, 700, 900))
    bench.curves[CandidateSettings()] = BatchCurve(points=((1, 0.002), (8, 0.012)))
    found = state(bench)
    assert found.guess(TWO) == 0.7 * 2 * 8 / 0.012
    rate = found.measure(ONE).rate
    assert found.guess(TWO) == 2 * rate
    assert found.guess(ONE.put(batch=1)) < rate


def test_without_a_curve_the_search_begins_near_the_saturated_throughput(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    state(bench).measure(ONE)
    assert bench.asked[0] == (ONE, 800)


def test_when_the_best_sustains_less_than_expected_another_becomes_the_best(hill: Any) -> None:
    bench = hill(by_instances(1000, 1100, 100))
    found = state(bench)
    found.measure(ONE)
    assert found.challenge(TWO)
    bench.able = by_instances(1000, 500, 100)
    found.settle(TWO)
    assert found.best is found.trial(ONE)


SPACE = parse_space("batch=1..32,instances=1..16,precision=fp32,bf16,fp16")
TOP = "batch=16,instances=4,precision=bf16"


def able(settings: CandidateSettings) -> float:
    """Highest at TOP, lower by a fifth with each step away from it."""
    instances, batch = int(settings.get("instances") or 0), int(settings.get("batch") or 0)
    steps = abs(instances.bit_length() - 3) + abs(batch.bit_length() - 5)
    return 1000 * 0.8**steps * {"fp32": 0.6, "bf16": 1.0, "fp16": 0.9}[str(settings.get("precision"))]


def searched(bench: Any, name: str, space: SearchSpace = SPACE) -> SearchState:
    found = SearchState(TrialRunner(bench, Journal(), seed=1), space, SLO, Effort(), 1)
    strategy(name)(found)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_finds_the_top(hill: Any, name: str) -> None:
    if name == "tpe":
        pytest.importorskip("optuna")
    bench = hill(able)
    found = searched(bench, name)
    assert found.best is not None
    if name == "tpe":  # proposes 36 of 90 settings, the first ones at random
        assert found.best.rate >= 0.75 * 900
    else:
        assert found.best.settings.text == TOP
    assert found.steps[-1].elapsed_s <= found.runner.spent_s
    probes = len(bench.asked)
    assert probes <= {"grid": 1000, "halving": 200, "tpe": 140, "climb": 60, "auto": 60}[name]


def test_auto_measures_all_settings_if_there_are_few(hill: Any) -> None:
    found = searched(hill(able), "auto", parse_space("batch=8,16,instances=4,precision=bf16"))
    assert len([trial for trial in found.trials.values() if found.prober.settled(trial)]) == 2


def test_a_climb_leaves_a_region_where_nothing_meets_the_slo(hill: Any) -> None:
    """Large batches have the highest bound but take too long; small ones do not."""

    bench = hill(able, lambda _, settings, *__: 0.2 if settings.whole("batch") > 2 else 0.01)
    bench.curves = {
        CandidateSettings((("precision", p),)): BatchCurve(points=((1, 0.001), (32, 0.010)))
        for p in ("fp32", "bf16", "fp16")
    }
    found = searched(bench, "climb").best
    assert found is not None
    assert found.settings == parse_settings("batch=2,instances=4,precision=bf16")


def test_a_climb_also_tries_the_neighbours_of_settings_that_it_passed(hill: Any) -> None:
    """It begins at the largest batch and stops at 4, better than 2; single rows behind those are better than both."""
    bench = hill(lambda settings: {1: 95, 2: 80, 4: 85, 8: 10}[settings.get("batch")])
    bench.curves[CandidateSettings()] = BatchCurve(points=((1, 0.010), (2, 0.012), (4, 0.030), (8, 0.200)))
    found = searched(bench, "climb", parse_space("batch=1..8,instances=1"))
    tried = list(dict.fromkeys(settings.get("batch") for settings, _ in bench.asked))
    assert tried == [8, 4, 2, 1]
    assert found.best is not None
    assert found.best.settings == parse_settings("batch=1,instances=1")


def test_a_search_with_nothing_to_measure_ends(hill: Any) -> None:
    for name in ("grid", "climb", "halving", "auto"):
        bench = hill(able)
        bench.refused = dict.fromkeys(SPACE, "outputs differ")
        assert searched(bench, name).best is None
        assert bench.asked == []


def test_an_unknown_search_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no search 'halfing'; did you mean 'halving'\?"):
        strategy("halfing")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'optuna"):
        strategy("tpe")
