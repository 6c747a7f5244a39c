"""Plans capacity: the fewest instances and the batch ceiling that meet an SLO under given arrivals, by simulation.

The scheduler that serves runs in virtual time. The search uses the busiest part of the arrivals, because an SLO that
holds over a day may be missed for an hour. The settings that it finds suit these arrivals better than others: among
many settings, one meets the SLO by luck. So the plan is judged on other arrivals, and has more instances if it misses
the SLO there; its figures come from these other arrivals. It is then replayed over all arrivals.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from penstock.config.schema import AutoscaleConfig, BatchingConfig
from penstock.core.batching.ladder import Sizes
from penstock.core.engine.autoscaling import limits_of
from penstock.errors import ConfigError
from penstock.perf.bench.document import number, seconds
from penstock.perf.bench.figures import enough, latency_of, percentile
from penstock.perf.bench.measurement import Latency, Load, Measurement, Objective, Slo, measured_value
from penstock.perf.simulate.costs import CostCurve
from penstock.perf.simulate.replay import DEPTH, PolicyChoice, ReplayResult, replay
from penstock.perf.simulate.simulator import (
    LONG_ROW,
    WARM,
    OpenLoop,
    ServiceTime,
    Simulation,
    SimulationSettings,
    simulate_scaling,
    simulated,
)

MOST: Final = 1000  # instances
LOAD: Final = 0.95  # of the rate of full batches: near 1 a queue grows for longer than any simulation lasts
FEW: Final = 2_000  # requests
ALIKE: Final = 1.02  # tails within this factor are equal
_PRECISION: Final = 0.01  # of the head-room
_SWEEP: Final = (0.85, 1.0, 1.15, 1.35, 1.6, 2.0)  # times the planned instances, for the plots
_TINY: Final = 1e-9
PEAK: Final = 40_000  # requests of the busiest part: 340 of them are slower than the p99,
LONG: Final = 20  # and the time of so many of the largest batches: with many instances, requests are soon many
BINS: Final = 96  # of all arrivals: quarters of an hour of a day
HOLE: Final = 50.0  # times the mean gap,
HOLE_SHARE: Final = 0.01  # and a share of the whole time: a longer gap is hardly chance
NEAR: Final = 1  # blocks before and after, from which a resampled block may come: the rate of a day changes slowly
SCALED: Final = 1.25  # times the planned instances, that an autoscaler may start: it follows the load with a delay


class PlanOptions(Struct, frozen=True, kw_only=True):
    """`slo` has a latency. `failures` instances may be down; `batches` are the ceilings to try, padded to `sizes` (the
    key of that name). `price` is paid per
    instance and hour, `handover_s` the way from the queue to the worker and back. With `start_s`, the time of an
    instance's start, an autoscaler is simulated too, with its `spare` and `headroom`. `seed` seeds run times."""

    slo: Slo
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    sizes: Sizes = None
    max_tokens: int | None = None
    most: int = MOST
    failures: int = 0
    price: float | None = None
    memory_bytes: int | None = None
    policy: PolicyChoice = PolicyChoice("adaptive")
    handover_s: float = 0.0005
    jitter: float = 0.05
    start_s: float | None = None
    spare: int = 0
    headroom: float = 0.0
    seed: int = 0


class DayProfile(Struct, frozen=True, kw_only=True):
    """The chosen plan over all arrivals: for each of the bins of `bin_s` seconds the requests per second, the share of
    the instances' time that is busy, and the p99 in seconds (None with too few requests)."""

    bin_s: float
    seconds: float
    requests: int
    latency: Latency
    rates: list[float]
    busy: list[float]
    p99_s: list[float | None]


class ScalingProfile(Struct, frozen=True, kw_only=True):
    """All arrivals on instances that follow the load, `fewest` to `most` of them, each up `start_s` after its decision.

    `instance_s` sums the seconds of all instances; `fixed_s` is the same sum for the plan's fixed number. `late` is the
    share of requests over the SLO. `numbers` lists (second, number of instances)."""

    fewest: int
    most: int
    start_s: float
    instance_s: float
    fixed_s: float
    late: float
    numbers: list[tuple[float, int]]


