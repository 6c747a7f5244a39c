"""The inline transport: the model runs on the event loop's own thread. For tests, and for functions of microseconds."""

import inspect
import logging

from penstock.core.transports.slot import SlotTransport, WorkerSlot
from penstock.core.transports.thread import ABANDONED, Lease, LocalSlot, readable, run_batch
from penstock.core.wire.slabs import Slab
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.errors import BadRequest, Cancelled, LoadFailed, PenstockError, WorkerDied
from penstock.types import Batch, BatchPart, Item, Ready

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
