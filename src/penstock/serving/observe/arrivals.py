"""When requests came and how large they were, as a file of JSON lines: an Observer. Nothing of what they held."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from penstock.core.contracts import Observer
from penstock.errors import ConfigError

log = logging.getLogger("penstock.observe")

EVERY_S: Final = 1.0
MOST_BYTES: Final = 2**30  # of the file: some 15 million requests
MOST_WAITING: Final = 16 * 2**20  # bytes that a slow disk may keep here


class ArrivalRecorder(Observer):
    """Writes `{"t": seconds since the start, "rows", "bytes", "model"}` for each request, a second later at most.

    The event loop only formats; a thread of its own writes. What ends the recording (a full disk, one that is too slow,
    a file of `most_bytes`) is logged, leaves whole lines, and costs no request anything.
    """

    def __init__(self, path: str, *, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes the file. Raises ConfigError if it cannot be made, or is there: it would hold two times of day."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise ConfigError(f"--record {path}: the file exists; name another, or remove it") from None
        except OSError as exc:
            raise ConfigError(f"--record {path}: cannot be written: {exc.strerror}") from None
        self._path, self._most_bytes, self._clock = path, most_bytes, clock
        self._start_s = clock()
        self._lines: list[bytes] = []
        self._noted = 0  # bytes, by the loop
        self._done = 0  # of them, by the thread: they are written, or nobody will
        self._written = 0
        self._names: dict[str, bytes] = {}  # of models, as JSON
        self._due = False
        self._over = False
        self._thread = ThreadPoolExecutor(1, "penstock-arrivals")

    def on_request(self, model: str, version: str, rows: int, size_bytes: int) -> None:
        """On the loop's thread."""
        if self._over:
            return
        name = self._names.get(model)
        if name is None:
            name = self._names[model] = msgspec.json.encode(model)
        t = self._clock() - self._start_s
        line = b'{"t":%.6f,"rows":%d,"bytes":%d,"model":%s}\n' % (t, rows, size_bytes, name)
        self._lines.append(line)
        self._noted += len(line)
        if self._noted - self._done > MOST_WAITING:
            self._end("the disk is too slow")
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(EVERY_S, self._flush)

    def close(self) -> None:
        """Writes the rest and closes the file; blocks. Nothing is recorded afterwards, and no empty file is left."""
        if self._fd < 0:
            return
        self._flush()
        self._thread.shutdown()
        self._over = True
        os.close(self._fd)
        self._fd = -1
        if not self._noted:  # as of a server that did not start: the next one may have the name
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    # ---- from the loop to the thread

    def _flush(self) -> None:
        self._due = False
        lines, self._lines = self._lines, []
        if lines and not self._over:
            self._thread.submit(self._write, lines)

    def _write(self, lines: list[bytes]) -> None:
        """On the thread: these lines, or as many as there is room for."""
        if self._over:
            return
        data = b"".join(lines)
        taken = len(data)
        full = self._written + len(data) > self._most_bytes
        if full:
            data = data[: data.rfind(b"\n", 0, self._most_bytes - self._written) + 1]
        try:
            self._written += _write_all(self._fd, data)
        except OSError as exc:
            with contextlib.suppress(OSError):  # the part of a line that found room
                os.ftruncate(self._fd, self._written)
            self._end(f"writing failed: {exc.strerror}")
        else:
            if full:
                self._end(f"the file has its {self._most_bytes} bytes")
        self._done += taken

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._lines = []
            log.warning("recording=ended file=%s why=%r consequence=later_requests_are_not_in_it", self._path, why)


def _write_all(fd: int, data: bytes) -> int:
    """How much was written: all of it. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)