class PlanLimit(Struct, frozen=True):
    """The highest rate at which the needed instances meet the SLO, and their state at it: start another one before
    it is reached. `rate` is of all instances, `wait_s` the mean wait of a request."""

    rate: float
    per_instance: float
    busy: float
    wait_s: float


class PlanCost(Struct, frozen=True):
    """Memory of all instances in bytes, and the price of an hour and of a million requests; None if unknown."""

    memory_bytes: int | None
    hour: float | None
    million: float | None


class CapacityPlan(Struct, frozen=True, kw_only=True):
    """The plan. Rates are requests per second of all instances.

    `met` is false if no instance count up to `most` meets the SLO; the plan is then the nearest one. `needed`
    instances meet the SLO, `instances` meet it with `failures` down. `chosen` is the peak of other arrivals with all
    instances, `degraded` with the failures, or with one. `full_rate` is the rate of all instances if each batch is
    full. `day` is the whole of the arrivals, `autoscaled` the same on a number of instances that follows them, `tried`
    each simulation of the peak.
    """

    met: bool
    slo: str
    instances: int
    needed: int
    batch: int
    most: int
    chosen: ReplayResult
    degraded: ReplayResult | None
    full_rate: float
    limit: PlanLimit | None
    day: DayProfile
    tried: list[ReplayResult]
    notes: list[str]
    autoscaled: ScalingProfile | None
    cost: PlanCost

    @property
    def failures(self) -> int:
        """How many instances may be down."""
        return self.instances - self.needed


