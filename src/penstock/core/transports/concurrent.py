"""The worker's end for a model that runs batches concurrently.

The reader thread passes batches on as they arrive. The model's own threads send its answers: at once, or, if the model
has an event loop, all answers of one pass together. The main thread reports metrics and free slabs, at most ten times a
second.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

from msgspec import Struct

from penstock import metrics
from penstock.core.wire.messages import LARGE_BYTES, Buffer, MessageWriter, PartMessage, RunBatch, WorkerNews, write
from penstock.core.wire.slabs import HeldSlabs, Lease, SlabPool
from penstock.core.worker.batch import Decoded
from penstock.core.worker.concurrent import ConcurrentBatch
from penstock.core.worker.loop import BatchRunner

log = logging.getLogger("penstock.transports")

NEWS_S = 0.1


class _Batch(Struct):
    run: RunBatch
    leases: list[Lease]
    work: ConcurrentBatch


class ConcurrentBatches:
    """The batches in flight on one model.

    `pack` makes the pieces of a message, `send` sends them; only one thread at a time calls either.
    """

    def __init__(
        self,
        runner: BatchRunner,
        replies: SlabPool,
        pack: Callable[[PartMessage, MessageWriter], list[Buffer]],
        send: Callable[[list[Buffer]], None],
    ) -> None:
        self._runner = runner
        self._replies = replies
        self._pack, self._send = pack, send
        self._lock = threading.Lock()  # guards everything below, and the socket
        self._batches: dict[int, _Batch] = {}
        self._complete: dict[ConcurrentBatch, list[int]] = {}  # places whose answers must be sent
        self._due = False  # a flush is scheduled
        self._held = HeldSlabs()
        self._looked: set[int] = set()  # offsets held at the main thread's last look
        self._happened = threading.Event()  # there may be news
        self._stopped = threading.Event()

    # ---- reader's thread

    def run(self, run: RunBatch, decoded: Decoded, leases: list[Lease]) -> None:
        work = ConcurrentBatch(self._runner, run.id, decoded, self._note)
        self._batches[run.id] = _Batch(run, leases, work)
        work.start()

    def abandon(self, batch_id: int) -> None:
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.work.cancel()

    def stop(self) -> None:
        """No more batches will come; makes `attend` return."""
        self._stopped.set()
        self._happened.set()

    # ---- any thread of the model

    def _note(self, work: ConcurrentBatch, places: list[int]) -> None:
        with self._lock:
            self._complete.setdefault(work, []).extend(places)
            due, self._due = self._due, True
        if not due:
            soon = self._runner.model.soon
            try:
                if soon is not None:
                    soon(self._flush)
                    return
            except Exception:
                log.exception("not_posted: the model's loop takes no more calls")
            self._flush()

    def _flush(self) -> None:
        """Sends completed answers: one message per batch, in one system call unless they are large."""
        with self._lock:
            complete, self._complete, self._due = self._complete, {}, False
            pieces = [piece for work, places in complete.items() for piece in self._message(work, places)]
            self._send([b"".join(pieces)] if sum(map(len, pieces)) <= LARGE_BYTES else pieces)
        self._happened.set()

    def _message(self, work: ConcurrentBatch, places: list[int]) -> list[Buffer]:
        part = work.part(places)
        batch = self._batches[part.batch_id]
        outbox = MessageWriter(self._replies)
        outbox.results([batch.run.items[i] for i in places], part.results)
        held: list[int] = []
        let_go: list[int] = []
        if part.final:
            del self._batches[part.batch_id]
            if batch.leases or self._held:
                for item in batch.run.items:
                    item.payload = None
                held, let_go = self._held.after(batch.leases, collect=False)
        return self._pack(PartMessage(part, held, let_go), outbox)

    # ---- main thread

    def attend(self) -> None:
        """Returns after `stop`, once the last batch is answered."""
        ended = False
        while not ended:
            self._happened.wait()
            stopped = self._stopped.wait(NEWS_S)
            self._happened.clear()
            self.send_news()
            with self._lock:
                ended = stopped and not self._batches

    def send_news(self) -> None:
        """Sends metrics and freed slabs. Collects garbage if a slab stays held for two rounds."""
        if self._looked & self._held.offsets:
            gc.collect(1)
        with self._lock:
            _, let_go = self._held.after([])
            held = self._held.offsets
            if held - self._looked:
                self._happened.set()
            self._looked = held
            changes = metrics.drain() or []
            if let_go or changes:
                self._send(write(WorkerNews(let_go, changes)))
