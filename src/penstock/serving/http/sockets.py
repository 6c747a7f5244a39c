"""Listening sockets: bind errors that name the key to change, Unix sockets, and a TLS port that refuses plain HTTP."""

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import ssl
import stat
import struct
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, cast

from penstock.config.checks import UNIX
from penstock.errors import ConfigError, ListenFailed
from penstock.serving.http.listener import LINGER_S, SILENT_S, Listener

log = logging.getLogger("penstock.serving")

HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection; no HTTP method begins with it
BACKLOG: Final = 2048  # a choice, above the 100 of asyncio: a burst of clients waits instead of repeating its SYN
_NO_FAMILY: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
PORT_TRIES: Final = 10  # a port that is free in one family may be in use in the other
_SO_ATTACH_FILTER: Final = 26  # of Linux
_NO_SYNS: Final = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 2**32 - 1))
PAUSE_S: Final = 1.0  # pause in accepting when the system has no room for another connection


def free_path(path: str, key: str) -> None:
    """Removes the socket that an ended listener left at `path`. Raises ConfigError if something else is there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as exc:
        raise path_error(path, exc, key) from None
    if not stat.S_ISSOCK(mode):
        raise ListenFailed(
            f"cannot listen on unix:{path}: a file that is not a socket is there; choose another with {key}"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as exc:
            raise path_error(path, exc, key) from None
    raise ListenFailed(f"cannot listen on unix:{path}: another process listens there; choose another with {key}")


def path_error(path: str, exc: Exception, key: str) -> ConfigError:
    """Why no socket could be made at `path`, and which key to change."""
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return ListenFailed(f"cannot listen on unix:{path}: {reason.lower()}; choose another path with {key}")


class PortInUse(ConfigError):
    """Another socket listens at the address."""


def bind_error(host: str, port: int, exc: Exception, key: str) -> ConfigError:
    """Why `host:port` could not be bound, and which key to change; `key` is the key of the port."""
    if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        return PortInUse(
            f"cannot listen on {host}:{port}: the port is in use; choose another with {key} (0 takes a free one)"
        )
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    reason = reason.partition(" (while")[0]  # Python's socket repeats the address
    if isinstance(exc, PermissionError):
        return ListenFailed(f"cannot listen on {host}:{port}: {reason.lower()}; choose a port above 1023 with {key}")
    return ListenFailed(
        f"cannot listen on {host}:{port}: {reason.lower()}; choose another address with {key.replace('port', 'host')}"
    )


async def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, all on the same port. Raises OSError, UnicodeError.

    "::" and "" mean all addresses of both families, as in uvicorn and Go. Each family has a socket of its own: IPv4
    clients keep their addresses, and a machine without one of the families serves the other.
    """
    every = host in ("", "::")
    kind, loop = socket.SOCK_STREAM, asyncio.get_running_loop()
    found = await loop.getaddrinfo(None if every else host, port, type=kind, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    # the first one is shown, and chooses a free port
    ordered = sorted(addresses, key=lambda each: each[0] != socket.AF_INET6) if every else list(addresses)
    for left in reversed(range(1 if port else PORT_TRIES)):
        try:
            return _listening(ordered, port)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or not left:
                raise
    raise AssertionError("the last try returns or raises")


def _listening(addresses: Sequence[tuple[int, Any]], port: int) -> list[socket.socket]:
    """A socket for each address that this machine has, all on one port. Raises OSError."""
    sockets: list[socket.socket] = []
    for family, (host, _, *rest) in addresses:
        try:
            sockets.append(socket.create_server((host, port, *rest), family=family, backlog=BACKLOG))
        except OSError as exc:
            if exc.errno in _NO_FAMILY and (sockets or family != addresses[-1][0]):
                continue
            for each in sockets:
                each.close()
            raise
        sockets[-1].setblocking(False)
        # What is accepted inherits it. asyncio sets it only on sockets that name their protocol, which these do not.
        # Without it a client that sends two requests at once waits 40 ms for the second response.
        sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        port = sockets[0].getsockname()[1]
    return sockets


def readable(transport: asyncio.Transport) -> bool:
    """Whether bytes, or the end of the stream, have arrived that the event loop has not read."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def stop_accepting(
    server: asyncio.Server, connect: Callable[[], asyncio.BaseProtocol], tls: dict[str, Any], wait_s: float
) -> None:
    """Closes the server, after `connect` has received every connection whose client is connected.

    TLS handshakes get at most `SILENT_S`, or `wait_s` if that is less.
    """
    loop = asyncio.get_running_loop()
    queues = [socket.socket(fileno=os.dup(listening.fileno())) for listening in server.sockets]
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())  # asyncio must accept no more: after `close` it drops what it accepts
    await asyncio.sleep(0)  # until asyncio has made the connections that it has accepted
    server.close()
    waiting = [connection for queue in queues for connection in last_accepted(queue)]
    admissions: list[Coroutine[Any, Any, object]] = [
        loop.connect_accepted_socket(connect, connection, **tls) for connection in waiting
    ]
    if tls:
        admissions.append(asyncio.sleep(min(SILENT_S, wait_s)))  # for handshakes that have begun
    if admissions:
        _, late = await asyncio.wait(map(loop.create_task, admissions), timeout=min(SILENT_S, wait_s))
        for task in late:
            task.cancel()


def last_accepted(listening: socket.socket) -> list[socket.socket]:
    """Closes a listening socket. Returns the connections that waited in its queue."""
    found: list[socket.socket] = []
    with listening:
        if sys.platform == "linux" and listening.family != socket.AF_UNIX:
            _drop_syns(listening)  # otherwise a client could connect between the last accept and the close
        listening.setblocking(False)
        with contextlib.suppress(OSError):  # BlockingIOError: the queue is empty
            while True:
                connection, _ = listening.accept()
                connection.setblocking(False)
                found.append(connection)
    return found


def _drop_syns(listening: socket.socket) -> None:
    """Lets the system ignore new clients; they repeat their request, and learn that the port is closed."""
    import ctypes

    # classic BPF: load byte 13 of the TCP header (flags), mask SYN and ACK, return 0 bytes if only SYN is set
    program = b"".join(struct.pack("=HBBI", *each) for each in _NO_SYNS)
    memory = ctypes.create_string_buffer(program, len(program))
    with contextlib.suppress(OSError):
        fprog = struct.pack("HP", len(_NO_SYNS), ctypes.addressof(memory))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


class TlsGate:
    """Accepts on its own sockets. A connection that begins with a TLS handshake goes to the server's protocol, any
    other receives `refusal`. A connection that sends nothing is dropped after `header_timeout_s`.
    """

    def __init__(
        self, listener: Listener, connect: Callable[[], asyncio.BaseProtocol], tls: dict[str, Any], refusal: bytes
    ) -> None:
        self._listener = listener
        self._connect = connect
        self._tls = tls
        self._refusal = refusal
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None  # in accepting
        self._sockets: list[socket.socket] = []
        self.waiting = 0  # connections that have not sent a byte yet

    def open(self, sockets: list[socket.socket]) -> None:
        """Accepts connections on listening sockets, which it then owns."""
        self._sockets = sockets
        self._pause = None
        for each in sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    async def close(self, wait_s: float = 0.0) -> None:
        """Accepts the connections in the queues and no more; drops those that are silent for `SILENT_S` or `wait_s`."""
        if self._pause is not None:
            self._pause.cancel()
        while self._sockets:
            asyncio.get_running_loop().remove_reader(self._sockets[-1])
            for connection in last_accepted(self._sockets.pop()):
                self._take(connection)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=min(SILENT_S, wait_s))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        """Accepts one connection. A task would lose it if it were cancelled."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as exc:
            self._listener.warn(repr(exc))
            for each in self._sockets:
                asyncio.get_running_loop().remove_reader(each)
            self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self.open, self._sockets)
            return
        connection.setblocking(False)
        self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        if self._listener.full(self.waiting):
            connection.close()
            return
        self.waiting += 1
        task = asyncio.get_running_loop().create_task(self._admit(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        taken = False
        try:
            async with asyncio.timeout(self._listener.config.header_timeout_s):
                first = await _first_byte(connection)
            if first == HANDSHAKE:
                await loop.connect_accepted_socket(self._connect, connection, **self._tls)
                taken = True
            elif first:
                transport, refused = await loop.connect_accepted_socket(lambda: _Refusal(self._refusal), connection)
                taken = True
                try:
                    await refused.gone
                finally:
                    transport.abort()
        except OSError as exc:  # ssl.SSLError and TimeoutError are some
            log.debug("event=no_tls error=%r consequence=connection_dropped", exc)
        finally:
            self.waiting -= 1
            if not taken:
                connection.close()


async def _first_byte(connection: socket.socket) -> bytes:
    """The first byte, without consuming it; empty if the client left. Raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            return connection.recv(1, socket.MSG_PEEK)
        readable = asyncio.Event()
        watched = connection.dup()  # a watcher may outlive its descriptor number: the connection keeps its own
        try:
            loop.add_reader(watched, readable.set)
            await readable.wait()
        finally:
            loop.remove_reader(watched)
            watched.close()


class _Refusal(asyncio.Protocol):
    """Writes the refusal; `gone` is done when the client left or LINGER_S is over."""

    def __init__(self, refusal: bytes) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refusal = refusal
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        transport.write(self._refusal)
        transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


TLS_SHUTDOWN_S: Final = 2.0  # a choice: a client that does not answer close_notify must not hold up a shutdown


class SocketServer:
    """Accepts connections within the limits of `listener`, each with the protocol that `connect` makes.

    `no_tls` is what a client of a TLS port receives that does not begin a handshake. All calls run on one event loop's
    thread.
    """

    def __init__(
        self, listener: Listener, connect: Callable[[], asyncio.BaseProtocol], no_tls: bytes, tls: ssl.SSLContext | None
    ) -> None:
        self.listener = listener
        self.tls = tls
        self._connect = connect
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {
                "ssl": tls,
                "ssl_handshake_timeout": listener.config.header_timeout_s,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        # an event loop's own TLS server counts a connection only after its handshake: silent ones would be unbounded
        self._gate = TlsGate(listener, connect, self._tls, no_tls) if tls else None
        self._path: str | None = None
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int, key: str = "server.port") -> tuple[str, int]:
        """Binds and returns the actual address; the host `unix:PATH` is a Unix socket.

        Raises ConfigError, naming `key`, if it cannot.
        """
        if host.startswith(UNIX):
            await self.start_unix(host.removeprefix(UNIX), key[:-4] + "host" if key.endswith("port") else key)
            return host, 0
        loop = self._begin(key)
        try:
            sockets = await listening_sockets(host, port)
        except (OSError, UnicodeError) as exc:
            raise bind_error(host, port, exc, key) from None
        bound = sockets[0].getsockname()
        if self._gate is not None:
            self._gate.open(sockets)
        else:
            self._servers = [await loop.create_server(self._connect, sock=s, backlog=BACKLOG) for s in sockets]
        return str(bound[0]), int(bound[1])

    async def start_unix(self, path: str, key: str = "the address") -> None:
        """Listens on a Unix socket; `close` removes it. Raises ConfigError, naming `key`, if it cannot."""
        loop = self._begin(key)
        free_path(path, key)
        try:
            self._servers = [await loop.create_unix_server(self._connect, path, backlog=BACKLOG, **self._tls)]
        except (OSError, ValueError) as exc:
            raise path_error(path, exc, key) from None
        self._path = path

    def _begin(self, key: str) -> asyncio.AbstractEventLoop:
        self.listener.port = key
        self.listener.clock.tick()
        return asyncio.get_running_loop()

    async def close(self, drain_s: float) -> None:
        """Accepts the waiting connections, then no more, and answers every request that clients have sent.

        Drops the rest after `drain_s`.
        """
        listener = self.listener
        end = listener.now() + drain_s
        listener.start_closing(drain_s)
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for server in self._servers:
            await stop_accepting(server, self._connect, self._tls, drain_s)
        if self._gate is not None:
            await self._gate.close(drain_s)
        await listener.drain(max(0.0, end - listener.now()))
        if listener.tasks:
            _, left = await asyncio.wait(listener.tasks, timeout=max(0.0, end - listener.now()))
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    @property
    def connections(self) -> int:
        return len(self.listener.connections)
