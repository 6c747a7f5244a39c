"""Meter: the one way from a search to its bench. Answers from the journal, counts the time, ends it at the budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Final

from penstock.errors import LoadFailed
from penstock.perf.tune.journal import Entry, Journal
from penstock.perf.tune.space import Settings
from penstock.perf.tune.trial import Bench, Curve, Reading

Watch = Callable[[Settings, Reading, bool], None]
"""Told of each reading, and whether it comes from the journal."""

_LOADS: Final = ("batch", "instances", "hold", "policy")  # knobs that say nothing of one instance alone


class BudgetOver(Exception):
    """The time for measuring is used up."""


class Unfit(Exception):
    """The model cannot run with these settings; the text says why."""


class Meter:
    """`spent_s` is what all measurements took, those of earlier starts included: a search that was killed decides as
    one that was not. `limit_s` may be moved; `kept_s` tells how much of it is kept back, as far as is known now."""

    def __init__(
        self, bench: Bench, journal: Journal, *, seed: int = 0, limit_s: float = math.inf, watch: Watch | None = None
    ) -> None:
        self.bench, self.limit_s, self.spent_s = bench, limit_s, 0.0
        self._journal, self._seed, self._watch = journal, seed, watch
        self.kept_s: Callable[[], float] = lambda: 0.0
        self._asked = 0
        self._last: Settings | None = None
        self._changes: list[float] = []
        self._curves: dict[Settings, Curve | None] = {}

    @property
    def change_s(self) -> float:
        """What a run takes beyond its own seconds when the settings are others than before: the mean; 0 if none was."""
        return statistics.fmean(self._changes) if self._changes else 0.0

    def curve(self, settings: Settings) -> Curve | None:
        """The offline curve of these settings' family: all that differ in batch, instances and holds alone. Raises
        BudgetOver."""
        family = Settings(
            tuple(item for item in settings.items if item[0] not in _LOADS and not item[0].startswith("batching."))
        )
        if family not in self._curves:
            self._in_time()
            entry = self._journal.get(key := f"curve {family}")
            if entry is None:
                found = self.bench.curve(family)
                entry = Entry(key=key, curve=found, cost_s=found.cost_s if found else 0.0)
                self._journal.add(entry)
            self.spent_s += entry.cost_s
            self._curves[family] = entry.curve
        return self._curves[family]

    def measure(self, settings: Settings, rate: float, seconds: float) -> Reading:
        """One open loop; once more if it was INVALID: what kept the generator may pass. Raises BudgetOver, Unfit."""
        reading = self._open(settings, rate, seconds)
        return self._open(settings, rate, seconds) if reading.invalid else reading

    def _open(self, settings: Settings, rate: float, seconds: float) -> Reading:
        return self._ask(
            f"open {settings} rate={rate:g} seconds={seconds:g}",
            settings,
            lambda seed: self.bench.measure(settings, rate, seconds, seed),
        )

    def saturate(self, settings: Settings, seconds: float) -> Reading:
        """One closed loop. Raises BudgetOver, Unfit."""
        return self._ask(
            f"closed {settings} seconds={seconds:g}",
            settings,
            lambda seed: self.bench.saturate(settings, seconds, seed),
        )

    def _ask(self, what: str, settings: Settings, answer: Callable[[int], Reading]) -> Reading:
        self._in_time()
        self._asked += 1
        seed = self._seed * 100_003 + self._asked
        entry = self._journal.get(key := f"{self._asked} {what} seed={seed}")
        replayed = entry is not None
        if entry is None:
            entry = self._answered(key, settings, seed, answer)
            self._journal.add(entry)
        self.spent_s += entry.cost_s
        if entry.reading is None:
            raise Unfit(entry.failed)
        if settings != self._last:
            self._last = settings
            self._changes.append(entry.cost_s - entry.reading.run.load.seconds)
        if self._watch is not None:
            self._watch(settings, entry.reading, replayed)
        return entry.reading

    def _in_time(self) -> None:
        if self.spent_s >= self.limit_s - self.kept_s():
            raise BudgetOver

    def _answered(self, key: str, settings: Settings, seed: int, answer: Callable[[int], Reading]) -> Entry:
        started = time.monotonic()
        try:
            self.bench.prepare(settings)
            reading = answer(seed)
        except LoadFailed as e:
            return Entry(key=key, failed=e.message, cost_s=round(time.monotonic() - started, 1))
        return Entry(key=key, reading=reading, cost_s=reading.cost_s)
