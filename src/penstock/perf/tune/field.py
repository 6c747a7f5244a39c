"""Field: all settings of a search, what is known of each, and the questions a strategy may ask of them.

A challenger costs one probe, at the rate that the best so far is known to sustain: most fail it, and need no rate of
their own. What the offline curve already tells costs none.
"""

from __future__ import annotations

import random
from typing import Final

from penstock.perf.bench.measurement import SearchStep
from penstock.perf.bench.slo import Slo
from penstock.perf.simulate.capacity import Effort, Prober, Trial
from penstock.perf.tune.meter import Meter, Unfit
from penstock.perf.tune.space import Settings, Space

GAIN: Final = 0.025  # so much more makes dearer settings worth it
TIE: Final = 0.015  # so much less is as good, if it is cheaper
COARSE: Final = 0.10  # between what passed and what did not, while the search goes on
_HOPE: Final = 1.1  # times what a curve allows: it was measured, too


class Field:
    """`best` is the trial with the largest known rate, or one that is as good and cheaper."""

    def __init__(self, meter: Meter, space: Space, slo: Slo, effort: Effort, seed: int) -> None:
        self.meter, self.space, self.slo, self.effort = meter, space, slo, effort
        self.prober = Prober(meter, slo, effort)
        self.rng = random.Random(seed)
        self.trials: dict[Settings, Trial] = {}
        self.best: Trial | None = None
        self.steps: list[SearchStep] = []

    def trial(self, settings: Settings) -> Trial:
        """What is known; what needs no load to be ruled out is so the first time."""
        if settings not in self.trials:
            trial = Trial(settings)
            trial.out = self.meter.bench.refusal(settings) or self._by_curve(settings)
            self.trials[settings] = trial
        return self.trials[settings]

    def _by_curve(self, settings: Settings) -> str:
        curve, limit_s = self.meter.curve(settings), self.slo.latency_s
        if curve is None:
            return ""
        if limit_s is not None and curve.seconds(1) > limit_s:
            return f"offline, a batch of one takes {curve.seconds(1) * 1e3:.3g} ms"
        instances, batch = settings.get("instances", 1), settings.get("batch", "auto")
        largest = not isinstance(batch, int) or batch >= curve.points[-1][0]  # what smaller ones need is not known
        needed = (curve.memory_bytes or 0) * (instances if largest and isinstance(instances, int) else 0)
        if curve.limit_bytes and needed > curve.limit_bytes:
            return f"would hold {needed / 2**20:,.0f} MiB, there are {curve.limit_bytes / 2**20:,.0f}"
        return ""

    def open(self) -> list[Settings]:
        """All that are not ruled out, cheaper ones first."""
        return [settings for settings in self.space if not self.trial(settings).out]

    def bound(self, settings: Settings) -> float | None:
        """Requests a second that the curve allows at most, with instances that do not disturb each other; None where
        the app says how many there are, or how large batches get."""
        told = isinstance(settings.get("instances"), int) and isinstance(settings.get("batch"), int)
        return self.promise(settings) if told else None

    def promise(self, settings: Settings) -> float | None:
        """What the curve promises beside other settings: as `bound`, with one instance and batches as large as were
        looked at where it is not known."""
        curve = self.meter.curve(settings)
        if curve is None:
            return None
        batch, instances = settings.get("batch"), settings.get("instances")
        largest = batch if isinstance(batch, int) else curve.points[-1][0]
        return (instances if isinstance(instances, int) else 1) * curve.per_second(largest, self.slo.latency_s)

    def guess(self, settings: Settings) -> float:
        """What the settings may sustain: as much of their promise as the nearest ones that were measured."""
        near = min(
            (t for t in self.trials.values() if t.estimate),
            key=lambda t: self._apart(t.settings, settings),
            default=None,
        )
        promise = self.promise(settings)
        if near is None:
            return 0.7 * promise if promise else 0.0
        other = self.promise(near.settings)
        return near.estimate * promise / other if promise and other else near.estimate

    def _apart(self, one: Settings, other: Settings) -> float:
        """How unlike two settings are: steps of each knob, where those of instances weigh most."""
        steps = 0.0
        for knob in self.space.knobs:
            a, b = one.get(knob.name), other.get(knob.name)
            if a != b:
                known = knob.ordered and a in knob.values and b in knob.values
                step = (
                    abs(knob.values.index(a) - knob.values.index(b)) if known and a is not None and b is not None else 1
                )
                steps += step * (3 if knob.name == "instances" else 1)
        return steps

    def measure(self, settings: Settings, precision: float = COARSE) -> Trial:
        """Finds the rate that the settings sustain, to this precision."""
        trial = self.trial(settings)
        if not trial.out:
            self.prober.narrow(trial, self._start(trial), precision)
            self.consider(trial)
        return trial

    def settle(self, settings: Settings, *, enters: bool = True) -> Trial:
        """Finds the rate as well as the effort allows. The trial becomes the best only if it `enters`."""
        trial = self.trial(settings)
        if not trial.out:
            self.prober.settle(trial, self._start(trial))
            if enters:
                self.consider(trial)
            else:
                self._step(trial)
        return trial

    def ranked(self, *, all_of_them: bool = False) -> list[Trial]:
        """Those that are known to sustain something, or may, the best first; of equals the cheaper. With `all_of_them`
        also those that were ruled out."""
        found = [t for t in self.trials.values() if all_of_them or (t.estimate and t.settings in self.space)]
        return sorted(found, key=lambda t: (-t.estimate, self.space.cost(t.settings)))

    def _step(self, trial: Trial) -> None:
        met = None if trial.good is None and not trial.out else bool(trial.rate)
        goodput = trial.good.throughput if trial.good else None
        self.steps.append(
            SearchStep(settings=str(trial.settings), goodput=goodput, met=met, elapsed_s=self.meter.spent_s)
        )

    def _start(self, trial: Trial) -> float:
        if guess := self.guess(trial.settings):
            return guess
        try:
            found = self.meter.saturate(trial.settings, self.effort.probe_s)
        except Unfit as e:
            trial.out = str(e)
            return 1.0
        return max(0.8 * found.throughput, 0.1)

    def can_win(self, settings: Settings) -> bool:
        """Whether nothing tells yet that they are not better than the best so far."""
        trial = self.trial(settings)
        if trial.out or trial is self.best:
            return False
        if self.best is None:
            return True
        bar, bound = self._bar(trial), self.bound(settings)
        if bound is not None and bound * _HOPE < bar:
            trial.why_bad = trial.why_bad or f"at most {bound:.3g}/s by its curve"
            return False
        return trial.bad_rate > bar

    def challenge(self, settings: Settings) -> bool:
        """Whether these settings are better than the best so far, which they then are."""
        if not self.can_win(settings):
            return False
        trial = self.trial(settings)
        if self.best is None:
            return self.measure(settings) is self.best
        start, bar = self.guess(settings), self._bar(trial)
        if trial.rate < bar and not self.prober.probe(trial, bar):
            self._step(trial)
            return False
        self.prober.narrow(trial, start, COARSE)
        self.consider(trial)
        return trial is self.best

    def _bar(self, trial: Trial) -> float:
        """The rate at which these settings would be the better ones."""
        assert self.best is not None
        cheaper = self.space.cost(trial.settings) < self.space.cost(self.best.settings)
        top = max(other.rate for other in self.trials.values())
        return top * (1 - TIE if cheaper else 1 + GAIN)

    def consider(self, trial: Trial) -> None:
        """Looks which is the best, now that more is known of this one: it, or another that it beat by luck."""
        self._step(trial)
        able = [other for other in self.ranked() if other.rate]
        top = max((other.rate for other in able), default=0.0)
        as_good = (other for other in able if other.rate >= top * (1 - TIE))
        self.best = min(as_good, key=lambda other: self.space.cost(other.settings), default=None)
