"""Fixtures of the streamer contracts: models, and the modules that export the streamers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock

HERE = Path(__file__).parent
COMPAT = HERE.parents[1] / "compat" / "service_streamer"


@pytest.fixture(scope="module")
def paths() -> Iterator[None]:
    """Lets this process and its workers import the models and service_streamer."""
    with pytest.MonkeyPatch.context() as patch:
        for path in (HERE, COMPAT):
            patch.syspath_prepend(str(path))
        yield


@pytest.fixture(scope="module")
def models(paths: None) -> ModuleType:
    return importlib.import_module("streamed")


@pytest.fixture(scope="module")
def broker(run_redis_all: Callable[..., Any]) -> str:
    address: str = run_redis_all().address
    return address


@pytest.fixture(scope="module")
def start_over_redis(paths: None, broker: str) -> Iterator[Callable[..., Any]]:
    """Starts workers and a streamer: `start(function, batch_size, ...)`. Reuses them for equal arguments."""
    made: dict[str, Any] = {}
    processes: list[Any] = []

    def make(function: Any, batch_size: int, *arguments: Any, **keys: Any) -> Any:
        key = repr((function, batch_size, arguments, keys))
        if key not in made:
            prefix = f"streamer-{len(made)}"
            processes.extend(
                penstock.run_redis_workers_forever(
                    function,
                    batch_size,
                    *arguments,
                    redis_broker=broker,
                    prefix=prefix,
                    block=False,
                    lease_s=1.0,
                    **keys,
                )
            )
            made[key] = penstock.RedisStreamer(broker, prefix, worker_timeout=25)
            made[key]._wait_for_worker_ready(60)
        return made[key]

    yield make
    for process in processes:
        process.terminate()
    for streamer in made.values():
        streamer.close()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
