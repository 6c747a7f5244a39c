from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

LIMIT_S = 20.0


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], Any]:
    """Waits, one pass of the event loop at a time, until the condition holds."""

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return until
