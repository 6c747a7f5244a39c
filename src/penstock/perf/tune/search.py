"""The search for the best settings: its state, and the strategies that drive it.

A challenger costs one probe, at the rate that the best settings so far sustain: most fail it and need no rate of their
own. Settings that the offline batch curve already rules out cost nothing.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.errors import ConfigError, nearest
from penstock.perf.bench.document import memory, seconds
from penstock.perf.bench.measurement import SearchStep, Slo
from penstock.perf.tune.rates import GAIN, Effort, RateProber, TuningTrial
from penstock.perf.tune.runner import Infeasible, TrialRunner
from penstock.perf.tune.space import CandidateSettings, SearchSpace, TunedParameter, settings_of
from penstock.plugins import optional_module

TIE: Final = 0.015  # cheaper settings may be worse by this share
COARSE: Final = 0.10  # precision of rates while the search goes on
_HOPE: Final = 1.1  # times the bound of a curve, which is a measurement too


class SearchState:
    """All settings of a search and the knowledge about each.

    `best` is the trial with the largest known rate, or a cheaper one that is about as good.
    """

    def __init__(self, runner: TrialRunner, space: SearchSpace, slo: Slo, effort: Effort, seed: int) -> None:
        self.runner, self.space, self.slo, self.effort = runner, space, slo, effort
        self.prober = RateProber(runner, slo, effort)
        self.rng = random.Random(seed)
        self.trials: dict[CandidateSettings, TuningTrial] = {}
        self.best: TuningTrial | None = None
        self.steps: list[SearchStep] = []

    def trial(self, settings: CandidateSettings) -> TuningTrial:
        """The trial of these settings; the first call rules them out if that needs no load."""
        if settings not in self.trials:
            trial = TuningTrial(settings)
            trial.out = self.runner.system.refusal(settings) or self._by_curve(settings)
            self.trials[settings] = trial
        return self.trials[settings]

    def _by_curve(self, settings: CandidateSettings) -> str:
        curve, limit_s = self.runner.curve(settings), self.slo.latency_s
        if curve is None:
            return ""
        if limit_s is not None and curve.seconds(1) > limit_s:
            return f"offline, a batch of one takes {seconds(curve.seconds(1))}"
        instances, batch = settings.whole("instances", 1) or 0, settings.whole("batch")
        # memory is known for the largest batch only
        largest = batch is None or batch >= curve.points[-1][0]
        needed = (curve.memory_bytes or 0) * (instances if largest else 0)
        if curve.limit_bytes and needed > curve.limit_bytes:
            return f"needs {memory(needed)}, the machine has {memory(curve.limit_bytes)}"
        return ""

    def open(self) -> list[CandidateSettings]:
        """All settings that are not ruled out, cheapest first."""
        return [settings for settings in self.space if not self.trial(settings).out]

    def bound(self, settings: CandidateSettings) -> float | None:
        """The most requests per second that the curve allows, if instances do not slow each other down. None if the
        settings leave the number of instances or the batch size to the app."""
        return self.promise(settings) if settings.whole("instances") and settings.whole("batch") else None

    def promise(self, settings: CandidateSettings) -> float | None:
        """Like `bound`, to compare settings; an unknown number of instances counts as one, an unknown batch size as the
        largest on the curve."""
        curve = self.runner.curve(settings)
        if curve is None:
            return None
        largest = settings.whole("batch") or curve.points[-1][0]
        return (settings.whole("instances") or 1) * curve.per_second(largest, self.slo.latency_s)

    def guess(self, settings: CandidateSettings) -> float:
        """The expected sustainable rate: the promise, scaled like the nearest settings that were measured."""
        near = min(
            (t for t in self.trials.values() if t.estimate),
            key=lambda t: self._distance(t.settings, settings),
            default=None,
        )
        promise = self.promise(settings)
        if near is None:
            return 0.7 * promise if promise else 0.0
        other = self.promise(near.settings)
        return near.estimate * promise / other if promise and other else near.estimate

    def _distance(self, one: CandidateSettings, other: CandidateSettings) -> float:
        """The steps between two settings; steps of instances weigh three times as much."""

        def steps(parameter: TunedParameter) -> int:
            a, b = one.get(parameter.name), other.get(parameter.name)
            if a == b:
                return 0
            if parameter.ordered and a in parameter.values and b in parameter.values:
                return abs(parameter.values.index(a) - parameter.values.index(b))
            return 1

        return float(sum(steps(p) * (3 if p.name == "instances" else 1) for p in self.space.parameters))

    def measure(self, settings: CandidateSettings, precision: float = COARSE) -> TuningTrial:
        """Finds the sustainable rate to this precision."""
        trial = self.trial(settings)
        if not trial.out:
            self.prober.narrow(trial, self._start(trial), precision)
            self.consider(trial)
        return trial

    def settle(self, settings: CandidateSettings, *, enters: bool = True) -> TuningTrial:
        """Finds the rate to the effort's precision. The trial can become the best only if it `enters`."""
        trial = self.trial(settings)
        if not trial.out:
            self.prober.settle(trial, self._start(trial))
            if enters:
                self.consider(trial)
            else:
                self._step(trial)
        return trial

    def ranked(self, *, with_ruled_out: bool = False) -> list[TuningTrial]:
        """Trials of the space that sustain or may sustain a rate, best first, cheaper first among equals."""
        found = [t for t in self.trials.values() if with_ruled_out or (t.estimate and t.settings in self.space)]
        return sorted(found, key=lambda t: (-t.estimate, self.space.cost(t.settings)))

    def _step(self, trial: TuningTrial) -> None:
        met = None if trial.good is None and not trial.out else bool(trial.rate)
        goodput = trial.good.throughput if trial.good else None
        self.steps.append(
            SearchStep(settings=str(trial.settings), goodput=goodput, met=met, elapsed_s=self.runner.spent_s)
        )

    def _start(self, trial: TuningTrial) -> float:
        if guess := self.guess(trial.settings):
            return guess
        try:
            found = self.runner.saturate(trial.settings, self.effort.probe_s)
        except Infeasible as e:
            trial.out = str(e)
            return 1.0
        return max(0.8 * found.throughput, 0.1)

    def can_win(self, settings: CandidateSettings) -> bool:
        """Whether these settings may still be better than the best so far."""
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

    def challenge(self, settings: CandidateSettings) -> bool:
        """Whether these settings are better than the best so far; then they become the best."""
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

    def _bar(self, trial: TuningTrial) -> float:
        """The rate at which this trial would win."""
        assert self.best is not None
        cheaper = self.space.cost(trial.settings) < self.space.cost(self.best.settings)
        top = max(other.rate for other in self.trials.values())
        return top * (1 - TIE if cheaper else 1 + GAIN)

    def consider(self, trial: TuningTrial) -> None:
        """Chooses the best again after this trial changed; it may be another that this one beat by luck."""
        self._step(trial)
        able = [other for other in self.ranked() if other.rate]
        top = max((other.rate for other in able), default=0.0)
        as_good = (other for other in able if other.rate >= top * (1 - TIE))
        self.best = min(as_good, key=lambda other: self.space.cost(other.settings), default=None)


