"""The largest rate that settings sustain within an SLO: short probes narrow it down, a long run verifies it.

The load is an open loop, because a closed loop slows down with the server and so hides its latency. A probe that the
server cannot keep up with reveals the server's throughput, which saves most steps of a plain bisection.
"""

import math
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from penstock.perf.bench.measurement import Slo
from penstock.perf.tune.runner import Infeasible, MeasuredRun, TrialRunner
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
TELL_P99: Final = 299  # timely responses that prove with 95 % confidence that at most 1 % are late


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
