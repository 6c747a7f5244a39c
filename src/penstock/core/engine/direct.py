"""The direct driver: a model whose own threads form their batches, without the event loop."""

# Between two threads, each hop costs a wait for the interpreter, which the model's own code may hold. Through the event
# loop a call takes four: to the loop, to the model, back to the loop, to its caller. Here it takes two.
# A caller appends its request and wakes a thread of the model only if one sleeps. That thread drains the requests,
# polls the scheduler, runs the batch, completes it, releases its callers, and looks again.
# A thread that has nothing to run sleeps until the scheduler wants to look again, or until a request rings. While a
# batch is held, the requests that would not change it do not ring.
# While the callers keep a processor busy, the scheduler lets a batch wait for their next requests (`load.py`).
# The event loop of the portal only supervises. It loads the models, ends hangs (`slot.py`), and takes a turn where no
# thread of the model can: a caller leaves, a deadline passes or the queue fills up while all of them run.
# It also looks shortly before a run ends. If it gets the interpreter then, the model does without: it waits for a
# device, or computes outside of Python. The loop sends the next full batch ahead, and the thread begins it as soon as
# the run ends. Then the loop answers the run's callers, so the device need not wait for that.
# A model on a device that overlaps batches has a second thread, which waits for the results and answers. The first one
# launches a batch and looks again at once, so it sends batches ahead by itself.
# The code of the engine runs on the loop and on these threads, never on a caller's: a signal handler may raise there,
# and a greenlet may switch. One of them runs it at a time: it holds the guard of the portal, never while a model runs.

from __future__ import annotations

import asyncio
import operator
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock import metrics
from penstock.core import os_threads
from penstock.core.batching.entry import INF
from penstock.core.batching.scheduler import Scheduler
from penstock.core.engine.drivers import Turn
from penstock.core.engine.inbox import Caller, Inbox, RequestInbox
from penstock.core.engine.load import CallersLoad
from penstock.core.engine.timer import Timer
from penstock.core.transports.local import Finishing, Lease, ThreadSlot, ThreadTransport, Work, WorkerThread
from penstock.core.transports.slot import WorkerSlot
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import PenstockError
from penstock.types import BatchPart, Item, Ready

LONGEST_S = 10**6  # some platforms refuse longer timeouts
# choices
WAKING_S = 0.002
"""How long requests may wait until all threads that were answered have run: 128 threads take about as long."""
EARLY_S = 0.002
"""How long before the predicted end of a run the loop looks at what waits: it drains 256 requests in that time."""
BRIEF_S = 0.01
"""What is due sooner is left to the model's thread: most runs end before. The loop would compete with a model that
holds the interpreter, which a thread gets after 5 ms."""
LATE_S = 0.05
"""After so long the loop sees to it nevertheless, and to what came while all threads run. It costs a wake-up."""


