"""RedisStreamer and its BrokerClient: requests go through a Redis broker to the workers of one model.

All requests of one pass of the event loop form one submission: one script call that bounds the queue and adds each
entry exactly once, also when the connection is lost and the submission repeated. Replies arrive as one message per
batch in a stream of this client. While requests are unanswered, the client asks the broker once a second whether it
still knows this client; if not (it was flushed or restarted), requests that vanished without a reply are sent again. A
request may then run twice; its number makes sure that it is answered once.
"""

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from functools import partial
from typing import Any

from penstock.core.contracts import Ticket
from penstock.core.portal.portal import Portal
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError
from penstock.streamer.base import BaseStreamer, ChunkingBackend
from penstock.streamer.redis.address import parse_address
from penstock.streamer.redis.connection import CommandRefused, RedisConnection
from penstock.streamer.redis.protocol import GROUP, RELEASED, QueueKeys
from penstock.streamer.redis.requests import PendingCall, PendingRequests
from penstock.streamer.redis.transfer import RequestSender, receive_replies
from penstock.types import Item, Sink

log = logging.getLogger("penstock.broker")

SESSION_CHECK_S = 1.0
READY_POLL_S = 0.05  # Redis cannot notify about new consumers
CLEANUP_TIMEOUT_S = 2.0


