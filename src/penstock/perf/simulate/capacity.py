"""The largest rate that settings sustain within an SLO: short probes until it is known well enough, then a long one.

Load comes in an open loop: what a closed one would call fast is only slow to ask. A probe that the server cannot keep
up with also tells what it can: its throughput. That spares most of the steps of a plain bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from penstock.perf.bench.slo import Slo
from penstock.perf.tune.meter import Meter, Unfit
from penstock.perf.tune.space import Settings
from penstock.perf.tune.trial import Reading

MOST_PROBES: Final = 16  # of one search for a rate
_LIGHT: Final = 0.04  # of a rate that was too much: what fails there, fails under any load
_GROWTH: Final = 1.3  # of the rate while no probe fails, faster with each
_FASTEST: Final = 3.0
_BELOW: Final = 4  # probes that all fail: then the light one
_NARROW: Final = 1.1  # times the SLO: by so little a short run may miss it by chance
_RARE: Final = 0.02  # of the answers late, of which 0.01 may be: in a short run that may be one slow batch
KEPT_UP: Final = 0.95  # of the rate: less throughput than that is all that the server can
_FEW: Final = 8  # requests that a run has at least: with none in its time it would not be one
PROVEN: Final = 15.0  # times the SLO's latency that a run of the proof lasts: a shorter one ends before a queue is long
TELL_P99: Final = 299  # answers, none of them late: fewer do not tell with 95 % confidence that at most 1 % are


class Effort(Struct, frozen=True, kw_only=True):
    """How long is measured. A run lasts for so many samples, not less than its seconds and than `latencies` times the
    SLO's latency (queues need a while to show), not more than `most_s` unless it had hardly a request by then. Runs of
    the proof are `proof` times as long as sure ones: what is rare, such as a batch that takes thrice as long, should be
    in each; those of a slow model longer yet, until all repeats together can tell a p99. `precision` is of rates."""

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
        """Seconds of a run that decides."""
        return self._seconds(rate, slo, self.sure_s, self.sure_samples)

    def proves(self, rate: float, slo: Slo) -> float:
        """Seconds of one repeat of the proof."""
        shows = PROVEN * (slo.latency_s or 0.0)
        seconds = min(self.most_s, max(self.proof * self.sure(rate, slo), shows))
        if any(part.name == "p99" for part in slo.objectives):
            seconds = max(seconds, 1.2 * TELL_P99 / (self.repeats * rate))  # 1.2: how many requests come is chance
        return round(seconds, 2)

    def proof_s(self, rate: float, slo: Slo) -> float:
        """Seconds of all repeats of the proof of one."""
        return self.repeats * self.proves(rate, slo)

    def _seconds(self, rate: float, slo: Slo, least_s: float, samples: int) -> float:
        wanted = max(least_s, self.latencies * (slo.latency_s or 0.0), samples / rate)
        return round(max(min(self.most_s, wanted), _FEW / rate), 2)


class Trial:
    """What is known of settings: `good` is the reading of the largest rate that kept the SLO, `bad` that of the
    smallest above it that did not. `out` tells why they were ruled out."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.good: Reading | None = None
        self.bad: Reading | None = None
        self.why_bad = ""
        self.out = ""
        self.throughput: float | None = None  # the most that was seen
        self._excess = 1.0  # of `bad`
        self._passed: list[Reading] = []
        self._failed: list[tuple[Reading, str, float]] = []  # with why, and by how much

    @property
    def rate(self) -> float:
        """Requests a second that it is known to sustain; 0 if none, and for what was ruled out."""
        return self.good.rate if self.good and not self.out else 0.0

    @property
    def bad_rate(self) -> float:
        """Requests a second that are known to be too much."""
        return self.bad.rate if self.bad else math.inf

    @property
    def estimate(self) -> float:
        """A guess at what it sustains, of what there is: the less, the more a probe broke the SLO; 0 for what was ruled
        out."""
        if self.out or self.good or self.bad is None:
            return self.rate
        return min(self.bad.rate, self.bad.throughput) / math.sqrt(min(2.0, self._excess))

    def add(self, reading: Reading, slo: Slo) -> bool:
        """Whether the reading keeps the SLO. Of two that contradict each other the one with fewer requests goes."""
        why = reading.breaks(slo)
        self.throughput = max(self.throughput or 0.0, reading.throughput)
        n = reading.run.requests
        if why is None:
            self._passed.append(reading)
            self._failed = [f for f in self._failed if f[0].rate > reading.rate or f[0].run.requests >= n]
        else:
            self._failed.append((reading, why, reading.excess(slo)))
            self._passed = [r for r in self._passed if r.rate < reading.rate or r.run.requests > n]
        self._look()
        return why is None

    def keep(self, worth: Callable[[Reading], bool]) -> None:
        """Forgets those that kept the SLO and are not `worth` it."""
        self._passed = [reading for reading in self._passed if worth(reading)]
        self._look()

    def _look(self) -> None:
        lowest = min(self._failed, key=lambda failed: failed[0].rate, default=(None, "", 1.0))
        self.bad, self.why_bad, self._excess = lowest
        below = [reading for reading in self._passed if reading.rate < self.bad_rate]
        self.good = max(below, key=lambda reading: (reading.rate, reading.run.requests), default=None)


