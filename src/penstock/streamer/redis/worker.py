"""BrokerWorker: takes requests from a broker, submits them to a backend, and sends the replies. On one event loop.

It reads no more than one batch ahead of each instance, and nothing while no instance is ready: other workers can take
what remains in the broker. It renews a lease on each entry until the entry is answered.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from typing import Any

from penstock.backoff import Backoff
from penstock.core.contracts import Backend, Observer
from penstock.errors import BrokerUnavailable, DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, WorkerDied
from penstock.streamer.redis.codec import MalformedMessage
from penstock.streamer.redis.connection import BrokerAddress, CommandRefused, RedisConnection
from penstock.streamer.redis.protocol import GROUP, INHERIT, LEAVE, QueueKeys, RequestHeader, load_header
from penstock.streamer.redis.writer import Lease, ReplyWriter
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.streamer")

CODECS = "penstock.streamer.redis.codec"
MAX_DEATHS = 2
RENEW_ENTRIES = 1000  # per command
MAX_PENDING = 10**6  # more than a worker ever has
READ_BLOCK_S = 2.0
LEAVE_TIMEOUT_S = 5.0
CLEANUP_PERIOD = 20  # lease renewals
RETRY_S = (0.05, 1.0)


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
        """Counters of this worker."""
        return {"leases": len(self._leases), "running": self._running, **self._counts, **self._writer.counts}

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
                    connected = True
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
        self._broker_away = error is not None

    def _capacity(self) -> int:
        """The number of entries to take: a running and a waiting batch for each ready instance, less what it has."""
        if self._writer.full:
            return 0
        for status in self._backend.statuses():
            if status.name == self._model:
                return 2 * status.ready_instances * status.max_batch_size - self._running
        return 0

    async def _join_group(self) -> None:
        """Creates the group, reads the broker's clock, and takes entries delivered over a connection that was lost."""
        before = time.monotonic()
        (now,) = await self._in.ask(("TIME",))
        self._clock_offset_s = int(now[0]) + int(now[1]) / 1e6 - (before + time.monotonic()) / 2
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
            header, payload = _parse(fields)
        except MalformedMessage as e:
            self._writer.fail(self._lease(id, fields, _header_or_none(fields)), e, dead=True)
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
            item = Item(payload, self._codec, budget_s=budget_s, priority=header.priority)
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
        """Three times per `lease_s`: renews this worker's leases and takes over entries of dead workers."""
        renewals = 0
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                ids = list(self._leases)
                for i in range(0, len(ids), RENEW_ENTRIES):
                    chunk = ids[i : i + RENEW_ENTRIES]
                    await self._out.ask(("XCLAIM", self._queue, GROUP, self.name, 0, *chunk, "JUSTID"))
                await self._inherit()
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
            self._writer.fail(self._lease(id, fields, _header_or_none(fields)), error, dead=True)


def _parse(fields: list[bytes]) -> tuple[RequestHeader, bytes]:
    """The header and the payload of an entry. Raises MalformedMessage."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    if named.keys() != {b"h", b"p"} or len(fields) != 4:
        raise MalformedMessage("the message has other fields than a header and a payload")
    return load_header(named[b"h"]), named[b"p"]


def _header_or_none(fields: list[bytes]) -> RequestHeader | None:
    """The header of an entry that may be malformed otherwise; None if it cannot be read."""
    try:
        return load_header(dict(zip(fields[::2], fields[1::2], strict=True))[b"h"])
    except (MalformedMessage, KeyError):
        return None
