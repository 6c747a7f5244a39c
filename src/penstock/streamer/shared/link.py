"""The connection of one process to a shared batcher: calls as messages, with their memory."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.core.transports.process import Channel
from penstock.core.wire.messages import (
    AbandonBatch,
    Buffer,
    Frame,
    FreeReplies,
    MessageReader,
    MessageWriter,
    PartMessage,
    write,
)
from penstock.core.wire.slabs import Slab, SlabPool, map_read_only
from penstock.streamer.shared.messages import CallMessage, FromBatcher, LoadedMessage
from penstock.streamer.shared.sealed import put_values
from penstock.streamer.shared.start import Joined, close
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.streamer")

MAX_FREE: Final = 16  # read reply places that wait for the next call to be reported


class SharedCall:
    """Ticket of one call. `slabs`: its memory, until the batcher has answered."""

    def __init__(self, abandon: Callable[[SharedCall], None], sink: Sink, item: Item | None, nbytes: int = 0) -> None:
        self.item, self.nbytes = item, nbytes
        self.sink: Sink | None = sink
        self.rows = 0 if item is None else item.rows
        self.asks = ""
        self.expires_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.slabs: list[Slab] = []
        self.sent = False
        self.deaths = 0
        self.id = 0
        self._abandon = abandon

    def cancel(self) -> None:
        if self.sink is not None:
            self.sink = None
            self._abandon(self)

    def settle(self, result: ItemResult) -> None:
        """Delivers the response, unless the caller left."""
        sink, self.sink = self.sink, None
        if self.timer is not None:
            self.timer.cancel()
        for slab in self.slabs:
            slab.release()
        self.slabs = []
        if sink is not None:
            sink(result)


class BatcherLink:
    """The connection to one batcher, with the memory for requests and for replies."""

    def __init__(self, joined: Joined, on_answer: Callable[[PartMessage], None], on_end: Callable[[], None]) -> None:
        self.welcome = joined.welcome
        self.loading = self.welcome.loading
        self.answered = False  # the batcher has answered a call
        self._loop = asyncio.get_running_loop()
        self._sock = joined.sock
        self._on_answer, self._on_end = on_answer, on_end
        request_fd, reply_fd = joined.fds
        self._pool = SlabPool(self.welcome.request_bytes, request_fd)
        self._replies: mmap.mmap = map_read_only(reply_fd, self.welcome.reply_bytes)
        os.close(reply_fd)
        self._free: list[int] = []
        self._flush_due = False
        self._reader = MessageReader(FromBatcher, self._read_reply)
        self._channel = Channel(self._loop, self._sock, self._on_frame, on_end, drains=True)

    def send(self, call: SharedCall) -> None:
        """Sends a call, with its memory in `call.slabs`. Raises the errors of msgspec."""
        outbox = MessageWriter(self._pool)
        item = call.item
        if item is not None:
            left_s = None if call.expires_s is None else call.expires_s - self._loop.time()
            payload = put_values(outbox, item.payload)
            item = Item(payload, rows=item.rows, many=True, budget_s=left_s, priority=item.priority)
        call.slabs = outbox.slabs
        free, self._free = self._free, []
        self._send(write(CallMessage(call.id, item, free, call.asks), outbox.buffers))

    def abandon(self, call_id: int) -> None:
        self._send(write(AbandonBatch(call_id)))

    def _send(self, pieces: list[Buffer]) -> None:
        self._channel.send(pieces, more=True)
        if not self._flush_due:  # the calls of one pass of the loop go together
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._channel.flush()

    def _on_frame(self, frame: Frame) -> None:
        try:
            message = self._reader.read(frame)
            if isinstance(message, LoadedMessage):
                self.loading = False
                return
            if not isinstance(message, PartMessage):
                raise TypeError(f"a {type(message).__name__}")
        except Exception:
            log.exception("batcher_broken: its response cannot be read, and another batcher is asked")
            self._channel.close()
            self._loop.call_soon(self._on_end)
            return
        self.answered = True
        self._on_answer(message)
        if len(self._free) > MAX_FREE:
            self._send(write(FreeReplies(self._free)))
            self._free = []

    def _read_reply(self, offset: int, length: int, writable: bool) -> bytearray:
        self._free.append(offset)
        with memoryview(self._replies) as region, region[offset : offset + length] as data:
            return bytearray(data)

    def return_memory(self) -> None:
        """Acknowledges read replies now, because no later call will carry it."""
        if self._free:
            self._send(write(FreeReplies(self._free)))
            self._free = []

    def close(self) -> None:
        self._channel.flush()
        self._channel.close()
        self.forget()

    def forget(self) -> None:
        """Closes this process's copies of the descriptors, and touches nothing else."""
        close(self._sock)
        self._pool.close()
        with suppress(BufferError):
            self._replies.close()
