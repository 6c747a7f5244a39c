import asyncio
import concurrent.futures
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.portal import waiters
from penstock.core.portal.waiters import (
    Future,
    SyncWaiter,
    ThreadWaiter,
    WaitingThreads,
    all_items,
    every_item,
    the_item,
)
from penstock.errors import ItemFailed, QueueFull
from penstock.types import ItemResult
from support.interrupts import interrupt

WAIT_S = 10.0


class Posted:
    """Callbacks on their way to the loop."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.closed = False

    def post(self, call: Any) -> None:
        if not self.closed:
            self.calls.append(call)

    def refuse_own_thread(self) -> None: ...

    def refuse_to_block(self) -> None: ...

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


@pytest.fixture
def posted() -> Posted:
    return Posted()


def ticket() -> Any:
    cancelled: list[bool] = []
    return SimpleNamespace(cancel=lambda: cancelled.append(True), cancelled=cancelled)


def test_a_waiter_can_be_reused() -> None:
    waiter, mine = SyncWaiter(), ticket()
    assert not waiter.wait(0.001)
    for value in (1, 2):
        waiter.accepted(mine)
        waiter(ItemResult(0, final=False))
        waiter(ItemResult(value))
        assert waiter.wait(None)
        assert waiter.value.body == value
        waiter.leave()
    assert not mine.cancelled, "what was answered is not taken back"
    waiter.accepted(mine)
    waiter.leave()
    assert mine.cancelled


class Pass:
    """The part of an inbox that threads see: one pass that answers, and what is known of the threads it woke."""

    def __init__(self) -> None:
        self.waking = False
        self.all_ran = 0
        self._calls: list[Callable[[], None]] = []

    def after(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def woken(self) -> None:
        self.all_ran += 1

    def end(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


def waiting_threads(size: int) -> tuple[Pass, WaitingThreads, list[ThreadWaiter]]:
    answers = Pass()
    threads = WaitingThreads(answers)
    waiters = [ThreadWaiter(threads) for _ in range(size)]
    for waiter in waiters:
        waiter.accepted(ticket())
    return answers, threads, waiters


def woken(waiters: list[ThreadWaiter]) -> int:
    return sum(not waiter.lock.locked() for waiter in waiters)


def test_one_of_many_threads_is_woken_at_a_time_and_each_wakes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.portal.waiters.LATE_S", WAIT_S)
    answers, threads, waiters = waiting_threads(5)
    for waiter in waiters[:3]:
        waiter(ItemResult(1))
    assert woken(waiters) == 0, "the answers of one pass belong together"
    answers.end()
    assert woken(waiters) == 1
    assert answers.waking
    for waiter in waiters[3:]:
        waiter(ItemResult(1))
    answers.end()
    assert woken(waiters) == 1, "threads of the next pass come behind those of the one before"
    for waiter in waiters:
        assert waiter.wait(0)
        assert woken(waiters) == (0 if waiter is waiters[-1] else 1)
    assert (answers.waking, answers.all_ran, threads.waiting) == (False, 1, 0)
    waiters[0].accepted(ticket())
    waiters[0](ItemResult(2))
    assert waiters[0].wait(0), "a lone thread is woken at once"


def test_threads_that_run_late_are_woken_in_groups_until_one_runs_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, threads, waiters = waiting_threads(12)
    for waiter in waiters:
        waiter(ItemResult(1))
    answers.end()
    sizes = [woken(waiters)]
    for late in (True, True, False, False, False):
        monkeypatch.setattr("penstock.core.portal.waiters.LATE_S", -1.0 if late else WAIT_S)
        group = [waiter for waiter in waiters if not waiter.lock.locked()]
        for waiter in group:
            assert waiter.wait(0)
        sizes.append(woken(waiters))
    assert sizes == [1, 2, 4, 2, 1, 1]
    while answers.waking:
        assert next(waiter for waiter in waiters if not waiter.lock.locked()).wait(0)
    assert (answers.all_ran, threads.waiting, woken(waiters)) == (1, 0, 0)


def test_a_thread_that_stops_waiting_does_not_keep_others_asleep() -> None:
    answers, threads, waiters = waiting_threads(5)
    unanswered, first, second, early, last = waiters
    unanswered.leave()
    for waiter in waiters[1:]:
        waiter(ItemResult(1))
    early.leave()
    answers.end()
    first.leave()  # answered and woken, but it timed out at that moment
    assert second.wait(0)
    assert last.wait(0)
    assert (answers.waking, answers.all_ran, threads.waiting) == (False, 1, 0)


def test_a_refused_thread_is_woken_at_once_by_any_thread() -> None:
    _, threads, _ = waiting_threads(2)
    refused = ThreadWaiter(threads)
    refused(ItemResult(error=QueueFull("full")))
    assert refused.wait(0)
    assert threads.waiting == 2


def test_a_future_is_settled_once(posted: Posted) -> None:
    future = Future(posted, the_item)
    future(ItemResult(0, final=False))
    assert not future.done()
    future(ItemResult(1))
    future(ItemResult(2))
    assert future.result(0) == 1
    assert not future.cancel()
    assert not posted.calls


def test_a_cancelled_future_takes_its_request_back_and_drops_a_late_answer(posted: Posted) -> None:
    future, mine = Future(posted, the_item), ticket()
    future.accepted(mine)
    assert future.cancel()
    assert future.cancel()
    posted.run()
    assert mine.cancelled == [True]
    future(ItemResult(1))
    with pytest.raises(CancelledError):
        future.result(0)


def test_an_answer_that_meets_a_cancel_on_its_way_is_dropped(posted: Posted) -> None:
    future, mine = Future(posted, the_item), ticket()
    future.accepted(mine)
    assert future.cancel()
    future(ItemResult(1))
    posted.run()
    assert future.cancelled()
    assert not mine.cancelled


def test_a_future_of_a_closed_portal_can_be_cancelled(posted: Posted) -> None:
    posted.closed = True
    assert Future(posted, the_item).cancel()


def test_a_failed_future_creates_no_reference_cycle(posted: Posted) -> None:
    future = Future(posted, all_items)
    future(ItemResult([1, ItemFailed("no")]))
    assert isinstance(future.exception(0), ItemFailed)
    gc.disable()
    try:
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


def test_a_future_ends_before_or_after_others_look_at_it_and_not_meanwhile(posted: Posted) -> None:
    future = Future(posted, the_item)
    with future._condition:  # as `concurrent.futures.wait` and `as_completed` look at it
        answering = threading.Thread(target=future, args=[ItemResult(1)])
        answering.start()
        answering.join(0.05)
        assert not future.done()  # else it would be counted as done, and then counted again
    answering.join()
    assert list(as_completed([future], 0)) == [future]


def test_a_future_can_be_awaited_and_a_cancelled_wait_cancels_it(posted: Posted) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        future = Future(posted, every_item)
        loop.call_soon(future, ItemResult([1, 2]))
        assert await future == [1, 2]
        left = Future(posted, the_item)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await left
        assert left.cancelled()

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["settle", "cancel"])
def test_a_callback_that_exits_keeps_nobody_behind_it_waiting(posted: Posted, ending: str) -> None:
    def exits(_: object) -> None:
        raise SystemExit

    async def scenario() -> None:
        future, told = Future(posted, the_item), []
        future.add_done_callback(exits)
        future.add_done_callback(told.append)
        waits = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        if ending == "settle":
            future(ItemResult(1))
            assert await waits == 1
        else:
            with pytest.raises(SystemExit):
                future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
        assert told == [future]

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_an_interrupt_of_a_loop_that_goes_on_keeps_no_coroutine_waiting(posted: Posted) -> None:
    async def awaits(future: Future) -> Any:
        return await future

    def end(futures: list[Future]) -> None:
        for future in futures:
            future(ItemResult(1))

    with closing(asyncio.new_event_loop()) as loop:

        def begin(ended: bool) -> list[asyncio.Task[Any]]:
            futures = [Future(posted, the_item) for _ in range(3)]
            tasks = [loop.create_task(awaits(future)) for future in futures]
            if not ended:
                loop.run_until_complete(asyncio.sleep(0))
            ending = threading.Thread(target=end, args=[futures])
            ending.start()
            ending.join()
            return tasks

        for ended in (False, True):
            for instruction in range(1, 1000):
                tasks = begin(ended)
                try:
                    with interrupt(instruction, [waiters]) as raised:
                        loop.run_until_complete(asyncio.wait(tasks))
                except KeyboardInterrupt:
                    pass
                tasks += begin(False)
                _, waiting = loop.run_until_complete(asyncio.wait(tasks, timeout=WAIT_S))
                assert not waiting, raised
                interrupted = [task for task in tasks if isinstance(task.exception(), KeyboardInterrupt)]
                assert len(interrupted) <= 1
                if not raised:
                    break
            assert 10 < instruction < 999


@pytest.mark.parametrize("ending", ["settle", "fail", "cancel", "settle and cancel"])
def test_threads_that_meet_at_the_end_of_a_future_all_see_one_end_as_with_any_other(ending: str) -> None:
    """Threads settle, cancel and ask at the same time. Each sees what it would see at a plain future."""

    def plain(given: dict[str, Any]) -> dict[str, Any]:
        future: Any = concurrent.futures.Future()
        if given["cancelled"]:
            future.cancel()
            future.set_running_or_notify_cancel()
        elif ending == "fail":
            future.set_exception(ItemFailed("no"))
        else:
            future.set_result(7)
        return {name: ask(future) for name, ask in asks.items()}

    def called_back(future: Any) -> Any:
        calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future.add_done_callback(lambda done: calls.put((done is future, done.done(), done.cancelled())))
        found = calls.get(timeout=WAIT_S)
        return found, calls.qsize()

    def of(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException as e:
            return type(e)

    async def awaited(future: Any) -> Any:
        found = await asyncio.wait_for(future if isinstance(future, Future) else asyncio.wrap_future(future), WAIT_S)
        return found, future.done()

    asks: dict[str, Callable[[Any], Any]] = {
        "result": lambda future: of(lambda: future.result(WAIT_S)),
        "exception": lambda future: of(lambda: type(future.exception(WAIT_S))),
        "callback": called_back,
        "wait": lambda future: len(concurrent.futures.wait([future], WAIT_S).done),
        "as_completed": lambda future: [f is future for f in concurrent.futures.as_completed([future], WAIT_S)],
        "await": lambda future: of(lambda: asyncio.run(awaited(future))),
        "first": lambda future: len(concurrent.futures.wait([future], WAIT_S, "FIRST_EXCEPTION").done),
    }
    rounds, chance = 150, Random(ending)
    threads = len(asks) + 2
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            future, together = Future(Posted(), the_item), threading.Barrier(threads)

            def at_once(act: Callable[[], Any], late_s: float, together: threading.Barrier = together) -> Any:
                together.wait(WAIT_S)
                end = time.perf_counter() + late_s
                while time.perf_counter() < end:
                    pass
                return act()

            def end(future: Any = future) -> None:
                future(ItemResult(error=ItemFailed("no")) if ending == "fail" else ItemResult(7))

            ends = {"cancel": [future.cancel] * 2, "settle and cancel": [end, future.cancel]}.get(ending, [end] * 2)
            acts = [partial(ask, future) for ask in asks.values()] + ends
            done = [pool.submit(at_once, act, chance.choice([0.0, 0.0, 2e-5, 1e-4])) for act in acts]
            found = dict(zip(asks, [each.result(2 * WAIT_S) for each in done], strict=False))
            assert found == plain({"cancelled": future.cancelled()})
            assert ending == "settle and cancel" or future.cancelled() == (ending == "cancel")
