"""The worker's end for a model that works on batches side by side.

The reader's thread hands over batches as they arrive; the model's own threads send what it answers; the main thread
tells, at most ten times a second, what was counted and which slabs are free again.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial

from penstock import metrics
from penstock.transports.leases import Held, Lease
from penstock.types import BatchPart
from penstock.wire.messages import News, Outbox, Part, Run
from penstock.wire.slabs import SlabPool
from penstock.worker.batch import Decoded
from penstock.worker.beside import Beside
from penstock.worker.loop import BatchRunner

NEWS_S = 0.1


class Wide:
    """The batches that are in flight on one model. `send` and `send_news` are never called by two threads at once."""

    def __init__(
        self,
        runner: BatchRunner,
        replies: SlabPool,
        send: Callable[[Part, Outbox], None],
        send_news: Callable[[News], None],
    ) -> None:
        self._runner = runner
        self._replies = replies
        self._send, self._send_news = send, send_news
        self._lock = threading.Lock()  # of all that follows, and of the socket
        self._batches: dict[int, Beside] = {}
        self._held = Held()
        self._happened = threading.Event()  # there may be something to tell
        self._stopped = threading.Event()

    # ---- reader's thread

    def run(self, run: Run, decoded: Decoded, leases: list[Lease]) -> None:
        """Hands a batch to the model."""
        batch = Beside(self._runner, run.id, decoded, partial(self._emit, run, leases))
        with self._lock:
            self._batches[run.id] = batch
        batch.start()

    def abandon(self, batch_id: int) -> None:
        """Nobody waits for this batch any more."""
        with self._lock:
            batch = self._batches.get(batch_id)
        if batch is not None:
            batch.cancel()

    def stop(self) -> None:
        """Nothing more is to come; `attend` returns."""
        self._stopped.set()
        self._happened.set()

    # ---- any thread of the model

    def _emit(self, run: Run, leases: list[Lease], part: BatchPart) -> None:
        assert part.at is not None
        outbox = Outbox(self._replies)
        with self._lock:
            outbox.results([run.items[i] for i in part.at], part.results)
            held: list[int] = []
            let_go: list[int] = []
            if part.final:
                del self._batches[run.id]
                if leases or self._held:
                    for item in run.items:
                        item.payload = None
                    held, let_go = self._held.after(leases, collect=False)
            self._send(Part(part, held, let_go), outbox)
        self._happened.set()

    # ---- main thread

    def attend(self) -> None:
        """Returns when, after `stop`, the last batch is answered."""
        ended = False
        while not ended:
            self._happened.wait()
            stopped = self._stopped.wait(NEWS_S)
            self._happened.clear()
            self._tell_news()
            with self._lock:
                ended = stopped and not self._batches

    def _tell_news(self) -> None:
        if self._held:
            gc.collect(1)
        with self._lock:
            let_go = self._held.after([])[1] if self._held else []
            changes = metrics.drain() or []
            if let_go or changes:
                self._send_news(News(let_go, changes))
