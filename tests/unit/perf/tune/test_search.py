"""Every strategy finds the top of a hill, with fewer questions than there are settings times probes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.slo import parse_slo
from penstock.perf.simulate.capacity import Effort
from penstock.perf.tune.field import Field
from penstock.perf.tune.journal import Journal
from penstock.perf.tune.meter import Meter
from penstock.perf.tune.search import STRATEGIES, strategy
from penstock.perf.tune.space import Settings, Space, parse_settings, parse_space
from penstock.perf.tune.trial import Curve

SLO = parse_slo("p99<=100ms")
SPACE = parse_space("batch=1..32,instances=1..16,precision=fp32,bf16,fp16")
TOP = "batch=16,instances=4,precision=bf16"


def able(settings: Settings) -> float:
    """Highest at TOP, lower by a fifth with each step away from it."""
    instances, batch = int(settings.get("instances") or 0), int(settings.get("batch") or 0)
    steps = abs(instances.bit_length() - 3) + abs(batch.bit_length() - 5)
    return 1000 * 0.8**steps * {"fp32": 0.6, "bf16": 1.0, "fp16": 0.9}[str(settings.get("precision"))]


def searched(bench: Any, name: str, space: Space = SPACE) -> Field:
    field = Field(Meter(bench, Journal(), seed=1), space, SLO, Effort(), 1)
    strategy(name)(field)
    return field


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_finds_the_top(hill: Any, name: str) -> None:
    if name == "tpe":
        pytest.importorskip("optuna")
    bench = hill(able)
    field = searched(bench, name)
    assert field.best is not None
    if name == "tpe":  # asks for 36 of 90 settings, by chance at first
        assert field.best.rate >= 0.75 * 900
    else:
        assert field.best.settings.text == TOP
    assert field.steps[-1].elapsed_s <= field.meter.spent_s
    probes = len(bench.asked)
    assert probes <= {"grid": 1000, "halving": 200, "tpe": 140, "climb": 60, "auto": 60}[name]


def test_few_settings_are_all_measured(hill: Any) -> None:
    field = searched(hill(able), "auto", parse_space("batch=8,16,instances=4,precision=bf16"))
    assert len([trial for trial in field.trials.values() if field.prober.settled(trial)]) == 2


def test_a_climb_that_begins_where_nothing_keeps_the_slo_goes_elsewhere(hill: Any) -> None:
    """The highest bound is that of large batches, which take too long; small ones do not."""

    class Slow(hill):  # type: ignore[misc]
        def measure(self, settings: Settings, rate: float, seconds: float, seed: int) -> Any:
            self.base_s = 0.2 if int(settings.get("batch") or 0) > 2 else 0.01
            return super().measure(settings, rate, seconds, seed)

    bench = Slow(able)
    bench.curves = {
        Settings((("precision", p),)): Curve(points=((1, 0.001), (32, 0.010))) for p in ("fp32", "bf16", "fp16")
    }
    found = searched(bench, "climb").best
    assert found is not None
    assert found.settings == parse_settings("batch=2,instances=4,precision=bf16")


def test_a_climb_looks_beside_what_it_passed_on_its_way_too(hill: Any) -> None:
    """From batches of 2 it goes to those of 4, which promise more than single ones, and are less good than these."""
    bench = hill(lambda settings: {1: 95, 2: 80, 4: 85, 8: 10}[settings.get("batch")])
    bench.curves[Settings()] = Curve(points=((1, 0.010), (2, 0.012), (4, 0.030), (8, 0.200)))
    found = searched(bench, "climb", parse_space("batch=1..8,instances=1"))
    tried = list(dict.fromkeys(settings.get("batch") for settings, _ in bench.asked))
    assert tried == [2, 4, 8, 1]
    assert found.best is not None
    assert found.best.settings == parse_settings("batch=1,instances=1")


def test_a_search_with_nothing_to_measure_ends(hill: Any) -> None:
    for name in ("grid", "climb", "halving", "auto"):
        bench = hill(able)
        bench.refused = dict.fromkeys(SPACE, "outputs differ")
        assert searched(bench, name).best is None
        assert bench.asked == []


def test_an_unknown_search_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no search 'halfing'; did you mean 'halving'\?"):
        strategy("halfing")


def test_tpe_without_optuna_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[tune\]'"):
        strategy("tpe")
