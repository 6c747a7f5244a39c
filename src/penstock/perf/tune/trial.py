"""Bench: what is tuned, as the tuner sees it: a real server, or a synthetic one. Reading: what was measured of it."""

from __future__ import annotations

import math
from typing import Protocol

from msgspec import Struct

from penstock.perf.bench.measurement import Measurement
from penstock.perf.bench.slo import Slo
from penstock.perf.tune.space import Settings


class Reading(Struct, frozen=True, kw_only=True):
    """One measurement. `cost_s` is the time that it took, warm-up and the change of settings included."""

    run: Measurement
    cost_s: float

    @property
    def rate(self) -> float:
        """Requests a second that came, by design."""
        return self.run.load.rate

    @property
    def throughput(self) -> float:
        """Good answers a second."""
        return self.run.throughput

    @property
    def p99_s(self) -> float | None:
        """None when there are too few samples."""
        return self.run.latency.p99_s

    @property
    def error_share(self) -> float:
        """Of all requests."""
        return self.run.error_share

    @property
    def late_share(self) -> float | None:
        """Of the latencies the share over the SLO's: of answers, and of requests that were given up, which its
        percentiles count, too. None if the SLO has no latency; 1 if nothing was answered."""
        if self.run.goodput is None:
            return None
        counted = self.run.answered + self.run.errors.get("timeout", 0)
        return max(0.0, round(1 - self.run.goodput * self.run.seconds / counted, 9)) if counted else 1.0

    @property
    def invalid(self) -> str | None:
        """Why it says nothing about what was measured; None if it does."""
        return "; ".join(self.run.invalid) or None

    def value(self, name: str) -> float | None:
        """What was measured of the SLO's part `name`. Of a percentile with too few samples the largest latency, which
        it cannot exceed."""
        if name == "error":
            return self.error_share if self.run.requests else None
        found: float | None = getattr(self.run.latency, "p999_s" if name == "p99.9" else f"{name}_s")
        return self.run.latency.max_s if found is None else found

    def breaks(self, slo: Slo) -> str | None:
        """What of the SLO it breaks, as "p99 140 ms (wanted p99<=100ms)"; None when it keeps it.

        "throughput" parts are not looked at: a load that is lower than they ask for cannot keep them.
        """
        if self.run.invalid:
            return f"invalid: {self.invalid}"
        for part in slo.objectives:
            if part.name == "throughput":
                continue
            value = self.value(part.name)
            if value is None or not part.met_by(value):
                return f"{part.name} {told(part.name, value)} (wanted {part.text})"
        return None

    def excess(self, slo: Slo) -> float:
        """How often the SLO's limit the worst of its parts is, those of throughput left out; infinite if invalid."""
        parts = [part for part in slo.objectives if part.name != "throughput"]
        values = [(self.value(part.name), max(part.limit, 1e-9)) for part in parts]
        if self.invalid:
            return math.inf
        return max((math.inf if value is None else value / limit for value, limit in values), default=0.0)


def told(name: str, value: float | None) -> str:
    """A measured value of the SLO's part `name` for people: "140 ms", "0.4 %", "unknown"."""
    if value is None:
        return "unknown"
    return f"{value * 100:.3g} %" if name == "error" else f"{value * 1e3:.3g} ms"


class Curve(Struct, frozen=True, kw_only=True):
    """What batches take offline, in one instance alone: (rows, seconds of a batch), smallest first.

    `memory_bytes` is what one instance holds with its largest batch, `limit_bytes` what there is for all of them.
    `cost_s` is the time that it took to find out.
    """

    points: tuple[tuple[int, float], ...]
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    cost_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """A batch of so many rows: between points by a line, beyond the last one in proportion to its slope."""
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        at = next((i for i in range(1, len(points)) if rows <= points[i][0]), len(points) - 1)
        (n, t), (m, u) = points[at - 1], points[at]
        return t + (rows - n) * (u - t) / (m - n)

    def per_second(self, batch: int, within_s: float | None = None) -> float:
        """Most rows a second of one instance in batches of at most `batch` rows that take at most `within_s`; 0 if
        not even one row is done by then."""
        sizes = {batch, *(n for n, _ in self.points if n < batch)}
        able = [n for n in sizes if within_s is None or self.seconds(n) <= within_s]
        return max((n / self.seconds(n) for n in able), default=0.0)


class Bench(Protocol):
    """What is tuned. Called by one thread; any call may take long. A PenstockError ends the tuning."""

    def refusal(self, settings: Settings) -> str | None:
        """Why these settings may not be used, before anything is measured with them: outputs that differ, no such
        device; None if they may. The same answer each time."""
        ...

    def curve(self, settings: Settings) -> Curve | None:
        """What batches take with these settings, whatever their `batch` and `instances`; None if it cannot tell."""
        ...

    def prepare(self, settings: Settings) -> None:
        """What is measured from now on has these settings. Reloads only what they ask for.

        Raises LoadFailed if the model cannot run with them: they are ruled out, and the search goes on.
        """
        ...

    def measure(self, settings: Settings, rate: float, seconds: float, seed: int) -> Reading:
        """An open loop of `rate` requests a second for `seconds`, after a warm-up. Same seed, same arrivals."""
        ...

    def saturate(self, settings: Settings, seconds: float, seed: int) -> Reading:
        """A closed loop with so many clients that every batch can be full: `throughput` is the most it can do."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...
