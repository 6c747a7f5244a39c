"""The common part of the transports: a slot that starts a worker, feeds it, detects its end, and restarts it."""

# A slot is one place for a worker; workers follow each other there. It is down, loading, up, or closing.
# A transport implements how a worker is launched, fed, killed and stopped; everything else is here, for all transports.
# Batches in flight are kept in the order of sending. A worker runs them one after the other, so only the first one can
# have started; a concurrent worker runs them side by side, and each part moves its batch to the end.
# One timer watches the slot: the load against `load_timeout_s`, later the first batch against `run_timeout_s`. It is
# not set again for each batch: when it fires, it looks at the batches in flight and sleeps for the time left.
# A worker that hangs is killed and the slot starts another one. The batch that hung is reported as died, the batches
# behind it as not started, so that the scheduler runs those again without suspicion.
# Before that, a batch that would hang again, or may not run in parts, gets its response: RunTimeout for each item.
# After the end of a worker the next one starts at once if workers of the slot have answered batches; else, and after
# many deaths in a short time, the pauses double (`WorkerHistory`).
# A slot that closes takes no more batches, waits for those in flight, and then ends its worker in order or kills it.

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from penstock.backoff import Backoff
from penstock.config.schema import RestartConfig, with_options
from penstock.core.contracts import RESTART_WAIT_S, OnPart, TransportListener
from penstock.core.wire.slabs import Slab, SlabPool
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import LoadFailed, PenstockError, RunTimeout, WorkerDied, describe
from penstock.types import Batch, BatchPart, ItemResult, Ready

log = logging.getLogger("penstock.transports")

# choices
FIRST_RETRY_S = 0.1  # the pause after a failed load, doubled up to
LAST_RETRY_S = 30.0
CHECK_S = 1.0  # between two reports of how a worker is used


class Sent(Struct):
    """A batch in flight on a slot."""

    batch: Batch
    on_part: OnPart
    slabs: list[Slab]  # pinned
    started_s: float  # of the run; on a concurrent slot, of the last part
    open: set[int] | None = None  # places of the items without a response, where batches run side by side


class WorkerHistory:
    """What the workers of a slot have done, and the pauses before it starts the next one.

    There is no pause after the death of a worker if workers of the slot have answered batches. After `deaths` in
    `window_s` pauses double from 0.1 s to the time of a load, at most 1 s: each of many bad requests may be another
    one, and good ones wait. After failed loads, and deaths of workers that were never asked, they double to 30 s.
    """

    def __init__(self, config: RestartConfig, max_requests: int | None) -> None:
        self.requests = 0  # that the current worker has answered
        self._most = max_requests
        self._check_at_s = 0.0
        self._answered = False  # a worker of the slot has answered a batch
        self._deaths: deque[float] = deque(maxlen=config.deaths)
        self._window_s = config.window_s
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        self.load_s = 0.0  # of the last worker that came up

    def answered(self, requests: int, now: float) -> bool:
        """Counts answered requests. True once a second, and from `max_requests` on: the worker may be due to be
        replaced."""
        self._answered = True
        self.requests += requests
        if now < self._check_at_s and (self._most is None or self.requests < self._most):
            return False
        self._check_at_s = now + CHECK_S
        return True

    def next_s(self, loaded: bool, asked: bool, now: float) -> float:
        """The pause after the end of a worker; `loaded`: it had come up, `asked`: it had a batch."""
        self.requests = 0
        if loaded and self._answered:
            often = len(self._deaths) == self._deaths.maxlen and now - self._deaths[0] < self._window_s
            self._deaths.append(now)
            if not often:
                self._backoff.reset()
                return 0.0
        served = loaded and (asked or self._answered)
        return self._backoff.next_s(min(self.load_s, RESTART_WAIT_S) if served else None)


