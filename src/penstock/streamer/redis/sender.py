"""Sender: tells the broker what a client asks, and looks whether the broker has lost any of it. One task."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from penstock.errors import BrokerUnavailable, ConfigError, PenstockError, QueueFull
from penstock.streamer.redis.books import Books
from penstock.streamer.redis.calls import Parcel
from penstock.streamer.redis.keys import Keys
from penstock.streamer.redis.link import Link
from penstock.streamer.redis.messages import MAX_BUDGET_MS, VERSION, Head, read_answers, write
from penstock.streamer.redis.scripts import MISSING, SUBMIT

log = logging.getLogger("penstock.broker")

LOOK_ENTRIES = 1000  # that one script or command is asked for
KEEP_S = 60  # how long the broker remembers a client that is silent
RETRY_S = (0.02, 1.0)  # shortest and longest wait before the next try to connect


class Sender:
    """`link` is its own, `other` that of the receiver. A connection that is lost may be away for `patience_s` before
    the callers are told; one that never was is told of at once."""

    def __init__(
        self, books: Books, link: Link, other: Link, keys: Keys, client: str, max_queue: int, patience_s: float
    ) -> None:
        self.queue_length = 0  # when it was last written to
        self.doubt = False  # it is time to look whether the broker remembers us
        self._books = books
        self._link, self._other = link, other
        self._queue, self._replies, self._sent = keys.queue, keys.replies(client), keys.sent(client)
        self._client = client
        self._max_queue, self._patience_s = max_queue, patience_s
        self._loop = asyncio.get_running_loop()
        self._parcels = 0
        self._connects = 0  # that had been made when it was last looked
        self._lost_at: float | None = None

    async def run(self) -> None:
        """For ever: what is to be told, one after the other."""
        books = self._books
        while True:
            await books.due.wait()
            books.due.clear()
            while books.outgoing or books.again or books.gone or self.doubt:
                try:
                    await self._next()
                except PenstockError as e:
                    await self._trouble(e)
                else:
                    self._lost_at = None

    async def _next(self) -> None:
        books = self._books
        if self.doubt:
            await self._look_back()
        if books.gone:
            gone, books.gone = books.gone[:LOOK_ENTRIES], books.gone[LOOK_ENTRIES:]
            await self._link.ask(("XDEL", self._queue, *gone))
        if books.again or books.outgoing:
            await self._deliver(books.parcel())

    async def _deliver(self, parcel: Parcel) -> None:
        """Brings one parcel into the queue, or tells its callers why not."""
        if not parcel.groups:
            return
        arguments = self._written(parcel)
        while True:
            try:
                told = await self._link.run(SUBMIT, (self._queue, self._sent), arguments)
                break
            except PenstockError as e:
                if type(e) is not BrokerUnavailable or not await self._may_come_back():
                    parcel.fail(e)
                    raise
                if not any(entry.number in self._books.entries for group in parcel.groups for entry in group):
                    return
        self.queue_length = told[0]
        for group, ids in zip(parcel.groups, told[1:], strict=True):
            if isinstance(ids, int):
                self._books.counts["refused"] += ids
                full = f"the queue is full ({told[0]} of {self._max_queue} items wait or run): try again later"
                group[0].call.fail(QueueFull(full))
                continue
            for entry, id in zip(group, ids, strict=True):
                entry.id = id
                if entry.number not in self._books.entries:  # its caller has left meanwhile
                    self._books.gone.append(id)

    def _written(self, parcel: Parcel) -> list[Any]:
        """The arguments of the script for a parcel."""
        self._parcels += 1
        arguments: list[Any] = [self._parcels, KEEP_S, self._max_queue]
        now = self._loop.time()
        for group in parcel.groups:
            call = group[0].call
            budget_ms = min(max(int((call.ends_s - now) * 1000), 0), MAX_BUDGET_MS)
            arguments.append(len(group))
            for entry in group:
                arguments.append(write(Head(VERSION, self._client, entry.number, budget_ms, call.priority, call.due)))
                arguments.append(entry.payload)
        return arguments

    # ---- trouble

    async def _may_come_back(self) -> bool:
        """After an error of the connection: waits a moment; False when there is no hope, so that callers are told."""
        now = self._loop.time()
        if self._lost_at is None:
            self._lost_at = now
        if not self._link.connects or now - self._lost_at > self._patience_s:
            return False
        await asyncio.sleep(min(RETRY_S[1], max(RETRY_S[0], (now - self._lost_at) / 2)))
        return True

    async def _trouble(self, error: PenstockError) -> None:
        """The broker cannot be spoken to: callers are told once it is hopeless."""
        if type(error) is BrokerUnavailable and await self._may_come_back():
            return
        if isinstance(error, ConfigError) or type(error) is BrokerUnavailable:
            log.warning("broker_failed broker=%s error=%s: callers get this error", self._link.address.name, error)
            self.doubt = False
            self._books.fail_all(error)

    async def _look_back(self) -> None:
        """Sends again what has left the queue without an answer, if the broker has forgotten us or was out of reach."""
        self.doubt = False
        (known,) = await self._link.ask(("EXPIRE", self._sent, KEEP_S))
        connects = self._link.connects + self._other.connects
        if known and connects == self._connects:
            return
        waiting = {e.id: e for e in self._books.entries.values() if e.id is not None}
        ids = list(waiting)
        missing: list[bytes] = []
        for i in range(0, len(ids), LOOK_ENTRIES):
            missing += await self._link.run(MISSING, (self._queue,), ids[i : i + LOOK_ENTRIES])
        # an entry leaves the queue in the same step in which its answer is written: what came is read after that
        told, _ = await self._link.ask(("XRANGE", self._replies, "-", "+"), ("SET", self._sent, "[0]", "EX", KEEP_S))
        for _, fields in told:
            for answer in read_answers(fields[1]):
                self._books.answered(answer)
        self._connects = connects
        again = [waiting[id] for id in missing if waiting[id].number in self._books.entries]
        if again:
            log.warning("sent_again broker=%s requests=%d: the broker lost them", self._link.address.name, len(again))
            self._books.lost(again)
