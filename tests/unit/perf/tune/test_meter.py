"""The one way from a search to its bench: counted, journalled, ended at the budget."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.perf.tune.journal import Journal
from penstock.perf.tune.meter import BudgetOver, Meter, Unfit
from penstock.perf.tune.space import Settings, parse_settings
from penstock.perf.tune.trial import Curve, Reading

ONE = parse_settings("batch=4,instances=2,precision=fp16,batching.timeout_s=5")


def test_the_time_of_all_measurements_counts_and_the_limit_ends_them(hill: Any) -> None:
    meter = Meter(hill(lambda _: 1000), Journal(), limit_s=5.0)
    meter.measure(ONE, 100, 3)
    meter.saturate(ONE, 2)
    assert meter.spent_s == 5.0
    with pytest.raises(BudgetOver):
        meter.measure(ONE, 100, 3)


def test_what_is_kept_back_ends_them_earlier_as_far_as_is_known_by_then(hill: Any) -> None:
    meter = Meter(hill(lambda _: 1000), Journal(), limit_s=6.0)
    meter.kept_s = lambda: meter.spent_s
    meter.measure(ONE, 100, 2)
    meter.measure(ONE, 100, 1)
    with pytest.raises(BudgetOver):
        meter.measure(ONE, 100, 1)
    meter.kept_s = lambda: 0.0
    meter.measure(ONE, 100, 1)


def test_what_a_change_of_settings_takes_beyond_the_run_is_known(hill: Any) -> None:
    class Reloaded(hill):  # type: ignore[misc]
        def measure(self, settings: Settings, *args: Any) -> Reading:
            found: Reading = super().measure(settings, *args)
            new = len(self.asked) < 2 or self.asked[-2][0] != settings
            change_s = float(settings.get("batch") or 0) if new else 0.5
            return msgspec.structs.replace(found, cost_s=found.cost_s + change_s)

    meter = Meter(Reloaded(lambda _: 1000), Journal())
    assert meter.change_s == 0
    for batch in (4, 4, 8, 8, 8, 3):
        meter.measure(ONE.put(batch=batch), 100, 2)
    assert meter.change_s == 5


def test_a_load_that_fails_takes_its_time_too(hill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = hill(lambda _: 1000)
    bench.fails.add(ONE)
    now = itertools.count(step=7.04)
    monkeypatch.setattr("penstock.perf.tune.meter.time.monotonic", lambda: next(now))
    meter = Meter(bench, Journal())
    with pytest.raises(Unfit):
        meter.measure(ONE, 100, 2)
    assert meter.spent_s == 7.0


def test_when_the_time_is_over_no_curve_is_measured_either(hill: Any) -> None:
    meter = Meter(hill(lambda _: 1000), Journal(), limit_s=0.0)
    with pytest.raises(BudgetOver):
        meter.curve(ONE)


def test_each_measurement_has_a_seed_of_its_own(hill: Any) -> None:
    meter = Meter(hill(lambda _: 1000), Journal(), seed=2)
    seeds = [meter.measure(ONE, 100, 1).run.load.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    again = Meter(hill(lambda _: 1000), Journal(), seed=2)
    assert [again.measure(ONE, 100, 1).run.load.seed for _ in range(3)] == seeds


def test_a_curve_is_asked_once_for_all_settings_that_it_holds_for(hill: Any) -> None:
    asked: list[Settings] = []

    class Curved(hill):  # type: ignore[misc]
        def curve(self, settings: Settings) -> Curve:
            asked.append(settings)
            return Curve(points=((1, 0.1),), cost_s=2.0)

    meter = Meter(Curved(lambda _: 1000), Journal())
    for other in (ONE, ONE.put(batch=8), ONE.put(instances=1), ONE.put(hold=0)):
        assert meter.curve(other) == Curve(points=((1, 0.1),), cost_s=2.0)
    meter.curve(ONE.put(precision="fp32"))
    assert [settings.text for settings in asked] == ["precision=fp16", "precision=fp32"]
    assert meter.spent_s == 4.0


def test_what_is_in_the_journal_is_not_measured_again_and_its_time_counts(hill: Any, tmp_path: Path) -> None:
    told: list[tuple[str, float, bool]] = []

    def watch(settings: Settings, reading: Reading, replayed: bool) -> None:
        told.append((settings.text, reading.rate, replayed))

    first, second = hill(lambda _: 1000), hill(lambda _: 2000)
    with Journal.open(tmp_path / "journal.jsonl", {}) as journal:
        reading = Meter(first, journal, watch=watch).measure(ONE, 100, 3)
    with Journal.open(tmp_path / "journal.jsonl", {}) as journal:
        meter = Meter(second, journal, watch=watch)
        assert meter.measure(ONE, 100, 3) == reading
        assert (second.asked, second.prepared, meter.spent_s) == ([], [], 3.0)
        meter.measure(ONE, 100, 3)
    assert told == [(ONE.text, 100, False), (ONE.text, 100, True), (ONE.text, 100, False)]


def test_settings_that_do_not_load_are_unfit_also_from_the_journal(hill: Any) -> None:
    bench, journal = hill(lambda _: 1000), Journal()
    bench.fails.add(ONE)
    for _ in range(2):
        with pytest.raises(Unfit, match="no room for it"):
            Meter(bench, journal).measure(ONE, 100, 1)
    assert bench.prepared == [ONE]
