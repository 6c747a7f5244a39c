"""SLOs as text, such as "p99<=100ms,error<=0.1%": parsed, and checked against measurements. Pure."""

import re
from typing import Final

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.measurement import Measurement, ObjectiveResult
from penstock.values import TIME_UNITS

_TAIL: Final = ("p99", "p99.9", "max")
_NAMES: Final = ("mean", "p50", "p75", "p90", "p95", *_TAIL, "error", "throughput")  # latencies in ascending strictness
_OBJECTIVE: Final = re.compile(r"\s*([a-z0-9.]+)\s*(<=|<|>=|>)\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|%|/s|)\s*", re.ASCII)


class Objective(Struct, frozen=True):
    """One condition. `limit` is in seconds, a share from 0 to 1, or requests per second."""

    name: str
    limit: float
    at_least: bool
    text: str

    @property
    def is_latency(self) -> bool:
        return self.name not in ("error", "throughput")

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


class Slo(Struct, frozen=True):
    """Objectives that must all be met; an empty SLO is always met."""

    objectives: tuple[Objective, ...] = ()

    @property
    def text(self) -> str:
        """The text that `parse_slo` reads."""
        return ",".join(objective.text for objective in self.objectives)

    @property
    def latency_s(self) -> float | None:
        """The latency up to which a request counts as goodput; None without a latency objective.

        The tightest objective that binds nearly all requests; without one, the limit of the highest percentile, because
        half of all requests may exceed a median.
        """
        latencies = sorted((o for o in self.objectives if o.is_latency), key=lambda o: _NAMES.index(o.name))
        tail = [o.limit for o in latencies if o.name in _TAIL]
        return min(tail or [o.limit for o in latencies[-1:]], default=None)

    def judge(self, run: Measurement) -> list[ObjectiveResult]:
        values = [(o, measured_value(o.name, run)) for o in self.objectives]
        return [ObjectiveResult(text=o.text, value=v, met=None if v is None else o.met_by(v)) for o, v in values]


def measured_value(name: str, run: Measurement) -> float | None:
    """The value of an objective in a run; None with too few samples."""
    if name == "error":
        return run.error_share if run.requests else None
    if name == "throughput":
        return run.throughput
    found: float | None = getattr(run.latency, f"{name.replace('.', '')}_s")
    return found


def parse_slo(text: str) -> Slo:
    """The SLO of a text: objectives joined by commas, each NAME<=LIMIT. Raises ConfigError.

    NAME is mean, p50, p75, p90, p95, p99, p99.9 or max (us, ms or s), error (% or a share), or throughput (>=, /s).
    """
    objectives = tuple(_objective(part) for part in text.split(",") if part.strip())
    if not objectives:
        raise ConfigError(f'SLO "{text}" is empty; expected for instance "p99<=100ms,error<=0.1%"')
    if len({objective.name for objective in objectives}) < len(objectives):
        raise ConfigError(f'SLO "{text}" names the same thing twice')
    return Slo(objectives)


def _objective(text: str) -> Objective:
    found = _OBJECTIVE.fullmatch(text)
    where = f'SLO part "{text.strip()}"'
    if found is None:
        raise ConfigError(f"{where}: expected NAME<=LIMIT, for instance p99<=100ms or error<=0.1%")
    name, sign, number, unit = found.groups()
    if name not in _NAMES:
        raise ConfigError(f'{where}: "{name}" is none of {", ".join(_NAMES)}')
    at_least = sign in (">=", ">")
    if at_least != (name == "throughput"):
        raise ConfigError(f"{where}: {name} takes {'<=' if at_least else '>='}")
    units = ("%", "") if name == "error" else ("/s", "") if name == "throughput" else tuple(TIME_UNITS)
    if unit not in units:
        raise ConfigError(f"{where}: expected {' or '.join(u or 'no unit' for u in units)}")
    limit = float(number) * (0.01 if unit == "%" else TIME_UNITS.get(unit, 1.0))
    if limit <= 0 and name != "error":
        raise ConfigError(f"{where}: the limit must be over 0")
    return Objective(name, limit, at_least, text.strip())
