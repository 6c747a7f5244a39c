"""Outcome: what tuning came to, and in words why so: what was chosen, what it gains, why nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from penstock.perf.bench.measurement import RunnerUp, Verdict
from penstock.perf.simulate.capacity import Trial
from penstock.perf.tune.confirm import Finalist, gain
from penstock.perf.tune.field import Field
from penstock.perf.tune.space import Settings
from penstock.perf.tune.trial import told

log = logging.getLogger("penstock.tune")

Ending = Literal["done", "budget", "interrupted", "failed"]

_SAME: Final = 0.02  # settings whose goodput differs by less are as good
_TOLD: Final = 100  # runners-up
_EARLY: Final = {"budget": "the time for measuring was over", "interrupted": "it was interrupted"}


class Outcome(Struct, frozen=True, kw_only=True):
    """What tuning came to: `verdict` for people, the rest for programs.

    `chosen` with `rate` requests a second keeps the SLO; None if nothing does, or nothing was measured. `confirmed`:
    by repeats; not if the time was over before. `spent_s` is what all measurements took.
    """

    verdict: Verdict
    chosen: Settings | None
    rate: float
    confirmed: bool
    ended: Ending
    spent_s: float


class Telling:
    """The outcome of a search in words. `finalists` are those of which at least the rate is known, the default among
    them if it bears any."""

    def __init__(
        self, field: Field, default: Settings, finalists: Sequence[Finalist], ended: Ending, error: str = ""
    ) -> None:
        self.field, self.slo = field, field.slo
        self.default, self.finalists, self.ended = default, finalists, ended
        self.early = error or _EARLY.get(ended, "")
        self.notes: list[str] = []

    def outcome(self, *, seed: int, price: float | None, command: str) -> Outcome:
        """All of it. `price` is that of an hour, `command` what reproduces the search."""
        if self.early:
            self.notes.append(f"the search did not end by itself: {self.early}; this is the best of what was measured")
        best = self._best()
        if best is None:
            return self._nothing(command)
        if best.met is None:
            self.notes.append("not confirmed: the chosen settings were not measured often enough to be sure")
        if best.settings == self.default:
            self.notes.append("nothing that was tried is better than the default")
        self._say_if_the_generator_was_too_slow(best)
        default = next((one for one in self.finalists if one.settings == self.default and one.met is not False), None)
        if default is None:
            self.notes.append(f"the default ({self.default}) {self._why_not_default()}")
        elif default is not best and self._may_do_more(default):
            self.notes.append(
                "the default may sustain more than was measured, and the gain be less: the search ended before"
            )
        more = gain(best, default, seed) if default is not None else None
        short = self._too_little(best)
        verdict = Verdict(
            slo=self.slo.text,
            chosen=str(best.settings),
            default=str(self.default),
            met=short is None,
            proven=best.met is True,
            goodput=best.goodput,
            default_goodput=default.goodput if default else None,
            gain=more[0] if more else None,
            interval=more[1] if more else None,
            command=command,
            cost_per_million=price / (best.goodput * 3600) * 1e6 if price is not None else None,
            runners_up=self._runners_up(best),
            trajectory=self.field.steps,
            notes=[*([short] if short else []), *self.notes],
        )
        return self._made(verdict, best.settings if short is None else None, best.rate, best.met is True)

    def _made(self, verdict: Verdict, chosen: Settings | None, rate: float, confirmed: bool) -> Outcome:
        spent_s = self.field.meter.spent_s
        log.info("chosen=%s rate=%g confirmed=%s ended=%s spent_s=%.1f", chosen, rate, confirmed, self.ended, spent_s)
        return Outcome(
            verdict=verdict, chosen=chosen, rate=rate, confirmed=confirmed, ended=self.ended, spent_s=spent_s
        )

    def _best(self) -> Finalist | None:
        """Of the finalists that keep the SLO the one with the most goodput; what is as good and cheaper goes first, and
        what is of the space before a default that is not. Before any is proven the best of the search, at the rate to
        which its repeats have lowered it."""
        space = self.field.space
        able = [one for one in self.finalists if one.met]
        able = [one for one in able if self._too_little(one) is None] or able
        if able:
            top = max(one.goodput for one in able)
            as_good = [one for one in able if one.goodput >= top * (1 - _SAME)]
            return min(as_good, key=lambda one: (one.settings not in space, space.cost(one.settings)))
        failed = {one.settings for one in self.finalists if one.met is False}
        if self.finalists and len(failed) == len(self.finalists):
            return None
        known = {one.settings: one for one in self.finalists}
        left = [trial for trial in self.field.ranked() if trial.rate and trial.settings not in failed]
        rated = [known.get(trial.settings) or Finalist(trial.settings, trial.rate) for trial in left]
        return max(rated, key=lambda one: one.rate, default=None)

    def _say_if_the_generator_was_too_slow(self, best: Finalist) -> None:
        trial = self.field.trials.get(best.settings)
        if trial is not None and trial.bad is not None and trial.bad.invalid:
            self.notes.append(
                f"the load generator, not the model, ended at {trial.bad_rate:g}/s: {trial.bad.invalid}; there may be "
                "better settings than could be measured"
            )

    def _too_little(self, best: Finalist) -> str | None:
        """Why the SLO's throughput is not reached; None if it is, or none is asked for."""
        wanted = next((part for part in self.slo.objectives if part.name == "throughput"), None)
        if wanted is None or best.rate >= wanted.limit:
            return None
        return f"no settings keep {self.slo.text}: the nearest, {best.settings}, sustain {best.rate:g}/s"

    def _why_not_default(self) -> str:
        trial = self.field.trials.get(self.default)
        proven = next((one.why for one in self.finalists if one.settings == self.default), "")
        if why := proven or (trial.out if trial else ""):
            return f"does not keep the SLO: {why}"
        tried = trial is not None and (trial.good or trial.bad)
        return f"was {'not measured to the end' if tried else 'not measured'}: {self.early or 'nothing is known of it'}"

    def _may_do_more(self, one: Finalist) -> bool:
        """Whether the search for its rate was cut short."""
        trial, precision = self.field.trials[one.settings], self.field.effort.precision
        return bool(self.early) and trial.bad_rate > trial.rate * (1 + 2 * precision)

    def _runners_up(self, best: Finalist | None) -> list[RunnerUp]:
        """Why not each: the finalists, then the others, by what was learned of them."""
        proven = {one.settings: one for one in self.finalists if best is not None and one.settings != best.settings}
        known = {*proven, *([best.settings] if best else [])}
        others = [trial for trial in self.field.ranked(all_of_them=True) if trial.settings not in known]
        return [
            *(RunnerUp(settings=str(s), why=_beaten(one, best)) for s, one in proven.items() if best),
            *(RunnerUp(settings=str(trial.settings), why=_lost(trial)) for trial in others[:_TOLD]),
        ]

    def _nothing(self, command: str) -> Outcome:
        """Nothing keeps the SLO, or nothing is known: the nearest."""
        chosen, why = self._nearest()
        verdict = Verdict(
            slo=self.slo.text,
            chosen=chosen,
            default=str(self.default),
            met=False,
            command=command,
            runners_up=self._runners_up(None),
            trajectory=self.field.steps,
            notes=[why, *self.notes],
        )
        return self._made(verdict, None, 0.0, False)

    def _nearest(self) -> tuple[str, str]:
        """The settings that break the SLO least, and how they do; "" where nothing valid tells."""
        none = f"no settings keep {self.slo.text}"
        if self.finalists:
            one = max(self.finalists, key=lambda one: one.rate)
            return str(one.settings), f"{none} for sure: the nearest, {one.settings}, {one.why}"
        trials = self.field.trials.values()
        if found := [(t.settings, t.bad) for t in trials if t.bad is not None and not t.bad.invalid]:
            settings, reading = min(found, key=lambda pair: pair[1].excess(self.slo))
            parts = [part.name for part in self.slo.objectives if part.name != "throughput"]
            values = ", ".join(f"{name} {told(name, reading.value(name))}" for name in parts)
            return str(settings), f"{none}: the nearest, {settings}, come to {values} at {reading.rate:g}/s"
        if spoiled := next((trial.bad for trial in trials if trial.bad is not None), None):
            return "", f"whether any settings keep {self.slo.text} could not be measured: {spoiled.invalid}"
        if out := next((trial for trial in trials if trial.out), None):
            return str(out.settings), f"{none}: {out.settings}: {out.out}"
        return "", f"{none} as far as is known: nothing was measured"


def _beaten(one: Finalist, best: Finalist) -> str:
    """Why a finalist was not chosen."""
    if one.met is False:
        return f"not sure to keep the SLO: {one.why}"
    if one.met is None:
        return "not confirmed: the search ended before"
    less = 1 - one.goodput / best.goodput
    if less > _SAME:
        return f"sustains {one.goodput:.3g}/s, {less * 100:.0f} % less"
    return f"as good ({one.goodput:.3g}/s), and dearer"


def _lost(trial: Trial) -> str:
    """Why a trial did not come among the finalists."""
    if trial.out:
        return trial.out
    if trial.bad is not None:
        return f"at {trial.bad_rate:.3g}/s: {trial.why_bad}"
    return trial.why_bad or (f"sustains {trial.rate:.3g}/s" if trial.rate else "was not measured")
