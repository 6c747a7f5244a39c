"""Fixtures that several packages' tests share."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

LIMIT_S = 10.0


async def until(condition: Callable[[], object]) -> None:
    """Waits, one pass of the loop at a time, until the condition holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], Any]:
    return until


@pytest.fixture
def own_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Undoes what a handler's worker does to its process: cwd, path, environment, modules."""
    cwd, path, env, finders = os.getcwd(), list(sys.path), dict(os.environ), list(sys.meta_path)
    modules = set(sys.modules)
    yield
    os.chdir(cwd)
    sys.path[:], sys.meta_path[:] = path, finders
    os.environ.clear()
    os.environ.update(env)
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name == "ts" or name.startswith("ts.") or file.startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]
