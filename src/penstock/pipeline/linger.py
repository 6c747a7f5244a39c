"""Linger: the policy of a pipeline node, which knows the items to come and how much the next nodes can accept.

An idle slot takes the waiting rows when they fill a batch, when the head has waited `wait_s`, when nothing is coming,
or when the coming rows would arrive too late to be worth waiting for. It never takes more than back-pressure allows.
The base policy decides deadlines, drops and classes.
"""

from collections.abc import Callable
from math import ceil

from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.policies.base import BatchPolicy, Choice, SlotBatch, Take, View, WaitUntil

UNKNOWN_ROWS = 4  # rows of a slice before the cost is known: a row may take long, and a batch ends with its last one
ROW_GAIN = 0.1  # a choice


class Linger:
    """Holds batches for rows that are coming. `coming` and `credit` are called when a batch could start.

    `coming(now)` returns (when the next rows are expected, how many), or (INF, 0). `credit()` returns the most rows
    that may start. Their owner asks for a turn when fewer rows are coming or credit returns. With `slice_s` a batch
    takes at most about this long, and the waiting rows are shared between all idle slots: for work that gains nothing
    from batching.
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
        self._row_s = 0.0  # moving average of a row's run time
        self._lingered = 0

    def on_arrival(self, entry: Entry, now: float) -> None:
        if self._slice_s is None:  # slices are never held, so there is nothing to learn
            self._base.on_arrival(entry, now)

    def on_complete(self, batch: SlotBatch, seconds: float, view: View, now: float) -> None:
        if self._slice_s is None:
            self._base.on_complete(batch, seconds, view, now)
        elif batch.run_s > 0:
            self._row_s += (batch.run_s / batch.rows - self._row_s) * (ROW_GAIN if self._row_s else 1.0)

    def select(self, view: View, now: float) -> Choice:
        bucket = view.bucket
        if self._slice_s is not None and view.idle and not (bucket.finite or bucket.low):
            # the base policy decides deadlines, drops and classes, and there are none
            most = self._slice(view)
            rows = min(most, bucket.rows, self._credit())
            reason = "all that waits" if rows == bucket.rows else "slice" if rows == most else "credit"
            return Take(rows, -INF, rows == view.max_rows and not view.ahead, True, reason) if rows > 0 else None
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
        # ahead only just before the running batch ends: another slot may be idle sooner
        full = choice.full and rows >= min(most, choice.rows) and not view.ahead
        return Take(rows, choice.until_s, full, choice.fill, reason)

    def _worth(self, view: View, rows: int, most: int, due: float, now: float) -> bool:
        """Whether the rows expected before `due` save more set-up time than the waiting `rows` lose. Without a learned
        cost the configured wait applies."""
        at_s, more = self._coming(now)
        wait_s = max(0.0, at_s - now - view.ahead_s)
        if at_s >= due:
            return False
        return not view.cost.fitted or min(more, most - rows) * view.cost.a > rows * wait_s

    def _slice(self, view: View) -> int:
        """Rows of one time slice, or of one idle slot's share of the waiting rows."""
        cost, waiting = view.cost, view.bucket.rows
        rows = min(view.max_rows, UNKNOWN_ROWS)
        parts = view.idle
        if cost.ready:
            assert self._slice_s is not None
            # not the cost, which has the hand-over: while batches have one row, that counts as the time of the row
            rows = max(1, min(view.max_rows, int(self._slice_s / (self._row_s or cost.b))))
            parts = min(parts, max(1, int(waiting / max(1.0, cost.knee))))
        return min(rows, ceil(waiting / parts)) if parts > 1 else rows

    def _due(self, view: View, rows: int, now: float) -> float:
        """When the head has waited enough or must go. Expected rows may be late, so a slot is held no longer than the
        set-up time it would save."""
        head, cost = view.bucket.entries[0], view.cost
        due = min(head.arrival_s + self._wait_s, head.deadline_s, head.expires_s)
        if not cost.ready:
            return due
        last = min(head.deadline_s, head.expires_s) - cost.high(rows)
        return min(due, last, min(view.held_s, now) + view.ahead_s + cost.a) if cost.fitted else min(due, last)

    def explain(self) -> dict[str, object]:
        """Keys: the base policy's keys, wait_s, and lingered (how often a batch was held)."""
        return {**self._base.explain(), "policy": "linger", "wait_s": self._wait_s, "lingered": self._lingered}
