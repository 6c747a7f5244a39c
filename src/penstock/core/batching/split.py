"""Requests larger than the batch, or than the room in it: cut into parts, ended once.

A part is an Entry with the request's id, `parent` the request and `start` its first row. A split request ends when all
its rows are answered; or, once a part failed, expired or the caller left, as soon as no part of it runs any more (a
worker may still read its payload until then), with the parts that waited purged at once.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.batching.entry import Entry, Event
from penstock.core.batching.states import EntryState


class Split(Struct, eq=False):
    """A split request: its waiting parts, how many run, rows not answered yet. `over`: nothing more is to run;
    `verdict` is then the event that ends it, None if the batch that ends it tells."""

    root: Entry
    waiting: list[Entry]
    running: int = 0
    rows_left: int = 0
    over: bool = False
    verdict: Event | None = None


def cut(entry: Entry, rows: int) -> list[Entry]:
    """Parts of at most `rows` rows, in row order, of a request or of a part that has become too large."""
    return [_part(entry, k, min(rows, entry.rows - k)) for k in range(0, entry.rows, rows)]


def cut_off(entry: Entry, rows: int) -> list[Entry]:
    """The first `rows` rows of a request or of a part, and the rest."""
    return [_part(entry, 0, rows), _part(entry, rows, entry.rows - rows)]


def _part(entry: Entry, start: int, rows: int) -> Entry:
    return replace(
        entry,
        rows=rows,
        nbytes=0,
        parent=entry.parent or entry,
        start=entry.start + start,
        state=int(EntryState.NEW),
    )