class RedisStreamer(BaseStreamer):
    """A model that workers serve over a Redis broker. It connects with its first call.

    `redis_broker` is "host:port" or a URL (`redis://user:password@host:6379/0`, `redis+sentinel://`,
    `redis+cluster://`, `rediss://` and others with TLS, `unix://`). `prefix` must equal the workers' prefix.
    `worker_timeout` bounds `predict`; `timeout_s` bounds `submit` without a deadline. `max_queue` bounds the waiting
    and running items of all clients together; a call beyond it raises QueueFull.
    A lost connection is retried for `patience_s` before callers receive an error. `allow_pickle`, here and at the
    workers, sends values of any type, and lets everyone who can write to the broker run code here.
    Raises ConfigError for a malformed address.
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
        allow_pickle: bool = False,
    ) -> None:
        """Public keyword arguments."""
        parse_address(redis_broker)
        options: dict[str, Any] = {"timeout_s": timeout_s, "patience_s": patience_s, "allow_pickle": allow_pickle}
        make = partial(BrokerClient, redis_broker, prefix, max_queue=max_queue, **options)
        super().__init__(Portal(make=make, lazy=True), f"redis:{prefix}", worker_timeout)

    def destroy_workers(self) -> None:
        """Raises NotImplementedError: this program did not start the workers. `close` ends the streamer."""
        raise NotImplementedError(
            "the workers of a Redis broker are ended where they run; close() ends this streamer's connection"
        )

    def close(self) -> None:
        """Waits for the results of accepted requests, for at most `worker_timeout`, and disconnects. Idempotent."""
        super().destroy_workers()

    def __exit__(self, *exc: object) -> None:
        self.close()


class BrokerClient(ChunkingBackend):
    """The backend of a RedisStreamer, on one event loop. See the module.

    `max_queue` bounds the entries of all clients that wait or run; `max_bytes` this client's payloads. A call without
    a budget waits for `timeout_s`.
    """

    def __init__(
        self,
        broker: str = "localhost:6379",
        prefix: str = "",
        *,
        max_queue: int = 65_536,
        max_bytes: int = 512 * 2**20,
        timeout_s: float = 30.0,
        patience_s: float = 10.0,
        allow_pickle: bool = False,
    ) -> None:
        """The options of a RedisStreamer, and `max_bytes`."""
        self.address = parse_address(broker)
        self.id = uuid.uuid4().hex
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._keys = QueueKeys(prefix)
        self.max_queue = max_queue
        self._requests = PendingRequests(max_queue, max_bytes, allow_pickle)
        self._out, self._in = (RedisConnection(self.address, self._keys.queue) for _ in range(2))
        self._sender = RequestSender(self._requests, self._out, self._in, self._keys, self.id, patience_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._session_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def submit_within_bounds(self, item: Item, sink: Sink) -> Ticket:
        """Sends one item, or each value of a `many` as its own entry. Raises BadRequest, ModelNotReady,
        QueueFull, DeadlineExceeded.

        A value that cannot be sent fails alone. Later errors of the broker arrive as the answer.
        """
        if self._closed:
            raise ModelNotReady("the streamer is closed")
        wait_s = self._timeout_s if item.budget_s is None else item.budget_s
        if wait_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        values = item.payload if item.many else [item.payload]
        self._requests.check_room(len(values))
        call = PendingCall(
            sink,
            item,
            ends_s=self._loop.time() + wait_s,
            due=item.budget_s is not None,
            priority=min(max(item.priority, 0), 255),
            on_abandoned=self._requests.abandon,
        )
        self._requests.add(call, values)
        if not call.entries:  # no value can be sent
            self._loop.call_soon(call.finish)
            return call
        call.timer = self._loop.call_later(wait_s, self._expire, call)
        if not self._tasks:
            replies = receive_replies(self._requests, self._in, self._keys.replies(self.id), self._check_session)
            self._tasks = [self._start(self._sender.run()), self._start(replies)]
        if self._session_timer is None:
            self._session_timer = self._loop.call_later(SESSION_CHECK_S, self._on_session_timer)
        return call

    def _expire(self, call: PendingCall) -> None:
        self._requests.counts["expired"] += 1
        call.fail(DeadlineExceeded("no answer came in time: too few workers, or none, serve this queue"))

    def _on_session_timer(self) -> None:
        self._session_timer = None
        if self._requests.entries and not self._closed:
            self._check_session()
            self._session_timer = self._loop.call_later(SESSION_CHECK_S, self._on_session_timer)

    def _check_session(self) -> None:
        self._sender.check_session = True
        self._requests.work_due.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Fails all callers if a task ends by itself, which is a bug, so that they do not wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("event=bug broker=%s: callers get an error", self.address.name, exc_info=error)
            self._closed = True
            self._requests.fail_all(PenstockError("internal error"))

    async def ready(self) -> None:
        """Waits until a worker serves the queue. Raises ConfigError, BrokerUnavailable."""
        while True:
            try:
                (workers,) = await self._out.ask(("XINFO", "CONSUMERS", self._keys.queue, GROUP))
                if any(RELEASED.encode() not in worker for worker in workers):
                    return
            except CommandRefused as e:
                if e.word == "WRONGTYPE":
                    raise
                # the queue does not exist yet
            await asyncio.sleep(READY_POLL_S)

    def statistics(self, model: str) -> dict[str, object]:
        """Counters of requests and answers, and the length of the queue at the last submission."""
        return {
            "broker": self.address.name,
            "waiting": len(self._requests.entries),
            "waiting_bytes": self._requests.nbytes,
            "queue": self._sender.queue_length,
            "connects": self._out.connects + self._in.connects,
            **self._requests.counts,
        }

    async def close(self, drain_s: float = 30.0) -> None:
        """Waits up to `drain_s` for answers, fails the remaining calls, and deletes this client's keys."""
        self._closed = True
        requests = self._requests
        if requests.entries and drain_s > 0:
            requests.empty.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await requests.empty.wait()
            except TimeoutError:
                pass
        requests.fail_all(ModelNotReady("the streamer was closed before the answer came"))
        if self._session_timer is not None:
            self._session_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._out.connects:
            remove = [("XDEL", self._keys.queue, *requests.abandoned)] if requests.abandoned else []
            own = (self._keys.replies(self.id), self._keys.sent(self.id))
            try:
                async with asyncio.timeout(CLEANUP_TIMEOUT_S):
                    await self._out.ask(*remove, ("DEL", *own))
            except (PenstockError, TimeoutError):
                pass  # the keys expire
        await self._out.close()
        await self._in.close()

    def forget(self) -> None:
        """In a forked child: closes this process's copies of the sockets."""
        self._out.forget()
        self._in.forget()
