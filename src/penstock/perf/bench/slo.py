"""SLOs as text, such as "p99<=100ms,error<=0.1%": read, and held against what was measured. Pure."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct, structs

from penstock.errors import ConfigError
from penstock.perf.bench.measurement import Measurement, ObjectiveResult

_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LATENCIES: Final = ("mean", "p50", "p75", "p90", "p95", "p99")
_TAIL: Final = ("p99", "p99.9", "max")
# of the latencies each binds more than the one before
_NAMES: Final = (*_LATENCIES, "p99.9", "max", "error", "throughput")
_CLAUSE: Final = re.compile(r"\s*([a-z0-9.]+)\s*(<=|<|>=|>)\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|%|/s|)\s*", re.ASCII)


class Objective(Struct, frozen=True):
    """One condition. `limit` is in seconds, a share from 0 to 1, or requests a second."""

    name: str
    limit: float
    at_least: bool
    text: str

    @property
    def is_latency(self) -> bool:
        """Whether the limit is in seconds."""
        return self.name not in ("error", "throughput")

    def met_by(self, value: float) -> bool:
        """Whether `value` keeps it."""
        return value >= self.limit if self.at_least else value <= self.limit


class Slo(Struct, frozen=True):
    """All parts must hold. Empty: anything does."""

    objectives: tuple[Objective, ...] = ()

    @property
    def text(self) -> str:
        """As it can be read again."""
        return ",".join(part.text for part in self.objectives)

    @property
    def latency_s(self) -> float | None:
        """What a single request may take to count as goodput; None without a latency part.

        The tightest of the parts that bind nearly all requests; without one that of the highest percentile: half of
        all requests may be over a median.
        """
        parts = sorted((p for p in self.objectives if p.is_latency), key=lambda p: _NAMES.index(p.name))
        tail = [p.limit for p in parts if p.name in _TAIL]
        return min(tail or [p.limit for p in parts[-1:]], default=None)

    def judge(self, run: Measurement, *, upper: bool = False) -> list[ObjectiveResult]:
        """Each part, measured. With `upper` the p99 counts with the upper bound of its interval."""
        return [self._clause(part, run, upper) for part in self.objectives]

    def _clause(self, part: Objective, run: Measurement, upper: bool) -> ObjectiveResult:
        value = _value(part.name, run, upper)
        return ObjectiveResult(text=part.text, value=value, met=None if value is None else part.met_by(value))


def _value(name: str, run: Measurement, upper: bool) -> float | None:
    if name == "error":
        return run.error_share if run.requests else None
    if name == "throughput":
        return run.throughput
    if name == "p99" and upper:
        return run.latency.p99_high_s
    found: float | None = structs.asdict(run.latency)["p999_s" if name == "p99.9" else f"{name}_s"]
    return found


def parse_slo(text: str) -> Slo:
    """The SLO that `text` tells: parts joined by commas, each NAME<=LIMIT. Raises ConfigError.

    NAME is mean, p50, p75, p90, p95, p99, p99.9 or max (us, ms or s), error (% or a share), or throughput (>=, /s).
    """
    parts = tuple(_part(piece) for piece in text.split(",") if piece.strip())
    if not parts:
        raise ConfigError(f'SLO "{text}" says nothing; expected for instance "p99<=100ms,error<=0.1%"')
    if len({part.name for part in parts}) < len(parts):
        raise ConfigError(f'SLO "{text}" names the same thing twice')
    return Slo(parts)


def _part(piece: str) -> Objective:
    found = _CLAUSE.fullmatch(piece)
    if found is None:
        raise ConfigError(f'SLO part "{piece.strip()}": expected NAME<=LIMIT, for instance p99<=100ms or error<=0.1%')
    name, sign, number, unit = found.groups()
    if name not in _NAMES:
        raise ConfigError(f'SLO part "{piece.strip()}": "{name}" is none of {", ".join(_NAMES)}')
    at_least = sign in (">=", ">")
    if at_least != (name == "throughput"):
        raise ConfigError(f'SLO part "{piece.strip()}": {name} is kept with {"<=" if at_least else ">="}')
    units = ("%", "") if name == "error" else ("/s", "") if name == "throughput" else tuple(_SECONDS)
    if unit not in units:
        raise ConfigError(f'SLO part "{piece.strip()}": expected {" or ".join(u or "no unit" for u in units)}')
    limit = float(number) * (0.01 if unit == "%" else _SECONDS.get(unit, 1.0))
    if limit <= 0 and name != "error":
        raise ConfigError(f'SLO part "{piece.strip()}": the limit must be over 0')
    return Objective(name, limit, at_least, piece.strip())
