"""The rates that settings sustain within an SLO: how one is found, and how the best are proven.

Short probes narrow a rate down, a long run verifies it. The load is an open loop, because a closed loop slows down with
the server and so hides its latency. A probe that the server cannot keep up with reveals the server's throughput, which
saves most steps of a plain bisection.

For the proof, the best few settings and the default run again, interleaved, so that drift affects all of them alike.
Settings meet the SLO only if the upper bound of the repeats does, because a wrong choice here means a slow service.
They are better than the default only if it certainly violates the SLO at a rate that is a little lower, in the same
rounds: rates from different minutes of a noisy machine say nothing about each other.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from penstock.perf.bench.compare import bootstrap
from penstock.perf.bench.measurement import Slo
from penstock.perf.tune.runner import TELL_P99, BudgetExhausted, Infeasible, MeasuredRun, TrialRunner, violated
from penstock.perf.tune.space import CandidateSettings

# Choices, unless a line says otherwise; benchmarks/tuner_truth.py shows what a search with them costs and finds.
GAIN: Final = 0.025  # settings must be better than the default, or than cheaper ones, by this share
MOST_PROBES: Final = 16  # in one search for a rate
_LIGHT: Final = 0.04  # of a rate that was too high: settings that fail at this share fail under any load
_GROWTH: Final = 1.3  # factor on the rate while no probe fails; it grows with each probe
_FASTEST: Final = 3.0
_BELOW: Final = 4  # failed probes before the light one
_NARROW: Final = 1.1  # times the SLO: a short run may miss it by this much by chance
_RARE: Final = 0.02  # share of late responses, where 0.01 is allowed: in a short run it may be one slow batch
KEPT_UP: Final = 0.95  # of the rate: a server with less throughput is at its limit
_FEW: Final = 8  # the fewest requests in a run
PROVEN: Final = 15.0  # times the SLO's latency: a proof run lasts this long, or a growing queue would not show


class Effort(Struct, frozen=True, kw_only=True):
    """How long to measure.

    A run is long enough for its number of samples, its seconds, and `latencies` times the SLO's latency, because queues
    build up slowly; it takes at most `most_s` unless it would have almost no requests. Proof runs are `proof` times as
    long as sure ones, so that each contains rare events such as a batch that takes three times as long; for a slow
    model they are long enough to determine a p99 from all repeats together. `precision` applies to rates.
    """

    probe_s: float = 1.5
    probe_samples: int = 600
    sure_s: float = 4.0
    sure_samples: int = 3000
    latencies: float = 15.0
    most_s: float = 30.0
    precision: float = 0.04
    proof: float = 2.0
    repeats: int = 3
    finalists: int = 3

    def probe(self, rate: float, slo: Slo) -> float:
        """Seconds of a probe."""
        return self._seconds(rate, slo, self.probe_s, self.probe_samples)

    def sure(self, rate: float, slo: Slo) -> float:
        """Seconds of a run that verifies a rate."""
        return self._seconds(rate, slo, self.sure_s, self.sure_samples)

    def proves(self, rate: float, slo: Slo) -> float:
        """Seconds of one repeat of the proof."""
        shows = PROVEN * (slo.latency_s or 0.0)
        seconds = min(self.most_s, max(self.proof * self.sure(rate, slo), shows))
        if any(part.name == "p99" for part in slo.objectives):
            seconds = max(seconds, 1.2 * TELL_P99 / (self.repeats * rate))  # 1.2: the number of requests is random
        return round(seconds, 2)

    def proof_s(self, rate: float, slo: Slo) -> float:
        """Seconds of all repeats of one proof."""
        return self.repeats * self.proves(rate, slo)

    def _seconds(self, rate: float, slo: Slo, least_s: float, samples: int) -> float:
        wanted = max(least_s, self.latencies * (slo.latency_s or 0.0), samples / rate)
        return round(max(min(self.most_s, wanted), _FEW / rate), 2)


EFFORTS: Final = {
    "quick": Effort(
        probe_s=0.4, probe_samples=100, sure_s=1.0, sure_samples=300, latencies=3.0, most_s=6.0, precision=0.1,
        proof=1.0, repeats=2, finalists=2,
    ),
    "normal": Effort(),
    "thorough": Effort(probe_s=3.0, sure_s=10.0, sure_samples=10_000, repeats=5),
}  # fmt: skip


class TuningTrial:
    """The knowledge about one candidate: `good` is the run at the largest rate that met the SLO, `bad` the run at the
    smallest rate above it that did not. `out` is the reason why the settings were ruled out."""

    def __init__(self, settings: CandidateSettings) -> None:
        self.settings = settings
        self.good: MeasuredRun | None = None
        self.bad: MeasuredRun | None = None
        self.why_bad = ""
        self.out = ""
        self.throughput: float | None = None  # the largest of all runs
        self._excess = 1.0  # of `bad`
        self._passed: list[MeasuredRun] = []
        self._failed: list[tuple[MeasuredRun, str, float]] = []  # with the violation and its excess

    @property
    def rate(self) -> float:
        """The largest known sustainable requests per second; 0 if there is none or the settings are ruled out."""
        return self.good.rate if self.good and not self.out else 0.0

    @property
    def bad_rate(self) -> float:
        """The smallest rate known to be too high."""
        return self.bad.rate if self.bad else math.inf

    @property
    def estimate(self) -> float:
        """A guess at the sustainable rate: lower the more a probe violated the SLO; 0 if ruled out."""
        if self.out or self.good or self.bad is None:
            return self.rate
        return min(self.bad.rate, self.bad.throughput) / math.sqrt(min(2.0, self._excess))

    def add(self, measured: MeasuredRun, slo: Slo) -> bool:
        """Adds a run and returns whether it meets the SLO. Of two contradictory runs the longer one counts."""
        why = measured.violation(slo)
        self.throughput = max(self.throughput or 0.0, measured.throughput)
        rate, n = measured.rate, measured.run.requests
        if why is None:
            self._passed.append(measured)
            self._failed = [f for f in self._failed if f[0].rate > rate or f[0].run.requests >= n]
        else:
            self._failed.append((measured, why, measured.excess(slo)))
            self._passed = [p for p in self._passed if p.rate < rate or p.run.requests > n]
        self._update()
        return why is None

    def keep(self, worth: Callable[[MeasuredRun], bool]) -> None:
        """Forgets runs that met the SLO, except those that are `worth` keeping."""
        self._passed = [measured for measured in self._passed if worth(measured)]
        self._update()

    def _update(self) -> None:
        lowest = min(self._failed, key=lambda failed: failed[0].rate, default=(None, "", 1.0))
        self.bad, self.why_bad, self._excess = lowest
        below = [measured for measured in self._passed if measured.rate < self.bad_rate]
        self.good = max(below, key=lambda measured: (measured.rate, measured.run.requests), default=None)


class RateProber:
    """Finds the sustainable rate of a trial. Rates have three significant digits, which is as exact as users need."""

    def __init__(self, runner: TrialRunner, slo: Slo, effort: Effort) -> None:
        self.runner, self.slo, self.effort = runner, slo, effort

    def probe(self, trial: TuningTrial, rate: float) -> bool:
        """Whether a short run meets the SLO at this rate; a narrow miss is decided by a long run."""
        rate = neat(rate)
        measured = self._run(trial, rate, self.effort.probe(rate, self.slo))
        if measured is None or trial.add(measured, self.slo):
            return measured is not None
        return self._narrowly(measured) and self.sure(trial, rate)

    def _narrowly(self, measured: MeasuredRun) -> bool:
        """Whether a run may have missed the SLO by chance: by a small excess, or a p99 by few responses."""
        late, parts = measured.late_share, self.slo.objectives
        if late is not None and late <= _RARE:
            parts = tuple(part for part in parts if part.name != "p99" or part.limit != self.slo.latency_s)
        return measured.excess(Slo(parts)) <= _NARROW

    def sure(self, trial: TuningTrial, rate: float) -> bool:
        """Whether a long run meets the SLO at this rate."""
        rate = neat(rate)
        measured = self._run(trial, rate, self.effort.sure(rate, self.slo))
        return measured is not None and trial.add(measured, self.slo)

    def _run(self, trial: TuningTrial, rate: float, seconds: float) -> MeasuredRun | None:
        try:
            return self.runner.measure(trial.settings, rate, seconds)
        except Infeasible as e:
            trial.out = str(e)
            return None

    def narrow(self, trial: TuningTrial, start: float, precision: float) -> None:
        """Probes, beginning near the guess `start`, until the good and the bad rate differ by at most `precision` or
        even a light load violates the SLO."""
        light = 0.0
        for step in range(MOST_PROBES):
            if trial.out or trial.bad_rate <= trial.rate * (1 + precision):
                return
            if trial.good is None and trial.bad is not None and trial.bad_rate <= light:
                trial.out = f"at only {trial.bad_rate:g}/s: {trial.why_bad}"
                return
            rate = self._next(trial, start, step)
            if trial.good is None and trial.bad is not None and (step >= _BELOW or not trial.throughput):
                light = rate = self._light(trial)
            self.probe(trial, rate)

    def _light(self, trial: TuningTrial) -> float:
        """A rate at which requests rarely overlap but a run still has a few."""
        able = min(trial.bad_rate, trial.throughput or math.inf)
        return neat(max(_LIGHT * able, min(trial.bad_rate / 2, _FEW / self.effort.most_s)))

    def _next(self, trial: TuningTrial, start: float, step: int) -> float:
        """The rate of the next probe, after `step` probes."""
        good, bad = trial.good, trial.bad
        if good is not None and bad is not None:
            return math.sqrt(good.rate * bad.rate)
        if good is not None:
            return start if start > good.rate * 1.02 else good.rate * min(_FASTEST, _GROWTH ** max(1, step))
        if bad is None:
            return start
        if bad.throughput < KEPT_UP * bad.rate:
            return 0.93 * bad.throughput
        p99, limit = bad.run.latency.p99_s, self.slo.latency_s
        return bad.rate * (0.4 if p99 is not None and limit is not None and p99 > 2 * limit else 0.75)

    def settle(self, trial: TuningTrial, start: float) -> None:
        """Narrows to the effort's precision and verifies the rate with a long run, lowering it while that fails.

        After a failed long run only long runs count, because short ones miss something.
        """
        precision, failed = self.effort.precision, 0
        self.narrow(trial, start, precision)
        for _ in range(MOST_PROBES):
            if trial.out or (trial.good is None and not failed):
                return
            if trial.good is None:
                rate = trial.bad_rate * (1 - min(0.5, precision * 2 ** (failed - 1)))
            elif not self.settled(trial):
                rate = trial.rate
            elif failed and trial.bad_rate > trial.rate * (1 + precision):
                rate = math.sqrt(trial.rate * trial.bad_rate)
            else:
                return
            if not self.sure(trial, rate):
                failed += 1
                trial.keep(self._long)

    def settled(self, trial: TuningTrial) -> bool:
        """Whether a long run verified the trial's rate."""
        return trial.good is not None and self._long(trial.good)

    def _long(self, measured: MeasuredRun) -> bool:
        return measured.run.load.seconds >= self.effort.sure(measured.rate, self.slo)


