"""Batcher: the shell of one Scheduler. It owns the clock and the callers, and decides nothing."""

# Its driver says when it takes a turn, and on which thread: on the event loop's, or on the model's own (`direct.py`).
# One thread at a time runs its code: the one that holds the guard of the driver.
# `submit` turns an item into an Entry for the scheduler and a Call, which keeps the caller and the state of its
# response. A turn polls the scheduler once and carries out its events: it sends batches, and answers requests that were
# dropped. An arrival, a completion, a change of a slot or the time causes a turn; several causes at once share one, so
# that requests that arrive together can share a batch.
# A batch in flight is a RunningBatch. Its worker's response comes as parts; the last one completes or loses the batch.
# Every request leaves through `_left`, once: its memory is released and it is reported to the observers there.
# A caller that leaves, or whose deadline passes, gets no response any more, but its request stays until its batch ends,
# because the worker may still read its memory.
# When a worker dies, the scheduler decides which requests run again; the quarantine remembers what killed workers.
# An exception of the scheduler or its policy is a bug: its state cannot be trusted, so every request ends with an
# error.

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from penstock.config.schema import BatchingConfig
from penstock.core.batching.entry import INF, Dispatch, Entry, EntryState, Expire, Fail, Outcome, Shed
from penstock.core.batching.scheduler import Scheduler
from penstock.core.codecs import traits_of
from penstock.core.contracts import Observer, Transport
from penstock.core.engine.calls import Call, Notifier, PieceMerger, RunningBatch, error_of, of_requests, reason_of
from penstock.core.engine.drivers import Driver, LoopDriver
from penstock.core.engine.quarantine import Quarantine
from penstock.core.transports.slot import within
from penstock.core.wire.slabs import Slab
from penstock.errors import BadRequest, DeadlineExceeded, PenstockError, Quarantined, RunTimeout
from penstock.types import Batch, BatchPart, Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")

_MISCOUNTED = (
    "the batch gave another number of rows and ran again in halves; batches are smaller from now on; set batching.rows"
    ' = "none" if axis 0 is not rows'
)
# choices
LATE_S = 0.02  # after a deadline, for a worker that keeps deadlines itself
FIRST_REQUESTS = 16  # of one pass that a model with concurrent batches gets at once, without waiting for the others
STALE_ENDS = 1024  # so many deadlines of ended requests are kept, and as many again as there are others
RERUN_LIMIT = 10  # after a hang, re-runs may take so many times their prediction, and this part of `run_timeout_s`


