"""The load generator: an open loop sends at given times, a closed loop when the last answer is there.

One asyncio protocol on httptools; no task, no timer and no dict a request. Both loops run on the loop that calls them.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, cast

import httptools

from penstock.bench.alarm import make_alarm
from penstock.client.endpoint import Endpoint
from penstock.client.errors import Unreachable

LOST: Final = 0  # the connection ended before the answer was there
TIMED_OUT: Final = -1
REFUSED: Final = -2  # no connection to the server
WRONG: Final = -3  # a 2xx that the check did not take
UNDER_WAY: Final = -4  # not answered yet when the run was ended early: neither good nor an error

MOST_CONNECTIONS: Final = 8000
CONNECT_S: Final = 5.0
RETRY_S: Final = 0.1  # a client that found no server comes back so long after
GONE_S: Final = 2.0  # refused for so long, without any answer: the server is not there any more
TICK_S: Final = 0.1
LEAD_S: Final = 0.02  # from when an open loop is ready to its first time
FIRST_ERROR_BYTES: Final = 500

Check = Callable[[int, int, bytes], bool]
"""Called with the number of the request in the list, the status and the body of each answer; good are those of 2xx for
which it is true."""

Progress = Callable[[float, int], None]
"""Called ten times a second with the seconds since the start and how many requests were answered, or failed."""


class Samples:
    """One entry a request, in the order in which they were to be sent; filled while the run goes on.

    `intended_s` from the start; `late_s`: how much later the generator came to it (0 in a closed loop); `latency_s`
    from the intended time, infinite without an answer; `status` of HTTP, or one of the constants above; `number` of
    the request in the list. `seconds`: the counted time. `cpu_s`: what this process took in the `busy_s` until the
    last was sent. `waited`: how many found no free connection. `first_error`: status and beginning of the body.
    `ended`: why the run was ended early, if it was: only errors from the start, the server gone, or cancelled.
    """

    def __init__(self) -> None:
        self.intended_s: array[float] = array("d")
        self.late_s: array[float] = array("d")
        self.latency_s: array[float] = array("d")
        self.status: array[int] = array("i")
        self.number: array[int] = array("i")
        self.seconds = 0.0
        self.cpu_s = self.busy_s = 0.0
        self.waited = 0
        self.first_error: tuple[int, bytes] | None = None
        self.ended: Literal["", "errors", "gone", "cancelled"] = ""


def http_request(endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """One whole HTTP/1.1 message; Host and Content-Length are added, and the endpoint's prefix stands before `path`."""
    given = {"Host": endpoint.authority, **headers, "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {endpoint.prefix}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


async def open_loop(
    endpoint: Endpoint,
    requests: Sequence[bytes],
    times: Sequence[float],
    *,
    seconds: float = 0.0,
    connections: int = 256,
    patience_s: float = 5.0,
    check: Check | None = None,
    stop_after_errors: int = 0,
    on_progress: Progress | None = None,
    samples: Samples | None = None,
) -> Samples:
    """Sends a request at each of the `times` (seconds from the start, sorted), the `requests` in turn.

    `connections` are open before the first; more are opened when none is free, up to 8000. `seconds` is the counted
    time, by default up to the last of `times` and its share. Whatever is open `patience_s` after the last is TIMED_OUT.
    A run in which the first `stop_after_errors` answers are no good ones is ended. Cancelled, it leaves in `samples`
    what is there. Raises Unreachable if there is no server at the start.
    """
    if not requests or not times:
        raise ValueError("an open loop takes at least one request and one time")
    run = _Open(endpoint, requests, check, stop_after_errors, on_progress, samples or Samples())
    run.times, run.patience_s = times, patience_s
    run.samples.seconds = seconds or times[-1] * len(times) / max(1, len(times) - 1)
    return await run.run(min(connections, MOST_CONNECTIONS))


async def closed_loop(
    endpoint: Endpoint,
    requests: Sequence[bytes],
    *,
    concurrency: int,
    seconds: float = 0.0,
    at_least: int = 0,
    whole_passes: bool = False,
    timeout_s: float = 60.0,
    check: Check | None = None,
    stop_after_errors: int = 0,
    on_progress: Progress | None = None,
    samples: Samples | None = None,
) -> Samples:
    """Each of `concurrency` clients sends its next request when the last is answered, the `requests` in turn.

    Ends when `at_least` requests were sent and `seconds` are over, with `whole_passes` at the end of the list; then
    what is under way is waited for. The counted time is `seconds`, or up to the last answer where more than that was
    asked for. A request that takes over `timeout_s` is given up, with its connection. Else as `open_loop`.
    """
    if not requests or concurrency < 1 or (seconds <= 0 and at_least < 1):
        raise ValueError("a closed loop takes a request, a client, and seconds or a number of requests")
    run = _Closed(endpoint, requests, check, stop_after_errors, on_progress, samples or Samples())
    run.seconds, run.at_least, run.timeout_s = seconds, at_least, timeout_s
    run.clients, run.passes = concurrency, len(requests) if whole_passes else 1
    return await run.run(concurrency)


class _Run:
    """What both loops do: connections, answers, and how a run begins and ends."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        check: Check | None,
        stop_after_errors: int,
        on_progress: Progress | None,
        samples: Samples,
    ) -> None:
        self.requests = requests
        self.samples = samples
        self.start = 0.0  # 0: not yet
        self.under_way = 0
        self._endpoint = endpoint
        self._check = check
        self._stop_after = stop_after_errors
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._address = (endpoint.host, endpoint.port)
        self._all: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._cpu_start_s = 0.0
        self._good = False
        self._errors = 0
        self._heard_s = 0.0  # when the last answer came, whatever it said

    async def run(self, connections: int) -> Samples:
        """The samples, when all is over."""
        _allow_files(MOST_CONNECTIONS + 100)
        try:
            await self._open(connections)
            self._cpu_start_s, self.start = time.process_time(), time.perf_counter() + LEAD_S
            self._ticker = self._loop.call_later(TICK_S, self._tick)
            self.begin()
            await self._over
        except asyncio.CancelledError:
            self.samples.ended = "cancelled"
            raise
        finally:
            self._close()
            await asyncio.sleep(0)  # the connections end
        return self.samples

    def begin(self) -> None:
        """Sends, or sets out to."""
        raise NotImplementedError

    def free(self, connection: _Connection) -> None:
        """A connection has no request under way."""
        raise NotImplementedError

    def not_connected(self, status: int) -> None:
        """A connection that was asked for did not come about."""
        raise NotImplementedError

    def replace(self) -> None:
        """A connection ended."""

    def finish(self) -> None:
        """What is still under way at the end is so, or timed out."""

    async def _open(self, connections: int) -> None:
        try:
            first = await self._connect()
        except OSError as exc:
            raise Unreachable(f"no connection to {self._endpoint.url}: {exc or type(exc).__name__}") from None
        self._address = first.transport.get_extra_info("peername")[:2]  # a name is looked up once
        self._idle.append(first)
        await asyncio.gather(*(self._connected() for _ in range(connections - 1)))

    async def _connect(self) -> _Connection:
        tls = self._endpoint.tls
        name = self._endpoint.host if tls else None
        async with asyncio.timeout(CONNECT_S):
            _, made = await self._loop.create_connection(
                lambda: _Connection(self), *self._address, ssl=tls, server_hostname=name
            )
        self._all.add(made)
        return made

    async def _connected(self) -> None:
        try:
            made = await self._connect()
        except OSError as exc:
            if self.start:
                self.not_connected(TIMED_OUT if isinstance(exc, TimeoutError) else REFUSED)
            return
        if self.start:
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
        if good:
            self._good = True
        else:
            self._failed(status, body)

    def fail(self, index: int, status: int) -> None:
        """A request was not answered."""
        self.samples.status[index] = status
        self.under_way -= 1
        self._failed(status, [])

    def _failed(self, status: int, body: list[bytes]) -> None:
        if self.samples.first_error is None:
            self.samples.first_error = (status, b"".join(body)[:FIRST_ERROR_BYTES])
        self._errors += 1
        if not self._good and self._errors == self._stop_after:
            self.end("errors")
        elif status == REFUSED and time.perf_counter() - self.start - self._heard_s > GONE_S:
            self.end("gone")

    def lost(self, connection: _Connection, index: int) -> None:
        """A connection ended, with the request `index` under way unless that is negative."""
        if self._over.done():
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
        self.samples.busy_s = time.perf_counter() - self.start

    def end(self, why: Literal["", "errors", "gone"] = "") -> None:
        """The run is over."""
        if not self._over.done():
            self.samples.ended = why
            self._over.set_result(None)

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
        if not self._over.done():
            self._over.cancel()
        if self.samples.ended:  # early
            self.samples.seconds = max(0.0, time.perf_counter() - self.start) if self.start else 0.0
            if not self.samples.busy_s:
                self.sent_all()
        elif self.start:
            self.finish()
        for task in self._opening:
            task.cancel()
        for connection in self._all:
            connection.transport.abort()


class _Open(_Run):
    """Requests at their times."""

    times: Sequence[float]
    patience_s: float

    def begin(self) -> None:
        self._waiting: deque[int] = deque()  # requests that no connection is free for
        self._alarm = make_alarm(self._due)
        self._alarm.at(self.start + self.times[0])
        self._over.add_done_callback(lambda _: self._alarm.close())

    def _due(self) -> None:
        times, start, sent = self.times, self.start, len(self.samples.status)
        while sent < len(times):
            late_s = time.perf_counter() - start - times[sent]
            if late_s < 0:
                self._alarm.at(start + times[sent])
                return
            self._send(self.add(times[sent], late_s))
            sent += 1
        self.sent_all()
        self._loop.call_later(self.patience_s, self.end)
        self._ended()

    def _send(self, index: int) -> None:
        if self._idle:
            self._idle.pop().send(index)
            return
        self.samples.waited += 1
        self._waiting.append(index)
        if len(self._all) + len(self._opening) < MOST_CONNECTIONS:
            self.one_more()

    def free(self, connection: _Connection) -> None:
        if self._waiting:
            connection.send(self._waiting.popleft())
            return
        self._idle.append(connection)
        self._ended()

    def not_connected(self, status: int) -> None:
        if self._waiting:
            self.fail(self._waiting.popleft(), status)
        self._ended()

    def replace(self) -> None:
        if self._waiting and not self._opening:
            self.one_more()
        self._ended()

    def _ended(self) -> None:
        if not self.under_way and len(self.samples.status) == len(self.times):
            self.end()

    def finish(self) -> None:
        status = self.samples.status
        for index, found in enumerate(status):
            if found == UNDER_WAY:
                status[index] = TIMED_OUT


class _Closed(_Run):
    """Clients that each wait for their answer."""

    seconds: float
    at_least: int
    timeout_s: float
    clients: int
    passes: int
    _sent_all = False

    def begin(self) -> None:
        self.start = time.perf_counter()
        idle, self._idle = self._idle, []
        for connection in idle:
            self.free(connection)
        for _ in range(self.clients - len(idle)):
            self.not_connected(REFUSED)

    def free(self, connection: _Connection) -> None:
        now_s = time.perf_counter() - self.start
        if self._more(now_s):
            connection.send(self.add(now_s, 0.0))
        elif not self.under_way:
            self.end()

    def _more(self, now_s: float) -> bool:
        if self._sent_all:
            return False
        sent = len(self.samples.status)
        if sent < self.at_least or now_s < self.seconds or sent % self.passes:
            return True
        self._sent_all = True
        self.sent_all()
        return False

    def not_connected(self, status: int) -> None:
        now_s = time.perf_counter() - self.start
        if self._more(now_s):
            self.fail(self.add(now_s, 0.0), status)
            self._loop.call_later(RETRY_S, self.replace)
        elif not self.under_way:
            self.end()

    def replace(self) -> None:
        if self._more(time.perf_counter() - self.start):
            self.one_more()
        elif not self.under_way:
            self.end()

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        intended_s = self.samples.intended_s
        for connection in [c for c in self._all if c.index >= 0 and now_s - intended_s[c.index] > self.timeout_s]:
            self.fail(connection.index, TIMED_OUT)
            connection.index = -1
            connection.transport.abort()

    def finish(self) -> None:
        samples = self.samples
        ends = (at + took for at, took in zip(samples.intended_s, samples.latency_s, strict=True) if took < math.inf)
        by_time = self.seconds > 0 and samples.intended_s[-1] < self.seconds
        samples.seconds = self.seconds if by_time else max(ends, default=samples.busy_s)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    __slots__ = ("_body", "_parser", "_run", "index", "transport")

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.index = -1  # of the request under way
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, index: int) -> None:
        """Sends the request of that index; free connections only."""
        self.index = index
        run = self._run
        self.transport.write(run.requests[run.samples.number[index]])

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """A piece of an answer."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """An answer is whole."""
        status = self._parser.get_status_code()
        if status < 200:  # interim
            return
        index, self.index = self.index, -1
        if index < 0:  # an answer that nobody asked for
            self.transport.abort()
            return
        run = self._run
        run.answer(index, status, self._body)
        self._body.clear()
        if self._parser.should_keep_alive():
            run.free(self)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        index, self.index = self.index, -1
        self._run.lost(self, index)


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
