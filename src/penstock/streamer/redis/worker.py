"""BrokerWorker: takes requests from a broker, hands them to a backend, and writes the answers back. On one loop.

It reads no more than one batch ahead of each instance, and nothing while no instance is up: what it cannot run yet
stays in the broker for others. An entry is its own until it is answered, by a lease that it renews; the answers of one
pass of the loop go out, and their entries leave the queue, in one step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid

from penstock.core.contracts import Backend, Observer
from penstock.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    ModelNotReady,
    PenstockError,
    QueueFull,
    WorkerDied,
)
from penstock.streamer.redis.address import Address
from penstock.streamer.redis.codec import Malformed
from penstock.streamer.redis.keys import GROUP, Keys
from penstock.streamer.redis.link import Link, Refused
from penstock.streamer.redis.messages import Head, read_head
from penstock.streamer.redis.scripts import INHERIT, LEAVE
from penstock.streamer.redis.writer import Lease, Writer
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.broker")

CODEC = "penstock.streamer.redis.codec:BrokerCodec"
MAX_DEATHS = 2
RENEW_ENTRIES = 1000  # that one command is asked for
MOST_PENDING = 10**6  # more than a worker ever has
BLOCK_S = 2.0
LEAVE_S = 5.0
RETRY_S = (0.05, 1.0)


class Hearing(Observer):
    """Wakes the worker when instances come and go. To be given to the engine that is the worker's backend."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        self.changed.set()


