"""Tuning: searches for the settings with the largest goodput within an SLO, and proves them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Struct

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Slo
from penstock.perf.tune.confirm import Finalist, confirm
from penstock.perf.tune.rates import Effort, TuningTrial
from penstock.perf.tune.result import Ending, ResultBuilder, TuningResult
from penstock.perf.tune.runner import BudgetExhausted, Journal, RunObserver, TrialRunner
from penstock.perf.tune.search import SearchState, Strategy, strategy
from penstock.perf.tune.space import CandidateSettings, SearchSpace
from penstock.perf.tune.system import SystemUnderTest

_BASELINE: Final = 0.25  # share of the budget that measuring the default first may take
_SEARCH: Final = 0.4  # share of the budget that the search has in any case
_SETTLE: Final = 0.5  # the same for the search and settling together
_FACED: Final = 3  # proofs more than there are settings: the default runs beside the best, twice as often as others
_OVERLOAD: Final = 3.0  # times the rate that the search found for the default: it is certain to fail there
_ROUNDS: Final = 1.5  # of the proof: one, and for some settings another at a lower rate
_UNHURRIED: Final = 6  # proofs at the highest rate that the search found may take this many rounds


class TuningOptions(Struct, frozen=True, kw_only=True):
    """How to tune. `default` is the reference of the gain, `price` the price of an hour of the machine, `command`
    reproduces the search. `budget_s` limits the time spent on measurements."""

    search: str = "auto"
    default: CandidateSettings = CandidateSettings()
    budget_s: float = math.inf
    seed: int = 0
    effort: Effort = Effort()
    price: float | None = None
    command: str = ""


def tune(
    system: SystemUnderTest,
    space: SearchSpace,
    slo: Slo,
    options: TuningOptions | None = None,
    *,
    journal: Journal | None = None,
    observer: RunObserver | None = None,
) -> TuningResult:
    """The best settings of `space`, or the default. `observer` receives each run.

    Ends early with the results so far when the budget is used up, on KeyboardInterrupt, and when the system fails.
    Raises ConfigError for an unknown search, or an SLO without a latency or error part; PenstockError if the system
    fails before the first result.
    """
    if all(part.name == "throughput" for part in slo.objectives):
        raise ConfigError(f'SLO "{slo.text}" bounds no latency and no errors; expected for instance "p99<=100ms"')
    options = options or TuningOptions()
    run = strategy(options.search)
    runner = TrialRunner(
        system,
        Journal() if journal is None else journal,
        seed=options.seed,
        limit_s=options.budget_s,
        observer=observer,
    )
    tuning = _Tuning(SearchState(runner, space, slo, options.effort, options.seed), options.default)
    ended = tuning.run(run)
    builder = ResultBuilder(tuning.state, options.default, tuning.finalists, ended, tuning.error)
    return builder.build(seed=options.seed, price=options.price, command=options.command)


class _Tuning:
    """A search, and the proof of its result."""

    def __init__(self, state: SearchState, default: CandidateSettings) -> None:
        self.state, self.default = state, default
        self.finalists: list[Finalist] = []
        self.error = ""  # that ended it

    def run(self, search: Strategy) -> Ending:
        """Measures the default, searches, settles and proves. None of them uses the time that the proof needs."""
        runner, most, ended = self.state.runner, self.state.effort.finalists + 1, False
        steps: tuple[tuple[Callable[[], object], float, float], ...] = (
            (partial(self.state.settle, self.default, enters=False), _BASELINE, math.inf),
            (partial(search, self.state), _SEARCH, most + _FACED),
            (self._settle, _SETTLE, 2 + _FACED),
        )
        try:
            for step, share, proven in steps:
                runner.kept_s = partial(self._kept_s, 1 - share, proven)
                try:
                    step()
                except BudgetExhausted:
                    ended = True
            runner.kept_s = lambda: 0.0
            self._prove()
        except BudgetExhausted:
            ended = True
        except KeyboardInterrupt:
            return "interrupted"
        except PenstockError as error:
            if not any(trial.good or trial.bad for trial in self.state.trials.values()):
                raise
            self.error = error.message
            return "failed"
        return "budget" if ended else "done"

    def _kept_s(self, most: float, proven: float) -> float:
        """Seconds to reserve for proving this many settings, some of them twice; at most the share `most`."""
        rate = max((trial.rate for trial in self.state.trials.values()), default=0.0) or math.inf
        return min(most * self.state.runner.limit_s, proven * _ROUNDS * self._proof_s(rate))

    def _proof_s(self, rate: float) -> float:
        """Seconds of all repeats of the proof at this rate, with the changes of settings."""
        effort, runner = self.state.effort, self.state.runner
        return effort.proof_s(rate, self.state.slo) + effort.repeats * runner.change_s

    def _settle(self) -> None:
        """Verifies the rates of the best few and of the default. Settings that may be close to the best are measured as
        precisely as it; others only if they were measured before."""
        state, close = self.state, max(0.1, 1 - 2 * self.state.effort.precision)
        for _ in range(state.effort.finalists):
            best = next(iter(state.ranked()), None)
            if best is None or state.prober.settled(best):
                break
            state.settle(best.settings)
        best = max(state.ranked(), key=lambda trial: trial.rate, default=None)
        if best is None or not best.rate:
            return
        for trial in state.ranked()[: state.effort.finalists + 1]:
            unclear = trial.rate < best.rate < trial.bad_rate / close
            if unclear and (trial.rate >= close * best.rate or state.prober.probe(trial, close * best.rate)):
                state.settle(trial.settings)
        if not any(trial.settings == self.default for trial in self._top()):
            state.settle(self.default, enters=False)

    def _top(self) -> list[TuningTrial]:
        return [trial for trial in self.state.ranked() if trial.rate][: self.state.effort.finalists]

    def _prove(self) -> None:
        """Proves the best settings and the default in any case, then others while there is time.

        With little time, the proof stays below the highest rates, which are known to the effort's precision only: one
        round at a safe rate proves more than several at the edge.
        """
        state, default = self.state, self.state.trial(self.default)
        top = [trial for trial in self._top() if trial is not default]
        left_s = state.runner.limit_s - state.runner.spent_s
        rated = [trial for trial in (*top[:1], default, *top[1:]) if trial.rate or (trial is default and top)]
        hurried = left_s < _UNHURRIED * sum(self._proof_s(trial.rate) for trial in rated if trial.rate)
        share = 1 - state.effort.precision if hurried else 1.0
        self.finalists = [Finalist(t.settings, share * t.rate, reference=t is default) for t in rated]
        for one in self.finalists:
            one.most = _OVERLOAD * default.rate if one.reference and default.rate else math.inf
        proven = self.finalists[:2]
        if top:
            left_s -= _FACED * self._proof_s(top[0].rate)
        for one in self.finalists[2:]:
            if sum(self._proof_s(other.rate) for other in [*proven, one] if other.rate) <= left_s:
                proven.append(one)
        confirm(state.runner, state.slo, state.effort, proven)
