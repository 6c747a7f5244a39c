import asyncio
import time
import weakref
from typing import Any

import numpy as np

from penstock.core.engine.inbox import REQUESTS_PER_PASS, RequestInbox
from penstock.errors import PenstockError, QueueFull
from penstock.types import Item, ItemResult


class Counting:
    """A backend that only counts what reaches it."""

    submitted = 0

    def __init__(self) -> None:
        self.came = asyncio.Event()

    def submit(self, *arguments: Any, **keywords: Any) -> Any:
        self.submitted += 1
        self.came.set()


class Silent:
    def accepted(self, ticket: Any) -> None: ...


def new_inbox(backend: Any = None) -> tuple[Any, RequestInbox]:
    inbox = RequestInbox(asyncio.get_running_loop())
    inbox.backend = backend or Counting()
    return inbox.backend, inbox


async def passes(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_flood_of_requests_leaves_passes_of_the_loop_to_others() -> None:
    backend, inbox = new_inbox()
    for n in range(3 * REQUESTS_PER_PASS):
        inbox.put("m", Item(n), Silent())
    seen = []
    while backend.submitted < 3 * REQUESTS_PER_PASS:
        await asyncio.sleep(0)
        seen.append(backend.submitted)
    assert seen[-3:] == [REQUESTS_PER_PASS, 2 * REQUESTS_PER_PASS, 3 * REQUESTS_PER_PASS]


async def test_the_error_of_a_refused_request_does_not_keep_its_item() -> None:
    class Full:
        def submit(self, model: str, version: None, item: Item, sink: Any, **more: Any) -> Any:
            raise QueueFull("full")

    class Keeper(Silent):
        def __call__(self, result: ItemResult) -> None:
            self.result = result

    item, keeper = Item(np.zeros(1)), Keeper()
    gone = weakref.ref(item.payload)
    _, inbox = new_inbox(Full())
    inbox.put("m", item, keeper)
    del item
    await passes()
    assert isinstance(keeper.result.error, QueueFull)
    assert gone() is None


async def test_requests_that_change_nothing_wait_without_a_wake_up() -> None:
    backend, inbox = new_inbox()
    busy, busier = object(), object()
    inbox.allow(busy, 2)
    inbox.allow(busier, 9)
    for n in range(2):
        inbox.put("m", Item(n), Silent())
    await passes()
    assert backend.submitted == 0
    inbox.put("m", Item(2), Silent())
    await passes()
    assert backend.submitted == 3
    for item in (Item([1, 2], rows=2, many=True), Item(1, budget_s=5.0), Item(1, priority=1)):
        before = backend.submitted
        inbox.put("m", item, Silent())
        await passes()
        assert backend.submitted == before + 1, "several rows, a deadline or a low class"
    inbox.put("m", Item(3), Silent())
    inbox.allow(busy, 0)
    await passes()
    assert backend.submitted == 7, "what was put before a batcher became idle"
    inbox.allow(busy, None)
    inbox.put("m", Item(4), Silent())
    await passes()
    assert backend.submitted == 7, "a batcher that has ended does not count"


async def test_a_request_waits_at_most_a_moment_for_another_reason_to_run() -> None:
    backend, inbox = new_inbox()
    for _ in range(2):
        inbox.allow(backend, 100)
        before = time.monotonic()
        inbox.put("m", item := Item(1), Silent())
        assert before <= item.arrived_s <= time.monotonic()
        await asyncio.wait_for(backend.came.wait(), 10)
        backend.came.clear()


async def test_a_callback_keeps_its_place_among_the_requests() -> None:
    backend, inbox = new_inbox()
    inbox.allow(backend, 100)
    seen: list[int] = []
    for _ in range(2):
        inbox.put("m", Item(1), Silent())
        inbox.post(lambda: seen.append(backend.submitted))
    inbox.put("m", Item(1), Silent())
    await passes()
    assert (seen, backend.submitted) == ([1, 2], 3)


async def test_a_request_that_meets_a_bug_in_the_backend_gets_an_error() -> None:
    class Broken:
        def submit(self, *arguments: Any) -> Any:
            raise OSError("gone")

    _, inbox = new_inbox(Broken())
    results: list[ItemResult] = []

    class Caller(Silent):
        def __call__(self, result: ItemResult) -> None:
            results.append(result)

    inbox.put("m", Item(1), Caller())
    await passes()
    assert type(results[0].error) is PenstockError
    assert "OSError: gone" in results[0].error.message
