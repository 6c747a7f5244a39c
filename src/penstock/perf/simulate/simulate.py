"""simulate: what a policy makes of a load, before any machine runs it. Drives the real Scheduler on a virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from penstock.core.batching.entry import INF, Dispatch, Entry, Outcome
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler

_OK = Outcome()
_UNBOUNDED = 2**62
_BULK = -1  # in place of a client's number
_RETRY_S = 0.010  # a closed-loop client comes back so long after its request was dropped


class Service(Struct, frozen=True):
    """Batch time (a + b*n) seconds x log-normal jitter; the share `tail` of the batches takes 3 times as long."""

    a: float
    b: float
    jitter: float = 0.05
    tail: float = 0.002

    def t(self, rows: float) -> float:
        return self.a + self.b * rows

    def capacity(self, slots: int, max_batch_size: int) -> float:
        """Rows a second of full batches on all slots."""
        return slots * max_batch_size / self.t(max_batch_size)

    def draw(self, rows: int, rng: random.Random) -> float:
        t = self.t(rows)
        if self.jitter:
            t *= math.exp(rng.gauss(0, self.jitter))
        if self.tail and rng.random() < self.tail:
            t *= 3
        return t

    def profile(self, max_batch_size: int) -> list[tuple[int, float]]:
        """Warm-up samples: sizes 1, 2, 4 .. max_batch_size, three runs each."""
        rng, sizes = random.Random(5), [2**k for k in range(max_batch_size.bit_length())]
        return [(n, self.t(n) * math.exp(rng.gauss(0, self.jitter))) for n in sizes for _ in range(3)]


class Think(Struct, frozen=True):
    """A closed-loop client's time between an answer and its next request: fixed + exp(mean) + position in the batch."""

    fixed_s: float = 0.0003
    mean_s: float = 0.0003
    position_s: float = 0.00002


class Bulk(Struct, frozen=True):
    """A job beside the load: always `in_flight` requests of `rows` rows and a lower class, each followed by the next
    after `think_s`. `divisible`: a request of them may be cut to fill a batch."""

    in_flight: int
    rows: int
    priority: int = 1
    think_s: float = 0.001
    divisible: bool = True


class SimResult(Struct, frozen=True):
    """Seconds; requests a second; `goodput` counts answers within the slo; `dropped` is a share of what arrived; `busy`
    of the slots' time. All over the steady part, after the first 15 %. `requests` counts every arrival. What is of a
    Bulk is in `bulk_throughput` alone. `latencies_s` are those of all answers, sorted."""

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
    """Times of n independent arrivals, `rate` a second."""
    t = 0.0
    for _ in range(n):
        t += rng.expovariate(rate)
        yield t


def mmpp(
    rate: float, n: int, rng: random.Random, high: float = 3.0, share: float = 0.25, period_s: float = 0.8
) -> Iterator[float]:
    """Times of n bursty arrivals: rate x `high` for a `share` of the time, the rest so that the mean is `rate`."""
    low = (1 - share * high) / (1 - share)
    t, burst, k = 0.0, False, 0
    end = rng.expovariate(1 / (period_s * (1 - share)))
    while k < n:
        gap = rng.expovariate(rate * (high if burst else low))
        if t + gap > end:
            t, burst = end, not burst
            end = t + rng.expovariate(1 / (period_s * (share if burst else 1 - share)))
            continue
        t += gap
        k += 1
        yield t


