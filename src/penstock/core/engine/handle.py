"""ModelHandle: one version of one model, from loading to unloading."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from msgspec import structs

from penstock.config.schema import AutoscaleConfig, BatchingConfig, with_options
from penstock.core.arrays import nbytes_of
from penstock.core.batching.ladder import DEFAULT_BATCH
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Unbatched
from penstock.core.batching.residency import ResidentModel
from penstock.core.batching.scheduler import Scheduler
from penstock.core.batching.sequences import SequenceLimits, SequenceTable
from penstock.core.codecs import OBJECT, traits_of
from penstock.core.contracts import RESTART_WAIT_S, ModelSnapshot, Observer, Transport
from penstock.core.engine.admission import AdmissionQueue, WaitingRequest
from penstock.core.engine.autoscaling import LoadScaler
from penstock.core.engine.batcher import Batcher
from penstock.core.engine.calls import Call, notify, overriding, reason_of
from penstock.core.engine.direct import DirectDriver
from penstock.core.engine.drivers import LoopDriver
from penstock.core.engine.instances import Instances
from penstock.core.engine.rules import (
    bucket_rule,
    check_rules,
    file_stamps,
    length_rule,
    policy_of,
    queue_bound,
    rows_rule,
    sequence_of,
)
from penstock.core.engine.upkeep import Upkeep
from penstock.core.wire.slabs import Slab
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import Conflict, ModelNotReady, PenstockError, QueueFull
from penstock.types import Graphs, Item, ModelMetadata, ModelStatus, Ready, Sink

log = logging.getLogger("penstock.engine")

_COUPLED = (
    'results depend on other rows, so requests run one by one, uncut; set batching.rows = "none" if that is right,'
    ' "axis0" if it is not'
)


class ModelHandle:
    """Owns the instances, scheduler and batcher of one model version, and its state.

    `policy` makes a batching policy that overrides the configured one; `driver` is the batcher's, if it is not that of
    the loop. It has more than 15 attributes: the parts that it owns, and what every request reads of them,
    looked up once.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        transport: Transport,
        devices: Sequence[str],
        max_queue_bytes: int,
        observers: Sequence[Observer],
        policy: Callable[[], BatchPolicy] | None = None,
        driver: DirectDriver | LoopDriver | None = None,
    ) -> None:
        self.spec, self.name, self.version = spec, spec.name, spec.version
        self.config = spec.config
        self.files = file_stamps(spec.config, spec.sys_path)
        self.metadata: ModelMetadata | None = None
        self.graphs: Graphs | None = None  # of the instance that came up last
        self.state = "LOADING"
        self.batching: BatchingConfig = spec.config.batching  # includes the model's own options after loading
        check_rules(spec.config.batching)
        self._policy = policy
        self.driver = driver
        self.on_state: Callable[[], object] = lambda: None  # the state may have changed
        self._transport = transport
        self._max_queue_bytes = max_queue_bytes
        self.batcher: Batcher | None = None  # None before the first worker is up
        self.mode: Literal["batch", "continuous"] = "batch"
        self._full_rows = 0  # rows that run together: of a full batch, or of all active items
        self._broken = False
        self.sequences: SequenceTable | None = None  # of a model with `max_sequences`
        self.instances = Instances(spec, transport, devices, observers, self._on_up, self._on_change)
        self.observe(observers)
        self.resident: ResidentModel | None = None  # of a model that an engine with budgets loads and unloads
        self.on_wanted: Callable[[], None] | None = None  # for a resident model: a request came while it is not up
        self._early = AdmissionQueue(self._rejected)  # requests that wait for the first worker
        self.scaler: LoadScaler | None = None
        self.follow_load(spec.config.autoscale)
        if spec.config.transport not in ("inline", "thread"):
            self.instances.on_used = Upkeep(spec.config, self.instances).check

    def observe(self, observers: Sequence[Observer]) -> None:
        """Reports to these observers from now on."""
        self._observers = self.instances.observers = observers
        self._arrival_observers = overriding(observers, "on_arrival")
        self._request_observers = overriding(observers, "on_request")
        self._on_item = next((observer.on_item for observer in overriding(observers, "on_item")), None)
        if self.batcher is not None:
            self.batcher.observe(observers)

    # ---- lifecycle

    async def load(self) -> None:
        """Waits until every slot has reported and one is up. Raises LoadFailed, ConfigError; Conflict if aborted."""
        await self.instances.load()

    async def scale(self, instances: int, drain_s: float) -> None:
        """Waits until new instances are up and removed ones have answered their batches.

        Raises ModelNotReady while the model loads or drains, LoadFailed if a new instance does not load, BadRequest
        if the transport cannot be scaled, and Conflict if the number follows the load. After an error, nothing has
        changed.
        """
        if self.scaler is not None:
            limits = self.scaler.autoscaler.limits
            raise Conflict(
                f"model '{self.name}' has {limits.fewest} to {limits.most} instances, as its load needs"
                " (autoscale.min, autoscale.max); load it again with other limits"
            )
        if self.resident is not None:
            raise Conflict(
                f"model '{self.name}' has a place in the memory of its device (residency) for {self.instances.full}"
                " instances; load it again with another number"
            )
        if self.state not in ("READY", "FAILED"):
            raise ModelNotReady(f"model '{self.name}' is {self.state.lower()}", retry_after_s=1.0)
        await self.instances.scale(instances, drain_s)

    def follow_load(self, config: AutoscaleConfig) -> None:
        """Lets the number of instances follow the load within other limits, or fixes it."""
        if self.scaler is not None:
            self.scaler.close()
        self.scaler = None if config.max is None else LoadScaler(config, self.instances)
        if self.scaler is not None and self.batcher is not None:
            self.scaler.watch(self.batcher, self.batching, self._full_rows)

    def set_drained(self, drained: bool) -> None:
        """Refuses new requests until it is set back. Raises ModelNotReady if it does not answer, Conflict if it is not
        drained."""
        if self.state != "DRAINED":
            if not drained:
                raise Conflict(f"model '{self.name}' version '{self.version}' is {self.state.lower()}, not drained")
            if self.state != "READY":
                raise ModelNotReady(f"model '{self.name}' is {self.state.lower()}: only a ready version can be drained")
        self.state = "DRAINED" if drained else "FAILED"
        self._on_change()

    async def drained(self, drain_s: float) -> None:
        """Waits until the accepted requests are answered. Raises ModelNotReady if that takes longer."""
        if self.batcher is not None and not await self.batcher.drain(drain_s):
            raise ModelNotReady(
                f"model '{self.name}' version '{self.version}' takes no new requests, but {self.batcher.pending} are"
                f" not answered after {drain_s:g} s (server.drain_s)"
            )

    async def close(self, drain_s: float) -> None:
        """Answers accepted requests for at most `drain_s`, then ends every worker."""
        self.state = "DRAINING"
        self.follow_load(AutoscaleConfig())
        self._early.fail(ModelNotReady(f"model '{self.name}' was stopped before the request ran"))
        self.instances.closing()
        if self.resident is not None and not self.instances.up and self.batcher is not None:
            self.batcher.fail_queued(ModelNotReady(f"model '{self.name}' was stopped before the request ran"))
        end = time.monotonic() + drain_s
        if self.batcher is not None and not await self.batcher.drain(drain_s):
            log.warning(
                "drain_timeout model=%s pending=%d: their callers get an error", self.name, self.batcher.pending
            )
        await self.instances.close(max(0.0, end - time.monotonic()))
        if self.batcher is not None:
            self.batcher.close(ModelNotReady(f"model '{self.name}' was stopped before the request ran"))

    # ---- callbacks of the instances

    def _on_up(self, ready: Ready) -> Batcher:
        self.metadata, self.graphs = ready.metadata, ready.graphs
        if self.batcher is None:
            self.batcher = self._make_batcher(ready)
            self.batcher.on_broken = self._on_broken
            if self.scaler is not None:
                self.scaler.watch(self.batcher, self.batching, self._full_rows)
        return self.batcher

    def _make_batcher(self, ready: Ready) -> Batcher:
        """Raises ConfigError, or any error of a policy."""
        b = self.batching = with_options(self.config.batching, ready.options)
        self._rows_of, self._bucket_of = rows_rule(b), bucket_rule(b)
        self._length_of = length_rule(b, ready.metadata.inputs)
        self._custom_rows = b.rows not in ("auto", "axis0")
        size = b.max_batch_size if b.max_batch_size != "auto" else ready.max_batch_size or DEFAULT_BATCH
        size = ready.sizes[-1] if ready.sizes else size
        size = size if ready.concurrency == 1 else min(size, ready.concurrency)
        size = 1 if b.rows == "none" else size
        if ready.coupled:
            log.warning("rows_coupled model=%s found=%r: %s", self.name, ready.coupled, _COUPLED)
        make_policy = self._policy or partial(policy_of, b)
        self.mode, self._full_rows = ready.mode, size
        if ready.mode == "continuous":  # requests go one by one, each as soon as a place is free
            make_policy, size, self._full_rows = Unbatched, 1, ready.concurrency
        limits = None
        if b.max_sequences:
            limits = SequenceLimits(b.max_sequences, b.sequence_idle_s, b.sequence_backlog, b.sequence_timeout_s)
            if b.policy == "adaptive":  # it learns from requests that any slot may run
                make_policy = partial(policy_of, structs.replace(b, policy="fixed", max_hold_s=0.0))
        scheduler = Scheduler(
            make_policy(),
            max_batch_size=size,
            max_queue=queue_bound(b, self._most_instances, self._full_rows, ready.metadata.task),
            max_queue_bytes=self._max_queue_bytes,
            depth=self._transport.depth,
            idempotent=b.idempotent,
            priority=b.priority,
            horizon_s=b.slo_s or b.timeout_s,
            sequences=limits,
            sizes=ready.sizes,
            lengths=self._length_of is not None and limits is None,
            max_tokens=b.max_tokens,
        )
        self.sequences = scheduler.sequences
        # other batches do not take as long as the warm-up's, whose lengths are not known
        if ready.concurrency == 1 and self._length_of is None:
            scheduler.prime(ready.profile)
        quarantine_s = self.config.restart.quarantine_s
        return Batcher(
            self.name, self.version, self._transport, scheduler, b, self._observers, quarantine_s, self.driver
        )

    def _on_broken(self) -> None:
        self._broken = self.instances.broken = True
        self._on_change()

    def _on_change(self) -> None:
        """Adapts the state and the queue limit to the instances."""
        if self.batcher is not None:
            task = self.metadata.task if self.metadata else ""
            self.batcher.scheduler.max_queue = queue_bound(self.batching, self._most_instances, self._full_rows, task)
        if self.state in ("DRAINING", "DRAINED"):
            return
        if self.instances.up and not self._broken:
            self.state = "READY"
            if self._early:
                self._forward_early()
        elif self.state != "LOADING" or self.instances.loaded:
            starts = self.resident is not None or (self.scaler is not None and self.scaler.autoscaler.limits.zero)
            self.state = "IDLE" if starts and not self._broken and not self.instances.failing else "FAILED"
        self.on_state()

    @property
    def _most_instances(self) -> int:
        """The largest number of instances that the queue may feed."""
        return self.instances.count if self.scaler is None else self.scaler.autoscaler.limits.most

    # ---- requests

    def submit(self, item: Item, sink: Sink) -> Call | WaitingRequest:
        """Queues one item. Raises ModelNotReady, QueueFull, DeadlineExceeded, BadRequest."""
        if self._arrival_observers:
            notify(self._arrival_observers, "on_arrival", self.name, self.version)
        try:
            if self._on_item is not None:
                try:
                    self._on_item(item)
                except Exception:
                    log.exception("observer_failed hook=on_item")
            batcher = self.batcher
            if batcher is None or self.state != "READY":
                if self.state == "IDLE" and self.on_wanted is not None:
                    self.on_wanted()
                    if batcher is None:
                        return self._wait(item, sink)
                self._refuse(batcher)
                assert batcher is not None
            if item.codec != OBJECT and (self._custom_rows or traits_of(item.codec).peek is not None):
                item.rows = self._rows_of(item)
            if self.sequences is not None:
                item.sequence = sequence_of(item)
            bucket = self._bucket_of(item) if self._bucket_of is not None else ""
            if self._length_of is not None:
                bucket, item.length = self._length_of(item)
            payload = item.payload
            if isinstance(payload, (bytes, memoryview)):
                nbytes = len(payload)
            elif item.many:
                nbytes = nbytes_of(payload)
            else:
                nbytes = payload.length if isinstance(payload, Slab) else getattr(payload, "nbytes", 0)
                if not isinstance(nbytes, int):  # a payload can be any object
                    nbytes = 0
            if self._request_observers:
                notify(self._request_observers, "on_request", self.name, self.version, item.rows, nbytes)
            return batcher.submit(item, sink, bucket, nbytes)
        except Exception as e:
            self._rejected(reason_of(e))
            if item.trace is not None:
                now = time.monotonic()
                notify(self._observers, "on_traced_end", self.name, self.version, item, now, now, reason_of(e))
            raise

    def _wait(self, item: Item, sink: Sink) -> WaitingRequest:
        """Keeps a request until the first worker is up. Raises QueueFull."""
        config = self.config.batching
        limit = queue_bound(config, self._most_instances, DEFAULT_BATCH)
        if len(self._early) >= limit:
            raise QueueFull(f"the queue is full ({limit} requests wait for the model to load): try again later")
        return self._early.add(item, sink, timeout_s=config.timeout_s)

    def _rejected(self, reason: str) -> None:
        notify(self._observers, "on_reject", self.name, self.version, reason)

    def _forward_early(self) -> None:
        known, self._arrival_observers = self._arrival_observers, []  # they were notified when it arrived
        try:
            self._early.forward(self.submit)
        finally:
            self._arrival_observers = known

    def not_loaded(self, error: PenstockError) -> None:
        """Answers all requests that wait for a worker."""
        self._early.fail(error)
        if self.batcher is not None:
            self.batcher.fail_queued(error)

    def _refuse(self, batcher: Batcher | None) -> None:
        """Raises ModelNotReady, unless the request starts a worker, or one restarts soon."""
        if self.state == "IDLE":
            return
        if batcher is not None and self.state == "FAILED" and not self._broken:
            back_in_s = self.instances.back_in_s()
            if back_in_s is not None and back_in_s <= RESTART_WAIT_S:
                return
            raise ModelNotReady(
                f"model '{self.name}' has no running worker",
                retry_after_s=self.instances.retry_in_s(),
                detail=self.instances.why_down().detail,
            )
        raise ModelNotReady(f"model '{self.name}' is {self.state.lower()}", retry_after_s=1.0)

    # ---- state

    @property
    def ready(self) -> bool:
        """True while a worker can answer, or starts for a request."""
        return self.state in ("READY", "IDLE")

    def status(self) -> ModelStatus:
        scheduler = self.batcher.scheduler if self.batcher else None
        return ModelStatus(
            name=self.name,
            version=self.version,
            state=self.state,
            instances=self.instances.count,
            ready_instances=self.instances.up,
            max_batch_size=self._full_rows,
            model_batch_size=self._declared_batch(),
            devices=self.instances.devices(),
            model_devices=self._declared_devices(),
            queue=scheduler.queued if scheduler else 0,
        )

    def _declared_batch(self) -> int | None:
        """The declared batch size of a model that forms its own batches, such as a pipeline."""
        found = self.metadata.parameters.get("max_batch_size") if self.metadata else None
        return found if isinstance(found, int) else None

    def _declared_devices(self) -> tuple[str, ...]:
        found = self.metadata.parameters.get("devices") if self.metadata else None
        return tuple(found) if isinstance(found, list) and all(isinstance(device, str) for device in found) else ()

    @property
    def pending(self) -> int:
        """The number of accepted requests without a response."""
        return self.batcher.pending if self.batcher else len(self._early)

    @property
    def requests(self) -> int:
        """The number of rows that arrived since the start."""
        return self.batcher.scheduler.arrived_rows if self.batcher else len(self._early)

    def reading(self) -> ModelSnapshot:
        """The values for the metric gauges."""
        batcher = self.batcher
        resident = None if self.resident is None else self.resident.explain()
        if batcher is None:
            return ModelSnapshot(self.status(), resident=resident)
        scheduler, now = batcher.scheduler, time.monotonic()
        with batcher.guard:
            return ModelSnapshot(
                status=self.status(),
                helpers=self.instances.up * self.config.preprocess_processes,
                in_flight=batcher.pending,
                queue_rows=scheduler.queued_rows,
                queue_bytes=scheduler.queued_bytes,
                max_queue_rows=scheduler.max_queue,
                scheduler=scheduler.explain(),
                pids=self.instances.pids(),
                resident=resident,
                oldest_s=max(0.0, now - scheduler.oldest_arrival_s),
                slo_s=self.batching.slo_s,
                busy_s=scheduler.worked_s(now),
                arrived_rows=scheduler.arrived_rows,
                arrived_bytes=scheduler.arrived_bytes,
            )

    def statistics(self) -> dict[str, object]:
        """The statistics of the scheduler, the graphs and the autoscaler, once a worker was up; of the residency."""
        found: dict[str, object] = {}
        if self.batcher is not None:
            with self.batcher.guard:
                found = {"mode": self.mode, **self.batcher.scheduler.explain()}
        if self.graphs is not None:
            found["graphs"] = structs.asdict(self.graphs)
        if self.scaler is not None:
            found["autoscale"] = self.scaler.explain()
        if self.resident is not None:
            found["residency"] = self.resident.explain()
        return found
