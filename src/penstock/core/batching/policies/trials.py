"""Trials of a longer hold: whether it brings more rows per second is measured, for a few batches, under load.

Waiting longer pays where no cost model shows it: the web server shares the cores with the model, or a few clients of a
closed loop return so late that they form a second group. In a closed loop of K clients the mean latency is K divided by
the throughput (Little's law), so the hold with the most rows per second is kept. In an open loop no hold changes the
throughput, and the trial ends.

A real machine is noisy, and its speed drifts. So a trial alternates between windows with the new hold and windows with
the kept one, until their sums differ by more than the noise. A trial without a gain in its first window ends there.
"""

from math import ceil, sqrt

from penstock.core.batching.entry import INF
from penstock.core.batching.policies.base import SlotBatch, View

FIRST = 6  # windows before the first trial; each trial that fails triples the pause, up to
LONGEST = 54
BATCHES = 4  # of each slot in a window, at least
WINDOWS = 5  # with the hold on trial, at most
KNOWN = 4  # usual windows that count as the first ones with the kept hold
GAIN = 0.02  # of the rate, at least, for which a longer hold is kept
DOUBT = 0.1  # of the rate, at most, by which a hold may seem better than none by chance
WORTH = 0.05  # of the rate: with such a cap a trial goes on while it gains more
SIGMAS = 2.5  # of the noise between windows that a gain or a loss must exceed
SCOPE = 1.5  # a row of the usual batch must cost so many times a row of a full batch
LATE = 1 / 3  # of a hold, in which the last answers still go out; arrivals are counted from then on
DRAWN = 1.25  # the holds of a first trial must draw so many times the usual arrivals,
SURE = 6  # counted from so many usual arrivals on
LIKELY = 1.5  # the same for a hold longer than a kept one, up to a cap that the user has named
WHOLE = 0.9  # share of the batches that must contain a whole group of clients
PRICE = 0.03  # of the rate, at most, for whole groups: without them some requests wait for two batches
CHANGE = 0.15  # of the rate: a new load, for which the hold is checked soon


class BatchWindow:
    """Batches with the same hold; the first after a change does not count. `whole`: batches with a whole group."""

    __slots__ = ("batches", "rows", "settling", "start_s", "whole")

    def __init__(self, now: float, settling: bool = False) -> None:
        self.start_s, self.settling = now, settling
        self.rows = self.batches = self.whole = 0

    def rate(self, now: float) -> float:
        """Rows per second."""
        return self.rows / (now - self.start_s) if now > self.start_s else 0.0

    @property
    def grouped(self) -> bool:
        """Whether nearly all batches had a whole group of clients."""
        return self.whole >= WHOLE * self.batches


class UsualRate:
    """The mean rate of recent windows, and the variance of one of them, relative to the mean."""

    __slots__ = ("mean", "variance", "windows")

    def __init__(self, mean: float = 0.0) -> None:
        self.mean, self.variance, self.windows = mean, 0.01, 0

    def add(self, rate: float) -> None:
        if self.windows:
            off = rate / self.mean - 1
            self.variance += max(0.2, 1 / (self.windows + 1)) * (min(off * off, 0.25) - self.variance)
        self.windows += 1
        self.mean += max(0.25, 1 / self.windows) * (rate - self.mean)


class HoldArrivals:
    """Arrivals during the holds of a trial, beside those that the usual rate would bring."""

    __slots__ = ("_before", "_drawn", "_usual", "drawn", "usual")

    def __init__(self) -> None:
        self.usual = self.drawn = 0.0  # until now
        self._usual = self._drawn = 0.0  # in earlier holds
        self._before = 0

    def note(self, start_s: float, rows: int, hold_s: float, rate: float, now: float) -> None:
        """`rows` wait in a hold since `start_s`."""
        if start_s >= now:
            self._usual, self._drawn = self.usual, self.drawn
        counted_s = now - start_s - LATE * hold_s
        if start_s >= now or counted_s <= 0:
            self._before = rows
        else:
            self.usual, self.drawn = self._usual + counted_s * rate, self._drawn + rows - self._before

    @property
    def few(self) -> bool:
        """Whether they are clearly not more than usual."""
        return self.usual >= SURE and self.drawn < DRAWN * self.usual


class HoldComparison:
    """The rows and seconds of the windows of a trial: `tried` with the hold on trial, `kept` with the kept one."""

    def __init__(self, usual: UsualRate, need: int) -> None:
        self.variance, self.need = usual.variance, need  # of a window of `need` rows
        self.tried = [0.0, 0.0]
        known = need * min(KNOWN, max(1, usual.windows))
        self.kept = [float(known), known / usual.mean]
        self.windows = 0

    def add(self, sums: list[float], window: BatchWindow, now: float) -> None:
        sums[0] += window.rows
        sums[1] += now - window.start_s

    @property
    def gain(self) -> float:
        """In rows per second, as a share."""
        return self.tried[0] / self.tried[1] * self.kept[1] / self.kept[0] - 1

    @property
    def noise(self) -> float:
        """The standard deviation of the gain."""
        return sqrt(self.variance * self.need * (1 / self.tried[0] + 1 / self.kept[0]))


