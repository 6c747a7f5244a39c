"""tune: the settings with the largest goodput within an SLO, searched for and proven."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from penstock.bench.slo import Slo
from penstock.errors import ConfigError
from penstock.tune.capacity import Effort, Trial
from penstock.tune.confirm import Finalist, confirm
from penstock.tune.field import Field
from penstock.tune.journal import Journal
from penstock.tune.meter import BudgetOver, Meter, Watch
from penstock.tune.outcome import Ending, Telling
from penstock.tune.outcome import Outcome as Outcome
from penstock.tune.search import strategy
from penstock.tune.space import Settings, Space
from penstock.tune.trial import Bench

_RESERVED: Final = 0.4  # of the budget at most is kept for the proof


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
    telling = Telling(field, tuning.default, tuning.finalists, ended)
    return telling.outcome(seed=seed, price=price, command=command)


class _Tuning:
    """A search, and the proof of what it found."""

    def __init__(self, field: Field, default: Settings, budget_s: float) -> None:
        self.field, self.default, self.budget_s = field, default, budget_s
        self.finalists: list[Finalist] = []

    def go(self, run: Callable[[Field], None]) -> Ending:
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
        top = self._top()
        if not top:
            return
        if not any(trial.settings == self.default for trial in top):
            top.append(field.settle(self.default, enters=False))
        self.finalists = [
            Finalist(trial.settings, trial.rate, reference=trial.settings == self.default)
            for trial in top
            if trial.rate
        ]
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
