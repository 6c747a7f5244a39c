"""One run of the load generator: its connections, its samples, and how it starts and ends.

The loops in `load` decide when each request is sent. One asyncio protocol on httptools; no task, timer or dict per
request.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import httptools

from penstock.client.endpoint import Endpoint, Unreachable
from penstock.core.os_threads import new_event_loop
from penstock.errors import ConfigError
from penstock.serving.http.descriptors import raise_limit

T = TypeVar("T")

LOST: Final = 0  # the connection ended before the response
TIMED_OUT: Final = -1
REFUSED: Final = -2  # no connection to the server
WRONG: Final = -3  # a 2xx response that the check rejected
UNDER_WAY: Final = -4  # unanswered when the run ended early: neither a success nor an error

MOST_CONNECTIONS: Final = 8000  # a choice: more than one generator keeps busy
SPARE_FILES: Final = 100  # open files that are not connections
CONNECT_S: Final = 5.0  # a lost SYN is sent again after 1 and 3 s
GONE_S: Final = 2.0  # connections refused for this long, without any response: the server is gone
TICK_S: Final = 0.1  # often enough for a display, rarely enough to cost nothing
LEAD_S: Final = 0.02  # between the start of an open loop and its time 0
FIRST_ERROR_BYTES: Final = 500  # a choice: enough for a message
FIRST_PIECES: Final = 4  # of an unchecked response: enough to show it as the first error
_LOCAL_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)  # not caused by the server

Check = Callable[[int, int, bytes], bool]
"""Called with the request's index in the list, the status and the body of each response; a 2xx response for which it
returns false is an error."""

Progress = Callable[[float, int], bool | None]
"""Called ten times a second with the seconds since the start and the number of completed requests; true ends the run.
"""


class Samples:
    """One entry per request, in sending order; filled while the run goes on.

    `intended_s` counts from the start. `late_s` is how late the generator sent the request (0 in a closed loop).
    `latency_s` counts from the intended time: infinite without a response, the time waited for a timeout. `status` is
    the HTTP status or one of the constants above. `number` is the request's index in the list. `seconds` is the counted
    time. `cpu_s` is this process's CPU time in the `busy_s` seconds until the last send. `waited` counts requests that
    found no free connection, `starved` connections for which this machine had no file or port. `first_error` is a
    status with the beginning of the body or the reason. `ended` says why the run ended early.
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
        self.ended: Literal["", "gone", "stopped", "cancelled"] = ""


class LoadInput(NamedTuple):
    """The input of a run; see `load.open_loop`."""

    endpoint: Endpoint
    requests: Sequence[bytes]
    check: Check | None
    on_progress: Progress | None
    samples: Samples


class LoadConnection(asyncio.Protocol):
    """A connection with at most one request under way, `index`."""

    __slots__ = ("_body", "_data", "_parser", "_run", "_to_end", "index", "transport")

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self.index = -1
        self._body: list[bytes] = []
        self._data = b""
        self._to_end = False  # the response ends with its connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, index: int) -> None:
        """Sends the request with that index; for idle connections only."""
        self.index = index
        run = self._run
        self.transport.write(run.requests[run.samples.number[index]])

    def data_received(self, data: bytes) -> None:
        self._data = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._run.abort(error)  # unless `on_message_complete` has given the cause
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            index, self.index = self.index, -1
            if index >= 0 and not self._run.over:
                self._run.fail(index, LOST, b"not an HTTP/1 response: " + data[:80])
            self.transport.abort()

    def on_headers_complete(self) -> None:
        if not self._parser.should_keep_alive():
            head = self._data.partition(b"\r\n\r\n")[0].lower()
            self._to_end = b"\ncontent-length:" not in head and b"\ntransfer-encoding:" not in head

    def on_body(self, body: bytes) -> None:
        if len(self._body) < self._run.pieces:
            self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # interim
            return
        index, self.index = self.index, -1
        run = self._run
        if index < 0 or run.over:  # an unsolicited or superfluous response
            self.transport.abort()
            return
        try:
            run.answer(index, status, self._body)
            self._body.clear()
            if self._parser.should_keep_alive():
                run.free(self)
            else:
                self.transport.close()
        except BaseException as error:  # here, because the parser may name another error as the cause of its own
            run.abort(error)
            raise

    def connection_lost(self, error: Exception | None) -> None:
        index, self.index = self.index, -1
        run = self._run
        if self._to_end and error is None and index >= 0 and not run.over:
            run.answer(index, self._parser.get_status_code(), self._body)
            index = -1
        run.lost(self, index)


