"""Simulates a batching policy under a load: the scheduler that serves, driven on a virtual clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from msgspec import Struct

from penstock.core.batching.entry import INF, Dispatch, Entry, Event, Outcome
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler

WARM: Final = 0.15  # the share of a simulation that is warm-up and excluded from results
UNBOUNDED: Final = 2**62
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

    def capacity(self, slots: int, max_batch_size: int) -> float:
        """Rows per second of full batches on all slots."""
        return slots * max_batch_size / self.t(max_batch_size)

    def draw(self, rows: int, rng: random.Random) -> float:
        """Random seconds of one batch."""
        t = self.t(rows)
        if self.jitter:
            t *= math.exp(rng.gauss(0, self.jitter))
        if self.tail and rng.random() < self.tail:
            t *= 3
        return t

    def profile(self, max_batch_size: int) -> list[tuple[int, float]]:
        """Warm-up samples: sizes 1, 2, 4 ... max_batch_size, three runs each."""
        rng, sizes = random.Random(5), [2**k for k in range(max_batch_size.bit_length())]
        return [(n, self.t(n) * math.exp(rng.gauss(0, self.jitter))) for n in sizes for _ in range(3)]


class OpenLoop(Struct, frozen=True):
    """Requests at fixed times, in order. `rows` has the size of each request; every request has one row if empty."""

    arrivals: Sequence[float]
    rows: Sequence[int] = ()


class SimulationSettings(Struct, frozen=True, kw_only=True):
    """The simulated server.

    `slots` instances receive batches up to `depth` ahead. `handover_s` passes between dispatch and run and between the
    end of the run and the answer, together. `slo_s` is the latency that goodput allows. `seed` seeds every random draw.
    """

    slots: int = 1
    depth: int = 1
    max_batch_size: int = 64
    handover_s: float = 0.0
    slo_s: float | None = None
    seed: int = 1


class SimulationResult(Struct, frozen=True, kw_only=True):
    """The steady part of a simulation: sorted latencies, and requests per second.

    `goodput` counts answers within the SLO; `busy` is a share of the slots' time; `run_s` is the mean run time of the
    batch of a row.
    """

    latencies_s: Sequence[float]
    throughput: float
    goodput: float
    mean_batch: float
    busy: float
    run_s: float


def simulate(
    service: ServiceTime, policy: BatchPolicy, load: OpenLoop, settings: SimulationSettings
) -> SimulationResult:
    """The result of `policy` under a load. The same arguments give the same result."""
    simulation = simulated(service, policy, load, settings)
    return simulation.result(simulation.last_arrival_s)


def simulated(service: ServiceTime, policy: BatchPolicy, load: OpenLoop, settings: SimulationSettings) -> Simulation:
    """The simulation of `policy` under a load after its end, with each batch and each answer."""
    simulation = Simulation(service, primed(service, policy, settings), settings)
    simulation.run(load)
    return simulation


def primed(service: ServiceTime, policy: BatchPolicy, settings: SimulationSettings) -> Scheduler:
    """A scheduler without bounds that has seen a warm-up of the service."""
    scheduler = Scheduler(
        policy,
        max_batch_size=settings.max_batch_size,
        max_queue=UNBOUNDED,
        max_queue_bytes=UNBOUNDED,
        depth=settings.depth,
        horizon_s=settings.slo_s or 30.0,
    )
    scheduler.prime(service.profile(settings.max_batch_size))
    return scheduler


class Simulation:
    """One simulation: the event loop and what it records. The tests add other loads in a subclass."""

    def __init__(self, service: ServiceTime, scheduler: Scheduler, settings: SimulationSettings) -> None:
        self.service, self.scheduler, self.settings = service, scheduler, settings
        self.rng = random.Random(settings.seed + 7)  # of service times
        self.events: list[tuple[float, int, int, list[Entry] | None]] = []  # (time, order, batch or client, entries)
        self.order = itertools.count()
        self.requests, self.last_arrival_s = 0, 0.0
        self.free_s: dict[int, float] = {}  # slot -> when its latest batch has run
        self.run_s: dict[int, float] = {}  # batch -> run time
        self.batches: list[tuple[float, int, float]] = []  # (start, rows, seconds)
        self.arrived: dict[int, float] = {}  # unanswered request -> arrival
        self.left: dict[int, int] = {}  # request that was cut -> unanswered rows
        self.done: list[tuple[float, float]] = []  # (arrival, answer)
        for slot in range(settings.slots):
            scheduler.slot_up(slot, 0.0)

    def run(self, load: OpenLoop, horizon_s: float = INF) -> float:
        """Handles events until the horizon or until nothing is left; returns the time at the end."""
        events, scheduler, arrivals, rows = self.events, self.scheduler, iter(load.arrivals), load.rows
        arrival, last = next(arrivals, INF), 0.0
        while True:
            wake = scheduler.wake_at
            event = events[0][0] if events else INF
            now = min(event, arrival, INF if wake is None else wake)
            if now > horizon_s or now == INF or self.over(arrival):
                return min(now, horizon_s) if horizon_s < INF else last
            last = now
            if arrival <= now:
                self.arrive(now, rows[self.requests] if rows else 1)
                arrival = next(arrivals, INF)
            elif event <= now:
                _, _, number, entries = heappop(events)
                if entries is None:
                    self.client_event(number, now)
                else:
                    self.answer(number, entries, now)
            for each in scheduler.poll(now):
                self.handle(each, now)

    def over(self, arrival: float) -> bool:
        """Whether the simulation ends before its events do; `arrival` is the next one, INF without any."""
        return False

    def client_event(self, number: int, now: float) -> None:
        """Handles an event without entries, which only other loads schedule."""
        raise NotImplementedError

    def schedule(self, t: float, number: int, entries: list[Entry] | None = None) -> None:
        heappush(self.events, (t, next(self.order), number, entries))

    def arrive(self, now: float, rows: int = 1, deadline_s: float = INF) -> int:
        """Offers the next request and returns its id."""
        self.requests = id = self.requests + 1
        self.arrived[id] = self.last_arrival_s = now
        self.scheduler.offer(Entry(id=id, rows=rows, arrival_s=now, deadline_s=now + deadline_s), now)
        return id

    def handle(self, event: Event, now: float) -> None:
        assert type(event) is Dispatch, "no request has a deadline, and the queue has no bound"
        self.schedule(self.start(event, now + self.settings.handover_s / 2), event.batch_id, event.entries)

    def start(self, batch: Dispatch, ready: float) -> float:
        """The time at which the server has the answers of a batch that is ready to run at `ready`."""
        seconds = self.service.draw(batch.rows, self.rng)
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
        """Records the last answer of a request; `place` is its place in the batch."""
        self.done.append((self.arrived.pop(entry.id), now))

    def _completes(self, part: Entry, request: Entry) -> bool:
        """Whether this part completes a request that was cut; a part of a dropped request completes nothing."""
        if part.id not in self.arrived:
            return False
        left = self.left.pop(part.id, request.rows) - part.rows
        if left:
            self.left[part.id] = left
        return not left

    def result(self, end: float, *, closed: bool = False) -> SimulationResult:
        """The figures of the steady part until `end`. Only a closed loop counts later arrivals."""
        t0 = WARM * end
        span = (end - t0) or INF
        steady = [f - t for t, f in self.done if t0 <= t <= end]
        batches = [(n, d) for t, n, d in self.batches if t0 <= t <= end]
        rows = sum(n for n, _ in batches)
        return SimulationResult(
            latencies_s=sorted(f - t for t, f in self.done if t >= t0 and (closed or t <= end)),
            throughput=sum(1 for _, f in self.done if t0 <= f <= end) / span,
            goodput=sum(1 for x in steady if x <= (self.settings.slo_s or INF)) / span,
            mean_batch=rows / max(1, len(batches)),
            busy=min(1.0, sum(d for _, d in batches) / span / self.settings.slots),
            run_s=sum(n * d for n, d in batches) / max(1, rows),
        )
