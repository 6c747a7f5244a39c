"""Linger: for a node of a pipeline, which knows what is on its way to it and what there is room for behind it.

An idle slot takes what waits when it is full, when its head has lingered `wait_s`, when nothing is on its way here, or
when what is would come too late to be worth it; never more than there is credit for. Deadlines, drops and classes are
those of the policy that it stands on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from penstock.core.batching.entry import Entry
from penstock.core.batching.policies.base import BatchPolicy, Choice, Running, Take, View, WaitUntil

UNKNOWN_ROWS = 4  # of a slice, while nothing was learned of a row: it may take long, and a batch ends with its last


class Linger:
    """See the module. All three are asked when a batch could start, and must answer for that moment.

    `coming(now)`: (when the next rows are expected, how many), (INF, 0) if nothing is on its way. `credit()`: most rows
    that may start. Whoever answers these asks for a turn once less is coming, or there is credit again. `slice_s`: a
    batch is to take no longer than about this, and what waits is shared out to all idle slots: for work that gains
    nothing by batches.
    """

    def __init__(
        self,
        base: BatchPolicy,
        *,
        wait_s: float,
        coming: Callable[[float], tuple[float, int]],
        credit: Callable[[], int],
        slice_s: float | None = None,
    ) -> None:
        self._base = base
        self._wait_s = wait_s
        self._coming, self._credit = coming, credit
        self._slice_s = slice_s
        self._lingered = 0

    def on_arrival(self, entry: Entry, now: float) -> None:
        self._base.on_arrival(entry, now)

    def on_complete(self, batch: Running, seconds: float, view: View, now: float) -> None:
        self._base.on_complete(batch, seconds, view, now)

    def select(self, view: View, now: float) -> Choice:
        choice = self._base.select(view, now)
        if type(choice) is not Take:
            return choice
        most = view.max_rows if self._slice_s is None else self._slice(view)
        if self._wait_s > 0 and choice.rows < most:
            due = self._due(view, choice.rows, now)
            if now + view.ahead_s < due and self._worth(view, choice.rows, most, due, now):
                if view.ahead:
                    return None
                self._lingered += view.held_s >= now
                return WaitUntil(due)
        rows = min(choice.rows, most, self._credit())
        if rows < 1:
            return None
        reason = choice.reason if rows == choice.rows else "slice" if rows == most else "credit"
        # behind a running batch only just before that ends: another slot may be idle sooner, time may run out
        full = choice.full and rows >= min(most, choice.rows) and not view.ahead
        return Take(rows, choice.until_s, full, choice.fill, reason)

    def _worth(self, view: View, rows: int, most: int, due: float, now: float) -> bool:
        """Whether what is expected before `due` saves more than the `rows` lose that would wait for it: the set-up of
        a batch of their own for each. Without a learned cost the wait is as it was asked for."""
        at_s, more = self._coming(now)
        wait_s = max(0.0, at_s - now - view.ahead_s)
        if at_s >= due:
            return False
        return not view.cost.ready or min(more, most - rows) * view.cost.a > rows * wait_s

    def _slice(self, view: View) -> int:
        """Rows of a slice of time, or of a share of what waits where other slots are idle, too."""
        cost, waiting = view.cost, view.bucket.rows
        rows = min(view.max_rows, UNKNOWN_ROWS)
        parts = view.idle
        if cost.ready:
            assert self._slice_s is not None
            rows = max(1, min(view.max_rows, int(self._slice_s / cost.b)))
            parts = min(parts, max(1, int(waiting / max(1.0, cost.knee))))
        return min(rows, ceil(waiting / parts)) if parts > 1 else rows

    def _due(self, view: View, rows: int, now: float) -> float:
        """When the head has lingered enough, or its time would run out. What was expected may be late: a slot is not
        held for longer than the set-up that is to be saved."""
        head, cost = view.bucket.entries[0], view.cost
        due = min(head.arrival_s + self._wait_s, head.deadline_s, head.expires_s)
        if not cost.ready:
            return due
        last = min(head.deadline_s, head.expires_s) - cost.high(rows)
        return min(due, last, min(view.held_s, now) + view.ahead_s + cost.a)

    def explain(self) -> dict[str, object]:
        """Keys: those of the policy it stands on, and wait_s, lingered (how often a batch was held for more)."""
        return {**self._base.explain(), "policy": "linger", "wait_s": self._wait_s, "lingered": self._lingered}
