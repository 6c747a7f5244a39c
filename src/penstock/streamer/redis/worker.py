"""BrokerWorker: takes requests from a broker, submits them to a backend, and sends the replies. On one event loop.

It reads no more than one batch ahead of each instance, and nothing while no instance is ready: other workers can take
what remains in the broker. It renews a lease on each entry until the entry is answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from penstock.backoff import Backoff
from penstock.core.contracts import Backend, Observer
from penstock.errors import BrokerUnavailable, DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, WorkerDied
from penstock.streamer.redis.codec import MalformedMessage
from penstock.streamer.redis.connection import BrokerAddress, CommandRefused, RedisConnection
from penstock.streamer.redis.protocol import (
    ANSWER,
    BURY,
    GROUP,
    INHERIT,
    LEAVE,
    RELEASED,
    VERSION,
    BrokerReplies,
    BrokerReply,
    QueueKeys,
    RequestHeader,
    Script,
    dump,
    header_or_none,
    parse_entry,
    to_wire,
)
from penstock.tracing import Caller
from penstock.types import Item, ItemResult

# ---- replies, and entries that are handed back


log = logging.getLogger("penstock.streamer")

REPLIES_S = 120  # how long replies wait for a client that does not read
MAX_LETTERS, LETTER_BYTES = 1000, 64 * 2**10  # dead letters, and the stored part of each of their fields
ANSWER_ENTRIES, ANSWER_BYTES = 1000, 8 * 2**20  # per script call
RETRY_S = (0.05, 1.0)


class Lease:
    """An entry that this worker has taken, and the sink of its result. Without a header it has no client to answer."""

    def __init__(
        self,
        id: bytes,
        fields: list[bytes],
        header: RequestHeader | None,
        on_result: Callable[[Lease, ItemResult], None],
    ) -> None:
        self.id = id
        self.fields = fields
        self.client = header.client if header is not None else ""
        self.number = header.number if header is not None else 0
        self._on_result = on_result

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self._on_result(self, result)


class _QueuedReply(Struct):
    """A reply to write. With a reason in `dead`, its entry becomes a dead letter."""

    lease: Lease
    reply: BrokerReply
    dead: str = ""


class ReplyWriter:
    """`leases` holds the entries that have no reply in the broker yet. `on_progress` is called after each change."""

    def __init__(
        self, connection: RedisConnection, keys: QueueKeys, lease_s: float, on_progress: Callable[[], None]
    ) -> None:
        self.leases: dict[bytes, Lease] = {}
        self.counts = dict.fromkeys(("answered", "dead_letters", "released"), 0)
        self._connection, self._keys = connection, keys
        self._lease_s = lease_s
        self._on_progress = on_progress
        self.round_trip_s = 0.0  # of the last write
        self._replies: deque[_QueuedReply] = deque()
        self._released: list[bytes] = []  # entries that did not run, for other workers
        self._work_due = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether unwritten replies have reached their bound, because the broker does not accept them."""
        return len(self._replies) >= ANSWER_ENTRIES

    def answer(self, lease: Lease, body: bytes) -> None:
        """Queues the result of an entry."""
        self._add(_QueuedReply(lease, BrokerReply(lease.number, body)))

    def fail(self, lease: Lease, error: PenstockError, *, dead: bool = False) -> None:
        """Queues the error of an entry; `dead` makes the entry a dead letter."""
        reply = BrokerReply(lease.number, error=to_wire(error))
        self._add(_QueuedReply(lease, reply, error.message if dead else ""))

    def _add(self, reply: _QueuedReply) -> None:
        self._replies.append(reply)
        self._work_due.set()
        self._on_progress()

    def release(self, lease: Lease) -> None:
        """Hands an entry that did not run to other workers."""
        self._released.append(lease.id)
        self._work_due.set()
        self._on_progress()

    async def emptied(self) -> None:
        """Waits until no entry is left."""
        self._empty.clear()
        if self.leases:
            await self._empty.wait()

    async def run(self) -> None:
        """Writes replies for ever, and retries while the broker is unavailable. Raises ConfigError."""
        backoff = Backoff(*RETRY_S)
        while True:
            await self._work_due.wait()
            self._work_due.clear()
            while self._replies or self._released:
                try:
                    await self.hand_back(self._released)
                    await self._write()
                    backoff.reset()
                except (BrokerUnavailable, QueueFull) as e:
                    name, pause = self._connection.address.name, backoff.next_s()
                    log.debug("write_failed broker=%s retry_in_s=%g error=%s", name, pause, e)
                    await asyncio.sleep(pause)
                self._on_progress()
            if not self.leases:
                self._empty.set()

    async def _write(self) -> None:
        """Writes queued replies, up to the bounds of one script call. After an error they remain queued."""
        batch: list[_QueuedReply] = []
        nbytes = 0
        for queued in self._replies:
            if len(batch) >= ANSWER_ENTRIES or nbytes >= ANSWER_BYTES:
                break
            batch.append(queued)
            nbytes += len(queued.reply.body)
        if not batch:
            return
        clients: dict[str, list[BrokerReply]] = {}
        for queued in batch:
            if queued.lease.client:
                clients.setdefault(queued.lease.client, []).append(queued.reply)
        keys = [self._keys.queue, *(self._keys.replies(client) for client in clients)]
        ids = [queued.lease.id for queued in batch if not queued.dead]
        messages = [dump(BrokerReplies(VERSION, replies)) for replies in clients.values()]
        await self._run(ANSWER, keys, (GROUP, REPLIES_S, len(ids), *ids, *messages))
        for queued in batch:
            if queued.dead:
                await self._bury(queued)
            self._replies.popleft()
            self.leases.pop(queued.lease.id, None)
        self.counts["answered"] += len(batch)

    async def _bury(self, queued: _QueuedReply) -> None:
        lease = queued.lease
        log.warning("dead_letter queue=%s id=%s why=%s", self._keys.queue, lease.id.decode(), queued.dead)
        fields = [field[:LETTER_BYTES] for field in lease.fields]
        keys = (self._keys.queue, self._keys.dead)
        await self._run(BURY, keys, (GROUP, lease.id, queued.dead, MAX_LETTERS, *fields))
        self.counts["dead_letters"] += 1

    async def _run(self, script: Script, keys: Sequence[str], arguments: Sequence[object]) -> None:
        began_s = time.monotonic()
        lost = await self._connection.run(script, keys, arguments)
        self.round_trip_s = time.monotonic() - began_s
        if lost:
            log.warning("keys_hold_other_data keys=%s: what belongs there is lost", ",".join(keys))

    async def hand_back(self, ids: list[bytes]) -> None:
        """Releases entries that did not run, and removes them from `ids`. It does not count as a worker's death."""
        idle_ms = int(self._lease_s * 1000)
        while chunk := ids[:ANSWER_ENTRIES]:
            claim = ("XCLAIM", self._keys.queue, GROUP, RELEASED, 0, *chunk)
            try:
                await self._connection.ask((*claim, "IDLE", idle_ms, "RETRYCOUNT", 0, "JUSTID"))
            except CommandRefused as e:
                if e.word != "NOGROUP":  # the broker was flushed and holds no entries
                    raise
            self.counts["released"] += len(chunk)
            del ids[: len(chunk)]
            for id in chunk:
                self.leases.pop(id, None)


