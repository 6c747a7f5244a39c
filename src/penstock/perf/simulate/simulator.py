"""Simulates a load on a virtual clock: the scheduler that serves, and the autoscaler that scales.

`Simulation` is the clock: a heap of calls at times. Its subclasses add what else happens in time.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from msgspec import Struct

from penstock.config.schema import BatchingConfig
from penstock.core.batching.autoscale import DAY_S, AutoscaleLimits, Autoscaler, LoadReading
from penstock.core.batching.entry import INF, Dispatch, Entry, Event, Outcome
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler
from penstock.core.engine.rules import policy_of

WARM: Final = 0.15  # the share of a simulation that is warm-up and excluded from results
UNBOUNDED: Final = 2**62
LONG_ROW: Final = 128  # a choice: tokens, for the warm-up of a model without `max_tokens`
_OK: Final = Outcome()


class ServiceTime(Struct, frozen=True):
    """Batch time of n rows: (a + b*n) seconds with log-normal jitter; a share `tail` takes 3 times as long."""

    a: float
    b: float
    jitter: float = 0.05
    tail: float = 0.002

    def t(self, rows: float) -> float:
        """Seconds without jitter."""
        return self.a + self.b * rows

    def capacity(self, slots: int, rows: float, work: float | None = None) -> float:
        """Rows per second of full batches of so many rows on all slots; `work`: their tokens."""
        return slots * rows / self.t(work or rows)

    def draw(self, rows: int, rng: random.Random) -> float:
        """Random seconds of one batch."""
        t = self.t(rows)
        if self.jitter:
            t *= math.exp(rng.gauss(0, self.jitter))
        if self.tail and rng.random() < self.tail:
            t *= 3
        return t

    def profile(self, max_batch_size: int, sizes: Sequence[int] = ()) -> list[tuple[int, float]]:
        """Warm-up samples: the sizes, or 1, 2, 4 ... max_batch_size, three runs each."""
        rng, sizes = random.Random(5), sizes or [2**k for k in range(max_batch_size.bit_length())]
        return [(n, self.t(n) * math.exp(rng.gauss(0, self.jitter))) for n in sizes for _ in range(3)]


class OpenLoop(Struct, frozen=True):
    """Requests at fixed times, in order. `rows` has the size of each request; every request has one row if empty. With
    `lengths` each row has so many tokens, on which the service time then depends."""

    arrivals: Sequence[float]
    rows: Sequence[int] = ()
    lengths: Sequence[int] = ()

    def full_batch(self, max_batch_size: int, max_tokens: int | None) -> tuple[float, float]:
        """Rows of a full batch, and what its time depends on: its rows, or its tokens without padding."""
        if not self.lengths:
            return max_batch_size, max_batch_size
        mean = sum(self.lengths) / len(self.lengths)
        rows = min(float(max_batch_size), max(1.0, (max_tokens or INF) / mean))
        return rows, rows * mean


class SimulationSettings(Struct, frozen=True, kw_only=True):
    """The simulated server.

    `slots` instances receive batches up to `depth` ahead. `handover_s` passes between dispatch and run and between the
    end of the run and the response, together. `slo_s` is the latency that goodput allows. `seed` seeds every random
    draw. With `lengths` batches are padded to their longest row and hold up to `max_tokens`.
    """

    slots: int = 1
    depth: int = 1
    max_batch_size: int = 64
    sizes: tuple[int, ...] = ()
    handover_s: float = 0.0
    slo_s: float | None = None
    seed: int = 1
    lengths: bool = False
    max_tokens: int | None = None


class SimulationResult(Struct, frozen=True, kw_only=True):
    """The steady part of a simulation: sorted latencies, and requests per second.

    `goodput` counts responses within the SLO; `busy` is a share of the slots' time; `run_s` is the mean run time of the
    batch of a row; `padding` is a share of the tokens that ran.
    """

    latencies_s: Sequence[float]
    throughput: float
    goodput: float
    mean_batch: float
    busy: float
    run_s: float
    padding: float = 0.0


def simulate(
    service: ServiceTime, policy: BatchPolicy, load: OpenLoop, settings: SimulationSettings
) -> SimulationResult:
    """The result of `policy` under a load. The same arguments give the same result."""
    simulation = simulated(service, policy, load, settings)
    return simulation.result(simulation.last_arrival_s)


def simulated(service: ServiceTime, policy: BatchPolicy, load: OpenLoop, settings: SimulationSettings) -> Simulation:
    """The simulation of `policy` under a load after its end, with each batch and each response."""
    simulation = Simulation(service, primed(service, policy, settings), settings)
    simulation.run(load)
    return simulation


def primed(service: ServiceTime, policy: BatchPolicy, settings: SimulationSettings) -> Scheduler:
    """A scheduler without bounds that has seen a warm-up of the service."""
    scheduler = unbounded(policy, settings)
    tokens = settings.max_tokens or LONG_ROW * settings.max_batch_size
    most = tokens if settings.lengths else settings.max_batch_size
    scheduler.prime(service.profile(most, () if settings.lengths else settings.sizes))
    return scheduler


def unbounded(policy: BatchPolicy, settings: SimulationSettings, **more: Any) -> Scheduler:
    """A scheduler without bounds; `more` are further parameters of it."""
    return Scheduler(
        policy,
        max_batch_size=settings.max_batch_size,
        max_queue=UNBOUNDED,
        max_queue_bytes=UNBOUNDED,
        depth=settings.depth,
        horizon_s=settings.slo_s or 30.0,
        sizes=settings.sizes,
        lengths=settings.lengths,
        max_tokens=settings.max_tokens,
        **more,
    )


class Simulation:
    """One simulation: the clock with its calls, and a record of what happened. The tests add other loads in a subclass.

    With `endless` calls it ends with the last response instead of the last call.
    """

    endless = False

    def __init__(self, service: ServiceTime, scheduler: Scheduler, settings: SimulationSettings) -> None:
        self.service, self.scheduler, self.settings = service, scheduler, settings
        self.ladder = Ladder(settings.sizes) if settings.sizes else None
        self.rng = random.Random(settings.seed + 7)  # of service times
        self.calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []  # (time, order, call, arguments)
        self.order = itertools.count()
        self.requests, self.last_arrival_s = 0, 0.0
        self.free_s: dict[int, float] = {}  # slot -> when its latest batch has run
        self.run_s: dict[int, float] = {}  # batch -> run time
        self.batches: list[tuple[float, int, float]] = []  # (start, rows, seconds)
        self.arrived: dict[int, float] = {}  # unanswered request -> arrival
        self.left: dict[int, int] = {}  # request that was cut -> unanswered rows
        self.done: list[tuple[float, float]] = []  # (arrival, response)
        self.tokens = [0, 0]  # of requests; with padding
        for slot in range(settings.slots):
            scheduler.slot_up(slot, 0.0)

    def run(self, load: OpenLoop, horizon_s: float = INF) -> float:
        """Runs until the horizon or until nothing is left to do; returns the time at the end."""
        calls, scheduler, arrivals, rows = self.calls, self.scheduler, iter(load.arrivals), load.rows
        lengths = load.lengths
        arrival, last = next(arrivals, INF), 0.0
        while True:
            wake = scheduler.wake_at
            due = calls[0][0] if calls else INF
            now = min(due, arrival, INF if wake is None else wake)
            if now > horizon_s or now == INF or (self.endless and arrival == INF and not self.arrived):
                return min(now, horizon_s) if horizon_s < INF else last
            last = now
            if arrival <= now:
                place = self.requests
                self.arrive(now, rows[place] if rows else 1, length=lengths[place] if lengths else 0)
                arrival = next(arrivals, INF)
            elif due <= now:
                _, _, call, arguments = heappop(calls)
                call(*arguments, now)
            for event in scheduler.poll(now):
                self.handle(event, now)

    def at(self, t: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls back at a time, with these arguments and the time; in the order of these calls if times are equal."""
        heappush(self.calls, (t, next(self.order), call, arguments))

    def arrive(self, now: float, rows: int = 1, deadline_s: float = INF, length: int = 0) -> int:
        """Offers the next request and returns its id."""
        self.requests = id = self.requests + 1
        self.arrived[id] = self.last_arrival_s = now
        entry = Entry(id=id, rows=rows, arrival_s=now, deadline_s=now + deadline_s, length=length)
        self.scheduler.offer(entry, now)
        return id

    def handle(self, event: Event, now: float) -> None:
        assert type(event) is Dispatch, "no request has a deadline, and the queue has no bound"
        end = self.start(event, now + self.settings.handover_s / 2)
        self.at(end, self.answer, event.batch_id, event.entries)

    def start(self, batch: Dispatch, ready: float) -> float:
        """The time at which the server has the results of a batch that is ready to run at `ready`."""
        work = batch.rows if self.ladder is None else self.ladder.up(batch.rows)
        if self.settings.lengths:
            work *= max(e.length for e in batch.entries)
            self.tokens[0] += sum(e.rows * e.length for e in batch.entries)
            self.tokens[1] += work
        seconds = self.service.draw(work, self.rng)
        start = max(ready, self.free_s.get(batch.slot, 0.0))
        self.free_s[batch.slot] = end = start + seconds
        self.run_s[batch.batch_id] = seconds
        self.batches.append((start, batch.rows, seconds))
        return end + self.settings.handover_s / 2

    def outcome(self, run_s: float, entries: Sequence[Entry]) -> Outcome:
        """What the scheduler learns about a finished batch."""
        return Outcome("ok", run_s) if self.settings.handover_s else _OK

    def answer(self, batch: int, entries: list[Entry], now: float) -> None:
        self.scheduler.complete(batch, self.outcome(self.run_s.pop(batch), entries), now)
        for place, entry in enumerate(entries):
            if entry.parent is None or self._completes(entry, entry.parent):
                self.answered(entry, place, now)

    def answered(self, entry: Entry, place: int, now: float) -> None:
        """Records the response to a request; `place` is its place in the batch."""
        self.done.append((self.arrived.pop(entry.id), now))

    def _completes(self, part: Entry, request: Entry) -> bool:
        """Whether this part completes a request that was cut; a part of a dropped request completes nothing."""
        if part.id not in self.arrived:
            return False
        left = self.left.pop(part.id, request.rows) - part.rows
        if left:
            self.left[part.id] = left
        return not left

    def result(self, end: float) -> SimulationResult:
        """The figures of the steady part until `end`."""
        t0 = WARM * end
        span = (end - t0) or INF
        steady = [f - t for t, f in self.done if t0 <= t <= end]
        batches = [(n, d) for t, n, d in self.batches if t0 <= t <= end]
        rows = sum(n for n, _ in batches)
        return SimulationResult(
            latencies_s=sorted(steady),
            throughput=sum(1 for _, f in self.done if t0 <= f <= end) / span,
            goodput=sum(1 for x in steady if x <= (self.settings.slo_s or INF)) / span,
            mean_batch=rows / max(1, len(batches)),
            busy=min(1.0, sum(d for _, d in batches) / span / self.settings.slots),
            run_s=sum(n * d for n, d in batches) / max(1, rows),
            padding=1 - self.tokens[0] / max(1, self.tokens[1]) if self.settings.lengths else 0.0,
        )