class WorkerSlot:
    """One place for a worker. A transport says how to `launch`, `submit`, `kill`, `stop` and `forget` one.

    It has 16 attributes: its identity, the state of its worker, and the two timers that change it.
    """

    def __init__(self, spec: WorkerSpec, number: int, device: str) -> None:
        self.spec = spec
        self.number = number
        self.device = device
        self.up = False
        self.closing = False
        self.sent: dict[int, Sent] = {}  # by batch, in the order of sending
        self.concurrent = False  # the worker runs batches concurrently
        self._heard_s = 0.0  # concurrent slot: its last response, or the first batch after an idle time
        self._emptied = asyncio.Event()  # closing, and nothing is sent
        self._history = WorkerHistory(spec.config.restart, spec.config.max_requests)
        self._batching = spec.config.batching
        self._timer: asyncio.TimerHandle | None = None  # of the load, later of the running batch
        self._restart: asyncio.TimerHandle | None = None

    def launch(self) -> None:
        """Starts a worker; later `is_up` or `down` is called. An exception is the reason for the failed start."""
        raise NotImplementedError

    def submit(self, batch: Batch) -> list[Slab] | BatchPart:
        """Hands the batch to the worker: the slabs it pinned, or the final part if it cannot be sent."""
        raise NotImplementedError

    def abandon(self, batch_id: int) -> None:
        raise NotImplementedError

    def kill(self, why: PenstockError) -> None:
        """Ends the worker at once; `down` is called with `why`, now or soon."""
        raise NotImplementedError

    async def stop(self, idle: bool) -> None:
        """Ends the worker and returns when it is gone; `idle`: it has answered everything, so in order."""
        raise NotImplementedError

    def forget(self) -> None:
        """See `Transport.forget`."""

    def now(self) -> float:
        """The time on the clock of the loop."""
        return self.loop.time()

    # ---- start and end

    def start(self, listener: TransportListener) -> None:
        self.loop = asyncio.get_running_loop()
        self.listener = listener
        self._launch()

    def _launch(self) -> None:
        self._restart = None
        self._launched_s = self.now()
        try:
            self.launch()
        except PenstockError as e:
            self.down(e)
        except Exception as e:  # no more threads, for instance: the next attempt may have one
            log.exception("worker_not_started model=%s slot=%d", self.spec.name, self.number)
            self.down(LoadFailed(f"a worker could not be started: {describe(e)}"))
        else:
            if not self.up:
                self._timer = self.loop.call_later(self.spec.config.load_timeout_s, self._load_hangs)

    def _load_hangs(self) -> None:
        self._timer = None
        why = f"loading exceeded load_timeout_s={self.spec.config.load_timeout_s:g}; its worker was given up"
        log.warning("worker_hangs model=%s slot=%d: %s", self.spec.name, self.number, why)
        self.kill(LoadFailed(why))

    def is_up(self, ready: Ready) -> None:
        """Records that the worker has loaded its model."""
        self.up, self.concurrent, self.asks_requests = True, ready.concurrency > 1, ready.asks_requests
        self._history.load_s = self.now() - self._launched_s
        self._stop_timer()
        self._batching = with_options(self.spec.config.batching, ready.options)
        self.listener.slot_up(self.number, ready)

    def down(self, error: PenstockError, predicted: int = 0) -> None:
        """Handles the end of the worker: answers its batches, then informs the listener, and schedules a restart.

        The batch `predicted` is to blame, or the first one if nothing waits for that; any of concurrent batches."""
        loaded, self.up = self.up, False
        self._stop_timer()
        lost, self.sent = list(self.sent.values()), {}
        died = error if isinstance(error, WorkerDied) else WorkerDied(error.message, detail=error.detail)
        guilty = next((sent for sent in lost if sent.batch.id == predicted), lost[0] if lost else None)
        for sent in lost:
            unpin(sent.slabs)
            started = self.concurrent or sent is guilty
            run_s = self.now() - sent.started_s if started else 0.0
            self.deliver(sent.on_part, BatchPart(sent.batch.id, error=died, started=started, run_s=run_s))
        if self.closing:
            self._emptied.set()
            if lost:
                self.listener.slot_down(self.number, error, None)
            return
        wait = self._history.next_s(loaded, bool(lost), self.now())
        self._restart = self.loop.call_later(wait, self._launch)
        self.listener.slot_down(self.number, error, wait)

    async def close(self, drain_s: float) -> None:
        self.closing = True
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        if self.sent:
            await within(self._emptied, drain_s)
        await self.stop(idle=not self.sent)

    # ---- batches

    def send(self, batch: Batch, on_part: OnPart) -> None:
        if not self.up:
            part = BatchPart(batch.id, error=WorkerDied("no worker runs on this slot"), started=False)
            self.loop.call_soon(self.deliver, on_part, part)
            return
        found = self.submit(batch)
        if isinstance(found, BatchPart):
            self.loop.call_soon(self.deliver, on_part, found)
            return
        now = self.now()
        if self.concurrent and not self.sent:
            self._heard_s = now
        open_places = set(range(len(batch.items))) if self.concurrent else None
        self.sent[batch.id] = Sent(batch, on_part, found, now, open_places)
        if self._timer is None or batch.limit_s < self._batching.run_timeout_s:
            self.watch(now + self._limit_s(batch))

    def answered(self, part: BatchPart) -> Sent:
        """Records a part before its caller receives it, and returns its batch. Raises ValueError if it does not fit."""
        sent = self.sent.get(part.batch_id)
        if sent is None or not (
            sent is next(iter(self.sent.values())) and len(part.results) == len(sent.batch.items)
            if sent.open is None
            else _fits(sent.open, part)
        ):
            raise ValueError(f"{len(part.results)} answers to batch {part.batch_id} do not fit what was sent")
        now = self.now()
        if self.concurrent:
            self._heard_s = sent.started_s = now
            self.sent[part.batch_id] = self.sent.pop(part.batch_id)  # the first one is silent for the longest time
        if part.final:
            del self.sent[part.batch_id]
            if not self.sent:
                if self.closing:
                    self.loop.call_soon_threadsafe(self._emptied.set)
            elif not self.concurrent:
                self._first().started_s = now
        if (part.final or part.at is not None) and self._history.answered(len(part.results), now):
            self.listener.slot_used(self.number, self._history.requests)
        return sent

    def _first(self) -> Sent:
        return next(iter(self.sent.values()))

    def deliver(self, on_part: OnPart, part: BatchPart) -> None:
        try:
            on_part(part)
        except Exception:
            log.exception("part_not_taken model=%s batch=%d", self.spec.name, part.batch_id)

    def watch(self, when: float) -> None:
        """Looks at the batches in flight at `when`."""
        self._stop_timer()
        self._timer = self.loop.call_at(when, self.check_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit_s(self, batch: Batch) -> float:
        return min(self._batching.run_timeout_s, batch.limit_s)

    def check_time(self) -> None:
        """The one timer of the slot; often its batch was answered long before.

        A worker with concurrent batches is killed after `run_timeout_s` of silence, or after twice that if one batch
        has no part while others have: its model has lost a batch."""
        self._timer = None
        if not self.sent:
            return
        first = self._first()
        limit_s = self._limit_s(first.batch)
        due = first.started_s + limit_s
        if self.concurrent:
            due = min(due + limit_s, self._heard_s + limit_s)
        if self.now() < due:
            self.watch(due)
            return
        why = f"the run exceeded run_timeout_s={self._batching.run_timeout_s:g}, and its worker was replaced"
        log.warning("worker_hangs model=%s slot=%d: %s", self.spec.name, self.number, why)
        error = RunTimeout(why)
        if not self.concurrent or len(self.sent) == 1:
            self._answer_hang(first, error)
        self.kill(error)

    def _answer_hang(self, sent: Sent, error: RunTimeout) -> None:
        """Answers the items of a batch that would hang again, or may not run in parts. Others run again."""
        items, batching = sent.batch.items, self._batching
        alone = sum(item.rows if item.many else 1 for item in items) == 1
        if alone or not (batching.retry_split and batching.idempotent):
            results: list[ItemResult | None] = [
                ItemResult([error] * item.rows) if item.many else ItemResult(error=error) for item in items
            ]
            self.deliver(sent.on_part, BatchPart(sent.batch.id, results, final=False))


class SlotTransport:
    """A Transport of `slots` independent slots; slot i is on `devices[i % len(devices)]`.

    Slabs are pinned while a worker may read them, and stay the caller's. `pool` holds request slabs in shared memory;
    `reply_bytes` is the size of each worker process's own region for responses.
    """

    depth = 8

    def __init__(
        self,
        spec: WorkerSpec,
        slots: int = 1,
        devices: Sequence[str] = ("cpu",),
        pool: SlabPool | None = None,
        reply_bytes: int = 0,
    ) -> None:
        self._spec, self._pool, self._reply_bytes = spec, pool, reply_bytes
        self._places = {number: self._make(number, devices[number % len(devices)]) for number in range(slots)}
        self._closing = False
        self._parked: list[
            tuple[Batch, OnPart]
        ] = []  # sent while closing: answered at the end, so that no caller spins

    @property
    def single(self) -> bool:
        """Whether there is one slot only."""
        return len(self._places) == 1

    def _make(self, number: int, device: str) -> WorkerSlot:
        """A slot that is not started yet."""
        raise NotImplementedError

    async def start(self, listener: TransportListener) -> None:
        self._listener = listener
        for place in list(self._places.values()):
            if self._closing:
                return
            place.start(listener)
            await asyncio.sleep(0)  # starting a worker may take a millisecond or two: let other tasks run

    def add_slot(self, slot: int, device: str) -> None:
        assert slot not in self._places, f"slot {slot} still has a worker"
        place = self._places[slot] = self._make(slot, device)
        place.start(self._listener)

    async def remove_slot(self, slot: int, drain_s: float) -> None:
        if (place := self._places.get(slot)) is not None:  # else its worker did not start yet
            await place.close(drain_s)
            self._places.pop(slot, None)

    def send(self, batch: Batch, on_part: OnPart) -> None:
        if self._closing:
            self._parked.append((batch, on_part))
        else:
            self._places[batch.slot].send(batch, on_part)

    def abandon(self, slot: int, batch_id: int) -> None:
        self._places[slot].abandon(batch_id)

    async def close(self, drain_s: float) -> None:
        self._closing = True
        await asyncio.gather(*(place.close(drain_s) for place in list(self._places.values())))
        parked, self._parked = self._parked, []
        for batch, on_part in parked:
            on_part(BatchPart(batch.id, error=WorkerDied("the workers were stopped"), started=False))

    def forget(self) -> None:
        for place in self._places.values():
            place.forget()


async def within(event: asyncio.Event, seconds: float) -> bool:
    """True if the event is set within `seconds`."""
    if not event.is_set() and seconds > 0:
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            pass
    return event.is_set()


def _fits(open: set[int], part: BatchPart) -> bool:
    """Marks the places that a part answers as done; False if they do not fit. A part without `at` answers none."""
    if part.at is None:
        return not part.final
    places = part.at
    if len(places) != len(part.results) or not open.issuperset(places) or len(set(places)) != len(places):
        return False
    open.difference_update(places)
    return part.final == (not open)


def unpin(slabs: Sequence[Slab]) -> None:
    for slab in slabs:
        slab.unpin()
