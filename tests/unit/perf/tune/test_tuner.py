"""tune: the truth is found in a fifth of the time, what cannot be is told, and an early end tells what is known."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Verdict
from penstock.perf.bench.slo import parse_slo
from penstock.perf.simulate.capacity import Effort
from penstock.perf.simulate.synthetic import SyntheticBench, drawn
from penstock.perf.tune.journal import Journal
from penstock.perf.tune.meter import Watch
from penstock.perf.tune.space import Settings, parse_settings, parse_space
from penstock.perf.tune.trial import Reading
from penstock.perf.tune.tuner import Outcome, tune

SLO = parse_slo("p99<=100ms")
SPACE = parse_space("batch=1..8,instances=1..4")
DEFAULT = parse_settings("batch=1,instances=1")
BEST = "batch=4,instances=2"


def able(settings: Settings) -> float:
    """Highest at BEST; the app as it is can do a tenth."""
    batch, instances = int(settings.get("batch") or 0), int(settings.get("instances") or 0)
    if not batch:
        return 100
    return 1000 * 0.7 ** (abs(batch.bit_length() - 3) + abs(instances.bit_length() - 2))


# ---- what it finds


def test_the_verdict_has_the_chosen_settings_the_gain_and_why_no_others(hill: Any) -> None:
    outcome = tune(hill(able), SPACE, SLO, default=DEFAULT, price=3.6, command="penstock tune ...")
    verdict = outcome.verdict
    assert outcome.chosen is not None
    assert (outcome.chosen.text, verdict.chosen, verdict.default) == (BEST, BEST, DEFAULT.text)
    assert (outcome.confirmed, outcome.ended, verdict.notes) == (True, "done", [])
    assert verdict.met
    assert verdict.proven
    assert 850 <= outcome.rate <= 900
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


def test_an_app_that_is_better_as_it_is_stays_so(hill: Any) -> None:
    space = parse_space("batch=1,2,instances=1")
    outcome = tune(hill(lambda s: 1000 if not s.items else 500), space, SLO)
    assert outcome.chosen == Settings()
    assert (outcome.verdict.chosen, outcome.verdict.default, outcome.verdict.gain) == ("as it is", "as it is", 0.0)
    assert "nothing that was tried is better than the default" in outcome.verdict.notes
    assert "% less" in outcome.verdict.runners_up[0].why
    same = tune(hill(lambda s: 500), space, SLO)
    assert same.chosen == parse_settings("batch=1,instances=1"), "said, rather than left to the app"


def test_a_generator_that_cannot_offer_more_is_told(hill: Any) -> None:
    class Limited(hill):  # type: ignore[misc]
        def measure(self, settings: Settings, rate: float, *args: Any) -> Any:
            self.invalid = 1 if rate > 600 else 0
            return super().measure(settings, rate, *args)

    outcome = tune(Limited(able), SPACE, SLO, default=DEFAULT)
    assert 0 < outcome.rate <= 600
    assert any("the load generator, not the model, ended at 6" in note for note in outcome.verdict.notes)


def test_what_short_runs_promise_and_repeats_do_not_keep_is_not_chosen(hill: Any) -> None:
    class Fades(hill):  # type: ignore[misc]
        def measure(self, settings: Settings, rate: float, seconds: float, seed: int) -> Any:
            self.base_s = 0.5 if seconds >= 4 and (settings, rate) in self.asked else 0.01
            return super().measure(settings, rate, seconds, seed)

    outcome = tune(Fades(able), SPACE, SLO, default=DEFAULT, search="climb")
    assert (outcome.chosen, outcome.verdict.met) == (None, False)
    assert f"no settings keep p99<=100ms for sure: the nearest, {BEST}, at " in outcome.verdict.notes[0]


def test_of_settings_that_are_as_good_the_cheapest_is_chosen(hill: Any) -> None:
    outcome = tune(hill(lambda _: 1000), SPACE, SLO, default=parse_settings("batch=8,instances=4"), search="grid")
    assert outcome.chosen == parse_settings("batch=1,instances=1")
    assert any("as good" in runner.why and "dearer" in runner.why for runner in outcome.verdict.runners_up)


# ---- what cannot be


def test_an_slo_that_nothing_keeps_says_so_and_names_the_nearest(hill: Any) -> None:
    class Slow(hill):  # type: ignore[misc]
        def measure(self, settings: Settings, *args: Any) -> Any:
            self.base_s = 0.15 if settings.text == "batch=2,instances=1" else 0.3
            return super().measure(settings, *args)

    outcome = tune(Slow(able), SPACE, SLO, default=DEFAULT, search="grid")
    verdict = outcome.verdict
    assert (outcome.chosen, outcome.rate, verdict.met, verdict.gain) == (None, 0.0, False, None)
    assert verdict.chosen == "batch=2,instances=1"
    assert "no settings keep p99<=100ms: the nearest, batch=2,instances=1, come to p99 15" in verdict.notes[0]
    assert "already: p99" in verdict.runners_up[0].why


def test_an_slo_below_what_one_row_takes_is_told_without_any_load(hill: Any) -> None:
    from penstock.perf.tune.trial import Curve

    bench = hill(able)
    bench.curves[Settings()] = Curve(points=((1, 0.5),))
    outcome = tune(bench, SPACE, SLO)
    assert outcome.chosen is None
    assert "offline, a batch of one takes 500 ms" in outcome.verdict.notes[0]
    assert bench.asked == []


def test_a_throughput_that_nothing_reaches_is_told_with_the_nearest(hill: Any) -> None:
    outcome = tune(hill(able), SPACE, parse_slo("p99<=100ms,throughput>=5000/s"), default=DEFAULT)
    assert (outcome.chosen, outcome.verdict.met, outcome.verdict.chosen) == (None, False, BEST)
    assert f"the nearest, {BEST}, sustain 8" in outcome.verdict.notes[0]
    assert tune(hill(able), SPACE, parse_slo("p99<=100ms,throughput>=500/s"), default=DEFAULT).verdict.met


def test_an_slo_that_bounds_nothing_is_refused(hill: Any) -> None:
    with pytest.raises(ConfigError, match="bounds no latency and no errors"):
        tune(hill(able), SPACE, parse_slo("throughput>=10/s"))


def test_a_default_that_cannot_keep_the_slo_is_told(hill: Any) -> None:
    bench = hill(able)
    bench.fails.add(Settings())
    outcome = tune(bench, SPACE, SLO)
    assert outcome.verdict.met
    assert (outcome.verdict.gain, outcome.verdict.default_goodput) == (None, None)
    assert "the default (as it is) does not keep the SLO: no room for it" in outcome.verdict.notes


def test_an_error_of_the_bench_ends_the_tuning(hill: Any) -> None:
    class Gone(hill):  # type: ignore[misc]
        def prepare(self, settings: Settings) -> None:
            raise PenstockError("the server is gone")

    with pytest.raises(PenstockError, match="the server is gone"):
        tune(Gone(able), SPACE, SLO)


# ---- what ends it early


@pytest.mark.parametrize("budget_s", [0.0, 2.0, 10.0, 40.0, 80.0])
def test_a_budget_that_is_over_leaves_the_best_of_what_was_measured(hill: Any, budget_s: float) -> None:
    outcome = tune(hill(able), SPACE, SLO, default=DEFAULT, budget_s=budget_s)
    assert outcome.ended == "budget"
    assert outcome.spent_s <= budget_s + 30
    assert any("the time for measuring was over" in note for note in outcome.verdict.notes)
    if budget_s >= 10:
        assert outcome.chosen is not None
        assert outcome.rate <= 900
    else:
        assert outcome.chosen is None or not outcome.confirmed


def test_a_budget_that_is_too_short_for_the_search_leaves_enough_for_the_proof(hill: Any) -> None:
    full = tune(slow(hill), SPACE, SLO, default=DEFAULT)
    for share in (0.4, 0.6, 0.8):
        outcome = tune(slow(hill), SPACE, SLO, default=DEFAULT, budget_s=share * full.spent_s)
        assert (outcome.ended, outcome.confirmed) == ("budget", True)
        assert outcome.spent_s <= share * full.spent_s + 40
        assert outcome.rate <= 90
    assert outcome.verdict.interval is not None, "the default was proven, too"


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0.2, "the default (batch=1,instances=1) was not measured: the time for measuring was over"),
        (0.45, "the default (batch=1,instances=1) was not measured to the end: the time for measuring was over"),
        (0.7, "the default may sustain more than was measured, and the gain be less"),
    ],
)
def test_what_is_not_known_of_the_default_when_the_time_is_over_is_told(hill: Any, share: float, told: str) -> None:
    full = tune(slow(hill), SPACE, SLO, default=DEFAULT)
    notes = tune(slow(hill), SPACE, SLO, default=DEFAULT, budget_s=share * full.spent_s).verdict.notes
    assert [note for note in notes if note.startswith(told)]
    assert not [note for note in full.verdict.notes if "default" in note]


def slow(hill: Any) -> Any:
    """Can do a tenth, so that runs are long; and takes 5 s more for each."""

    class Slow(hill):  # type: ignore[misc]
        def measure(self, *args: Any) -> Reading:
            found: Reading = super().measure(*args)
            return msgspec.structs.replace(found, cost_s=found.cost_s + 5)

    return Slow(lambda settings: able(settings) / 10)


def test_a_bench_that_fails_later_leaves_what_was_measured(hill: Any) -> None:
    class TargetFailing(hill):  # type: ignore[misc]
        def measure(self, *args: Any) -> Reading:
            found: Reading = super().measure(*args)
            if len(self.asked) == 12:
                raise PenstockError("the machine is too busy")
            return found

    outcome = tune(TargetFailing(able), SPACE, SLO, default=DEFAULT)
    assert (outcome.ended, outcome.confirmed, outcome.verdict.proven) == ("failed", False, False)
    assert outcome.chosen is not None
    told = "the search did not end by itself: the machine is too busy; this is the best of what was measured"
    assert told in outcome.verdict.notes


@pytest.mark.parametrize("at", [1, 2, 10, 25])
def test_ctrl_c_reports_what_exists(hill: Any, at: int) -> None:
    bench = hill(able)
    bench.interrupt_at = at
    outcome = tune(bench, SPACE, SLO, default=DEFAULT)
    assert outcome.ended == "interrupted"
    assert any("it was interrupted" in note for note in outcome.verdict.notes)
    assert (outcome.chosen is None) == (at == 1)


# ---- the same again


KILLED = """
    import sys, pathlib
    from penstock.perf.bench.slo import parse_slo
    from penstock.perf.simulate.capacity import Effort
    from penstock.perf.tune.journal import Journal
    from penstock.perf.tune.space import parse_space
    from penstock.perf.simulate.synthetic import SyntheticBench, drawn
    from penstock.perf.tune.tuner import tune

    class Told(SyntheticBench):
        def measure(self, *args):
            reading = super().measure(*args)
            print("measured", flush=True)
            return reading

    machine, _ = drawn(3)
    slo = parse_slo("p99<=100ms")
    with Journal.open(pathlib.Path(sys.argv[1]), {"seed": "3"}) as journal:
        space = parse_space("batch=1..8,instances=1,2")
        effort = Effort(probe_s=0.2, probe_samples=100, sure_s=0.5, sure_samples=200, latencies=2)
        tune(Told(machine, slo), space, slo, seed=3, journal=journal, effort=effort)
