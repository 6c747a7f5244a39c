"""What strategies may ask: challengers cost a probe, curves rule out for nothing, equals give way to cheaper ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.perf.bench.slo import parse_slo
from penstock.perf.simulate.capacity import Effort
from penstock.perf.tune.field import Field
from penstock.perf.tune.journal import Journal
from penstock.perf.tune.meter import Meter
from penstock.perf.tune.space import Settings, parse_settings, parse_space
from penstock.perf.tune.trial import Curve

SLO = parse_slo("p99<=100ms")
SPACE = parse_space("batch=1..8,instances=1..4")
ONE, TWO, FOUR = (parse_settings(f"batch=8,instances={m}") for m in (1, 2, 4))


def field(bench: Any) -> Field:
    return Field(Meter(bench, Journal()), SPACE, SLO, Effort(), 0)


def by_instances(*able: float) -> Callable[[Settings], float]:
    """What 1, 2 and 4 instances can do."""
    return lambda settings: dict(zip((1, 2, 4), able, strict=True))[int(settings.get("instances", 1) or 1)]


def test_a_challenger_that_loses_costs_one_probe_and_is_told_why(hill: Any) -> None:
    bench = hill(by_instances(1000, 700, 1200))
    found = field(bench)
    found.measure(ONE)
    before = len(bench.asked)
    assert not found.challenge(TWO)
    assert len(bench.asked) == before + 1
    assert "wanted p99<=100ms" in found.trial(TWO).why_bad
    assert not found.challenge(TWO)
    assert len(bench.asked) == before + 1, "it lost at this rate before"


def test_a_challenger_that_wins_is_the_best_with_a_rate_of_its_own(hill: Any) -> None:
    found = field(hill(by_instances(1000, 2000, 1200)))
    found.measure(ONE)
    assert found.challenge(TWO)
    assert found.best is found.trial(TWO)
    assert 1600 < found.trial(TWO).rate <= 1800 <= found.trial(TWO).bad_rate


def test_dearer_settings_must_be_better_and_cheaper_ones_only_as_good(hill: Any) -> None:
    found = field(hill(lambda _: 1000))
    found.measure(TWO, 0.01)
    assert not found.challenge(FOUR)
    assert found.challenge(ONE)
    assert found.best is found.trial(ONE)


def test_what_a_curve_rules_out_is_never_measured(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    bench.curves[Settings()] = Curve(points=((1, 0.2), (8, 0.3)))
    found = field(bench)
    assert found.open() == []
    assert found.trial(ONE).out == "offline, a batch of one takes 200 ms"
    assert bench.asked == []


def test_memory_rules_out_what_cannot_fit_and_only_that(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    bench.curves[Settings()] = Curve(points=((1, 0.001), (8, 0.002)), memory_bytes=3 * 2**20, limit_bytes=8 * 2**20)
    found = field(bench)
    assert found.trial(FOUR).out == "would hold 12 MiB, there are 8"
    assert not found.trial(TWO).out
    assert not found.trial(FOUR.put(batch=4)).out, "what smaller batches hold is not known"


def test_what_cannot_reach_the_best_by_its_curve_is_not_probed(hill: Any) -> None:
    bench = hill(by_instances(600, 1000, 1200))
    bench.curves[Settings()] = Curve(points=((1, 0.002), (8, 0.012)))  # 500/s one by one, 667/s eight at a time
    found = field(bench)
    found.measure(TWO)
    before = len(bench.asked)
    assert not found.challenge(ONE.put(batch=1))
    assert len(bench.asked) == before
    assert found.trial(ONE.put(batch=1)).why_bad == "at most 500/s by its curve"


@pytest.mark.parametrize("space", ["batch=1..8", "instances=1..4", "batch=4,auto,instances=1..4"])
def test_what_the_app_itself_says_is_not_ruled_out_by_a_curve(hill: Any, space: str) -> None:
    """It may have more instances than one, and larger batches than were looked at."""
    bench = hill(lambda settings: 5_000 if "1" in settings.text else 10_000)
    bench.curves[Settings()] = Curve(points=((1, 0.002), (4, 0.004)))
    found = Field(Meter(bench, Journal()), parse_space(space), SLO, Effort(), 0)
    one, *others = [settings for settings in found.space if not isinstance(settings.get("batch", "auto"), int)] or list(
        found.space
    )
    found.measure(one)
    assert found.best is not None
    assert found.best.rate > 4_000
    assert all(found.bound(settings) is None and found.can_win(settings) for settings in others)
    assert found.guess(others[-1]) >= found.guess(one)


def test_what_is_refused_or_does_not_load_is_ruled_out_and_the_search_goes_on(hill: Any) -> None:
    bench = hill(by_instances(1000, 2000, 4000))
    bench.refused[FOUR] = "outputs differ by 3 %"
    bench.fails.add(TWO)
    found = field(bench)
    found.measure(ONE)
    assert not found.challenge(FOUR)
    assert not found.challenge(TWO)
    assert (found.trial(FOUR).out, found.trial(TWO).out) == ("outputs differ by 3 %", "no room for it")
    assert FOUR not in bench.prepared


def test_a_guess_goes_by_what_was_measured_and_by_the_curve(hill: Any) -> None:
    bench = hill(by_instances(400, 700, 900))
    bench.curves[Settings()] = Curve(points=((1, 0.002), (8, 0.012)))
    found = field(bench)
    assert found.guess(TWO) == 0.7 * 2 * 8 / 0.012
    rate = found.measure(ONE).rate
    assert found.guess(TWO) == 2 * rate
    assert found.guess(ONE.put(batch=1)) < rate


def test_without_a_curve_saturation_tells_where_to_begin(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    field(bench).measure(ONE)
    assert bench.asked[0] == (ONE, 800)


def test_when_the_best_turns_out_to_bear_less_another_is_the_best(hill: Any) -> None:
    bench = hill(by_instances(1000, 1100, 100))
    found = field(bench)
    found.measure(ONE)
    assert found.challenge(TWO)
    bench.able = by_instances(1000, 500, 100)
    found.settle(TWO)
    assert found.best is found.trial(ONE)
