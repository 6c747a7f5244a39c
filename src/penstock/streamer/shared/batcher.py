"""The process of a shared batcher: `python -m penstock.streamer.shared.batcher`, started by `link.py` alone.

It has the backend of an ordinary streamer, one session per client, and no parent. It ends `linger_s` after its last
client has left. What a client held ends with its connection: waiting calls, their memory, and unread answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from typing import Any, Final

from penstock.core.contracts import Ticket
from penstock.core.engine.tracing import TraceObserver
from penstock.core.transports.process import RECEIVE_BYTES, Channel
from penstock.core.wire import messages
from penstock.core.wire.slabs import Slab, SlabPool, anonymous_file, give_to_system
from penstock.errors import Cancelled, ConfigError, PenstockError, QueueFull, describe
from penstock.serving.process import LineFormatter, runner
from penstock.streamer.local import LocalBackend
from penstock.streamer.shared import protocol
from penstock.tracing import SpanRecord, Tracer, child_of
from penstock.types import BatchPart, Item, ItemResult, Sink, Trace

log = logging.getLogger("penstock.streamer")

MAX_CLIENTS: Final = 1024
DRAIN_S: Final = 10.0  # for accepted calls, after a signal
END_S: Final = 60  # then the kernel ends the process
RUNNING_ROWS: Final = 256  # of one client that may run besides two batches per worker
LOG_BYTES: Final = 2**20  # of each of the two log files
MAX_QUESTIONS: Final = 1000  # of one client that wait for their response
JOIN_S: Final = 10.0  # for the first message of a client
STALL_S: Final = 30.0  # in which a client takes no byte of its responses
REQUEST_BYTES: Final = 64 * 2**20  # shared memory of one client; larger payloads follow in the stream
REPLY_BYTES: Final = 64 * 2**20
JOIN_BYTES: Final = 2**10  # of the first message


class Session:
    """One client. Everything runs on the loop's thread."""

    def __init__(self, batcher: SharedBatcher, sock: Any) -> None:
        self._batcher = batcher
        self.guest = False
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[Ticket | None, int]] = {}  # ticket and rows of unanswered calls
        self._rows = 0
        self._requests: mmap.mmap | None = None  # the client's; None before it has joined
        self._replies: SlabPool | None = None
        self._sent: dict[int, Slab] = {}  # in the reply memory, until the client has read them
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = messages.MessageReader(protocol.ToBatcher, self._request_memory)
        self._timer = self._loop.call_later(JOIN_S, self.close)
        self._stall: asyncio.TimerHandle | None = None
        self._channel = Channel(
            self._loop,
            sock,
            self._on_frame,
            self.close,
            patient=True,
            drains=True,
            buffer=batcher.buffer,
            on_block=self._on_block,
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
            if ticket is not None:
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

    def _on_frame(self, frame: messages.Frame) -> None:
        if self not in self._batcher.sessions:  # it was closed by a frame of the same read
            return
        try:
            message = self._reader.read(frame)
            if isinstance(message, protocol.JoinMessage) != (self._requests is None):
                raise ValueError("a client joins once, before it calls")
            if isinstance(message, protocol.JoinMessage):
                self._join(message)
            elif isinstance(message, messages.AbandonBatch):
                self._abandon(message.id)
            else:
                for offset in message.free:
                    self._sent.pop(offset).release()
                if not isinstance(message, messages.FreeReplies):
                    self._call(message)
        except Exception:
            log.exception("client_broken: it is disconnected")
            self.close()

    def _join(self, message: protocol.JoinMessage) -> None:
        if message.version != protocol.VERSION:
            text = f"the batcher runs Penstock {protocol.VERSION}, this process {message.version}: restart all"
            self._channel.send(messages.write(messages.WorkerFailed(ConfigError(text))))
            self.close()
            return
        self.guest = message.guest
        self._timer.cancel()
        self._channel.decoder.max_bytes = messages.MAX_BYTES
        fds = [anonymous_file(REQUEST_BYTES), anonymous_file(REPLY_BYTES)]
        try:
            self._requests = mmap.mmap(fds[0], REQUEST_BYTES)
            self._replies = SlabPool(REPLY_BYTES, os.dup(fds[1]))
            welcome = b"".join(messages.write(self._batcher.welcome()))
            socket.send_fds(self._sock, [welcome], fds)  # the first message: the socket has room for it
        finally:
            for fd in fds:
                os.close(fd)

    def _call(self, message: protocol.CallMessage) -> None:
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
            item.payload = protocol.sealed_values(item.payload)
            self._rows += item.rows
            self._calls[call_id] = None, item.rows  # a response may come at once
            sink: Sink = partial(self._answer, call_id)
            if item.trace is not None:
                item.trace, sink = batcher.traced(self, item.trace, sink)
            ticket = batcher.backend.submit(batcher.model, None, item, sink)
            if call_id in self._calls:
                self._calls[call_id] = ticket, item.rows
        except PenstockError as e:
            self._answer(call_id, ItemResult(error=e.with_traceback(None)))

    def _abandon(self, call_id: int) -> None:
        """Confirms that the memory of the call is free, unless the response is already on its way."""
        if call_id in self._calls:
            if (ticket := self._calls[call_id][0]) is not None:
                ticket.cancel()
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
        outbox = messages.MessageWriter(self._replies)
        outbox.results([_QUESTION], [result])
        self._send_result(call_id, result, outbox)

    def _answer(self, call_id: int, result: ItemResult) -> None:
        if result.final:
            _, rows = self._calls.pop(call_id, (None, 0))
            self._rows -= rows
            outbox = messages.MessageWriter(self._replies)
            if result.error is None:  # errors are sealed with the models' own exceptions
                values = [value if type(value) is protocol.Sealed else protocol.seal(value) for value in result.body]
                result = ItemResult(protocol.put_values(outbox, values))
            self._send_result(call_id, result, outbox)

    def _send_result(self, call_id: int, result: ItemResult, outbox: messages.MessageWriter) -> None:
        if self not in self._batcher.sessions:
            return
        part = BatchPart(call_id, [result])
        for slab in outbox.slabs:
            self._sent[slab.offset] = slab
        message = messages.PartMessage(part, [], [])
        try:
            pieces = messages.write(message, outbox.buffers)
        except Exception as e:
            messages.sendable(part, e)
            pieces = messages.write(message)
        self._channel.send_soon(pieces)

    def send(self, message: protocol.LoadedMessage | protocol.SpanMessage) -> None:
        if self._requests is not None:
            self._channel.send_soon(messages.write(message))

    def _on_block(self) -> None:
        if self._stall is None:
            self._stall = self._loop.call_later(STALL_S, self._check_stall, self._channel.sent_bytes)

    def _check_stall(self, sent_bytes: int) -> None:
        self._stall = None
        if self._channel.blocked and self._channel.sent_bytes == sent_bytes:
            log.warning("client_stalled seconds=%g: it is disconnected", STALL_S)
            self.close()
        elif self._channel.blocked:
            self._on_block()

    def pause(self) -> None:
        """Reads no more calls: another batcher will."""
        self._channel.stop_reading()


_QUESTION = Item(None)


class SharedBatcher:
    """The clients of one model, and the backend that answers them. Sets `stop` when it is no longer needed.

    `path` is its socket.
    """

    def __init__(self, offer: protocol.Offer, listener: Any, path: str, stop: asyncio.Event) -> None:
        self._offer, self._path = offer, path
        self.model = str(offer.config.target)
        self._listener = listener
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        instances, size = offer.config.instances, offer.config.batching.max_batch_size
        max_queue = offer.config.batching.max_queue
        assert isinstance(instances, int)
        assert isinstance(size, int)
        assert max_queue is not None
        target = offer.packed_target()
        self._traced: Session | None = None  # which got the last result of a traced call
        self.backend = LocalBackend(
            self.model, offer.config, target, offer.sys_path, max_queue, offer.limits, log_level="INFO"
        )
        self.max_rows = max_queue + 2 * instances * size + RUNNING_ROWS
        self.sessions: set[Session] = set()
        self.buffer = bytearray(RECEIVE_BYTES)
        self._linger = self._loop.call_later(offer.linger_s, self._end_if_unused)
        self._loaded = self._loop.create_task(self._tell_when_loaded())
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # none is left
                return
            try:
                protocol.check_peer(sock)
                sock.setblocking(False)
                if len(self.sessions) >= MAX_CLIENTS:
                    full = QueueFull(f"{MAX_CLIENTS} processes share this batcher, the most that can")
                    sock.send(b"".join(messages.write(messages.WorkerFailed(full))))
                    sock.close()
                    continue
                self._linger.cancel()
                self.sessions.add(Session(self, sock))
            except (ConfigError, OSError) as e:
                log.warning("client_refused error=%s", e)
                sock.close()

    def left(self, session: Session) -> None:
        self.sessions.discard(session)
        if not self.sessions:
            self._linger.cancel()
            self._linger = self._loop.call_later(self._offer.linger_s, self._end_if_unused)
        elif all(each.guest for each in self.sessions):
            newest = protocol.socket_paths(self._path[: -1 - protocol.IDENTITY])[:1]  # none: this batcher ends
            if newest and newest != [self._path]:
                self._stop.set()  # the guests go to the batcher of the newer code or settings

    def _end_if_unused(self) -> None:
        self._accept()  # a client may have come just now
        if not self.sessions:
            self._stop.set()

    def welcome(self) -> protocol.WelcomeMessage:
        offer = self._offer
        most = 2 * offer.limits.max_queue_bytes
        idempotent = offer.config.batching.idempotent
        loading = not self._loaded.done()
        return protocol.WelcomeMessage(
            os.getpid(), REQUEST_BYTES, REPLY_BYTES, self.max_rows, most, idempotent, loading
        )

    async def _tell_when_loaded(self) -> None:
        """Tells all clients once that the model is loaded: a timeout then need not name the load as its reason."""
        with suppress(PenstockError):  # callers get it
            await self.backend.ready()
        for session in self.sessions:
            session.send(protocol.LoadedMessage())

    def traced(self, session: Session, parent: Trace, sink: Sink) -> tuple[Trace, Sink]:
        """The span of a call in the batcher, and its sink. Nothing is observed before the first one."""
        if self._traced is None:
            self._traced = session
            self.backend.observe(TraceObserver(Tracer(self._emit)))

        def answered(result: ItemResult) -> None:
            self._traced = session
            sink(result)

        return child_of(parent), answered

    def _emit(self, span: SpanRecord) -> None:
        """Sends a span to a client, whose process exports it: it follows the result in the same write."""
        if (session := self._traced) is not None and session in self.sessions:
            session.send(protocol.SpanMessage(span))

    async def statistics(self) -> dict[str, object]:
        """The statistics of the model, and the number of clients."""
        return {**self.backend.statistics(self.model), "clients": len(self.sessions), "pid": os.getpid()}

    async def close(self) -> None:
        """Answers accepted calls for a while, and ends the workers. Clients send what it did not read to another.
        Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._linger.cancel()
        self._loaded.cancel()
        for session in self.sessions:
            session.pause()
        await self.backend.close(DRAIN_S if self.sessions else 0.0)
        await asyncio.sleep(0)  # the last answers are sent
        for session in list(self.sessions):
            session.close()


async def _serve(offer: protocol.Offer, listener: Any, path: str) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    batcher = SharedBatcher(offer, listener, path, stop)
    log.info("batcher_ready path=%s pid=%d", path, os.getpid())
    await stop.wait()
    signal.alarm(END_S)  # whatever hangs, the next batcher need not wait longer
    with suppress(FileNotFoundError):
        os.unlink(path)
    await batcher.close()
    log.info("batcher_ended path=%s pid=%d", path, os.getpid())


class _LogFile(RotatingFileHandler):
    """The batcher's log file; this process also writes to it."""

    def doRollover(self) -> None:
        super().doRollover()
        assert self.stream is not None
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)


