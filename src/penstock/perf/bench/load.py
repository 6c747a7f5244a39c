"""The load generator: an open loop sends at given times, a closed loop when the last answer is there.

One asyncio protocol on httptools; no task, no timer and no dict a request. Both loops run on the loop that calls them.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

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
)

_MONOTONIC = 1  # CLOCK_MONOTONIC, which time.perf_counter reads on Linux
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Spec(ctypes.Structure):
    """struct itimerspec: twice seconds and nanoseconds, how often and when first."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Alarm(Protocol):
    """Calls what it was made with, in the loop's thread, once for each `at`."""

    def at(self, when_s: float) -> None:
        """Rings at that time of `time.perf_counter`, at once if it is over; replaces what was set before."""

    def close(self) -> None:
        """Never rings again."""


class TimerFile:
    """An alarm by timerfd (Linux). Raises OSError where there is none."""

    def __init__(self, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = int(libc.timerfd_create(_MONOTONIC, _FLAGS))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Spec()
        self._set = False
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    def at(self, when_s: float) -> None:
        """Sets the file's time; all zero would disarm it."""
        spec = self._spec
        spec.at_s = whole = int(when_s)
        spec.at_ns = max(1, int((when_s - whole) * 1e9))
        self._set = True
        self._settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def _readable(self) -> None:
        self._set = False
        self._ring()
        if not self._set:
            os.read(self._fd, 8)  # a file that is set anew is not readable any more; this one would ring again

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._set = True


class LoopTimer:
    """An alarm by the loop's own timer: up to a millisecond or two late."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def at(self, when_s: float) -> None:
        self.close()
        self._handle = self._loop.call_later(max(0.0, when_s - time.perf_counter()), self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def make_alarm(ring: Callable[[], None]) -> Alarm:
    """The most exact alarm there is, for the running loop."""
    if sys.platform == "linux":
        try:
            return TimerFile(ring)
        except (OSError, AttributeError):  # forbidden, or a C library without it
            pass
    return LoopTimer(ring)


__all__ = ["Check", "Progress", "Samples", "closed_loop", "http_request", "open_loop"]

RETRY_S: Final = 0.1  # a client that found no server comes back so long after


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
    on_progress: Progress | None = None,
    samples: Samples | None = None,
) -> Samples:
    """Sends a request at each of the `times` (seconds from the start, sorted), the `requests` in turn.

    `connections` are open before the first; more are opened when none is free, up to 8000. `seconds` is the counted
    time, by default up to the last of `times` and its share. Whatever is open `patience_s` after the last is TIMED_OUT.
    A run whose server is gone is ended. Cancelled, it leaves in `samples` what is there. Raises Unreachable if there is
    no server at the start.
    """
    if not requests or not times:
        raise ValueError("an open loop takes at least one request and one time")
    work = LoadInput(endpoint, requests, check, on_progress, samples or Samples())
    run = _Open(work, times, patience_s)
    run.samples.seconds = seconds or times[-1] * len(times) / max(1, len(times) - 1)
    return await run.run(min(connections, run.most))


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
    on_progress: Progress | None = None,
    samples: Samples | None = None,
) -> Samples:
    """Each of `concurrency` clients sends its next request when the last is answered, the `requests` in turn.

    Ends when `at_least` requests were sent and `seconds` are over, with `whole_passes` at the end of the list; then
    what is under way is waited for. The counted time is `seconds`, or up to the last answer where more than that was
    asked for. A request that takes over `timeout_s` is given up, with its connection. Raises ConfigError for more
    clients than files may be open. Else as `open_loop`.
    """
    if not requests or concurrency < 1 or (seconds <= 0 and at_least < 1):
        raise ValueError("a closed loop takes a request, a client, and seconds or a number of requests")
    work = LoadInput(endpoint, requests, check, on_progress, samples or Samples())
    run = _Closed(work, concurrency, seconds, max(1, at_least), len(requests) if whole_passes else 1, timeout_s)
    return await run.run(concurrency)


class _Open(LoadRun):
    """Requests at their times."""

    def __init__(self, work: LoadInput, times: Sequence[float], patience_s: float) -> None:
        super().__init__(work)
        self.times = times
        self.patience_s = patience_s
        self._waiting: deque[int] = deque()  # requests that no connection is free for
        self._alarm = make_alarm(self._due)

    def begin(self) -> None:
        self._idle.reverse()  # a server that serves one connection at a time took the first of them
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
        self._loop.call_later(self.patience_s, self.end)
        self._ended()

    def _send(self, index: int) -> None:
        if self._idle:
            self._idle.pop().send(index)
            return
        self.samples.waited += 1
        self._waiting.append(index)
        if len(self._all) + len(self._opening) < self.most:
            self.one_more()

    def free(self, connection: LoadConnection) -> None:
        if self._waiting and not self.over:
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

    def release(self) -> None:
        self._alarm.close()

    def finish(self) -> None:
        samples, status = self.samples, self.samples.status
        now_s = time.perf_counter() - self.start
        samples.seconds = samples.seconds or now_s  # all came at once
        if self.under_way and samples.first_error is None:
            samples.first_error = (TIMED_OUT, b"no answer %g s after the last request" % self.patience_s)
        for index, found in enumerate(status):
            if found == UNDER_WAY:
                status[index] = TIMED_OUT
                samples.latency_s[index] = now_s - samples.intended_s[index]


class _Closed(LoadRun):
    """Clients that each wait for their answer."""

    def __init__(
        self, work: LoadInput, clients: int, seconds: float, at_least: int, passes: int, timeout_s: float
    ) -> None:
        super().__init__(work)
        self.clients = clients
        self.seconds = seconds
        self.at_least = at_least
        self.passes = passes
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
            self.fail(connection.index, TIMED_OUT, b"no answer in %g s" % self.timeout_s)
            connection.index = -1
            connection.transport.abort()

    def finish(self) -> None:
        samples = self.samples
        ends = (at + took for at, took in zip(samples.intended_s, samples.latency_s, strict=True) if took < math.inf)
        by_time = self.seconds > 0 and samples.intended_s[-1] < self.seconds
        samples.seconds = self.seconds if by_time else max(ends, default=samples.busy_s)
