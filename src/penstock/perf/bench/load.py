"""The load generator: an open loop sends at given times, a closed loop when the previous response has arrived."""

import asyncio
import ctypes
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.client.endpoint import Endpoint
from penstock.perf.bench.load_run import (
    REFUSED,
    TIMED_OUT,
    UNDER_WAY,
    Check,
    LoadConnection,
    LoadInput,
    LoadRun,
    Progress,
    Samples,
    most_connections,
)

__all__ = ["Check", "Progress", "Samples", "closed_loop", "http_request", "open_loop"]

RETRY_S: Final = 0.1  # delay before a client without a connection tries again


def http_request(endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """A complete HTTP/1.1 message with Host and Content-Length; the endpoint's prefix precedes `path`."""
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
    on_progress: Progress | None = None,
    samples: Samples | None = None,
) -> Samples:
    """Sends the `requests` in turn, one at each of the sorted `times` (seconds from the start).

    Opens `connections` before the first request and more, up to 8000, when none is idle. `seconds` is the counted time,
    by default until the last of `times` plus one mean interval. A request without a response `patience_s` after the
    last send is TIMED_OUT. The run ends early when the server is gone; a cancelled run leaves its results in `samples`.
    Raises Unreachable if there is no server at the start. Many parameters: each is one option of a load.
    """
    if not requests or not times:
        raise ValueError("an open loop needs at least one request and one time")
    run = _OpenLoop(LoadInput(endpoint, requests, check, on_progress, samples or Samples()), times, patience_s)
    run.samples.seconds = seconds or times[-1] * len(times) / max(1, len(times) - 1)
    return await run.run(min(connections, run.most))


async def closed_loop(
    endpoint: Endpoint,
    requests: Sequence[bytes],
    *,
    concurrency: int,
    seconds: float = 0.0,
    at_least: int = 0,
    timeout_s: float = 60.0,
    check: Check | None = None,
    on_progress: Progress | None = None,
    samples: Samples | None = None,
) -> Samples:
    """Runs `concurrency` clients; each sends its next request, the `requests` in turn, after its last response.

    Stops sending after `at_least` requests and `seconds`, and then waits for the responses. The counted time is
    `seconds`, or until the last response if `at_least` takes longer. A request that takes more than `timeout_s` is
    dropped together with its connection. Raises ConfigError for more clients than the limit of open files. Otherwise
    like `open_loop`.
    """
    if not requests or concurrency < 1 or (seconds <= 0 and at_least < 1):
        raise ValueError("a closed loop needs a request, a client, and seconds or a number of requests")
    given = LoadInput(endpoint, requests, check, on_progress, samples or Samples())
    return await _ClosedLoop(given, concurrency, seconds, max(1, at_least), timeout_s).run(concurrency)


class _OpenLoop(LoadRun):
    def __init__(self, given: LoadInput, times: Sequence[float], patience_s: float) -> None:
        super().__init__(given)
        self.times = times
        self.patience_s = patience_s
        self.most = most_connections()
        self._waiting: deque[int] = deque()  # requests without a connection
        self._alarm = make_alarm(self._due)

    def begin(self) -> None:
        self._idle.reverse()  # a server with one connection at a time accepted the first
        self._alarm.at(self.start + self.times[0])

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
        asyncio.get_running_loop().call_later(self.patience_s, self.end)
        self._end_if_done()

    def _send(self, index: int) -> None:
        if self._idle:
            self._idle.pop().send(index)
            return
        self.samples.waited += 1
        self._waiting.append(index)
        if len(self._all) + len(self._opening) < self.most:
            self.open_one()

    def free(self, connection: LoadConnection) -> None:
        if self._waiting and not self.over:
            connection.send(self._waiting.popleft())
            return
        self._idle.append(connection)
        self._end_if_done()

    def not_connected(self, status: int) -> None:
        if self._waiting:
            self.fail(self._waiting.popleft(), status)
        self._end_if_done()

    def replace(self) -> None:
        if self._waiting and not self._opening:
            self.open_one()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self.under_way and len(self.samples.status) == len(self.times):
            self.end()

    def release(self) -> None:
        self._alarm.close()

    def finish(self) -> None:
        samples, status = self.samples, self.samples.status
        now_s = time.perf_counter() - self.start
        samples.seconds = samples.seconds or now_s  # all times were 0
        if self.under_way and samples.first_error is None:
            samples.first_error = (TIMED_OUT, b"no response %g s after the last request" % self.patience_s)
        for index, found in enumerate(status):
            if found == UNDER_WAY:
                status[index] = TIMED_OUT
                samples.latency_s[index] = now_s - samples.intended_s[index]


