"""The interfaces between the core and the rest: what other packages implement, and what they receive.

The core imports none of its implementations.

- Backend, Ticket, Buffer: what a front-end receives to submit requests.
- ManagementBackend: what a management API receives to load, scale and unload models.
- Codec: converts the bodies of one wire format.
- Model: what runs inside a worker.
- Transport, TransportListener: how batches reach workers.
- Observer, with BatchRecord and the snapshots: how metrics and traces see requests, batches and workers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from msgspec import Struct, field

from penstock.errors import PenstockError
from penstock.types import (
    Batch,
    BatchPart,
    Item,
    ItemResult,
    MetricDelta,
    ModelMetadata,
    ModelStatus,
    Ready,
    SequenceRequest,
    Sink,
    Trace,
)

# ---- front-ends


class Ticket(Protocol):
    """One accepted request."""

    def cancel(self) -> None:
        """Abandons the request. A queued request is not run, a running one is not answered; the sink stays silent."""


class Buffer(Protocol):
    """Memory for one large body, visible to the workers. The engine owns it after `submit`."""

    view: memoryview

    def shrink(self, length: int) -> None:
        """Keeps only the first `length` bytes."""

    def skip(self, count: int) -> None:
        """Drops the first `count` bytes."""

    def release(self) -> None:
        """Frees the memory. Only for a buffer that was never submitted."""


class Submitter(Protocol):
    """Accepts requests."""

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """Queues one item. Raises ModelNotFound, ModelNotReady, QueueFull, DeadlineExceeded (`item.budget_s` <= 0).

        Takes ownership of `item.payload`, also when it raises: the engine releases a Buffer.
        """


class Backend(Submitter, Protocol):
    """The models, as front-ends see them. Every call runs on the event loop's thread and does not block."""

    def ready(self) -> bool:
        """True when every model can answer and the server is not draining."""

    def model_ready(self, model: str, version: str | None) -> bool:
        """Raises ModelNotFound."""

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        """The metadata, with the server's own parameters added to the model's, and all versions.

        Raises ModelNotFound, ModelNotReady.
        """

    def statuses(self) -> list[ModelStatus]: ...

    def allocate(self, nbytes: int) -> Buffer | None:
        """Memory for a body, or None while the pool is full. Raises PayloadTooLarge if it can never fit."""

    def when_free(self, wake: Callable[[], None]) -> None:
        """Calls `wake()` once, soon after the pool got memory back."""


class ManagementBackend(Protocol):
    """Changes to the models while the server runs. Changes to one model run one after the other.

    A change returns when it is complete: the new version answers, and the replaced one has answered everything it
    accepted. Every change raises Forbidden unless the configuration allows it, and ModelNotReady while the server
    starts or drains.
    """

    def check_open(self) -> None:
        """Raises the errors that every change can raise."""

    def statuses(self) -> list[ModelStatus]:
        """Like `Backend.statuses`, plus versions that are still loading or already draining."""

    def learned(self, model: str, version: str) -> dict[str, object]:
        """What the scheduler of a version has learned; empty when there is no scheduler."""

    async def put(self, model: str, version: str | None, keys: Mapping[str, Any]) -> None:
        """Loads a version, replacing one of the same number. Raises BadRequest, Forbidden, Conflict, LoadFailed;
        then nothing has changed."""

    async def unload(self, model: str, version: str | None) -> None:
        """Unloads one version, or all of them. Raises ModelNotFound."""

    async def scale(self, model: str, version: str | None, instances: int) -> None:
        """Raises ModelNotFound, BadRequest, Conflict, LoadFailed; then nothing has changed."""

    async def drain(self, model: str, version: str, drained: bool) -> None:
        """Stops new requests to a version and waits for the accepted ones; or, with False, lets new ones in again.

        Raises ModelNotFound, ModelNotReady; Conflict where no other version would answer."""

    async def set_default(self, model: str, version: str) -> None:
        """Raises ModelNotFound."""

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        """Raises ModelNotFound, BadRequest."""


# ---- inside a worker


