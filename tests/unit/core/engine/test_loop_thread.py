from __future__ import annotations

import asyncio
import weakref
from typing import Any

import numpy as np

from penstock.core.engine.loop_thread import A_PASS, RequestInbox
from penstock.errors import QueueFull
from penstock.types import Item, ItemResult


class Counting:
    """A backend that only counts what reaches it."""

    submitted = 0

    def submit(self, *arguments: Any, **keywords: Any) -> Any:
        self.submitted += 1


class Silent:
    def accepted(self, ticket: Any) -> None: ...


async def test_a_flood_of_requests_leaves_passes_of_the_loop_to_others() -> None:
    backend = Counting()
    inbox = RequestInbox(asyncio.get_running_loop(), backend)
    for n in range(3 * A_PASS):
        inbox.put("m", Item(n), Silent(), None, 0)
    passes = []
    while backend.submitted < 3 * A_PASS:
        await asyncio.sleep(0)
        passes.append(backend.submitted)
    assert passes[-3:] == [A_PASS, 2 * A_PASS, 3 * A_PASS]


async def test_the_error_of_a_refused_request_does_not_keep_its_item() -> None:
    class Full:
        def submit(self, model: str, version: None, item: Item, sink: Any, **more: Any) -> Any:
            raise QueueFull("full")

    class Keeper(Silent):
        def __call__(self, result: ItemResult) -> None:
            self.result = result

    item, keeper = Item(np.zeros(1)), Keeper()
    gone = weakref.ref(item.payload)
    inbox = RequestInbox(asyncio.get_running_loop(), Full())
    inbox.put("m", item, keeper, None, 0)
    del item
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert isinstance(keeper.result.error, QueueFull)
    assert gone() is None
