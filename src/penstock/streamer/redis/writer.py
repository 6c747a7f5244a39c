"""Writer: tells the broker what became of the entries that a worker has taken. One task.

The answers of one pass of the loop go out, and their entries leave the queue, in one step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from penstock.errors import BrokerUnavailable, PenstockError, QueueFull
from penstock.streamer.redis.keys import GROUP, RELEASED, Keys
from penstock.streamer.redis.link import Link, Refused
from penstock.streamer.redis.messages import VERSION, Answer, Answers, Head, fault_of, write
from penstock.streamer.redis.scripts import ANSWER, BURY
from penstock.types import ItemResult

log = logging.getLogger("penstock.broker")

REPLIES_S = 120  # how long answers wait for a client that does not read
MAX_LETTERS, LETTER_BYTES = 1000, 64 * 2**10  # dead letters, and what is kept of each of their fields
ANSWER_ENTRIES, ANSWER_BYTES = 1000, 8 * 2**20  # that one script is given
RETRY_S = (0.05, 1.0)


class Lease:
    """One entry that this worker has taken, and the sink of its answer. Without `head` nobody can be answered."""

    __slots__ = ("_on_result", "client", "fields", "id", "number")

    def __init__(
        self, id: bytes, fields: list[bytes], head: Head | None, on_result: Callable[[Lease, ItemResult], None]
    ) -> None:
        self.id = id
        self.fields = fields
        self.client = head.client if head is not None else ""
        self.number = head.number if head is not None else 0
        self._on_result = on_result

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self._on_result(self, result)


class _Done(Struct):
    """An answer that is to be written; with `why` its entry goes to the dead letters."""

    lease: Lease
    answer: Answer
    why: str = ""


class Writer:
    """`leases` are the entries that were taken and are not answered in the broker yet. `wake` is called when some of
    them are."""

    def __init__(self, link: Link, keys: Keys, lease_s: float, wake: Callable[[], None]) -> None:
        self.leases: dict[bytes, Lease] = {}
        self.counts = dict.fromkeys(("answered", "dead_letters", "released"), 0)
        self._link, self._keys = link, keys
        self._lease_s = lease_s
        self._wake = wake
        self._done: deque[_Done] = deque()
        self._back: list[bytes] = []  # not run: for other workers
        self._due = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the broker does not take the answers: it has no more questions for us."""
        return len(self._done) >= ANSWER_ENTRIES

    def answer(self, lease: Lease, body: bytes) -> None:
        """The result of an entry."""
        self._add(_Done(lease, Answer(lease.number, body)))

    def fail(self, lease: Lease, error: PenstockError, *, dead: bool = False) -> None:
        """The error of an entry; `dead`: the entry goes to the dead letters."""
        self._add(_Done(lease, Answer(lease.number, fault=fault_of(error)), error.message if dead else ""))

    def _add(self, done: _Done) -> None:
        self._done.append(done)
        self._due.set()
        self._wake()

    def release(self, lease: Lease) -> None:
        """An entry that was not run is for other workers."""
        self._back.append(lease.id)
        self._due.set()
        self._wake()

    async def emptied(self) -> None:
        """Returns when no entry is left."""
        self._empty.clear()
        if self.leases:
            await self._empty.wait()

    async def run(self) -> None:
        """For ever. A broker that is away is waited for. Raises ConfigError."""
        pause = RETRY_S[0]
        while True:
            await self._due.wait()
            self._due.clear()
            while self._done or self._back:
                try:
                    await self.hand_back(self._back)
                    await self._write()
                    pause = RETRY_S[0]
                except (BrokerUnavailable, QueueFull) as e:
                    log.debug("write_failed broker=%s retry_in_s=%g error=%s", self._link.address.name, pause, e)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RETRY_S[1])
                self._wake()
            if not self.leases:
                self._empty.set()

    async def _write(self) -> None:
        """Writes the answers that are there, up to the bounds of one script. What raises leaves them where they are."""
        some: list[_Done] = []
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
        keys = [self._keys.queue, *(self._keys.replies(client) for client in clients)]
        ids = [done.lease.id for done in some if not done.why]
        messages = [write(Answers(VERSION, answers)) for answers in clients.values()]
        await self._link.run(ANSWER, keys, (GROUP, REPLIES_S, len(ids), *ids, *messages))
        for done in some:
            if done.why:
                await self._bury(done)
            self._done.popleft()
            self.leases.pop(done.lease.id, None)
        self.counts["answered"] += len(some)

    async def _bury(self, done: _Done) -> None:
        lease = done.lease
        log.warning("dead_letter queue=%s id=%s why=%s", self._keys.queue, lease.id.decode(), done.why)
        fields = [field[:LETTER_BYTES] for field in lease.fields]
        keys = (self._keys.queue, self._keys.dead)
        await self._link.run(BURY, keys, (GROUP, lease.id, done.why, MAX_LETTERS, *fields))
        self.counts["dead_letters"] += 1

    async def hand_back(self, ids: list[bytes]) -> None:
        """Gives entries that were not run to whoever asks next, and takes them from the list. It counts as no death."""
        idle_ms = int(self._lease_s * 1000)
        while some := ids[:ANSWER_ENTRIES]:
            claim = ("XCLAIM", self._keys.queue, GROUP, RELEASED, 0, *some)
            try:
                await self._link.ask((*claim, "IDLE", idle_ms, "RETRYCOUNT", 0, "JUSTID"))
            except Refused as e:
                if e.word != "NOGROUP":  # else the broker was emptied: there is nothing to hand back
                    raise
            self.counts["released"] += len(some)
            del ids[: len(some)]
            for id in some:
                self.leases.pop(id, None)