class Codec(Protocol):
    """Converts the body of an Item into the argument of `predict`, and its result into an ItemResult.

    A codec runs in the worker. One object serves all requests of one model, so it keeps no state between calls. It is
    made with the model's name and version, and with `metadata=`, `item_type=` (an ItemType or None) and `clock=`
    (returns seconds since 1970) if its constructor has such parameters; in the server process with `metadata=` alone.
    Subclasses declare what the rest of the system must know about the format:

    `divisible`: `decode` reads rows [item.start, item.stop) of a body without the others.
    `reads_headers`: `decode` or `encode` needs the request's headers, which otherwise stay in the server process.
    `explains`: requests go to the model's `explain` instead of `predict`.
    """

    divisible: ClassVar[bool] = False
    reads_headers: ClassVar[bool] = False
    explains: ClassVar[bool] = False

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key) of a request, read from its first bytes in the server process; None: not readable there.

        Must be fast and must not raise: the worker reports faults of a body.
        """
        return None

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """The sequence that a body for a model with `max_sequences` names, read as by `peek`. Raises BadRequest."""
        return None

    @staticmethod
    def request_content(model: ModelMetadata) -> dict[str, Any]:
        """The JSON schema of a request to this model by content type, for OpenAPI; {}: any value."""
        return {"application/json": {}, "application/octet-stream": {}}

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """The JSON schema of a response by content type, for OpenAPI."""
        return {"application/json": {}}

    def decode(self, item: Item) -> tuple[Any, Any]:
        """(value for `predict`, context for `encode`). Raises BadRequest; then only this item fails.

        The value may be `Many` items. `encode` then receives the list of their results, unless one of them failed.
        """

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The response. Raises BadOutput when the value cannot be serialised."""

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """One part of a streamed response. Raises BadOutput, and BadRequest if the format has no such parts.

        A stream may restart with the same context; parts that were sent are then not sent again.
        """
        return self.encode(value, item, context)

    def encode_end(self, item: Item, context: Any) -> ItemResult:
        """What follows the last part of a streamed response."""
        return ItemResult()

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """One response from the responses to the pieces of a split request, in row order. Runs in the server
        process."""


@runtime_checkable
class Model(Protocol):
    """One loaded model. All calls run in one thread, the worker's.

    Optional members: `preprocess(item)`, `postprocess(result)` (once per item), `load_preprocess()` (called before
    `load` where items are preprocessed), `warmup()` (may return sample items), `explain(items)` (explanations,
    aligned with the items), `inputs` and `outputs` (tables such as `{"x": "FP32[-1,64]"}`, or sequences of TensorSpec),
    `parameters` (see ModelMetadata).
    """

    def load(self, device: str) -> None:
        """Called once, before anything else. `device` is "cpu", "cuda:0" ..."""

    def predict(self, items: list[Any]) -> Any:
        """The results, aligned with `items`: a list, a tuple or an array. An exception in place of a result fails that
        item alone. May be a coroutine function, or a generator (sync or async) that yields lists of parts.

        If its parameters have the names of the declared `inputs`, it receives and returns the arrays of a batch."""

    def unload(self) -> None:
        """Called once, at an orderly shutdown of the worker."""


# ---- transports

OnPart = Callable[[BatchPart], None]
RESTART_WAIT_S = 1.0  # requests wait for a worker that restarts within this time


class TransportListener(Protocol):
    """Receives the state changes of slots, on the event loop's thread."""

    def slot_up(self, slot: int, ready: Ready) -> None:
        """The model of this slot is loaded: batches may be sent."""

    def slot_down(self, slot: int, error: PenstockError, retry_in_s: float | None) -> None:
        """The slot died, or failed to load. It restarts by itself after `retry_in_s`; None: it does not restart.

        Every batch on the slot has had its final part before this call.
        """

    def slot_metrics(self, slot: int, deltas: list[MetricDelta]) -> None:
        """Model metrics from a worker with concurrent batches. Other workers send them with a batch."""

    def slot_used(self, slot: int, requests: int) -> None:
        """The slot's worker has answered this many requests. Called once a second, with a batch that is about to be
        answered, and with every batch from `max_requests` on."""


class Transport(Protocol):
    """One way to reach the instances of one model. All calls run on the event loop's thread, or with the guard of its
    driver.

    `depth` is how many batches a slot may hold: one running, one ahead, and more if they are short.
    """

    depth: int

    async def start(self, listener: TransportListener) -> None:
        """Begins to start every slot and returns; `listener` receives each slot when it is up or has failed."""

    def send(self, batch: Batch, on_part: OnPart) -> None:
        """Runs a batch. `on_part` gets any number of parts and exactly one final one, whatever happens.

        Slabs among the payloads stay the caller's, which may have to run them again. They are pinned while a worker may
        read them, so the caller can release them at any time.
        """

    def abandon(self, slot: int, batch_id: int) -> None:
        """No caller waits for this batch any more. A streaming batch ends at its next part; its final part still
        arrives."""

    def add_slot(self, slot: int, device: str) -> None:
        """Begins to start one more slot, as `start` does. `listener` may be called before this returns.

        The number may be reused after a slot was removed, never while its worker lives. Raises BadRequest if the
        transport cannot have more slots.
        """

    async def remove_slot(self, slot: int, drain_s: float) -> None:
        """Waits up to `drain_s` for the running batches of the slot, then ends its worker."""

    async def close(self, drain_s: float) -> None:
        """Waits up to `drain_s` for running batches, then kills the workers and releases everything."""

    def forget(self) -> None:
        """In a forked child: closes the child's copies of descriptors, without any effect on the parent's workers."""


# ---- observers


