"""Causes: why a model is slow or fails, what shows it, what to change, and what the change brings. Pure.

A cause is a row of `CAUSES`: a condition on a `Reading`, its evidence, the change and the predicted gain. All of them
are tried; the first of the table that holds is named first. So a row stands above those that it would hide: a worker
that dies, a full event loop or too many threads also make instances look busy. The last rows ask what busy instances
could do with larger batches or more instances, which the learned cost of a batch answers.
"""

from collections.abc import Callable, Iterable
from math import ceil
from typing import Final, NamedTuple

from msgspec import Struct

# choices, except where a measurement is named
BUSY: Final = 0.9  # share of the time in which an instance has a batch: more is never idle
FULL: Final = 0.9  # share of max_batch_size
LOOP_BUSY: Final = 0.8  # share of the time: it must wait for the instances, too
LOOP_CPU: Final = 0.15  # of a core: a loop that only waits for a core is not the limit, the machine is
BIG_BYTES: Final = 64 * 1024  # larger bodies are received into the pool
CROWDED: Final = 1.3  # runnable threads of workers for each core
PADDED: Final = 0.3  # share of the work that is padding
PREPARING: Final = 0.4  # share of a batch's time that one stage before the model takes
STARVED: Final = 0.5  # utilization of a GPU whose instances always have a batch
UNSENT_BYTES: Final = 2**20  # of responses, at all times: less fits into the buffers of the system
REFUSED: Final = 0.01  # share of the requests
LAG: Final = 0.5  # round trip to the broker, beside the run of a batch
LAG_S: Final = 0.002  # a broker in the same network answers sooner
RUNNING: Final = 0.8  # share of the rows in flight that can run; the others are on their way (simulated closed loops)
WORTH: Final = 1.1  # smaller gains are not worth a restart
MUCH: Final = 1.4  # of a batch twice as large: over half of the time of the present one is set-up cost
SHORT_S: Final = 0.0005  # of a full batch: below, the server is the limit and not the model
WAITS: Final = 0.05  # cores of an instance that mostly waits for a device or a network: a choice


class ServerReading(Struct, frozen=True, kw_only=True):
    """The server in the last seconds. `idle` counts cores of the machine without work, `runnable` the threads of
    workers that run or wait for a core. `loop_busy` is the share of the time in which the thread of the event loop ran
    or waited for a core, `loop_cpu` in which it ran. `unsent_bytes` were unsent at all times, `pool` is the used share
    of the shared memory. `broker_s` is a round trip to the broker."""

    cores: int = 1
    idle: float = 0.0
    runnable: float = 0.0
    loop_busy: float = 0.0
    loop_cpu: float = 0.0
    unsent_bytes: float = 0.0
    pool: float = 0.0
    broker_s: float = 0.0


class Setup(Struct, frozen=True):
    """Instances, the batch limit, and seconds from batch to batch: `fixed_s` + `row_s` for each row."""

    instances: int
    max_batch_size: int
    fixed_s: float
    row_s: float


class Scenario(Struct, frozen=True):
    """A change to simulate, at a load of so many rows in flight and a second."""

    now: Setup
    then: Setup
    in_flight: int
    rate: float


class Outlook(Struct, frozen=True):
    """Rows a second of full batches; p99 at the present load, None if the queue would grow or there is no load; busy
    share of the instances."""

    capacity: float
    p99_s: float | None
    busy: float


class Effect(Struct, frozen=True):
    """What a simulated change brings. `gain` is how many times as many requests are answered while as many are in
    flight."""

    gain: float
    now: Outlook
    then: Outlook


