"""The one way from a search to its bench: counted, journalled, ended at the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.tune.journal import Journal
from penstock.tune.meter import BudgetOver, Meter, Unfit
from penstock.tune.space import Settings, parse_settings
from penstock.tune.trial import Curve, Reading

ONE = parse_settings("batch=4,instances=2,precision=fp16,batching.timeout_s=5")


def test_the_time_of_all_measurements_counts_and_the_limit_ends_them(hill: Any) -> None:
    meter = Meter(hill(lambda _: 1000), Journal(), limit_s=5.0)
    meter.measure(ONE, 100, 3)
    meter.saturate(ONE, 2)
    assert meter.spent_s == 5.0
    with pytest.raises(BudgetOver):
        meter.measure(ONE, 100, 3)


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
