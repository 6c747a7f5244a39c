"""Batcher: the asyncio shell of one Scheduler. It owns the clock, the timer and the callers; it decides nothing.

All methods run on the event loop's thread. A *turn* polls the scheduler and carries out what it says; turns follow an
arrival, a completion, a slot's coming or going, or the timer, and those of one pass of the loop are one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from penstock.batching.entry import INF, Dispatch, Entry, Fail, Outcome, Shed
from penstock.batching.scheduler import Scheduler
from penstock.config.schema import BatchingConfig
from penstock.engine.call import Call, Running, release
from penstock.engine.timer import Timer
from penstock.errors import DeadlineExceeded, ItemFailed, PenstockError, QueueFull, WorkerDied
from penstock.observe.base import BatchRecord, Observer, hearing, tell
from penstock.transports.base import Transport
from penstock.types import Batch, BatchPart, Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")

Join = Callable[[Item, list[ItemResult]], ItemResult]


class Batcher:
    """Queues requests of one model version, and drives them as batches onto its transport."""

    def __init__(
        self,
        name: str,
        version: str,
        transport: Transport,
        scheduler: Scheduler,
        config: BatchingConfig,
        observers: Sequence[Observer],
        join: Join,
    ) -> None:
        self.name, self.version = name, version
        self.scheduler = scheduler
        self._transport = transport
        self._config = config
        self._observers = observers
        self._hear_arrivals = hearing(observers, "on_arrival")
        self._join = join
        self._ids = itertools.count(1)
        self._waiting: dict[int, Call] = {}  # queued, or running at least in part
        self._running: dict[int, Running] = {}
        self._loop = asyncio.get_running_loop()
        self._turn_due = False
        self._timer = Timer(self._loop, self._turn)
        self._closed = False
        self._emptied: asyncio.Event | None = None  # made by drain()
        self.on_broken: Callable[[], None] = lambda: None  # the scheduler failed: nothing is taken any more

    # ---- requests

    def submit(self, item: Item, sink: Sink, budget_s: float | None, priority: int, bucket: str, nbytes: int) -> Call:
        """Queues one item. Raises QueueFull, DeadlineExceeded."""
        now = time.monotonic()
        config = self._config
        budget = budget_s if budget_s is not None else INF
        if budget <= 0:
            self._reject("deadline_exceeded")
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        if config.slo_s is not None:
            budget = min(budget, config.slo_s + config.priority[min(priority, len(config.priority) - 1)])
        entry = Entry(
            id=next(self._ids),
            rows=item.rows,
            nbytes=nbytes,
            arrival_s=now,
            deadline_s=now + budget,
            expires_s=now + config.timeout_s,
            priority=priority,
            bucket=bucket,
        )
        call = Call(item, sink, entry, self._cancelled)
        try:
            self.scheduler.offer(entry, now)
        except QueueFull:
            self._reject("queue_full")
            raise
        except PenstockError:
            raise
        except Exception:  # it may be half in the queue: nobody must run it, its memory is about to be given back
            self._break()
            raise PenstockError("internal error") from None
        self._waiting[entry.id] = call
        tell(self._hear_arrivals, "on_arrival", self.name, self.version)
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)
        return call

    def _cancelled(self, call: Call) -> None:
        """A caller left. Its payload is given back at once if no worker has it."""
        if self._withdraw(call, time.monotonic()):
            self._reject("cancelled")
            self.wake()

    def _withdraw(self, call: Call, now: float) -> bool:
        """Takes a request out of the queue; False if a worker has it, or a part of it, so that it ends later."""
        if not self.scheduler.cancel(call.entry.id, now):
            return False
        del self._waiting[call.entry.id]
        release(call.item)
        return True

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting)

    # ---- turns

    def wake(self) -> None:
        """Asks for a turn in this pass of the loop."""
        if not self._turn_due and not self._closed:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._closed:
            return
        now = time.monotonic()
        try:
            for event in self.scheduler.poll(now):
                if type(event) is Dispatch:
                    self._dispatch(event, now)
                else:
                    self._dropped(event)
            self._timer.at(self.scheduler.wake_at)
        except Exception:
            self._break()
        if self._emptied is not None and not self._waiting:
            self._emptied.set()

    def _dispatch(self, dispatch: Dispatch, now: float) -> None:
        calls: list[Call] = []
        items: list[Item] = []
        for entry in dispatch.entries:
            call = self._waiting[entry.id]  # parts have the id of their request
            calls.append(call)
            if entry.parent is None:
                items.append(call.item)
            else:
                items.append(
                    msgspec.structs.replace(
                        call.item, rows=entry.rows, start=entry.start, stop=entry.start + entry.rows
                    )
                )
        self._running[dispatch.batch_id] = Running(dispatch, calls, now)
        try:
            self._transport.send(Batch(dispatch.batch_id, dispatch.slot, items), self._on_part)
        except Exception:
            log.exception("dispatch_failed model=%s batch=%d: its callers get an error", self.name, dispatch.batch_id)
            bad = ItemResult(error=PenstockError("internal error"))
            self._on_part(BatchPart(dispatch.batch_id, [bad] * len(items)))

    def _dropped(self, event: object) -> None:
        call = self._waiting.pop(event.id)  # type: ignore[attr-defined]
        error: PenstockError
        if isinstance(event, Fail):
            error = WorkerDied("the worker that ran this request died, and it is not run again")
        elif isinstance(event, Shed):
            error = DeadlineExceeded("overload: the request could not be answered before its deadline")
        elif event.reason == "timeout":  # type: ignore[attr-defined]
            error = DeadlineExceeded(f"the request waited timeout_s={self._config.timeout_s:g} in the queue")
        else:
            error = DeadlineExceeded("the deadline passed, or could not be met, before the request was run")
        if not isinstance(event, Fail):
            error.retry_after_s = self.scheduler.drain_s()
        release(call.item)
        self._reject(error.code)
        call.settle(ItemResult(error=error))

    # ---- answers

    def _on_part(self, part: BatchPart) -> None:
        running = self._running.get(part.batch_id)
        if running is None:
            return
        if part.final:
            del self._running[part.batch_id]
            try:
                if part.error is not None:
                    self._lost(running, part)
                else:
                    self._completed(running, part)
            except Exception:
                self._break()
            self.wake()
            return
        for call, result in zip(running.calls, part.results, strict=True):
            if result is None:
                continue
            call.streamed = True
            if result.final:
                call.settle(result)
            else:
                call.hand(result)
        if all(call.sink is None for call in running.calls):
            self._transport.abandon(running.dispatch.slot, part.batch_id)

    def _completed(self, running: Running, part: BatchPart) -> None:
        now = time.monotonic()
        failed: set[int] = set()
        plain = True
        for call, entry, result in zip(running.calls, running.dispatch.entries, part.results, strict=True):
            if result is not None and result.error is not None:
                failed.add(entry.id)
                tell(self._observers, "on_error", self.name, self.version, result.error)
            if entry.parent is not None:
                plain = False
                if call.parts is None:
                    call.parts = {}
                call.parts[entry.start] = result or ItemResult()
            else:
                del self._waiting[entry.id]
                release(call.item)
                call.settle(result or ItemResult())
        ended = self.scheduler.complete(
            running.dispatch.batch_id, Outcome("ok", part.run_s, frozenset(failed), part.oom), now
        )
        if not plain:
            for request in ended:
                self._joined(self._waiting.pop(request))
        self._observe(running, part, now, len(failed))

    def _joined(self, call: Call) -> None:
        """Answers a split request from the answers to its parts, in row order; one failed part fails it."""
        release(call.item)
        parts = [result for _, result in sorted((call.parts or {}).items())]
        bad = next((p for p in parts if p.error is not None), None)
        if bad is not None or call.streamed:  # what streamed is out already: there is only the end to tell
            call.settle(bad or parts[-1])
            return
        try:
            call.settle(self._join(call.item, parts))
        except PenstockError as e:
            call.settle(ItemResult(error=e))
        except Exception as e:
            log.exception("join_failed model=%s", self.name)
            call.settle(
                ItemResult(error=ItemFailed(f"the parts of the answer could not be joined: {type(e).__name__}"))
            )

    def _lost(self, running: Running, part: BatchPart) -> None:
        """The worker died. What nobody waits for any more, or has had a part of its answer, is not run again."""
        now = time.monotonic()
        assert part.error is not None
        outcome = Outcome("died" if part.started else "lost", part.run_s)
        self.scheduler.complete(running.dispatch.batch_id, outcome, now)
        for call in running.calls:
            if call.sink is None or call.streamed:
                call.settle(ItemResult(error=part.error))
                self._withdraw(call, now)

    def _observe(self, running: Running, part: BatchPart, now: float, failed: int) -> None:
        if not self._observers:
            return
        d = running.dispatch
        arrivals = [e.arrival_s for e in d.entries]
        record = BatchRecord(
            model=self.name,
            version=self.version,
            slot=d.slot,
            rows=d.rows,
            max_batch_size=self.scheduler.max_batch_size,
            reason=d.reason,
            ahead=d.ahead,
            run_s=part.run_s,
            seconds=now - running.sent_s,
            waits_s=[running.sent_s - t for t in arrivals],
            latencies_s=[now - t for t in arrivals],
            failed=failed,
            bucket=d.entries[0].bucket,
        )
        tell(self._observers, "on_complete", record)
        if part.metrics:
            tell(self._observers, "on_model_metrics", self.name, self.version, d.slot, part.metrics)

    def _reject(self, code: str) -> None:
        tell(self._observers, "on_reject", self.name, self.version, code)

    # ---- end

    def _break(self) -> None:
        """A bug in the scheduler or its policy: what it knows cannot be trusted any more. Everybody is answered."""
        log.exception("batcher_broken model=%s: it answers nobody any more until it is loaded anew", self.name)
        self.close(PenstockError("internal error"))
        self.on_broken()

    async def drain(self, seconds: float) -> bool:
        """Waits until nothing waits or runs, at most so long; True when it is empty."""
        if self._waiting:
            self._emptied = self._emptied or asyncio.Event()
            try:
                await asyncio.wait_for(self._emptied.wait(), seconds)
            except TimeoutError:
                return False
        return True

    def close(self, error: PenstockError) -> None:
        """Answers everybody who still waits with `error`; nothing is dispatched any more."""
        if self._closed:
            return
        self._closed = True
        self._timer.close()
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            release(call.item)  # memory that a worker still reads is pinned until that worker is gone
            call.settle(ItemResult(error=error))
        self._running.clear()
        if self._emptied is not None:
            self._emptied.set()
