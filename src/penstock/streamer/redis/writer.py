"""ReplyWriter: the task that sends a worker's replies and releases its entries.

The replies of one pass of the event loop are written, and their entries removed from the queue, in one script call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from penstock.backoff import Backoff
from penstock.errors import BrokerUnavailable, PenstockError, QueueFull
from penstock.streamer.redis.connection import CommandRefused, RedisConnection
from penstock.streamer.redis.protocol import (
    ANSWER,
    BURY,
    GROUP,
    RELEASED,
    VERSION,
    BrokerReplies,
    BrokerReply,
    QueueKeys,
    RequestHeader,
    Script,
    dump,
    to_wire,
)
from penstock.types import ItemResult

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
        if await self._connection.run(script, keys, arguments):
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
