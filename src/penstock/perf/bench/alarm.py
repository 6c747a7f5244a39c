"""An alarm that wakes the event loop at an exact time: the loop's own timers count in milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

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
