"""Instances: the worker slots of one model version, from first start to last exit."""

import asyncio
import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field

from penstock.config.schema import MOST
from penstock.core.batching.scheduler import Scheduler
from penstock.core.contracts import Observer, Transport
from penstock.core.engine.batcher import Batcher
from penstock.core.engine.calls import notify
from penstock.core.engine.rules import next_device
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, Conflict, LoadFailed, LoadOutOfMemory, ModelNotReady, PenstockError, describe
from penstock.types import MetricDelta, Ready

log = logging.getLogger("penstock.engine")

LOADING_S = 10.0  # between two lines of a load that takes long
HOPELESS_FAILURES = 2  # consecutive failures after which callers no longer wait for the next attempt


class Instance(Struct, eq=False):
    """One worker slot. `retry_at` is the time of the next start, in the past while it is starting."""

    device: str
    up: bool = False
    reported: bool = False  # it came up or failed once
    leaving: bool = False  # being removed, but still running a batch
    pid: int = 0  # pid of the last worker that came up
    to_replace: bool = False  # this worker is to be replaced
    failures: int = 0  # consecutive
    retry_at: float | None = None
    error: PenstockError | None = None
    since_s: float = field(default_factory=time.time)  # creation time, seconds since the epoch


class WorkerSnapshot(Struct, frozen=True):
    """The state of one worker slot; `pid` is 0 for a worker without its own process."""

    slot: int
    device: str
    up: bool
    pid: int
    since_s: float


