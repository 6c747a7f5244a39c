"""PendingRequests: the unanswered requests of one client, and the work that is due at the broker for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from penstock.errors import BadRequest, PayloadTooLarge, PenstockError, QueueFull
from penstock.streamer.redis.codec import decode, encode
from penstock.streamer.redis.protocol import BrokerReply, from_wire
from penstock.tracing import traceparent_of
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.streamer")

SUBMISSION_ENTRIES = 512  # the broker serves no other client while it runs a script
SUBMISSION_BYTES = 8 * 2**20
RETRY_AFTER_S = (0.1, 60.0)


def queue_full(found: str, oldest_s: float) -> QueueFull:
    """The error of a full queue. A queue that moves at a steady rate is renewed in the time for which its oldest entry
    has been in it, `oldest_s`: that is when to try again."""
    shortest, longest = RETRY_AFTER_S
    return QueueFull(f"{found}: try again later", retry_after_s=min(max(oldest_s, shortest), longest))


class QueueEntry(Struct, eq=False):
    """One value of a call. `id` is its id in the broker's queue, None until the broker has it."""

    number: int
    call: PendingCall
    index: int
    payload: bytes
    id: bytes | None = None


Group = list[QueueEntry]  # entries of one call, which the broker accepts or refuses together


class PendingCall:
    """Ticket of one call: its entries and the results received so far.

    `ends_s`, on the loop's clock: when the call times out; `due`: whether the caller set this deadline. `on_abandoned`
    is called when the call ends before all its entries are answered.
    """

    def __init__(
        self,
        sink: Sink,
        item: Item,
        *,
        ends_s: float,
        due: bool,
        priority: int,
        on_abandoned: Callable[[PendingCall], None],
    ) -> None:
        self.sink: Sink | None = sink
        self.ends_s, self.due, self.priority = ends_s, due, priority
        self.began_s = time.monotonic()
        self.entries: list[QueueEntry] = []
        self.timer: asyncio.TimerHandle | None = None
        self.traceparent = "" if item.trace is None else traceparent_of(item.trace)
        self._many = item.many
        self._missing = len(item.payload) if item.many else 1
        self.values: list[Any] = [None] * self._missing
        self._on_abandoned = on_abandoned

    def put(self, index: int, value: Any) -> None:
        """Stores what one value got: a result, or a PenstockError."""
        self.values[index] = value
        self._missing -= 1

    def finish(self) -> None:
        """Answers the caller if no value is missing."""
        if self._missing or self.sink is None:
            return
        if self._many:
            self._answer(ItemResult(body=self.values))
        elif isinstance(self.values[0], PenstockError):
            self._answer(ItemResult(error=self.values[0]))
        else:
            self._answer(ItemResult(body=self.values[0]))

    def fail(self, error: PenstockError) -> None:
        """Answers the caller with an error and abandons the missing results."""
        if self.sink is not None:
            self._answer(ItemResult(error=error))
            self._on_abandoned(self)

    def cancel(self) -> None:
        if self.sink is not None:
            self._close()
            self._on_abandoned(self)

    def _answer(self, result: ItemResult) -> None:
        sink = self.sink
        self._close()
        try:
            if sink is not None:
                sink(result)
        except Exception:
            log.exception("sink_failed")

    def _close(self) -> None:
        self.sink = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PendingRequests:
    """The unanswered entries of a client by number, and their states.

    `max_queue` bounds the entries of all clients; `max_bytes` the payloads of this client.
    """

    def __init__(self, max_queue: int, max_bytes: int, allow_pickle: bool = False) -> None:
        self.entries: dict[int, QueueEntry] = {}
        self.unsent: deque[Group] = deque()
        self.lost: list[QueueEntry] = []  # by the broker; to be sent again
        self.abandoned: list[bytes] = []  # ids to remove from the queue
        self.nbytes = 0
        self.work_due = asyncio.Event()  # the sender has work
        self.unanswered = asyncio.Event()  # the receiver has work
        self.empty = asyncio.Event()
        self.counts = dict.fromkeys(("requests", "answers", "duplicates", "resent", "refused", "expired", "lost"), 0)
        self.max_queue = max_queue
        self._max_bytes, self._allow_pickle = max_bytes, allow_pickle
        self._last_number = 0

    def check_room(self, size: int) -> None:
        """Raises QueueFull unless `size` more entries fit; BadRequest if they never can."""
        if size > self.max_queue:
            raise BadRequest(f"the call has {size} items, but the queue may hold {self.max_queue}: send it in pieces")
        waiting = len(self.entries)
        if waiting + size > self.max_queue:
            raise queue_full(f"{waiting} of {self.max_queue} items wait", self._oldest_s())

    def _oldest_s(self) -> float:
        """For how long the oldest unanswered entry has waited."""
        oldest = next(iter(self.entries.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.call.began_s

    def add(self, call: PendingCall, values: list[Any]) -> None:
        """Queues the values of a call for sending. A value that cannot be sent gets its error at once."""
        self.counts["requests"] += len(values)
        for index, value in enumerate(values):
            try:
                payload = self._encode(value)
            except PenstockError as e:
                call.put(index, e)
                continue
            self._last_number += 1
            entry = self.entries[self._last_number] = QueueEntry(self._last_number, call, index, payload)
            self.nbytes += len(payload)
            call.entries.append(entry)
        self.unsent.extend(_groups(call.entries))
        self.work_due.set()
        self.unanswered.set()

    def _encode(self, value: Any) -> bytes:
        payload = encode(value, self._allow_pickle)
        if len(payload) > self._max_bytes:
            raise PayloadTooLarge(f"the item has {len(payload)} bytes, more than {self._max_bytes} may wait")
        if self.nbytes + len(payload) > self._max_bytes:
            raise queue_full(f"{self.nbytes} of {self._max_bytes} bytes wait", self._oldest_s())
        return payload

    def next_submission(self) -> list[Group]:
        """The entries to send in the next script call, within its bounds; lost entries first."""
        groups = [[entry] for entry in self.lost[:SUBMISSION_ENTRIES]]
        del self.lost[:SUBMISSION_ENTRIES]
        count, nbytes = len(groups), sum(len(entry.payload) for (entry,) in groups)
        while self.unsent and count < SUBMISSION_ENTRIES and nbytes < SUBMISSION_BYTES:
            if group := [entry for entry in self.unsent.popleft() if entry.number in self.entries]:
                groups.append(group)
                count += len(group)
                nbytes += sum(len(entry.payload) for entry in group)
        return groups

    def receive(self, reply: BrokerReply) -> None:
        """Passes a reply to its call. A repeated or unexpected reply is only counted."""
        entry = self.entries.get(reply.number)
        if entry is None:
            self.counts["duplicates"] += 1
            return
        self._forget(entry)
        self.counts["answers"] += 1
        value: Any
        try:
            value = decode(reply.body, self._allow_pickle) if reply.error is None else from_wire(reply.error)
        except PenstockError as e:
            value = e
        entry.call.put(entry.index, value)
        entry.call.finish()

    def abandon(self, call: PendingCall) -> None:
        """Forgets the entries of a call; the sender removes them from the queue."""
        for entry in call.entries:
            if entry.number in self.entries:
                self._forget(entry)
                if entry.id is not None:
                    self.abandoned.append(entry.id)
        if self.abandoned:
            self.work_due.set()

    def resend(self, entries: list[QueueEntry]) -> None:
        """Queues unanswered entries that the broker has lost."""
        self.counts["resent"] += len(entries)
        for entry in entries:
            entry.id = None
        self.lost += entries

    def fail_all(self, error: PenstockError) -> None:
        """Answers every caller with an error."""
        self.abandoned.clear()
        self.lost.clear()
        self.counts["lost"] += len(self.entries)
        for call in list({id(entry.call): entry.call for entry in self.entries.values()}.values()):
            call.fail(error)

    def _forget(self, entry: QueueEntry) -> None:
        del self.entries[entry.number]
        self.nbytes -= len(entry.payload)
        if not self.entries:
            self.empty.set()


def _groups(entries: list[QueueEntry]) -> Iterator[Group]:
    """The entries in groups that fit a submission."""
    group: Group = []
    nbytes = 0
    for entry in entries:
        if group and (len(group) == SUBMISSION_ENTRIES or nbytes + len(entry.payload) > SUBMISSION_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(entry)
        nbytes += len(entry.payload)
    if group:
        yield group
