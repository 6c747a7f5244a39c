"""The worker's end for a model that runs batches concurrently.

The reader thread passes batches on as they arrive. The model's own threads send its responses: at once, or, if the
model has an event loop, all responses of one pass together. The main thread reports metrics and free slabs, at most ten
times a second.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from penstock import metrics
from penstock.core.wire.messages import LARGE_BYTES, Buffer, MessageWriter, PartMessage, RunBatch, WorkerNews, write
from penstock.core.wire.slabs import HeldSlabs, Lease, SlabPool
from penstock.core.worker import logs
from penstock.core.worker.batch import STREAMED, BatchRun, Decoded
from penstock.core.worker.loop import BatchRunner
from penstock.errors import ENDS, Cancelled, PenstockError
from penstock.types import BatchPart, ItemResult, Step

log = logging.getLogger("penstock.transports")

NEWS_S = 0.1
SIGN_S = 1.0


class ConcurrentBatch:
    """Passes a batch to the model and turns its responses into parts. Each item counts once, even if answered twice.

    A model that answers with a `Step` streams: its part is sent, and the item ends when it is done. `done` is called
    with the places of completed items, in the thread that answered. It calls `part` for them, one call at a time; the
    part with the last item is final.
    """

    def __init__(
        self, runner: BatchRunner, batch_id: int, decoded: Decoded, done: Callable[[ConcurrentBatch, list[int]], None]
    ) -> None:
        self._runner = runner
        self.batch_id = batch_id
        self._run = BatchRun(runner, batch_id, decoded, lambda part: None)
        self._done = done
        self._since_s = self._signed_s = time.perf_counter()
        self._cancelled = False
        self._lock = threading.Lock()
        self._units: list[list[int]] = [[] for _ in decoded.items]  # units per item
        for u, i in enumerate(decoded.owners):
            self._units[i].append(u)
        self._asked: list[int] = []  # the unit at each place of the model's arguments
        self._open: set[int] = set()  # unanswered units
        self._missing = [0] * len(decoded.items)  # unanswered units per item
        self._left = len(decoded.items)
        self._parts: list[tuple[int, Any]] = []  # unit and value of streamed parts that must be sent
        self._end: Any = None

    def start(self) -> None:
        """Called once. Raises only what ends a worker."""
        run, model = self._run, self._runner.model
        if model.helpers is None:
            run.preprocess()
            self._begin()
        else:
            items, owners, values = run.d.items, run.d.owners, run.d.values
            sent = [model.for_helper(values[u], items[owners[u]]) for u in run.live]
            model.helpers.soon(sent, self._preprocessed)

    def _preprocessed(self, values: list[Any]) -> None:
        self._run.replace(values)
        self._begin(time.perf_counter() - self._since_s)

    def _begin(self, waited_s: float = 0.0) -> None:
        run = self._run
        self._asked = list(run.live)
        self._open = set(run.live)
        for u in run.live:
            self._missing[run.d.owners[u]] += 1
        never = [i for i, missing in enumerate(self._missing) if not missing]
        if never:
            self._done(self, never)
        if not self._asked:
            return
        if self._cancelled:
            self.cancel()
            return
        items, owners = run.d.items, run.d.owners
        left_s = [items[owners[u]].budget_s for u in self._asked]
        values, budgets = run.arguments(self._asked), [None if s is None else s - waited_s for s in left_s]
        run.d.values = []  # only the model keeps the memory that the values refer to
        try:
            assert self._runner.model.submit is not None
            logs.running.items = [items[owners[u]] for u in self._asked]
            end = self._runner.model.submit(values, budgets, self._answer)
        except ENDS:
            raise
        except BaseException as e:
            self._fail(self._runner.error_of(e))
            return
        finally:
            logs.running.items = ()
        with self._lock:
            if self._open:
                self._end = end
            elif self._cancelled:
                end()

    def cancel(self) -> None:
        """Abandons the batch: the model may stop working on it and need not answer."""
        self._cancelled = True
        end, self._end = self._end, None
        try:
            if end is not None:
                end()
        except Exception as e:
            self._runner.error_of(e, "cancelling a batch raised")
        self._fail(Cancelled("the caller no longer waits for this answer"))

    def _answer(self, answers: list[tuple[int, Any]]) -> None:
        """Called by the model, from any thread: (place, value or exception) pairs."""
        asked = self._asked
        self._take([(asked[place], value) for place, value in answers])

    def _fail(self, error: PenstockError) -> None:
        self._take([(u, error) for u in self._asked])

    def _take(self, outcomes: list[tuple[int, Any]]) -> None:
        with self._lock:
            done: list[int] = []
            for unit, outcome in outcomes:
                if unit not in self._open:
                    continue
                if type(outcome) is Step:
                    self._keep_part(unit, outcome)
                    if not outcome.done:
                        continue
                    outcome = STREAMED
                self._open.discard(unit)
                self._run.outcomes[unit] = self._run.whole(unit, outcome)
                i = self._run.d.owners[unit]
                self._missing[i] -= 1
                if not self._missing[i]:
                    done.append(i)
            news = done or self._parts
        if news:
            self._done(self, done)

    def _keep_part(self, unit: int, step: Step) -> None:
        """Keeps a part to be sent, or to be answered with the whole; then a sign of life is sent once a second."""
        if step.part is not None and self._run.gathers(unit, step.part):
            now = time.perf_counter()
            if now > self._signed_s + SIGN_S:
                self._signed_s = now
                self._parts.append((unit, None))
        elif step.part is not None or not step.done:
            self._parts.append((unit, step.part))

    def streamed(self) -> list[BatchPart]:
        """The streamed parts since the last call. One without a result is a sign of life."""
        with self._lock:
            parts, self._parts = self._parts, []
        found = []
        for unit, value in parts:
            results: list[ItemResult | None] = [None] * len(self._missing)
            if value is not None:
                results[self._run.d.owners[unit]] = self._part(unit, value)
            found.append(BatchPart(self.batch_id, results, final=False))
        return found

    def part(self, places: list[int]) -> BatchPart:
        """The responses of these completed items; each place is requested once."""
        self._left -= len(places)
        part = BatchPart(self.batch_id, [self._result(i) for i in places], final=not self._left, at=places)
        if part.final:
            part.run_s, part.prepare_s = time.perf_counter() - self._since_s, self._run.d.seconds
            self._run.outcomes = self._run.d.contexts = []  # the model may keep a reference to this object
            self._end = None
        return part

    def _part(self, unit: int, value: Any) -> ItemResult:
        return self._made(lambda run: run.part(unit, value))

    def _result(self, i: int) -> ItemResult:
        return self._made(lambda run: run.answer(i, [run.finished(u, run.outcomes[u]) for u in self._units[i]]))

    def _made(self, make: Callable[[BatchRun], ItemResult]) -> ItemResult:
        try:
            return make(self._run)
        except BaseException as e:  # the model's own thread would hide the error
            return ItemResult(error=self._runner.error_of(e, "postprocess raised"))


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
            pieces = [piece for work, places in complete.items() for piece in self._messages(work, places)]
            if not pieces:
                return
            self._send([b"".join(pieces)] if sum(map(len, pieces)) <= LARGE_BYTES else pieces)
        self._happened.set()

    def _messages(self, work: ConcurrentBatch, places: list[int]) -> list[Buffer]:
        batch = self._batches.get(work.batch_id)
        if batch is None:
            return []  # it was abandoned, and the model noticed later
        items, pieces = batch.run.items, []
        for part in work.streamed():
            outbox = MessageWriter(self._replies)
            outbox.results(items, part.results)
            pieces += self._pack(PartMessage(part, [], []), outbox)
        return pieces + self._answers(batch, places) if places else pieces

    def _answers(self, batch: _Batch, places: list[int]) -> list[Buffer]:
        part = batch.work.part(places)
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
            self._happened.clear()  # before the look at what it stands for: what happens later sets it again
            stopped = self._stopped.wait(NEWS_S)
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
