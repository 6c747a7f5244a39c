"""Trials of a longer hold: whether it brings more rows per second is measured, for a few batches, under load.

Waiting longer pays where no cost model shows it: the web server shares the cores with the model, or a few clients of a
closed loop return so late that they form a second group. In a closed loop of K clients the mean latency is K divided by
the throughput (Little's law), so the hold with the most rows per second is kept. In an open loop no hold changes the
throughput, and the trial ends.
"""

from math import ceil, sqrt

from penstock.core.batching.policies.base import SlotBatch, View

FIRST = 6  # windows before the first trial; each trial that fails triples the pause, up to
LONGEST = 54
BATCHES = 4  # of each slot in a window, at least
WINDOWS = 4  # the longest trial
GAIN = 0.02  # of the rate, at least, for which a longer hold is kept
SIGMAS = 2.5  # of the noise between windows that a gain or a loss must exceed
SCOPE = 1.5  # a row of the usual batch must cost so many times a row of a full batch
LATE = 1 / 3  # of a hold, in which the last answers still go out; arrivals are counted from then on
DRAWN = 1.25  # the holds of a first trial must draw so many times the usual arrivals,
SURE = 6  # counted from so many usual arrivals on
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

    def __init__(self) -> None:
        self.mean, self.variance, self.windows = 0.0, 0.01, 0

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


class HoldTrials:
    """A hill climb over the hold after a completion: one hold is kept, and rarely another one is tried.

    `hold_s` is in force: `kept_s`, or another one during a trial. A first trial takes a/m where clients return at once,
    else a third of a full batch's time. A new hold is first compared with none, later with its double and half as well.
    `clients` is the most rows inside since a hold ended without them: a slot waits for its share of them, not longer.
    """

    def __init__(self) -> None:
        self.hold_s = self.kept_s = 0.0
        self.trial = False
        self.gain = 0.0  # of `kept_s`, in rows per second, over no hold
        self.count = self.failed = 0
        self.clients = 0
        self._usual = UsualRate()  # with `kept_s`
        self._window = BatchWindow(0.0)
        self._last_s = 0.0  # completion
        self._grouped = False  # with `kept_s`
        self._pause = self._rest = FIRST  # windows between trials; until the next one
        self._turn = 0
        self._arrivals = HoldArrivals()

    # ---- the search

    def completed(self, batch: SlotBatch, view: View, most_s: float, closed: bool, now: float) -> None:
        """A batch was answered. `most_s` caps holds; `closed`: clients return at once after an answer."""
        self.clients = max(self.clients, view.inside_rows)
        slots, full = max(1, view.slots), view.max_rows
        if batch.start_s - self._last_s > self.hold_s + 2 * view.cost.t(full):  # no load for a while
            self._window = BatchWindow(now, settling=True)
        self._last_s = now
        w = self._window
        if self.trial and not self.kept_s and self._arrivals.few:
            self._end(False, now)
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
            self._judge(need, slots, now)
        elif w.batches >= BATCHES * slots and w.rows >= need:
            n = w.rows / w.batches
            scope = closed or view.cost.t(n) * full > SCOPE * view.cost.t(full) * n
            worth = 2 <= n < min(full, self.clients / slots) and scope
            self._observe(now)
            if self._rest <= 0 and (worth or self.kept_s):
                first_s = (view.cost.a if closed else view.cost.t(full) / 3) / slots
                self._begin(min(first_s, most_s), min(2 * view.cost.t(full), most_s), now)

    def _observe(self, now: float) -> None:
        """Learns the usual rate from a window."""
        w, usual = self._window, self._usual
        rate = w.rate(now)
        self._window = BatchWindow(now)
        self._rest -= 1
        change = max(CHANGE, SIGMAS * sqrt(usual.variance))
        if self.kept_s and usual.windows and abs(rate / usual.mean - 1) > change:
            usual.windows, self._turn, self._rest = 0, 0, min(self._rest, 2)
            return
        usual.add(rate)
        self._grouped = w.grouped

    def _begin(self, first_s: float, most_s: float, now: float) -> None:
        kept = self.kept_s
        longer_s, shorter_s = 2 * kept if 2 * kept <= most_s else 0.0, kept / 2 if kept > first_s else 0.0
        self.hold_s = (0.0, longer_s, shorter_s)[self._turn % 3] if not self._grouped else 0.0
        if not kept:
            self.hold_s = first_s
        self._turn += 1
        self.count += 1
        self.trial, self._arrivals = True, HoldArrivals()
        self._window = BatchWindow(now, settling=True)

    def _judge(self, need: int, slots: int, now: float) -> None:
        """Ends the trial if its rate is clearly lower, or when the window is long enough to decide."""
        w, longer, variance = self._window, self.hold_s > self.kept_s, self._usual.variance
        gain = w.rate(now) / self._usual.mean - 1
        noise = sqrt(variance * need / w.rows)
        first = not self.kept_s and not w.grouped  # in an open loop it gains nothing, and must end soon
        if w.batches > slots and gain < (GAIN / 2 if first else -SIGMAS * noise):
            self._end(False, now)
            return
        if w.batches < BATCHES * slots or w.rows < need:
            return
        noise = min(noise, sqrt(variance))
        least = max(GAIN, SIGMAS * noise)
        if longer and w.grouped:
            least = min(least, noise - PRICE)
        elif not longer and (w.grouped or not self._grouped):
            least = -GAIN / 2 - (noise if self._pause == FIRST else 0.0)  # else an earlier check confirmed the hold
        if gain >= least:
            self._end(True, now)
        elif not longer or w.rows >= WINDOWS * need:
            self._end(False, now)

    def _end(self, won: bool, now: float) -> None:
        """Ends the trial: keeps its hold, or returns to the former one for longer than before."""
        ratio, longer = self._window.rate(now) / self._usual.mean, self.hold_s > self.kept_s
        if longer and won:
            self.gain = (1 + self.gain) * ratio - 1
        elif not self.hold_s:
            self.gain = 0.0 if won else 1 / ratio - 1 if ratio else self.gain
        self.trial = False
        if won:
            self._usual.windows, self._pause, self._rest = 0, FIRST, 1 if longer else FIRST
            self._turn = int(longer and self.kept_s > 0)
            self.kept_s = self.hold_s
        else:
            self.failed += 1
            self._pause = min(3 * self._pause, LONGEST)
            self._rest = 2 if self.kept_s and self._turn == 1 else self._pause  # a hold that is confirmed may grow
            self.hold_s = self.kept_s
        self._window = BatchWindow(now, settling=True)

    # ---- the hold

    def until(self, view: View, rows: int, answered_s: float, now: float) -> float:
        """When a slot with `rows` waiting rows must stop waiting for more; 0: now. `answered_s`: the last answer."""
        self.clients = max(self.clients, view.inside_rows)
        share = min(view.max_rows, ceil(self.clients / max(1, view.slots)))
        start = now if view.ahead else min(view.held_s, answered_s)
        end = start + min(self.hold_s, 2 * view.cost.t(view.max_rows))
        head = view.bucket.entries[0]
        if not view.ahead:
            self._arrivals.note(view.held_s, rows, self.hold_s, self._usual.mean, now)
        if rows < share and now < end:
            late = end >= head.expires_s or end + view.cost.high(share) > head.deadline_s
            return 0.0 if late else end
        if rows < share and not view.ahead:  # the others have left, or are late
            self.clients = view.inside_rows
        return 0.0

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
            "trial_s": self.hold_s if self.trial else None,
            "trials": self.count,
            "trials_failed": self.failed,
        }