def neat(rate: float) -> float:
    """The rate with three significant digits."""
    return float(f"{rate:.3g}")


# ---- the proof


MOST_LOWERED: Final = 8  # times that a rate is lowered before the settings are dropped
_STEP: Final = 0.05  # share by which the rate is lowered when the mean violates the SLO
_SMALL_STEP: Final = 0.02  # the same when only the bound does
_LONGER: Final = 1.3  # factor from each step to the next
_ROUNDS: Final = 3  # at one rate, while it is uncertain whether the SLO is met or violated
_PAIRS: Final = 5  # runs beside the leader, all of which the default must lose: equals do so once in 32 times
_CONTENDS: Final = 0.9  # share of the best rate: below it more certainty is not worth the time


class Finalist:
    """Settings at the rate to prove. `runs` are the runs at this rate; `met` is None until that is known.

    A `reference` is compared with the others, so its rate is wanted even if it is the lowest. Before any lower rate it
    runs at its `bar`, a little below the leader's rate and at most `highest_bar`, in turn with the settings that have
    to be better. `done_bar` is the lowest bar that was decided; `refuted` the lowest at which it certainly violated the
    SLO, 0 if the settings do not run.
    """

    def __init__(self, settings: CandidateSettings, rate: float, *, reference: bool = False) -> None:
        self.settings, self.rate, self.reference = settings, neat(rate), reference
        self.found = self.rate  # to prove in the end; 0: the search found none
        self.runs: list[MeasuredRun] = []
        self.met: bool | None = None
        self.why = ""
        self.lowered = 0
        self.bar, self.highest_bar = 0.0, math.inf
        self.done_bar = self.refuted = math.inf

    def beats(self, reference: "Finalist") -> bool:
        """Whether these settings are proven at a rate that is certainly too high for the reference."""
        return self.met is True and reference.refuted <= neat((1 - GAIN) * self.rate)

    @property
    def goodput(self) -> float:
        """The mean of `repeats`. Late responses count, too: the SLO limits them, and of two settings that meet it,
        the better one has more responses."""
        return statistics.fmean(self.repeats)

    @property
    def repeats(self) -> list[float]:
        """Good responses per second of each repeat that had any; the rate if there is none yet."""
        return [measured.throughput for measured in self.runs if measured.throughput] or [self.rate]


