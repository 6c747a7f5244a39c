"""The states of an entry and of a slot, each as a table of what may follow. The scheduler asserts every move."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from penstock.core.batching.entry import Entry


class EntryState(IntEnum):
    """Where an entry (a request, or a part of a split one) is."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    SPLIT = 3  # larger than the batch, or than the room in it: its parts wait and run in its place
    DONE = 4  # answered
    DROPPED = 5  # expired, shed, failed, cancelled


class SlotState(IntEnum):
    """What a slot can take."""

    DOWN = 0
    IDLE = 1  # of a wide slot: it has room for more rows
    BUSY = 2
    DYING = 3  # a batch on it came back dead or lost: nothing is sent until it is down and up again
    RETIRING = 4  # taken away: it answers what it has, gets nothing more, and is then forgotten


ENTRY_MOVES: dict[EntryState, frozenset[EntryState]] = {
    EntryState.NEW: frozenset({EntryState.WAITING, EntryState.SPLIT}),
    EntryState.WAITING: frozenset({EntryState.RUNNING, EntryState.SPLIT, EntryState.DROPPED}),
    EntryState.RUNNING: frozenset({EntryState.DONE, EntryState.WAITING, EntryState.DROPPED}),
    EntryState.SPLIT: frozenset({EntryState.DONE, EntryState.DROPPED}),
    EntryState.DONE: frozenset(),
    EntryState.DROPPED: frozenset(),
}

SLOT_MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.DOWN: frozenset({SlotState.DOWN, SlotState.IDLE}),
    SlotState.IDLE: frozenset(
        {SlotState.IDLE, SlotState.BUSY, SlotState.DOWN, SlotState.DYING, SlotState.RETIRING}  # the last two: if wide
    ),
    SlotState.BUSY: frozenset({SlotState.BUSY, SlotState.IDLE, SlotState.DYING, SlotState.RETIRING}),
    SlotState.DYING: frozenset({SlotState.DYING, SlotState.DOWN, SlotState.IDLE, SlotState.RETIRING}),
    SlotState.RETIRING: frozenset(),
}

SOURCES: dict[int, frozenset[int]] = {
    int(to): frozenset(int(s) for s, nexts in ENTRY_MOVES.items() if to in nexts) for to in EntryState
}


def move(entries: Iterable[Entry], to: EntryState) -> None:
    """Sets the state of every entry; a move that is not in the table is a bug, and asserted."""
    sources, new = SOURCES[to], int(to)
    for e in entries:
        assert e.state in sources, f"entry {e!r} cannot become {to.name}"
        e.state = new