# ---- instances that follow the load


class ScalingResult(Struct, frozen=True, kw_only=True):
    """A simulation's sorted latencies, the seconds of all instances with their starts, and each (time, number)."""

    latencies_s: Sequence[float]
    worker_s: float
    numbers: Sequence[tuple[float, int]]

    def late(self, slo_s: float) -> float:
        """The share of requests that took longer than `slo_s`."""
        latencies = self.latencies_s
        return 1 - bisect_left(latencies, slo_s) / len(latencies) if latencies else 0.0


def simulate_scaling(
    service: ServiceTime,
    load: OpenLoop,
    settings: SimulationSettings,
    limits: AutoscaleLimits,
    *,
    start_s: float,
    policy: Autoscaler | None = None,
) -> ScalingResult:
    """The result of scaling by `policy`, an Autoscaler by default. An instance is up `start_s` after the decision. The
    time 0 is midnight."""
    simulation = _ScalingSimulation(service, settings, limits, policy or Autoscaler(limits), start_s)
    return simulation.scale(load)


class _ScalingSimulation(Simulation):
    """One simulation. `settings.slots` instances are up at its beginning."""

    endless = True

    def __init__(
        self,
        service: ServiceTime,
        settings: SimulationSettings,
        limits: AutoscaleLimits,
        policy: Autoscaler,
        start_s: float,
    ) -> None:
        super().__init__(service, primed(service, policy_of(BatchingConfig()), settings), settings)
        self.limits, self.policy, self.start_s = limits, policy, start_s
        self.present = dict.fromkeys(range(settings.slots), 0.0)  # slot -> decision to start it
        self.slots = itertools.count(settings.slots)
        self.worker_s = 0.0  # of instances that ended
        self.numbers = [(0.0, settings.slots)]

    def scale(self, load: OpenLoop) -> ScalingResult:
        """Handles the load and counts what the instances cost until its last response."""
        self.at(0.0, self._tick)
        end = self.run(load)
        worker_s = self.worker_s + sum(end - since for since in self.present.values())
        latencies = sorted(response - arrival for arrival, response in self.done)
        return ScalingResult(latencies_s=latencies, worker_s=worker_s, numbers=self.numbers)

    def _tick(self, now: float) -> None:
        self._decide(now)
        self.at(now + self.limits.tick_s, self._tick)

    def _started(self, slot: int, now: float) -> None:
        if slot in self.present:
            self.scheduler.slot_up(slot, now)
            self.policy.started(now - self.present[slot])

    def _decide(self, now: float) -> None:
        scheduler, present, rows = self.scheduler, self.present, self.settings.max_batch_size
        reading = LoadReading(
            self.requests, scheduler.queued_rows, scheduler.running_rows, len(present), scheduler.up,
            rows, scheduler.seconds(rows),
        )  # fmt: skip
        number = self.policy.decide(reading, now, now % DAY_S)
        if number == len(present):
            return
        for _ in range(number - len(present)):
            slot = next(self.slots)
            present[slot] = now
            self.at(now + self.start_s, self._started, slot)
        for slot in sorted(present)[number:]:  # the youngest; one that has not started costs nothing more
            self.worker_s += max(now, self.free_s.get(slot, now)) - present.pop(slot)
            scheduler.slot_retired(slot, now)
        self.numbers.append((now, number))
