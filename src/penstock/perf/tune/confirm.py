"""The best few and the default, measured again: in turn, several times each, so that what drifts drifts for all.

Settings keep the SLO only if the upper bound of what was measured does: being wrong here is being slow in service.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from penstock.perf.bench.slo import Objective, Slo
from penstock.perf.bench.stats import bootstrap, student_at
from penstock.perf.simulate.capacity import KEPT_UP, TELL_P99, Effort, neat
from penstock.perf.tune.meter import BudgetOver, Meter, Unfit
from penstock.perf.tune.space import Settings
from penstock.perf.tune.trial import Reading, told

MOST_LOWERED: Final = 8  # times that a rate is lowered before settings are given up
_STEP: Final = 0.05  # the rate is lowered by, when the mean breaks the SLO
_SMALL_STEP: Final = 0.02  # the same when only the bound does
_LONGER: Final = 1.3  # each step than the one before
_ROUNDS: Final = 3  # at one rate, while neither is certain: that the SLO is kept, or that it is broken
_CONTENDS: Final = 0.9  # of the best rate: with less it does not pay to know more
_CHANCE: Final = 0.05  # that the true value is above its bound


class Finalist:
    """Settings at the rate that they are to bear. `readings` are those at this rate; `met` None until it is known.

    A `reference` is what others are compared with: its rate is wanted also when it is the lowest.
    """

    def __init__(self, settings: Settings, rate: float, *, reference: bool = False) -> None:
        self.settings, self.rate, self.reference = settings, neat(rate), reference
        self.readings: list[Reading] = []
        self.met: bool | None = None
        self.why = ""
        self.lowered = 0

    @property
    def goodput(self) -> float:
        """Good answers a second, of its repeats the mean; before there are any, the rate.

        How many of them are late the SLO says; of two that keep it the one with more answers is better.
        """
        return statistics.fmean(self.repeats)

    @property
    def repeats(self) -> list[float]:
        """Good answers a second of each repeat that had any; the rate alone where there is none yet."""
        return [reading.throughput for reading in self.readings if reading.throughput] or [self.rate]


def confirm(meter: Meter, slo: Slo, effort: Effort, finalists: Sequence[Finalist]) -> None:
    """Measures them in turn until of each is known whether it keeps the SLO, at a rate lowered where need be.

    Raises BudgetOver; what is known by then is in the finalists.
    """
    left = list(finalists)
    while left:
        top = max((one.rate for one in finalists if one.met is not False), default=0.0)
        behind = [one for one in left if one.lowered and not one.reference and one.rate < _CONTENDS * top]
        if any(one.met and one.rate == top for one in finalists):
            for one in behind:
                one.met = False
        # until those before them are proven, or fail, who fell behind waits
        open_ones = [one for one in left if one not in behind and not _good_enough(one, slo, finalists)]
        if not open_ones:  # contenders have shown what they bear, so that references need not be proven
            for one in left:
                if one not in behind:
                    one.met, one.why = True, ""
            return
        try:
            for repeat in range(effort.repeats):
                at = repeat % len(open_ones)
                for one in [*open_ones[at:], *open_ones[:at]]:
                    _measure(meter, slo, effort, one)
        except (BudgetOver, KeyboardInterrupt):
            for one in open_ones:
                if len(one.readings) >= effort.repeats:  # of others too little is known
                    _judge(one, slo, effort, finalists)
            raise
        for one in open_ones:
            _judge(one, slo, effort, finalists)
        left = [one for one in left if one.met is None]


def _good_enough(one: Finalist, slo: Slo, finalists: Sequence[Finalist]) -> bool:
    """Whether nobody needs to know more of it: a reference that is far behind others keeps the SLO on the whole.

    It is not what is chosen; lowered until it kept the SLO for sure, it would make the gain of others too large.
    """
    beaten = any(other.met is not False and one.rate < _CONTENDS * other.rate for other in finalists)
    return one.reference and beaten and len(one.readings) > 1 and broken(slo, one.readings, 0) is None


def _measure(meter: Meter, slo: Slo, effort: Effort, one: Finalist) -> None:
    if one.met is not None:
        return
    try:
        reading = meter.measure(one.settings, one.rate, effort.proves(one.rate, slo))
    except Unfit as e:
        one.met, one.why = False, str(e)
        return
    if not reading.invalid:
        one.readings.append(reading)
    else:
        one.why = f"invalid: {reading.invalid}"


def _judge(one: Finalist, slo: Slo, effort: Effort, finalists: Sequence[Finalist]) -> None:
    """Settles whether the SLO is kept; or leaves it to another round, at this rate or at a lower one."""
    if one.met is not None:
        return
    if len(one.readings) < 2:
        one.met = False
        return
    best_case, mean_breaks, bound_breaks = (broken(slo, one.readings, side) for side in (-1, 0, 1))
    if bound_breaks is None:
        one.met, one.why = True, ""
        return
    one.why = f"at {one.rate:g}/s: {mean_breaks or bound_breaks}"
    if _good_enough(one, slo, finalists):
        return
    contends = one.rate >= _CONTENDS * max(other.rate for other in finalists if other.met is not False)
    if best_case is None and contends and len(one.readings) < _ROUNDS * effort.repeats:
        return
    one.rate = neat(_lower(one, _STEP if mean_breaks else _SMALL_STEP))
    one.readings, one.lowered = [], one.lowered + 1
    if one.lowered > MOST_LOWERED:
        one.met = False


def _lower(one: Finalist, step: float) -> float:
    """A rate to try next; of settings that did not keep up at most what they answered."""
    lower = one.rate * (1 - step * _LONGER**one.lowered)
    answered = max(reading.throughput for reading in one.readings)
    return min(lower, answered) if 0 < answered < KEPT_UP * one.rate else lower


def broken(slo: Slo, readings: Sequence[Reading], side: int) -> str | None:
    """What of the SLO the repeats break together; None if they keep it. "throughput" parts are not looked at.

    `side` 0: by the mean of the repeats; 1 and -1: by its upper and lower bound, each with 95 % confidence.

    The p99 of all repeats together is within the limit if and only if at most 1 % of them all are late. The mean of
    their p99 is more: what is rare and slow is the whole p99 of one repeat, and is not in another.
    """
    which = {-1: "at least ", 0: "", 1: "up to "}[side]
    for part in slo.objectives:
        if part.name == "throughput":
            continue
        late = [share for r in readings if (share := r.late_share) is not None]
        if part.name == "p99" and part.limit == slo.latency_s and len(late) == len(readings):
            over = _bounded(late, math.sqrt(0.01 / max(1, readings[0].run.requests)), side)
            if over > 0.01:
                return f"{which}{over * 100:.2g} % of all answers come later (wanted {part.text})"
            if side > 0 and (count := sum(r.run.answered for r in readings)) < TELL_P99:
                return f"{count} answers are too few to tell (wanted {part.text}, which takes {TELL_P99})"
            continue
        value = _together(part, readings, side)
        if value is None or not part.met_by(value):
            return f"{part.name} {which}{told(part.name, value)} (wanted {part.text})"
    return None


def _together(part: Objective, readings: Sequence[Reading], side: int) -> float | None:
    """The value of the part over all repeats, or a bound of its mean."""
    if part.name == "error":
        requests = sum(r.run.requests for r in readings)
        return sum(sum(r.run.errors.values()) for r in readings) / requests if requests else None
    values = [value for r in readings if (value := r.value(part.name)) is not None]
    return _bounded(values, 0.0, side) if len(values) == len(readings) else None


def _bounded(values: Sequence[float], least: float, side: int) -> float:
    """The mean, or its bound with 95 % confidence by Student's t. The deviation is at least `least`: by chance a few
    values lie closer to each other than each is known."""
    mean = statistics.fmean(values)
    if side == 0:
        return mean
    deviation = max(statistics.stdev(values), least if mean else 0.0)
    return mean + side * student_at(2 * _CHANCE, len(values) - 1) * deviation / math.sqrt(len(values))


def gain(chosen: Finalist, default: Finalist, seed: int) -> tuple[float, tuple[float, float] | None]:
    """By how much the goodput is higher than the default's (0.4: 40 %), and its interval with 95 % confidence.

    A bootstrap over the repeats of both; None where there are too few to tell how far they lie apart.
    """
    ours, theirs = chosen.repeats, default.repeats
    low, high = bootstrap([ours, theirs], lambda a, b: a.mean(axis=1) / b.mean(axis=1) - 1, seed=seed)
    return statistics.fmean(ours) / statistics.fmean(theirs) - 1, (low, high) if math.isfinite(high) else None