class Reading(Struct, frozen=True, kw_only=True):
    """One model version in the last seconds. Rates are per second, means are of a batch unless named otherwise.

    `refused` counts requests that found the queue full, `died` and `leaking` workers. `up` instances had a batch for
    `busy` of the time, summed over them; batches ran for `working`. `decode_s`, `preprocess_s` and `run_s` are the
    times of a batch, the last with preprocessing, unless `helping` processes of the worker do that, and without
    decoding. `fixed_s` and `row_s` are its learned cost. `padded` is the share of the work that is padding: of tokens
    if the model takes `texts`, else of rows. `cpu` and `runnable` sum over the workers: cores that they use, and
    threads that run or wait for a core. `gpu` is the utilization of its GPUs, None without.
    """

    name: str = "m"
    version: str = "1"
    requests: float = 0.0
    answers: float = 0.0
    refused: float = 0.0
    memory_failed: float = 0.0
    died: int = 0
    leaking: int = 0
    up: int = 1
    busy: float = 0.0
    working: float = 0.0
    batches: float = 0.0
    rows: float = 0.0
    max_batch_size: int = 64
    ceiling: int | None = None
    in_flight_rows: float = 0.0
    max_queue: int = 1024
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    run_s: float = 0.0
    fixed_s: float = 0.0
    row_s: float = 0.0
    helping: int = 0
    padded: float = 0.0
    texts: bool = False
    body_bytes: float = 0.0
    cpu: float = 0.0
    runnable: float = 0.0
    gpu: float | None = None
    server: ServerReading = ServerReading()

    @property
    def saturated(self) -> bool:
        """No instance was idle."""
        return self.batches > 0 and self.per_batch_s > 0 and self.busy >= BUSY * self.up > 0

    @property
    def full(self) -> bool:
        """Batches are as large as they may be."""
        return self.rows >= FULL * self.max_batch_size

    @property
    def loop_bound(self) -> bool:
        """The thread of the event loop was never idle, but the instances were."""
        server, instances = self.server, self.working < 0.5 * self.up
        return self.answers > 0 and server.loop_busy >= LOOP_BUSY and server.loop_cpu >= LOOP_CPU and instances

    @property
    def crowded(self) -> bool:
        """The threads of the workers, of this model too, wait for cores."""
        enough = self.server.runnable >= CROWDED * self.server.cores
        return self.batches > 0 and self.up > 0 and enough and self.runnable > self.cpu

    @property
    def period_s(self) -> float:
        """Time from batch to batch of one instance."""
        return self.up / self.batches if self.batches else 0.0

    @property
    def per_batch_s(self) -> float:
        """Time that a batch takes, with decoding."""
        return self.decode_s + self.run_s + (self.preprocess_s if self.helping else 0.0)

    def times(self, instances: int, max_batch_size: int) -> float:
        """How many times as many rows per second so many instances would answer with this batch limit."""
        rows = min(max(1.0, RUNNING * self.in_flight_rows / instances), float(max_batch_size))
        now = self.up * self.rows / self._run_s(self.rows) if self.rows else 0.0
        return instances * rows / self._run_s(rows) / now if now else 1.0

    def _run_s(self, rows: float) -> float:
        """Time from batch to batch of so many rows: the learned time of the run, and the present time between runs."""
        between_s = max(0.0, self.period_s - self.run_s) if self.saturated else 0.0
        return max(1e-9, self.fixed_s + self.row_s * rows + between_s)

    def changed(self, instances: int, max_batch_size: int, speed: float = 1.0) -> Scenario | None:
        """This change, with so many times faster batches; None if no cost was learned, or hardly any."""
        if not self.up or self.fixed_s + self.row_s * self.max_batch_size < SHORT_S:
            return None
        fixed_s = self._run_s(0)
        then = Setup(instances, max_batch_size, fixed_s / speed, self.row_s / speed)
        now = Setup(self.up, self.max_batch_size, fixed_s, self.row_s)
        return Scenario(now, then, round(self.in_flight_rows), self.batches * self.rows)

    @property
    def larger(self) -> int:
        """The batch limit to try next: twice the present one, because the learned line was not seen farther out. Some
        rows must wait beside such a batch, or the instance waits for the clients."""
        return self.max_batch_size * (2 if self.in_flight_rows >= 3 * self.up * self.max_batch_size else 1)

    @property
    def more(self) -> int:
        """Instances that the idle cores have room for, at most twice as many."""
        each = self.cpu / self.up if self.up else 0.0
        room = self.up if each < WAITS else int(self.server.idle / each + 0.2)
        return self.up + min(self.up, room)

    @property
    def spare_cores(self) -> str:
        """Why further instances find room."""
        waits = self.cpu / self.up < WAITS if self.up else False
        return "its batches hardly use the processor" if waits else f"{self.server.idle:.1f} cores are idle"

    @property
    def larger_pays(self) -> bool:
        """A larger batch brings more; much more, if instances can be added instead: that gain is surer."""
        return self.times(self.up, self.larger) >= (MUCH if self.more > self.up else WORTH)

    def multiplied(self) -> float:
        """How many times as many rows these instances would answer: batches may become smaller, never larger."""
        return min(self.more / self.up, self.times(self.more, self.max_batch_size))

    def decoded_by_more(self) -> float:
        """The same, if all that a request takes of the processors, in clients too, grows with the rate."""
        busy = max(1e-9, self.server.cores - self.server.idle)
        return max(1.0, min(self.multiplied(), self.server.cores / busy))

    @property
    def fewer(self) -> int:
        return max(1, min(self.up - 1, self.server.cores))

    @property
    def fitting(self) -> int:
        """The size of a ladder that batches need."""
        return int(1 << max(0, ceil(self.rows) - 1).bit_length())

    def unpadded(self) -> float:
        """How many times as many batches instances would run without padding, or with the fitting size."""
        padded = min(self.padded, 0.99)
        now_s, then_s = self._run_s(self.rows / (1 - padded)), self._run_s(self.fitting)
        return 1 / (1 - padded) if self.texts else max(1.0, now_s / then_s)

    @property
    def predict_s(self) -> float:
        """Time of a batch in the worker without preprocessing, which helpers do beside it."""
        return max(self.run_s - (0.0 if self.helping else self.preprocess_s), 1e-9)

    @property
    def helpers(self) -> int:
        """Helper processes that preprocess as fast as the model predicts, within the cores."""
        return max(1, min(self.server.cores, ceil(self.preprocess_s * max(1, self.helping) / self.predict_s)))

    def helped(self) -> float:
        """How many times as many batches an instance would run with these helpers."""
        return self.period_s / max(self.predict_s, self.preprocess_s * max(1, self.helping) / self.helpers)


