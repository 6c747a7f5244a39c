"""Adaptive: the default policy. Work-conserving, with learned refinements; it needs no configuration."""

# 1. An idle slot takes the waiting rows at once. While all slots are busy the batch grows, because one batch of n rows
#    takes t(n) = a + b*n seconds, less than n batches of one; a and b are learned from past batches (`cost.py`).
# 2. The policy holds a batch, that is, lets a slot stay idle, only for a reason that pays.
# 3. Stagger: greedy slots form uneven batches (one row, one row, forty rows). With m slots and lam rows per second,
#    n* = lam*a / (m - lam*b) is the batch of an even schedule, and a short hold spreads the starts evenly.
# 4. Regroup: clients that return right after each response would form two groups, which take turns with half-full
#    batches. `Returns` learns when they come back, and a short hold after a completion brings them together.
# 5. Both holds together end after at most t(min(n*, a/b))/m, which is at most 2a/m, and once no more rows are expected.
# 6. Trials measure where a longer hold brings more rows per second (`trials.py`); it is at most 2*t(max_rows).
# 7. While the callers keep a processor busy (`View.crowded`), a batch that waits loses nothing: they send more.
# 8. `max_hold_s` caps every hold, and none is begun that would make the first waiting request miss its deadline.
# 9. With deadlines the batch is the largest that enough waiting rows tolerate; tighter ones wait for another slot.
# 10. If an urgent request leads a batch, lower classes fill it only as far as their throughput needs it.
# 11. Requests that would be late are dropped; if the whole queue would be late, the oldest of the lowest class.
# 12. With a ladder of sizes a batch takes all rows that its padding has room for, or is cut to the lower size if that
#     runs more rows per second (`ladder.py`); the rest leads the next batch.

from __future__ import annotations

from collections import deque
from math import ceil

from msgspec import structs

from penstock.config.schema import BatchingConfig
from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.policies.base import Choice, Drop, SlotBatch, Take, View, WaitUntil
from penstock.core.batching.policies.trials import HoldTrials

# Unless they say otherwise, constants were chosen by simulating an accelerator (5 ms + 0.2 ms per row, 1 to 8 slots,
# open and closed loops), and confirmed on eight other models with one to five slots.
BINS = 8  # of the time a/m after a completion, in which clients of a closed loop return
RATE_WINDOW = 32  # arrivals over which the rate is measured
MIN_ARRIVALS = 8  # before the rate is used
MIN_ROUNDS = 5  # completions before the returns are used
CLOSED_LOOP_SHARE = 0.4  # of the served rows that must return at once, for the load to count as a closed loop
RETURNED_SHARE = 0.8  # of the rows that can still return: a hold must bring so many
STAGGER_LIMIT = 1.2  # stagger only while n* <= 1.2 * (1 - 1/m) * a/b: above that, greedy batches are large anyway
BIN_TOLERANCE = 1e-6  # share of a bin: absorbs the rounding of a timer set to its end
ENOUGH_SPEED = 0.93  # a choice: the share of a full batch's rate up to which lower classes fill an urgent batch
CROWD_S = 0.1  # a choice: the longest hold while the callers keep a processor busy
CROWD_LOOK_S = 0.005  # how often it is looked at whether they still do: the interpreter's switch interval
CHEAP_SETUP_S = 0.0005  # a choice: with a lower set-up cost, more batches cost the server more than they gain


class Returns:
    """When the rows of a completed batch return: arrivals per completed row, in bins of 1/8 of a/m."""

    def __init__(self) -> None:
        self.since_s = -INF  # the last completion
        self.rows = 0  # rows it answered
        self.width = 0.0  # seconds per bin; 0 while the set-up cost is unknown
        self.counts = [0] * BINS  # rows that arrived since, by bin
        self.rounds = 0
        self.closed = 0.0  # share of the served rows that return at once, beyond the mean rate
        self._rate = 0.0  # mean rate at the last completion, rows per second
        # means over past rounds, by bin: rows that arrived, rows served, arrivals beyond the mean rate until its end
        self._arrived, self._served, self._excess = [0.0] * BINS, [0.0] * BINS, [0.0] * BINS
        self._mean_rows = 0.0  # of a batch

    def learn(self, now: float) -> None:
        """Closes the round that the last completion opened; only completed bins count."""
        gain, slow = max(0.1, 1 / (self.rounds + 1)), max(0.05, 1 / (self.rounds + 1))
        rows, arrived, served, excess = self.rows, self._arrived, self._served, self._excess
        self._mean_rows += slow * (rows - self._mean_rows)
        cum, mean = 0, self._rate * self.width
        completed = int(min(BINS, (now - self.since_s) / (self.width * (1 - BIN_TOLERANCE))))
        for j in range(completed):
            count = self.counts[j]
            cum += count
            arrived[j] += gain * (count - arrived[j])
            served[j] += gain * (rows - served[j])
            excess[j] += slow * (cum - mean * (j + 1) - excess[j])
        self.rounds += 1
        self.closed = max(self._excess) / self._mean_rows

    def open(self, rows: int, width: float, rate: float, now: float) -> None:
        """Begins a round: a batch of `rows` rows was just answered."""
        self.since_s, self.rows, self.width, self._rate = now, rows, width, rate
        self.counts = [0] * BINS

    def expected(self, served: int, j: int, left_s: float, room: float) -> list[tuple[float, float]]:
        """For each bin from `j` on: (seconds D until its end, rows of the `served` ones that return within D, at most
        `room`)."""
        rows, ahead, out = 0.0, 0.0, []
        for i in range(j, BINS):
            width_s = left_s if i == j else self.width
            if self._served[i] > 0:
                rows += served * self._arrived[i] / self._served[i] * width_s / self.width
            ahead += width_s
            out.append((ahead, min(rows, room)))
        return out