class Prober:
    """Measures trials. Rates have three digits: nobody sets others."""

    def __init__(self, meter: Meter, slo: Slo, effort: Effort) -> None:
        self.meter, self.slo, self.effort = meter, slo, effort

    def probe(self, trial: Trial, rate: float) -> bool:
        """Whether the SLO was kept at this rate, by a short run; where that misses narrowly, by a long one."""
        rate = neat(rate)
        reading = self._run(trial, rate, self.effort.probe(rate, self.slo))
        if reading is None or trial.add(reading, self.slo):
            return reading is not None
        return self._narrowly(reading) and self.sure(trial, rate)

    def _narrowly(self, reading: Reading) -> bool:
        """Whether a run may have missed the SLO by chance: by little, or a p99 by few answers."""
        late, parts = reading.late_share, self.slo.objectives
        if late is not None and late <= _RARE:
            parts = tuple(part for part in parts if part.name != "p99" or part.limit != self.slo.latency_s)
        return reading.excess(Slo(parts)) <= _NARROW

    def sure(self, trial: Trial, rate: float) -> bool:
        """Whether it was kept, by a long run."""
        rate = neat(rate)
        reading = self._run(trial, rate, self.effort.sure(rate, self.slo))
        return reading is not None and trial.add(reading, self.slo)

    def _run(self, trial: Trial, rate: float, seconds: float) -> Reading | None:
        try:
            return self.meter.measure(trial.settings, rate, seconds)
        except Unfit as e:
            trial.out = str(e)
            return None

    def narrow(self, trial: Trial, start: float, precision: float) -> None:
        """Probes until the largest rate lies between two that differ by `precision`, or it is clear that none does.

        `start` is a guess at it.
        """
        light = 0.0
        for step in range(MOST_PROBES):
            if trial.out or trial.bad_rate <= trial.rate * (1 + precision):
                return
            if trial.good is None and trial.bad is not None and trial.bad_rate <= light:
                trial.out = f"at {trial.bad_rate:g}/s already: {trial.why_bad}"
                return
            rate = self._next(trial, start, step)
            if trial.good is None and trial.bad is not None and (step >= _BELOW or not trial.throughput):
                light = rate = self._light(trial)
            self.probe(trial, rate)

    def _light(self, trial: Trial) -> float:
        """A rate at which requests hardly meet; but a run shall have a few."""
        able = min(trial.bad_rate, trial.throughput or math.inf)
        return neat(max(_LIGHT * able, min(trial.bad_rate / 2, _FEW / self.effort.most_s)))

    def _next(self, trial: Trial, start: float, step: int) -> float:
        """The rate to probe now, after so many probes."""
        good, bad = trial.good, trial.bad
        if good is not None and bad is not None:
            return math.sqrt(good.rate * bad.rate)
        if good is not None:
            return start if start > good.rate * 1.02 else good.rate * min(_FASTEST, _GROWTH ** max(1, step))
        if bad is None:
            return start
        if bad.throughput < KEPT_UP * bad.rate:
            return 0.93 * bad.throughput
        p99, limit = bad.p99_s, self.slo.latency_s
        return bad.rate * (0.4 if p99 is not None and limit is not None and p99 > 2 * limit else 0.75)

    def settle(self, trial: Trial, start: float) -> None:
        """Narrows as far as the effort says, and makes sure: a rate that a long run does not bear is lowered.

        Where one does not, short runs see too little: from then on all are long.
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

    def settled(self, trial: Trial) -> bool:
        """Whether a long run bore its rate."""
        return trial.good is not None and self._long(trial.good)

    def _long(self, reading: Reading) -> bool:
        return reading.run.load.seconds >= self.effort.sure(reading.rate, self.slo)


def neat(rate: float) -> float:
    """The rate with three significant digits."""
    return float(f"{rate:.3g}")
