"""The simulator with the loads that only tests and benchmarks use: clients in a closed loop, bulk jobs, deadlines."""

import random
from collections import deque
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from penstock.core.batching.entry import INF, Dispatch, Entry, Event, Outcome
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler
from penstock.perf.simulate import simulator
from penstock.perf.simulate.simulator import LONG_ROW, WARM, OpenLoop, ServiceTime, Simulation, unbounded

_RETRY_S = 0.010  # a closed-loop client retries this long after its request was dropped


class ThinkTime(Struct, frozen=True):
    """A closed-loop client's pause before its next request: fixed + exponential(mean) + its position in the batch."""

    fixed_s: float = 0.0003
    mean_s: float = 0.0003
    position_s: float = 0.00002


class FrontEnd(Struct, frozen=True):
    """A web server, one request at a time, on cores that the model uses too.

    Each request takes `work_s` (with log-normal jitter) before the scheduler sees it. While a batch runs, the work
    proceeds at `speed`; otherwise at 1.
    """

    work_s: float
    speed: float
    jitter: float = 0.05


class ClosedLoop(Struct, frozen=True):
    """`clients` that each wait for an answer before the next request, until `horizon_s`. From `change_s` on there are
    `changed` of them: the others leave with their next answer, or come then. Requests have random `lengths`."""

    clients: int
    horizon_s: float
    think: ThinkTime = ThinkTime()
    front_end: FrontEnd | None = None
    changed: int | None = None
    change_s: float = INF
    lengths: Sequence[int] = ()


class BulkLoad(Struct, frozen=True):
    """A bulk job that runs alongside the load and keeps `in_flight` requests of `rows` rows in a lower class.

    Each answer is followed by the next request after `think_s`. A `divisible` request may be cut to fill a batch.
    """

    in_flight: int
    rows: int
    priority: int = 1
    think_s: float = 0.001
    divisible: bool = True


class SimulationSettings(simulator.SimulationSettings, frozen=True, kw_only=True):
    """Each row takes `prepare_s` before its batch runs, possibly while another batch runs. `slo_s` is each request's
    deadline; the scheduler ignores it unless `deadlines`. With `profile` the cost model starts from a warm-up. `bulk`
    adds a bulk job."""

    prepare_s: float = 0.0
    deadlines: bool = True
    profile: bool = True
    priority: tuple[float, ...] = (0.0,)
    bulk: BulkLoad | None = None


