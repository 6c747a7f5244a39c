"""The best few and the default, measured again: in turn, several times each, so that what drifts drifts for all.

Settings keep the SLO only if the upper bound of what was measured does: being wrong here is being slow in service.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from penstock.bench.slo import Part, Slo
from penstock.bench.stats import bootstrap, student_at
from penstock.tune.capacity import Effort, neat
from penstock.tune.meter import BudgetOver, Meter, Unfit
from penstock.tune.space import Settings
from penstock.tune.trial import Reading, told

MOST_LOWERED: Final = 8  # times that a rate is lowered before settings are given up
_STEP: Final = 0.05  # the rate is lowered by, when the mean breaks the SLO
_SMALL_STEP: Final = 0.02  # the same when only the bound does
_LONGER: Final = 1.3  # each step than the one before
_ROUNDS: Final = 3  # at one rate, while the mean keeps the SLO and the bound does not
_CONTENDS: Final = 0.9  # of the best rate: with less it does not pay to know more
_CHANCE: Final = 0.05  # that the true value is above its bound
_Z: Final = 1.96  # an interval of 95 % is so many deviations to either side


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
        """Good answers a second in time, of its repeats the mean; before there are any, the rate."""
        return statistics.fmean(r.goodput for r in self.readings) if self.readings else self.rate


def confirm(meter: Meter, slo: Slo, effort: Effort, finalists: Sequence[Finalist]) -> None:
    """Measures them in turn until of each is known whether it keeps the SLO, at a rate lowered where need be.

    Raises BudgetOver; what is known by then is in the finalists.
    """
    open_ones = list(finalists)
    while open_ones:
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
        open_ones = [one for one in open_ones if one.met is None]


def _measure(meter: Meter, slo: Slo, effort: Effort, one: Finalist) -> None:
    if one.met is not None:
        return
    try:
        reading = meter.measure(one.settings, one.rate, effort.sure(one.rate, slo))
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
    mean_breaks, bound_breaks = (broken(slo, one.readings, upper=upper) for upper in (False, True))
    if bound_breaks is None:
        one.met, one.why = True, ""
        return
    one.why = f"at {one.rate:g}/s: {mean_breaks or bound_breaks}"
    contends = one.rate >= _CONTENDS * max(other.rate for other in finalists if other.met is not False)
    if mean_breaks is None and contends and len(one.readings) < _ROUNDS * effort.repeats:
        return
    one.rate = neat(one.rate * (1 - (_STEP if mean_breaks else _SMALL_STEP) * _LONGER**one.lowered))
    one.readings, one.lowered = [], one.lowered + 1
    beaten = any(other.met and one.rate < _CONTENDS * other.rate for other in finalists)
    if one.lowered > MOST_LOWERED or (beaten and not one.reference):
        one.met = False


def broken(slo: Slo, readings: Sequence[Reading], *, upper: bool) -> str | None:
    """What of the SLO the repeats break together; None if they keep it. "throughput" parts are not looked at."""
    for part in slo.parts:
        if part.name == "throughput":
            continue
        value = _together(part, readings, upper)
        if value is None or not part.met_by(value):
            which = "up to " if upper else ""
            return f"{part.name} {which}{told(part.name, value)} (wanted {part.text})"
    return None


def _together(part: Part, readings: Sequence[Reading], upper: bool) -> float | None:
    """The value of the part over all repeats; with `upper` the upper bound, with 95 % confidence, of its mean."""
    if part.name == "error":
        requests = sum(r.run.requests for r in readings)
        return sum(sum(r.run.errors.values()) for r in readings) / requests if requests else None
    values = [value for r in readings if (value := r.value(part.name)) is not None]
    if len(values) < len(readings) or len(values) < 2:
        return None
    mean = statistics.fmean(values)
    if not upper:
        return mean
    highs = [r.run.latency.p99_high_s for r in readings]
    within = 0.0
    if part.name == "p99":  # by chance repeats are closer to each other than each is known
        within = statistics.fmean((high or value) - value for high, value in zip(highs, values, strict=True)) / _Z
    deviation = max(statistics.stdev(values), within)
    return mean + student_at(2 * _CHANCE, len(values) - 1) * deviation / math.sqrt(len(values))


def gain(chosen: Finalist, default: Finalist, seed: int) -> tuple[float, tuple[float, float] | None]:
    """By how much the goodput is higher than the default's (0.4: 40 %), and its interval with 95 % confidence.

    A bootstrap over the repeats of both; None where there are too few to tell how far they lie apart.
    """
    ours = [r.goodput for r in chosen.readings] or [chosen.rate]
    theirs = [r.goodput for r in default.readings] or [default.rate]
    low, high = bootstrap([ours, theirs], lambda a, b: a.mean(axis=1) / b.mean(axis=1) - 1, seed=seed)
    return statistics.fmean(ours) / statistics.fmean(theirs) - 1, (low, high) if math.isfinite(high) else None
