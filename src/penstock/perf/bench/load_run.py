"""What the loops of load have in common: connections, answers, and how a run begins and ends."""

from __future__ import annotations

import asyncio
import errno
import math
import resource
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, cast

import httptools

from penstock.client.endpoint import Endpoint
from penstock.client.errors import Unreachable
from penstock.errors import ConfigError

LOST: Final = 0  # the connection ended before the answer was there
TIMED_OUT: Final = -1
REFUSED: Final = -2  # no connection to the server
WRONG: Final = -3  # a 2xx that the check did not take
UNDER_WAY: Final = -4  # not answered yet when the run was ended early: neither good nor an error


class Samples:
    """One entry a request, in the order in which they were to be sent; filled while the run goes on.

    `intended_s` from the start; `late_s`: how much later the generator came to it (0 in a closed loop); `latency_s`
    from the intended time, infinite without an answer, and of a request that timed out how long it was waited for;
    `status` of HTTP, or one of the constants above; `number` of the request in the list. `seconds`: the counted time.
    `cpu_s`: what this process took in the `busy_s` until the last was sent. `waited`: how many found no free
    connection. `starved`: how often this machine had no file or port for one more. `first_error`: status and beginning
    of the body, or what was wrong.
    `ended`: why the run was ended early, if it was: the server gone, or cancelled.
    """

    def __init__(self) -> None:
        self.intended_s: array[float] = array("d")
        self.late_s: array[float] = array("d")
        self.latency_s: array[float] = array("d")
        self.status: array[int] = array("i")
        self.number: array[int] = array("i")
        self.seconds = 0.0
        self.cpu_s = self.busy_s = 0.0
        self.waited = self.starved = 0
        self.first_error: tuple[int, bytes] | None = None
        self.ended: Literal["", "gone", "cancelled"] = ""


class LoadConnection(asyncio.Protocol):
    """One request at a time."""

    __slots__ = ("_body", "_data", "_parser", "_run", "_to_end", "index", "transport")

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self.index = -1  # of the request under way
        self._body: list[bytes] = []
        self._data = b""
        self._to_end = False  # the answer ends with its connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, index: int) -> None:
        """Sends the request of that index; free connections only."""
        self.index = index
        run = self._run
        self.transport.write(run.requests[run.samples.number[index]])

    def data_received(self, data: bytes) -> None:
        self._data = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._run.broken(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(b"what came is no HTTP/1 answer: " + data[:80])
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """The head of an answer is there."""
        if not self._parser.should_keep_alive():
            head = self._data.partition(b"\r\n\r\n")[0].lower()
            self._to_end = b"\ncontent-length:" not in head and b"\ntransfer-encoding:" not in head

    def on_body(self, body: bytes) -> None:
        """A piece of an answer."""
        if len(self._body) < self._run.pieces:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """An answer is whole."""
        status = self._parser.get_status_code()
        if status < 200:  # interim
            return
        index, self.index = self.index, -1
        run = self._run
        if index < 0 or run.over:  # an answer that nobody asked for, or waits for any more
            self.transport.abort()
            return
        run.answer(index, status, self._body)
        self._body.clear()
        if self._parser.should_keep_alive():
            run.free(self)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        index, self.index = self.index, -1
        run = self._run
        if self._to_end and error is None and index >= 0 and not run.over:
            run.answer(index, self._parser.get_status_code(), self._body)
            index = -1
        run.lost(self, index)

    def _fail(self, why: bytes) -> None:
        index, self.index = self.index, -1
        if index >= 0 and not self._run.over:
            self._run.fail(index, LOST, why)


MOST_CONNECTIONS: Final = 8000
SPARE_FILES: Final = 100  # open files that are not connections
CONNECT_S: Final = 5.0
GONE_S: Final = 2.0  # refused for so long, without any answer: the server is not there any more
TICK_S: Final = 0.1
LEAD_S: Final = 0.02  # from when an open loop is ready to its first time
FIRST_ERROR_BYTES: Final = 500
FIRST_PIECES: Final = 4  # of an answer that nobody checks: enough to show it if it is the first error
_OURS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)  # the server has no part in these

Check = Callable[[int, int, bytes], bool]
"""Called with the number of the request in the list, the status and the body of each answer; good are those of 2xx for
which it is true."""

Progress = Callable[[float, int], None]
"""Called ten times a second with the seconds since the start and how many requests were answered, or failed."""


class LoadInput(NamedTuple):
    """What every run is given; see `load.open_loop`."""

    endpoint: Endpoint
    requests: Sequence[bytes]
    check: Check | None
    on_progress: Progress | None
    samples: Samples


