"""Trials of a longer hold: whether it brings more rows per second is measured, for a few batches, under load."""

# A hold is the time for which an idle slot waits for more rows after a batch was answered.
# Waiting longer can pay where the cost of a batch does not show it: the web server shares the cores with the model, so
# that arrivals slow down while a batch runs; or some clients of a closed loop return so late that they form a second
# group, whose requests wait for two batches.
# The policy finds out by trying: under load it uses another hold for some batches and compares the rows per second.
# In a closed loop of K clients the mean latency is K divided by the throughput (Little's law), so the hold with the
# most rows per second also has the shortest latency. In an open loop no hold changes the throughput.
# A real machine is noisy and its speed drifts. So batches are counted in windows, and a trial alternates between
# windows with the hold on trial and windows with the kept one, until their sums differ by more than the noise.
# A trial ends at once if its holds draw no more requests than usual, or if it clearly costs throughput.
# The hold that wins is kept, compared with none once more, and later doubled or halved in further trials.
# Each failed trial triples the pause until the next one, so that a load where nothing is gained pays little.
# If the batches of a kept hold unite all clients of a closed loop, it may cost a little throughput.
# If the user has named the longest hold (`max_hold_s`), trials are longer and bolder: two windows decide, that hold is
# tried too, and arrivals do not end a trial, because threads of one process slow each other in ways they do not show.

from math import ceil, sqrt

from penstock.core.batching.entry import INF
from penstock.core.batching.policies.base import SlotBatch, View

# Pauses, in windows. The longest is measured in simulation: at a load where nothing is gained, trials that far apart
# add at most 0.8 % to the mean latency of 30,000 arrivals; with 128 windows a noisy machine found gains too late.
FIRST_PAUSE = 6  # a choice: the usual rate and its noise are known by then
LONGEST_PAUSE = 54  # FIRST_PAUSE, tripled twice
RECHECK_PAUSE = 2  # before the next trial of a hold that was confirmed, or whose rate has changed

# Windows. Choices, checked by the simulations of tests/unit/core/batching/test_trials.py, which bound gain and cost.
WINDOW_BATCHES = 4  # of each slot in a window, at least: fewer say nothing about the rate
LONGEST_TRIAL = 5  # windows with the hold on trial, at most
KEPT_WINDOWS = 4  # of the usual windows, so many at most stand for the first ones with the kept hold

# What counts as a gain, as shares of the usual rate, and in standard deviations of the noise between windows.
MIN_GAIN = 0.02  # a choice: a smaller gain is not worth a longer wait
WORTHWHILE_GAIN = 0.05  # measured behind Flask: a trial with a named longest hold goes on while it gains more
CHANCE_GAIN = 0.1  # a choice: the most by which a hold may seem better than none by chance
SIGMAS = 2.5  # a choice: noise alone exceeds it in one of 160 windows
LIKELY_SIGMAS = 1.5  # a choice: the same for a hold above a kept one, up to a longest hold that the user has named
CHANGED_RATE = 0.15  # a choice: a difference that means a new load, for which the hold is checked soon
MIN_ROW_COST = 1.5  # a choice: below this many times the cost of a row in a full batch, fuller batches gain too little

# Arrivals during the holds of a trial that began without a kept hold.
IGNORED_SHARE = 1 / 3  # of a hold, in which the last responses still go out and their clients cannot have returned
MIN_DRAWN = 1.25  # a choice: a hold that pays draws this many times the usual arrivals,
ENOUGH_ARRIVALS = 6  # a choice: counted once this many usual ones would have come

# Whole groups: batches with all clients of a closed loop.
WHOLE_SHARE = 0.9  # a choice: the share of the batches that must be whole
WHOLE_PRICE = 0.03  # of the rate, at most: without whole groups some requests wait for two batches


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
        return self.whole >= WHOLE_SHARE * self.batches


class UsualRate:
    """The mean rate of recent windows with the kept hold, and the variance of one of them, relative to the mean.

    `deviated`: the last window was far off, and was not counted.
    """

    __slots__ = ("deviated", "mean", "variance", "windows")

    def __init__(self) -> None:
        self.mean, self.variance, self.windows, self.deviated = 0.0, 0.01, 0, False

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
        counted_s = now - start_s - IGNORED_SHARE * hold_s
        if start_s >= now or counted_s <= 0:
            self._before = rows
        else:
            self.usual, self.drawn = self._usual + counted_s * rate, self._drawn + rows - self._before

    @property
    def few(self) -> bool:
        """Whether they are clearly not more than usual."""
        return self.usual >= ENOUGH_ARRIVALS and self.drawn < MIN_DRAWN * self.usual


