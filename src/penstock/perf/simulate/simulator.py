"""Simulates a batching policy under a load: the scheduler that serves, driven on a virtual clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from msgspec import Struct

from penstock.core.batching.entry import INF, Dispatch, Entry, Outcome
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler

WARM: Final = 0.15  # the share of a simulation that is warm-up and excluded from results
_UNBOUNDED = 2**62
_BULK = -1  # stands for a client's number
_RETRY_S = 0.010  # a closed-loop client retries this long after its request was dropped
_OK = Outcome()


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


class ThinkTime(Struct, frozen=True):
    """A closed-loop client's pause before its next request: fixed + exponential(mean) + its position in the batch."""

    fixed_s: float = 0.0003
    mean_s: float = 0.0003
    position_s: float = 0.00002


class OpenLoop(Struct, frozen=True):
    """Requests at fixed times, in order. `rows` has the size of each request; every request has one row if empty."""

    arrivals: Iterable[float]
    rows: Sequence[int] = ()


class ClosedLoop(Struct, frozen=True):
    """`clients` that each wait for an answer before the next request, until `horizon_s`."""

    clients: int
    horizon_s: float
    think: ThinkTime = ThinkTime()


class BulkLoad(Struct, frozen=True):
    """A bulk job that runs alongside the load and keeps `in_flight` requests of `rows` rows in a lower class.

    Each answer is followed by the next request after `think_s`. A `divisible` request may be cut to fill a batch.
    """

    in_flight: int
    rows: int
    priority: int = 1
    think_s: float = 0.001
    divisible: bool = True


class SimulationSettings(Struct, frozen=True, kw_only=True):
    """The simulated server.

    `slots` instances receive batches up to `depth` ahead. `handover_s` passes between dispatch and run and between the
    end of the run and the answer, together. Each row takes `prepare_s` before its batch runs, possibly while another
    batch runs. `slo_s` is each request's deadline; the scheduler ignores it unless `deadlines`. With `profile` the cost
    model starts from a warm-up. `bulk` adds a bulk job. `seed` seeds every random draw.
    """

    slots: int = 1
    depth: int = 1
    max_batch_size: int = 64
    handover_s: float = 0.0
    prepare_s: float = 0.0
    slo_s: float | None = None
    deadlines: bool = True
    profile: bool = True
    priority: tuple[float, ...] = (0.0,)
    bulk: BulkLoad | None = None
    seed: int = 1


class SimulationResult(Struct, frozen=True):
    """The steady part of a simulation: seconds and requests per second, bulk requests excluded.

    `goodput` counts answers within the SLO, `dropped` is a share of arrivals, `busy` a share of the slots' time.
    `requests` counts every arrival, the warm-up included. `latencies_s` is sorted. `bulk_throughput` is in rows.
    """

    mean_s: float
    p50_s: float
    p99_s: float
    throughput: float
    goodput: float
    dropped: float
    mean_batch: float
    busy: float
    requests: int
    bulk_throughput: float = 0.0
    latencies_s: Sequence[float] = ()


def poisson(rate: float, n: int, rng: random.Random) -> Iterator[float]:
    """Times of n independent arrivals at `rate` per second."""
    t = 0.0
    for _ in range(n):
        t += rng.expovariate(rate)
        yield t


def simulate(
    service: ServiceTime, policy: BatchPolicy, load: OpenLoop | ClosedLoop, settings: SimulationSettings | None = None
) -> SimulationResult:
    """The result of `policy` under a load. The same arguments give the same result."""
    settings = settings or SimulationSettings()
    scheduler = Scheduler(
        policy,
        max_batch_size=settings.max_batch_size,
        max_queue=_UNBOUNDED,
        max_queue_bytes=_UNBOUNDED,
        depth=settings.depth,
        priority=settings.priority,
        horizon_s=settings.slo_s or 30.0,
    )
    if settings.profile:
        scheduler.prime(service.profile(settings.max_batch_size))
    for slot in range(settings.slots):
        scheduler.slot_up(slot, 0.0)
    return _Simulation(service, scheduler, load, settings).run()


