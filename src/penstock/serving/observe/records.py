"""The last batches, and why each was as large as it was: an Observer, asked by `GET /debug/batches`."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice

import msgspec
from msgspec import Struct

from penstock.core.contracts import BatchRecord, Observer

KEPT = 1000


class BatchWhy(Struct, frozen=True, gc=False):
    """One batch that ended. `reason` is the policy's own word for why it went when it did, with so many rows.

    `time_s` is when it ended, seconds since 1970; `waited_s` how long its oldest request had waited when it was sent;
    `run_s` the worker's own time, `seconds` that from sending to the end. `instance` is its slot; `outcome` as in
    `BatchRecord`.
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


class BatchRecords(Observer):
    """Keeps the last `size` batches of all models."""

    def __init__(self, size: int = KEPT) -> None:
        self._ring: deque[BatchWhy] = deque(maxlen=size)

    def on_complete(self, record: BatchRecord) -> None:
        r = record
        self._ring.append(
            BatchWhy(
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
            )
        )

    def newest(self, model: str | None = None, limit: int = KEPT) -> list[BatchWhy]:
        """At most `limit` of them, newest first; those of one model, if it is named."""
        return list(islice((b for b in reversed(self._ring) if model is None or b.model == model), limit))

    def body(self, model: str | None, limit: int) -> bytes:
        """`{"batches": [...]}` as JSON, newest first."""
        return msgspec.json.encode({"batches": self.newest(model, limit)})
