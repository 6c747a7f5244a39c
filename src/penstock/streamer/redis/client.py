"""BrokerClient: requests go to the workers of one model through a broker, and their answers come back. On one loop.

All requests of one pass of the loop are one *parcel*: one script that bounds the queue and adds their entries, each
exactly once, also when the connection is cut and the parcel is sent again. Answers come as one message a batch in a
stream of this client's own. Once a second while anything is asked, the client looks whether the broker still knows it;
when it does not (it was emptied, or started anew), what has left the queue without an answer is sent once more. A
request may so be run twice; it is answered once, by its number.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

from penstock.core.contracts import Ticket
from penstock.errors import BadRequest, DeadlineExceeded, ModelNotReady, PenstockError, QueueFull
from penstock.streamer.redis.address import parse
from penstock.streamer.redis.books import Books
from penstock.streamer.redis.calls import Call
from penstock.streamer.redis.keys import GROUP, RELEASED, Keys
from penstock.streamer.redis.link import Link, Refused
from penstock.streamer.redis.receiver import Receiver
from penstock.streamer.redis.sender import Sender
from penstock.types import Item, Sink

log = logging.getLogger("penstock.broker")

WATCH_S = 1.0
READY_S = 0.05  # between two looks for a worker
LEAVE_S = 2.0  # longest good-bye to a broker that does not answer


class BrokerClient:
    """See the module. `max_queue`: entries that may wait or run, of all clients together; `max_bytes`: of this client's
    own payloads. A call without a budget waits `timeout_s`. A connection that is lost may be away for `patience_s`
    before its callers are told; one that never was is told of at once."""

    def __init__(
        self,
        broker: str = "localhost:6379",
        prefix: str = "",
        *,
        max_queue: int = 65_536,
        max_bytes: int = 512 * 2**20,
        timeout_s: float = 30.0,
        patience_s: float = 10.0,
    ) -> None:
        self.address = parse(broker)
        self.id = uuid.uuid4().hex
        self.max_queue = max_queue
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        keys = Keys(prefix)
        self._queue = keys.queue
        self._own = (keys.replies(self.id), keys.sent(self.id))
        self._books = Books(max_bytes)
        self._out, self._in = Link(self.address), Link(self.address)
        self._sender = Sender(self._books, self._out, self._in, keys, self.id, max_queue, patience_s)
        self._receiver = Receiver(self._books, self._in, self._own[0], self._suspect)
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    # ---- requests

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
        """Sends one item, or each of a `many` as an entry of its own. Raises BadRequest, QueueFull, DeadlineExceeded.

        A value that cannot be sent fails alone. What the broker says later comes as the answer.
        """
        if self._closed:
            raise ModelNotReady("the streamer is closed")
        budget = self._timeout_s if budget_s is None else budget_s
        if budget <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        values = item.payload if item.many else [item.payload]
        self._check(len(values))
        call = Call(
            sink,
            item.many,
            len(values),
            ends_s=self._loop.time() + budget,
            due=budget_s is not None,
            priority=min(max(priority, 0), 255),
            on_left=self._books.left,
        )
        self._books.put(call, values)
        if not call.entries:  # none of them can be sent
            self._loop.call_soon(call.finish)
            return call
        call.timer = self._loop.call_later(budget, self._expire, call)
        if not self._tasks:
            self._tasks = [self._task(self._sender.run()), self._task(self._receiver.run())]
        if self._watch is None:
            self._watch = self._loop.call_later(WATCH_S, self._look)
        return call

    def _check(self, size: int) -> None:
        waiting = len(self._books.entries)
        if size > self.max_queue:
            found = f"the request has {size} items, more than the queue may hold ({self.max_queue})"
            raise BadRequest(f"{found}: send it in pieces")
        if waiting + size > self.max_queue:
            raise QueueFull(f"{waiting} of {self.max_queue} items wait: try again later")

    def _expire(self, call: Call) -> None:
        self._books.counts["expired"] += 1
        call.fail(DeadlineExceeded("no answer came in time: too few workers, or none, serve this queue"))

    def _look(self) -> None:
        """Once a second while anything is asked: does the broker remember us?"""
        self._watch = None
        if self._books.entries and not self._closed:
            self._suspect()
            self._watch = self._loop.call_later(WATCH_S, self._look)

    def _suspect(self) -> None:
        self._sender.doubt = True
        self._books.due.set()

    # ---- life

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a bug of ours: its callers must not wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("event=bug broker=%s: callers get an error", self.address.name, exc_info=error)
            self._closed = True
            self._books.fail_all(PenstockError("internal error"))

    async def ready(self) -> None:
        """Returns when a worker serves the queue. Raises ConfigError, BrokerUnavailable."""
        while True:
            try:
                (workers,) = await self._out.ask(("XINFO", "CONSUMERS", self._queue, GROUP))
                if any(RELEASED.encode() not in worker for worker in workers):
                    return
            except Refused:
                pass  # there is no such queue yet
            await asyncio.sleep(READY_S)

    def statistics(self, model: str) -> dict[str, object]:
        """What was asked and answered so far, and how many entries the queue had when it was last written to."""
        return {
            "broker": self.address.name,
            "waiting": len(self._books.entries),
            "waiting_bytes": self._books.nbytes,
            "queue": self._sender.queue_length,
            "connects": self._out.connects + self._in.connects,
            **self._books.counts,
        }

    async def close(self, drain_s: float = 30.0) -> None:
        """Waits up to `drain_s` for the answers that are due, tells the others, and leaves nothing in the broker."""
        self._closed = True
        books = self._books
        if books.entries and drain_s > 0:
            books.empty.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await books.empty.wait()
            except TimeoutError:
                pass
        books.fail_all(ModelNotReady("the streamer was closed before the answer came"))
        if self._watch is not None:
            self._watch.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._out.connects:
            gone = [("XDEL", self._queue, *books.gone)] if books.gone else []
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._out.ask(*gone, ("DEL", *self._own))
            except (PenstockError, TimeoutError):
                pass  # they expire
        await self._out.close()
        await self._in.close()

    def forget(self) -> None:
        """In a forked child: closes this process's copies of the sockets, and touches nothing else."""
        self._out.forget()
        self._in.forget()
