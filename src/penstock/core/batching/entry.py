"""What the scheduler and its policies know of a request, and what the scheduler decides. Values only."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

INF = float("inf")


class Entry(Struct, eq=False):
    """All that a policy may know of a request; never its payload.

    `rows` is what it fills of a batch. `deadline_s` is the caller's own or arrival + slo, whichever is earlier, on the
    scheduler's clock; INF without either. `expires_s` is the hard end of waiting (`timeout_s`). `priority` is a class:
    0 is the most urgent and the default. `bucket`: only entries of one bucket share a batch. A request larger than
    the batch is held as parts, a `divisible` one also to fill a batch: `parent` is then the request and `start` the
    first row of the part.
    """

    id: int
    rows: int = 1
    nbytes: int = 0
    arrival_s: float = 0.0
    deadline_s: float = INF
    expires_s: float = INF
    priority: int = 0
    bucket: str = ""
    parent: Entry | None = None
    start: int = 0
    divisible: bool = False
    # the scheduler's own notes
    vdeadline_s: float = INF
    seq: int = 0
    deaths: int = 0
    passed: int = 0
    state: int = 0


class Dispatch(Struct, frozen=True):
    """Send these entries (or parts of split ones) to this slot, now. `reason` says why this size, for people.

    `wide`: the slot works on batches side by side.
    """

    batch_id: int
    slot: int
    entries: list[Entry]
    rows: int
    reason: str
    ahead: bool = False
    wide: bool = False


class Expire(Struct, frozen=True):
    """The request's time is over, or cannot be met any more: it will not be run."""

    id: int
    reason: Literal["expired", "timeout"]


class Shed(Struct, frozen=True):
    """Dropped before its own deadline, because the queue cannot all be served in time (trim)."""

    id: int
    reason: Literal["overload"]


class Fail(Struct, frozen=True):
    """The request was in a worker's death and is not run again (twice dead, or not idempotent)."""

    id: int
    reason: Literal["worker_died"]


Event = Dispatch | Expire | Shed | Fail


class Outcome(Struct, frozen=True):
    """How a batch ended.

    ok - every entry has its own result or error; `failed` are the ids of entries with an error.
    died - the worker ended while it ran this batch. lost - the worker ended while this batch waited behind another.
    `run_s` is the worker's own time; before it, `prepare_s` were needed that may pass beside another batch. `oom` is
    (fewest rows that ran out of memory, most rows that ran).
    """

    kind: Literal["ok", "died", "lost"] = "ok"
    run_s: float = 0.0
    failed: frozenset[int] = frozenset()
    oom: tuple[int, int] | None = None
    prepare_s: float = 0.0