# ---- strategies

Strategy = Callable[[SearchState], None]

# Choices; benchmarks/tuner_truth.py compares what each strategy finds with the true optimum of random machines.
_FEW: Final = 6  # settings that `auto` measures exhaustively
_MOVES: Final = 200  # of a climb: more of them only follow noise in circles
_LOSSES: Final = 6  # challengers in a row that lose before the look elsewhere ends
_CLOSE: Final = 0.9  # share of the best rate from which a climb may go on, too
_OTHERS: Final = 1  # how many of those that close
_HALVED: Final = 64  # settings that halving begins with; a larger space is sampled
_RUNGS: Final = (0.3, 0.12, 0.05)  # precision of the rates, rung by rung
_KEPT: Final = 3  # one in this many reaches the next rung
_OPTUNA: Final = ("optuna", "--search tpe needs Optuna", "tune")
_TPE_MOST: Final = 40  # settings that TPE may ask for
_TPE_SHARE: Final = 0.4  # of the space


def grid(state: SearchState) -> None:
    """Measures all settings that are not ruled out: slow and complete."""
    for settings in _starts(state):
        state.settle(settings)


def auto(state: SearchState) -> None:
    """The grid if there are few settings; else a climb and a look elsewhere."""
    if len(state.open()) <= _FEW:
        grid(state)
    else:
        climb(state)
        _look_elsewhere(state)


def climb(state: SearchState) -> None:
    """Climbs from the most promising settings with a medium number of instances, one parameter at a time."""
    for start in _starts(state):
        if not state.measure(start).out:  # an SLO may be out of reach here and not elsewhere
            break
    _ascend(state)