class BrokerWorker:
    """See the module. `lease_s`: a worker that is silent for so long is dead, and its entries go to others."""

    def __init__(
        self,
        backend: Backend,
        model: str,
        address: Address,
        prefix: str = "",
        *,
        hearing: Hearing,
        lease_s: float = 10.0,
    ) -> None:
        self.address = address
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._backend, self._model = backend, model
        self._keys = Keys(prefix)
        self._queue = self._keys.queue
        self._lease_s = lease_s
        self._in, self._out = Link(address), Link(address)
        self._room = hearing.changed
        self._writer = Writer(self._out, self._keys, lease_s, self._room.set)
        self._leases = self._writer.leases
        self._running = 0  # of the leases, those that the backend has
        self._is_away = False
        self._clock_s = 0.0  # the broker's clock - our monotonic one
        self._counts = dict.fromkeys(("taken", "expired", "inherited"), 0)

    # ---- life

    async def run(self, stop: asyncio.Event, drain_s: float = 30.0) -> None:
        """Serves until `stop`; then answers what it has taken, at most for `drain_s`, and hands back the rest.

        A broker that is away is waited for. Raises ConfigError (a wrong password or right) and what is a bug.
        """
        loop = asyncio.get_running_loop()
        work = [loop.create_task(c) for c in (self._take_all(), self._writer.run(), self._keep_all())]
        halt = loop.create_task(_wait(stop))
        try:
            await asyncio.wait([halt, *work], return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
            for task in (work[0], work[2]):
                task.cancel()
            await asyncio.gather(work[0], work[2], return_exceptions=True)
            await self._drain(work[1], drain_s)
        finally:
            for task in (halt, *work):
                task.cancel()
            await asyncio.gather(halt, *work, return_exceptions=True)
            await self._in.close()
            await self._out.close()

    async def _drain(self, writer: asyncio.Task[None], drain_s: float) -> None:
        empty = asyncio.get_running_loop().create_task(self._writer.emptied())
        await asyncio.wait([empty, writer], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (empty, writer):
            task.cancel()
        await asyncio.gather(empty, writer, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_S):
                (mine,) = await self._out.ask(("XPENDING", self._queue, GROUP, "-", "+", MOST_PENDING, self.name))
                await self._writer.hand_back([id for id, *_ in mine])
                await self._out.run(LEAVE, (self._queue,), (GROUP, self.name, self._gone_ms))
        except (PenstockError, TimeoutError) as e:
            log.warning("leave_failed broker=%s error=%s: others inherit after lease_s", self.address.name, e)

    @property
    def _gone_ms(self) -> int:
        return int(max(60.0, 3 * self._lease_s) * 1000)

    def statistics(self) -> dict[str, object]:
        """What this worker has done so far."""
        return {"leases": len(self._leases), "running": self._running, **self._counts, **self._writer.counts}

    # ---- from the broker

    async def _take_all(self) -> None:
        pause = RETRY_S[0]
        fresh = True  # connected since the last look at what is ours
        while True:
            room = self._places()
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            try:
                if fresh:
                    await self._begin()
                    fresh = False
                block_ms = int(BLOCK_S * 1000)
                read = ("XREADGROUP", "GROUP", GROUP, self.name, "COUNT", room, "BLOCK", block_ms)
                (found,) = await self._in.ask((*read, "STREAMS", self._queue, ">"), wait_s=BLOCK_S)
            except (BrokerUnavailable, QueueFull) as e:
                fresh = True
                if not (isinstance(e, Refused) and e.word in ("NOGROUP", "UNBLOCKED")):  # else the broker was emptied
                    self._away(e)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])
                continue
            pause = RETRY_S[0]
            self._away(None)
            for id, fields in found[0][1] if found else ():
                self._take(id, fields)

    def _away(self, error: PenstockError | None) -> None:
        """Tells once that the broker is away, and once that it is back."""
        if error is not None and not self._is_away:
            log.warning("broker_away broker=%s error=%s: it is tried again until it is back", self.address.name, error)
        elif error is None and self._is_away:
            log.warning("broker_back broker=%s", self.address.name)
        self._is_away = error is not None

    def _places(self) -> int:
        """How many more entries may be taken: a batch for each instance that is up, and one ahead of it."""
        if self._writer.full:
            return 0
        for status in self._backend.statuses():
            if status.name == self._model:
                return 2 * status.ready_instances * status.max_batch_size - self._running
        return 0

    async def _begin(self) -> None:
        """Makes the group, sets the clock, and takes what the broker has handed out to us on a lost connection."""
        before = time.monotonic()
        (now,) = await self._in.ask(("TIME",))
        self._clock_s = int(now[0]) + int(now[1]) / 1e6 - (before + time.monotonic()) / 2
        try:
            await self._in.ask(("XGROUP", "CREATE", self._queue, GROUP, "0", "MKSTREAM"))
        except Refused as e:
            if e.word != "BUSYGROUP":
                raise
        await self._in.ask(("XGROUP", "CREATECONSUMER", self._queue, GROUP, self.name))
        (pending,) = await self._in.ask(("XPENDING", self._queue, GROUP, "-", "+", MOST_PENDING, self.name))
        for id, *_ in pending:
            if id not in self._leases:
                (found,) = await self._in.ask(("XRANGE", self._queue, id, id))
                for _, fields in found:
                    self._take(id, fields)

    def _take(self, id: bytes, fields: list[bytes]) -> None:
        """Hands one entry to the backend. What is malformed or too late is answered here."""
        self._counts["taken"] += 1
        try:
            head, payload = _read(fields)
        except Malformed as e:
            self._writer.fail(self._lease(id, fields, _asker(fields)), e, dead=True)
            return
        lease = self._lease(id, fields, head)
        left_s = int(id.partition(b"-")[0]) / 1e3 + head.budget_ms / 1e3 - (time.monotonic() + self._clock_s)
        if left_s <= 0:
            self._counts["expired"] += 1
            error = DeadlineExceeded("the deadline passed while the request waited in the broker")
            self._writer.fail(lease, error)
            return
        try:
            self._backend.submit(
                self._model,
                None,
                Item(payload, CODEC),
                lease,
                budget_s=left_s if head.due else None,
                priority=head.priority,
            )
        except (ModelNotReady, QueueFull):  # no instance is up any more
            self._writer.release(lease)
        except PenstockError as e:
            self._writer.fail(lease, e)
        else:
            self._running += 1

    def _lease(self, id: bytes, fields: list[bytes], head: Head | None) -> Lease:
        lease = self._leases[id] = Lease(id, fields, head, self._answered)
        return lease

    def _answered(self, lease: Lease, result: ItemResult) -> None:
        """Called by the backend, once a request."""
        self._running -= 1
        error = result.error
        if error is None:
            self._writer.answer(lease, result.body)
        elif isinstance(error, ModelNotReady):  # it was not run
            self._writer.release(lease)
        else:
            self._writer.fail(lease, error, dead=isinstance(error, (WorkerDied, Malformed)))

    # ---- leases

    async def _keep_all(self) -> None:
        """Three times a lease: renews those of this worker, and takes over those of the dead."""
        beats = 0
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._renew()
                await self._inherit()
                beats += 1
                if beats % 20 == 0:
                    await self._out.run(LEAVE, (self._queue,), (GROUP, "", self._gone_ms))
            except (BrokerUnavailable, QueueFull) as e:
                log.debug("lease_failed broker=%s error=%s", self.address.name, e)

    async def _renew(self) -> None:
        ids = list(self._leases)
        for i in range(0, len(ids), RENEW_ENTRIES):
            some = ids[i : i + RENEW_ENTRIES]
            await self._out.ask(("XCLAIM", self._queue, GROUP, self.name, 0, *some, "JUSTID"))

    async def _inherit(self) -> None:
        room = self._places()
        if room <= 0:
            return
        found = await self._out.run(
            INHERIT, (self._queue,), (GROUP, self.name, int(self._lease_s * 1000), min(room, RENEW_ENTRIES))
        )
        for id, fields, deaths in found:
            self._counts["inherited"] += 1
            if deaths < MAX_DEATHS:
                self._take(id, fields)
                continue
            error = WorkerDied(f"{deaths} workers died while they had this request: it is not run again")
            self._writer.fail(self._lease(id, fields, _asker(fields)), error, dead=True)


def _read(fields: list[bytes]) -> tuple[Head, bytes]:
    """The head and the payload of an entry. Raises Malformed."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    if named.keys() != {b"h", b"p"} or len(fields) != 4:
        raise Malformed("the message has other fields than a head and a payload")
    return read_head(named[b"h"]), named[b"p"]


def _asker(fields: list[bytes]) -> Head | None:
    """The head of an entry that may be malformed otherwise, None if it cannot be read."""
    try:
        return read_head(dict(zip(fields[::2], fields[1::2], strict=True))[b"h"])
    except (Malformed, KeyError):
        return None


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