class Adaptive:
    """The default policy. `max_hold_s` caps every hold; 0 makes it strictly work-conserving."""

    def __init__(self, max_hold_s: float | None = None) -> None:
        self.max_hold_s = INF if max_hold_s is None else max_hold_s
        self._returns = Returns()
        self._times: deque[float] = deque(maxlen=RATE_WINDOW)
        self._rows: deque[int] = deque(maxlen=RATE_WINDOW)
        self._peak = 0.0  # recent peak of the rows inside: the clients of a closed loop
        self._batch = 1.0  # n*, for `explain`
        self._holds = {"stagger": 0, "regroup": 0, "trial": 0, "crowd": 0}
        self._crowding = self._crowd_over = False
        self._trials = HoldTrials()

    @classmethod
    def of(cls, config: BatchingConfig) -> Adaptive:
        """The policy that `[models.NAME.batching]` describes; max_hold_s "auto" sets no cap."""
        return cls(None if config.max_hold_s == "auto" else config.max_hold_s)

    # ---- learning

    def on_arrival(self, entry: Entry, now: float) -> None:
        self._times.append(now)
        self._rows.append(entry.rows)
        r = self._returns
        if r.width > 0:
            j = int((now - r.since_s) / r.width + BIN_TOLERANCE)
            if 0 <= j < BINS:  # below 0: it arrived before the responses, but was seen after them
                r.counts[j] += entry.rows

    def on_complete(self, batch: SlotBatch, seconds: float, view: View, now: float) -> None:
        r, cost = self._returns, view.cost
        if r.width > 0:
            r.learn(now)
        self._peak = max(self._peak, view.inside_rows)
        self._trials.clients = max(self._trials.clients, view.inside_rows)
        self._crowding = False  # a full batch may have ended the hold
        self._peak = max(view.inside_rows - batch.rows, self._peak - max(0.02 * self._peak, 0.1))  # clients that left
        width = cost.a / max(1, view.slots) / BINS if cost.ready else 0.0
        rate = self._rate(now) if len(self._times) >= MIN_ARRIVALS else 0.0
        r.open(batch.rows, width, rate if rate < INF else 0.0, now)
        if width > 0 and self.max_hold_s:
            self._trials.completed(batch, view, self.max_hold_s, r.closed >= CLOSED_LOOP_SHARE, now)

    def _rate(self, now: float) -> float:
        """Rows per second over the last arrivals."""
        span = now - self._times[0]
        return (sum(self._rows) - self._rows[0]) / span if span > 0 else INF

    def even_batch(self, view: View, now: float) -> float:
        """n*: with starts evenly spaced, every slot takes n* rows every t(n*). 1 while the rate is unknown."""
        if len(self._times) < MIN_ARRIVALS:
            return 1.0
        rate = self._rate(now)
        room = view.slots - rate * view.cost.b
        return view.max_rows if room <= 0 else min(view.max_rows, rate * view.cost.a / room)

    # ---- release

    def select(self, view: View, now: float) -> Choice:
        choice = self._choice(view, now)
        if view.ladder is None or type(choice) is not Take or choice.full or not view.cost.ready:
            return choice
        return self._stepped(choice, view, view.ladder, now)

    def _stepped(self, choice: Take, view: View, ladder: Ladder, now: float) -> Take:
        """The batch with the rows that its padding has room for, or cut to the size below. What is cut off must not
        become late."""
        bucket, cost = view.bucket, view.cost
        rows = ladder.next_batch(choice.rows, min(bucket.rows, view.max_rows), cost.t)
        until_s = choice.until_s
        if rows < choice.rows and bucket.finite:
            start = now + view.ahead_s
            until_s, rest_s = start + cost.high(rows), start + cost.high(rows) + cost.high(choice.rows - rows)
            if bucket.rows - bucket.rows_tolerating(rest_s) > bucket.rows - bucket.rows_tolerating(until_s) + rows:
                return choice
        reason = "lower size" if rows < choice.rows else choice.reason
        return structs.replace(choice, rows=rows, until_s=until_s, reason=reason)

    def _choice(self, view: View, now: float) -> Choice:
        bucket, cost = view.bucket, view.cost
        if bucket.finite:
            late = self._doomed(view, now)
            if late:
                return Drop(late, "expired")
            surplus = self._surplus(view, now)
            if surplus:
                return Drop(surplus, "overload")
        if not view.idle:
            return None
        self._peak = max(self._peak, view.inside_rows)
        share = self._share(view)
        waiting = min(share, bucket.rows)
        wanted = self._urgent_rows(view, waiting, now) if bucket.low and cost.ready else waiting
        rows, until_s = self._tolerated(view, wanted, now)
        if rows < 1:
            return None
        if rows >= view.max_rows or not cost.ready:
            full = rows >= view.max_rows
            return Take(rows, until_s, full, fill=True, reason="full" if full else "all that waits")
        if rows == share < bucket.rows:
            return Take(rows, until_s, reason="share")
        if rows == wanted < waiting:
            return Take(rows, until_s, fill=True, reason="urgent")
        if rows < bucket.rows:
            return Take(rows, until_s, reason="deadline")
        wait = self._hold(view, rows, now + view.ahead_s)
        if view.ahead:
            return None if wait else Take(rows, until_s, reason="ahead")
        if wait:
            return wait
        if view.idle > 1 and bucket.rows <= cost.max_seen:  # more rows than ever before teach what they cost together
            batches = min(view.idle, max(1, int(bucket.rows / max(1.0, cost.knee))))
            if batches > 1:
                return Take(ceil(rows / batches), until_s, reason="spread")
        reason = "crowd" if self._crowd_over else self._trials.reason(view, now)
        return Take(rows, until_s, reason=reason or "all that waits")

    def _share(self, view: View) -> int:
        """The upper limit of a batch: with several slots, an even share of a closed loop's clients. A slot's rows per
        second are concave in its rows, so unequal groups of clients are slower; once unequal, they would remain so."""
        r = self._returns
        if view.slots < 2 or view.cost.a < CHEAP_SETUP_S or r.rounds < MIN_ROUNDS or r.closed < CLOSED_LOOP_SHARE:
            return view.max_rows
        return min(view.max_rows, max(1, ceil(self._peak / view.slots)))

    def _doomed(self, view: View, now: float) -> list[Entry]:
        """Entries that would be late even if run alone at once."""
        bucket, cost = view.bucket, view.cost
        if not cost.ready:
            return bucket.tight(now)
        if bucket.rows == len(bucket.entries):
            return bucket.tight(now + cost.high(1))
        full = view.max_rows
        return [e for e in bucket.tight(now + cost.high(full)) if e.deadline_s < now + cost.high(min(e.rows, full))]

    def _surplus(self, view: View, now: float) -> list[Entry]:
        """Entries to drop because even at full speed the last one would be late. The oldest go, so that fresher ones
        remain. Applies only if every entry has a deadline, which then is its place in the queue."""
        bucket, cost, full = view.bucket, view.cost, view.max_rows
        if bucket.loose or not cost.ready or bucket.rows <= full:
            return []
        t = cost.t(full)
        slots = view.slots * view.share  # the others are for other lengths
        fit = (bucket.keys[-1] - now - t) * slots - view.busy_s * view.share  # slot time until the last one must start
        surplus = bucket.rows - max(full, int(fit / t * full) + full)
        if surplus <= 0:
            return []
        out: list[Entry] = []
        order = bucket.entries if not bucket.low else sorted(bucket.entries, key=lambda e: -e.priority)
        for e in order:
            if surplus < e.rows:
                break
            out.append(e)
            surplus -= e.rows
        return out

    def _urgent_rows(self, view: View, limit: int, now: float) -> int:
        """Rows of the batch, at most `limit`. Lower classes fill a batch that an urgent request leads only until it
        reaches `ENOUGH_SPEED` of a full batch's rate, and not at all if that would make the leader late."""
        bucket, cost, full = view.bucket, view.cost, view.max_rows
        leader = bucket.entries[0]
        urgent = 0
        for entry in bucket.entries:
            if entry.priority > leader.priority:
                break
            urgent += entry.rows
            if urgent >= limit:
                return limit
        enough = ceil(ENOUGH_SPEED * cost.a * full / (cost.a + (1 - ENOUGH_SPEED) * cost.b * full))
        late = leader.deadline_s < now + view.ahead_s + cost.high(enough)
        return min(limit, urgent if late else max(urgent, enough))

    def _tolerated(self, view: View, limit: int, now: float) -> tuple[int, float]:
        """(rows, earliest deadline) of the largest batch up to `limit` that as many waiting rows tolerate."""
        bucket, cost = view.bucket, view.cost
        if not bucket.finite or not cost.ready:
            return limit, -INF
        start = now + view.ahead_s
        until = start + cost.high(limit)
        low, high = 0, limit
        if bucket.rows_tolerating(until) >= limit:
            return limit, until
        while low < high:
            mid = (low + high + 1) // 2
            if bucket.rows_tolerating(start + cost.high(mid)) >= mid:
                low = mid
            else:
                high = mid - 1
        return low, start + cost.high(low)

    # ---- holding

    def _hold(self, view: View, rows: int, now: float) -> WaitUntil | None:
        """When to look again if the waiting `rows` should be held at `now`. For a batch that would be sent ahead, `now`
        is the end of the running one: a batch worth holding then must not be sent earlier."""
        cost, m = view.cost, view.slots
        if not self.max_hold_s:
            return None
        if not view.ahead and (wait := self._crowd(view, rows, now)):
            return wait
        if cost.a <= 0:
            return None
        even = self.even_batch(view, now) if m > 1 else 0.0
        longest_s = min(cost.t(min(even, cost.knee)) / m, self.max_hold_s)
        end = min(view.held_s, now) + longest_s
        wake, kind = 0.0, "stagger"
        if now < end:
            wake = self._stagger(view, rows, even, longest_s, now)
            if not wake:
                wake, kind = self._regroup(view, rows, now), "regroup"
            wake = min(wake, end)
        if self._trials.hold_s and (longer := self._trials.until(view, rows, self._returns.since_s, now)) and not wake:
            wake, kind = longer, "trial"
        if wake <= now or wake >= view.bucket.entries[0].expires_s:
            return None
        if view.held_s >= now and not view.ahead:
            self._batch = even
            self._holds[kind] += 1
        return WaitUntil(wake, self._trials.share(view) if kind == "trial" else 0)

    def _crowd(self, view: View, rows: int, now: float) -> WaitUntil | None:
        self._crowd_over, self._crowding = self._crowding, False
        if not view.crowded:
            if self._crowd_over:  # the others have left, or are late
                self._trials.clients = view.inside_rows
            return None
        head, share = view.bucket.entries[0], self._trials.share(view)
        wake = min(now + CROWD_LOOK_S, min(view.held_s, now) + min(CROWD_S, self.max_hold_s))
        if rows >= share or wake <= now or wake >= head.expires_s or wake + view.cost.high(share) > head.deadline_s:
            return None
        self._crowding, self._crowd_over = True, False
        self._holds["crowd"] += view.held_s >= now
        return WaitUntil(wake, share)

    def _stagger(self, view: View, rows: int, even: float, longest_s: float, now: float) -> float:
        cost, m, head = view.cost, view.slots, view.bucket.entries[0]
        if m < 2 or rows >= even or even > STAGGER_LIMIT * (1 - 1 / m) * cost.knee:
            return 0.0
        due = head.arrival_s + longest_s
        return due if now < due and due + cost.high(rows + 1) <= head.deadline_s else 0.0

    def _regroup(self, view: View, rows: int, now: float) -> float:
        cost, r, deadline = view.cost, self._returns, view.bucket.entries[0].deadline_s
        since, served, inside = now - r.since_s, r.rows, view.inside_rows
        if view.ahead:  # as if the running batch had just been answered
            since, served, inside = 0.0, view.ahead_rows, inside - view.ahead_rows
        if r.width <= 0 or r.rounds < MIN_ROUNDS or r.closed < CLOSED_LOOP_SHARE or self._peak < view.slots + 0.5:
            return 0.0
        j = int(since / r.width + BIN_TOLERANCE)
        room = min(view.max_rows - rows, self._peak - inside)
        if j >= BINS or room < 0.5:
            return 0.0
        left = r.width * (j + 1) - since
        expected = r.expected(served, j, left, room)
        for ahead, back in expected:
            # the set-up that is saved, against the rows that wait; often nearly equal, where rounding must not decide
            pays = back * cost.a * (1 - BIN_TOLERANCE) > rows * view.slots * ahead
            if back >= 0.5 and pays and back >= RETURNED_SHARE * expected[-1][1]:
                late = deadline < INF and now + ahead + cost.high(rows + back) > deadline
                return 0.0 if late else now + left
        return 0.0

    def explain(self) -> dict[str, object]:
        """Keys: n_star (at the last hold), holds_by_kind, closed_share, clients, and `HoldTrials.explain`'s."""
        return {
            "policy": "adaptive",
            "n_star": self._batch,
            "holds_by_kind": dict(self._holds),
            "closed_share": self._returns.closed,
            "clients": self._peak,
            **self._trials.explain(),
        }
