"""BrokerClient: requests go to the workers of one model through a broker, and their answers come back. On one loop.

All requests of one pass of the loop are one *parcel*: one script that bounds the queue and adds their entries, each
exactly once, also when the connection is cut and the parcel is sent again. Answers come as one message a batch in a
stream of this client's own. Once a second while anything is asked, the client looks whether the broker still knows it;
when it does not (it was emptied, or started anew), what has left the queue without an answer is sent once more. A
request may so be run twice; it is answered once, by its number.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Coroutine
from typing import Any

from penstock.broker.address import Address, parse
from penstock.broker.calls import Call, Entry, Parcel
from penstock.broker.codec import decode, encode
from penstock.broker.keys import GROUP, RELEASED, Keys
from penstock.broker.link import Link, Refused
from penstock.broker.messages import MAX_BUDGET_MS, VERSION, Answer, Head, error_of, read_answers, write
from penstock.broker.scripts import MISSING, SUBMIT
from penstock.errors import (
    BadRequest,
    BrokerUnavailable,
    ConfigError,
    DeadlineExceeded,
    ModelNotReady,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
)
from penstock.frontends.base import Ticket
from penstock.types import Item, Sink

log = logging.getLogger("penstock.broker")

PARCEL_ENTRIES = 512  # the broker does nothing else while it takes a parcel
PARCEL_BYTES = 8 * 2**20
LOOK_ENTRIES = 1000  # that one script or command is asked for
KEEP_S = 60  # how long the broker remembers a client that is silent
WATCH_S = 1.0
BLOCK_S = 5.0
READY_S = 0.05  # between two looks for a worker
RETRY_S = (0.02, 1.0)  # shortest and longest wait before the next try to connect


class BrokerClient:
    """See the module. `max_queue`: entries that may wait or run, of all clients together; `max_bytes`: of this client's
    own payloads. A call without a budget waits `timeout_s`. A connection that is lost may be away for `patience_s`
    before its callers are told; one that never was is told of at once."""

    def __init__(
        self,
        broker: str = "localhost:6379",
        prefix: str = "",
        *,
        max_queue: int = 65_536,
        max_bytes: int = 512 * 2**20,
        timeout_s: float = 30.0,
        patience_s: float = 10.0,
    ) -> None:
        self.address: Address = parse(broker)
        self.id = uuid.uuid4().hex
        self.max_queue, self._max_bytes = max_queue, max_bytes
        self._timeout_s, self._patience_s = timeout_s, patience_s
        keys = Keys(prefix)
        self._queue, self._replies, self._sent = keys.queue, keys.replies(self.id), keys.sent(self.id)
        self._loop = asyncio.get_running_loop()
        self._out, self._in = Link(self.address), Link(self.address)
        self._entries: dict[int, Entry] = {}  # unanswered, by number
        self._outgoing: deque[Call] = deque()
        self._again: list[Entry] = []  # the broker has lost them
        self._gone: list[bytes] = []  # ids that nobody waits for any more
        self._bytes = 0
        self._numbers = 0
        self._parcels = 0
        self._doubt = False  # it is time to look whether the broker remembers us
        self._connects = 0  # that had been made when it was last looked
        self._lost_at: float | None = None
        self._due = asyncio.Event()
        self._asked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self._emptied = asyncio.Event()
        self._counts = dict.fromkeys(("requests", "answers", "duplicates", "resent", "refused", "expired", "lost"), 0)
        self._queue_length = 0

    # ---- requests

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Sends one item, or each of a `many` as an entry of its own. Raises BadRequest, QueueFull, DeadlineExceeded.

        A value that cannot be sent fails alone. What the broker says later comes as the answer.
        """
        if self._closed:
            raise ModelNotReady("the streamer is closed")
        budget = self._timeout_s if budget_s is None else budget_s
        if budget <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        values = item.payload if item.many else [item.payload]
        if len(values) > self.max_queue:
            raise BadRequest(
                f"the request has {len(values)} items, more than the queue may hold ({self.max_queue}): "
                "send it in pieces"
            )
        if len(self._entries) + len(values) > self.max_queue:
            raise QueueFull(f"{len(self._entries)} of {self.max_queue} items wait: try again later")
        call = Call(
            sink,
            item.many,
            len(values),
            ends_s=self._loop.time() + budget,
            due=budget_s is not None,
            priority=min(max(priority, 0), 255),
            on_left=self._left,
        )
        for index, value in enumerate(values):
            self._add(call, index, value)
        self._counts["requests"] += len(values)
        if not call.entries:  # none of them can be sent
            self._loop.call_soon(call.finish)
            return call
        call.timer = self._loop.call_later(budget, self._expire, call)
        self._outgoing.append(call)
        self._due.set()
        self._asked.set()
        if not self._tasks:
            self._tasks = [self._task(self._send()), self._task(self._receive())]
        if self._watch is None:
            self._watch = self._loop.call_later(WATCH_S, self._look)
        return call

    def _add(self, call: Call, index: int, value: Any) -> None:
        try:
            payload = encode(value)
            if self._bytes + len(payload) > self._max_bytes:
                if len(payload) > self._max_bytes:
                    raise PayloadTooLarge(f"the item has {len(payload)} bytes, more than {self._max_bytes} may wait")
                raise QueueFull(f"{self._bytes} of {self._max_bytes} bytes wait: try again later")
        except PenstockError as e:
            call.put(index, e)
            return
        self._numbers += 1
        entry = Entry(self._numbers, call, index, payload)
        self._bytes += len(payload)
        self._entries[entry.number] = entry
        call.entries.append(entry)

    def _forget(self, entry: Entry) -> bool:
        """Takes an entry out of the books; False if it was."""
        if self._entries.pop(entry.number, None) is None:
            return False
        self._bytes -= len(entry.payload)
        if not self._entries:
            self._emptied.set()
        return True

    def _left(self, call: Call) -> None:
        """Nobody waits for a call any more: what of it is in the queue is taken out."""
        for entry in call.entries:
            if self._forget(entry) and entry.id is not None:
                self._gone.append(entry.id)
        if self._gone:
            self._due.set()

    def _expire(self, call: Call) -> None:
        self._counts["expired"] += 1
        call.fail(DeadlineExceeded("no answer came in time: too few workers, or none, serve this queue"))

    # ---- to the broker

    async def _send(self) -> None:
        """For ever: what is to be told to the broker, one after the other."""
        while True:
            await self._due.wait()
            self._due.clear()
            while self._outgoing or self._again or self._gone or self._doubt:
                try:
                    await self._next()
                except PenstockError as e:
                    await self._trouble(e)
                else:
                    self._lost_at = None

    async def _next(self) -> None:
        if self._doubt:
            await self._look_back()
        if self._gone:
            gone, self._gone = self._gone[:LOOK_ENTRIES], self._gone[LOOK_ENTRIES:]
            await self._out.ask(("XDEL", self._queue, *gone))
        if self._again or self._outgoing:
            await self._deliver(self._pack())

    def _pack(self) -> Parcel:
        """The next calls, up to the bounds of a parcel. What was lost goes first."""
        parcel = Parcel()
        if self._again:
            some, self._again = self._again[:PARCEL_ENTRIES], self._again[PARCEL_ENTRIES:]
            for entry in some:
                parcel.add([entry])
        while self._outgoing and parcel.entries < PARCEL_ENTRIES and parcel.nbytes < PARCEL_BYTES:
            call = self._outgoing.popleft()
            if call.sink is not None:
                parcel.add([e for e in call.entries if e.number in self._entries])
        return parcel

    async def _deliver(self, parcel: Parcel) -> None:
        """Brings one parcel into the queue, or tells its callers why not."""
        if not parcel.groups:
            return
        self._parcels += 1
        arguments: list[Any] = [self._parcels, KEEP_S, self.max_queue]
        now = self._loop.time()
        for group in parcel.groups:
            call = group[0].call
            budget_ms = min(max(int((call.ends_s - now) * 1000), 0), MAX_BUDGET_MS)
            arguments.append(len(group))
            for entry in group:
                arguments.append(write(Head(VERSION, self.id, entry.number, budget_ms, call.priority, call.due)))
                arguments.append(entry.payload)
        while True:
            try:
                told = await self._out.run(SUBMIT, (self._queue, self._sent), arguments)
                break
            except PenstockError as e:
                if type(e) is not BrokerUnavailable or not await self._may_come_back():
                    parcel.fail(e)
                    raise
                if all(entry.number not in self._entries for group in parcel.groups for entry in group):
                    return
        self._queue_length = told[0]
        for group, ids in zip(parcel.groups, told[1:], strict=True):
            if isinstance(ids, int):
                self._counts["refused"] += ids
                group[0].call.fail(
                    QueueFull(f"the queue is full ({told[0]} of {self.max_queue} items wait or run): try again later")
                )
                continue
            for entry, id in zip(group, ids, strict=True):
                entry.id = id
                if entry.number not in self._entries:  # its caller has left meanwhile
                    self._gone.append(id)

    async def _may_come_back(self) -> bool:
        """After an error of the connection: waits a moment; False when there is no hope, so that callers are told."""
        now = self._loop.time()
        if self._lost_at is None:
            self._lost_at = now
        if not self._out.connects or now - self._lost_at > self._patience_s:
            return False
        await asyncio.sleep(min(RETRY_S[1], max(RETRY_S[0], (now - self._lost_at) / 2)))
        return True

    async def _trouble(self, error: PenstockError) -> None:
        """The broker cannot be spoken to: callers are told once it is hopeless."""
        if type(error) is BrokerUnavailable and await self._may_come_back():
            return
        if isinstance(error, ConfigError) or type(error) is BrokerUnavailable:
            log.warning("broker_failed broker=%s error=%s: callers get this error", self.address.name, error)
            self._fail_all(error)

    def _fail_all(self, error: PenstockError) -> None:
        self._gone.clear()
        self._again.clear()
        self._doubt = False
        self._counts["lost"] += len(self._entries)
        for call in self._calls():
            call.fail(error)

    def _calls(self) -> list[Call]:
        """The calls that are not answered."""
        return list({id(entry.call): entry.call for entry in self._entries.values()}.values())

    # ---- what was lost

    def _look(self) -> None:
        """Once a second while anything is asked: does the broker remember us?"""
        self._watch = None
        if self._entries and not self._closed:
            self._doubt = True
            self._due.set()
            self._watch = self._loop.call_later(WATCH_S, self._look)

    async def _look_back(self) -> None:
        """Sends again what has left the queue without an answer, if the broker has forgotten us or was out of reach."""
        self._doubt = False
        (known,) = await self._out.ask(("EXPIRE", self._sent, KEEP_S))
        connects = self._out.connects + self._in.connects
        if known and connects == self._connects:
            return
        waiting = {e.id: e for e in self._entries.values() if e.id is not None}
        ids = list(waiting)
        missing: list[bytes] = []
        for i in range(0, len(ids), LOOK_ENTRIES):
            missing += await self._out.run(MISSING, (self._queue,), ids[i : i + LOOK_ENTRIES])
        # an entry leaves the queue in the same step in which its answer is written: what came is read after that
        told, _ = await self._out.ask(("XRANGE", self._replies, "-", "+"), ("SET", self._sent, "[0]", "EX", KEEP_S))
        for _, fields in told:
            self._read(fields[1])
        self._connects = connects
        again = [waiting[id] for id in missing if waiting[id].number in self._entries]
        if again:
            log.warning("sent_again broker=%s requests=%d: the broker has lost them", self.address.name, len(again))
            self._counts["resent"] += len(again)
            for entry in again:
                entry.id = None
            self._again += again

    # ---- from the broker

    async def _receive(self) -> None:
        """For ever: reads the answers. What was read is deleted with the next look, so that nothing is read twice."""
        read: list[bytes] = []
        pause = RETRY_S[0]
        while True:
            if not self._entries:
                self._asked.clear()
                await self._asked.wait()
            commands: list[Any] = [("XDEL", self._replies, *read)] if read else []
            block_ms = int(BLOCK_S * 1000)
            commands.append(("XREAD", "COUNT", 256, "BLOCK", block_ms, "STREAMS", self._replies, "0-0"))
            try:
                found = (await self._in.ask(*commands, wait_s=BLOCK_S))[-1]
            except PenstockError as e:
                log.debug("receive_failed broker=%s error=%s", self.address.name, e)
                self._doubt = True
                self._due.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])
                continue
            pause = RETRY_S[0]
            read = []
            for id, fields in found[0][1] if found else ():
                read.append(id)
                self._read(fields[1])

    def _read(self, message: bytes) -> None:
        try:
            answers = read_answers(message)
        except PenstockError as e:
            log.warning("answer_malformed broker=%s error=%s: its callers wait in vain", self.address.name, e)
            return
        for answer in answers:
            self._answered(answer)

    def _answered(self, answer: Answer) -> None:
        entry = self._entries.get(answer.number)
        if entry is None or not self._forget(entry):
            self._counts["duplicates"] += 1
            return
        self._counts["answers"] += 1
        value: Any
        if answer.fault is not None:
            value = error_of(answer.fault)
        else:
            try:
                value = decode(answer.body)
            except PenstockError as e:
                value = e
        entry.call.put(entry.index, value)
        entry.call.finish()

    # ---- life

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a bug of ours: its callers must not wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("event=bug broker=%s: callers get an error", self.address.name, exc_info=error)
            self._closed = True
            self._fail_all(PenstockError("internal error"))

    async def ready(self) -> None:
        """Returns when a worker serves the queue. Raises ConfigError, BrokerUnavailable."""
        while True:
            try:
                (workers,) = await self._out.ask(("XINFO", "CONSUMERS", self._queue, GROUP))
                if any(RELEASED.encode() not in worker for worker in workers):
                    return
            except Refused:
                pass  # there is no such queue yet
            await asyncio.sleep(READY_S)

    def statistics(self, model: str) -> dict[str, object]:
        """What was asked and answered so far, and how many entries the queue had when it was last written to."""
        return {
            "broker": self.address.name,
            "waiting": len(self._entries),
            "waiting_bytes": self._bytes,
            "queue": self._queue_length,
            "connects": self._out.connects + self._in.connects,
            **self._counts,
        }

    async def close(self, drain_s: float = 30.0) -> None:
        """Waits up to `drain_s` for the answers that are due, tells the others, and leaves nothing in the broker."""
        self._closed = True
        if self._entries and drain_s > 0:
            self._emptied.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await self._emptied.wait()
            except TimeoutError:
                pass
        for call in self._calls():
            call.fail(ModelNotReady("the streamer was closed before the answer came"))
        if self._watch is not None:
            self._watch.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._out.connects:
            try:
                async with asyncio.timeout(2.0):
                    gone = [("XDEL", self._queue, *self._gone)] if self._gone else []
                    await self._out.ask(*gone, ("DEL", self._replies, self._sent))
            except (PenstockError, TimeoutError):
                pass  # they expire
        await self._out.close()
        await self._in.close()

    def forget(self) -> None:
        """In a forked child: closes this process's copies of the sockets, and touches nothing else."""
        self._out.forget()
        self._in.forget()
