"""The names of service_streamer, implemented by Penstock and loaded on first use."""

from __future__ import annotations

from service_streamer import service_streamer

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
    return getattr(service_streamer, name)