class _Instances:
    """The simulated instances: when each of them finishes the batches it received."""

    def __init__(self, service: ServiceTime, settings: SimulationSettings) -> None:
        self.service, self.prepare_s = service, settings.prepare_s
        self.one_way_s = settings.handover_s / 2
        self.rng = random.Random(settings.seed + 7)
        self.prepared_s: dict[int, float] = {}  # slot -> when its latest batch is prepared
        self.free_s: dict[int, float] = {}  # slot -> when its latest batch has run
        self.run_s: dict[int, float] = {}  # batch -> run time
        self.batches: list[tuple[float, int, float]] = []  # (start, rows, seconds)

    def start(self, batch: Dispatch, now: float) -> float:
        """The time at which the server has the answers of a batch that is sent now."""
        seconds = self.service.draw(batch.rows, self.rng)
        ready = max(now + self.one_way_s, self.prepared_s.get(batch.slot, 0.0)) + self.prepare_s * batch.rows
        self.prepared_s[batch.slot] = ready
        start = max(ready, self.free_s.get(batch.slot, 0.0))
        self.free_s[batch.slot] = end = start + seconds
        self.run_s[batch.batch_id] = seconds
        self.batches.append((start, batch.rows, seconds))
        return end + self.one_way_s

    def outcome(self, batch: int, entries: Sequence[Entry]) -> Outcome:
        """What the scheduler learns about a finished batch."""
        run_s = self.run_s.pop(batch)
        rows = sum([e.rows for e in entries])
        return Outcome("ok", run_s, prepare_s=self.prepare_s * rows) if self.one_way_s else _OK


class _BulkJob:
    """The requests of a bulk job; their ids are negative."""

    def __init__(self, load: BulkLoad) -> None:
        self.load = load
        self.last_id = 0
        self.left: dict[int, int] = {}  # request -> unanswered rows
        self.done: list[tuple[float, int]] = []  # (answer, rows)

    def request(self, now: float) -> Entry:
        """The next request."""
        self.last_id = id = self.last_id - 1
        self.left[id] = self.load.rows
        return Entry(
            id=id, rows=self.load.rows, arrival_s=now, priority=self.load.priority, divisible=self.load.divisible
        )

    def answer(self, part: Entry, now: float) -> bool:
        """Records a part of a request; returns whether it completes the request."""
        self.done.append((now, part.rows))
        self.left[part.id] -= part.rows
        if self.left[part.id]:
            return False
        del self.left[part.id]
        return True


