"""What each policy and batch size would make of recorded or synthetic arrivals: the real Scheduler in virtual time."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from msgspec import Struct, field

from penstock.config.schema import BatchingConfig
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.engine.rules import policy_of
from penstock.errors import ConfigError
from penstock.perf.bench.figures import latency_of
from penstock.perf.bench.measurement import Latency, Load, Measurement, ObjectiveResult
from penstock.perf.bench.slo import Slo
from penstock.perf.simulate.simulate import Service, simulate

TIMEOUT_S: Final = 30.0  # of the queue, as the configuration has it; here nothing is given up
DEPTH: Final = 2  # as process workers are sent batches: one ahead
WARM: Final = 0.15  # of a simulation is not counted
KEEPS_UP: Final = 0.97  # of the offered rate: with less throughput the queue grows for ever
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)", re.ASCII)
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Policy(Struct, frozen=True):
    """A name of the configuration, and its delay where it was given one."""

    name: str
    max_hold_s: float | None = None

    @property
    def text(self) -> str:
        """As `parse_policies` reads it."""
        return self.name if self.max_hold_s is None else f"{self.name}:{self.max_hold_s * 1e3:g}ms"

    def make(self) -> BatchPolicy:
        """A new one: a policy learns."""
        hold: float | Literal["auto"] = "auto" if self.max_hold_s is None else self.max_hold_s
        return policy_of(BatchingConfig(policy=self.name, max_hold_s=hold, timeout_s=TIMEOUT_S))


class Machine(Struct, frozen=True, kw_only=True):
    """What serves: a batch takes `service`; `handover_s` passes from the queue to the worker and back, together."""

    service: Service
    handover_s: float = 0.0


class Outcome(Struct, frozen=True, kw_only=True):
    """What one setting makes of the arrivals. `offered` and `throughput` are requests a second, `capacity` rows a
    second of full batches; `busy` is the share of the instances' time."""

    policy: str
    batch: int
    instances: int
    offered: float
    throughput: float
    capacity: float
    goodput: float | None
    latency: Latency
    mean_batch: float
    busy: float
    slo: list[ObjectiveResult] = field(default_factory=list)

    @property
    def keeps_up(self) -> bool:
        """Whether the queue does not grow for ever."""
        return self.throughput >= KEEPS_UP * self.offered

    @property
    def met(self) -> bool | None:
        """Whether the SLO is, by whoever keeps up; None without one, or with too few requests to tell."""
        if not self.slo or any(clause.met is None for clause in self.slo):
            return None
        return self.keeps_up and all(clause.met for clause in self.slo)


def parse_duration(text: str) -> float:
    """Seconds of "5ms", "200us" or "0.1s". Raises ConfigError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f'"{text}" is no time; expected a number with us, ms or s, for instance 5ms')
    return float(found[1]) * _UNITS[found[2]]


def parse_cost(text: str) -> tuple[float, float]:
    """(a, b) of "5ms,0.2ms": seconds of a batch, and of each row in it. Raises ConfigError."""
    parts = text.split(",")
    if len(parts) != 2:
        raise ConfigError(f'cost "{text}": expected A,B for batches that take A + B x rows, for instance 5ms,0.2ms')
    a, b = (parse_duration(part) for part in parts)
    if a + b <= 0:
        raise ConfigError(f'cost "{text}": a batch that takes no time needs no policy')
    return a, b


def parse_policies(text: str) -> list[Policy]:
    """Those of "adaptive,fixed:5ms,none", each once; the delay is the longest hold. Raises ConfigError."""
    found = []
    for piece in text.split(","):
        name, _, delay = piece.strip().partition(":")
        policy = Policy(name, parse_duration(delay) if delay else None)
        policy.make()
        if delay and name == "none":
            raise ConfigError(f'policy "{piece}": none holds nothing; expected none without a delay')
        found.append(policy)
    return list(dict.fromkeys(found))


def replay(
    arrivals: Sequence[float],
    rows: Sequence[int],
    machine: Machine,
    policies: Sequence[Policy],
    batches: Sequence[int],
    instances: Sequence[int],
    slo: Slo,
    seed: int = 0,
) -> Iterator[Outcome]:
    """One outcome a setting, as they are found. `rows`: of each arrival, or nothing where each has one.

    Nothing is refused and nothing expires: what a policy cannot do shows as latency. Without batches their size
    decides nothing, so that the policy `none` is there once.
    """
    for count, policy in itertools.product(instances, policies):
        for batch in batches if policy.name != "none" else (1,):
            yield _one(arrivals, rows, machine, policy, batch, count, slo, seed)


def _one(
    arrivals: Sequence[float],
    rows: Sequence[int],
    machine: Machine,
    policy: Policy,
    batch: int,
    instances: int,
    slo: Slo,
    seed: int,
) -> Outcome:
    found = simulate(
        machine.service,
        policy.make(),
        slots=instances,
        depth=DEPTH,
        handover_s=machine.handover_s,
        max_batch_size=batch,
        arrivals=arrivals,
        rows=rows,
        slo_s=slo.latency_s,
        deadlines=False,
        seed=seed,
    )
    offered = _offered(arrivals)
    run = Measurement(
        load=Load(mode="open", rate=offered),
        requests=len(found.latencies_s),
        throughput=found.throughput,
        latency=latency_of(found.latencies_s),
    )
    return Outcome(
        policy=policy.text,
        batch=batch,
        instances=instances,
        offered=offered,
        throughput=found.throughput,
        capacity=machine.service.capacity(instances, batch),
        goodput=None if slo.latency_s is None else found.goodput,
        latency=run.latency,
        mean_batch=found.mean_batch,
        busy=found.busy,
        slo=slo.judge(run),
    )


def _offered(arrivals: Sequence[float]) -> float:
    """Requests a second in the time that counts, which is that of the throughput; 0 where it holds none."""
    start = WARM * arrivals[-1]
    came = len(arrivals) - bisect_left(arrivals, start)
    return came / (arrivals[-1] - start) if arrivals[-1] > start else 0.0


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The cheapest that meets the SLO: fewest instances, then the lowest p99. Without an SLO the lowest p99 of all that
    keep up. None if there is none."""
    able = [one for one in outcomes if (one.met if one.slo else one.keeps_up and one.latency.p99_s is not None)]

    def dear(one: Outcome) -> tuple[int, float]:
        p99_s = one.latency.p99_s
        return (one.instances if one.slo else 0, math.inf if p99_s is None else p99_s)

    return min(able, key=dear, default=None)