class HoldTrials:
    """A hill climb over the hold after a completion: one hold is kept, and rarely another one is tried.

    `hold_s` is in force: `kept_s`, or another one during a trial. A first trial takes a/m where clients return at once,
    else a third of a full batch's time. With a longest hold that the user has named, it takes a full batch's time or
    that of SURE arrivals, and the next one the longest; else a new hold is first compared with none, later with its
    double and half as well. `clients` is the most rows inside since a hold ended without them: a slot waits for its
    share of them, not longer. The 19 attributes are one state machine.
    """

    def __init__(self) -> None:
        self.hold_s = self.kept_s = 0.0
        self.trial = False
        self.gain = 0.0  # of `kept_s`, in rows per second, over no hold
        self.count = self.failed = 0
        self.clients = 0
        self._usual = UsualRate()  # with `kept_s`
        self._changed = False
        self._capped = False  # the user has named the longest hold: the trials may cost more
        self._window = BatchWindow(0.0)
        self._last_s = 0.0  # completion
        self._grouped = False  # with `kept_s`
        self._pause = self._rest = FIRST  # windows between trials; until the next one
        self._turn = 0
        self._arrivals = HoldArrivals()
        self._tried_s = 0.0
        self._comparison = HoldComparison(UsualRate(1.0), 1)

    # ---- the search

    def completed(self, batch: SlotBatch, view: View, most_s: float, closed: bool, now: float) -> None:
        """A batch was answered. `most_s` caps holds; `closed`: clients return at once after an answer."""
        self.clients = max(self.clients, view.inside_rows)
        self._capped = most_s < INF
        slots, full = max(1, view.slots), view.max_rows
        if batch.start_s - self._last_s > self.hold_s + 2 * view.cost.t(full):  # no load for a while
            self._window = BatchWindow(now, settling=True)
            self._usual.windows, self._rest = 0, max(self._rest, KNOWN // 2)  # the machine may be another one now
        self._last_s = now
        w = self._window
        if self.trial and not self.kept_s and not self._capped and self._arrivals.few:
            self._end(False, 0.0, now)
            return
        if w.settling:
            w.settling, w.start_s = False, now
            return
        w.rows += batch.rows
        w.batches += 1
        w.whole += closed and batch.rows * slots >= self.clients
        if now <= w.start_s:
            return
        need = max(full, self.clients)
        if self.trial:
            self._judge(need, view, now)
        elif w.batches >= BATCHES * slots and w.rows >= need:
            n = w.rows / w.batches
            scope = closed or view.cost.t(n) * full > SCOPE * view.cost.t(full) * n
            worth = (n >= 2 or self._capped) and n < min(full, self.clients / slots) and scope
            self._observe(now)
            if self._rest <= 0 and (worth or self.kept_s):
                first_s = (view.cost.a if closed else view.cost.t(full) / 3) / slots
                self._begin(min(first_s, most_s), self._longest(view, most_s), need, view, now)

    def _longest(self, view: View, most_s: float) -> float:
        """The longest hold to try."""
        return most_s if self._capped else 2 * view.cost.t(view.max_rows)

    def _observe(self, now: float) -> None:
        """Learns the usual rate from a window."""
        w, usual = self._window, self._usual
        rate = w.rate(now)
        self._window = BatchWindow(now)
        self._rest -= 1
        change = max(CHANGE, SIGMAS * sqrt(usual.variance))
        changed = self.kept_s > 0 and usual.windows > 0 and abs(rate / usual.mean - 1) > change
        if changed and self._changed:  # twice: one may be noise
            usual.windows, self._turn, self._rest = 0, 0, min(self._rest, 2)
        elif not changed:
            usual.add(rate)
        self._changed = changed and usual.windows > 0
        self._grouped = w.grouped

    def _begin(self, first_s: float, most_s: float, need: int, view: View, now: float) -> None:
        kept = self.kept_s
        longer_s = most_s if self._capped and kept < most_s else 2 * kept if 2 * kept <= most_s else 0.0
        shorter_s = kept / 2 if kept > first_s else 0.0
        self._tried_s = (0.0, longer_s, shorter_s)[self._turn % 3] if not self._grouped else 0.0
        if not kept:
            whole_s = max(view.cost.t(view.max_rows), SURE / self._usual.mean)  # cheap models need more than their time
            self._tried_s = min(whole_s, most_s) if self._capped else first_s
        self._turn += 1
        self.count += 1
        self.trial, self._arrivals = True, HoldArrivals()
        self._comparison = HoldComparison(self._usual, need)
        self._switch(self._tried_s, now)

    def _switch(self, hold_s: float, now: float) -> None:
        self.hold_s = hold_s
        self._window = BatchWindow(now, settling=True)

    def _judge(self, need: int, view: View, now: float) -> None:
        """Ends the trial if its rate is clearly lower, or when its windows are long enough to decide."""
        w, c, longer, slots = self._window, self._comparison, self._tried_s > self.kept_s, max(1, view.slots)
        whole = w.batches >= BATCHES * slots and w.rows >= need
        if self.hold_s != self._tried_s:
            if whole and now - w.start_s >= c.tried[1] / c.windows:
                c.add(c.kept, w, now)
                self._switch(self._tried_s, now)
            return
        if not whole:
            ratio = w.rate(now) / self._usual.mean
            loss = -SIGMAS * sqrt(c.variance * need / w.rows)
            if not (self.kept_s or w.grouped or self._capped):  # in an open loop it gains nothing, and must end soon
                loss = GAIN / 2
            if w.batches > slots and ratio - 1 < loss:
                self._end(False, ratio, now)
            return
        c.add(c.tried, w, now)
        c.windows += 1
        gain, noise = c.gain, c.noise
        least = max(GAIN, (LIKELY if self._capped and self.kept_s else SIGMAS) * noise)
        if longer and w.grouped:
            least = min(least, noise - PRICE)
        elif not longer and (w.grouped or not self._grouped):
            confirmed = self._pause > FIRST  # by an earlier check
            least = -GAIN / 2 - (0.0 if confirmed else min(noise, DOUBT))
        hope = max(WORTH, noise / 2) if self._capped else noise
        twice = c.windows > 1 or not self._capped  # one window of a machine that is shared says little
        done = not w.grouped and gain < hope if longer else twice or gain < least - noise
        if gain >= least and twice:
            self._end(True, 1 + gain, now)
        elif done or c.windows >= WINDOWS:
            self._end(False, 1 + gain, now)
        else:
            self._switch(self.kept_s, now)

    def _end(self, won: bool, ratio: float, now: float) -> None:
        """Ends the trial: keeps its hold, or returns to the former one for longer than before. `ratio` of the rates."""
        longer = self._tried_s > self.kept_s
        if longer and won:
            self.gain = (1 + self.gain) * ratio - 1
        elif not self._tried_s:
            self.gain = 0.0 if won else 1 / ratio - 1 if ratio else self.gain
        self.trial = False
        if won:
            self._usual.windows, self._pause, self._rest = 0, FIRST, 1 + self._capped if longer else FIRST
            self._turn = int(longer and (self.kept_s > 0 or self._capped))
            self.kept_s = self._tried_s
        else:
            self.failed += 1
            self._pause = min(3 * self._pause, LONGEST)
            self._rest = 2 if self.kept_s and self._turn == 1 else self._pause  # a hold that is confirmed may grow
        self._switch(self.kept_s, now)

    # ---- the hold

    def until(self, view: View, rows: int, answered_s: float, now: float) -> float:
        """When a slot with `rows` waiting rows must stop waiting for more; 0: now. `answered_s`: the last answer."""
        self.clients = max(self.clients, view.inside_rows)
        share = self.share(view)
        start = now if view.ahead else min(view.held_s, answered_s)
        end = start + min(self.hold_s, self._longest(view, self.hold_s))
        head = view.bucket.entries[0]
        if not view.ahead:
            self._arrivals.note(view.held_s, rows, self.hold_s, self._usual.mean, now)
        if rows < share and now < end:
            late = end >= head.expires_s or end + view.cost.high(share) > head.deadline_s
            return 0.0 if late else end
        if rows < share and not view.ahead:  # the others have left, or are late
            self.clients = view.inside_rows
        return 0.0

    def share(self, view: View) -> int:
        """The rows that a slot waits for."""
        return min(view.max_rows, ceil(self.clients / max(1, view.slots)))

    def reason(self, view: View, now: float) -> str:
        """Names the hold that a batch ends; "" without one."""
        if not self.hold_s or view.held_s >= now:
            return ""
        return "trial of a hold" if self.trial else "longer hold"

    def explain(self) -> dict[str, object]:
        """Keys: longer_hold_s (the kept one), longer_hold_gain (in rows per second, as a share), trial_s (the hold on
        trial; None without a trial), trials, trials_failed."""
        return {
            "longer_hold_s": self.kept_s,
            "longer_hold_gain": self.gain,
            "trial_s": self._tried_s if self.trial else None,
            "trials": self.count,
            "trials_failed": self.failed,
        }
