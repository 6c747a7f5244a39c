"""Systems under test in virtual time: `Hill` without noise; and one with a batch cost, through the real scheduler.

The settings that a search finds on it can be compared with the true optimum, which no real machine reveals.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct, field

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed
from penstock.errors import LoadFailed
from penstock.perf.bench.figures import latency_of
from penstock.perf.bench.measurement import Latency, Load, Measurement, Slo, parse_slo
from penstock.perf.simulate.simulator import WARM, OpenLoop, ServiceTime
from penstock.perf.tune.runner import BatchCurve, MeasuredRun
from penstock.perf.tune.space import CandidateSettings
from support.simulator import ClosedLoop, SimulationResult, SimulationSettings, ThinkTime, poisson, simulate

CURVE_SIZES: Final = (1, 2, 4, 8, 16, 32)


BaseTime = Callable[["Hill", CandidateSettings, float, float], float]
"""The `base_s` of a measurement, from the system, the settings, the rate and the seconds."""


class Hill:
    """A SystemUnderTest: settings that sustain `able(settings)` requests/s have a p99 of `base_s / (1 - rate / able)`.

    With a p99 of `limit_s`, 1 % of the responses take longer than that; with a higher p99 more do. `asked` lists the
    measurements as (settings, rate).
    """

    limit_s = 0.1

    def __init__(self, able: Callable[[CandidateSettings], float], base_s: float | BaseTime = 0.01) -> None:
        self.able, self.base_s = able, base_s
        self.asked: list[tuple[CandidateSettings, float]] = []
        self.prepared: list[CandidateSettings] = []
        self.curves: dict[CandidateSettings, BatchCurve] = {}
        self.refused: dict[CandidateSettings, str] = {}
        self.fails: set[CandidateSettings] = set()
        self.invalid = 0  # this many further measurements are invalid
        self.interrupt_at = 0  # the measurement that Ctrl-C interrupts

    def refusal(self, settings: CandidateSettings) -> str | None:
        return self.refused.get(settings)

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        return self.curves.get(settings)

    def prepare(self, settings: CandidateSettings) -> None:
        self.prepared.append(settings)
        if settings in self.fails:
            raise LoadFailed("no room for it")

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        self.asked.append((settings, rate))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        able = self.able(settings)
        base_s = self.base_s if isinstance(self.base_s, float) else self.base_s(self, settings, rate, seconds)
        p99 = base_s / (1 - rate / able) if rate < able else 100.0
        self.invalid -= 1
        return self._measured(settings, Load(mode="open", rate=rate, seconds=seconds, seed=seed), min(rate, able), p99)

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        return self._measured(settings, Load(mode="closed", concurrency=8, seconds=seconds), self.able(settings), 1.0)

    def _measured(self, settings: CandidateSettings, load: Load, throughput: float, p99: float) -> MeasuredRun:
        n = max(1, round(throughput * load.seconds))
        latency = Latency(mean_s=p99 / 2, p99_s=p99, p99_low_s=p99, p99_high_s=p99, max_s=p99)
        run = Measurement(
            load=load,
            label=settings.text,
            seconds=n / throughput,
            requests=n,
            answered=n,
            throughput=throughput,
            too_slow=self.late(n, p99),
            latency=latency,
            invalid=["the generator was too slow"] if self.invalid >= 0 and load.mode == "open" else [],
        )
        return MeasuredRun(run=run, cost_s=load.seconds)

    def late(self, n: int, p99: float) -> int:
        """How many of n responses take longer than the SLO."""
        return int(n * min(1.0, 0.01 * (p99 / self.limit_s) ** 2))

    def close(self) -> None:
        pass


class SyntheticMachine(Struct, frozen=True, kw_only=True):
    """A machine on which a batch of n takes (a + b*n) seconds with one instance; `factors` scale a and b by precision.

    m instances slow each other down by 1 + sigma*(m-1) + kappa*m*(m-1), the universal scalability law: sigma stands for
    contention, kappa for coherency. Throughput therefore peaks at some m.
    """

    a: float
    b: float
    sigma: float = 0.0
    kappa: float = 0.0
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    jitter: float = 0.05
    tail: float = 0.002

    def service(self, settings: CandidateSettings) -> ServiceTime:
        """The service time of a batch with these settings."""
        m = _whole(settings, "instances")
        slowdown = 1 + self.sigma * (m - 1) + self.kappa * m * (m - 1)
        fa, fb = self.factors.get(str(settings.get("precision", "")), (1.0, 1.0))
        return ServiceTime(self.a * fa * slowdown, self.b * fb * slowdown, jitter=self.jitter, tail=self.tail)


def drawn(seed: int) -> tuple[SyntheticMachine, Slo]:
    """A random realistic machine, whose gain from batching is between none and tenfold; and a tight to loose SLO."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    b = between(0.002, 0.01)
    a = b * between(0.5, 20)
    machine = SyntheticMachine(
        a=a,
        b=b,
        sigma=between(0.02, 0.5),
        kappa=between(0.001, 0.02),
        factors={"fp16": (between(0.8, 1.2), between(0.5, 1.2)), "bf16": (between(0.8, 1.2), between(0.5, 1.2))},
    )
    return machine, parse_slo(f"p99<={(a + 8 * b) * between(1.5, 5) * 1e3:.3g}ms")