def best_closed(service: Service, slots: int, max_batch_size: int, clients: int, think_s: float) -> float:
    """Rows a second of the best steady schedule of the clients in equal groups over the slots."""
    best = 0.0
    for groups in range(-(-clients // max_batch_size), clients + 1):
        n = clients / groups
        t = service.t(n)
        best = max(best, min(min(slots, groups) * n / t, clients / (think_s + t)))
    return best


class _Run:
    """One simulation: the event loop and what it records."""

    def __init__(
        self,
        service: Service,
        scheduler: Scheduler,
        seed: int,
        think: Think,
        handover_s: float,
        prepare_s: float,
        bulk: Bulk | None,
        rows: Sequence[int],
    ) -> None:
        self.service, self.scheduler, self.think = service, scheduler, think
        self.one_way_s = handover_s / 2
        self.prepare_s = prepare_s
        self.prepared_s: dict[int, float] = {}  # slot -> when what it was sent is prepared
        self.rows = rows  # of each request in turn; none: 1
        self.left: dict[int, int] = {}  # request that was cut -> rows that are not answered
        self.bulk = bulk
        self.bulk_left: dict[int, int] = {}  # request -> rows that are not answered
        self.bulk_done: list[tuple[float, int]] = []  # (answer, rows)
        self.free_s: dict[int, float] = {}  # slot -> when it has run what it was sent
        self.runs_s: dict[int, float] = {}  # batch -> the worker's own time
        self.rng, self.service_rng = random.Random(seed), random.Random(seed + 7)
        self.events: list[tuple[float, int, int, list[Entry] | None]] = []  # (time, order, batch or client, entries)
        self.order = 0
        self.now = self.last_arrival_s = 0.0
        self.requests = self.bulk_id = 0
        self.slo_s = INF
        self.deadlines = True
        self.client: dict[int, int] = {}  # closed loop: request -> client
        self.arrived: dict[int, float] = {}
        self.done: list[tuple[float, float]] = []  # (arrival, answer)
        self.drops: list[float] = []  # arrival
        self.batches: list[tuple[float, int, float]] = []  # (start, rows, seconds)

    def put(self, t: float, number: int, entries: list[Entry] | None) -> None:
        self.order += 1
        heappush(self.events, (t, self.order, number, entries))

    def arrive(self, now: float, client: int) -> None:
        self.requests = id = self.requests + 1
        if client >= 0:
            self.client[id] = client
        self.arrived[id] = self.last_arrival_s = now
        deadline = now + self.slo_s if self.deadlines else INF
        rows = self.rows[id - 1] if self.rows else 1
        self.scheduler.offer(Entry(id=id, rows=rows, arrival_s=now, deadline_s=deadline), now)

    def arrive_bulk(self, now: float) -> None:
        assert self.bulk is not None
        self.bulk_id = id = self.bulk_id - 1
        self.bulk_left[id] = rows = self.bulk.rows
        entry = Entry(id=id, rows=rows, arrival_s=now, priority=self.bulk.priority, divisible=self.bulk.divisible)
        self.scheduler.offer(entry, now)

    def answer_bulk(self, e: Entry, now: float) -> None:
        assert self.bulk is not None
        self.bulk_done.append((now, e.rows))
        self.bulk_left[e.id] -= e.rows
        if not self.bulk_left[e.id]:
            del self.bulk_left[e.id]
            self.put(now + self.bulk.think_s, _BULK, None)

    def completes(self, part: Entry, request: Entry) -> bool:
        """Whether a request that was cut is answered with this part; a part of what was dropped answers nothing."""
        if part.id not in self.arrived:
            return False
        left = self.left.pop(part.id, request.rows) - part.rows
        if left:
            self.left[part.id] = left
        return not left

    def answer(self, batch: int, entries: list[Entry], now: float) -> None:
        run_s = self.runs_s.pop(batch)
        rows = sum([e.rows for e in entries])
        outcome = Outcome("ok", run_s, prepare_s=self.prepare_s * rows) if self.one_way_s else _OK
        self.scheduler.complete(batch, outcome, now)
        arrived, done, think = self.arrived, self.done, self.think
        for j, e in enumerate(entries):
            if e.id < 0:
                self.answer_bulk(e, now)
                continue
            if e.parent is not None and not self.completes(e, e.parent):
                continue
            done.append((arrived.pop(e.id), now))
            if self.client:
                wait = think.fixed_s + self.rng.expovariate(1 / think.mean_s) + j * think.position_s
                self.put(now + wait, self.client.pop(e.id), None)

    def turn(self, now: float) -> None:
        for event in self.scheduler.poll(now):
            if type(event) is Dispatch:
                seconds = self.service.draw(event.rows, self.service_rng)
                ready = max(now + self.one_way_s, self.prepared_s.get(event.slot, 0.0)) + self.prepare_s * event.rows
                self.prepared_s[event.slot] = ready
                start = max(ready, self.free_s.get(event.slot, 0.0))
                self.free_s[event.slot] = end = start + seconds
                self.runs_s[event.batch_id] = seconds
                self.batches.append((start, event.rows, seconds))
                self.put(end + self.one_way_s, event.batch_id, event.entries)
            else:
                self.drops.append(self.arrived.pop(event.id))  # type: ignore[union-attr]
                if self.client:
                    self.put(now + _RETRY_S, self.client.pop(event.id), None)  # type: ignore[union-attr]

    def run(self, arrivals: Iterator[float], horizon_s: float) -> None:
        events, scheduler = self.events, self.scheduler
        arrival = next(arrivals, INF)
        while True:
            wake = scheduler.wake_at
            event = events[0][0] if events else INF
            now = min(event, arrival, INF if wake is None else wake)
            if now > horizon_s or now == INF or (self.bulk and arrival == INF and not self.arrived):
                self.now = min(now, horizon_s) if horizon_s < INF else self.now
                break
            self.now = now
            if arrival <= now:
                self.arrive(now, -1)
                arrival = next(arrivals, INF)
            elif event <= now:
                _, _, number, entries = heappop(events)
                if entries is None and number == _BULK:
                    self.arrive_bulk(now)
                elif entries is None:
                    self.arrive(now, number)
                else:
                    self.answer(number, entries, now)
            self.turn(now)

    def result(self, slots: int, closed: bool, slo_s: float, warm: float = 0.15) -> SimResult:
        end = self.now if closed else self.last_arrival_s
        t0 = warm * end
        span = (end - t0) or INF
        latency = sorted(f - t for t, f in self.done if t >= t0 and (closed or t <= end))
        steady = [f - t for t, f in self.done if t0 <= t <= end]
        drops = sum(1 for t in self.drops if t0 <= t <= end)
        batches = [(n, d) for t, n, d in self.batches if t0 <= t <= end]
        n = len(latency)
        return SimResult(
            mean_s=sum(latency) / n if n else INF,
            p50_s=latency[n // 2] if n else INF,
            p99_s=latency[min(n - 1, int(0.99 * n))] if n else INF,
            throughput=sum(1 for _, f in self.done if t0 <= f <= end) / span,
            goodput=sum(1 for x in steady if x <= slo_s) / span,
            dropped=drops / max(1, drops + len(steady)),
            mean_batch=sum(k for k, _ in batches) / max(1, len(batches)),
            busy=min(1.0, sum(d for _, d in batches) / span / slots),
            requests=self.requests,
            bulk_throughput=sum(rows for t, rows in self.bulk_done if t0 <= t <= end) / span,
            latencies_s=latency,
        )


def simulate(
    service: Service,
    policy: BatchPolicy,
    *,
    slots: int = 1,
    depth: int = 1,
    handover_s: float = 0.0,
    prepare_s: float = 0.0,
    max_batch_size: int = 64,
    arrivals: Iterable[float] | None = None,
    rows: Sequence[int] = (),
    clients: int = 0,
    horizon_s: float = INF,
    slo_s: float | None = None,
    deadlines: bool = True,
    profile: bool = True,
    think: Think | None = None,
    bulk: Bulk | None = None,
    priority: tuple[float, ...] = (0.0,),
    seed: int = 1,
) -> SimResult:
    """What `policy` makes of an open loop (`arrivals`, in order), or of `clients` in a closed loop until `horizon_s`.

    A request has one row, unless `rows` tells those of each arrival; throughput and goodput count requests.
    `slo_s` is each request's deadline; with `deadlines` False the scheduler is not told of it. `profile`: the cost
    model starts from a warm-up. `handover_s` passes between dispatch and run, and between its end and the answer,
    together; before a batch runs, `prepare_s` for each of its rows, which may pass while another one does. `depth` 2
    sends batches ahead. Same arguments, same result.
    """
    if (arrivals is None) == (clients == 0) or (clients and horizon_s == INF):
        raise ValueError("expected either arrivals, or clients together with horizon_s")
    scheduler = Scheduler(
        policy,
        max_batch_size=max_batch_size,
        max_queue=_UNBOUNDED,
        max_queue_bytes=_UNBOUNDED,
        depth=depth,
        priority=priority,
        horizon_s=slo_s or 30.0,
    )
    if profile:
        scheduler.prime(service.profile(max_batch_size))
    for slot in range(slots):
        scheduler.slot_up(slot, 0.0)
    run = _Run(service, scheduler, seed, think or Think(), handover_s, prepare_s, bulk, rows)
    run.slo_s, run.deadlines = slo_s or INF, deadlines
    for _ in range(bulk.in_flight if bulk else 0):
        run.put(0.0, _BULK, None)
    for client in range(clients):
        run.put(run.rng.random() * 0.005, client, None)
    run.run(iter(arrivals) if arrivals is not None else iter(()), horizon_s)
    return run.result(slots, arrivals is None, run.slo_s)
