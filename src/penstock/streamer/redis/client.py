"""RedisStreamer and its BrokerClient: requests go through a Redis broker to the workers of one model.

All requests of one pass of the event loop form one submission, or of 10 ms while the callers keep a processor busy. A
submission is one script call that bounds the queue and adds each entry exactly once, also when the connection is lost
and the submission repeated. Replies arrive as one message per batch in a stream of this client. While requests are
unanswered, the client asks the broker once a second whether it still knows this client; if not (it was flushed or
restarted), requests that vanished without a reply are sent again. A request may then run twice; its number makes sure
that it is answered once.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from penstock.backoff import Backoff
from penstock.core import os_threads
from penstock.core.contracts import Ticket
from penstock.core.engine.load import CallersLoad
from penstock.core.portal.portal import Portal
from penstock.core.transports.slot import within
from penstock.errors import BrokerUnavailable, ConfigError, DeadlineExceeded, ModelNotReady, PenstockError
from penstock.streamer.base import BaseStreamer, ChunkingBackend
from penstock.streamer.redis import protocol
from penstock.streamer.redis.connection import Command, CommandRefused, RedisConnection, parse_address
from penstock.streamer.redis.requests import Group, PendingCall, PendingRequests, queue_full
from penstock.tracing import PRODUCER, traced
from penstock.types import Item, Sink

LOOKUP_ENTRIES = 1000  # per command or script
SESSION_S = 60  # how long the broker remembers a silent client
READ_BLOCK_MS = 5000
READ_MESSAGES = 256  # per read
GATHER_S = 0.01
"""How long requests gather while the callers keep a processor busy: submissions of one or two requests took an eighth
of the interpreter from them. Measured with a BERT behind Flask: 1.1 to 1.4 times the requests."""
RETRY_S = (0.02, 1.0)  # shortest and longest pause before another attempt to connect


class RequestSender:
    """`connection` is the sender's own, `other` belongs to the receiver.

    A lost connection is retried for `patience_s` before callers receive the error. They receive it at once if the
    broker has never answered: its address may be wrong.
    """

    def __init__(
        self,
        requests: PendingRequests,
        connection: RedisConnection,
        other: RedisConnection,
        keys: protocol.QueueKeys,
        client: str,
        patience_s: float,
    ) -> None:
        self.queue_length = 0  # at the last submission
        self.check_session = False  # whether to ask the broker if it still knows this client
        self._requests = requests
        self._connection, self._other = connection, other
        self._queue, self._replies, self._sent = keys.queue, keys.replies(client), keys.sent(client)
        self._client = client
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._submissions = 0
        self._connects = 0  # at the last check of the session
        self.lost_at: float | None = None
        self._clock, self._load = os_threads.processor_clock(), CallersLoad()

    async def run(self) -> None:
        """Does the work that is due, for ever."""
        requests = self._requests
        while True:
            await requests.work_due.wait()
            requests.work_due.clear()
            while requests.unsent or requests.lost or requests.abandoned or self.check_session:
                if self._load.look([self._clock]):
                    await asyncio.sleep(GATHER_S)
                try:
                    await self._step()
                except PenstockError as e:
                    await self._handle_failure(e)
                else:
                    self.lost_at = None

    async def _step(self) -> None:
        requests = self._requests
        if self.check_session:
            await self._recover_lost()
        if requests.abandoned:
            ids, requests.abandoned = requests.abandoned[:LOOKUP_ENTRIES], requests.abandoned[LOOKUP_ENTRIES:]
            await self._connection.ask(("XDEL", self._queue, *ids))
        if requests.lost or requests.unsent:
            await self._submit(requests.next_submission())

    async def _submit(self, groups: list[Group]) -> None:
        """Adds the entries to the queue, or answers their callers with the error."""
        if not groups:
            return
        arguments = self._arguments(groups)
        while True:
            try:
                keys = self._queue, self._sent
                length, oldest_ms, known, *results = await self._connection.run(protocol.SUBMIT, keys, arguments)
                break
            except PenstockError as e:
                if type(e) is not BrokerUnavailable or not await self.wait_to_reconnect():
                    for group in groups:
                        group[0].call.fail(e)
                    raise
                if not any(entry.number in self._requests.entries for group in groups for entry in group):
                    return
        self.queue_length = length
        if not known and self._submissions > 1:  # it was flushed: a look at the session would now find this submission
            self._connects, self.check_session = -1, True
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, int):
                self._requests.counts["refused"] += result
                found = f"{length} of {self._requests.max_queue} items wait or run"
                group[0].call.fail(queue_full(f"the queue is full ({found})", oldest_ms / 1000))
                continue
            for entry, id in zip(group, result, strict=True):
                entry.id = id
                if entry.number not in self._requests.entries:  # abandoned meanwhile
                    self._requests.abandoned.append(id)

    def _arguments(self, groups: list[Group]) -> list[Any]:
        self._submissions += 1
        arguments: list[Any] = [self._submissions, SESSION_S, self._requests.max_queue]
        now = self._loop.time()
        for group in groups:
            call = group[0].call
            budget_ms = min(max(int((call.ends_s - now) * 1000), 0), protocol.MAX_BUDGET_MS)
            arguments.append(len(group))
            for entry in group:
                whose = protocol.VERSION, self._client, entry.number
                header = protocol.RequestHeader(*whose, budget_ms, call.priority, call.due, call.traceparent)
                arguments += (protocol.dump(header), entry.payload)
        return arguments

    async def wait_to_reconnect(self) -> bool:
        """After a connection error: pauses and returns True, or returns False if `patience_s` is over."""
        now = self._loop.time()
        if self.lost_at is None:
            self.lost_at = now
        if not self._connection.answered or now - self.lost_at > self._patience_s:
            return False
        await asyncio.sleep(min(RETRY_S[1], max(RETRY_S[0], (now - self.lost_at) / 2)))
        return True

    async def _handle_failure(self, error: PenstockError) -> None:
        if type(error) is BrokerUnavailable and await self.wait_to_reconnect():
            return
        if isinstance(error, ConfigError) or type(error) is BrokerUnavailable:
            log.warning(
                "broker_failed broker=%s error=%s: callers get this error", self._connection.address.name, error
            )
            self.check_session = False
            self._requests.fail_all(error)

    async def _recover_lost(self) -> None:
        """After the broker forgot this client, or a reconnect: queues entries that vanished without a response."""
        self.check_session = False
        (known,) = await self._connection.ask(("EXPIRE", self._sent, SESSION_S))
        connects = self._connection.connects + self._other.connects
        if known and connects == self._connects:
            return
        entries = {entry.id: entry for entry in self._requests.entries.values() if entry.id is not None}
        ids = list(entries)
        missing: list[bytes] = []
        for i in range(0, len(ids), LOOKUP_ENTRIES):
            missing += await self._connection.run(protocol.MISSING, (self._queue,), ids[i : i + LOOKUP_ENTRIES])
        # one script removes an entry and writes its reply: a missing entry's reply is there by now, or never will be
        messages, _ = await self._connection.ask(
            ("XRANGE", self._replies, "-", "+"), ("SET", self._sent, "[0]", "EX", SESSION_S)
        )
        for _, fields in messages:
            for reply in protocol.load_replies(fields[1]):
                self._requests.receive(reply)
        self._connects = connects
        lost = [entries[id] for id in missing if entries[id].number in self._requests.entries]
        if lost:
            name = self._connection.address.name
            log.warning("sent_again broker=%s requests=%d: the broker lost them", name, len(lost))
            self._requests.resend(lost)


async def receive_replies(
    requests: PendingRequests, connection: RedisConnection, stream: str, on_error: Callable[[], None]
) -> None:
    """Reads replies from `stream` while requests are unanswered, for ever. Each read deletes the messages of the
    previous one. `on_error` is called after each connection error, which may have lost requests."""
    done: list[bytes] = []
    backoff = Backoff(*RETRY_S)
    read = ("XREAD", "COUNT", READ_MESSAGES, "BLOCK", READ_BLOCK_MS, "STREAMS", stream, "0-0")
    while True:
        if not requests.entries:
            requests.unanswered.clear()
            await requests.unanswered.wait()
        commands: list[Command] = [("XDEL", stream, *done)] if done else []
        try:
            found = (await connection.ask(*commands, read, wait_s=READ_BLOCK_MS / 1000))[-1]
        except PenstockError as e:
            log.debug("receive_failed broker=%s error=%s", connection.address.name, e)
            on_error()
            await asyncio.sleep(backoff.next_s())
            continue
        backoff.reset()
        done = []
        for id, fields in found[0][1] if found else ():
            done.append(id)
            try:
                replies = protocol.load_replies(fields[1])
            except PenstockError as e:
                name = connection.address.name
                log.warning("answer_malformed broker=%s error=%s: its callers wait until their deadline", name, e)
                continue
            for reply in replies:
                requests.receive(reply)


log = logging.getLogger("penstock.streamer")

SESSION_CHECK_S = 1.0
READY_POLL_S = 0.05  # Redis cannot notify about new consumers
CLEANUP_TIMEOUT_S = 2.0


class RedisStreamer(BaseStreamer):
    """A model that workers serve over a Redis broker. It connects with its first call.

    `redis_broker` is "host:port" or a URL (`redis://user:password@host:6379/0`, `redis+sentinel://`,
    `redis+cluster://`, `rediss://` and others with TLS, `unix://`). `prefix` must equal the workers' prefix.
    `worker_timeout` bounds `predict`; `timeout_s` bounds `submit` without a deadline. `max_queue` bounds the waiting
    and running items of all clients together; a call beyond it raises QueueFull.
    A lost connection, or a first one during a failover, is retried for `patience_s` before callers receive an error.
    `allow_pickle`, here and at the workers, sends values of any type, and lets everyone who can write to the broker
    run code here.
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
        self._keys = protocol.QueueKeys(prefix)
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

        A value that cannot be sent fails alone. Later errors of the broker arrive as the response.
        """
        if self._closed:
            raise ModelNotReady("the streamer is closed")
        wait_s = self._timeout_s if item.budget_s is None else item.budget_s
        if wait_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        values = item.payload if item.many else [item.payload]
        self._requests.check_room(len(values))
        sink = traced(f"publish {self._keys.prefix}".strip(), PRODUCER, item, sink)
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
        call.fail(DeadlineExceeded("no response came in time: too few workers, or none, serve this queue"))

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
                (workers,) = await self._out.ask(("XINFO", "CONSUMERS", self._keys.queue, protocol.GROUP))
                self._sender.lost_at = None
                if any(protocol.RELEASED.encode() not in worker for worker in workers):
                    return
            except CommandRefused as e:
                if e.word == "WRONGTYPE":
                    raise
                # the queue does not exist yet
            except BrokerUnavailable:
                if not await self._sender.wait_to_reconnect():
                    raise
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
        if requests.entries:
            requests.empty.clear()
            await within(requests.empty, drain_s)
        requests.fail_all(ModelNotReady("the streamer was closed before the response came"))
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