def _starts(state: SearchState) -> list[CandidateSettings]:
    """Where to begin, best first: the largest batch, which is only a limit and costs nothing while few requests wait;
    then the medium number of instances, then the largest promise."""
    found = state.open()
    counts = sorted({settings.whole("instances", 1) or 0 for settings in found})
    if not counts:
        return []
    middle = counts[len(counts) // 2]

    def merit(settings: CandidateSettings) -> tuple[float, bool, float]:
        medium = (settings.whole("instances", 1) or 0) == middle
        return settings.whole("batch") or 0, medium, state.promise(settings) or 0.0

    return sorted(found, key=merit, reverse=True)


def _ascend(state: SearchState) -> None:
    """Moves to better neighbours until there is none. A long run exposes a lucky winner; then the settings that it beat
    get another chance, and finally the neighbours of settings that are nearly as good."""
    settled = set[CandidateSettings]()
    for _ in range(_MOVES):
        best = state.best
        if best is None:
            return
        if _neighbour_wins(state, best.settings):
            continue
        if best.settings not in settled:
            settled.add(best.settings)
            state.settle(best.settings)
            continue
        close = [t.settings for t in state.ranked() if t is not best and t.estimate >= _CLOSE * best.rate]
        if not any(_neighbour_wins(state, other) for other in close[:_OTHERS]):
            return


def _neighbour_wins(state: SearchState, settings: CandidateSettings) -> bool:
    """Whether a neighbour becomes the best; the most promising ones challenge first."""
    near = sorted(state.space.neighbours(settings), key=state.guess, reverse=True)
    return any(state.challenge(other) for other in near)


def _look_elsewhere(state: SearchState) -> None:
    """Lets the most promising settings anywhere challenge until several in a row lose; climbs from each winner."""
    losses, tried = 0, set[CandidateSettings]()
    while losses < _LOSSES:
        left = [settings for settings in state.open() if settings not in tried and state.can_win(settings)]
        if not left:
            return
        tried.add(found := max(left, key=state.guess))
        won = state.challenge(found)
        losses = 0 if won else losses + 1
        if won:
            _ascend(state)


def halving(state: SearchState) -> None:
    """Successive halving: the best third of each rung gets a longer look. The first look is a closed loop, which shows
    the throughput but not the latency."""
    found = _starts(state)
    if len(found) > _HALVED:
        found = sorted(state.rng.sample(found, _HALVED), key=found.index)
    scores = {settings: _saturated(state, settings) for settings in found}
    for precision in _RUNGS:
        kept = sorted(scores, key=lambda s: -scores[s])[: max(3, -(-len(scores) // _KEPT))]
        scores = {settings: state.measure(settings, precision).estimate for settings in kept}


def _saturated(state: SearchState, settings: CandidateSettings) -> float:
    """The most requests per second in batches that the SLO allows."""
    try:
        found = state.runner.saturate(settings, state.effort.probe_s).throughput
    except Infeasible as e:
        state.trial(settings).out = str(e)
        return 0.0
    bound = state.bound(settings)
    return found if bound is None else min(found, bound)


def tpe(state: SearchState) -> None:
    """Optuna's TPE sampler proposes challengers; the value of each is its sustainable rate."""
    optuna: Any = optional_module(*_OPTUNA)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=state.rng.randrange(2**31), n_startup_trials=6, multivariate=False)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    worth: dict[CandidateSettings, float] = {}
    most = min(_TPE_MOST, max(8, round(_TPE_SHARE * len(state.space))))
    for _ in range(3 * most):  # the sampler may repeat itself
        asked = study.ask()
        found = _proposed(state, asked)
        if found not in worth:
            state.challenge(found)
            worth[found] = state.trial(found).estimate
        study.tell(asked, worth[found])
        if len(worth) >= most:
            return


def _proposed(state: SearchState, asked: Any) -> CandidateSettings:
    """The settings of an Optuna trial. An ordered parameter is sampled by the index of its value, so that neighbours
    are close to each other."""
    found = {}
    for p in state.space.parameters:
        if p.ordered:
            found[p.name] = sorted(p.values)[asked.suggest_int(p.name, 0, len(p.values) - 1)]
        else:
            found[p.name] = p.values[asked.suggest_categorical(p.name, list(range(len(p.values))))]
    return settings_of(found)


STRATEGIES: Final[Mapping[str, Strategy]] = {"auto": auto, "grid": grid, "climb": climb, "halving": halving, "tpe": tpe}


def strategy(name: str) -> Strategy:
    """The strategy of that name. Raises ConfigError if it is unknown or needs a package that is not installed."""
    if name not in STRATEGIES:
        raise ConfigError(f"there is no search '{name}'{nearest(name, STRATEGIES)} Known: {', '.join(STRATEGIES)}")
    if name == "tpe":
        optional_module(*_OPTUNA)
    return STRATEGIES[name]
