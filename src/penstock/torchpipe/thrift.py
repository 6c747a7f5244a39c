"""The Thrift listener: connections on the engine's event loop, with the timer and memory queue of the HTTP listener."""

import asyncio
import logging
import ssl
from typing import Any, Final

from msgspec import structs

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend, Buffer, Ticket
from penstock.errors import BadRequest, ModelNotReady, PenstockError
from penstock.serving.http.intake import BIG_BYTES
from penstock.serving.http.listener import INF, Listener
from penstock.serving.http.responses import log_failure, status_of
from penstock.serving.http.sockets import SocketServer, readable
from penstock.torchpipe import thrift_protocol as thrift
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.torchpipe")

MORE_BYTES: Final = 4096  # for fields after the data of a call
AHEAD_BYTES: Final = 64 * 1024  # of later calls during a running one; beyond that the socket is not read


class ThriftServer:
    """Serves `model` of `backend`. Call it on one event loop's thread."""

    def __init__(
        self, backend: Backend, model: str, limits: LimitsConfig, *, ssl: ssl.SSLContext | None = None
    ) -> None:
        self.backend = backend
        self.model = model
        self.listener = Listener(backend, structs.replace(limits, idle_timeout_s=limits.thrift_idle_timeout_s))
        self.most = limits.max_body_bytes
        self._server = SocketServer(self.listener, lambda: ThriftConnection(self), b"", ssl)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """The bound address. Raises ConfigError if it cannot be bound."""
        return await self._server.start(host, port, "server.thrift_port")

    async def close(self, drain_s: float) -> None:
        """Accepts no more connections, answers the calls that have been sent, and drops the rest after `drain_s`."""
        await self._server.close(drain_s)

    def ready(self) -> bool:
        return not self.listener.closing and self.backend.ready()