"""


QUICK = Effort(probe_s=0.2, probe_samples=100, sure_s=0.5, sure_samples=200, latencies=2)


class Counted(SyntheticBench):
    """Knows how often it measured."""

    measured = 0

    def measure(self, *args: Any) -> Any:
        self.measured += 1
        return super().measure(*args)


def small(path: Path | None = None, watch: Watch | None = None) -> tuple[Outcome, int]:
    """The search of KILLED, here, and how often it measured."""
    machine, _ = drawn(3)
    slo = parse_slo("p99<=100ms")
    bench = Counted(machine, slo)
    with Journal.open(path, {"seed": "3"}) if path else Journal() as journal:
        outcome = tune(
            bench, parse_space("batch=1..8,instances=1,2"), slo, seed=3, journal=journal, effort=QUICK, watch=watch
        )
    return outcome, bench.measured


@pytest.mark.parametrize("after", [1, 7, 19])
def test_kill_9_loses_one_measurement_at_most_and_changes_nothing(tmp_path: Path, after: int) -> None:
    whole, needed = small()
    path = tmp_path / "journal.jsonl"
    code = textwrap.dedent(KILLED)
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(after):
            assert child.stdout.readline() == "measured\n"
        child.kill()
        measured = after + len(child.stdout.readlines())
    assert after <= measured <= needed
    again, rest = small(path)
    assert again == whole
    assert needed <= measured + rest <= needed + 1


def test_a_search_that_is_done_is_told_again_from_its_journal_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, needed = small(path)
    known: list[bool] = []
    again, measured = small(path, lambda settings, reading, replayed: known.append(replayed))
    assert again == first
    assert measured == 0
    assert known == [True] * needed


# ---- the truth


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "best_rate", "exhaustive_s"), [(0, 345.6, 15_678), (2, 587.2, 18_140)])
def test_the_truth_is_found_in_a_fifth_of_the_time(seed: int, best_rate: float, exhaustive_s: float) -> None:
    """Beside what an exhaustive search found, and took: figures of benchmarks/tuner_truth.py, which has more seeds and
    all strategies."""
    machine, slo = drawn(seed)
    space = parse_space("batch=1..32,instances=1..16,precision=fp32,fp16,bf16")
    default = parse_settings("batch=32,instances=1,precision=fp32")
    bench = SyntheticBench(machine, slo)
    outcome = tune(bench, space, slo, default=default, seed=seed)
    assert outcome.chosen is not None
    assert slo.latency_s is not None
    assert outcome.spent_s <= 0.2 * exhaustive_s
    assert bench.true_p99_s(outcome.chosen, outcome.rate, 20_000) <= 1.05 * slo.latency_s
    assert bench.true_p99_s(outcome.chosen, 0.95 * best_rate, 20_000) <= slo.latency_s


def test_an_outcome_is_a_verdict_that_can_be_written_and_read() -> None:
    import msgspec

    outcome, _ = small()
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=Outcome) == outcome
    assert isinstance(outcome.verdict, Verdict)


def test_more_effort_measures_longer(hill: Any) -> None:
    quick = tune(hill(able), SPACE, SLO, default=DEFAULT, effort=QUICK)
    long = tune(hill(able), SPACE, SLO, default=DEFAULT, effort=Effort(probe_s=3, sure_s=10, repeats=5))
    assert quick.spent_s < long.spent_s / 2
