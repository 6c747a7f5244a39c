"""The repeats of one load joined: what is told of them together. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from msgspec import Struct

from penstock.perf.bench.measurement import Load, Measurement, ServerSide

Get = Callable[[Measurement], float | None]


class Point(Struct, frozen=True, kw_only=True):
    """One load on one configuration. `runs` are the valid repeats, `invalid` the others."""

    label: str
    load: Load
    runs: list[Measurement]
    invalid: list[Measurement]

    @property
    def name(self) -> str:
        """As it stands in sentences: "batch=8 at 64 clients"."""
        return f"{self.label} at {self.load.label}" if self.label else self.load.label

    def values(self, get: Get) -> list[float]:
        """Of each valid repeat that can tell it."""
        return [value for run in self.runs if (value := get(run)) is not None]

    def median(self, get: Get) -> float | None:
        """Over the valid repeats; None when not all of them can tell it."""
        values = self.values(get)
        return statistics.median(values) if values and len(values) == len(self.runs) else None

    @property
    def met(self) -> bool | None:
        """Whether each valid repeat kept the SLO: None when one cannot tell and none missed it."""
        each = [run.met for run in self.runs]
        if not each or any(met is False for met in each):
            return False if each else None
        return None if None in each else True

    @property
    def errors(self) -> dict[str, int]:
        """By code, of all valid repeats together."""
        found: dict[str, int] = {}
        for run in self.runs:
            for code, count in run.errors.items():
                found[code] = found.get(code, 0) + count
        return dict(sorted(found.items()))


def points(measurements: Iterable[Measurement]) -> list[Point]:
    """In the order in which they were first measured."""
    found: dict[tuple[str, str], Point] = {}
    for m in measurements:
        key = (m.label, m.load.label)
        if key not in found:
            found[key] = Point(label=m.label, load=m.load, runs=[], invalid=[])
        (found[key].invalid if m.invalid else found[key].runs).append(m)
    return list(found.values())


def throughput(m: Measurement) -> float | None:
    """Good answers a second."""
    return m.throughput


def worth(m: Measurement) -> float:
    """Goodput where it is known, else throughput, a second."""
    return m.throughput if m.goodput is None else m.goodput


def p99(m: Measurement) -> float | None:
    """Seconds."""
    return m.latency.p99_s


def side(m: Measurement) -> ServerSide:
    """The server's side; one that tells nothing where there is none."""
    return m.server or ServerSide()


def knobs(label: str) -> dict[str, str]:
    """The settings that a label tells: "batch=8,instances=2" -> {"batch": "8", "instances": "2"}."""
    return dict(part.split("=", 1) for part in label.split(",") if "=" in part)