class Finding(Struct, frozen=True):
    """A cause that holds for a model, in sentences. `gain` is how many times as many requests the change lets the
    server answer in a second, None where no reading predicts it; a `scenario` can be simulated instead. `metric` shows
    the evidence."""

    cause: str
    model: str
    version: str
    evidence: str
    change: str
    gain: float | None
    metric: str
    scenario: Scenario | None = None


class Cause(NamedTuple):
    """One row of the table. `change` is a template for `Reading`."""

    name: str
    metric: str
    holds: Callable[[Reading], bool]
    evidence: Callable[[Reading], str]
    change: Callable[[Reading], str]
    gain: Callable[[Reading], float | None] = lambda r: None
    scenario: Callable[[Reading], Scenario | None] = lambda r: None


def findings(readings: Iterable[Reading]) -> list[Finding]:
    """The causes that hold, in the order of the table; of models with the same cause, the one with more requests."""
    models = sorted(readings, key=lambda r: -r.requests)
    return [
        Finding(
            cause.name,
            r.name,
            r.version,
            cause.evidence(r),
            cause.change(r),
            cause.gain(r),
            cause.metric,
            cause.scenario(r),
        )
        for cause in CAUSES
        for r in models
        if cause.holds(r)
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _batch(r: Reading) -> str:
    return f"a batch of {r.rows:.0f} rows takes {_ms(r.per_batch_s)}"


CAUSES: Final = (
    Cause(
        "crashing worker",
        "penstock_worker_events_total",
        lambda r: r.died > 0,
        lambda r: f"{r.died} workers died within a minute",
        lambda r: "find the last words of the worker in the log, and mend the model or its library",
    ),
    Cause(
        "leaking worker",
        "penstock_worker_resident_bytes",
        lambda r: r.leaking > 0,
        lambda r: f"the memory of {r.leaking} workers grows without end",
        lambda r: "mend the model; until then set max_memory_bytes or max_requests, which replace a worker in time",
    ),
    Cause(
        "out of memory",
        "penstock_item_failures_total",
        lambda r: r.ceiling is not None or r.memory_failed > 0,
        lambda r: f"batches of more than {r.ceiling or 1} rows ran out of memory and ran again in parts",
        lambda r: f"set batching.max_batch_size = {r.ceiling or 1}, or max_tokens for texts of different lengths",
    ),
    Cause(
        "broker lag",
        "penstock_redis_round_trip_seconds",
        lambda r: r.server.broker_s >= max(LAG_S, LAG * r.run_s) and not r.saturated,
        lambda r: f"a round trip to the broker takes {_ms(r.server.broker_s)}, and {_batch(r)}",
        lambda r: "run the worker beside the broker, or relieve the broker",
    ),
    Cause(
        "slow clients",
        "penstock_unsent_bytes",
        lambda r: r.answers > 0 and r.server.unsent_bytes >= UNSENT_BYTES,
        lambda r: f"{_size(r.server.unsent_bytes)} of responses wait for clients to read them",
        lambda r: "put a proxy that buffers responses in front, or lower limits.write_timeout_s",
    ),
    Cause(
        "big bodies",
        "penstock_request_bytes_total",
        lambda r: r.body_bytes >= BIG_BYTES and (r.loop_bound or (r.server.pool >= BUSY and not r.full)),
        lambda r: (
            f"bodies of {_size(r.body_bytes)} keep the event loop busy for {r.server.loop_busy:.0%} of the time and"
            f" fill {r.server.pool:.0%} of the pool, while instances are idle"
        ),
        lambda r: "send smaller bodies (compressed, resized, in shared memory), or raise limits.pool_bytes",
        lambda r: min(2.0, r.up / max(r.working, 1e-9)) if r.loop_bound else None,
    ),
    Cause(
        "small bodies",
        "penstock_request_bytes_total",
        lambda r: r.loop_bound and r.body_bytes < BIG_BYTES,
        lambda r: (
            f"{r.answers:.0f} requests a second of {_size(r.body_bytes)} keep the event loop busy for"
            f" {r.server.loop_busy:.0%} of the time, while instances are idle"
        ),
        lambda r: "send several items in one request, or run more servers behind a balancer",
    ),
    Cause(
        "too many threads",
        "penstock_worker_cpu_seconds_total",
        lambda r: r.crowded and r.runnable >= 1.5 * r.up,
        lambda r: (
            f"{r.server.runnable:.1f} threads of workers want {r.server.cores} cores, {r.runnable / r.up:.1f} of each"
        ),
        lambda r: f"set threads = {max(1, r.server.cores // r.up)} for {r.up} instances",
    ),
    Cause(
        "too many instances",
        "penstock_workers_up",
        lambda r: r.crowded and r.up > r.server.cores,
        lambda r: f"{r.up} instances want {r.server.cores} cores, and {_batch(r)}",
        lambda r: f"set instances = {r.fewer}",
        lambda r: max(1.0, r.times(r.fewer, r.max_batch_size) * r.up / r.fewer),
        lambda r: r.changed(r.fewer, r.max_batch_size, r.up / r.fewer),
    ),
    Cause(
        "padding",
        "penstock_padded_rows_total",
        lambda r: r.padded >= PADDED and r.busy >= 0.5 * r.up,
        lambda r: f"{r.padded:.0%} of the work of batches is padding",
        lambda r: 'set batching.bucket = "length"' if r.texts else f"add {r.fitting} to batching.sizes",
        lambda r: r.unpadded(),
    ),
    Cause(
        "slow decode",
        "penstock_preprocess_seconds",
        lambda r: r.saturated and r.decode_s >= PREPARING * r.per_batch_s,
        lambda r: f"{_batch(r)}, of which decoding the bodies takes {_ms(r.decode_s)}",
        lambda r: (
            "send tensors in binary form instead of JSON or images"
            + (f", or set instances = {r.more}" if r.more > r.up else "")
        ),
        lambda r: r.decoded_by_more() if r.more > r.up else None,
    ),
    Cause(
        "slow preprocess",
        "penstock_preprocess_seconds",
        lambda r: r.saturated and r.preprocess_s >= PREPARING * r.per_batch_s and r.helpers > r.helping,
        lambda r: f"{_batch(r)}, of which preprocess takes {_ms(r.preprocess_s)} and holds the interpreter",
        lambda r: f"set preprocess_processes = {r.helpers}",
        lambda r: max(1.0, r.helped()),
    ),
    Cause(
        "GPU starved",
        "penstock_gpu_utilization_ratio",
        lambda r: r.saturated and r.gpu is not None and r.gpu < STARVED,
        lambda r: f"the GPU works for {r.gpu or 0.0:.0%} of the time, and its instances always have a batch",
        lambda r: "move work of predict off the model's thread: preprocess_processes, tensors on the GPU, or instances",
        lambda r: None,
    ),
    Cause(
        "queue bound",
        "penstock_rejections_total",
        lambda r: (
            r.up > 0
            and r.refused >= REFUSED * r.requests > 0
            and (not r.saturated or r.max_queue < r.up * r.max_batch_size)
        ),
        lambda r: (
            f"{r.refused / r.requests:.0%} of the requests find the queue of {r.max_queue} rows full, which is"
            f" {_ms(r.max_queue * r.per_batch_s / max(r.rows, 1) / r.up)} of work"
        ),
        lambda r: f"set batching.max_queue = {max(16 * r.up * r.max_batch_size, 2 * r.max_queue)}",
        lambda r: None if r.saturated else r.requests / max(r.requests - r.refused, 1e-9),
    ),
    Cause(
        "batch limit",
        "penstock_batch_fill_ratio",
        lambda r: r.saturated and r.full and r.larger > r.max_batch_size and r.larger_pays,
        lambda r: (
            f"instances are busy with full batches of {r.rows:.0f} rows, and {r.in_flight_rows:.0f} rows wait or run"
        ),
        lambda r: f"set batching.max_batch_size = {r.larger}",
        lambda r: r.times(r.up, r.larger),
        lambda r: r.changed(r.up, r.larger),
    ),
    Cause(
        "too few instances",
        "penstock_busy_seconds_total",
        lambda r: r.saturated and r.gpu is None and r.more > r.up and r.multiplied() >= WORTH,
        lambda r: (
            f"{'its instance is' if r.up == 1 else f'all {r.up} instances are'} busy, {r.in_flight_rows:.0f} rows wait"
            f" or run, and {r.spare_cores}"
        ),
        lambda r: f"set instances = {r.more}",
        lambda r: r.multiplied(),
        lambda r: r.changed(r.more, r.max_batch_size),
    ),
)
