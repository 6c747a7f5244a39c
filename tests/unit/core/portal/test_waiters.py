from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, as_completed
from types import SimpleNamespace
from typing import Any

import pytest

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


def test_one_of_many_threads_is_woken_at_a_time_and_each_wakes_another() -> None:
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
