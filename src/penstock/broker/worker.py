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
from collections import deque

from msgspec import Struct

from penstock.broker.address import Address
from penstock.broker.codec import Malformed
from penstock.broker.keys import GROUP, RELEASED, Keys
from penstock.broker.link import Link, Refused
from penstock.broker.messages import VERSION, Answer, Answers, Head, fault_of, read_head, write
from penstock.broker.scripts import ANSWER, BURY, INHERIT, LEAVE
from penstock.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    ModelNotReady,
    PenstockError,
    QueueFull,
    WorkerDied,
)
from penstock.frontends.base import Backend
from penstock.observe.base import Observer
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.broker")

CODEC = "penstock.broker.codec:BrokerCodec"
REPLIES_S = 120  # how long answers wait for a client that does not read
MAX_LETTERS, LETTER_BYTES = 1000, 64 * 2**10  # dead letters, and what is kept of each of their fields
MAX_DEATHS = 2
ANSWER_ENTRIES, ANSWER_BYTES = 1000, 8 * 2**20  # that one script is given
BLOCK_S = 2.0
RETRY_S = (0.05, 1.0)


class Lease:
    """One entry that this worker has taken, and the sink of its answer."""

    __slots__ = ("_worker", "client", "fields", "id", "number")

    def __init__(self, worker: BrokerWorker, id: bytes, head: Head, fields: list[bytes]) -> None:
        self._worker = worker
        self.id = id
        self.client = head.client
        self.number = head.number
        self.fields = fields

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self._worker.answered(self, result)


