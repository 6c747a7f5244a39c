"""tune: the settings with the largest goodput within an SLO, proven, and why no others."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

from penstock.bench.report import RunnerUp, Verdict
from penstock.bench.slo import Slo
from penstock.errors import ConfigError
from penstock.tune.capacity import Effort, Trial
from penstock.tune.confirm import Finalist, confirm, gain
from penstock.tune.field import Field
from penstock.tune.journal import Journal
from penstock.tune.meter import BudgetOver, Meter, Watch
from penstock.tune.search import strategy
from penstock.tune.space import Settings, Space
from penstock.tune.trial import Bench, Reading, told

log = logging.getLogger("penstock.tune")

_RESERVED: Final = 0.4  # of the budget at most is kept for the proof
_SAME: Final = 0.02  # finalists whose goodput differs by less are as good
_TOLD: Final = 100  # runners-up


class Outcome(Struct, frozen=True, kw_only=True):
    """What tuning came to: `verdict` for people, the rest for programs.

    `chosen` with `rate` requests a second keeps the SLO; None if nothing does, or nothing was measured. `confirmed`:
    by repeats; not if the time was over before. `spent_s` is what all measurements took.
    """

    verdict: Verdict
    chosen: Settings | None
    rate: float
    confirmed: bool
    ended: Literal["done", "budget", "interrupted"]
    spent_s: float


def tune(
    bench: Bench,
    space: Space,
    slo: Slo,
    *,
    search: str = "auto",
    default: Settings | None = None,
    budget_s: float = math.inf,
    seed: int = 0,
    journal: Journal | None = None,
    effort: Effort | None = None,
    price: float | None = None,
    command: str = "",
    watch: Watch | None = None,
) -> Outcome:
    """The best of `space` on `bench`, beside `default` (by default the app as it is).

    `price` is that of an hour of the machine, `command` what reproduces this search. `watch` is told of each reading.
    Ends before it is done when `budget_s` of measuring are over or on KeyboardInterrupt, with what is known by then.
    Raises ConfigError for an unknown search, or an SLO without a latency or error part; PenstockError of the bench.
    """
    if all(part.name == "throughput" for part in slo.parts):
        raise ConfigError(f'SLO "{slo.text}" bounds no latency and no errors; expected for instance "p99<=100ms"')
    run, effort = strategy(search), effort or Effort()
    meter = Meter(bench, Journal() if journal is None else journal, seed=seed, watch=watch)
    field = Field(meter, space, slo, effort, seed)
    tuning = _Tuning(field, default or Settings(), budget_s)
    ended = tuning.go(run)
    return _Told(tuning, ended, seed, price, command).outcome()


class _Tuning:
    """A search, and the proof of what it found."""

    def __init__(self, field: Field, default: Settings, budget_s: float) -> None:
        self.field, self.default, self.budget_s = field, default, budget_s
        self.finalists: list[Finalist] = []

    def go(self, run: Callable[[Field], None]) -> Literal["done", "budget", "interrupted"]:
        """Searches and proves; tells how it ended."""
        meter, ended = self.field.meter, False
        try:
            try:
                meter.limit_s = self.budget_s - self._reserve()
                run(self.field)
            except BudgetOver:
                ended = True
            meter.limit_s = self.budget_s
            self._prove()
        except BudgetOver:
            ended = True
        except KeyboardInterrupt:
            return "interrupted"
        return "budget" if ended else "done"

    def _reserve(self) -> float:
        """Seconds that the proof takes."""
        if self.budget_s == math.inf:
            return 0.0
        effort = self.field.effort
        runs = (effort.finalists + 1) * (effort.repeats + 2)
        return min(_RESERVED * self.budget_s, runs * effort.sure(1e9, self.field.slo))

    def _prove(self) -> None:
        field = self.field
        self.finalists = [Finalist(trial.settings, trial.rate) for trial in self._top()]
        if not self.finalists:
            return
        if not any(one.settings == self.default for one in self.finalists):
            trial = field.settle(self.default, enters=False)
            if trial.rate:
                self.finalists.append(Finalist(trial.settings, trial.rate))
        confirm(field.meter, field.slo, field.effort, self.finalists)

    def _top(self) -> list[Trial]:
        """The best few at rates that they are known to sustain. Who may be close to the best is measured as well as it;
        others only if they were measured already."""
        field, close = self.field, 1 - 2 * self.field.effort.precision
        for _ in range(field.effort.finalists):
            best = next(iter(field.ranked()), None)
            if best is None or field.prober.settled(best):
                break
            field.settle(best.settings)
        best = max(field.ranked(), key=lambda trial: trial.rate, default=None)
        if best is None or not best.rate:
            return []
        for trial in field.ranked()[: field.effort.finalists + 1]:
            unclear = trial.rate < best.rate < trial.bad_rate / close
            if unclear and (trial.rate >= close * best.rate or field.prober.probe(trial, close * best.rate)):
                field.settle(trial.settings)
        return [trial for trial in field.ranked() if trial.rate][: field.effort.finalists]


class _Told:
    """The outcome in words."""

    def __init__(
        self,
        tuning: _Tuning,
        ended: Literal["done", "budget", "interrupted"],
        seed: int,
        price: float | None,
        command: str,
    ) -> None:
        self.field, self.slo = tuning.field, tuning.field.slo
        self.default, self.finalists = tuning.default, tuning.finalists
        self.ended, self.seed, self.price, self.command = ended, seed, price, command
        self.notes: list[str] = []

    def outcome(self) -> Outcome:
        """All of it."""
        if ended := {"budget": "the time for measuring was over", "interrupted": "it was interrupted"}.get(self.ended):
            self.notes.append(f"the search did not end by itself: {ended}; this is the best of what was measured")
        best = self._best()
        if best is None:
            return self._nothing()
        if best.met is None:
            self.notes.append("not confirmed: the chosen settings were not measured often enough to be sure")
        short = self._too_little(best)
        default = next((one for one in self.finalists if one.settings == self.default and one.met is not False), None)
        more = gain(best, default, self.seed) if default is not None else None
        if default is None:
            self.notes.append(f"the default ({self.default}) {self._why_not_default()}")
        verdict = Verdict(
            slo=self.slo.text,
            chosen=str(best.settings),
            default=str(self.default),
            met=short is None,
            goodput=best.goodput,
            default_goodput=default.goodput if default else None,
            gain=more[0] if more else None,
            interval=more[1] if more else None,
            command=self.command,
            cost_per_million=self.price / (best.goodput * 3600) * 1e6 if self.price is not None else None,
            runners_up=self._runners_up(best),
            trajectory=self.field.steps,
            notes=[*([short] if short else []), *self.notes],
        )
        return self._outcome(verdict, best.settings if short is None else None, best.rate, best.met is True)

    def _outcome(self, verdict: Verdict, chosen: Settings | None, rate: float, confirmed: bool) -> Outcome:
        spent_s = self.field.meter.spent_s
        log.info("chosen=%s rate=%g confirmed=%s ended=%s spent_s=%.1f", chosen, rate, confirmed, self.ended, spent_s)
        return Outcome(
            verdict=verdict, chosen=chosen, rate=rate, confirmed=confirmed, ended=self.ended, spent_s=spent_s
        )

    def _best(self) -> Finalist | None:
        """Of the finalists that keep the SLO the one with the most goodput; as good and cheaper goes first. Of those
        that could not be proven any more the one with the largest rate."""
        cost = self.field.space.cost
        able = [one for one in self.finalists if one.met]
        inside = [one for one in able if one.settings in self.field.space]
        if able := inside or able:
            top = max(one.goodput for one in able)
            return min((one for one in able if one.goodput >= top * (1 - _SAME)), key=lambda one: cost(one.settings))
        if self.finalists and all(one.met is False for one in self.finalists):
            return None
        return next((Finalist(trial.settings, trial.rate) for trial in self.field.ranked() if trial.rate), None)

    def _too_little(self, best: Finalist) -> str | None:
        """Why the SLO's throughput is not reached; None if it is, or none is asked for."""
        wanted = next((part for part in self.slo.parts if part.name == "throughput"), None)
        if wanted is None or best.rate >= wanted.limit:
            return None
        return f"no settings keep {self.slo.text}: the nearest, {best.settings}, sustain {best.rate:g}/s"

    def _why_not_default(self) -> str:
        trial = self.field.trials.get(self.default)
        proven = next((one.why for one in self.finalists if one.settings == self.default), "")
        if why := proven or (trial.out if trial else ""):
            return f"does not keep the SLO: {why}"
        return "was not measured: there was no time left"

    def _runners_up(self, best: Finalist) -> list[RunnerUp]:
        """Why not each: the finalists, then by what was learned of them."""
        cost, proven = self.field.space.cost, {one.settings: one for one in self.finalists}
        told_of = [
            RunnerUp(settings=str(s), why=self._why(one, best)) for s, one in proven.items() if s != best.settings
        ]
        others = [
            t for t in self.field.ranked(all_of_them=True) if t.settings not in proven and t.settings != best.settings
        ]
        for trial in sorted(others, key=lambda t: (-t.estimate, cost(t.settings)))[:_TOLD]:
            told_of.append(RunnerUp(settings=str(trial.settings), why=_lost(trial)))
        return told_of

    def _why(self, one: Finalist, best: Finalist) -> str:
        if one.met is False:
            return f"not sure to keep the SLO: {one.why}"
        if one.met is None:
            return "not confirmed: there was no time left"
        less = 1 - one.goodput / best.goodput
        if less > _SAME:
            return f"sustains {one.goodput:.3g}/s, {less * 100:.0f} % less"
        return f"as good ({one.goodput:.3g}/s), and dearer"

    def _nothing(self) -> Outcome:
        """Nothing keeps the SLO, or nothing is known: the nearest."""
        nearest = self._nearest()
        if nearest is None:
            outs = [trial for trial in self.field.trials.values() if trial.out]
            chosen = str(outs[0].settings) if outs else ""
            note = f"no settings keep {self.slo.text}"
            note += f": {outs[0].settings}: {outs[0].out}" if outs else " as far as is known: nothing was measured"
        else:
            settings, reading = nearest
            chosen = str(settings)
            values = ", ".join(
                f"{part.name} {told(part.name, reading.value(part.name))}"
                for part in self.slo.parts
                if part.name != "throughput"
            )
            note = f"no settings keep {self.slo.text}: the nearest, {settings}, come to {values} at {reading.rate:g}/s"
        verdict = Verdict(
            slo=self.slo.text,
            chosen=chosen,
            default=str(self.default),
            met=False,
            command=self.command,
            runners_up=[RunnerUp(settings=str(t.settings), why=_lost(t)) for t in self.field.ranked(all_of_them=True)][
                :_TOLD
            ],
            trajectory=self.field.steps,
            notes=[note, *self.notes],
        )
        return self._outcome(verdict, None, 0.0, False)

    def _nearest(self) -> tuple[Settings, Reading] | None:
        """The reading that breaks the SLO least."""

        def excess(reading: Reading) -> float:
            parts = [part for part in self.slo.parts if part.name != "throughput"]
            return max((reading.value(part.name) or 0.0) / max(part.limit, 1e-9) for part in parts)

        found = [(t.settings, t.bad) for t in self.field.trials.values() if t.bad is not None and not t.bad.invalid]
        return min(found, key=lambda pair: excess(pair[1]), default=None)


def _lost(trial: Trial) -> str:
    """Why a trial did not come among the finalists."""
    if trial.out:
        return trial.out
    if trial.bad is not None:
        return f"at {trial.bad_rate:.3g}/s: {trial.why_bad}"
    return trial.why_bad or f"sustains {trial.rate:.3g}/s"
