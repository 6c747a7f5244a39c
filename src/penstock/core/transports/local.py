"""The thread and inline transports: models that run in this process.

Thread: one thread and one loaded model per slot, for code that releases the GIL. A thread cannot be killed: one that
exceeds `run_timeout_s` is abandoned with its model, and another one starts. Inline: the model runs on the event loop's
own thread, for tests and for functions of microseconds.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec

from penstock import metrics
from penstock.core import os_threads
from penstock.core.transports.slot import SlotTransport, WorkerSlot, within
from penstock.core.wire.slabs import Slab
from penstock.core.worker.batch import Emit
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.core.worker.phases import Finisher
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import BadRequest, Cancelled, LoadFailed, PenstockError, WorkerDied
from penstock.types import Batch, BatchPart, Item, Ready

STOP_S = 5.0  # for `unload`; then the thread is abandoned
ABANDONED = "the caller no longer waits for this stream"

Lease = tuple[Slab, "weakref.ref[Any]"]


class ThreadTransport(SlotTransport):
    """One thread per slot. Objects are passed unchanged."""

    def _make(self, number: int, device: str) -> WorkerSlot:
        return ThreadSlot(self._spec, number, device)


class LocalSlot(WorkerSlot):
    """A slot whose model runs in this process. It keeps slabs pinned while the model or its responses refer to them."""

    _held: Sequence[Lease] = ()

    def pass_on(self, part: BatchPart, leases: list[Lease]) -> None:
        """Passes a part to the caller of its batch; `leases` are the batch's if the part is final."""
        sent = self.answered(part)
        if part.final:
            self._held = let_go([*self._held, *leases])
        self.deliver(sent.on_part, part)

    def ended(self, error: PenstockError) -> None:
        """Handles the end of the model. Slabs that it still refers to are never reused."""
        held, self._held = self._held, ()
        for slab, alive in held:
            if alive() is not None:
                slab.retire()
            slab.unpin()
        self.down(error)


class ThreadSlot(LocalSlot):
    """One place for a worker thread."""

    _thread: WorkerThread | None = None

    def launch(self) -> None:
        self._gone = asyncio.Event()
        self._thread = self.new_thread()
        name = f"penstock-{self.spec.name}-{self.number}"
        os_threads.start_thread(self._thread.main, self.spec, self.device, name=name, leave=self._thread.leave)

    def new_thread(self) -> WorkerThread:
        return WorkerThread(self)

    def submit(self, batch: Batch) -> list[Slab] | BatchPart:
        assert self._thread is not None
        items, leases = readable(batch.items)
        self._thread.put((batch.id, items, leases))
        return [slab for slab, _ in leases]

    def abandon(self, batch_id: int) -> None:
        if self._thread is not None:
            self._thread.unwanted = batch_id

    def kill(self, why: PenstockError) -> None:
        """The thread runs until its call returns and then ends; memory that it refers to is never reused."""
        if self._thread is None:
            return
        self._thread.leave()
        self._thread = None
        for sent in list(self.sent.values())[:1]:
            for slab in sent.slabs:
                slab.retire()
        self._gone.set()
        self.ended(why)

    async def stop(self, idle: bool) -> None:
        if self._thread is None:
            return
        self._thread.put(None)
        if not idle or not self.up or not await within(self._gone, STOP_S):  # do not wait for a thread that still loads
            self.kill(WorkerDied("the workers were stopped before the batch was answered"))

    # ---- called for the thread, on the loop

    def on_up(self, thread: WorkerThread, ready: Ready) -> None:
        if thread is self._thread:
            self.is_up(ready)

    def on_part(self, thread: WorkerThread, part: BatchPart, leases: list[Lease]) -> None:
        if thread is self._thread:
            self.pass_on(part, leases)

    def on_end(self, thread: WorkerThread, error: PenstockError) -> None:
        if thread is self._thread:
            self._thread = None
            self._gone.set()
            self.ended(error)


Work = tuple[int, list[Item], list[Lease]]  # batch, its items, the leases of their slabs
Finishing = tuple[Callable[[], BatchPart], list[Lease]]