def confirm(runner: TrialRunner, slo: Slo, effort: Effort, finalists: Sequence[Finalist]) -> None:
    """Runs the finalists in turn until it is known whether each meets the SLO, at a lower rate if necessary.

    Raises BudgetExhausted; the finalists then hold the results so far.
    """
    _set_bar(slo, finalists)
    while left := [one for one in finalists if one.met is None]:
        top = max((one.rate for one in finalists if one.met is not False), default=0.0)
        behind = [one for one in left if one.lowered and not one.reference and one.rate < _CONTENDS * top]
        if any(one.met and one.rate == top for one in finalists):
            for one in behind:
                one.met = False
        # a finalist that fell behind waits until those ahead of it are proven or fail
        contenders = [one for one in left if one not in behind and not _good_enough(one, slo, finalists)]
        if not contenders:  # all rates that matter are known, so references need no proof
            for one in left:
                if one not in behind:
                    one.met, one.why = True, ""
            return
        try:
            for repeat in range(effort.repeats):
                at = repeat % len(contenders)
                for one in [*contenders[at:], *contenders[:at]]:
                    _measure(runner, slo, effort, one)
        except (BudgetExhausted, KeyboardInterrupt):
            for one in contenders:
                if len(one.runs) >= effort.repeats:  # too little is known about the others
                    _judge(one, slo, effort, finalists)
            raise
        for one in contenders:
            _judge(one, slo, effort, finalists)
        _set_bar(slo, finalists)


