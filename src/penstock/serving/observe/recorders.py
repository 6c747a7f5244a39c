"""Observers that keep records: request arrivals in a file (`--record`), and the last batches (`GET /debug/batches`)."""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from heapq import merge
from itertools import islice
from typing import Final

import msgspec
from msgspec import Struct

from penstock.core.contracts import BatchRecord, Observer
from penstock.errors import ConfigError

log = logging.getLogger("penstock.serving")

FLUSH_INTERVAL_S: Final = 1.0  # a choice: what a crash may lose
MAX_BYTES: Final = 2**30  # some 15 million requests
MAX_PENDING_BYTES: Final = 16 * 2**20  # not written yet
KEPT_BATCHES: Final = 1000  # a choice: of each model version, and one response of /debug/batches
KEPT_VERSIONS: Final = 50  # a choice: bounds the memory to some 15 MB


class ArrivalRecorder(Observer):
    """Writes `{"t": seconds since the start, "rows", "bytes", "model"}` for each request, at most a second later.

    The event loop formats the lines and a separate thread writes them. The payloads are not recorded. A full or slow
    disk, or a file of `max_bytes`, ends the recording with a warning; the file then holds only whole lines, and
    requests are not affected.
    """

    def __init__(self, path: str, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the file. Raises ConfigError if it cannot be created or already exists."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise ConfigError(f"--record {path}: the file exists; choose another name or remove it") from None
        except OSError as exc:
            raise ConfigError(f"--record {path}: cannot be created: {exc.strerror}") from None
        self._path, self._max_bytes, self._clock = path, max_bytes, clock
        self._start_s = clock()
        self._lines: list[bytes] = []
        self._queued = 0  # bytes, counted by the loop
        self._processed = 0  # of them, written or dropped by the thread
        self._written = 0
        self._flush_scheduled = False
        self._ended = False
        self._thread = ThreadPoolExecutor(1, "penstock-arrivals")

    def on_request(self, model: str, version: str, rows: int, size_bytes: int) -> None:
        """Runs on the loop's thread."""
        if self._ended:
            return
        t = self._clock() - self._start_s
        line = b'{"t":%.6f,"rows":%d,"bytes":%d,"model":%s}\n' % (t, rows, size_bytes, _encode(model))
        self._lines.append(line)
        self._queued += len(line)
        if self._queued - self._processed > MAX_PENDING_BYTES:
            self._end("the disk is too slow")
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self._flush)

    def close(self) -> None:
        """Writes the remaining lines and closes the file; removes it if it is empty. Blocks."""
        if self._fd < 0:
            return
        self._flush()
        self._thread.shutdown()
        self._ended = True
        os.close(self._fd)
        self._fd = -1
        if not self._queued:  # a server that did not start leaves no file
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _flush(self) -> None:
        self._flush_scheduled = False
        lines, self._lines = self._lines, []
        if lines and not self._ended:
            self._thread.submit(self._write, lines)

    def _write(self, lines: list[bytes]) -> None:
        """Writes the lines that fit. Runs on the writer thread."""
        if self._ended:
            return
        data = b"".join(lines)
        size = len(data)
        full = self._written + len(data) > self._max_bytes
        if full:
            data = data[: data.rfind(b"\n", 0, self._max_bytes - self._written) + 1]
        try:
            self._written += _write_all(self._fd, data)
        except OSError as exc:
            with contextlib.suppress(OSError):  # removes an incomplete line
                os.ftruncate(self._fd, self._written)
            self._end(f"writing failed: {exc.strerror}")
        else:
            if full:
                self._end(f"the file has reached {self._max_bytes} bytes")
        self._processed += size

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._lines = []
            log.warning("recording=ended file=%s why=%r consequence=later_requests_are_not_in_it", self._path, why)


def _write_all(fd: int, data: bytes) -> int:
    """Writes all of the data and returns its length. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


_encode = msgspec.json.Encoder().encode


class BatchReport(Struct, frozen=True, gc=False):
    """A finished batch. `reason` is the policy's word for why it sent the batch at that time with that many rows.

    `time_s` is the time of completion in Unix seconds. `waited_s` is the queue time of the oldest request, `run_s` the
    time in the worker, `seconds` the time from dispatch to completion. `outcome`, `stages_s` and `hooks_s` are defined
    in `BatchRecord`.
    """

    time_s: float
    model: str
    version: str
    reason: str
    requests: int
    rows: int
    max_batch_size: int
    waited_s: float
    bucket: str
    instance: int
    ahead: bool
    run_s: float
    seconds: float
    failed: int
    outcome: str
    stages_s: tuple[float, float, float] | None = None
    hooks_s: tuple[float, float] | None = None


class BatchRecords(Observer):
    """The last KEPT_BATCHES batches of each of the KEPT_VERSIONS model versions that ran one last."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, str], deque[BatchReport]] = {}

    def _ring(self, key: tuple[str, str]) -> deque[BatchReport]:
        """A new ring, in place of the one that had no batch for the longest time."""
        if len(self._rings) >= KEPT_VERSIONS:
            del self._rings[min(self._rings, key=lambda each: self._rings[each][-1].time_s)]
        ring = self._rings[key] = deque(maxlen=KEPT_BATCHES)
        return ring

    def on_complete(self, record: BatchRecord) -> None:
        r, key = record, (record.model, record.version)
        (self._rings.get(key) or self._ring(key)).append(
            BatchReport(
                time.time(),
                r.model,
                r.version,
                r.reason,
                len(r.waits_s),
                r.rows,
                r.max_batch_size,
                max(r.waits_s, default=0.0),
                r.bucket,
                r.slot,
                r.ahead,
                r.run_s,
                r.seconds,
                r.failed,
                r.outcome,
                r.stages_s,
                r.hooks_s,
            )
        )

    def newest(
        self, model: str | None = None, version: str | None = None, limit: int = KEPT_BATCHES
    ) -> list[BatchReport]:
        """At most `limit` batches, newest first; with `model`, only the batches of this model, or of its `version`."""
        rings = [
            reversed(ring)
            for (name, number), ring in self._rings.items()
            if model in (None, name) and version in (None, number)
        ]
        return list(islice(merge(*rings, key=lambda batch: -batch.time_s), limit))

    def body(self, model: str | None, limit: int) -> bytes:
        """`{"batches": [...]}` as JSON, newest first."""
        return msgspec.json.encode({"batches": self.newest(model, limit=limit)})