class SyntheticSystem:
    """A SystemUnderTest on a synthetic machine. `spent_s` is the virtual time that the measurements took."""

    def __init__(self, machine: SyntheticMachine, slo: Slo, *, has_curve: bool = True) -> None:
        self.machine, self.slo, self._has_curve = machine, slo, has_curve
        self.spent_s = 0.0

    def refusal(self, settings: CandidateSettings) -> str | None:
        return None

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        if not self._has_curve:
            return None
        one = self.machine.service(settings.put(instances=1))
        points = tuple((n, one.t(n)) for n in CURVE_SIZES)
        self.spent_s += (cost_s := 3 * sum(t for _, t in points))
        return BatchCurve(points=points, cost_s=cost_s)

    def prepare(self, settings: CandidateSettings) -> None:
        pass

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        load = Load(mode="open", rate=rate, seconds=seconds, seed=seed)
        n = max(2, round(rate * seconds / (1 - WARM)))
        return self._measured(settings, load, self._simulate(settings, poisson(rate, n, random.Random(seed)), seed))

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        slots, batch = _whole(settings, "instances"), _whole(settings, "batch")
        clients = 2 * batch * slots
        found = simulate(
            self.machine.service(settings),
            _policy(settings),
            ClosedLoop(clients, seconds / (1 - WARM), ThinkTime(position_s=0.0)),
            SimulationSettings(slots=slots, max_batch_size=batch, seed=seed),
        )
        load = Load(mode="closed", concurrency=clients, seconds=seconds, seed=seed)
        return self._measured(settings, load, found)

    def close(self) -> None:
        pass

    def true_p99_s(self, settings: CandidateSettings, rate: float, requests: int = 60_000) -> float:
        """The p99 of a long run at this rate."""
        return self._simulate(settings, poisson(rate, requests, random.Random(-1)), 0).p99_s

    def true_rate(self, settings: CandidateSettings, guess: float, requests: int = 60_000) -> float:
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

    def _simulate(self, settings: CandidateSettings, arrivals: Iterator[float], seed: int) -> SimulationResult:
        simulated = SimulationSettings(
            slots=_whole(settings, "instances"),
            max_batch_size=_whole(settings, "batch"),
            slo_s=self.slo.latency_s,
            deadlines=False,
            seed=seed,
        )
        return simulate(self.machine.service(settings), _policy(settings), OpenLoop(arrivals), simulated)

    def _measured(self, settings: CandidateSettings, load: Load, found: SimulationResult) -> MeasuredRun:
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
        return MeasuredRun(run=run, cost_s=cost_s)


def _whole(settings: CandidateSettings, parameter: str) -> int:
    value = settings.get(parameter, 1)
    return value if isinstance(value, int) else 64


def _policy(settings: CandidateSettings) -> BatchPolicy:
    hold = settings.get("hold", "auto")
    return Fixed(hold) if isinstance(hold, int | float) else Adaptive()
