"""The names of service_streamer, as its users import them: Penstock's own, loaded when they are first used.

The distribution in `compat/service_streamer` gives them under the old name of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from penstock.core.engine.waiters import Future as Future
    from penstock.streamer.local import Streamer as Streamer
    from penstock.streamer.local import ThreadedStreamer as ThreadedStreamer
    from penstock.streamer.model import ManagedModel as ManagedModel
    from penstock.streamer.redis.streamer import RedisStreamer as RedisStreamer
    from penstock.streamer.redis.workers import RedisWorker as RedisWorker
    from penstock.streamer.redis.workers import run_redis_workers_forever as run_redis_workers_forever

__all__ = [
    "Future",
    "ManagedModel",
    "RedisStreamer",
    "RedisWorker",
    "Streamer",
    "ThreadedStreamer",
    "run_redis_workers_forever",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(penstock, name)