def _received_offer(sock: socket.socket) -> protocol.Offer:
    decoder = messages.FrameDecoder()
    while data := sock.recv(2**16):
        for frame in decoder.feed(data):
            return protocol.read_offer(frame.head)
    sys.exit("the process that started this batcher has ended")


def main(arguments: list[str]) -> None:
    """Argument: path of the socket."""
    (path,) = arguments
    if os.fork():
        os._exit(0)  # no client is its parent: a web server that counts its children would miscount
    os.setsid()
    os.closerange(protocol.STARTER_FD + 1, os.sysconf("SC_OPEN_MAX"))  # such as the listener of a web server
    os.set_inheritable(protocol.STARTER_FD, False)
    with socket.socket(fileno=protocol.STARTER_FD) as starter:
        offer = _received_offer(starter)
        alive = os.open(f"{path}.alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(alive, fcntl.LOCK_EX)  # until this process ends
        os.ftruncate(alive, 0)
        os.write(alive, json.dumps(offer.settings).encode())  # for those who start another one
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        handler = _LogFile(f"{path}.log", maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
        handler.setFormatter(LineFormatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        try:
            listener = protocol.listening(path)
        except ConfigError as e:
            log.error("not_listening error=%s", describe(e))
            raise
        starter.sendall(protocol.READY)
    runner()(_serve(offer, listener, path))


if __name__ == "__main__":
    main(sys.argv[1:])