class WorkerThread:
    """One thread with its model, until it ends or is abandoned. A second one finishes batches that overlap."""

    def __init__(self, slot: ThreadSlot) -> None:
        self.abandoned = False
        self.unwanted = 0  # the last abandoned batch
        self.slot = slot
        self._batches: SimpleQueue[Work | None] = os_threads.new_queue()
        self._finisher: Finisher[Finishing] | None = None
        self._failed: BaseException | None = None  # in the second thread

    def put(self, work: Work | None) -> None:
        """Gives the thread its next batch; None: it ends."""
        self._batches.put(work)

    def leave(self) -> None:
        """Abandons the thread, which ends after its call."""
        self.abandoned = True
        self.put(None)  # it may wait for the next batch

    def next(self) -> Work | None:
        """In the thread: waits for the next batch."""
        return self._batches.get()

    def answer(self, part: BatchPart, leases: list[Lease]) -> None:
        """In the thread: passes a part of a batch on; `leases` are the batch's if the part is final."""
        self._post(self.slot.on_part, self, part, leases)

    def main(self, spec: WorkerSpec, device: str) -> None:
        """What the thread runs."""
        error: PenstockError = WorkerDied("the worker thread was stopped")
        try:
            self._work(spec, device)
        except PenstockError as e:
            error = e
        except BaseException as e:
            error = WorkerDied(f"the worker thread ended with {type(e).__name__}: {e}")
        self._post(self.slot.on_end, self, error)

    def _work(self, spec: WorkerSpec, device: str) -> None:
        registry = metrics.own_registry()
        runner, ready = open_model(spec, device)
        if runner.model.overlaps:
            self._finisher = Finisher(partial(self._finish, registry), f"penstock-{spec.name}-finisher")
        self._post(self.slot.on_up, self, ready)
        try:
            self._run_all(runner)
        finally:
            if self._finisher is not None:
                self._finisher.close()
            if runner.model.helpers is not None:
                runner.model.helpers.close()  # a model that ended its thread is not unloaded
        if self._failed is not None:
            raise self._failed
        runner.close()

    def _run_all(self, runner: BatchRunner) -> None:
        while (work := self.next()) is not None and not self.abandoned:
            if self._finisher is not None:
                box = [work]
                del work
                self._finisher.run(partial(self._begun, runner, box))
                continue
            batch_id, items, leases = work
            part = run_batch(runner, batch_id, items, self._emit)
            del work, items  # from here on only the model or the response refers to a slab
            self.answer(part, leases)
            del part

    def _begun(self, runner: BatchRunner, box: list[Work]) -> Finishing:
        """Launches or predicts the batch in the box; returns what the second thread needs."""
        batch_id, items, leases = box.pop()  # this thread must not refer to the payloads once the other one does
        return runner.begin(batch_id, runner.decode(items), self._emit), leases

    def _finish(self, registry: metrics.Registry, box: list[Finishing]) -> None:
        """In the second thread: answers a batch that has begun."""
        metrics.own_registry(registry)
        finish, leases = box.pop()
        if self._failed is not None:
            return
        try:
            part = finish()
            del finish  # it refers to the payloads
            self.answer(part, leases)
        except BaseException as e:
            self._failed = e
            self.put(None)  # the first thread ends

    def _emit(self, part: BatchPart) -> None:
        if self.unwanted == part.batch_id:
            raise Cancelled(ABANDONED)
        if self._finisher is not None:
            self._finisher.wait()  # answers come in the order of batches
        self.answer(part, [])

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self.slot.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: this thread was abandoned
            pass


def readable(items: list[Item]) -> tuple[list[Item], list[Lease]]:
    """The items with read-only views instead of slabs, and leases of the slabs, which are now pinned."""
    leases: list[Lease] = []
    for i, item in enumerate(items):
        if type(item.payload) is Slab:
            view, alive = item.payload.lease()
            leases.append((item.payload, alive))
            item.payload.pin()
            items = items if len(leases) > 1 else list(items)
            items[i] = msgspec.structs.replace(item, payload=view)
    return items, leases


def run_batch(runner: BatchRunner, batch_id: int, items: list[Item], emit: Emit) -> BatchPart:
    """The final part of a batch; `emit` receives the parts before it. Raises only exceptions in `ENDS`."""
    final: list[BatchPart] = []
    runner.run(batch_id, runner.decode(items), lambda part: final.append(part) if part.final else emit(part))
    return final.pop()  # the model may keep a reference to the callback


def let_go(leases: list[Lease]) -> list[Lease]:
    """Unpins the slabs without references and returns the other leases."""
    kept = []
    for slab, alive in leases:
        if alive() is None:
            slab.unpin()
        else:
            kept.append((slab, alive))
    return kept


log = logging.getLogger("penstock.transports")


class InlineTransport(SlotTransport):
    """One slot only, because there is one event loop. Async models need another transport."""

    depth = 1

    def _make(self, number: int, device: str) -> WorkerSlot:
        return _InlineSlot(self._spec, number, device)

    def add_slot(self, slot: int, device: str) -> None:
        """Raises BadRequest: there is one event loop."""
        raise BadRequest("the inline transport has one instance: use transport = 'thread' or 'process' for more")


class _InlineSlot(LocalSlot):
    """Runs each batch in a callback of the loop, so `run_timeout_s` cannot be enforced."""

    _runner: BatchRunner | None = None
    _abandoned = 0

    def launch(self) -> None:
        """Raises LoadFailed, TargetNotFound."""
        runner, ready = open_model(self.spec, self.device)
        predict = runner.model.predict
        if inspect.iscoroutinefunction(predict) or inspect.isasyncgenfunction(predict):
            raise LoadFailed("an async model cannot run on the event loop's thread: use transport = 'thread'")
        self._runner = runner
        self.loop.call_soon(self._loaded, ready)

    def _loaded(self, ready: Ready) -> None:
        if self._runner is not None:
            self.is_up(ready)

    def submit(self, batch: Batch) -> list[Slab] | BatchPart:
        items, leases = readable(batch.items)
        self.loop.call_soon(self._run, batch.id, items, leases)
        return [slab for slab, _ in leases]

    def _run(self, batch_id: int, items: list[Item], leases: list[Lease]) -> None:
        if self._runner is None or batch_id not in self.sent:
            return  # the model ended meanwhile, and the caller was answered
        try:
            part = run_batch(self._runner, batch_id, items, self._emit)
        except SystemExit as e:
            self.kill(WorkerDied(f"the model called sys.exit({e.code})"))
            return
        del items
        self.pass_on(part, leases)

    def _emit(self, part: BatchPart) -> None:
        if self._abandoned == part.batch_id:
            raise Cancelled(ABANDONED)
        self.pass_on(part, [])

    def abandon(self, batch_id: int) -> None:
        self._abandoned = batch_id

    def kill(self, why: PenstockError) -> None:
        self._runner = None
        self.ended(why)

    async def stop(self, idle: bool) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        try:
            runner.close()
        except Exception:
            log.exception("unload_failed model=%s", self.spec.name)
        self.kill(WorkerDied("the workers were stopped before the batch was answered"))
