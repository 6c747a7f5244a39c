"""Books: what one client has asked and is not answered yet. What is to be told to the broker, and what it has said."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.errors import PayloadTooLarge, PenstockError, QueueFull
from penstock.streamer.redis.calls import Call, Entry, Parcel
from penstock.streamer.redis.codec import decode, encode
from penstock.streamer.redis.messages import Answer, error_of

PARCEL_ENTRIES = 512  # the broker does nothing else while it takes a parcel
PARCEL_BYTES = 8 * 2**20


class Books:
    """The entries of a client by number, and in which state they are. `max_bytes`: of their payloads together."""

    def __init__(self, max_bytes: int) -> None:
        self.entries: dict[int, Entry] = {}  # unanswered, by number
        self.outgoing: deque[list[Entry]] = deque()
        self.again: list[Entry] = []  # the broker has lost them
        self.gone: list[bytes] = []  # ids that nobody waits for any more
        self.nbytes = 0
        self.due = asyncio.Event()  # there is something to tell
        self.asked = asyncio.Event()  # there is something to be answered
        self.empty = asyncio.Event()
        self.counts = dict.fromkeys(("requests", "answers", "duplicates", "resent", "refused", "expired", "lost"), 0)
        self._max_bytes = max_bytes
        self._numbers = 0

    def put(self, call: Call, values: list[Any]) -> None:
        """Makes entries of the values of a call, which are to be sent. One that cannot be sent has its error."""
        self.counts["requests"] += len(values)
        for index, value in enumerate(values):
            try:
                payload = self._encoded(value)
            except PenstockError as e:
                call.put(index, e)
                continue
            self._numbers += 1
            entry = self.entries[self._numbers] = Entry(self._numbers, call, index, payload)
            self.nbytes += len(payload)
            call.entries.append(entry)
        self.outgoing.extend(_groups(call.entries))
        self.due.set()
        self.asked.set()

    def _encoded(self, value: Any) -> bytes:
        payload = encode(value)
        if len(payload) > self._max_bytes:
            raise PayloadTooLarge(f"the item has {len(payload)} bytes, more than {self._max_bytes} may wait")
        if self.nbytes + len(payload) > self._max_bytes:
            raise QueueFull(f"{self.nbytes} of {self._max_bytes} bytes wait: try again later")
        return payload

    def parcel(self) -> Parcel:
        """What is to be sent next, up to the bounds of a parcel. What was lost goes first."""
        parcel = Parcel()
        some, self.again = self.again[:PARCEL_ENTRIES], self.again[PARCEL_ENTRIES:]
        for entry in some:
            parcel.add([entry])
        while self.outgoing and parcel.entries < PARCEL_ENTRIES and parcel.nbytes < PARCEL_BYTES:
            parcel.add([entry for entry in self.outgoing.popleft() if entry.number in self.entries])
        return parcel

    def answered(self, answer: Answer) -> None:
        """Tells an answer to its caller. One that nobody waits for, or that came before, is only counted."""
        entry = self.entries.get(answer.number)
        if entry is None:
            self.counts["duplicates"] += 1
            return
        self._forget(entry)
        self.counts["answers"] += 1
        value: Any
        try:
            value = decode(answer.body) if answer.fault is None else error_of(answer.fault)
        except PenstockError as e:
            value = e
        entry.call.put(entry.index, value)
        entry.call.finish()

    def left(self, call: Call) -> None:
        """Nobody waits for a call any more: what of it is in the queue is to be taken out."""
        for entry in call.entries:
            if entry.number in self.entries:
                self._forget(entry)
                if entry.id is not None:
                    self.gone.append(entry.id)
        if self.gone:
            self.due.set()

    def lost(self, entries: list[Entry]) -> None:
        """The broker has them no more, and they are not answered."""
        self.counts["resent"] += len(entries)
        for entry in entries:
            entry.id = None
        self.again += entries

    def fail_all(self, error: PenstockError) -> None:
        """Tells everybody who waits."""
        self.gone.clear()
        self.again.clear()
        self.counts["lost"] += len(self.entries)
        for call in list({id(entry.call): entry.call for entry in self.entries.values()}.values()):
            call.fail(error)

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.number]
        self.nbytes -= len(entry.payload)
        if not self.entries:
            self.empty.set()


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The entries in pieces that fit a parcel."""
    group: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if group and (len(group) == PARCEL_ENTRIES or nbytes + len(entry.payload) > PARCEL_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(entry)
        nbytes += len(entry.payload)
    if group:
        yield group
