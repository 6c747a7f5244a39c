"""One client of a shared batcher: its calls, its memory, and its unread answers."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
from collections.abc import Awaitable
from functools import partial
from typing import Any, Final, Protocol

from penstock.core.contracts import Submitter, Ticket
from penstock.core.transports.process import Channel
from penstock.core.wire.messages import (
    MAX_BYTES,
    AbandonBatch,
    Buffer,
    Frame,
    FreeReplies,
    MessageReader,
    MessageWriter,
    PartMessage,
    WorkerFailed,
    sendable,
    write,
)
from penstock.core.wire.slabs import Slab, SlabPool, anonymous_file, give_to_system
from penstock.errors import Cancelled, PenstockError, QueueFull
from penstock.streamer.shared.messages import CallMessage, JoinMessage, LoadedMessage, ToBatcher, WelcomeMessage
from penstock.streamer.shared.sealed import Sealed, put_values, seal, sealed_values
from penstock.types import BatchPart, Item, ItemResult

log = logging.getLogger("penstock.streamer")

MAX_QUESTIONS: Final = 1000  # of one client that wait for their answer
JOIN_S: Final = 10.0  # for the first message of a client
STALL_S: Final = 30.0  # in which a client takes no byte of its answers
REQUEST_BYTES: Final = 64 * 2**20  # shared memory of one client; larger payloads follow in the stream
REPLY_BYTES: Final = 64 * 2**20
JOIN_BYTES: Final = 16 * 2**10  # of the first message: its settings have a few hundred


class SharedModel(Submitter, Protocol):
    """The backend of a batcher."""

    async def ready(self) -> None: ...


class SessionOwner(Protocol):
    """The batcher, as its sessions see it."""

    model: str
    max_rows: int  # of one client that may be in flight
    sessions: set[Session]
    buffer: bytearray  # in which the sessions receive, one after the other

    @property
    def backend(self) -> SharedModel: ...

    def refusal(self, message: JoinMessage) -> PenstockError | None:
        """Why a client may not join; None if it may."""

    def welcome(self) -> WelcomeMessage: ...

    def left(self, session: Session) -> None:
        """The session has ended."""

    async def statistics(self) -> dict[str, object]: ...


class Session:
    """One client. Everything runs on the loop's thread."""

    def __init__(self, batcher: SessionOwner, sock: Any) -> None:
        self._batcher = batcher
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[Ticket, int]] = {}  # ticket and rows of unanswered calls
        self._rows = 0
        self._requests: mmap.mmap | None = None  # the client's; None before it has joined
        self._replies: SlabPool | None = None
        self._sent: dict[int, Slab] = {}  # in the reply memory, until the client has read them
        self._tasks: set[asyncio.Task[None]] = set()
        self._flush_due = False
        self._reader = MessageReader(ToBatcher, self._request_memory)
        self._timer = self._loop.call_later(JOIN_S, self.close)
        self._stall: asyncio.TimerHandle | None = None
        self._channel = Channel(
            self._loop, sock, self._on_frame, self.close, patient=True, drains=True, buffer=batcher.buffer
        )
        self._channel.decoder.max_bytes = JOIN_BYTES

    def close(self) -> None:
        """Frees what the client held. Idempotent."""
        if self not in self._batcher.sessions:
            return
        self._channel.close()
        self._sock.close()
        self._timer.cancel()
        if self._stall is not None:
            self._stall.cancel()
        calls, self._calls = self._calls, {}
        for ticket, _ in calls.values():
            ticket.cancel()
        for task in self._tasks:
            task.cancel()
        if self._replies is not None:
            self._replies.close()
        requests, self._requests = self._requests, None
        if requests is not None:
            try:
                requests.close()
            except BufferError:  # of a call that runs, and then unmaps it: its worker has its own copy
                give_to_system(requests, 0, REQUEST_BYTES)
        self._batcher.left(self)

    # ---- messages of the client

    def _on_frame(self, frame: Frame) -> None:
        if self not in self._batcher.sessions:  # it was closed by a frame of the same read
            return
        try:
            message = self._reader.read(frame)
            if isinstance(message, JoinMessage) != (self._requests is None):
                raise ValueError("a client joins once, before it calls")
            if isinstance(message, JoinMessage):
                self._join(message)
            elif isinstance(message, AbandonBatch):
                self._abandon(message.id)
            else:
                for offset in message.free:
                    self._sent.pop(offset).release()
                if not isinstance(message, FreeReplies):
                    self._call(message)
        except Exception:
            log.exception("client_broken: it is disconnected")
            self.close()

    def _join(self, message: JoinMessage) -> None:
        error = self._batcher.refusal(message)
        if error is not None:
            self._channel.send(write(WorkerFailed(error)))
            self.close()
            return
        self._timer.cancel()
        self._channel.decoder.max_bytes = MAX_BYTES
        fds = [anonymous_file(REQUEST_BYTES), anonymous_file(REPLY_BYTES)]
        try:
            self._requests = mmap.mmap(fds[0], REQUEST_BYTES)
            self._replies = SlabPool(REPLY_BYTES, os.dup(fds[1]))
            welcome = b"".join(write(self._batcher.welcome()))
            socket.send_fds(self._sock, [welcome], fds)  # the first message: the socket has room for it
        finally:
            for fd in fds:
                os.close(fd)

    def _call(self, message: CallMessage) -> None:
        call_id, batcher = message.id, self._batcher
        if message.asks:
            if len(self._tasks) >= MAX_QUESTIONS:
                raise ValueError(f"more than {MAX_QUESTIONS} questions are open")
            asked = batcher.backend.ready() if message.asks == "ready" else batcher.statistics()
            task = self._loop.create_task(self._answer_question(call_id, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        item = message.item
        assert item is not None
        try:
            if self._rows >= batcher.max_rows:
                raise QueueFull(f"{self._rows} items of this process are in flight: try again later")
            item.payload = sealed_values(item.payload)
            self._rows += item.rows
            self._calls[call_id] = _NO_TICKET, item.rows  # an answer may come at once
            sink = partial(self._answer, call_id)
            ticket = batcher.backend.submit(batcher.model, None, item, sink)
            if call_id in self._calls:
                self._calls[call_id] = ticket, item.rows
        except PenstockError as e:
            self._answer(call_id, ItemResult(error=e.with_traceback(None)))

    def _abandon(self, call_id: int) -> None:
        """Confirms that the memory of the call is free, unless the answer is already on its way."""
        if call_id in self._calls:
            self._calls[call_id][0].cancel()
            self._answer(call_id, ItemResult(error=Cancelled("the caller left")))

    def _request_memory(self, offset: int, length: int, writable: bool) -> memoryview:
        if self._requests is None or offset + length > len(self._requests):
            raise ValueError(f"[{offset}, {offset + length}) is outside the memory for requests")
        return memoryview(self._requests)[offset : offset + length]

    # ---- answers

    async def _answer_question(self, call_id: int, asked: Awaitable[Any]) -> None:
        try:
            result = ItemResult(await asked)
        except PenstockError as e:
            result = ItemResult(error=e.with_traceback(None))
        outbox = MessageWriter(self._replies)
        outbox.results([_QUESTION], [result])
        self._send_result(call_id, result, outbox)

    def _answer(self, call_id: int, result: ItemResult) -> None:
        if result.final:
            _, rows = self._calls.pop(call_id, (None, 0))
            self._rows -= rows
            outbox = MessageWriter(self._replies)
            if result.error is None:  # errors are sealed with the models' own exceptions
                values = [value if type(value) is Sealed else seal(value) for value in result.body]
                result = ItemResult(put_values(outbox, values))
            self._send_result(call_id, result, outbox)

    def _send_result(self, call_id: int, result: ItemResult, outbox: MessageWriter) -> None:
        if self not in self._batcher.sessions:
            return
        part = BatchPart(call_id, [result])
        for slab in outbox.slabs:
            self._sent[slab.offset] = slab
        message = PartMessage(part, [], [])
        try:
            pieces = write(message, outbox.buffers)
        except Exception as e:
            sendable(part, e)
            pieces = write(message)
        self._send(pieces)

    def send_loaded(self) -> None:
        if self._requests is not None:
            self._send(write(LoadedMessage()))

    def _send(self, pieces: list[Buffer]) -> None:
        self._channel.send(pieces, more=True)
        if not self._flush_due:  # the answers of a batch go together
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._channel.flush()
        if self._channel.blocked and self._stall is None:
            self._stall = self._loop.call_later(STALL_S, self._check_stall, self._channel.sent_bytes)

    def _check_stall(self, sent_bytes: int) -> None:
        self._stall = None
        if self._channel.blocked and self._channel.sent_bytes == sent_bytes:
            log.warning("client_stalled seconds=%g: it is disconnected", STALL_S)
            self.close()
        elif self._channel.blocked:
            self._stall = self._loop.call_later(STALL_S, self._check_stall, self._channel.sent_bytes)

    def pause(self) -> None:
        """Reads no more calls: another batcher will."""
        self._channel.stop_reading()


class _NoTicket:
    def cancel(self) -> None:
        pass


_NO_TICKET = _NoTicket()
_QUESTION = Item(None)
