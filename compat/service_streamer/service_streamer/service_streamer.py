"""`service_streamer.service_streamer`: Penstock's names, and what programs do with the module itself."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import penstock

_STREAMERS = ("RedisStreamer", "Streamer", "ThreadedStreamer")
_OTHERS = ("Future", "ManagedModel", "RedisWorker", "run_redis_workers_forever")
__all__ = [*_STREAMERS, *_OTHERS]

WORKER_TIMEOUT = 20  # s; programs assign another value before they make a streamer


class _Original:
    """What service_streamer does otherwise than Penstock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        given.arguments.setdefault("worker_timeout", WORKER_TIMEOUT)
        super().__init__(*given.args, **given.kwargs)

    def _wait_for_worker_ready(self, timeout: float | None = None) -> None:
        """Waits until the workers are ready, or the time is over. Raises the model's own error."""
        with suppress(TimeoutError):
            super()._wait_for_worker_ready(timeout)  # type: ignore[misc]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: Any = getattr(penstock, name)
    if name in _STREAMERS:
        found = type(name, (_Original, found), {"__module__": __name__, "__doc__": found.__doc__})
    globals()[name] = found
    return found
