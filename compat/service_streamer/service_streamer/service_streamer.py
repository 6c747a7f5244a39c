"""`service_streamer.service_streamer`, for programs that import the module."""

from penstock import (
    Future,
    ManagedModel,
    RedisStreamer,
    RedisWorker,
    Streamer,
    ThreadedStreamer,
    run_redis_workers_forever,
)

__all__ = [
    "Future",
    "ManagedModel",
    "RedisStreamer",
    "RedisWorker",
    "Streamer",
    "ThreadedStreamer",
    "run_redis_workers_forever",
]