class Batcher:
    """Queues the requests of one model version and sends them to its transport in batches.

    It has more than 15 attributes because the path of every request and batch runs through it, and an object between
    would cost each of them a call. A ModelHandle alone makes it, from seven parts.
    """

    def __init__(
        self,
        name: str,
        version: str,
        transport: Transport,
        scheduler: Scheduler,
        config: BatchingConfig,
        observers: Sequence[Observer],
        quarantine_s: float = 0.0,
        driver: Driver | None = None,
    ) -> None:
        """`driver`: by default, turns are taken on the running event loop, from which alone it is called."""
        self.name, self.version = name, version
        self.scheduler = scheduler
        self._transport = transport
        self._config = config
        self._merger = PieceMerger(name, version)
        self.observe(observers)
        self._quarantine = Quarantine(name, quarantine_s)
        self._ids = itertools.count(1)
        self._waiting: dict[int, Call] = {}  # queued, or at least partly running
        self._running: dict[int, RunningBatch] = {}
        self._ends: list[tuple[float, int]] = []  # heap of deadlines of requests that run, some ended
        self._most_ends = STALE_ENDS
        self._turn_due, self._fresh = False, 0  # `_fresh`: requests since the last turn
        self._driver = driver or LoopDriver(asyncio.get_running_loop())
        self.guard = self._driver.guard
        self._driver.begin(self._turn, scheduler, config.slo_s is not None)
        self._closed = self._warned = False
        self._emptied: Callable[[], object] = lambda: None  # called when no request is left
        self.on_broken: Callable[[], None] = lambda: None  # the scheduler failed: no more requests are accepted
        self.on_turn: Callable[[float], None] | None = None  # called with the time after each turn
        self.on_dispatch: Callable[[Dispatch], None] | None = None  # called before a batch is sent

    def observe(self, observers: Sequence[Observer]) -> None:
        """Reports to these observers from now on."""
        listening = of_requests(observers)
        self._notifier = Notifier(self.name, self.version, listening) if listening else None

    # ---- requests

    def submit(self, item: Item, sink: Sink, bucket: str, nbytes: int) -> Call:
        """Queues one item; called with the guard. Raises the reason for a rejection, which the caller reports to
        observers."""
        now = time.monotonic() if item.arrived_s is None else item.arrived_s
        config, priority = self._config, item.priority
        budget = INF if item.budget_s is None else item.budget_s
        if budget <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        if self._quarantine.active:
            bucket = self._quarantine.bucket(item, bucket, now)
        if config.slo_s is not None:
            budget = min(budget, config.slo_s + config.priority[min(priority, len(config.priority) - 1)])
        entry = Entry(
            id=next(self._ids),
            rows=item.rows,
            nbytes=nbytes,
            arrival_s=now,
            deadline_s=now + budget,
            expires_s=now + (config.timeout_s if item.wait_s is None else min(item.wait_s, config.timeout_s)),
            priority=priority,
            bucket=bucket,
            divisible=traits_of(item.codec).divisible,
            separate=item.many,
            behind_s=item.behind_s,
            sequence=item.sequence,
            length=item.length,
        )
        call = Call(item, sink, entry, self._cancelled)
        try:
            self.scheduler.offer(entry, now)
        except PenstockError:
            raise
        except Exception:  # it may be half queued: it must not run, because its memory is about to be released
            self._break()
            raise PenstockError("internal error") from None
        self._waiting[entry.id] = call
        if item.budget_s is not None:
            call.late_s = now + item.budget_s
        self._fresh += 1
        if not self._turn_due:
            self._turn_due = True
            self._driver.soon()
        elif self._fresh >= FIRST_REQUESTS and self.scheduler.concurrent and not self._driver.from_threads:
            self._turn()
            self._turn_due = True  # the one that was scheduled
        return call

    def _cancelled(self, call: Call) -> None:
        """A caller left. Its payload is released at once unless a worker has it, or a piece of it."""
        now = time.monotonic()
        with self.guard:
            try:
                gone = self.scheduler.cancel(call.entry.id, now)
            except Exception:
                self._break()
                return
            if gone:
                self._left([call.entry.id], now)
                self.wake()
                return
            running = self._running.get(call.batch_id)
            if running is not None and running.dispatch.concurrent:
                running.unwanted = True
                self._abandon_unwanted(running)

    def _watch(self, call: Call, extra_s: float) -> None:
        """Will look at a request that runs when its deadline has passed."""
        heappush(self._ends, (call.late_s + extra_s, call.entry.id))
        if len(self._ends) > self._most_ends:
            self._ends = [end for end in self._ends if end[1] in self._waiting]
            heapify(self._ends)
            self._most_ends = 2 * len(self._ends) + STALE_ENDS

    def _end_late(self, now: float) -> None:
        """Answers the requests that run and whose deadline has passed. Later responses to them are ignored."""
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._waiting):
            call = self._waiting.get(heappop(self._ends)[1])
            if call is not None and call.sink is not None:
                call.settle(ItemResult(error=DeadlineExceeded("the deadline passed during the run")), "expired")
                self._cancelled(call)

    def _left(self, requests: Iterable[int], now: float) -> None:
        """Forgets ended requests and reports them. Every request leaves here, once."""
        ended = list(map(self._waiting.pop, requests))
        for call in ended:
            if type(call.item.payload) is Slab:
                call.item.payload.release()
        if self._notifier is not None:
            self._notifier.ended(ended, now)

    @property
    def pending(self) -> int:
        """Number of requests that wait or run."""
        return len(self._waiting)

    # ---- turns

    def wake(self) -> None:
        """Causes a turn."""
        if not self._turn_due and not self._closed:
            self._turn_due = True
            self._driver.soon()

    def _turn(self) -> None:
        with self.guard:
            self._turn_due = True  # for the requests that arrive now
            self._driver.drain()
            self._turn_due, self._fresh = False, 0
            if not self._closed:
                self._poll()

    def _poll(self) -> None:
        now = time.monotonic()
        try:
            events = self.scheduler.poll(now, self._driver.ahead, self._driver.crowded())
            last: dict[int, int] = {}  # batch of each slot
            if len(events) > 1:
                last = {e.slot: e.batch_id for e in events if isinstance(e, Dispatch)}
            for event in events:
                if isinstance(event, Dispatch):
                    self._dispatch(event, now, more=last.get(event.slot, event.batch_id) != event.batch_id)
                else:
                    self._dropped(event, now)
            if self._ends:
                self._end_late(now)
            wake_at = self.scheduler.wake_at
            if self._ends and (wake_at is None or self._ends[0][0] < wake_at):
                wake_at = self._ends[0][0]
            self._driver.turned(wake_at)
            if self.on_turn is not None:
                self.on_turn(now)
        except Exception:
            self._break()
        if not self._waiting:
            self._emptied()

    def _dispatch(self, dispatch: Dispatch, now: float, more: bool) -> None:
        calls: list[Call] = []
        items: list[Item] = []
        for entry in dispatch.entries:
            call = self._waiting[entry.id]  # pieces have the id of their request
            call.sent_s, call.batch_id = now, dispatch.batch_id
            if call.late_s != INF:  # a worker that keeps deadlines itself knows better what was late
                self._watch(call, LATE_S if dispatch.concurrent else 0.0)
            calls.append(call)
            item = call.item
            if entry.parent is not None:
                stop = entry.start + entry.rows
                item = replace(item, rows=entry.rows, start=entry.start, stop=stop)
            if dispatch.concurrent and entry.deadline_s != INF:
                item.budget_s = entry.deadline_s - now
            items.append(item)
        items[0].ended = dispatch.ended
        self._running[dispatch.batch_id] = RunningBatch(dispatch, calls, now)
        if self.on_dispatch is not None:
            self.on_dispatch(dispatch)
        try:
            batch = Batch(dispatch.batch_id, dispatch.slot, items, more)
            if dispatch.reason == "rerun" and any(call.hung for call in calls):
                batch.limit_s = max(
                    self._config.run_timeout_s / RERUN_LIMIT, RERUN_LIMIT * self.scheduler.seconds(dispatch.rows)
                )
            self._transport.send(batch, self._on_part)
        except Exception:
            log.exception("dispatch_failed model=%s batch=%d: its callers get an error", self.name, dispatch.batch_id)
            bad = ItemResult(error=PenstockError("internal error"))
            self._on_part(BatchPart(dispatch.batch_id, [bad] * len(items)))

    def _dropped(self, event: Expire | Shed | Fail, now: float) -> None:
        call = self._waiting.get(event.id)
        if call is None:  # answered or abandoned before: it ended with its batch, in `_lost`
            return
        error = error_of(event, call.entry.expires_s - call.entry.arrival_s)
        if not isinstance(event, Fail):
            error.retry_after_s = self.scheduler.drain_s()
        call.settle(ItemResult(error=error), event.reason)
        self._left([event.id], now)

    # ---- answers

    def _on_part(self, part: BatchPart) -> None:
        with self.guard:
            running = self._running.get(part.batch_id)
            if running is not None:
                self._take(running, part)

    def _take(self, running: RunningBatch, part: BatchPart) -> None:
        if part.final or part.at is not None:
            self._driver.drain()  # what came before the responses is counted before them
            if part.final:
                del self._running[part.batch_id]
            try:
                if part.error is not None:
                    self._lost(running, part, part.error)
                else:
                    self._completed(running, part)
                if not part.final and running.unwanted:
                    self._abandon_unwanted(running)
            except Exception:
                self._break()
            if self._waiting:
                self.wake()
                return
            self._driver.rest()
            self._emptied()
            return
        for call, entry, result in zip(running.calls, running.dispatch.entries, part.results, strict=True):
            if result is None:
                continue
            if not result.final:
                if self.scheduler.sequences is not None and running.dispatch.concurrent and not call.streamed:
                    self.scheduler.streams(entry)
                    self.wake()
                call.streamed = True
                call.deliver(result)
                continue
            self._note_failures(running, entry, call, result)
            if entry.parent is None:
                call.streamed = True
                call.settle(result)
            else:
                call.keep(entry.start, result)
        self._abandon_unwanted(running)

    def _abandon_unwanted(self, running: RunningBatch) -> None:
        if all(call.sink is None for call in running.calls):
            self._transport.abandon(running.dispatch.slot, running.dispatch.batch_id)

    def _completed(self, running: RunningBatch, part: BatchPart) -> None:
        """A batch is answered, or some items of a batch on a concurrent slot."""
        now = time.monotonic()
        whole: list[int] = []
        calls, entries, reports = running.calls, running.dispatch.entries, self._notifier is not None
        if part.at is not None:
            calls, entries = [calls[i] for i in part.at], [entries[i] for i in part.at]
        for call, entry, result in zip(calls, entries, part.results, strict=True):
            if result is not None and (result.error is not None or (reports and call.item.many)):
                self._note_failures(running, entry, call, result)
            if entry.parent is None:
                call.settle(result or ItemResult())
                whole.append(entry.id)
            elif result is not None:
                call.keep(entry.start, result)
        if self._quarantine.active:
            self._quarantine.survived(call.item for call, entry in zip(calls, entries, strict=True) if not entry.parent)
        self._left(whole, now)
        if part.miscounted and not self._warned:
            self._warned = True
            log.warning("rows_miscounted model=%s rows=%d: %s", self.name, running.dispatch.rows, _MISCOUNTED)
        batch_id, failed = running.dispatch.batch_id, frozenset(running.failed)
        if part.final:
            outcome = Outcome("ok", part.run_s, failed, part.oom, part.prepare_s, part.on_device)
            split = self.scheduler.complete(batch_id, outcome, now)
        else:
            split = self.scheduler.answered(batch_id, entries, failed)
        if split:
            self._settle_split(split, now)
        if part.final:
            self._report(running, part, now, "ok")

    def _settle_split(self, requests: list[int], now: float) -> None:
        for request in requests:
            call = self._waiting[request]
            call.settle(self._merger.merge(call.item, call.pieces or {}, call.streamed))
        self._left(requests, now)

    def _note_failures(self, running: RunningBatch, entry: Entry, call: Call, result: ItemResult) -> None:
        if self._notifier is not None:
            running.failures += self._notifier.failures(call.item, result)
        if result.error is not None:
            running.failed[entry.id] = isinstance(result.error, BadRequest)

    def _lost(self, running: RunningBatch, part: BatchPart, error: PenstockError) -> None:
        """The worker died. Abandoned requests, and requests with a part of their response sent, do not run again. For
        separate items that do not run again, the error is their result."""
        now = time.monotonic()
        both = zip(running.calls, running.dispatch.entries, strict=True)
        unanswered = [(call, entry) for call, entry in both if entry.state != EntryState.DONE]
        outcome = Outcome("died" if part.started else "lost", part.run_s)
        split = self.scheduler.complete(running.dispatch.batch_id, outcome, now)
        if part.started:
            apart = not running.dispatch.concurrent or running.dispatch.reason == "rerun"
            if self._quarantine.died((call.item for call, _ in unanswered), apart, now):
                self._refuse_waiting(now)
        hung = isinstance(error, RunTimeout)
        for call, entry in unanswered:
            call.hung = call.hung or hung
            if entry.state == EntryState.DONE:
                result = ItemResult(error=error) if call.streamed else ItemResult([error] * entry.rows)
                self._note_failures(running, entry, call, result)
                if entry.parent is None:
                    call.settle(result)
                    self._left([entry.id], now)
                else:
                    call.keep(entry.start, result)
            elif call.sink is None or call.streamed:
                call.settle(ItemResult(error=error), "worker_died")
                gone = self.scheduler.cancel(entry.id, now)
                if gone or entry.parent is None:  # another piece of a split request may run: the request ends with it
                    self._left([entry.id], now)
        self._settle_split(split, now)
        self._report(running, part, now, outcome.kind)

    def _refuse_waiting(self, now: float) -> None:
        """Answers the waiting requests whose payload has just been refused."""
        for call in list(self._waiting.values()):
            try:
                self._quarantine.bucket(call.item, "", now)
            except Quarantined as e:
                if self.scheduler.cancel(call.entry.id, now):
                    call.settle(ItemResult(error=e), e.code)
                    self._left([call.entry.id], now)

    def fail_queued(self, error: PenstockError) -> None:
        """Fails the requests of which no piece is running."""
        now = time.monotonic()
        with self.guard:
            for call in list(self._waiting.values()):
                if self.scheduler.cancel(call.entry.id, now):
                    call.settle(ItemResult(error=error), reason_of(error))
                    self._left([call.entry.id], now)

    def _report(self, running: RunningBatch, part: BatchPart, now: float, outcome: str) -> None:
        if self._notifier is not None:
            self._notifier.batch(running, part, now, outcome, self.scheduler.max_batch_size)

    # ---- end

    def _break(self) -> None:
        """Handles a bug in the scheduler or its policy: its state is unusable, so every caller gets an error."""
        log.exception("batcher_broken model=%s: it answers no requests until it is loaded again", self.name)
        self.on_broken()  # first: a caller that gets the error may retry at once
        self.close(PenstockError("internal error"))

    async def drain(self, seconds: float) -> bool:
        """Waits up to `seconds` until no request waits or runs; True when none is left."""
        loop, emptied = asyncio.get_running_loop(), asyncio.Event()
        with self.guard:
            if not self._waiting:
                return True
            others = self._emptied  # several may wait: a drain, and the unload after it

            def wake() -> None:
                self._emptied = lambda: None
                others()
                loop.call_soon_threadsafe(emptied.set)

            self._emptied = wake
        return await within(emptied, seconds)

    def close(self, error: PenstockError) -> None:
        """Answers every open request with `error`; nothing is dispatched afterwards."""
        with self.guard:
            if self._closed:
                return
            self._closed = True
            self._driver.close()
            for call in list(self._waiting.values()):
                call.settle(ItemResult(error=error), reason_of(error))
            # memory that a worker still reads stays pinned until the worker ends
            self._left(list(self._waiting), time.monotonic())
            self._running.clear()
            self._emptied()
