"""Values of the scheduler: what it and its policies know of a request, and the events it returns."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Literal

from msgspec import Struct

from penstock.types import SequenceRequest

INF = float("inf")


class Entry(Struct, eq=False, gc=False):
    """What a policy knows of a request; never its payload.

    `rows` is its share of a batch. `deadline_s` is the caller's deadline or arrival + slo, whichever is earlier, on the
    scheduler's clock; INF without either. `expires_s` ends the waiting (`timeout_s`). `priority` is a class; 0 is the
    most urgent and the default. Only entries of one `bucket` share a batch. A request larger than the batch waits as
    pieces; a `divisible` one may also be cut to fill a batch. `parent` is then the request, `start` the piece's first
    row. The rows of a `separate` request are items of their own: one can fail without the others. `behind_s` puts it
    behind requests that arrive up to so much later. Requests of one `sequence` run in order, one at a time. `length`:
    the tokens of its longest row, 0 without lengths.
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
    separate: bool = False
    behind_s: float = 0.0
    sequence: SequenceRequest | None = None
    length: int = 0
    # set by the scheduler
    vdeadline_s: float = INF
    seq: int = 0
    deaths: int = 0
    died_on: int = -1  # slot of the last death
    died_s: float = -INF
    passed: int = 0
    slot: int = -1  # the only slot that may run it
    held: bool = False  # it waits behind another request of its sequence
    state: int = 0


class Dispatch(Struct, frozen=True):
    """Send these entries (or pieces of split ones) to this slot now. `reason` explains the size to people.

    `concurrent`: the slot runs batches concurrently. `ended`: ids of sequences of the slot that ended since its last
    batch; its worker drops their states. `padding`: the part of the work that is padding, of a model that pads.
    """

    batch_id: int
    slot: int
    entries: list[Entry]
    rows: int
    reason: str
    ahead: bool = False
    concurrent: bool = False
    ended: tuple[str, ...] = ()
    padding: float | None = None


class Expire(Struct, frozen=True):
    """The request's deadline or timeout passed, or cannot be met: it will not run."""

    id: int
    reason: Literal["expired", "timeout"]


class Shed(Struct, frozen=True):
    """Dropped before its own deadline, because not all of the queue can be served in time."""

    id: int
    reason: Literal["overload"]


class Fail(Struct, frozen=True):
    """The request killed its worker twice, the second time alone, or was in a death and is not idempotent; or the slot
    with the state of its sequence is gone."""

    id: int
    reason: Literal["worker_died", "sequence_lost"]


Event = Dispatch | Expire | Shed | Fail


class Outcome(Struct, frozen=True):
    """How a batch ended.

    ok: every entry has its own result or error; `failed` holds the ids of entries with an error. died: the worker ended
    while running this batch. lost: the worker ended while this batch waited behind another. `run_s` is the worker's
    time; `prepare_s` came before it and may overlap another batch. `on_device`: `run_s` is the time of a device for
    this batch alone, which overlaps everything else. `oom` is (fewest rows that ran out of memory, most rows that ran).
    """

    kind: Literal["ok", "died", "lost"] = "ok"
    run_s: float = 0.0
    failed: frozenset[int] = frozenset()
    oom: tuple[int, int] | None = None
    prepare_s: float = 0.0
    on_device: bool = False


class EntryState(IntEnum):
    """The state of an entry: a request, or a piece of a split one."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    SPLIT = 3  # larger than the batch or than the room in it: its pieces wait and run instead
    DONE = 4  # answered
    DROPPED = 5  # expired, shed, failed or cancelled


ENTRY_MOVES: dict[EntryState, frozenset[EntryState]] = {
    EntryState.NEW: frozenset({EntryState.WAITING, EntryState.SPLIT}),
    EntryState.WAITING: frozenset({EntryState.RUNNING, EntryState.SPLIT, EntryState.DROPPED}),
    EntryState.RUNNING: frozenset({EntryState.DONE, EntryState.WAITING, EntryState.DROPPED}),
    EntryState.SPLIT: frozenset({EntryState.DONE, EntryState.DROPPED}),
    EntryState.DONE: frozenset(),
    EntryState.DROPPED: frozenset(),
}
SOURCES: dict[int, frozenset[int]] = {
    int(to): frozenset(int(s) for s, nexts in ENTRY_MOVES.items() if to in nexts) for to in EntryState
}


def move(entries: Iterable[Entry], to: EntryState) -> None:
    """Sets the state of every entry. Asserts that the table allows the move."""
    sources, new = SOURCES[to], int(to)
    for e in entries:
        assert e.state in sources, f"entry {e!r} cannot become {to.name}"
        e.state = new