class SimulationResult(simulator.SimulationResult, frozen=True, kw_only=True):
    """Bulk requests are excluded from all but `bulk_throughput`, which is in rows. `dropped` is a share of arrivals.
    `requests` counts every arrival, the warm-up included."""

    dropped: float
    requests: int
    bulk_throughput: float

    @property
    def mean_s(self) -> float:
        return sum(self.latencies_s) / len(self.latencies_s) if self.latencies_s else INF

    @property
    def p50_s(self) -> float:
        return self.latencies_s[len(self.latencies_s) // 2] if self.latencies_s else INF

    @property
    def p99_s(self) -> float:
        n = len(self.latencies_s)
        return self.latencies_s[min(n - 1, int(0.99 * n))] if n else INF


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
    scheduler = unbounded(policy, settings, priority=settings.priority)
    if settings.profile:
        scheduler.prime(service.profile(settings.max_batch_size * (LONG_ROW if settings.lengths else 1)))
    return _Simulation(service, scheduler, load, settings).finish()


class _FrontEndQueue:
    """The clients at the front end, which works for the first of them. `runs` are the times of batches, by start."""

    def __init__(self, front_end: FrontEnd, rng: random.Random) -> None:
        self.line: deque[tuple[int, float]] = deque()  # (client, since when)
        self.runs: list[tuple[float, float]] = []
        self.turn = 0  # changes with the end of the work for the first client
        self._front_end, self._rng = front_end, rng
        self._work_s = self._start_s = 0.0  # of the first client

    def join(self, client: int, now: float) -> bool:
        """Whether the client is served at once."""
        self.line.append((client, now))
        if len(self.line) == 1:
            self._begin(now)
        return len(self.line) == 1

    def serve(self, now: float) -> tuple[int, float]:
        """The first client leaves; returns it, and when it came."""
        first = self.line.popleft()
        self._begin(now)
        return first

    def _begin(self, now: float) -> None:
        jitter = self._front_end.jitter
        self._work_s = self._front_end.work_s * self._rng.lognormvariate(-jitter * jitter / 2, jitter)
        self._start_s = now

    def end_s(self) -> float:
        """When the work for the first client ends, unless more batches start."""
        t, left, speed = self._start_s, self._work_s, self._front_end.speed
        self.runs = [run for run in self.runs if run[1] > t]
        for start, end in self.runs:
            if start - t >= left:
                break
            left, t = left - max(0.0, start - t), max(t, start)
            if (end - t) * speed >= left:
                return t + left / speed
            left, t = left - max(0.0, end - t) * speed, max(t, end)
        return t + left


class _Simulation(Simulation):
    settings: SimulationSettings

    def __init__(
        self, service: ServiceTime, scheduler: Scheduler, load: OpenLoop | ClosedLoop, settings: SimulationSettings
    ) -> None:
        super().__init__(service, scheduler, settings)
        self.load, self.bulk = load, settings.bulk
        self.endless = self.bulk is not None
        self.deadline_s = (settings.slo_s or INF) if settings.deadlines else INF
        self.clients_rng = random.Random(settings.seed)
        self.client: dict[int, int] = {}  # closed loop: request -> client
        front_end = load.front_end if isinstance(load, ClosedLoop) else None
        self.front = None if front_end is None else _FrontEndQueue(front_end, self.clients_rng)
        self.drops: list[float] = []  # arrival
        self.prepared_s: dict[int, float] = {}  # slot -> when its latest batch is prepared
        self.last_bulk_id = 0
        self.bulk_left: dict[int, int] = {}  # bulk request -> unanswered rows
        self.bulk_done: list[tuple[float, int]] = []  # (answer, rows)

    def finish(self) -> SimulationResult:
        load = self.load
        for _ in range(self.bulk.in_flight if self.bulk else 0):
            self.at(0.0, self._bulk_arrives)
        if isinstance(load, ClosedLoop):
            for client in range(max(load.clients, load.changed or 0)):
                first_s = load.change_s if client >= load.clients else 0.0
                self.at(first_s + self.clients_rng.random() * 0.005, self._client_arrives, client)
            end = self.run(OpenLoop(()), load.horizon_s)
        else:
            self.run(load)
            end = self.last_arrival_s
        found = self.result(end)
        t0 = WARM * end
        answers = sum(1 for t, _ in self.done if t0 <= t <= end)
        drops = sum(1 for t in self.drops if t0 <= t <= end)
        if isinstance(load, ClosedLoop):  # the last answers of its clients count, too
            found = structs.replace(found, latencies_s=sorted(f - t for t, f in self.done if t >= t0))
        return SimulationResult(
            **{name: getattr(found, name) for name in found.__struct_fields__},
            dropped=drops / max(1, drops + answers),
            requests=self.requests,
            bulk_throughput=sum(rows for t, rows in self.bulk_done if t0 <= t <= end) / ((end - t0) or INF),
        )

    def _client_arrives(self, client: int, now: float) -> None:
        assert isinstance(self.load, ClosedLoop)
        if now >= self.load.change_s and self.load.changed is not None and client >= self.load.changed:
            return
        if self.front is None:
            self.client[self.arrive(now)] = client
        elif self.front.join(client, now):
            self._front_end_turn()

    def _front_end_turn(self) -> None:
        """Schedules the next end of the front end's work."""
        assert self.front is not None
        if self.front.line:
            self.front.turn += 1
            self.at(self.front.end_s(), self._front_end_ends, self.front.turn)

    def _front_end_ends(self, turn: int, now: float) -> None:
        assert self.front is not None
        if turn == self.front.turn:  # else the end of its work has changed since
            client, since_s = self.front.serve(now)
            id = self.arrive(now)
            self.client[id], self.arrived[id] = client, since_s
            self._front_end_turn()

    def _bulk_arrives(self, now: float) -> None:
        assert self.bulk is not None
        self.last_bulk_id = id = self.last_bulk_id - 1
        self.bulk_left[id] = rows = self.bulk.rows
        entry = Entry(id=id, rows=rows, arrival_s=now, priority=self.bulk.priority, divisible=self.bulk.divisible)
        self.scheduler.offer(entry, now)

    def arrive(self, now: float, rows: int = 1, deadline_s: float = INF, length: int = 0) -> int:
        if isinstance(self.load, ClosedLoop) and self.load.lengths:
            length = self.clients_rng.choice(self.load.lengths)
        return super().arrive(now, rows, self.deadline_s, length)

    def handle(self, event: Event, now: float) -> None:
        if type(event) is Dispatch:
            super().handle(event, now)
            return
        self.drops.append(self.arrived.pop(event.id))  # type: ignore[union-attr]
        if self.client:
            self.at(now + _RETRY_S, self._client_arrives, self.client.pop(event.id))  # type: ignore[union-attr]

    def start(self, batch: Dispatch, ready: float) -> float:
        ready = max(ready, self.prepared_s.get(batch.slot, 0.0)) + self.settings.prepare_s * batch.rows
        self.prepared_s[batch.slot] = ready
        answer = super().start(batch, ready)
        if self.front is not None:
            start, _, seconds = self.batches[-1]
            self.front.runs.append((start, start + seconds))
            self._front_end_turn()
        return answer

    def outcome(self, run_s: float, entries: Sequence[Entry]) -> Outcome:
        prepare_s = self.settings.prepare_s * sum(e.rows for e in entries)
        return Outcome("ok", run_s, prepare_s=prepare_s) if self.settings.handover_s else Outcome()

    def answer(self, batch: int, entries: list[Entry], now: float) -> None:
        super().answer(batch, entries, now)
        for part in entries:
            if part.id >= 0:
                continue
            assert self.bulk is not None
            self.bulk_done.append((now, part.rows))
            self.bulk_left[part.id] -= part.rows
            if not self.bulk_left[part.id]:
                del self.bulk_left[part.id]
                self.at(now + self.bulk.think_s, self._bulk_arrives)

    def answered(self, entry: Entry, place: int, now: float) -> None:
        if entry.id < 0:
            return
        super().answered(entry, place, now)
        if isinstance(self.load, ClosedLoop):
            think = self.load.think
            pause = think.fixed_s + self.clients_rng.expovariate(1 / think.mean_s) + place * think.position_s
            self.at(now + pause, self._client_arrives, self.client.pop(entry.id))