class LoadRun(ABC):
    """What both loops do: connections, answers, and how a run begins and ends."""

    def __init__(self, work: LoadInput) -> None:
        self.requests = work.requests
        self.samples = work.samples
        self.pieces = FIRST_PIECES if work.check is None else math.inf  # kept of an answer
        self.start = 0.0  # 0: not yet
        self.over = False
        self.most = most_connections()
        self.under_way = 0
        self._endpoint = work.endpoint
        self._check = work.check
        self._on_progress = work.on_progress
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._address = (work.endpoint.host, work.endpoint.port)
        self._all: set[LoadConnection] = set()
        self._idle: list[LoadConnection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._cpu_start_s = self._busy_start_s = 0.0
        self._heard_s = 0.0  # when the last answer came, whatever it said

    async def run(self, connections: int) -> Samples:
        """The samples, when all is over."""
        if connections > self.most:
            if self.most == MOST_CONNECTIONS:
                raise ConfigError(f"{connections} connections: expected at most {self.most} of one generator")
            raise ConfigError(
                f"{connections} connections take as many open files, found a limit of {self.most + SPARE_FILES}; "
                "raise it (ulimit -n), or ask for fewer"
            )
        try:
            await self._open(connections)
            self._cpu_start_s, self._busy_start_s = time.process_time(), time.perf_counter()
            self.start = self._busy_start_s + LEAD_S
            self._ticker = self._loop.call_later(TICK_S, self._tick)
            self.begin()
            await self._done
        except asyncio.CancelledError:
            self.samples.ended = "cancelled"
            raise
        finally:
            self._close()
            await asyncio.sleep(0)  # the connections end
        return self.samples

    @abstractmethod
    def begin(self) -> None:
        """Sends, or sets out to."""

    @abstractmethod
    def free(self, connection: LoadConnection) -> None:
        """A connection has no request under way."""

    @abstractmethod
    def not_connected(self, status: int) -> None:
        """A connection that was asked for did not come about."""

    @abstractmethod
    def replace(self) -> None:
        """A connection ended."""

    @abstractmethod
    def finish(self) -> None:
        """The run came to its own end."""

    def release(self) -> None:  # noqa: B027 - for who holds something
        """Nothing is sent any more."""

    async def _open(self, connections: int) -> None:
        try:
            first = await self._connect()
        except OSError as exc:
            raise Unreachable(f"no connection to {self._endpoint.url}: {exc or type(exc).__name__}") from None
        self._address = first.transport.get_extra_info("peername")[:2]  # a name is looked up once
        self._idle.append(first)
        await asyncio.gather(*(self._connected() for _ in range(connections - 1)))

    async def _connect(self) -> LoadConnection:
        tls = self._endpoint.tls
        name = self._endpoint.host if tls else None
        async with asyncio.timeout(CONNECT_S):
            _, made = await self._loop.create_connection(
                lambda: LoadConnection(self), *self._address, ssl=tls, server_hostname=name
            )
        self._all.add(made)
        return made

    async def _connected(self) -> None:
        try:
            made = await self._connect()
        except OSError as exc:
            self.samples.starved += exc.errno in _OURS
            if self.start and not self.over:
                self.not_connected(TIMED_OUT if isinstance(exc, TimeoutError) else REFUSED)
            return
        if self.over:
            made.transport.abort()
        elif self.start:
            self.free(made)
        else:
            self._idle.append(made)

    def one_more(self) -> None:
        """Sets out to open a connection."""
        task = self._loop.create_task(self._connected())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def add(self, intended_s: float, late_s: float) -> int:
        """The index of a new request."""
        samples = self.samples
        index = len(samples.status)
        samples.intended_s.append(intended_s)
        samples.late_s.append(late_s)
        samples.latency_s.append(math.inf)
        samples.status.append(UNDER_WAY)
        samples.number.append(index % len(self.requests))
        self.under_way += 1
        return index

    def answer(self, index: int, status: int, body: list[bytes]) -> None:
        """A request was answered."""
        samples = self.samples
        self._heard_s = now_s = time.perf_counter() - self.start
        samples.latency_s[index] = now_s - samples.intended_s[index]
        self.under_way -= 1
        good = 200 <= status < 300
        if self._check is not None and not self._check(samples.number[index], status, b"".join(body)) and good:
            good, samples.status[index] = False, WRONG
        else:
            samples.status[index] = status
        if not good:
            self._failed(status, body)

    def fail(self, index: int, status: int, why: bytes = b"") -> None:
        """A request was not answered."""
        samples = self.samples
        samples.status[index] = status
        if status == TIMED_OUT:
            samples.latency_s[index] = time.perf_counter() - self.start - samples.intended_s[index]
        self.under_way -= 1
        self._failed(status, [why])

    def _failed(self, status: int, body: list[bytes]) -> None:
        if self.samples.first_error is None:
            self.samples.first_error = (status, b"".join(body)[:FIRST_ERROR_BYTES])
        if status == REFUSED and time.perf_counter() - self.start - self._heard_s > GONE_S:
            self.end("gone")

    def lost(self, connection: LoadConnection, index: int) -> None:
        """A connection ended, with the request `index` under way unless that is negative."""
        if self.over:
            return
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if index >= 0:
            self.fail(index, LOST)
        if self.start:
            self.replace()

    def sent_all(self) -> None:
        """The generator's work is told here: afterwards it only waits."""
        self.samples.cpu_s = time.process_time() - self._cpu_start_s
        self.samples.busy_s = time.perf_counter() - self._busy_start_s

    def end(self, why: Literal["", "gone"] = "") -> None:
        """The run is over."""
        if not self.over:
            self.over = True
            self.samples.ended = why
            self._done.set_result(None)

    def broken(self, error: BaseException) -> None:
        """The check, or the run itself, raised; the loop raises it."""
        if not self.over:
            self.over = True
            self._done.set_exception(error)

    def tick(self, now_s: float) -> None:
        """Ten times a second."""
        if self._on_progress is not None:
            self._on_progress(max(0.0, now_s), len(self.samples.status) - self.under_way)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self.tick(time.perf_counter() - self.start)

    def _close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self.over = True
        if self.samples.ended:  # early
            self.samples.seconds = max(0.0, time.perf_counter() - self.start) if self.start else 0.0
            if not self.samples.busy_s:
                self.sent_all()
        elif self.start:
            self.finish()
        self.release()
        for task in self._opening:
            task.cancel()
        for connection in self._all:
            connection.transport.abort()


def most_connections() -> int:
    """How many may be open, after this process's limit of open files was raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    if 0 <= soft < wanted:
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft < 0 else max(1, min(wanted, soft) - SPARE_FILES)
