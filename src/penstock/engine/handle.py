"""ModelHandle: one version of one model, from loading to unloading."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil

from penstock.batching.policies.base import BatchPolicy
from penstock.batching.policies.make import make_policy
from penstock.batching.scheduler import Scheduler
from penstock.config.schema import BatchingConfig, ModelConfig, with_options
from penstock.engine.batcher import Batcher
from penstock.engine.call import Call
from penstock.engine.peek import bucket_rule, rows_rule
from penstock.errors import LoadFailed, ModelNotReady, PenstockError
from penstock.observe.base import ModelReading, Observer, tell
from penstock.plugins import load_object, resolve
from penstock.protocols.base import Codec
from penstock.transports.base import Transport
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, Ready, Sink
from penstock.wire.slabs import Slab

log = logging.getLogger("penstock.engine")

_DEFAULT_BATCH = 64
_QUEUED_BATCHES = 16  # that may wait for each instance, without `max_queue`


def slots_of(config: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """How many instances, and the device of each, in turn over `devices`."""
    devices = config.devices or ("cpu",)
    if config.instances != "auto":
        n = config.instances
    elif all(d == "cpu" for d in devices):
        n = max(1, (psutil.cpu_count(logical=False) or 1) // 2)
    else:
        n = len(devices)
    return n, tuple(devices[i % len(devices)] for i in range(n))


def next_device(devices: Sequence[str], used: Sequence[str]) -> str:
    """Where one more instance belongs: the device with the smallest part of what it is named for."""
    return min(dict.fromkeys(devices), key=lambda d: used.count(d) / devices.count(d))


def check_rules(config: BatchingConfig) -> None:
    """Raises ConfigError for a policy or a rule that does not exist."""
    rows_rule(config)
    bucket_rule(config)
    policy_of(config)


def policy_of(config: BatchingConfig) -> BatchPolicy:
    """A new policy. Raises ConfigError."""
    if ":" in config.policy:
        found: Any = load_object(config.policy)
        policy: BatchPolicy = found()
        return policy
    return make_policy(
        config.policy,
        max_hold_s=None if config.max_hold_s == "auto" else config.max_hold_s,
        slo_s=config.slo_s,
        timeout_s=config.timeout_s,
    )


class ModelHandle:
    """Owns transport, scheduler and batcher of one model version; hears of its slots."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        transport: Transport,
        devices: Sequence[str],
        max_queue_bytes: int,
        observers: Sequence[Observer],
    ) -> None:
        self.name, self.version = name, config.version
        self.config = config
        self._devices = dict(enumerate(devices))  # by slot
        self.metadata: ModelMetadata | None = None
        self.state = "LOADING"
        self._transport = transport
        self._max_queue_bytes = max_queue_bytes
        self._observers = observers
        self.batching: BatchingConfig = config.batching  # with the model's own options, once it is loaded
        self._batcher: Batcher | None = None
        check_rules(config.batching)
        self._codecs: dict[str, Codec] = {}
        self._up: set[int] = set()
        self._pids: dict[int, int] = {}  # by slot, of the last worker that came up there
        self._leaving: set[int] = set()  # slots that were removed, but still run something
        self._report_came = asyncio.Event()
        self._reported: set[int] = set()
        self._retry_at: dict[int, float | None] = {}
        self._error: PenstockError | None = None
        self._broken = False
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- life

    async def load(self) -> None:
        """Returns when every slot has reported and one is up. Raises LoadFailed, TargetNotFound."""
        await self._transport.start(self)
        await self._loaded

    async def close(self, drain_s: float) -> None:
        self.state = "DRAINING"
        self._report_came.set()
        end = time.monotonic() + drain_s
        if self._batcher is not None and not await self._batcher.drain(drain_s):
            log.warning(
                "drain_timeout model=%s pending=%d: their callers get an error", self.name, self._batcher.pending
            )
        await self._transport.close(max(0.0, end - time.monotonic()))
        if self._batcher is not None:
            self._batcher.close(ModelNotReady(f"model '{self.name}' was stopped before the request was run"))
        if not self._loaded.done():
            self._loaded.set_exception(ModelNotReady(f"model '{self.name}' was stopped while it was loading"))
            self._loaded.exception()  # nobody may be waiting for it: that is no mistake

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._transport.forget()

    # ---- instances

    async def scale(self, instances: int, drain_s: float) -> None:
        """Returns when there are so many: new ones are up, those that go have answered what they had.

        Raises ModelNotReady while it is loading or draining; LoadFailed if a new one does not load, and BadRequest if
        the transport can have no more: nothing has changed then.
        """
        if self.state not in ("READY", "FAILED"):
            raise ModelNotReady(f"model '{self.name}' is {self.state.lower()}", retry_after_s=1.0)
        missing = instances - self.instances
        if missing > 0:
            await self._grow(missing)
        elif missing < 0:
            # those without a worker go first, then the youngest
            going = sorted(self._devices.keys() - self._leaving, key=lambda n: (n in self._up, -n))[:-missing]
            await self._take_away(going, drain_s)

    async def _grow(self, missing: int) -> None:
        new: list[int] = []
        try:
            for _ in range(missing):
                if self.state == "DRAINING":
                    break
                device = next_device(self.config.devices or ("cpu",), list(self._devices.values()))
                slot = self._transport.add_slot(device)
                self._devices[slot] = device
                new.append(slot)
                await asyncio.sleep(0)  # starting a worker may take a millisecond or two: let others in between
            while self.state != "DRAINING" and not self._reported.issuperset(new):
                self._report_came.clear()
                await self._report_came.wait()
        except BaseException:
            await self._take_away(new, 0.0)
            raise
        if self.state == "DRAINING":
            raise ModelNotReady(f"model '{self.name}' was stopped while it was scaled")
        if not self._up.issuperset(new):
            await self._take_away(new, 0.0)
            raise self._error or LoadFailed(f"a new instance of model '{self.name}' did not load")
        self._bound_queue()

    async def _take_away(self, slots: Sequence[int], drain_s: float) -> None:
        """Out of sight first; then each slot answers what it has, and its worker ends."""
        self._leaving.update(slots)
        for slot in slots:
            self._up.discard(slot)
            if self._batcher is not None:
                self._batcher.scheduler.slot_retired(slot, time.monotonic())
        if self._batcher is not None:
            self._bound_queue()
            self._batcher.wake()
        await asyncio.gather(*(self._transport.remove_slot(slot, drain_s) for slot in slots))
        for slot in slots:
            self._leaving.discard(slot)
            self._reported.discard(slot)
            self._retry_at.pop(slot, None)
            del self._devices[slot]

    def _bound_queue(self) -> None:
        """Without a bound of its own, the queue follows the number of instances."""
        if self._batcher is not None and self.batching.max_queue is None:
            scheduler = self._batcher.scheduler
            scheduler.max_queue = _QUEUED_BATCHES * max(1, self.instances) * scheduler.max_batch_size

    @property
    def instances(self) -> int:
        """How many there are to be, up or not."""
        return len(self._devices) - len(self._leaving)

    # ---- slots (TransportListener)

    def slot_up(self, slot: int, ready: Ready) -> None:
        if slot in self._leaving:
            return
        if self._batcher is None:
            try:
                self._batcher = self._make_batcher(ready)
            except PenstockError as e:  # an option of the model's own is wrong: another worker would say the same
                self.state = "FAILED"
                if not self._loaded.done():
                    self._loaded.set_exception(e)
                return
        self.metadata = ready.metadata
        self._pids[slot] = ready.pid
        self._up.add(slot)
        self._retry_at.pop(slot, None)
        if self.state in ("LOADING", "FAILED") and not self._broken:
            self.state = "READY"
        self._batcher.scheduler.slot_up(slot, time.monotonic())
        self._batcher.wake()
        self._tell(slot, "ready")
        self._report(slot)

    def slot_down(self, slot: int, error: PenstockError, retry_in_s: float | None) -> None:
        if slot in self._leaving:
            return
        was_up = slot in self._up
        self._up.discard(slot)
        self._retry_at[slot] = None if retry_in_s is None else time.monotonic() + retry_in_s
        self._error = error
        if not self._up and self.state == "READY":
            self.state = "FAILED"
        last = not self._up and len(self._reported | {slot}) == self._transport.slots
        if self._loaded.done() or not last:  # else `load` raises it
            log.warning(
                "slot_down model=%s slot=%d retry_in_s=%s error=%s%s",
                self.name,
                slot,
                retry_in_s,
                error,
                f"\n{error.detail}" if error.detail else "",
            )
        if was_up and self._batcher is not None:
            self._batcher.scheduler.slot_down(slot, time.monotonic())
            self._batcher.wake()
        self._tell(slot, "died" if was_up else "failed")
        self._report(slot)

    def _tell(self, slot: int, state: str) -> None:
        tell(self._observers, "on_worker", self.name, self.version, slot, state)

    def _report(self, slot: int) -> None:
        self._reported.add(slot)
        self._report_came.set()
        if len(self._reported) < self._transport.slots or self._loaded.done():
            return
        if self._up:
            self._loaded.set_result(None)
        else:
            self.state = "FAILED"
            self._loaded.set_exception(self._error or LoadFailed(f"model '{self.name}' did not load"))

    def _make_batcher(self, ready: Ready) -> Batcher:
        b = self.batching = with_options(self.config.batching, ready.options)
        self._rows_of, self._bucket_of = rows_rule(b), bucket_rule(b)
        size = b.max_batch_size if b.max_batch_size != "auto" else ready.max_batch_size or _DEFAULT_BATCH
        scheduler = Scheduler(
            policy_of(b),
            max_batch_size=size,
            max_queue=b.max_queue or _QUEUED_BATCHES * self._transport.slots * size,
            max_queue_bytes=self._max_queue_bytes,
            depth=self._transport.depth,
            idempotent=b.idempotent,
            priority=b.priority,
            horizon_s=b.slo_s or b.timeout_s,
        )
        scheduler.prime(ready.profile)
        batcher = Batcher(self.name, self.version, self._transport, scheduler, b, self._observers, self._join)
        batcher.on_broken = self._on_broken
        return batcher

    def _on_broken(self) -> None:
        self._broken = True
        if self.state == "READY":
            self.state = "FAILED"

    # ---- requests

    def submit(self, item: Item, sink: Sink, budget_s: float | None, priority: int) -> Call:
        """Queues one item. Raises ModelNotReady, QueueFull, DeadlineExceeded, BadRequest."""
        batcher = self._batcher
        if batcher is None or self.state != "READY":
            self._refuse(batcher)
            assert batcher is not None
        if item.codec != "object":
            item.rows = self._rows_of(item)
        bucket = self._bucket_of(item) if self._bucket_of is not None else ""
        payload = item.payload
        if isinstance(payload, (bytes, memoryview)):
            nbytes = len(payload)
        else:
            nbytes = payload.length if isinstance(payload, Slab) else getattr(payload, "nbytes", 0)
            if not isinstance(nbytes, int):  # any object may be a payload
                nbytes = 0
        return batcher.submit(item, sink, budget_s, priority, bucket, nbytes)

    def _refuse(self, batcher: Batcher | None) -> None:
        """Raises ModelNotReady, unless the only reason is a worker that will be back within a second."""
        if batcher is not None and self.state == "FAILED" and not self._broken:
            soonest = min((t for t in self._retry_at.values() if t is not None), default=None)
            wait = None if soonest is None else max(0.0, soonest - time.monotonic())
            if wait is not None and wait <= 1.0:
                return
            raise ModelNotReady(f"model '{self.name}' has no worker that runs", retry_after_s=wait)
        raise ModelNotReady(f"model '{self.name}' is {self.state.lower()}", retry_after_s=1.0)

    def _join(self, item: Item, parts: list[ItemResult]) -> ItemResult:
        if item.codec == "object":
            return ItemResult(body=[value for part in parts for value in part.body])
        codec = self._codecs.get(item.codec)
        if codec is None:
            codec = self._codecs[item.codec] = resolve("codec", item.codec)(self.name, self.version)
        return codec.join(parts)

    # ---- what it says of itself

    @property
    def ready(self) -> bool:
        return self.state == "READY" and bool(self._up)

    def status(self) -> ModelStatus:
        scheduler = self._batcher.scheduler if self._batcher else None
        return ModelStatus(
            name=self.name,
            version=self.version,
            state=self.state,
            instances=self.instances,
            ready_instances=len(self._up),
            max_batch_size=scheduler.max_batch_size if scheduler else 0,
            devices=tuple(device for slot, device in sorted(self._devices.items()) if slot not in self._leaving),
            queue=scheduler.queued if scheduler else 0,
        )

    def reading(self) -> ModelReading:
        """What the gauges of metrics show."""
        batcher = self._batcher
        if batcher is None:
            return ModelReading(self.status())
        scheduler = batcher.scheduler
        return ModelReading(
            status=self.status(),
            in_flight=batcher.pending,
            queue_rows=scheduler.queued_rows,
            queue_bytes=scheduler.queued_bytes,
            max_queue_rows=scheduler.max_queue,
            told=scheduler.explain(),
            pids={slot: self._pids[slot] for slot in self._up if self._pids[slot] not in (0, os.getpid())},
        )

    def statistics(self) -> dict[str, object]:
        """What the scheduler has learned and done; empty before the first worker is up."""
        return self._batcher.scheduler.explain() if self._batcher else {}
