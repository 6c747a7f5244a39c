"""The worker's end for a model that works on batches side by side.

The reader's thread hands over batches as they arrive; the model's own threads send what it answers, at once or, where
the model has a loop, what came in one pass of that; the main thread tells, at most ten times a second, what was counted
and which slabs are free again.
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
    """The batches that are in flight on one model.

    `pack` makes the pieces of a message, `send` sends some; neither is called by two threads at once.
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
        self._lock = threading.Lock()  # of all that follows, and of the socket
        self._batches: dict[int, _Batch] = {}
        self._complete: dict[ConcurrentBatch, list[int]] = {}  # places whose answers are to be sent
        self._due = False  # they will be, soon
        self._held = HeldSlabs()
        self._looked: set[int] = set()  # offsets that were held when the main thread looked last
        self._happened = threading.Event()  # there may be something to tell
        self._stopped = threading.Event()

    # ---- reader's thread

    def run(self, run: RunBatch, decoded: Decoded, leases: list[Lease]) -> None:
        """Hands a batch to the model."""
        work = ConcurrentBatch(self._runner, run.id, decoded, self._note)
        self._batches[run.id] = _Batch(run, leases, work)
        work.start()

    def abandon(self, batch_id: int) -> None:
        """Nobody waits for this batch any more."""
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.work.cancel()

    def stop(self) -> None:
        """Nothing more is to come; `attend` returns."""
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
                log.exception("not_posted: the model's loop takes no calls any more")
            self._flush()

    def _flush(self) -> None:
        """Sends what is complete: one message a batch, all in one system call unless they are large."""
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
        """Returns when, after `stop`, the last batch is answered."""
        ended = False
        while not ended:
            self._happened.wait()
            stopped = self._stopped.wait(NEWS_S)
            self._happened.clear()
            self.tell_news()
            with self._lock:
                ended = stopped and not self._batches

    def tell_news(self) -> None:
        """What was held when news were told last, and still is, may be garbage; what is so since is looked at again."""
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