class BatchRecord(Struct):
    """One finished batch. `waits_s` is the queue time of each of its requests, or pieces of requests.

    `outcome` is "ok" (answered), "died" (its worker died while running it) or "lost" (its worker died before it ran).
    `run_s` is the worker's own time, `stages_s` and `hooks_s` the time of its stages (see BatchPart), `seconds` the
    time from sending to the end. `failed` counts items. `failed_requests` has the queue time and rows of each request
    that failed, and whether its input is to blame. `padding` is the part of the work that was padding; None for a
    model that never pads.
    """

    model: str
    version: str
    slot: int
    rows: int
    max_batch_size: int
    reason: str
    ahead: bool
    run_s: float
    seconds: float
    waits_s: Sequence[float]
    failed: int
    bucket: str = ""
    outcome: str = "ok"
    stages_s: tuple[float, float, float] | None = None
    hooks_s: tuple[float, float] | None = None
    failed_requests: Sequence[tuple[float, int, bool]] = ()
    padding: float | None = None


class ModelSnapshot(Struct):
    """The state of one model version. `scheduler` is what its scheduler explains, `pids` its processes by slot,
    `resident` its memory on devices with a budget. `oldest_s` is how long the oldest queued request has waited, `slo_s`
    the target latency. `helpers` counts the processes that preprocess for workers that are up. `busy_s` is the time in
    which instances had a batch, summed over them since the load. `arrived_rows` and `arrived_bytes` count since then,
    with refused requests. `write_s` is the time in which responses waited for clients to take them, summed over them.
    """

    status: ModelStatus
    helpers: int = 0
    in_flight: int = 0
    queue_rows: int = 0
    queue_bytes: int = 0
    max_queue_rows: int = 0
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    resident: Mapping[str, Any] | None = None
    oldest_s: float = 0.0
    slo_s: float | None = None
    busy_s: float = 0.0
    arrived_rows: int = 0
    arrived_bytes: int = 0
    write_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """The names of the model and its version."""
        return self.status.name, self.status.version


class HttpSnapshot(Struct):
    """The state of the inference listener; `answers` counts responses by status // 100, those of health checks that
    are not ready by 0."""

    connections: int
    refused: int
    answers: Mapping[int, int]


class ListenerSnapshot(Struct):
    """What the clients of a listener have not read of their responses, and its error responses by code."""

    unsent_bytes: int
    errors: Mapping[str, int]


class ServerSnapshot(Struct):
    """The state of the whole server, as gauges show it."""

    models: Sequence[ModelSnapshot] = ()
    pool_used_bytes: int = 0
    pool_capacity_bytes: int = 0
    http: HttpSnapshot | None = None
    devices: Sequence[tuple[str, int, int]] = ()  # (device, budget in bytes, bytes of its models)
    listeners: dict[str, ListenerSnapshot] = {}  # by protocol


class Observer:
    """Hooks that the engine calls. Every hook does nothing; a subclass overrides the ones it needs.

    Hooks run one at a time, on the event loop's thread or the one of a model that a portal runs in threads, once per
    batch where possible. They must not block. An exception in a hook is logged and affects no response.
    """

    def on_arrival(self, model: str, version: str) -> None:
        """A request arrived. It is in flight until its one response or rejection."""

    def on_request(self, model: str, version: str, rows: int, size_bytes: int) -> None:
        """A request of this size is about to be queued, which may still fail. Follows its `on_arrival`."""

    def on_item(self, item: Item) -> None:
        """A request is about to be queued: the place to set `item.trace`. Only one observer may have this hook."""

    def on_traced(self, record: BatchRecord, ended_s: float, requests: Sequence[tuple[Trace, float]]) -> None:
        """A batch with traced requests ended: the span and the arrival of each, times on the clock of
        `time.monotonic`."""

    def on_traced_end(
        self, model: str, version: str, item: Item, arrival_s: float, ended_s: float, outcome: str
    ) -> None:
        """A traced request ended: "ok" or "failed" (answered), or the reason why not."""

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        """The model answered these requests, the last `failed` of them with an error. Latencies count from arrival."""

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        """The requests of `on_answer` that succeeded: for each, its front-end's label for the version, its queue time
        before the last send, and its latency since arrival."""

    def on_reject(self, model: str, version: str, reason: str) -> None:
        """A request ended without a response of the model; `docs/metrics.md` lists the reasons."""

    def on_complete(self, record: BatchRecord) -> None:
        """A batch ended."""

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        """One item failed, alone or within a request of many."""

    def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
        """A worker came up `seconds` after its start; `on_worker` follows."""

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        """`state` is "ready", "died", "failed" (to load), "leaking" (its memory grows steadily), "replaced" (after
        `max_requests` or above `max_memory_bytes`), or "removed" (the slot is gone for good)."""

    def on_unload(self, model: str, version: str) -> None:
        """No handle of this version is left: no hook is called for it again unless it is loaded again."""

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        """The model's own counters and timers changed."""