class DirectDriver(Inbox):
    """The turns of one batcher on the threads of its model, and the inbox of its requests."""

    from_threads = True

    def __init__(self, model: str, inbox: RequestInbox, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._model = model
        self.guard = inbox.guard
        self._portal_inbox = inbox
        self._take_turn: Turn = lambda: None  # before the batcher is made
        self._threads: dict[int, int] = {}  # the model's threads: the processor clock of each, by identifier
        self._asleep: list[DirectThread] = []  # those without a batch; the last one is rung first
        # takes a thread out and rings its bell, in one step of the interpreter: no signal handler raises between them
        self._rings = map(operator.call, map(operator.attrgetter("bell.release"), iter(self._asleep.pop, None)))
        self._inert = self._room = self._full = 0
        self._wake_at = INF
        self.overlaps = False  # the model's threads begin a batch while another one is not answered
        self._load = CallersLoad()

    # ---- called by any thread

    def put(self, model: str, item: Item, caller: Caller) -> None:
        item.arrived_s = time.monotonic()
        self._requests.append((model, item, caller))
        urgent = item.budget_s is not None or item.priority > 0
        if self._closed:  # checked after the append: either we see it, or `close` sees the request
            self._pass_on()
        elif self._asleep:
            waiting = len(self._requests)
            quiet = waiting <= self._inert or (waiting < self._full and self._portal_inbox.waking)
            if not quiet or urgent or item.rows > 1:
                self._ring()
        elif urgent or len(self._requests) > self._room:
            self._look(0.0)
        elif self._look_at > item.arrived_s + LATE_S:
            self._look(item.arrived_s + LATE_S)

    def woken(self) -> None:
        if len(self._requests) > self._inert:
            self._ring()

    def _ring(self) -> bool:
        try:
            next(self._rings)
        except IndexError:
            return False
        return True

    def _pass_on(self) -> None:
        """Hands what arrives after the end to the portal's inbox, in its order."""
        for request in self._taken():
            if isinstance(request, tuple):
                self._portal_inbox.put(*request)
            else:
                self._portal_inbox.post(request)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """This is a thread of the model."""
        me = os_threads.thread_id()
        self._threads[me] = os_threads.processor_clock()
        try:
            yield
        finally:
            del self._threads[me]

    def runs_here(self) -> bool:
        return os_threads.thread_id() in self._threads

    def refuse_own_thread(self) -> None:
        if self.runs_here():
            raise RuntimeError(f"model '{self._model}' called itself and would wait for itself: call its function")

    def refuse_to_block(self) -> None:
        self._portal_inbox.refuse_to_block()
        self.refuse_own_thread()

    # ---- called on the loop

    def _look_on_loop(self, when: float) -> None:
        if self._closed:
            self._timer.close()
        elif when > time.monotonic():
            self._timer.at(when)
        else:
            self._look_now()

    def _look_now(self) -> None:
        self._look_at = INF  # before the deque is looked at, so that a new request looks again
        self._turn()

    # ---- the driver, see `Driver`

    def begin(self, turn: Turn, scheduler: Scheduler, strict: bool) -> None:
        self._take_turn, self._scheduler, self._strict = turn, scheduler, strict
        self.backend = self._portal_inbox.backend
        self._timer = Timer(self._loop, self._look_now)

    @property
    def ahead(self) -> bool:
        """On the model's thread only if a second one answers. That the loop runs beside the model shows that answers
        can be passed on there, too."""
        return self.overlaps or not self.runs_here()

    def crowded(self) -> bool:
        here = self.runs_here()
        return self._load.look(tuple(self._threads.values())) if here else self._load.busy

    def soon(self) -> None:
        if not self.runs_here():  # else it takes a turn before its next batch
            self._look(0.0)

    def turned(self, wake_at: float | None) -> None:
        self._wake_at = INF if wake_at is None else wake_at
        scheduler = self._scheduler
        self._load.running = scheduler.running > 0
        self._inert, self._room = scheduler.inert_arrivals, 0 if self._strict else scheduler.room
        self._full = scheduler.max_batch_size

    def rest(self) -> None:
        """Nothing to do: the thread that has answered takes a turn."""

    def close(self) -> None:
        super().close()
        self._look(-INF)  # a scheduler may break on any thread

    def _turn(self) -> None:
        """A turn on the loop."""
        with self.guard:
            self._wake_at = INF
            self._portal_inbox.answer(self._take_turn)
            self._look_early()
            self._ensure()

    def _look_early(self) -> None:
        """Sees to a turn when a full batch can be sent ahead, so that it can begin as soon as the run ends."""
        end_s, later = self._scheduler.next_end()[0], time.monotonic() + BRIEF_S
        if end_s <= later:  # the thread is back before another one is awake
            return
        early = max(self._scheduler.ahead_at(), end_s - EARLY_S)
        if early > later:
            self._wake_at = min(self._wake_at, early)

    def _ensure(self) -> None:
        """Sees to the next turn at `_wake_at`: a thread that sleeps until then, or the timer of the loop."""
        when, now = self._wake_at, time.monotonic()
        if when == INF and not self._requests:
            return
        if when < now + BRIEF_S or (self._requests and when > now + LATE_S):
            when = now + LATE_S
        if when < self._look_at and not any([t.until <= when for t in tuple(self._asleep)]) and not self._ring():
            self._look(when)

    # ---- called by the model's threads

    def next(self, thread: DirectThread) -> Work | None:
        """The next batch of the thread, for which it waits; None: it ends."""
        if thread.skips:
            thread.skips = False
            return thread.take()
        began_s = time.thread_time()
        while True:
            with self.guard:
                self._wake_at = INF
                self._portal_inbox.answer(thread.pass_on, self._take_turn)
                if thread.batches:
                    self._look_early()
                    self._ensure()
                    thread.pause_s = time.thread_time() - began_s
                    return thread.take()
                if thread.ending:
                    self._ensure()
                    return None
                thread.until = self._wake_at
                if self._portal_inbox.waking:
                    thread.until = min(thread.until, time.monotonic() + WAKING_S)
                insort(self._asleep, thread, key=operator.attrgetter("order"))  # in one step, too
            wait_s = -1.0 if thread.until == INF else max(0.0, min(thread.until - time.monotonic(), LONGEST_S))
            if self._requests or not thread.bell.acquire(timeout=wait_s):
                self.rouse(thread)  # unless it was rung meanwhile
                thread.bell.acquire()

    def rouse(self, thread: DirectThread) -> bool:
        """Wakes the thread if it sleeps; False if it is awake."""
        try:
            self._asleep.remove(thread)
        except ValueError:
            return False
        thread.bell.release()
        return True

    def answer(self, thread: DirectThread) -> None:
        """Passes the parts of the thread's batches to the batcher."""
        self._portal_inbox.answer(thread.pass_on)

    def answer_on_loop(self, thread: DirectThread) -> None:
        """Does the same, and takes a turn, while the thread runs its next batch."""
        began_s = time.thread_time()
        self.answer(thread)
        self._turn()
        thread.pause_s = time.thread_time() - began_s


class StageDriver(DirectDriver):
    """The turns of one stage of several, whose requests come from threads of other stages, too."""

    callers = False  # whether callers put requests into it

    def crowded(self) -> bool:
        return False

    def turned(self, wake_at: float | None) -> None:
        if self.callers:
            super().turned(wake_at)
        else:
            self._wake_at = INF if wake_at is None else wake_at

    def soon(self) -> None:
        """Leaves the turn to a thread that sleeps, or else to the first one that has run, unless a deadline is near."""
        if not self.runs_here() and not self._ring():
            self._look(0.0 if self._scheduler.urgent else time.monotonic() + LATE_S)


class DirectThread(WorkerThread):
    """One thread with its model, which takes its batches from the driver."""

    def __init__(self, slot: DirectSlot, driver: DirectDriver) -> None:
        super().__init__(slot)
        self.batches: deque[Work] = deque()
        self.ahead = False  # the loop gave it the next batch while it ran one
        self.skips = False  # the loop answers the last batch and takes the next turn
        self._parts: deque[tuple[BatchPart, list[Lease]]] = deque()
        self.pause_s = 0.0  # processor time between two runs, or what it would have been without the loop's help
        self.ending = False
        self.order = -slot.number  # the scheduler prefers the first idle slot, so its thread is rung first
        self.until = INF  # when it wakes by itself while it sleeps
        self.bell = os_threads.new_lock()
        self.bell.acquire()
        self._driver = driver

    def put(self, work: Work | None) -> None:
        if work is None:
            self.ending = True
        else:
            self.batches.append(work)
        if not self._driver.rouse(self):
            self.ahead = work is not None and not self._driver.runs_here()

    def main(self, spec: WorkerSpec, device: str) -> None:
        with self._driver.thread():
            super().main(spec, device)

    def next(self) -> Work | None:
        self._driver.overlaps = self._finisher is not None
        return self._driver.next(self)

    def _finish(self, registry: metrics.Registry, box: list[Finishing]) -> None:
        with self._driver.thread():
            super()._finish(registry, box)
        self._driver.rouse(self)  # a turn is due

    def answer(self, part: BatchPart, leases: list[Lease]) -> None:
        """Passes a part on. The last one is left to `next`, or to the loop if it has sent the next batch ahead."""
        if self._finisher is None:
            part.prepare_s += self.pause_s  # a batch that is sent ahead need not wait for it
        self._parts.append((part, leases))
        if self._finisher is not None or not part.final:
            self._driver.answer(self)
        elif self.ahead:
            self.skips = True
            self._post(self._driver.answer_on_loop, self)

    def take(self) -> Work:
        self.ahead = False
        return self.batches.popleft()

    def pass_on(self) -> None:
        """With the guard: passes on what is not yet."""
        while self._parts:
            self.slot.on_part(self, *self._parts.popleft())


class DirectSlot(ThreadSlot):
    """One place for a thread that takes its batches from the driver. Its changes happen on the loop."""

    def __init__(self, spec: WorkerSpec, number: int, device: str, driver: DirectDriver) -> None:
        super().__init__(spec, number, device)
        self._driver = driver

    def new_thread(self) -> WorkerThread:
        return DirectThread(self, self._driver)

    def is_up(self, ready: Ready) -> None:
        with self._driver.guard:
            super().is_up(ready)

    def down(self, error: PenstockError, predicted: int = 0) -> None:
        with self._driver.guard:
            super().down(error, predicted)

    def kill(self, why: PenstockError) -> None:
        with self._driver.guard:
            super().kill(why)

    def now(self) -> float:
        return time.monotonic()  # some loops cache their time, which is then old in another thread

    def watch(self, when: float) -> None:
        self.loop.call_soon_threadsafe(self._watch_now, when)

    def _watch_now(self, when: float) -> None:
        with self._driver.guard:
            if self._timer is None or when < self._timer.when():
                super().watch(when)

    def check_time(self) -> None:
        with self._driver.guard:
            super().check_time()


class DirectTransport(ThreadTransport):
    """A thread transport whose slots take their batches from `driver`. None is sent ahead of its turn."""

    depth = 2

    def __init__(self, spec: WorkerSpec, slots: int, devices: Sequence[str], driver: DirectDriver) -> None:
        self.driver = driver
        super().__init__(spec, slots, devices)

    def _make(self, number: int, device: str) -> WorkerSlot:
        return DirectSlot(self._spec, number, device, self.driver)
