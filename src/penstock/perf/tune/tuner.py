"""tune: the settings with the largest goodput within an SLO, searched for and proven."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.slo import Slo
from penstock.perf.simulate.capacity import Effort, Trial
from penstock.perf.tune.confirm import Finalist, confirm
from penstock.perf.tune.field import Field
from penstock.perf.tune.journal import Journal
from penstock.perf.tune.meter import BudgetOver, Meter, Watch
from penstock.perf.tune.outcome import Ending, Telling
from penstock.perf.tune.outcome import Outcome as Outcome
from penstock.perf.tune.search import strategy
from penstock.perf.tune.space import Settings, Space
from penstock.perf.tune.trial import Bench

_SEARCH: Final = 0.4  # of the budget is the search's in any case
_SETTLE: Final = 0.6  # and so much by the end of what is settled after it
_ROUNDS: Final = 1.5  # of the proof: one, and of some another at a lower rate


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
    Ends before it is done when `budget_s` of measuring are over, on KeyboardInterrupt, and when the bench fails, with
    what is known by then. Raises ConfigError for an unknown search, or an SLO without a latency or error part;
    PenstockError of a bench that fails before anything is known.
    """
    if all(part.name == "throughput" for part in slo.objectives):
        raise ConfigError(f'SLO "{slo.text}" bounds no latency and no errors; expected for instance "p99<=100ms"')
    run, effort = strategy(search), effort or Effort()
    meter = Meter(bench, Journal() if journal is None else journal, seed=seed, watch=watch)
    field = Field(meter, space, slo, effort, seed)
    tuning = _Tuning(field, default or Settings(), budget_s)
    ended = tuning.go(run)
    telling = Telling(field, tuning.default, tuning.finalists, ended, tuning.error)
    return telling.outcome(seed=seed, price=price, command=command)


class _Tuning:
    """A search, and the proof of what it found."""

    def __init__(self, field: Field, default: Settings, budget_s: float) -> None:
        self.field, self.default = field, default
        self.finalists: list[Finalist] = []
        self.error = ""  # that ended it
        field.meter.limit_s = budget_s

    def go(self, run: Callable[[Field], None]) -> Ending:
        """Searches and proves; tells how it ended. Neither the search nor what is settled after it takes the time that
        the proof needs."""
        most, ended = self.field.effort.finalists + 1, False
        try:
            for step, share, proven in ((partial(run, self.field), _SEARCH, most), (self._settle, _SETTLE, 2)):
                self.field.meter.kept_s = partial(self._kept_s, 1 - share, proven)
                try:
                    step()
                except BudgetOver:
                    ended = True
            self.field.meter.kept_s = lambda: 0.0
            self._prove()
        except BudgetOver:
            ended = True
        except KeyboardInterrupt:
            return "interrupted"
        except PenstockError as error:
            if not any(trial.good or trial.bad for trial in self.field.trials.values()):
                raise
            self.error = error.message
            return "failed"
        return "budget" if ended else "done"

    def _kept_s(self, most: float, proven: int) -> float:
        """Seconds of the budget that are kept for the proof of so many, some rounds of it at a lower rate; at most that
        part of it."""
        rate = max((trial.rate for trial in self.field.trials.values()), default=0.0) or math.inf
        return min(most * self.field.meter.limit_s, proven * _ROUNDS * self._proof_s(rate))

    def _proof_s(self, rate: float) -> float:
        """Seconds that the repeats of settings take which sustain so much."""
        effort, meter = self.field.effort, self.field.meter
        return effort.proof_s(rate, self.field.slo) + effort.repeats * meter.change_s

    def _settle(self) -> None:
        """Makes sure of the rates of the best few, and of the default's. Who may be close to the best is measured as
        well as it; others only if they were measured already."""
        field, close = self.field, max(0.1, 1 - 2 * self.field.effort.precision)
        for _ in range(field.effort.finalists):
            best = next(iter(field.ranked()), None)
            if best is None or field.prober.settled(best):
                break
            field.settle(best.settings)
        best = max(field.ranked(), key=lambda trial: trial.rate, default=None)
        if best is None or not best.rate:
            return
        for trial in field.ranked()[: field.effort.finalists + 1]:
            unclear = trial.rate < best.rate < trial.bad_rate / close
            if unclear and (trial.rate >= close * best.rate or field.prober.probe(trial, close * best.rate)):
                field.settle(trial.settings)
        if not any(trial.settings == self.default for trial in self._top()):
            field.settle(self.default, enters=False)

    def _top(self) -> list[Trial]:
        return [trial for trial in self.field.ranked() if trial.rate][: self.field.effort.finalists]

    def _prove(self) -> None:
        """Measures the best few and the default again: the best in any case, then the default, others as far as there
        is time for them."""
        field, top = self.field, self._top()
        default = field.trials.get(self.default)
        if default is not None and default.rate:
            top = list(dict.fromkeys([*top[:1], default, *top[1:]]))
        self.finalists = [Finalist(t.settings, t.rate, reference=t is default) for t in top]
        left_s, proven = field.meter.limit_s - field.meter.spent_s, self.finalists[:1]
        for one in self.finalists[1:]:
            if sum(self._proof_s(other.rate) for other in [*proven, one]) <= left_s:
                proven.append(one)
        confirm(field.meter, field.slo, field.effort, proven)
