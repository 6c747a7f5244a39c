"""BatchPolicy: the events a policy receives, the view it sees, and the four choices it may return."""

from typing import Literal, Protocol

from msgspec import Struct

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.queues import Bucket


class Take(Struct, frozen=True):
    """Send the earliest entries of `view.bucket` whose deadline is not before `until_s`, up to `rows` rows.

    The scheduler packs the batch (entries of several rows, misfits, splits) and picks the slot. `full`: waiting longer
    could not make the batch larger. `fill`: if entries that do not fit leave rows empty, the first divisible one is
    cut. `reason` explains the size to people.
    """

    rows: int
    until_s: float = -INF
    full: bool = False
    fill: bool = False
    reason: str = ""


class Drop(Struct, frozen=True):
    """End these waiting entries: "expired" (each would be late) or "overload" (the queue as a whole would be late)."""

    entries: list[Entry]
    reason: Literal["expired", "overload"]


class WaitUntil(Struct, frozen=True):
    """Hold. Ask again at the time `t` (later than now) or after the next event, whichever is earlier. Arrivals are no
    reason to ask before `rows` rows wait in the bucket."""

    t: float
    rows: int = 0


Choice = Take | Drop | WaitUntil | None


class SlotBatch(Struct, eq=False):
    """A batch on a slot. `end_s` is its predicted end. On a `concurrent` slot there is no prediction, and `rows` counts
    the rows without a response. `work` is what its cost depends on: its rows, or its tokens. `run_s`: the worker's time
    on it, once it is answered."""

    id: int
    slot: int
    entries: list[Entry]
    rows: int
    start_s: float
    end_s: float
    ahead: bool
    exact: bool  # from a batch that killed a worker: never merged with others
    concurrent: bool = False
    work: int = 0
    run_s: float = 0.0


class View(Struct, eq=False):
    """What `select` sees. The scheduler keeps it up to date; a policy never changes it.

    `slots` are up; `idle` of them are idle (0: only a Drop is wanted). `max_rows` is the current largest batch.
    `inside_rows` wait or run. `held_s` is when entries were first held while a slot was idle (now, if none were).
    `ahead`: the batch would start in about `ahead_s` seconds, behind a running one of `ahead_rows` rows. `busy_s` is
    the predicted time that all running batches still need, together. `crowded`: the callers keep a processor busy, so
    that they would run while a slot waits. `ladder`: the sizes to which batches are padded. `share`: the part of all
    waiting work that the bucket has, with lengths.
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
    crowded: bool = False
    ladder: Ladder | None = None
    share: float = 1.0


class BatchPolicy(Protocol):
    """Decides how many entries go, when, and which are dropped. Pure: the same calls return the same choices."""

    def on_arrival(self, entry: Entry, now: float) -> None:
        """A request was queued."""

    def on_complete(self, batch: SlotBatch, seconds: float, view: View, now: float) -> None:
        """A batch was answered. `view.inside_rows` still counts it; `view.cost` includes it."""

    def select(self, view: View, now: float) -> Choice:
        """The choice for `view.bucket`. Called again after every Take and Drop, until WaitUntil or None."""

    def explain(self) -> dict[str, object]:
        """What the policy has learned, for people."""