class _ClosedLoop(LoadRun):
    def __init__(self, given: LoadInput, clients: int, seconds: float, at_least: int, timeout_s: float) -> None:
        super().__init__(given)
        self.clients = clients
        self.seconds = seconds
        self.at_least = at_least
        self.timeout_s = timeout_s
        self._sent_all = False

    def begin(self) -> None:
        self.start = time.perf_counter()
        idle, self._idle = self._idle, []
        for connection in idle:
            self.free(connection)
        for _ in range(self.clients - len(idle)):
            self.not_connected(REFUSED)

    def free(self, connection: LoadConnection) -> None:
        now_s = time.perf_counter() - self.start
        if self._more(now_s):
            connection.send(self.add(now_s, 0.0))
        elif not self.under_way:
            self.end()

    def _more(self, now_s: float) -> bool:
        if self._sent_all or self.over:
            return False
        if len(self.samples.status) < self.at_least or now_s < self.seconds:
            return True
        self._sent_all = True
        self.sent_all()
        return False

    def not_connected(self, status: int) -> None:
        now_s = time.perf_counter() - self.start
        if self._more(now_s):
            self.fail(self.add(now_s, 0.0), status)
            asyncio.get_running_loop().call_later(RETRY_S, self.replace)
        elif not self.under_way:
            self.end()

    def replace(self) -> None:
        if self._more(time.perf_counter() - self.start):
            self.open_one()
        elif not self.under_way:
            self.end()

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        intended_s = self.samples.intended_s
        for connection in [c for c in self._all if c.index >= 0 and now_s - intended_s[c.index] > self.timeout_s]:
            self.fail(connection.index, TIMED_OUT, b"no response in %g s" % self.timeout_s)
            connection.index = -1
            connection.transport.abort()

    def finish(self) -> None:
        samples = self.samples
        ends = (at + took for at, took in zip(samples.intended_s, samples.latency_s, strict=True) if took < math.inf)
        by_time = self.seconds > 0 and samples.intended_s[-1] < self.seconds
        samples.seconds = self.seconds if by_time else max(ends, default=samples.busy_s)


# ---- alarms: exact timers that call back on the loop's thread, once per `at`; times are those of time.perf_counter


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: the interval, then the first expiry."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class TimerFile:
    """An alarm that uses timerfd (Linux). Raises OSError without it."""

    MONOTONIC = 1  # CLOCK_MONOTONIC, which time.perf_counter reads on Linux
    ABSOLUTE = 1  # TFD_TIMER_ABSTIME

    def __init__(self, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = int(libc.timerfd_create(self.MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec()
        self._set = False
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    def at(self, when_s: float) -> None:
        spec = self._spec
        spec.at_s = whole = int(when_s)
        spec.at_ns = max(1, int((when_s - whole) * 1e9))  # all zero would disarm the timer
        self._set = True
        self._settime(self._fd, self.ABSOLUTE, ctypes.byref(spec), None)

    def _readable(self) -> None:
        self._set = False
        self._ring()
        if not self._set:
            os.read(self._fd, 8)  # setting the timer again clears the file; otherwise it would stay readable

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._set = True


class LoopTimer:
    """An alarm that uses the event loop's timer, which has a resolution of milliseconds."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def at(self, when_s: float) -> None:
        self.close()
        delay_s = max(0.0, when_s - time.perf_counter())
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def make_alarm(ring: Callable[[], None]) -> TimerFile | LoopTimer:
    """The most exact alarm available for the running loop."""
    if sys.platform == "linux":
        try:
            return TimerFile(ring)
        except (OSError, AttributeError):  # forbidden, or missing from the C library
            pass
    return LoopTimer(ring)