class HoldTrial:
    """A hold on trial: sums of rows and seconds, of its windows (`tried`) and of windows with the kept hold (`kept`).

    `windows` counts the windows in `tried`. A comparison needs windows of `need` rows.
    """

    def __init__(self, hold_s: float, usual: UsualRate, need: int) -> None:
        self.hold_s, self.need, self.variance = hold_s, need, usual.variance
        self.arrivals = HoldArrivals()
        self.tried = [0.0, 0.0]
        known = need * min(KEPT_WINDOWS, max(1, usual.windows))
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

    `hold_s` is the hold in force: `kept_s`, or the one on trial. The first trial takes a/m where clients return at
    once, else a third of a full batch's time. If the user has named the longest hold, the first trial takes the time of
    a full batch or of ENOUGH_ARRIVALS arrivals, and the next trial takes the longest hold. Otherwise a new hold is
    first compared with none, later with its double and its half. `clients` is the highest number of rows inside since a
    hold ended without them: a slot waits for its share of them, and no longer.
    """

    def __init__(self) -> None:
        self.hold_s = self.kept_s = 0.0
        self.trial: HoldTrial | None = None
        self.gain = 0.0  # of `kept_s`, in rows per second, over no hold
        self.count = self.failed = 0
        self.clients = 0
        self._usual = UsualRate()
        self._capped = False  # the user has named the longest hold: the trials may cost more
        self._window = BatchWindow(0.0)
        self._last_s = 0.0  # completion
        self._grouped = False  # with `kept_s`
        self._pause = self._rest = FIRST_PAUSE  # windows between trials; until the next one
        self._turn = 0  # of the next trial: a check against no hold, the double, the half

    # ---- the search

    def completed(self, batch: SlotBatch, view: View, cap_s: float, closed: bool, now: float) -> None:
        """A batch was answered. `cap_s` caps holds; `closed`: clients return at once after a response."""
        self._capped = cap_s < INF
        slots, full = max(1, view.slots), view.max_rows
        if batch.start_s - self._last_s > self.hold_s + 2 * view.cost.t(full):  # no load for a while
            self._window = BatchWindow(now, settling=True)
            # the machine may be another one now
            self._usual.windows, self._rest = 0, max(self._rest, KEPT_WINDOWS // 2)
        self._last_s = now
        w = self._window
        trial = self.trial
        if trial is not None and not self.kept_s and not self._capped and trial.arrivals.few:
            self._end(trial, False, 0.0, now)
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
        if trial is not None:
            self._judge(trial, need, view, now)
        elif w.batches >= WINDOW_BATCHES * slots and w.rows >= need:
            n = w.rows / w.batches
            costly = closed or view.cost.t(n) * full > MIN_ROW_COST * view.cost.t(full) * n
            promising = (n >= 2 or self._capped) and n < min(full, self.clients / slots) and costly
            self._observe(now)
            if self._rest <= 0 and (promising or self.kept_s):
                first_s = (view.cost.a if closed else view.cost.t(full) / 3) / slots
                hold_s = self._next_hold_s(min(first_s, cap_s), self._longest_s(view, cap_s), view)
                self.count += 1
                self.trial = HoldTrial(hold_s, self._usual, need)
                self._switch(hold_s, now)

    def _longest_s(self, view: View, cap_s: float) -> float:
        """The longest hold to try."""
        return cap_s if self._capped else 2 * view.cost.t(view.max_rows)

    def _observe(self, now: float) -> None:
        """Learns the usual rate from a window."""
        w, usual = self._window, self._usual
        rate = w.rate(now)
        self._window = BatchWindow(now)
        self._rest -= 1
        limit = max(CHANGED_RATE, SIGMAS * sqrt(usual.variance))
        changed = self.kept_s > 0 and usual.windows > 0 and abs(rate / usual.mean - 1) > limit
        if changed and usual.deviated:  # twice: one may be noise
            usual.windows, self._turn, self._rest = 0, 0, min(self._rest, RECHECK_PAUSE)
        elif not changed:
            usual.add(rate)
        usual.deviated = changed and usual.windows > 0
        self._grouped = w.grouped

    def _next_hold_s(self, first_s: float, longest_s: float, view: View) -> float:
        """The hold of the next trial."""
        kept, self._turn = self.kept_s, self._turn + 1
        if not kept:
            if not self._capped:
                return first_s
            # cheap models need more than the time of a batch
            return min(max(view.cost.t(view.max_rows), ENOUGH_ARRIVALS / self._usual.mean), longest_s)
        longer_s = longest_s if self._capped and kept < longest_s else 2 * kept if 2 * kept <= longest_s else 0.0
        shorter_s = kept / 2 if kept > first_s else 0.0
        return 0.0 if self._grouped else (0.0, longer_s, shorter_s)[(self._turn - 1) % 3]

    def _switch(self, hold_s: float, now: float) -> None:
        self.hold_s = hold_s
        self._window = BatchWindow(now, settling=True)

    def _judge(self, trial: HoldTrial, need: int, view: View, now: float) -> None:
        """Ends the trial if its rate is clearly lower, or when its windows are long enough to decide."""
        w, longer, slots = self._window, trial.hold_s > self.kept_s, max(1, view.slots)
        complete = w.batches >= WINDOW_BATCHES * slots and w.rows >= need
        if self.hold_s != trial.hold_s:  # a window with the kept hold
            if complete and now - w.start_s >= trial.tried[1] / trial.windows:
                trial.add(trial.kept, w, now)
                self._switch(trial.hold_s, now)
            return
        if not complete:
            ratio = w.rate(now) / self._usual.mean
            loss = -SIGMAS * sqrt(trial.variance * need / w.rows)
            if not (self.kept_s or w.grouped or self._capped):  # in an open loop it gains nothing, and must end soon
                loss = MIN_GAIN / 2
            if w.batches > slots and ratio - 1 < loss:
                self._end(trial, False, ratio, now)
            return
        trial.add(trial.tried, w, now)
        trial.windows += 1
        gain, noise, required = trial.gain, trial.noise, self._required_gain(trial, longer)
        hope = max(WORTHWHILE_GAIN, noise / 2) if self._capped else noise
        decided = trial.windows > 1 or not self._capped  # one window of a machine that is shared says little
        hopeless = not w.grouped and gain < hope if longer else decided or gain < required - noise
        if gain >= required and decided:
            self._end(trial, True, 1 + gain, now)
        elif hopeless or trial.windows >= LONGEST_TRIAL:
            self._end(trial, False, 1 + gain, now)
        else:
            self._switch(self.kept_s, now)

    def _required_gain(self, trial: HoldTrial, longer: bool) -> float:
        """The gain from which the hold on trial replaces the kept one."""
        noise, grouped = trial.noise, self._window.grouped
        required = max(MIN_GAIN, (LIKELY_SIGMAS if self._capped and self.kept_s else SIGMAS) * noise)
        if longer and grouped:
            return min(required, noise - WHOLE_PRICE)
        if not longer and (grouped or not self._grouped):  # the shorter of two equal holds is better
            confirmed = self._pause > FIRST_PAUSE  # the kept hold, by an earlier check
            return -MIN_GAIN / 2 - (0.0 if confirmed else min(noise, CHANCE_GAIN))
        return required

    def _end(self, trial: HoldTrial, won: bool, ratio: float, now: float) -> None:
        """Ends the trial: keeps its hold, or returns to the former one for longer than before. `ratio` of the rates."""
        longer = trial.hold_s > self.kept_s
        if longer and won:
            self.gain = (1 + self.gain) * ratio - 1
        elif not trial.hold_s:
            self.gain = 0.0 if won else 1 / ratio - 1 if ratio else self.gain
        self.trial = None
        if won:
            self._usual.windows, self._pause = 0, FIRST_PAUSE
            self._rest = 1 + self._capped if longer else FIRST_PAUSE
            self._turn = int(longer and (self.kept_s > 0 or self._capped))
            self.kept_s = trial.hold_s
        else:
            self.failed += 1
            self._pause = min(3 * self._pause, LONGEST_PAUSE)
            # a hold that is confirmed may grow
            self._rest = RECHECK_PAUSE if self.kept_s and self._turn == 1 else self._pause
        self._switch(self.kept_s, now)

    # ---- the hold

    def until(self, view: View, rows: int, answered_s: float, now: float) -> float:
        """When a slot with `rows` waiting rows must stop waiting for more; 0: now. `answered_s`: the last response."""
        self.clients = max(self.clients, view.inside_rows)
        share = self.share(view)
        start = now if view.ahead else min(view.held_s, answered_s)
        end = start + min(self.hold_s, self._longest_s(view, self.hold_s))
        head = view.bucket.entries[0]
        if self.trial is not None and not view.ahead:
            self.trial.arrivals.note(view.held_s, rows, self.hold_s, self._usual.mean, now)
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
        return "longer hold" if self.trial is None else "trial of a hold"

    def explain(self) -> dict[str, object]:
        """Keys: longer_hold_s (the kept one), longer_hold_gain (in rows per second, as a share), trial_s (the hold on
        trial; None without a trial), trials, trials_failed."""
        return {
            "longer_hold_s": self.kept_s,
            "longer_hold_gain": self.gain,
            "trial_s": None if self.trial is None else self.trial.hold_s,
            "trials": self.count,
            "trials_failed": self.failed,
        }