class _Record:
    """The requests of a simulation and how each ended."""

    def __init__(self) -> None:
        self.requests = 0
        self.last_arrival_s = 0.0
        self.done: list[tuple[float, float]] = []  # (arrival, answer)
        self.drops: list[float] = []  # arrival

    def result(
        self, instances: _Instances, bulk: _BulkJob | None, slo_s: float, slots: int, end: float | None
    ) -> SimulationResult:
        """The figures of the steady part. `end` is the end of a closed loop; None stands for the last arrival."""
        closed = end is not None
        end = self.last_arrival_s if end is None else end
        t0 = WARM * end
        span = (end - t0) or INF
        latency = sorted(f - t for t, f in self.done if t >= t0 and (closed or t <= end))
        steady = [f - t for t, f in self.done if t0 <= t <= end]
        drops = sum(1 for t in self.drops if t0 <= t <= end)
        batches = [(n, d) for t, n, d in instances.batches if t0 <= t <= end]
        n = len(latency)
        return SimulationResult(
            mean_s=sum(latency) / n if n else INF,
            p50_s=latency[n // 2] if n else INF,
            p99_s=latency[min(n - 1, int(0.99 * n))] if n else INF,
            throughput=sum(1 for _, f in self.done if t0 <= f <= end) / span,
            goodput=sum(1 for x in steady if x <= slo_s) / span,
            dropped=drops / max(1, drops + len(steady)),
            mean_batch=sum(k for k, _ in batches) / max(1, len(batches)),
            busy=min(1.0, sum(d for _, d in batches) / span / slots),
            requests=self.requests,
            bulk_throughput=sum(rows for t, rows in bulk.done if t0 <= t <= end) / span if bulk else 0.0,
            latencies_s=latency,
        )


class _Simulation:
    """One simulation: the event loop."""

    def __init__(
        self,
        service: ServiceTime,
        scheduler: Scheduler,
        load: OpenLoop | ClosedLoop,
        settings: SimulationSettings,
    ) -> None:
        self.scheduler, self.load, self.settings = scheduler, load, settings
        self.rows = load.rows if isinstance(load, OpenLoop) else ()
        self.deadline_s = (settings.slo_s or INF) if settings.deadlines else INF
        self.instances, self.record = _Instances(service, settings), _Record()
        self.bulk = _BulkJob(settings.bulk) if settings.bulk else None
        self.rng = random.Random(settings.seed)
        self.events: list[tuple[float, int, int, list[Entry] | None]] = []  # (time, order, batch or client, entries)
        self.order = itertools.count()
        self.client: dict[int, int] = {}  # closed loop: request -> client
        self.arrived: dict[int, float] = {}  # unanswered request -> arrival
        self.left: dict[int, int] = {}  # request that was cut -> unanswered rows

    def run(self) -> SimulationResult:
        """Runs the load to its end."""
        load, settings = self.load, self.settings
        for _ in range(settings.bulk.in_flight if settings.bulk else 0):
            self._schedule(0.0, _BULK)
        if isinstance(load, ClosedLoop):
            for client in range(load.clients):
                self._schedule(self.rng.random() * 0.005, client)
            end = self._loop(iter(()), load.horizon_s)
        else:
            self._loop(iter(load.arrivals), INF)
            end = None
        return self.record.result(self.instances, self.bulk, settings.slo_s or INF, settings.slots, end)

    def _loop(self, arrivals: Iterator[float], horizon_s: float) -> float:
        """Handles events until the horizon or until nothing is left; returns the time at the end."""
        events, scheduler = self.events, self.scheduler
        arrival, last = next(arrivals, INF), 0.0
        while True:
            wake = scheduler.wake_at
            event = events[0][0] if events else INF
            now = min(event, arrival, INF if wake is None else wake)
            if now > horizon_s or now == INF or (self.bulk and arrival == INF and not self.arrived):
                return min(now, horizon_s) if horizon_s < INF else last
            last = now
            if arrival <= now:
                self._arrive(now, -1)
                arrival = next(arrivals, INF)
            elif event <= now:
                _, _, number, entries = heappop(events)
                if entries is not None:
                    self._answer(number, entries, now)
                elif number == _BULK:
                    assert self.bulk is not None
                    scheduler.offer(self.bulk.request(now), now)
                else:
                    self._arrive(now, number)
            self._poll(now)

    def _schedule(self, t: float, number: int, entries: list[Entry] | None = None) -> None:
        heappush(self.events, (t, next(self.order), number, entries))

    def _arrive(self, now: float, client: int) -> None:
        self.record.requests = id = self.record.requests + 1
        if client >= 0:
            self.client[id] = client
        self.arrived[id] = self.record.last_arrival_s = now
        rows = self.rows[id - 1] if self.rows else 1
        self.scheduler.offer(Entry(id=id, rows=rows, arrival_s=now, deadline_s=now + self.deadline_s), now)

    def _poll(self, now: float) -> None:
        for event in self.scheduler.poll(now):
            if type(event) is Dispatch:
                self._schedule(self.instances.start(event, now), event.batch_id, event.entries)
            else:
                self.record.drops.append(self.arrived.pop(event.id))  # type: ignore[union-attr]
                if self.client:
                    self._schedule(now + _RETRY_S, self.client.pop(event.id))  # type: ignore[union-attr]

    def _answer(self, batch: int, entries: list[Entry], now: float) -> None:
        self.scheduler.complete(batch, self.instances.outcome(batch, entries), now)
        arrived, done, load = self.arrived, self.record.done, self.load
        for j, e in enumerate(entries):
            if e.id < 0:
                assert self.bulk is not None
                if self.bulk.answer(e, now):
                    self._schedule(now + self.bulk.load.think_s, _BULK)
                continue
            if e.parent is not None and not self._completes(e, e.parent):
                continue
            done.append((arrived.pop(e.id), now))
            if isinstance(load, ClosedLoop):
                think = load.think
                pause = think.fixed_s + self.rng.expovariate(1 / think.mean_s) + j * think.position_s
                self._schedule(now + pause, self.client.pop(e.id))

    def _completes(self, part: Entry, request: Entry) -> bool:
        """Whether this part completes a request that was cut; a part of a dropped request completes nothing."""
        if part.id not in self.arrived:
            return False
        left = self.left.pop(part.id, request.rows) - part.rows
        if left:
            self.left[part.id] = left
        return not left