def _set_bar(slo: Slo, finalists: Sequence[Finalist]) -> None:
    """Brings the reference to the rate at which the leader has to be better, and the leader to run beside it.

    That rate is at most `highest_bar`: a deeper overload shows no more, and is harder to generate.
    """
    reference = next((one for one in finalists if one.reference), None)
    others = [other for other in finalists if not other.reference and other.met is not False]
    if reference is None or not others:
        return
    leader = max(others, key=lambda other: other.rate)
    bar = neat(min((1 - GAIN) * leader.rate, reference.highest_bar))
    at_bar = reference.met is None and reference.rate == reference.bar
    if (at_bar and bar != reference.bar) or reference.rate < bar < reference.done_bar:
        reference.rate, reference.runs, reference.met = bar, [], None
    reference.bar = bar
    undecided = reference.met is None and reference.rate == bar
    if leader.met and undecided and not _good_enough(reference, slo, finalists):
        leader.met = None


def _good_enough(one: Finalist, slo: Slo, finalists: Sequence[Finalist]) -> bool:
    """Whether a reference is far behind another finalist and its mean meets the SLO.

    It will not be chosen, and lowering its rate until the SLO is certain would overstate the gain of the others.
    """
    beaten = any(other.met is not False and one.rate < _CONTENDS * other.rate for other in finalists)
    return one.reference and beaten and len(one.runs) > 1 and violated(slo, one.runs, 0) is None


