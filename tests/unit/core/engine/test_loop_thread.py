from __future__ import annotations

import asyncio
from typing import Any

from penstock.core.engine.loop_thread import A_PASS, RequestInbox
from penstock.types import Item


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
