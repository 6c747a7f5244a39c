"""A Bench in virtual time: a machine whose true cost of batches and contention are known drives the real Scheduler.

The answer of a search over it can be held against the truth, which no real machine tells.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed
from penstock.errors import LoadFailed
from penstock.perf.bench.figures import latency_of
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.slo import Slo, parse_slo
from penstock.perf.simulate.simulate import Service, SimResult, Think, poisson, simulate
from penstock.perf.tune.space import Settings
from penstock.perf.tune.trial import Curve, Reading

WARM: Final = 0.15  # of a simulation is not counted


class Machine(Struct, frozen=True, kw_only=True):
    """A batch of n takes (a + b*n) seconds on a machine with one instance; `factors` multiply a and b by precision.

    m instances slow each other down by 1 + sigma*(m-1) + kappa*m*(m-1), the universal scalability law: sigma is what
    they queue for, kappa what they keep telling each other. Throughput so has a peak at some m.
    An instance holds `memory_bytes`, and `row_bytes` for each row of its largest batch, of `limit_bytes`.
    """

    a: float
    b: float
    sigma: float = 0.0
    kappa: float = 0.0
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    jitter: float = 0.05
    tail: float = 0.002
    memory_bytes: int = 0
    row_bytes: int = 0
    limit_bytes: int | None = None

    def service(self, settings: Settings) -> Service:
        """What a batch takes with these settings."""
        m = _whole(settings, "instances")
        slower = 1 + self.sigma * (m - 1) + self.kappa * m * (m - 1)
        fa, fb = self.factors.get(str(settings.get("precision", "")), (1.0, 1.0))
        return Service(self.a * fa * slower, self.b * fb * slower, jitter=self.jitter, tail=self.tail)

    def memory(self, settings: Settings) -> int:
        """Bytes that all instances hold."""
        batch, instances = _whole(settings, "batch"), _whole(settings, "instances")
        return instances * (self.memory_bytes + batch * self.row_bytes)


def drawn(seed: int) -> tuple[Machine, Slo]:
    """A machine like those there are, from one that gains nothing by batches to one that gains tenfold; and an SLO that
    is from tight to loose for it."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    b = between(0.002, 0.01)
    a = b * between(0.5, 20)
    machine = Machine(
        a=a,
        b=b,
        sigma=between(0.02, 0.5),
        kappa=between(0.001, 0.02),
        factors={"fp16": (between(0.8, 1.2), between(0.5, 1.2)), "bf16": (between(0.8, 1.2), between(0.5, 1.2))},
    )
    return machine, parse_slo(f"p99<={(a + 8 * b) * between(1.5, 5) * 1e3:.3g}ms")


class SyntheticBench:
    """The `Bench` of a machine. `spent_s` is the virtual time that measuring took."""

    def __init__(self, machine: Machine, slo: Slo, *, has_curve: bool = True) -> None:
        self.machine, self.slo, self._has_curve = machine, slo, has_curve
        self.spent_s = 0.0

    def refusal(self, settings: Settings) -> str | None:
        return None

    def curve(self, settings: Settings) -> Curve | None:
        if not self._has_curve:
            return None
        one, largest = self.machine.service(settings.put(instances=1)), settings.put(batch=32, instances=1)
        points = tuple((n, one.t(n)) for n in (1, 2, 4, 8, 16, 32))
        self.spent_s += (cost_s := 3 * sum(t for _, t in points))
        memory, limit = self.machine.memory(largest), self.machine.limit_bytes
        return Curve(points=points, memory_bytes=memory or None, limit_bytes=limit, cost_s=cost_s)

    def prepare(self, settings: Settings) -> None:
        limit = self.machine.limit_bytes
        if limit is not None and self.machine.memory(settings) > limit:
            raise LoadFailed(f"{settings}: {self.machine.memory(settings)} bytes are needed, there are {limit}")

    def measure(self, settings: Settings, rate: float, seconds: float, seed: int) -> Reading:
        load = Load(mode="open", rate=rate, seconds=seconds, seed=seed)
        n = max(2, round(rate * seconds / (1 - WARM)))
        return self._reading(settings, load, self._simulate(settings, poisson(rate, n, random.Random(seed)), seed))

    def saturate(self, settings: Settings, seconds: float, seed: int) -> Reading:
        clients = 2 * _whole(settings, "batch") * _whole(settings, "instances")
        load = Load(mode="closed", concurrency=clients, seconds=seconds, seed=seed)
        found = simulate(
            self.machine.service(settings),
            _policy(settings),
            slots=_whole(settings, "instances"),
            max_batch_size=_whole(settings, "batch"),
            clients=clients,
            horizon_s=seconds / (1 - WARM),
            think=Think(position_s=0.0),
            seed=seed,
        )
        return self._reading(settings, load, found)

    def close(self) -> None:
        pass

    def true_p99_s(self, settings: Settings, rate: float, requests: int = 60_000) -> float:
        """That of a long run at this rate."""
        return self._simulate(settings, poisson(rate, requests, random.Random(-1)), 0).p99_s

    def true_rate(self, settings: Settings, guess: float, requests: int = 60_000) -> float:
        """The largest rate whose true p99 is within the SLO, to 1 %. `guess` is near it."""
        assert self.slo.latency_s is not None
        low, high, step = 0.0, math.inf, 1.1
        rate = guess
        while high > low * 1.01 and rate > guess / 100:
            if self.true_p99_s(settings, rate, requests) <= self.slo.latency_s:
                low = rate
            else:
                high = rate
            rate = math.sqrt(low * high) if low and high < math.inf else low * step or high / step
            step = min(3.0, step * step)
        return low

    def _simulate(self, settings: Settings, arrivals: Iterator[float], seed: int) -> SimResult:
        return simulate(
            self.machine.service(settings),
            _policy(settings),
            slots=_whole(settings, "instances"),
            max_batch_size=_whole(settings, "batch"),
            arrivals=arrivals,
            slo_s=self.slo.latency_s,
            deadlines=False,
            seed=seed,
        )

    def _reading(self, settings: Settings, load: Load, found: SimResult) -> Reading:
        self.spent_s += (cost_s := load.seconds / (1 - WARM))
        latencies_s, limit_s = found.latencies_s, self.slo.latency_s
        run = Measurement(
            load=load,
            label=str(settings),
            seconds=load.seconds,
            requests=len(latencies_s),
            answered=len(latencies_s),
            throughput=found.throughput,
            goodput=None if limit_s is None else bisect_right(latencies_s, limit_s) / load.seconds,
            latency=latency_of(latencies_s),
        )
        return Reading(run=run, cost_s=cost_s)


def _whole(settings: Settings, knob: str) -> int:
    value = settings.get(knob, 1)
    return value if isinstance(value, int) else 64


def _policy(settings: Settings) -> BatchPolicy:
    hold = settings.get("hold", "auto")
    return Fixed(hold) if isinstance(hold, int | float) else Adaptive()
