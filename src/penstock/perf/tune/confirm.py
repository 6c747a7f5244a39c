"""The proof: the best few settings and the default run again, interleaved, so that drift affects all of them alike.

Settings meet the SLO only if the upper bound of the repeats does, because a wrong choice here means a slow service.
They are better than the default only if it certainly violates the SLO at a rate that is a little lower, in the same
rounds: rates from different minutes of a noisy machine say nothing about each other.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Final

from penstock.perf.bench.compare import bootstrap, student_at
from penstock.perf.bench.document import value_text
from penstock.perf.bench.measurement import Objective, Slo
from penstock.perf.tune.rates import GAIN, KEPT_UP, TELL_P99, Effort, neat
from penstock.perf.tune.runner import BudgetExhausted, Infeasible, MeasuredRun, TrialRunner
from penstock.perf.tune.space import CandidateSettings

MOST_LOWERED: Final = 8  # times that a rate is lowered before the settings are dropped
_STEP: Final = 0.05  # share by which the rate is lowered when the mean violates the SLO
_SMALL_STEP: Final = 0.02  # the same when only the bound does
_LONGER: Final = 1.3  # factor from each step to the next
_ROUNDS: Final = 3  # at one rate, while it is uncertain whether the SLO is met or violated
_PAIRS: Final = 5  # runs beside the leader, all of which the default must lose: equals do so once in 32 times
_CONTENDS: Final = 0.9  # share of the best rate: below it more certainty is not worth the time
_CHANCE: Final = 0.05  # probability that the true value is above its bound


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


def violated(slo: Slo, runs: Sequence[MeasuredRun], side: int) -> str | None:
    """Which part of the SLO the repeats violate together; None if they meet it.

    `side` 0 judges by the mean of the repeats; 1 and -1 by its upper and lower bound, each with 95 % confidence.

    The p99 of all repeats together is within the limit exactly if at most 1 % of all responses are late. The mean of
    the p99s is larger: a rare slow batch may dominate the p99 of one repeat and be absent from another.
    """
    which = {-1: "at least ", 0: "", 1: "up to "}[side]
    for part in slo.bounds:
        late = [share for r in runs if (share := r.late_share) is not None]
        if part.name == "p99" and part.limit == slo.latency_s and len(late) == len(runs):
            over = _bounded(late, math.sqrt(0.01 / max(1, runs[0].run.requests)), side)
            if over > 0.01:
                return f"{which}{over * 100:.2g} % of all responses are late (wanted {part.text})"
            if side > 0 and (count := sum(r.run.answered for r in runs)) < TELL_P99:
                return f"{count} responses are too few to decide (wanted {part.text}, which takes {TELL_P99})"
            continue
        value = _together(part, runs, side)
        if value is None or not part.met_by(value):
            return f"{part.name} {which}{value_text(part.name, value)} (wanted {part.text})"
    return None


def _together(part: Objective, runs: Sequence[MeasuredRun], side: int) -> float | None:
    """The value of the part over all repeats, or a bound of its mean."""
    if part.name == "error":
        requests = sum(r.run.requests for r in runs)
        return sum(sum(r.run.errors.values()) for r in runs) / requests if requests else None
    values = [value for r in runs if (value := r.value(part.name)) is not None]
    return _bounded(values, 0.0, side) if len(values) == len(runs) else None


def _bounded(values: Sequence[float], least: float, side: int) -> float:
    """The mean, or its bound with 95 % confidence by Student's t. The deviation is at least `least`, because a few
    values may agree by chance better than each is known."""
    mean = statistics.fmean(values)
    if side == 0:
        return mean
    deviation = max(statistics.stdev(values), least if mean else 0.0)
    return mean + side * student_at(2 * _CHANCE, len(values) - 1) * deviation / math.sqrt(len(values))


def gain(chosen: Finalist, default: Finalist, seed: int) -> tuple[float, tuple[float, float] | None]:
    """The relative gain in goodput over the default (0.4: 40 %) and its 95 % confidence interval.

    The interval is a bootstrap over the repeats of both; None if there are too few.
    """
    ours, theirs = chosen.repeats, default.repeats
    low, high = bootstrap([ours, theirs], lambda a, b: a.mean(axis=1) / b.mean(axis=1) - 1, seed=seed)
    return statistics.fmean(ours) / statistics.fmean(theirs) - 1, (low, high) if math.isfinite(high) else None