class Instances:
    """Starts, counts, scales and ends the instances of one model version (a TransportListener).

    `on_up` is called with the Ready message of each worker and returns the batcher, which its first call creates.
    `on_change` is called whenever the number of instances, or of live instances, may have changed.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        transport: Transport,
        devices: Sequence[str],
        observers: Sequence[Observer],
        on_up: Callable[[Ready], Batcher],
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._transport = transport
        self.observers = observers
        self._on_up, self._on_change = on_up, on_change
        self._slots = {slot: Instance(device) for slot, device in enumerate(devices)}
        self.full = len(devices)
        self.replaces_in_place = False  # there is no memory for an instance that replaces another one
        self._batcher: Batcher | None = None
        self.broken = False  # the scheduler failed: it receives no more slot changes
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scaling = asyncio.Lock()
        self._report_came = asyncio.Event()
        self._end: PenstockError | None = None  # why scaling was stopped
        self._removals: set[asyncio.Task[None]] = set()  # and replacements
        self.on_used: Callable[[int, int], None] = lambda slot, requests: None
        self.on_started: Callable[[float], None] = lambda seconds: None  # an instance came up

    # ---- state

    def _seen(self) -> dict[int, Instance]:
        return {slot: i for slot, i in self._slots.items() if not i.leaving}

    @property
    def count(self) -> int:
        """The number of instances, up or not."""
        return len(self._seen())

    @property
    def up(self) -> int:
        return sum(i.up for i in self._slots.values())

    @property
    def failing(self) -> bool:
        """True while an instance has died or not loaded, and is not up again."""
        return any(i.failures and not i.leaving for i in self._slots.values())

    @property
    def loaded(self) -> bool:
        """True once the first load has ended, successfully or not."""
        return self._loaded.done()

    def devices(self) -> tuple[str, ...]:
        return tuple(i.device for _, i in sorted(self._seen().items()))

    def pids(self) -> dict[int, int]:
        """The worker processes that are up, by slot; a thread is no process of its own."""
        return {slot: i.pid for slot, i in self._slots.items() if i.up and i.pid not in (0, os.getpid())}

    def pid(self, slot: int) -> int | None:
        """The pid of the slot's worker: 0 without a process of its own, None without a worker or with one to
        replace."""
        instance = self._slots.get(slot)
        return None if instance is None or not instance.up or instance.to_replace else instance.pid

    @property
    def label(self) -> str:
        """The model and its version, for the log."""
        return f"model={self._spec.name} version={self._spec.version}"

    def workers(self) -> list[WorkerSnapshot]:
        """The state of every slot that is not being removed, in order."""
        pids = self.pids()
        return [
            WorkerSnapshot(slot, i.device, i.up, pids.get(slot, 0), i.since_s)
            for slot, i in sorted(self._seen().items())
        ]

    def retry_in_s(self) -> float | None:
        """Seconds until the next worker is tried, 0 while one is starting; None if none will be."""
        return self._soonest(self._slots.values())

    def back_in_s(self) -> float | None:
        """Like `retry_in_s`, without workers that failed repeatedly, whose next attempt will probably fail too."""
        return self._soonest(i for i in self._slots.values() if i.failures < HOPELESS_FAILURES)

    @staticmethod
    def _soonest(instances: Iterable[Instance]) -> float | None:
        soonest = min((i.retry_at for i in instances if i.retry_at is not None and not i.leaving), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    # ---- start and end

    async def load(self) -> None:
        """Returns when every slot has reported and one is up. Raises LoadFailed, ConfigError, and the error that ends
        it."""
        for instance in self._slots.values():  # a resident model may have waited for its first request
            instance.since_s = time.time()
        began_s = time.monotonic()
        await self._transport.start(self)
        while not (await asyncio.wait([self._loaded], timeout=LOADING_S))[0]:
            found = time.monotonic() - began_s, self.up, self.count
            log.info("event=loading %s seconds=%.0f instances_up=%d of=%d", self.label, *found)
        await self._loaded

    def abort(self) -> bool:
        """Aborts a running load or scale-up, which raises Conflict. True if the first load was still running."""
        loading = not self._loaded.done()
        self._fail(Conflict(f"model '{self._spec.name}' was unloaded while it was loading"))
        if self._scaling.locked():
            self._stop(Conflict(f"model '{self._spec.name}' was unloaded while it was scaled"))
        return loading

    def closing(self) -> None:
        """Aborts a running scale operation with ModelNotReady, and refuses further ones."""
        self._stop(ModelNotReady(f"model '{self._spec.name}' was stopped while it was scaled"))

    async def close(self, drain_s: float) -> None:
        """Ends every worker; waits up to `drain_s` for running batches."""
        self.closing()
        await self._transport.close(drain_s)
        await asyncio.gather(*self._removals, return_exceptions=True)
        for slot in list(self._slots):
            self._gone(slot)
        self._fail(ModelNotReady(f"model '{self._spec.name}' was stopped while it was loading"))

    def forget(self) -> None:
        self._transport.forget()

    def _stop(self, why: PenstockError) -> None:
        self._end = self._end or why
        self._report_came.set()

    def _fail(self, error: PenstockError) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # asyncio warns of an exception that is never read

    # ---- scale

    async def scale(self, instances: int, drain_s: float) -> None:
        async with self._scaling:
            if self._end is not None:
                raise self._end
            missing = instances - self.count
            if missing > 0:
                await self._grow(missing, drain_s)
            elif missing < 0:
                await self._take_away(self._least_used()[:-missing], drain_s)

    async def bring_up(self, drain_s: float) -> None:
        """Returns when all instances are up, the first time those that it was made with. Raises LoadFailed."""
        if self.loaded:
            await self.scale(self.full, drain_s)
        else:
            await self.load()

    async def leave(self, drain_s: float) -> None:
        """Ends every instance after its batches, until `bring_up`."""
        await self._take_away(list(self._seen()), drain_s)

    def follow(self, number: int, drain_s: float) -> None:
        """Starts or removes instances in the background until there are `number`. An instance that fails to load
        counts too: its transport retries it at growing intervals, and it is the first to leave."""
        if self._end is not None or not self.loaded:
            return
        missing = number - self.count
        if missing > 0:
            self._spec.instances = number  # they share the threads of the machine so
            for _ in range(missing):
                slot = self._reserve()
                self._slots[slot].retry_at = time.monotonic()  # requests wait for it
                self._add(slot)
            self._changed()
        elif missing < 0 and not self._scaling.locked():  # a replacement has one more for a while
            self._keep(asyncio.create_task(self._take_away(self._least_used()[:-missing], drain_s)))

    def _least_used(self) -> list[int]:
        """The slots in the order in which they leave: those without a worker first, then the youngest."""
        seen = self._seen()
        return sorted(seen, key=lambda slot: (seen[slot].up, -slot))

    async def _grow(self, missing: int, drain_s: float) -> None:
        self._spec.instances = self.count + missing  # they share the threads of the machine so
        await self._start(missing, drain_s)

    async def _start(self, missing: int, drain_s: float, device: str | None = None) -> None:
        """Returns when all new instances are up; if one fails, removes them all."""
        new: list[int] = []
        try:
            for _ in range(missing):
                if self._end is not None:
                    break
                slot = self._reserve(device)
                self._add(slot)
                new.append(slot)
                await asyncio.sleep(0)  # starting a worker may take a millisecond or two: let others in between
            while self._end is None and not self._settled(new):
                self._report_came.clear()
                await self._report_came.wait()
            if self._end is not None:
                raise self._end
            if not all(self._slots[slot].up for slot in new):
                raise self._failure(new, f"a new instance of model '{self._spec.name}' did not load")
        except BaseException:
            await self._take_away(new, drain_s)  # one that came up has work already
            raise

    def _reserve(self, device: str | None = None) -> int:
        """A new slot, by default on the least used device."""
        slot = next(n for n in itertools.count() if n not in self._slots)
        used = [i.device for i in self._slots.values()]
        self._slots[slot] = Instance(device or next_device(self._spec.config, used))
        return slot

    def _add(self, slot: int) -> None:
        """Begins to start the worker of a new slot."""
        try:
            self._transport.add_slot(slot, self._slots[slot].device)
        except BaseException:
            del self._slots[slot]
            raise

    def _settled(self, slots: Sequence[int]) -> bool:
        """True when all of them are up, or one has failed."""
        found = [self._slots[slot] for slot in slots]
        return all(i.up for i in found) or any(i.reported and not i.up for i in found)

    async def _take_away(self, slots: Sequence[int], drain_s: float) -> None:
        """Hides the slots at once. Each then answers its batches and ends its worker, even if the caller leaves."""
        slots = [slot for slot in slots if slot in self._slots]  # `close` may have been faster
        for slot in slots:
            self._slots[slot].leaving, self._slots[slot].up = True, False
            if (scheduler := self._scheduler()) is not None and self._batcher is not None:
                with self._batcher.guard:
                    scheduler.slot_retired(slot, time.monotonic())
        self._spec.instances = max(1, self.count)
        self._changed()
        removals = [asyncio.create_task(self._remove(slot, drain_s)) for slot in slots]
        for removal in removals:
            self._keep(removal)
        await asyncio.shield(asyncio.gather(*removals))

    # ---- replacement

    def replace(self, slot: int, why: str) -> None:
        """Starts to replace a worker without losing a request: it answers its batches, and the new one takes over."""
        instance = self._slots[slot]
        if self._end is None and not instance.to_replace:
            instance.to_replace = True
            self._keep(asyncio.create_task(self._replace(slot, instance, why)))

    def _keep(self, change: asyncio.Task[None]) -> None:
        self._removals.add(change)
        change.add_done_callback(self._removals.discard)

    async def _replace(self, slot: int, old: Instance, why: str) -> None:
        """The new worker starts first; if memory has no room for both, the old one ends first. If the new one does not
        load for another reason, the old one stays. `run_timeout_s` bounds the batches of the old one.
        """
        async with self._scaling:
            if self._slots.get(slot) is not old or not old.to_replace or old.leaving or self._end is not None:
                return  # it died, or was removed, meanwhile
            log.info("worker_replaced %s slot=%d %s", self.label, slot, why)
            self.note(slot, "replaced")
            try:
                if self.replaces_in_place:
                    raise LoadOutOfMemory("the budget of the device has room for one of the two")
                await self._start(1, MOST, old.device)
            except PenstockError as e:
                if self._end is not None or not old.to_replace:
                    return
                if not isinstance(e, LoadOutOfMemory):
                    old.to_replace = False
                    log.warning("worker_not_replaced %s slot=%d error=%s: the old one stays", self.label, slot, e)
                    return
                log.info("no_room_for_two %s slot=%d: the old worker ends first", self.label, slot)
                new = self._reserve(old.device)
                self._slots[new].retry_at = time.monotonic()  # requests wait for it
                await self._take_away([slot], MOST)
                if self._end is None and new in self._slots and not self._slots[new].leaving:
                    self._add(new)
            else:
                await self._take_away([slot], MOST)

    async def _remove(self, slot: int, drain_s: float) -> None:
        try:
            await self._transport.remove_slot(slot, drain_s)
        finally:
            self._gone(slot)

    def _gone(self, slot: int) -> None:
        if self._slots.pop(slot, None) is not None:
            self.note(slot, "removed")

    # ---- slots (TransportListener)

    def slot_up(self, slot: int, ready: Ready) -> None:
        instance = self._slots.get(slot)
        if instance is None or instance.leaving:
            return
        try:
            self._batcher = self._on_up(ready)
        except Exception as e:  # another worker would fail in the same way
            instance.error = _load_error(e, f"the batcher of model '{self._spec.name}' could not be made")
            instance.failures, instance.reported = instance.failures + 1, True
            self._fail(instance.error)
            self._report_came.set()
            self._on_change()
            return
        instance.pid, instance.up = ready.pid, True
        seconds = time.time() - instance.since_s if instance.retry_at is None else time.monotonic() - instance.retry_at
        instance.failures, instance.retry_at, instance.error = 0, None, None
        if (scheduler := self._scheduler()) is not None:
            scheduler.slot_up(slot, time.monotonic(), ready.concurrency)
        self.on_started(max(0.0, seconds))
        notify(self.observers, "on_load", self._spec.name, self._spec.version, slot, max(0.0, seconds))
        self.note(slot, "ready")
        if ready.metrics:
            self.slot_metrics(slot, ready.metrics)
        self._report(instance)

    def slot_down(self, slot: int, error: PenstockError, retry_in_s: float | None) -> None:
        instance = self._slots.get(slot)
        if instance is None or instance.leaving:
            return
        was_up, instance.up, instance.to_replace = instance.up, False, False
        instance.error, instance.failures = error, instance.failures + 1
        instance.retry_at = None if retry_in_s is None else time.monotonic() + retry_in_s
        if was_up and (scheduler := self._scheduler()) is not None:
            scheduler.slot_down(slot, time.monotonic())
        self.note(slot, "died" if was_up else "failed")
        was_loaded = self._loaded.done()
        self._report(instance)
        if was_loaded or not self._loaded.done() or self.up:  # else `load` raises it
            detail = f"\n{error.detail}" if error.detail else ""
            log.warning(
                "slot_down model=%s slot=%d retry_in_s=%s error=%s%s", self._spec.name, slot, retry_in_s, error, detail
            )

    def slot_metrics(self, slot: int, deltas: list[MetricDelta]) -> None:
        notify(self.observers, "on_model_metrics", self._spec.name, self._spec.version, slot, deltas)

    def slot_used(self, slot: int, requests: int) -> None:
        self.on_used(slot, requests)

    def _report(self, instance: Instance) -> None:
        instance.reported = True
        self._report_came.set()
        if not self._loaded.done() and all(i.reported for i in self._slots.values()):
            if self.up:
                self._loaded.set_result(None)
            else:
                self._fail(self._failure(self._slots, f"model '{self._spec.name}' did not load"))
        self._changed()

    def _changed(self) -> None:
        self._on_change()
        if self._batcher is not None:
            self._batcher.wake()

    def _scheduler(self) -> Scheduler | None:
        """None before there is one, and after it failed, because its view of the slots is then wrong."""
        return None if self._batcher is None or self.broken else self._batcher.scheduler

    def why_down(self) -> PenstockError:
        """The last error of an instance that is down; its detail is not empty."""
        error = self._failure(self._slots, f"no instance of model '{self._spec.name}' is running")
        error.detail = error.detail or error.message
        return error

    def _failure(self, slots: Iterable[int], what: str) -> PenstockError:
        """The error of the first of these slots that is down."""
        found = (self._slots[slot] for slot in slots)
        error = next((i.error for i in found if not i.up and i.error is not None), None)
        return LoadFailed(what) if error is None else _load_error(error, what)

    def note(self, slot: int, state: str) -> None:
        """Reports an event of a worker to the observers; see `Observer.on_worker`."""
        notify(self.observers, "on_worker", self._spec.name, self._spec.version, slot, state)


def _load_error(error: Exception, what: str) -> PenstockError:
    """The error as a LoadFailed with the original as cause: for a waiting caller, a worker's death is a failed load."""
    if isinstance(error, (LoadFailed, ConfigError)):
        return error
    if isinstance(error, PenstockError):
        failed = LoadFailed(f"{what}: {error.message}", detail=error.detail)
    else:
        failed = LoadFailed(f"{what}: {describe(error)}", detail="".join(traceback.format_exception(error)))
    failed.__cause__ = error
    return failed
