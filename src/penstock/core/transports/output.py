"""A worker's output as lines of the log "penstock.model", and its log records under their own names.

A flood costs a bounded share of the event loop.
"""

import asyncio
import logging
import os
from collections import deque

import msgspec

from penstock.core.worker.logs import MARK, RECORD_BYTES, read

log = logging.getLogger("penstock.model")

READ_BYTES = 64 * 2**10
LINE_BYTES = 8 * 2**10  # longer lines are truncated
LINES_PER_S = 5_000  # more are only counted: logging one takes about 20 us of the loop
LINES_PER_PASS = 50  # lines per pass of the loop; later output waits in the pipe
LAST_READS = 16  # a pipe holds 64 KiB, at most 1 MiB


class Output:
    """The reading end of one worker's stdout and stderr. Logs each complete line.

    The records have the attributes `model`, `version` and `slot`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, model: str, version: str, slot: int) -> None:
        self._loop = loop
        self._fd = fd
        self._whose = {"model": model, "version": version, "slot": slot}
        self._lines: deque[bytes] = deque()  # complete, not logged yet
        self._rest = b""  # of an incomplete line
        self._long = False  # the line was logged already, truncated
        self._left = LINES_PER_S
        self._since_s = loop.time()
        self._dropped = 0
        self._drop_timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None  # the next pass of a flood; until then nothing is read
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._on_readable)

    def close(self) -> None:
        """Logs the rest of the pipe and closes it."""
        self._loop.remove_reader(self._fd)
        if self._next is not None:
            self._next.cancel()
        for _ in range(LAST_READS):
            if not self._read():
                break
        os.close(self._fd)
        if self._rest and not self._long:
            self._lines.append(self._rest)
        while self._lines:
            self._log_next()
        self._log_dropped()

    def _on_readable(self) -> None:
        found = self._read()
        if found:
            self._log_some()
        elif found is None:
            self._loop.remove_reader(self._fd)  # all writers are gone; the slot closes the pipe

    def _read(self) -> bool | None:
        """Whether there was output; None at the end of the pipe."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            return None
        now = self._loop.time()
        if now - self._since_s >= 1.0:
            self._since_s, self._left = now, LINES_PER_S
        if log.isEnabledFor(logging.CRITICAL):
            self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = whole.split(b"\n", self._left)
            if len(lines) > self._left:
                self._drop(lines.pop().count(b"\n") + 1)
            self._left -= len(lines)
            if lines:
                lines[0] = self._rest + lines[0]
            self._lines.extend(lines[1:] if self._long else lines)
            self._rest, self._long = b"", False
        if not self._long:
            self._rest += rest
            if len(self._rest) > (RECORD_BYTES if MARK in self._rest else LINE_BYTES):
                self._lines.append(self._rest)
                self._rest, self._long = b"", True

    def _log_some(self) -> None:
        paused, self._next = self._next is not None, None
        for _ in range(min(len(self._lines), LINES_PER_PASS)):
            self._log_next()
        if self._lines:
            if not paused:
                self._loop.remove_reader(self._fd)
            self._next = self._loop.call_soon(self._log_some)
        elif paused:
            self._loop.add_reader(self._fd, self._on_readable)

    def _log_next(self) -> None:
        printed, mark, record = self._lines.popleft().partition(MARK)
        if printed or not mark:
            text = printed[:LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
            log.info("%s", text, extra=self._whose)
        if mark:
            self._log_record(record)

    def _log_record(self, line: bytes) -> None:
        try:
            level, name, ids, traces, text = read(line)
        except msgspec.DecodeError:  # interrupted by other output
            log.info("%s", line[:LINE_BYTES].decode("utf-8", "replace"), extra=self._whose)
            return
        root = logging.getLogger()  # no logger of that name: a model may invent any number
        if root.isEnabledFor(level):
            extra = {**self._whose, "request_id": ids, "trace_id": traces}
            root.handle(root.makeRecord(name, level, "", 0, "%s", (text,), None, extra=extra))

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        if self._drop_timer is None:
            self._drop_timer = self._loop.call_later(1.0, self._log_dropped)

    def _log_dropped(self) -> None:
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None
        if self._dropped:
            text = "output_dropped lines=%d: the worker prints more than %d lines in a second"
            log.info(text, self._dropped, LINES_PER_S, extra=self._whose)
            self._dropped = 0
