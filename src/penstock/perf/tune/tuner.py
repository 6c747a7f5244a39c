"""Tuning: searches for the settings with the largest goodput within an SLO, proves them, and states the result.

The default is measured first, and the result replaces it only if it was better in the same rounds.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

from msgspec import Struct

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.document import value_text
from penstock.perf.bench.measurement import RunnerUp, Slo, Verdict
from penstock.perf.tune.rates import EFFORTS, Effort, Finalist, TuningTrial, confirm, gain
from penstock.perf.tune.runner import BudgetExhausted, Journal, RunObserver, SystemUnderTest, TrialRunner
from penstock.perf.tune.search import SearchState, Strategy, strategy
from penstock.perf.tune.space import UNCHANGED, CandidateSettings, SearchSpace

log = logging.getLogger("penstock.perf")

Ending = Literal["done", "budget", "interrupted", "failed"]

_BASELINE: Final = 0.25  # share of the budget that measuring the default first may take
_SEARCH: Final = 0.4  # share of the budget that the search has in any case
_SETTLE: Final = 0.5  # the same for the search and settling together
_EXTRA_PROOFS: Final = (
    3  # proofs more than there are settings: the default runs beside the best, twice as often as others
)
_OVERLOAD: Final = 3.0  # times the rate that the search found for the default: it is certain to fail there
_ROUNDS: Final = 1.5  # of the proof: one, and for some settings another at a lower rate
_UNHURRIED: Final = 6  # proofs at the highest rate that the search found may take this many rounds
_SAME: Final = 0.02  # settings whose goodput differs by less than this share are equally good
_LISTED: Final = 100  # runners-up
_EARLY: Final = {"budget": "the time budget was used up", "interrupted": "it was interrupted"}


class TuningResult(Struct, frozen=True, kw_only=True):
    """The result of tuning: `verdict` for people, the rest for programs.

    `chosen` meets the SLO at `rate` requests per second; None if no settings do, or nothing was measured. `confirmed`
    by repeats, unless the time was over before. `unproven` says why it must not replace the default; "" if it was
    better in the same run. `spent_s` is the time of all measurements.
    """

    verdict: Verdict
    chosen: CandidateSettings | None
    rate: float
    confirmed: bool
    unproven: str
    ended: Ending
    spent_s: float


def tune(
    system: SystemUnderTest,
    space: SearchSpace,
    slo: Slo,
    *,
    search: str = "auto",
    default: CandidateSettings = UNCHANGED,
    budget_s: float = math.inf,
    seed: int = 0,
    effort: Effort = EFFORTS["normal"],
    price: float | None = None,
    command: str = "",
    journal: Journal | None = None,
    observer: RunObserver | None = None,
) -> TuningResult:
    """The best settings of `space`, or the default. `observer` receives each run.

    `default` is the reference of the gain, `budget_s` limits the time of measuring, `price` is for an hour of the
    machine, and `command` reproduces the search. Many parameters: all but the first three are options.

    Ends early with the results so far when the budget is used up, on KeyboardInterrupt, and when the system fails.
    Raises ConfigError for an unknown search, or an SLO without a latency or error part; PenstockError if the system
    fails before the first result.
    """
    if not slo.bounds:
        raise ConfigError(f'SLO "{slo.text}" bounds no latency and no errors; expected for instance "p99<=100ms"')
    run = strategy(search)
    journal = Journal() if journal is None else journal
    runner = TrialRunner(system, journal, seed=seed, limit_s=budget_s, observer=observer)
    tuning = _Tuning(SearchState(runner, space, slo, effort, seed), default)
    ended = tuning.run(run)
    builder = ResultBuilder(tuning.state, default, tuning.finalists, ended, tuning.error)
    return builder.build(seed=seed, price=price, command=command)


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
            (partial(search, self.state), _SEARCH, most + _EXTRA_PROOFS),
            (self._settle, _SETTLE, 2 + _EXTRA_PROOFS),
        )
        try:
            for step, share, proven in steps:
                runner.reserved_s = partial(self._reserved_s, 1 - share, proven)
                try:
                    step()
                except BudgetExhausted:
                    ended = True
            runner.reserved_s = lambda: 0.0
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

    def _reserved_s(self, most: float, proven: float) -> float:
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
            one.highest_bar = _OVERLOAD * default.rate if one.reference and default.rate else math.inf
        proven = self.finalists[:2]
        if top:
            left_s -= _EXTRA_PROOFS * self._proof_s(top[0].rate)
        for one in self.finalists[2:]:
            if sum(self._proof_s(other.rate) for other in [*proven, one] if other.rate) <= left_s:
                proven.append(one)
        confirm(state.runner, state.slo, state.effort, proven)


# ---- the result


class ResultBuilder:
    """Builds the result of a search. `finalists` have at least a known rate; the default is one if it sustains any."""

    def __init__(
        self,
        state: SearchState,
        default: CandidateSettings,
        finalists: Sequence[Finalist],
        ended: Ending,
        error: str = "",
    ) -> None:
        self.state, self.slo, self.default, self.finalists, self.ended = state, state.slo, default, finalists, ended
        self.reference = next((one for one in finalists if one.settings == default), None)
        self.early = error or _EARLY.get(ended, "")
        self.notes: list[str] = []

    def build(self, *, seed: int, price: float | None, command: str) -> TuningResult:
        """The whole result. `price` is the price of an hour, `command` reproduces the search."""
        if self.early:
            self.notes.append(f"the search ended early: {self.early}; this is the best of the measurements so far")
        best, figures = self._best(), dict[str, Any]()
        if best is None:
            chosen, missed = self._nearest()
            unproven = self._without_any(missed)
        else:
            chosen, missed = str(best.settings), self._too_little(best)
            unproven = f"nothing meets {self.slo.text}" if missed else self._unproven(best)
            figures = self._figures(best, unproven, seed, price)
        verdict = Verdict(
            slo=self.slo.text,
            chosen=chosen,
            default=str(self.default),
            met=not missed,
            command=command,
            runners_up=self._runners_up(best),
            trajectory=self.state.steps,
            notes=[*([missed] if missed else []), *self.notes],
            **figures,
        )
        result = TuningResult(
            verdict=verdict,
            chosen=None if best is None or missed else best.settings,
            rate=0.0 if best is None else best.rate,
            confirmed=best is not None and best.met is True,
            unproven=unproven,
            ended=self.ended,
            spent_s=self.state.runner.spent_s,
        )
        log.info(
            "chosen=%s rate=%g unproven=%s ended=%s spent_s=%.1f",
            result.chosen, result.rate, unproven, self.ended, result.spent_s,
        )  # fmt: skip
        return result

    def _figures(self, best: Finalist, unproven: str, seed: int, price: float | None) -> dict[str, Any]:
        """The figures of the choice and its gain, for the verdict; doubts about them become notes."""
        if best.met is None:
            self.notes.append("not confirmed: the chosen settings have too few runs to be certain")
        trial = self.state.trials.get(best.settings)
        if trial is not None and trial.bad is not None and trial.bad.invalid:
            self.notes.append(
                f"the load generator, not the model, was the limit at {trial.bad_rate:g}/s: {trial.bad.invalid}; better"
                " settings may exist that could not be measured"
            )
        default = self._baseline()
        if default is None:
            self.notes.append(f"the default ({self.default}) {self._why_not_default()}")
        elif default is not best and self._rate_is_open(default):
            self.notes.append(
                "the default may sustain more than was measured, so the gain may be smaller: the search ended early"
            )
        if unproven and best.met:
            self.notes.append(unproven)
        more, interval = gain(best, default, seed) if default is not None else (None, None)
        return {
            "proven": best.met is True and (not unproven or best.settings == self.default),
            "goodput": best.goodput,
            "default_goodput": default.goodput if default else None,
            "gain": more,
            "interval": interval,
            "cost_per_million": price / (best.goodput * 3600) * 1e6 if price is not None else None,
        }

    def _unproven(self, best: Finalist) -> str:
        """Why these settings must not replace the default; "" if they were better in the same rounds."""
        reference = self.reference
        if self.ended == "interrupted":
            return "the search was interrupted"
        if best.met and best.settings == self.default:
            return "no settings were shown to be better than the default"
        if best.met and reference is not None and best.beats(reference):
            return ""
        if self.ended == "failed":
            return "the search failed before the choice was proven; run the same command to resume"
        if best.met is None or (self.early and (reference is None or reference.met is None)):
            return "there was no time left to prove the choice; give a longer --budget"
        return (
            f"{best.settings} was not shown to be better than the default: the machine is too noisy to tell them apart"
        )

    def _best(self) -> Finalist | None:
        """The proven finalist with the most goodput that is better than the default; the cheapest of about equal ones.
        Without one, the default if it is proven, then any other. Before any is proven, the best of the search, at its
        lowered rate if repeats have lowered it."""
        able, reference = [one for one in self.finalists if one.met], self.reference
        able = [one for one in able if not self._too_little(one)] or able
        if reference is not None:
            better = [one for one in able if one.beats(reference)]
            able = better or [one for one in able if one is reference] or able
        if able:
            top = max(one.goodput for one in able)
            as_good = [one for one in able if one.goodput >= top * (1 - _SAME)]
            return min(as_good, key=lambda one: self.state.space.cost(one.settings))
        failed = {one.settings for one in self.finalists if one.met is False}
        if self.finalists and len(failed) == len(self.finalists):
            return None
        known = {one.settings: one for one in self.finalists}
        left = [trial for trial in self.state.ranked() if trial.rate and trial.settings not in failed]
        rated = [known.get(trial.settings) or Finalist(trial.settings, trial.rate) for trial in left]
        return max(rated, key=lambda one: one.rate, default=None)

    def _too_little(self, best: Finalist) -> str:
        """Why the SLO's throughput is not reached; "" if it is, or the SLO has none."""
        wanted = next((part for part in self.slo.objectives if part.name == "throughput"), None)
        if wanted is None or best.rate >= wanted.limit:
            return ""
        return f"no settings meet {self.slo.text}: the nearest, {best.settings}, sustain {best.rate:g}/s"

    def _baseline(self) -> Finalist | None:
        """The default: as proven, or at the rate that the search found. None if it meets the SLO at no known rate."""
        found = self.reference
        if found is not None and found.met is not None:
            return found if found.met else None
        trial = self.state.trials.get(self.default)
        if trial is None or not trial.rate:
            return None
        self.notes.append(f"the default ({self.default}) is not confirmed: its rate is from one run of the search")
        return Finalist(self.default, trial.rate)

    def _why_not_default(self) -> str:
        trial = self.state.trials.get(self.default)
        if trial is not None and trial.out:
            return f"does not meet the SLO: {trial.out}"
        if self.reference is not None and self.reference.why:
            return f"is not certain to meet the SLO: {self.reference.why}"
        if trial is not None and trial.bad is not None:
            return f"met the SLO at no measured rate: at {trial.bad_rate:g}/s: {trial.why_bad}"
        return f"was not measured: {self.early or 'no reason is known'}"

    def _rate_is_open(self, one: Finalist) -> bool:
        """Whether the search for its rate was cut short."""
        trial, precision = self.state.trials[one.settings], self.state.effort.precision
        return bool(self.early) and trial.bad_rate > trial.rate * (1 + 2 * precision)

    def _runners_up(self, best: Finalist | None) -> list[RunnerUp]:
        """Why not the others: first the finalists, then the rest by estimate."""
        proven = {one.settings: one for one in self.finalists if best is not None and one.settings != best.settings}
        known = {*proven, *([best.settings] if best else [])}
        others = [trial for trial in self.state.ranked(with_ruled_out=True) if trial.settings not in known]
        return [
            *(RunnerUp(settings=str(s), why=_why_beaten(one, best)) for s, one in proven.items() if best),
            *(RunnerUp(settings=str(trial.settings), why=_why_lost(trial)) for trial in others[:_LISTED]),
        ]

    def _without_any(self, why: str) -> str:
        """Why there is nothing to prove."""
        if self.ended == "interrupted":
            return "the search was interrupted"
        trials = self.state.trials.values()
        known = self.finalists or any(t.good or (not t.bad.invalid if t.bad else t.out) for t in trials)
        return f"nothing meets {self.slo.text}" if known else f"nothing was measured: {self.early or why}"

    def _nearest(self) -> tuple[str, str]:
        """The settings that violate the SLO least and their figures; "" if no run is valid."""
        none = f"no settings meet {self.slo.text}"
        if self.finalists:
            one = max(self.finalists, key=lambda one: one.rate)
            return str(one.settings), f"{none} with certainty: the nearest, {one.settings}, {one.why}"
        trials = self.state.trials.values()
        if found := [(t.settings, t.bad) for t in trials if t.bad is not None and not t.bad.invalid]:
            settings, measured = min(found, key=lambda pair: pair[1].excess(self.slo))
            values = ", ".join(f"{o.name} {value_text(o.name, measured.value(o.name))}" for o in self.slo.bounds)
            return str(settings), f"{none}: the nearest, {settings}, reach {values} at {measured.rate:g}/s"
        if invalid := next((trial.bad for trial in trials if trial.bad is not None), None):
            return "", f"could not measure whether any settings meet {self.slo.text}: {invalid.invalid}"
        if out := next((trial for trial in trials if trial.out), None):
            return str(out.settings), f"{none}: {out.settings}: {out.out}"
        return "", f"{none} as far as is known: there are no measurements"


def _why_beaten(one: Finalist, best: Finalist) -> str:
    """Why a finalist was not chosen."""
    if one.met is False:
        return f"not certain to meet the SLO: {one.why}"
    if one.met is None:
        return "not confirmed: the search ended before"
    less = 1 - one.goodput / best.goodput
    if less > _SAME:
        return f"sustains {one.goodput:.3g}/s, {less * 100:.0f} % less"
    if less < -_SAME:
        return f"sustained {one.goodput:.3g}/s, but beside the default it was not shown to be better"
    return f"equally good ({one.goodput:.3g}/s), but more expensive"


def _why_lost(trial: TuningTrial) -> str:
    """Why a trial did not become a finalist."""
    if trial.out:
        return trial.out
    if trial.bad is not None:
        return f"at {trial.bad_rate:.3g}/s: {trial.why_bad}"
    return trial.why_bad or (f"sustains {trial.rate:.3g}/s" if trial.rate else "not measured")