def _measure(runner: TrialRunner, slo: Slo, effort: Effort, one: Finalist) -> None:
    if one.met is not None:
        return
    try:
        measured = runner.measure(one.settings, one.rate, effort.proves(one.rate, slo))
    except Infeasible as e:
        one.met, one.why, one.refuted = False, str(e), 0.0
        return
    if not measured.invalid:
        one.runs.append(measured)
    else:
        one.why = f"invalid: {measured.invalid}"


def _judge(one: Finalist, slo: Slo, effort: Effort, finalists: Sequence[Finalist]) -> None:
    """Decides whether the SLO is met, or leaves it to another round at this rate or a lower one."""
    if one.met is not None:
        return
    if len(one.runs) < 2:
        one.met = False
        return
    best_case, by_mean, by_bound = (violated(slo, one.runs, side) for side in (-1, 0, 1))
    if by_bound is None:
        one.met, one.why = True, ""
        return
    one.why = f"at {one.rate:g}/s: {by_mean or by_bound}"
    if one.rate == one.bar:
        if len(one.runs) < _PAIRS:
            return
        # each run by itself, too: a few very slow ones move a mean, however the others are
        if best_case is not None and all(run.violation(slo) for run in one.runs):
            one.refuted = one.rate
    if _good_enough(one, slo, finalists):
        return
    contends = one.rate >= _CONTENDS * max(other.rate for other in finalists if other.met is not False)
    if best_case is None and contends and len(one.runs) < _ROUNDS * effort.repeats:
        return
    lower = _lower(one, _STEP if by_mean else _SMALL_STEP)
    if one.rate == one.bar:
        one.done_bar, lower = one.rate, min(lower, one.found)
    one.rate = neat(max(lower, one.bar) if one.rate > one.bar else lower)
    one.runs, one.lowered = [], one.lowered + 1
    if one.lowered > MOST_LOWERED or not one.rate:
        one.met = False


def _lower(one: Finalist, step: float) -> float:
    """The next rate to try; at most the throughput if the server did not keep up."""
    lower = one.rate * (1 - step * _LONGER**one.lowered)
    answered = max(measured.throughput for measured in one.runs)
    return min(lower, answered) if 0 < answered < KEPT_UP * one.rate else lower


def gain(chosen: Finalist, default: Finalist, seed: int) -> tuple[float, tuple[float, float] | None]:
    """The relative gain in goodput over the default (0.4: 40 %) and its 95 % confidence interval.

    The interval is a bootstrap over the repeats of both; None if there are too few.
    """
    ours, theirs = chosen.repeats, default.repeats
    low, high = bootstrap([ours, theirs], lambda a, b: a.mean(axis=1) / b.mean(axis=1) - 1, seed=seed)
    return statistics.fmean(ours) / statistics.fmean(theirs) - 1, (low, high) if math.isfinite(high) else None
