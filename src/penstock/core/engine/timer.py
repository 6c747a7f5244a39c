"""One timer with microsecond resolution.

Event loops round timers to milliseconds (epoll's unit; uvloop also caches its clock). A batch of a fast model takes no
longer than that. A timerfd has neither limit; systems without it use the loop's own timer.
"""

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

_CLOCK_MONOTONIC = 1
_ABSTIME = 1


def _libc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timerfd_create") else None


class Timer:
    """Calls `callback` on the loop's thread at the earliest requested time, in `time.monotonic` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._armed: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._libc = _libc()
        self._fd = -1
        if self._libc is not None:
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._fired)

    def at(self, when: float) -> None:
        """Requests a call at or before `when`. An earlier request stays: its callback must request the next one."""
        if self._armed is not None and self._armed <= when:
            return
        self._armed = when
        if self._fd >= 0:
            nanoseconds = max(1, int(when * 1e9))
            spec = struct.pack("qqqq", 0, 0, *divmod(nanoseconds, 10**9))
            self._libc.timerfd_settime(self._fd, _ABSTIME, spec, None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0.0, when - time.monotonic()), self._fired)

    def _fired(self) -> None:
        self._armed = None
        if self._fd >= 0:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:  # rearmed for a later time after the wake-up
                return
        self._callback()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