class Planner:
    """Simulates settings at the peak of a load, each once."""

    def __init__(self, load: OpenLoop, curve: CostCurve, options: PlanOptions, others: OpenLoop | None = None) -> None:
        """`others` are further arrivals of the same kind, which has no busiest part; None for a recording."""
        self.load, self.curve, self.options = load, curve, options
        batch, tokens = max(options.batches), options.max_tokens
        lengths = (*load.lengths, *(others.lengths if others else ()))
        self.service = curve.service(tokens or batch * max((LONG_ROW, *lengths)) if lengths else batch, options.jitter)
        long_s = LONG * self.service.t(load.full_batch(batch, tokens)[1])
        least = len(load.arrivals) / max(load.arrivals[-1], _TINY) * long_s
        self.peak = busiest(load, max(PEAK, math.ceil(least))) if others is None else load
        self.others = resampled(self.peak, long_s, options.seed) if others is None else others
        self._rows = sum(self.peak.rows) / len(self.peak.rows) if self.peak.rows else 1.0  # of a request
        self.tried: dict[tuple[int, int], ReplayResult] = {}
        self.requests = 0  # simulated

    # ---- simulations

    def at(self, instances: int, batch: int) -> ReplayResult:
        """The result of the settings at the peak."""
        key = (instances, batch)
        if key not in self.tried:
            self.tried[key] = self._replay(self.peak, instances, batch)
        return self.tried[key]

    def judged(self, instances: int, batch: int) -> ReplayResult:
        """The result of the settings for the other arrivals."""
        return self._replay(self.others, instances, batch)

    def _replay(self, load: OpenLoop, instances: int, batch: int) -> ReplayResult:
        o = self.options
        self.requests += len(load.arrivals)
        more = {"sizes": o.sizes, "max_tokens": o.max_tokens, "handover_s": o.handover_s, "seed": o.seed}
        return replay(load, self.service, o.slo, o.policy, batch, instances, **more)  # type: ignore[arg-type]

    # ---- the search

    def plan(self) -> CapacityPlan:
        """The plan. Raises ConfigError if the requests are too few to judge the SLO."""
        best: tuple[int, int] | None = None
        for batch in sorted(self.options.batches, reverse=True):  # the largest needs the fewest, nearly always
            best = self._better(best, batch)
        most = self.options.most - self.options.failures
        while best is not None and not self.judged(*best).met:
            instances, batch = best
            best = (min(most, instances + max(1, instances // 200)), batch) if instances < most else None
        return self._finish(best or self._nearest(), met=best is not None)

    def _better(self, best: tuple[int, int] | None, batch: int) -> tuple[int, int] | None:
        """The better one of `best` and the fewest instances for a batch ceiling."""
        most = self.options.most - self.options.failures if best is None else best[0]
        found = self._fewest(batch, most)
        if found is None or best is None:
            return best if found is None else (found, batch)
        rank = {(n, b): (n, tail(self.at(n, b), self.options.slo), b) for n, b in (best, (found, batch))}
        return min(rank, key=lambda key: rank[key])

    def _fewest(self, batch: int, most: int) -> int | None:
        """The fewest instances, at most `most`, that meet the SLO with this ceiling; None if they do not. To half a
        percent."""
        low, high = self.floor(batch) - 1, self.floor(batch)  # the first does not meet it
        if high > most:
            return None
        if not self._meets(high, batch):
            if not self._meets(most, batch):
                return None
            low, step = high, 1
            while (high := min(most, low + step)) < most and not self._meets(high, batch):
                low, step = high, 2 * step
        while high - low > max(1, high // 200):
            middle = (low + high) // 2
            low, high = (low, middle) if self._meets(middle, batch) else (middle, high)
        return high

    def floor(self, batch: int) -> int:
        """The fewest instances that a plan may have: full batches need them at the mean rate of the peak."""
        return max(1, math.ceil(self._peak_rate / LOAD / self._capacity(1, batch)))

    def _capacity(self, instances: int, batch: int) -> float:
        """Rows per second of full batches."""
        return self.service.capacity(instances, *self.peak.full_batch(batch, self.options.max_tokens))

    @property
    def _peak_rate(self) -> float:
        """Rows per second, in the mean."""
        arrivals = self.peak.arrivals
        return self._rows * len(arrivals) / max(arrivals[-1], _TINY)

    def _meets(self, instances: int, batch: int) -> bool:
        result = self.at(instances, batch)
        if any(clause.met is None for clause in result.slo):
            unknown = next(clause.text for clause in result.slo if clause.met is None)
            raise ConfigError(
                f"{len(self.peak.arrivals):,} requests are too few to judge {unknown}; give more arrivals, or a"
                " longer --seconds"
            )
        return result.met is True

    def _nearest(self) -> tuple[int, int]:
        """The settings with the lowest tail, or about it with fewer instances; with the most responses if none keep
        up."""
        most, slo = self.options.most - self.options.failures, self.options.slo
        batch = min(self.options.batches, key=lambda batch: tail(self.at(most, batch), slo))
        if not self.at(most, batch).keeps_up:
            return max(self.tried, key=lambda key: self.tried[key].throughput)
        least, n = tail(self.at(most, batch), slo), self.floor(batch)
        while n < most and tail(self.at(n, batch), slo) > ALIKE * least:
            n *= 2
        return min(key for key, one in self.tried.items() if tail(one, slo) <= ALIKE * least)

    # ---- the plan

    def _finish(self, found: tuple[int, int], *, met: bool) -> CapacityPlan:
        o, (needed, batch) = self.options, found
        instances = needed + o.failures
        left = instances - max(1, o.failures)
        limit = self._limit(needed, batch) if met else None
        for factor in _SWEEP:
            self.at(min(o.most, max(self.floor(batch), math.ceil(factor * instances))), batch)
        settings = SimulationSettings(
            slots=instances, depth=DEPTH, handover_s=o.handover_s, max_batch_size=batch, slo_s=o.slo.latency_s,
            seed=o.seed, sizes=self.at(instances, batch).sizes, lengths=bool(self.load.lengths),
            max_tokens=o.max_tokens,
        )  # fmt: skip
        self.requests += len(self.load.arrivals) * (1 if o.start_s is None else 2)
        day = profile(simulated(self.service, o.policy.make(), self.load, settings))
        memory = o.memory_bytes or self.curve.memory_bytes
        hour = None if o.price is None else o.price * instances
        million = None if hour is None else hour * day.seconds / 3600 / day.requests * 1e6
        return CapacityPlan(
            met=met,
            slo=o.slo.text,
            instances=instances,
            needed=needed,
            batch=batch,
            most=o.most,
            chosen=self.judged(instances, batch),
            degraded=self.judged(left, batch) if left else None,
            limit=PlanLimit(limit.offered, limit.offered / needed, limit.busy, limit.wait_s or 0.0) if limit else None,
            full_rate=self._capacity(instances, batch) / self._rows,
            day=day,
            autoscaled=None if o.start_s is None else scaled(self.load, self.service, settings, o),
            tried=sorted(self.tried.values(), key=lambda one: (one.batch, one.instances)),
            notes=self._notes(batch),
            cost=PlanCost(None if memory is None else memory * instances, hour, million),
        )

    def _limit(self, instances: int, batch: int) -> ReplayResult:
        """The result at the highest rate that the SLO allows, for arrivals of the shape of the others."""
        best = self.judged(instances, batch)
        peak, low = self.others, 1.0
        high = max(1.0, LOAD * best.capacity / self._peak_rate)
        while high - low > _PRECISION * low:
            middle = (low + high) / 2
            faster = OpenLoop([t / middle for t in peak.arrivals], peak.rows, peak.lengths)
            result = self._replay(faster, instances, batch)
            if result.met:
                low, best = middle, result
            else:
                high = middle
        return best

    def _notes(self, batch: int) -> list[str]:
        """What to know about the arrivals and the simulation."""
        found = list(self.curve.notes)
        count, seen = len(self.load.arrivals), len(self.peak.arrivals)
        if seen < count:
            found.append(
                f"planned for the busiest {number(self.peak.arrivals[-1])} s with {seen:,} of {count:,} requests"
            )
        elif count < FEW:
            found.append(f"only {count:,} requests were simulated: a tail of so few is rough")
        work, unit = self.peak.full_batch(batch, self.options.max_tokens)[1], "tokens" if self.peak.lengths else "rows"
        if self.curve.largest is not None and work > self.curve.largest:
            found.append(
                f"the largest measured batch has {self.curve.largest} {unit}: the time of {work:.0f} is extrapolated"
            )
        return found


def useful(
    batches: Sequence[int], curve: CostCurve, slo: Slo, handover_s: float, work: Callable[[int], float] = float
) -> list[int]:
    """The ceilings whose batches, of `work(ceiling)` rows or tokens, end within the SLO, at least one. Raises
    ConfigError if not even one row does."""
    limit_s, one_s = slo.latency_s, curve.seconds(work(1))
    assert limit_s is not None, "the command requires a latency"
    if limit_s <= one_s + handover_s:
        raise ConfigError(
            f"SLO {slo.text}: one row alone takes {seconds(one_s + handover_s)} ({seconds(one_s)} and a hand-over of"
            f" {seconds(handover_s)}), so no instance count meets it; allow more time, or make the model faster"
        )
    return [n for n in batches if curve.seconds(work(n)) + handover_s < limit_s] or [min(batches)]


def objective_of(slo: Slo) -> Objective:
    """The latency objective by which settings are ranked: the one that limits goodput."""
    return next(o for o in slo.objectives if o.is_latency and o.limit == slo.latency_s)


def tail(result: ReplayResult, slo: Slo) -> float:
    """The value of that objective; infinite if it is unknown or the settings do not keep up."""
    value = measured_value(objective_of(slo).name, Measurement(load=Load(mode="open"), latency=result.latency))
    return value if value is not None and result.keeps_up else math.inf


# ---- all arrivals


def busiest(load: OpenLoop, most: int = PEAK) -> OpenLoop:
    """The part of the load with the most rows per second, of `most` requests, from time 0. The part before it, which a
    simulation excludes as its warm-up, comes with it."""
    arrivals, rows, lengths = load.arrivals, load.rows, load.lengths
    if len(arrivals) <= most:
        return load
    t = np.frombuffer(arrivals, float) if isinstance(arrivals, array) else np.asarray(arrivals, float)
    total = np.arange(len(t) + 1) if not rows else np.concatenate(([0], np.cumsum(np.asarray(rows))))
    counted = round(most * (1 - WARM))
    spans = np.maximum(t[counted - 1 :] - t[: len(t) - counted + 1], _TINY)
    start = int(np.argmax((total[counted:] - total[:-counted]) / spans))
    end, before_s = start + counted, spans[start] * WARM / (1 - WARM)
    begin = max(int(np.searchsorted(t, t[start] - before_s)), end - most, 0)
    origin = t[begin]
    times = [float(x - origin) for x in t[begin:end]]
    return OpenLoop(times, list(rows[begin:end]) if rows else (), lengths[begin:end])


def resampled(load: OpenLoop, block_s: float, seed: int) -> OpenLoop:
    """Arrivals of the same shape: each block of about `block_s` seconds is that block or a neighbour, by chance. So the
    slow changes of the rate and the bursts within a block stay. (Local block bootstrap: Paparoditis and Politis,
    2002.)"""
    t = np.asarray(load.arrivals, float)
    count = max(1, int(t[-1] / block_s))
    edges = np.linspace(0.0, t[-1], count + 1)
    starts = np.searchsorted(t, edges)
    starts[-1] = len(t)
    near = np.random.default_rng(seed).integers(-NEAR, NEAR + 1, count)
    places = np.clip(np.arange(count) + near, 0, count - 1)
    which = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in places])
    moved = np.repeat(edges[:-1] - edges[places], starts[places + 1] - starts[places])
    rows, lengths = ([each[k] for k in which] if each else () for each in (load.rows, load.lengths))
    return OpenLoop((t[which] + moved).tolist(), rows, lengths)


def holes(arrivals: Sequence[float]) -> tuple[float, float, int]:
    """(seconds and start of the longest gap, number of gaps) of gaps that are too long to be chance."""
    if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        return 0.0, 0.0, 0
    t = np.asarray(arrivals, float)
    gaps = np.diff(t)
    found = int(np.count_nonzero(gaps > max(HOLE * gaps.mean(), HOLE_SHARE * (t[-1] - t[0]))))
    at = int(np.argmax(gaps))
    return float(gaps[at]), float(t[at]), found


def profile(simulation: Simulation) -> DayProfile:
    """The simulation by time of arrival and of run."""
    done = np.asarray(simulation.done, float).reshape(-1, 2)
    end = max(float(done[:, 0].max()), _TINY)
    bin_s, bins = end / BINS, range(BINS)
    places = np.minimum((done[:, 0] / bin_s).astype(int), BINS - 1)
    took = done[:, 1] - done[:, 0]
    busy = np.zeros(BINS + 1)
    for start, _, run_s in simulation.batches:  # a batch may last over several bins
        for k in range(min(int(start / bin_s), BINS), min(int((start + run_s) / bin_s), BINS) + 1):
            busy[k] += min(start + run_s, (k + 1) * bin_s) - max(start, k * bin_s)
    tails = [np.sort(took[places == k]).tolist() for k in bins]
    return DayProfile(
        bin_s=bin_s,
        seconds=end,
        requests=len(done),
        latency=latency_of(np.sort(took).tolist()),
        rates=[len(tail) / bin_s for tail in tails],
        busy=[float(min(1.0, share / bin_s / simulation.settings.slots)) for share in busy[:BINS]],
        p99_s=[percentile(tail, 0.99) if enough(len(tail), 0.99) else None for tail in tails],
    )


def scaled(load: OpenLoop, service: ServiceTime, settings: SimulationSettings, options: PlanOptions) -> ScalingProfile:
    """The load on instances that `[models.NAME.autoscale]` with the keys of `options` starts and ends;
    `settings.slots`, the planned number, are up at its beginning."""
    start_s, spare = options.start_s or 0.0, options.spare
    most = math.ceil(SCALED * settings.slots) + spare
    config = AutoscaleConfig(max=most, slo_s=settings.slo_s, spare=spare, headroom=options.headroom)
    limits = limits_of(config, BatchingConfig())
    found = simulate_scaling(service, load, settings, limits, start_s=start_s)
    assert settings.slo_s is not None
    return ScalingProfile(
        fewest=limits.fewest,
        most=limits.most,
        start_s=start_s,
        instance_s=found.worker_s,
        fixed_s=settings.slots * load.arrivals[-1],
        late=found.late(settings.slo_s),
        numbers=list(found.numbers),
    )
