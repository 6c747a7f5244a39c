"""BatchPolicy: what a policy is told, what it sees, and the four things that it may answer."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.queues import Bucket


class Take(Struct, frozen=True):
    """Send the earliest entries of `view.bucket` whose deadline is not before `until_s`, up to `rows` rows.

    The scheduler does the packing (entries of several rows, misfits, splits) and picks the slot; naming the ids one by
    one would only cost time. `full`: waiting longer could not make it larger. `fill`: if what does not fit leaves rows
    empty, the first divisible one of it is cut. `reason` says why this size, for people.
    """

    rows: int
    until_s: float = -INF
    full: bool = False
    fill: bool = False
    reason: str = ""


class Drop(Struct, frozen=True):
    """End these waiting entries: "expired" - cannot be in time any more; "overload" - the queue as a whole cannot."""

    entries: list[Entry]
    reason: Literal["expired", "overload"]


class WaitUntil(Struct, frozen=True):
    """Hold; ask again at the time `t` (later than now), or after the next event, whichever is earlier."""

    t: float


Choice = Take | Drop | WaitUntil | None


class Running(Struct, eq=False):
    """A batch on a slot. `end_s` is when it is predicted to end; of one on a `wide` slot nobody can tell, and `rows`
    are those not answered yet."""

    id: int
    slot: int
    entries: list[Entry]
    rows: int
    start_s: float
    end_s: float
    ahead: bool
    exact: bool  # of a batch that killed a worker: it is never merged with others
    wide: bool = False


class View(Struct, eq=False):
    """What `select` may look at. The scheduler keeps it up to date; a policy never changes it.

    `slots` are up, `idle` of them have nothing to do (0: only a Drop is asked for). `max_rows` is the largest batch
    now. `inside_rows` wait or run. `held_s` is when entries first waited beside the idle slot (now, if nothing was
        held before). `ahead`: the batch would start only in about `ahead_s` seconds, behind a running one of
    `ahead_rows` rows.
    `busy_s` is the predicted time that all running batches still need, together.
    """

    bucket: Bucket
    cost: Cost
    slots: int = 0
    idle: int = 0
    max_rows: int = 1
    inside_rows: int = 0
    held_s: float = INF
    ahead: bool = False
    ahead_s: float = 0.0
    ahead_rows: int = 0
    busy_s: float = 0.0


class BatchPolicy(Protocol):
    """Decides how many entries go, when, and which are given up. Pure: the same calls give the same answers."""

    def on_arrival(self, entry: Entry, now: float) -> None:
        """A request was queued."""
        ...

    def on_complete(self, batch: Running, seconds: float, view: View, now: float) -> None:
        """A batch was answered; `view.inside_rows` still counts it, and `view.cost` has learned of it."""
        ...

    def select(self, view: View, now: float) -> Choice:
        """What to do with `view.bucket`. Asked again after every Take and Drop, until WaitUntil or None."""
        ...

    def explain(self) -> dict[str, object]:
        """What it has learned, for people."""
        ...
