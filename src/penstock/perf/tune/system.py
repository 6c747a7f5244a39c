"""The system under test as the tuner sees it, and the results of measuring it."""

import math
from typing import Protocol

from msgspec import Struct

from penstock.perf.bench.measurement import Measurement, Slo, measured_value
from penstock.perf.tune.space import CandidateSettings


class MeasuredRun(Struct, frozen=True, kw_only=True):
    """One run under load. `cost_s` is the time it took, including warm-up and the change of settings."""

    run: Measurement
    cost_s: float

    @property
    def rate(self) -> float:
        """The offered requests per second."""
        return self.run.load.rate

    @property
    def throughput(self) -> float:
        """Good answers per second."""
        return self.run.throughput

    @property
    def late_share(self) -> float | None:
        """The share of latencies over the SLO's, among answers and timed-out requests, which percentiles count too.

        None if the SLO has no latency; 1 if there are no answers.
        """
        if self.run.too_slow is None:
            return None
        timed_out = self.run.errors.get("timeout", 0)
        counted = self.run.answered + timed_out
        return (self.run.too_slow + timed_out) / counted if counted else 1.0

    @property
    def invalid(self) -> str | None:
        """Why the run is INVALID; None if it is valid."""
        return "; ".join(self.run.invalid) or None

    def value(self, name: str) -> float | None:
        """The measured value of the SLO part `name`. A percentile with too few samples is replaced by the largest
        latency, which is an upper bound of it."""
        found = measured_value(name, self.run)
        return self.run.latency.max_s if found is None and name != "error" else found

    def violation(self, slo: Slo) -> str | None:
        """Which part of the SLO the run violates, as "p99 140 ms (wanted p99<=100ms)"; None if it keeps the SLO.

        "throughput" parts are ignored, because a load below the required throughput cannot meet them.
        """
        if self.run.invalid:
            return f"invalid: {self.invalid}"
        for part in slo.objectives:
            if part.name == "throughput":
                continue
            value = self.value(part.name)
            if value is None or not part.met_by(value):
                return f"{part.name} {part_text(part.name, value)} (wanted {part.text})"
        return None

    def excess(self, slo: Slo) -> float:
        """The largest ratio of a measured value to its limit, ignoring throughput; infinite if invalid."""
        if self.invalid:
            return math.inf
        parts = [part for part in slo.objectives if part.name != "throughput"]
        values = [(self.value(part.name), max(part.limit, 1e-9)) for part in parts]
        return max((math.inf if value is None else value / limit for value, limit in values), default=0.0)


def part_text(name: str, value: float | None) -> str:
    """A measured value of the SLO part `name` for people: "140 ms", "0.4 %", "unknown"."""
    if value is None:
        return "unknown"
    return f"{value * 100:.3g} %" if name == "error" else f"{value * 1e3:.3g} ms"


class BatchCurve(Struct, frozen=True, kw_only=True):
    """Batch times of one instance alone: (rows, seconds per batch), smallest first.

    `memory_bytes` is the memory of one instance after its largest batch, `limit_bytes` the memory for all instances.
    `cost_s` is the time that the measurement took.
    """

    points: tuple[tuple[int, float], ...]
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    cost_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """The time of a batch: interpolated between points, extrapolated beyond the last one."""
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        at = next((i for i in range(1, len(points)) if rows <= points[i][0]), len(points) - 1)
        (n, t), (m, u) = points[at - 1], points[at]
        return t + (rows - n) * (u - t) / (m - n)

    def per_second(self, batch: int, within_s: float | None = None) -> float:
        """The most rows per second of one instance, in batches of at most `batch` rows that take at most `within_s`;
        0 if even one row takes longer."""
        sizes = {batch, *(n for n, _ in self.points if n < batch)}
        able = [n for n in sizes if within_s is None or self.seconds(n) <= within_s]
        return max((n / self.seconds(n) for n in able), default=0.0)


class SystemUnderTest(Protocol):
    """A server that runs under candidate settings. One thread calls it, calls may take long, and a PenstockError ends
    the tuning."""

    def refusal(self, settings: CandidateSettings) -> str | None:
        """Why these settings must not be used, before any load: different outputs, a missing device. None if they may.
        The same answer each time."""

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        """Batch times with these settings, whatever their `batch` and `instances`; None if unknown."""

    def prepare(self, settings: CandidateSettings) -> None:
        """Applies settings to the server, reloading only what they require.

        Raises LoadFailed if the model cannot run with them: the search rules them out and goes on.
        """

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        """An open loop of `rate` requests per second, after a warm-up. The same seed gives the same arrivals."""

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        """A closed loop with enough clients to fill every batch: `throughput` is the maximum."""

    def close(self) -> None:
        """Stops the server."""