class LoadRun(ABC):
    """Base of the open and the closed loop: opens connections, records responses, starts and ends the run."""

    def __init__(self, given: LoadInput) -> None:
        self.requests = given.requests
        self.samples = given.samples
        self.pieces = FIRST_PIECES if given.check is None else math.inf  # kept of each response
        self.start = 0.0  # 0: not started
        self.over = False
        self.under_way = 0
        self._given = given
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = (given.endpoint.host, given.endpoint.port)
        self._all: set[LoadConnection] = set()
        self._idle: list[LoadConnection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._started_s = (0.0, 0.0)  # CPU time and clock
        self._heard_s = 0.0  # time of the last response, whatever its status

    async def run(self, connections: int) -> Samples:
        most = most_connections()
        if connections > most:
            if most == MOST_CONNECTIONS:
                raise ConfigError(f"{connections} connections: expected at most {most} per generator")
            raise ConfigError(
                f"{connections} connections need as many open files; the limit is {most + SPARE_FILES}. Raise it "
                "(ulimit -n) or use fewer connections"
            )
        try:
            await self._open(connections)
            self._started_s = time.process_time(), time.perf_counter()
            self.start = self._started_s[1] + LEAD_S
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
            self.begin()
            await self._done
        except asyncio.CancelledError:
            self.samples.ended = "cancelled"
            raise
        finally:
            self._close()
            await asyncio.sleep(0)  # lets the aborted connections end
        return self.samples

    @abstractmethod
    def begin(self) -> None:
        """Starts sending."""

    @abstractmethod
    def free(self, connection: LoadConnection) -> None:
        """Called when a connection becomes idle."""

    @abstractmethod
    def not_connected(self, status: int) -> None:
        """Called when opening a connection failed."""

    @abstractmethod
    def replace(self) -> None:
        """Called when a connection ended."""

    @abstractmethod
    def finish(self) -> None:
        """Called when the run was not cut short, to complete the samples."""

    def release(self) -> None:  # noqa: B027 - optional
        """Releases resources; nothing is sent afterwards."""

    async def _open(self, connections: int) -> None:
        try:
            first = await self._connect()
        except OSError as exc:
            raise Unreachable(f"no connection to {self._given.endpoint.url}: {exc or type(exc).__name__}") from None
        self._address = first.transport.get_extra_info("peername")[:2]  # look a name up once
        self._idle.append(first)
        await asyncio.gather(*(self._connect_one() for _ in range(connections - 1)))

    async def _connect(self) -> LoadConnection:
        tls = self._given.endpoint.tls
        name = self._given.endpoint.host if tls else None
        async with asyncio.timeout(CONNECT_S):
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: LoadConnection(self), *self._address, ssl=tls, server_hostname=name
            )
        self._all.add(made)
        return made

    async def _connect_one(self) -> None:
        try:
            made = await self._connect()
        except OSError as exc:
            self.samples.starved += exc.errno in _LOCAL_ERRORS
            if self.start and not self.over:
                self.not_connected(TIMED_OUT if isinstance(exc, TimeoutError) else REFUSED)
            return
        if self.over:
            made.transport.abort()
        elif self.start:
            self.free(made)
        else:
            self._idle.append(made)

    def open_one(self) -> None:
        """Starts opening one more connection."""
        task = asyncio.get_running_loop().create_task(self._connect_one())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def add(self, intended_s: float, late_s: float) -> int:
        """Records a new request and returns its index."""
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
        samples = self.samples
        self._heard_s = now_s = time.perf_counter() - self.start
        samples.latency_s[index] = now_s - samples.intended_s[index]
        self.under_way -= 1
        good = 200 <= status < 300
        check = self._given.check
        if check is not None and not check(samples.number[index], status, b"".join(body)) and good:
            good, samples.status[index] = False, WRONG
        else:
            samples.status[index] = status
        if not good:
            self._failed(status, body)

    def fail(self, index: int, status: int, why: bytes = b"") -> None:
        """Records a request that got no response."""
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
        """Records the end of a connection with request `index` under way; negative: none."""
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
        """Records the generator's CPU time; from here on it only waits."""
        cpu_s, clock_s = self._started_s
        self.samples.cpu_s = time.process_time() - cpu_s
        self.samples.busy_s = time.perf_counter() - clock_s

    def end(self, why: Literal["", "gone", "stopped"] = "") -> None:
        if not self.over:
            self.over = True
            self.samples.ended = why
            self._done.set_result(None)

    def abort(self, error: BaseException) -> None:
        """Ends the run with an error of the check or of the run itself, which `run` raises."""
        if not self.over:
            self.over = True
            self._done.set_exception(error)

    def tick(self, now_s: float) -> None:
        """Called ten times a second."""
        progress, answered = self._given.on_progress, len(self.samples.status) - self.under_way
        if progress is not None and progress(max(0.0, now_s), answered):
            self.end("stopped")

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
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
    """How many connections may be open, after raising this process's limit of open files as far as allowed."""
    wanted = MOST_CONNECTIONS + SPARE_FILES
    return max(1, min(wanted, raise_limit(wanted)) - SPARE_FILES)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine, on uvloop. Ctrl-C cancels it and is raised after it ended."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