class Done(Struct):
    """An answer that is to be written."""

    lease: Lease
    answer: Answer
    why: str = ""  # it goes to the dead letters


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
        self._leases: dict[bytes, Lease] = {}  # taken and not answered in the broker yet
        self._running = 0  # of these, the ones that the backend has
        self._back: list[bytes] = []  # not run: for other workers
        self._done: deque[Done] = deque()
        self._room = hearing.changed
        self._written = asyncio.Event()
        self._empty = asyncio.Event()
        self._is_away = False
        self._clock_s = 0.0  # the broker's clock - our monotonic one
        self._counts = dict.fromkeys(("taken", "answered", "expired", "inherited", "dead_letters", "released"), 0)

    # ---- life

    async def run(self, stop: asyncio.Event, drain_s: float = 30.0) -> None:
        """Serves until `stop`; then answers what it has taken, at most for `drain_s`, and hands back the rest.

        A broker that is away is waited for. Raises ConfigError (a wrong password or right) and what is a bug.
        """
        loop = asyncio.get_running_loop()
        work = [loop.create_task(c) for c in (self._take_all(), self._write_all(), self._keep_all())]
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
        if self._leases:
            empty = asyncio.get_running_loop().create_task(_wait(self._empty))
            await asyncio.wait([empty, writer], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            empty.cancel()
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        try:
            async with asyncio.timeout(5.0):
                (mine,) = await self._out.ask(("XPENDING", self._queue, GROUP, "-", "+", ANSWER_ENTRIES, self.name))
                await self._hand_back([id for id, *_ in mine])
                await self._out.run(LEAVE, (self._queue,), (GROUP, self.name, self._gone_ms))
        except (PenstockError, TimeoutError) as e:
            log.warning("leave_failed broker=%s error=%s: others inherit after lease_s", self.address.name, e)

    @property
    def _gone_ms(self) -> int:
        return int(max(60.0, 3 * self._lease_s) * 1000)

    def statistics(self) -> dict[str, object]:
        """What this worker has done so far."""
        return {"leases": len(self._leases), "running": self._running, **self._counts}

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
        if len(self._done) >= ANSWER_ENTRIES:
            return 0  # the broker does not take the answers: it has no more questions for us
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
        (pending,) = await self._in.ask(("XPENDING", self._queue, GROUP, "-", "+", ANSWER_ENTRIES, self.name))
        for id, *_ in pending:
            if id not in self._leases:
                (found,) = await self._in.ask(("XRANGE", self._queue, id, id))
                for _, fields in found:
                    self._take(id, fields)

    def _take(self, id: bytes, fields: list[bytes]) -> None:
        """Hands one entry to the backend. What is malformed or too late is answered here."""
        self._counts["taken"] += 1
        try:
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            head = read_head(named.get(b"h", b""))
            payload = named.get(b"p")
            if payload is None or len(fields) != 4:
                raise Malformed("the message has other fields than a head and a payload")
        except Malformed as e:
            nobody = Head(VERSION, "", 0, 0)
            lease = self._leases[id] = Lease(self, id, nobody, fields)
            self._end(lease, e, str(e))
            return
        lease = self._leases[id] = Lease(self, id, head, fields)
        left_s = int(id.partition(b"-")[0]) / 1e3 + head.budget_ms / 1e3 - (time.monotonic() + self._clock_s)
        if left_s <= 0:
            self._counts["expired"] += 1
            self._end(lease, DeadlineExceeded("the deadline passed while the request waited in the broker"))
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
            self._release(lease)
        except PenstockError as e:
            self._end(lease, e)
        else:
            self._running += 1

    # ---- to the broker

    def answered(self, lease: Lease, result: ItemResult) -> None:
        """Called by the backend, once a request."""
        self._running -= 1
        error = result.error
        if error is None:
            self._done.append(Done(lease, Answer(lease.number, result.body)))
            self._wake()
        elif isinstance(error, ModelNotReady):  # it was not run
            self._release(lease)
        else:
            died = isinstance(error, WorkerDied)
            self._end(lease, error, str(error) if died or isinstance(error, Malformed) else "")

    def _end(self, lease: Lease, error: PenstockError, why: str = "") -> None:
        self._done.append(Done(lease, Answer(lease.number, fault=fault_of(error)), why))
        self._wake()

    def _release(self, lease: Lease) -> None:
        self._back.append(lease.id)
        self._wake()

    def _wake(self) -> None:
        self._written.set()
        self._room.set()

    async def _write_all(self) -> None:
        pause = RETRY_S[0]
        while True:
            await self._written.wait()
            self._written.clear()
            while self._done or self._back:
                try:
                    await self._hand_back(self._back)
                    await self._write()
                    pause = RETRY_S[0]
                except (BrokerUnavailable, QueueFull) as e:
                    log.debug("write_failed broker=%s retry_in_s=%g error=%s", self.address.name, pause, e)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RETRY_S[1])
                self._room.set()
            if not self._leases:
                self._empty.set()

    async def _write(self) -> None:
        """Writes the answers that are there, up to the bounds of one script. What raises leaves them where they are."""
        some: list[Done] = []
        nbytes = 0
        for done in self._done:
            if len(some) >= ANSWER_ENTRIES or nbytes >= ANSWER_BYTES:
                break
            some.append(done)
            nbytes += len(done.answer.body)
        if not some:
            return
        clients: dict[str, list[Answer]] = {}
        for done in some:
            if done.lease.client:
                clients.setdefault(done.lease.client, []).append(done.answer)
        keys = [self._queue, *(self._keys.replies(client) for client in clients)]
        ids = [done.lease.id for done in some if not done.why]
        messages = [write(Answers(VERSION, answers)) for answers in clients.values()]
        await self._out.run(ANSWER, keys, (GROUP, REPLIES_S, len(ids), *ids, *messages))
        for done in some:
            if done.why:
                await self._bury(done)
            self._done.popleft()
            self._leases.pop(done.lease.id, None)
        self._counts["answered"] += len(some)

    async def _bury(self, done: Done) -> None:
        lease = done.lease
        self._counts["dead_letters"] += 1
        log.warning("dead_letter queue=%s id=%s why=%s", self._queue, lease.id.decode(), done.why)
        fields = [field[:LETTER_BYTES] for field in lease.fields]
        await self._out.run(BURY, (self._queue, self._keys.dead), (GROUP, lease.id, done.why, MAX_LETTERS, *fields))

    async def _hand_back(self, ids: list[bytes]) -> None:
        """Gives entries that were not run to whoever asks next; it does not count as a death."""
        some = ids[:ANSWER_ENTRIES]
        if not some:
            return
        idle_ms = int(self._lease_s * 1000)
        await self._out.ask(
            ("XCLAIM", self._queue, GROUP, RELEASED, 0, *some, "IDLE", idle_ms, "RETRYCOUNT", 0, "JUSTID")
        )
        self._counts["released"] += len(some)
        del ids[: len(some)]
        for id in some:
            self._leases.pop(id, None)

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
        for i in range(0, len(ids), ANSWER_ENTRIES):
            some = ids[i : i + ANSWER_ENTRIES]
            await self._out.ask(("XCLAIM", self._queue, GROUP, self.name, 0, *some, "JUSTID"))

    async def _inherit(self) -> None:
        room = self._places()
        if room <= 0:
            return
        found = await self._out.run(
            INHERIT, (self._queue,), (GROUP, self.name, int(self._lease_s * 1000), min(room, ANSWER_ENTRIES))
        )
        for id, fields, deaths in found:
            self._counts["inherited"] += 1
            if deaths < MAX_DEATHS:
                self._take(id, fields)
                continue
            text = f"{deaths} workers died while they had this request: it is not run again"
            try:
                head = read_head(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"h", b""))
            except Malformed:
                head = Head(VERSION, "", 0, 0)
            lease = self._leases[id] = Lease(self, id, head, fields)
            self._end(lease, WorkerDied(text), text)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