class ThriftConnection(asyncio.Protocol):
    """One client's connection: calls one after the other, framed or not.

    It has more than 15 attributes because three sides use it: the event loop (bytes and flow), the listener (deadline,
    memory and writing), and the running call.
    """

    transport: asyncio.Transport

    def __init__(self, server: ThriftServer) -> None:
        self._server = server
        self._clock = server.listener.clock
        self._arrived = bytearray()
        self._call: thrift.ThriftCall | None = None  # the arriving call
        self._framed: bool | None = None  # None: unknown before the first bytes
        self._running: thrift.ThriftCall | None = None
        self._ticket: Ticket | None = None
        self._memory: Buffer | None = None  # for large data, from its announcement until it is submitted
        self._paused = False
        self._starved = False  # waits in the memory queue
        self._choked = False  # the client does not read its response
        self._ending = False
        self.deadline = INF
        self.unread, self.stuck_s = 0, 0.0

    # ---- called by the event loop

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if not self._server.listener.add(self):
            self._ending = True
            transport.abort()
            return
        self.deadline = self._clock.idle_at

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = True
        if self._ticket is not None:
            self._ticket.cancel()
        self._running = self._ticket = self._call = None
        self._release_memory()
        self._server.listener.remove(self)
        self._server.listener.memory.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self._arrived += data
        if self._running is None and not self._choked:
            self._advance()
        elif len(self._arrived) > AHEAD_BYTES:
            self._pause()

    def pause_writing(self) -> None:
        self._choked = True
        self._pause()
        self.deadline = self._clock.write_at

    def resume_writing(self) -> None:
        self._choked = False
        if not self._ending:
            self._next()

    # ---- called by the listener

    def abort(self) -> None:
        """Drops the connection without a message, because the client may be in the middle of a call."""
        self.transport.abort()

    def expire(self) -> None:
        """Drops the connection, unless a call has arrived while the server closes."""
        if not (self._server.listener.closing and self._is_idle() and readable(self.transport)):
            self.abort()

    def _is_idle(self) -> bool:
        return self._running is None and self._call is None and not self._choked

    def check_writing(self, now: float) -> tuple[int, int]:
        """Only counts: `deadline` also covers clients that do not read."""
        return self.transport.get_write_buffer_size(), len(self._arrived)

    def close_soon(self) -> None:
        """Closes after the last call that has been sent: Thrift has no way to announce the end."""
        if self._is_idle():
            self.deadline = self._clock.idle_at

    def reserve(self) -> bool:
        """Continues the call that waits for memory; False while there is none."""
        self._starved = False
        if self._running is not None and self._running.data is not None and self._running.uuid is not None:
            self._submit(*self._running.data)
        elif self._running is None and self._call is not None:
            self.deadline = self._clock.body_at
            self._advance()
            if self._memory is not None:
                self._read_on()
        return not self._starved

    # ---- calls

    def _advance(self) -> None:
        """Starts the arriving call if it is complete, otherwise sets the deadline of its rest."""
        if not self._arrived:
            self.deadline = self._clock.idle_at
            return
        if self._call is None:
            self._call = thrift.ThriftCall()
            self.deadline = self._clock.body_at
        try:
            complete = len(self._arrived) >= self._call.need and self._read(self._call)
            if not complete:
                self._reserve(self._call)
        except PenstockError as error:  # the beginning of the next call is unknown
            self._ending = True
            self._write(thrift.exception(self._call, thrift.PROTOCOL_ERROR, _text(error)))
            self._shut()
            return
        if complete:
            self._begin(self._call)

    def _read(self, call: thrift.ThriftCall) -> bool:
        arrived, most = self._arrived, self._server.most
        if self._framed is None:
            if len(arrived) < 6:
                call.need = 6
                return False
            self._framed = thrift.is_framed(arrived)
        if not self._framed:
            return call.read(arrived, 0, most)
        size = int.from_bytes(arrived[:4], "big")
        if size > most + thrift.HEAD_BYTES:
            raise BadRequest(f"found a frame of {size} bytes, at most {most} are accepted")
        if len(arrived) < 4 + size:
            call.need = 4 + size
            return False
        if not call.read(arrived, 4, most) or call.end != 4 + size:
            raise BadRequest(f"found a frame of {size} bytes that is not one whole message")
        return True

    def _reserve(self, call: thrift.ThriftCall) -> None:
        """Allocates or waits for the memory of a large call before it arrives.

        The pool therefore limits the received bytes, however many clients send.
        """
        most = self._server.most
        reserved = 0 if self._memory is None else len(self._memory.view)
        if min(call.need, most) > max(BIG_BYTES, reserved):
            self._release_memory()
            self._memory = self._allocate(min(call.need + MORE_BYTES, most))
            if self._memory is None:
                self.deadline = INF
                self._starve()

    def _allocate(self, nbytes: int) -> Buffer | None:
        """Shared memory; None while there is too little, or other connections wait for it."""
        return self._server.backend.allocate(nbytes) if self._server.listener.memory.is_next(self) else None

    def _starve(self) -> None:
        """Reads nothing until there is memory."""
        self._starved = True
        self._pause()
        self._server.listener.memory.add(self)

    def _begin(self, call: thrift.ThriftCall) -> None:
        """Answers or submits a call. Bytes of later calls stay in the buffer."""
        self.deadline = INF
        self._running = call
        if call.kind != thrift.CALL:
            self._fail(thrift.INVALID_MESSAGE_TYPE, f"found a message of type {call.kind}, expected a call (1)")
        elif call.method == b"ping":
            if self._server.ready():
                self._finish(thrift.reply(call, None))
            else:
                self._reject(ModelNotReady("the server is loading or draining"))
        elif call.method != b"infer_batch":
            name = call.method[:100].decode("utf-8", "replace")
            self._fail(thrift.UNKNOWN_METHOD, f"unknown method '{name}', expected ping or infer_batch")
        elif call.data is None or call.uuid is None:
            missing = "data" if call.data is None else "uuid"
            self._fail(thrift.PROTOCOL_ERROR, f"bad_request: params has no {missing}, which is required")
        else:
            self._submit(*call.data)

    def _submit(self, start: int, end: int) -> None:
        try:
            payload: Any = self._payload(start, end)
            if payload is None:
                self._starve()
                return
            item = Item(payload, "thrift", request_id=self._request_id())
            ticket = self._server.backend.submit(self._server.model, None, item, self._answered)
        except PenstockError as error:
            self._reject(error)
        except Exception:
            log.exception("event=bug where=submit consequence=answered_with_an_error")
            self._reject(PenstockError("internal error"))
        else:
            if self._running is not None:
                self._ticket = ticket

    def _request_id(self) -> str:
        """The UUID of the running call, "" for one that must not be logged."""
        uuid = (self._running.uuid if self._running is not None else None) or b""
        return uuid.decode() if uuid.isascii() and uuid.decode().isprintable() and len(uuid) <= 128 else ""

    def _payload(self, start: int, end: int) -> Any:
        """The data as bytes, or in shared memory; None if there is no memory."""
        with memoryview(self._arrived) as view:
            if end - start <= BIG_BYTES:
                return bytes(view[start:end])
            buffer, self._memory = self._memory or self._allocate(end - start), None
            if buffer is not None:
                buffer.shrink(end - start)
                buffer.view[:] = view[start:end]
            return buffer

    def _release_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()

    # ---- responses

    def _answered(self, result: ItemResult) -> None:
        """The sink. It ignores partial results, which a Thrift response cannot carry."""
        if not result.final or self._running is None:
            return
        if result.error is not None:
            self._reject(result.error)
        elif not result.body:
            self._fail(thrift.INTERNAL_ERROR, "bad_output: the model streams its response, which Thrift cannot carry")
        else:
            self._finish(thrift.reply(self._running, bytes(result.body)))

    def _reject(self, error: PenstockError) -> None:
        status = status_of(error)
        if status >= 500:
            log_failure((self._server.model, None), self._request_id(), status, error)
        kind = thrift.PROTOCOL_ERROR if isinstance(error, BadRequest) else thrift.INTERNAL_ERROR
        self._fail(kind, _text(error))

    def _fail(self, kind: int, text: str) -> None:
        assert self._running is not None
        self._finish(thrift.exception(self._running, kind, text))

    def _finish(self, message: bytes) -> None:
        """Answers the running call, and continues with bytes that arrived during it."""
        call, self._running, self._call, self._ticket = self._running, None, None, None
        assert call is not None
        del self._arrived[: call.end]
        self._release_memory()
        self._write(message)
        closing = self._server.listener.closing and not self._arrived and not readable(self.transport)
        if self._ending or closing:
            self._ending = True
            self._shut()
        elif not self._choked:
            self._next()

    def _shut(self) -> None:
        """Closes after all bytes are sent. A client that does not read is dropped after the write timeout."""
        self.deadline = self._clock.write_at
        self.transport.close()

    def _write(self, message: bytes) -> None:
        self.transport.write(len(message).to_bytes(4, "big") + message if self._framed else message)

    def _next(self) -> None:
        """Starts the next call in the loop's next pass, because many calls that arrived together would nest."""
        self._read_on()
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._resume)
        else:
            self.deadline = self._clock.idle_at

    def _resume(self) -> None:
        if self._running is None and not self._choked and not self._ending:
            self._advance()

    def _read_on(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()


def _text(error: PenstockError) -> str:
    return f"{error.code}: {error.message}"