# ---- requests


CODECS = "penstock.streamer.redis.codec"
MAX_DEATHS = 2
RENEW_ENTRIES = 1000  # per command
MAX_PENDING = 10**6  # more than a worker ever has
READ_BLOCK_S = 2.0
LEAVE_TIMEOUT_S = 5.0
CLEANUP_PERIOD = 20  # lease renewals


class InstanceWatcher(Observer):
    """Sets `changed` when an instance of the model starts or stops, and `ready` when the first one is ready. The
    worker's engine must have it as observer."""

    def __init__(self) -> None:
        self.changed, self.ready = asyncio.Event(), asyncio.Event()

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        self.changed.set()
        if state == "ready":
            self.ready.set()


class BrokerWorker:
    """See the module. After `lease_s` without a renewal, other workers take over the entries of this one.

    Its 16 attributes are its options, its two connections, and the state of the loop that reads and renews entries.
    """

    def __init__(
        self,
        backend: Backend,
        model: str,
        address: BrokerAddress,
        prefix: str = "",
        *,
        watcher: InstanceWatcher,
        lease_s: float = 10.0,
        allow_pickle: bool = False,
    ) -> None:
        """The options of a RedisWorker."""
        self.address = address
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._backend, self._model = backend, model
        self._queue = QueueKeys(prefix).queue
        self._lease_s = lease_s
        self._codec = f"{CODECS}:{'PicklingCodec' if allow_pickle else 'BrokerCodec'}"
        self._in, self._out = (RedisConnection(address, self._queue) for _ in range(2))
        self._capacity_changed = watcher.changed
        self._writer = ReplyWriter(self._out, QueueKeys(prefix), lease_s, self._capacity_changed.set)
        self._leases = self._writer.leases
        self._running = 0  # leases whose request is in the backend
        self._broker_away = False
        self.connected = False  # to the broker, as far as is known
        self._clock_offset_s = 0.0  # the broker's clock minus the local monotonic clock
        self._counts = dict.fromkeys(("taken", "expired", "inherited"), 0)

    async def run(self, stop: asyncio.Event, drain_s: float = 30.0) -> None:
        """Serves until `stop`, then answers requests in progress, for at most `drain_s`, and hands back the rest.

        Waits for a broker that is unavailable. Raises ConfigError (a wrong password or right), and bugs.
        """
        loop = asyncio.get_running_loop()
        reader, writer, keeper = (
            loop.create_task(work) for work in (self._read_all(), self._writer.run(), self._keep_leases())
        )
        stopping: asyncio.Task[Any] = loop.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, reader, writer, keeper], return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer, keeper):
                if task.done():
                    task.result()
            reader.cancel()
            keeper.cancel()
            await asyncio.gather(reader, keeper, return_exceptions=True)
            await self._drain(writer, drain_s)
        finally:
            for task in (stopping, reader, writer, keeper):
                task.cancel()
            await asyncio.gather(stopping, reader, writer, keeper, return_exceptions=True)
            await self._in.close()
            await self._out.close()

    async def _drain(self, writer: asyncio.Task[None], drain_s: float) -> None:
        empty = asyncio.get_running_loop().create_task(self._writer.emptied())
        await asyncio.wait([empty, writer], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (empty, writer):
            task.cancel()
        await asyncio.gather(empty, writer, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                (mine,) = await self._out.ask(("XPENDING", self._queue, GROUP, "-", "+", MAX_PENDING, self.name))
                await self._writer.hand_back([id for id, *_ in mine])
                await self._out.run(LEAVE, (self._queue,), (GROUP, self.name, self._idle_ms))
        except (PenstockError, TimeoutError) as e:
            name = self.address.name
            log.warning("leave_failed broker=%s error=%s: other workers take over after lease_s", name, e)

    @property
    def _idle_ms(self) -> int:
        """The silence after which a worker without entries is removed."""
        return int(max(60.0, 3 * self._lease_s) * 1000)

    def statistics(self) -> dict[str, object]:
        """Counters of this worker, and the seconds of its last write to the broker."""
        counts = {"leases": len(self._leases), "running": self._running, **self._counts, **self._writer.counts}
        return {**counts, "round_trip_s": self._writer.round_trip_s}

    # ---- requests

    async def _read_all(self) -> None:
        backoff = Backoff(*RETRY_S)
        connected = False
        while True:
            capacity = self._capacity()
            if capacity <= 0:
                self._capacity_changed.clear()
                await self._capacity_changed.wait()
                continue
            try:
                if not connected:
                    await self._join_group()
                    await self._inherit()  # a worker may have handed its entries back before it was replaced
                    connected = self.connected = True
                block_ms = int(READ_BLOCK_S * 1000)
                read = ("XREADGROUP", "GROUP", GROUP, self.name, "COUNT", capacity, "BLOCK", block_ms)
                (found,) = await self._in.ask((*read, "STREAMS", self._queue, ">"), wait_s=READ_BLOCK_S)
            except (BrokerUnavailable, QueueFull) as e:
                connected = False
                if not (isinstance(e, CommandRefused) and e.word in ("NOGROUP", "UNBLOCKED")):  # the broker was flushed
                    self._note_broker(e)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            self._note_broker(None)
            for id, fields in found[0][1] if found else ():
                self._take(id, fields)

    def _note_broker(self, error: PenstockError | None) -> None:
        """Logs once when the broker becomes unavailable, and once when it is back."""
        if error is not None and not self._broker_away:
            log.warning("broker_away broker=%s error=%s: the worker retries until it is back", self.address.name, error)
        elif error is None and self._broker_away:
            log.warning("broker_back broker=%s", self.address.name)
        self._broker_away, self.connected = error is not None, error is None

    def _capacity(self) -> int:
        """The number of entries to take: a running and a waiting batch for each ready instance, less what it has."""
        if self._writer.full:
            return 0
        for status in self._backend.statuses():
            if status.name == self._model:
                return 2 * status.ready_instances * status.max_batch_size - self._running
        return 0

    async def _read_clock(self, connection: RedisConnection) -> None:
        before = time.monotonic()
        (now,) = await connection.ask(("TIME",))
        self._clock_offset_s = int(now[0]) + int(now[1]) / 1e6 - (before + time.monotonic()) / 2

    async def _join_group(self) -> None:
        """Creates the group, reads the broker's clock, and takes entries delivered over a connection that was lost."""
        await self._read_clock(self._in)
        try:
            await self._in.ask(("XGROUP", "CREATE", self._queue, GROUP, "0", "MKSTREAM"))
        except CommandRefused as e:
            if e.word != "BUSYGROUP":
                raise
        await self._in.ask(("XGROUP", "CREATECONSUMER", self._queue, GROUP, self.name))
        (pending,) = await self._in.ask(("XPENDING", self._queue, GROUP, "-", "+", MAX_PENDING, self.name))
        for id, *_ in pending:
            if id not in self._leases:
                (found,) = await self._in.ask(("XRANGE", self._queue, id, id))
                for _, fields in found:
                    self._take(id, fields)

    def _take(self, id: bytes, fields: list[bytes]) -> None:
        """Submits an entry to the backend. Answers malformed and expired entries directly."""
        self._counts["taken"] += 1
        try:
            header, payload = parse_entry(fields)
        except MalformedMessage as e:
            self._writer.fail(self._lease(id, fields, header_or_none(fields)), e, dead=True)
            return
        lease = self._lease(id, fields, header)
        sent_s = int(id.partition(b"-")[0]) / 1e3
        left_s = sent_s + header.budget_ms / 1e3 - (time.monotonic() + self._clock_offset_s)
        if left_s <= 0:
            self._counts["expired"] += 1
            self._writer.fail(lease, DeadlineExceeded("the deadline passed while the request waited in the broker"))
            return
        try:
            budget_s = left_s if header.due else None
            source = Caller(header.traceparent) if header.traceparent else None
            item = Item(payload, self._codec, budget_s=budget_s, priority=header.priority, source=source)
            self._backend.submit(self._model, None, item, lease)
        except (ModelNotReady, QueueFull):  # no instance is ready any more
            self._writer.release(lease)
        except PenstockError as e:
            self._writer.fail(lease, e)
        else:
            self._running += 1

    def _lease(self, id: bytes, fields: list[bytes], header: RequestHeader | None) -> Lease:
        lease = self._leases[id] = Lease(id, fields, header, self._on_result)
        return lease

    def _on_result(self, lease: Lease, result: ItemResult) -> None:
        self._running -= 1
        error = result.error
        if error is None:
            self._writer.answer(lease, result.body)
        elif isinstance(error, ModelNotReady):  # the request did not run
            self._writer.release(lease)
        else:
            self._writer.fail(lease, error, dead=isinstance(error, (WorkerDied, MalformedMessage)))

    # ---- leases

    async def _keep_leases(self) -> None:
        """Three times per `lease_s`: renews this worker's leases, takes over entries of dead workers, and reads the
        broker's clock, which may have been set."""
        renewals = 0
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                ids = list(self._leases)
                for i in range(0, len(ids), RENEW_ENTRIES):
                    chunk = ids[i : i + RENEW_ENTRIES]
                    await self._out.ask(("XCLAIM", self._queue, GROUP, self.name, 0, *chunk, "JUSTID"))
                await self._inherit()
                await self._read_clock(self._out)
                renewals += 1
                if renewals % CLEANUP_PERIOD == 0:
                    await self._out.run(LEAVE, (self._queue,), (GROUP, "", self._idle_ms))
            except (BrokerUnavailable, QueueFull) as e:
                log.debug("lease_failed broker=%s error=%s", self.address.name, e)

    async def _inherit(self) -> None:
        capacity = self._capacity()
        if capacity <= 0:
            return
        arguments = (GROUP, self.name, int(self._lease_s * 1000), min(capacity, RENEW_ENTRIES))
        for id, fields, deaths in await self._out.run(INHERIT, (self._queue,), arguments):
            self._counts["inherited"] += 1
            if deaths < MAX_DEATHS:
                self._take(id, fields)
                continue
            error = WorkerDied(f"{deaths} workers died while they had this request: it is not run again")
            self._writer.fail(self._lease(id, fields, header_or_none(fields)), error, dead=True)
