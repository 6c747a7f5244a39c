"""RedisStreamer: the face of workers on other machines. What they run is told there; see `redis_workers.py`."""

from __future__ import annotations

from penstock.core.contracts import Ticket
from penstock.core.engine.portal import Portal
from penstock.streamer.base import _Streamer
from penstock.streamer.pieces import Pieces
from penstock.streamer.redis.address import parse
from penstock.streamer.redis.client import BrokerClient
from penstock.types import Item, Sink


class RedisStreamer(_Streamer):
    """A model that workers serve over a Redis broker, for the threads of this program. It connects with its first call.

    `redis_broker` is "host:port" or a URL (`redis://user:password@host:6379/0`, `rediss://`, `unix://`). `prefix` is
    that of the workers. `worker_timeout` bounds `predict`, and `submit` waits for `timeout_s` unless it is given a
    deadline. `max_queue`: items that may wait or run, of all callers of the broker together; one more is QueueFull.
    A connection that was lost is tried again for `patience_s` before those who wait are told.
    Raises ConfigError for an address that is none.
    """

    def __init__(
        self,
        redis_broker: str = "localhost:6379",
        prefix: str = "",
        *,
        worker_timeout: float | None = 20,
        timeout_s: float = 3600.0,
        max_queue: int = 65_536,
        patience_s: float = 10.0,
    ) -> None:
        parse(redis_broker)
        self._redis_broker, self._prefix = redis_broker, prefix

        def make() -> _Backend:
            return _Backend(redis_broker, prefix, max_queue=max_queue, timeout_s=timeout_s, patience_s=patience_s)

        super().__init__(Portal(make=make, lazy=True), f"redis:{prefix}", worker_timeout)

    def destroy_workers(self) -> None:
        """Raises NotImplementedError: the workers belong to those who started them. `close` ends this streamer."""
        raise NotImplementedError(
            "the workers of a Redis broker are ended where they run; close() ends this streamer's connection"
        )

    def close(self) -> None:
        """Waits for what was asked, at most for `worker_timeout`, and ends the connection. Idempotent."""
        super().destroy_workers()

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Backend(BrokerClient):
    """Sends a call of more items than the queue may hold in pieces."""

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        def submit(item: Item, sink: Sink, budget_s: float | None, priority: int) -> Ticket:
            return BrokerClient.submit(self, model, version, item, sink, budget_s=budget_s, priority=priority)

        if item.rows > self.max_queue:
            return Pieces(submit, item, sink, max(1, self.max_queue // 2), budget_s, priority)
        return submit(item, sink, budget_s, priority)
