"""The result of tuning: the choice, its gain, the reasons in words, and the table of all settings."""

import logging
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from penstock.config.schema import ModelConfig
from penstock.perf.bench.measurement import Measurement, RunnerUp, Slo, Verdict
from penstock.perf.tune.confirm import Finalist, gain
from penstock.perf.tune.rates import TuningTrial
from penstock.perf.tune.search import SearchState
from penstock.perf.tune.space import CandidateSettings, parse_settings, shown
from penstock.perf.tune.system import MeasuredRun, part_text

log = logging.getLogger("penstock.tune")

Ending = Literal["done", "budget", "interrupted", "failed"]

_SAME: Final = 0.02  # settings whose goodput differs by less than this share are equally good
_LISTED: Final = 100  # runners-up
_EARLY: Final = {"budget": "the time budget was used up", "interrupted": "it was interrupted"}

COLUMNS: Final = (
    "settings", "slo", "throughput_per_s", "p99_ms", "offered_per_s", "device", "workers", "batch", "optimisation",
    "concurrency", "requests", "payload_bytes",
)  # fmt: skip


class TuningResult(Struct, frozen=True, kw_only=True):
    """The result of tuning: `verdict` for people, the rest for programs.

    `chosen` keeps the SLO at `rate` requests per second; None if no settings do, or nothing was measured. `confirmed`
    by repeats, unless the time was over before. `unproven` says why it must not replace the default; "" if it was
    better in the same run. `spent_s` is the time of all measurements.
    """

    verdict: Verdict
    chosen: CandidateSettings | None
    rate: float
    confirmed: bool
    unproven: str
    ended: Ending
    spent_s: float


class ResultBuilder:
    """Builds the result of a search. `finalists` have at least a known rate; the default is one if it sustains any."""

    def __init__(
        self,
        state: SearchState,
        default: CandidateSettings,
        finalists: Sequence[Finalist],
        ended: Ending,
        error: str = "",
    ) -> None:
        self.state, self.slo = state, state.slo
        self.default, self.finalists, self.ended = default, finalists, ended
        self.early = error or _EARLY.get(ended, "")
        self.notes: list[str] = []

    def build(self, *, seed: int, price: float | None, command: str) -> TuningResult:
        """The whole result. `price` is the price of an hour, `command` reproduces the search."""
        if self.early:
            self.notes.append(f"the search ended early: {self.early}; this is the best of the measurements so far")
        best = self._best()
        if best is None:
            return self._nothing(command)
        if best.met is None:
            self.notes.append("not confirmed: the chosen settings have too few runs to be certain")
        trial = self.state.trials.get(best.settings)
        if trial is not None and trial.bad is not None and trial.bad.invalid:
            self.notes.append(
                f"the load generator, not the model, was the limit at {trial.bad_rate:g}/s: {trial.bad.invalid}; better"
                " settings may exist that could not be measured"
            )
        default = self._baseline()
        if default is None:
            self.notes.append(f"the default ({self.default}) {self._why_not_default()}")
        elif default is not best and self._rate_is_open(default):
            self.notes.append(
                "the default may sustain more than was measured, so the gain may be smaller: the search ended early"
            )
        more = gain(best, default, seed) if default is not None else None
        short = self._too_little(best)
        unproven = self._unproven(best) if short is None else f"nothing keeps {self.slo.text}"
        if unproven and best.met:
            self.notes.append(unproven)
        verdict = Verdict(
            slo=self.slo.text,
            chosen=str(best.settings),
            default=str(self.default),
            met=short is None,
            proven=best.met is True and (not unproven or best.settings == self.default),
            goodput=best.goodput,
            default_goodput=default.goodput if default else None,
            gain=more[0] if more else None,
            interval=more[1] if more else None,
            command=command,
            cost_per_million=price / (best.goodput * 3600) * 1e6 if price is not None else None,
            runners_up=self._runners_up(best),
            trajectory=self.state.steps,
            notes=[*([short] if short else []), *self.notes],
        )
        return self._result(verdict, best.settings if short is None else None, best.rate, best.met is True, unproven)

    def _result(
        self, verdict: Verdict, chosen: CandidateSettings | None, rate: float, confirmed: bool, unproven: str
    ) -> TuningResult:
        spent_s = self.state.runner.spent_s
        log.info("chosen=%s rate=%g unproven=%s ended=%s spent_s=%.1f", chosen, rate, unproven, self.ended, spent_s)
        return TuningResult(
            verdict=verdict, chosen=chosen, rate=rate, confirmed=confirmed, unproven=unproven, ended=self.ended,
            spent_s=spent_s,
        )  # fmt: skip

    def _reference(self) -> Finalist | None:
        return next((one for one in self.finalists if one.settings == self.default), None)

    def _unproven(self, best: Finalist) -> str:
        """Why these settings must not replace the default; "" if they were better in the same rounds."""
        reference = self._reference()
        if self.ended == "interrupted":
            return "the search was interrupted"
        if best.met and best.settings == self.default:
            return "no settings were shown to be better than the default"
        if best.met and reference is not None and best.beats(reference):
            return ""
        if self.ended == "failed":
            return "the search failed before the choice was proven; run the same command to resume"
        if best.met is None or (self.early and (reference is None or reference.met is None)):
            return "there was no time left to prove the choice; give a longer --budget"
        return (
            f"{best.settings} was not shown to be better than the default: the machine is too noisy to tell them apart"
        )

    def _best(self) -> Finalist | None:
        """The proven finalist with the most goodput that is better than the default; the cheapest of about equal ones.
        Without one, the default if it is proven, then any other. Before any is proven, the best of the search, at its
        lowered rate if repeats have lowered it."""
        able, reference = [one for one in self.finalists if one.met], self._reference()
        able = [one for one in able if self._too_little(one) is None] or able
        if reference is not None:
            better = [one for one in able if one.beats(reference)]
            able = better or [one for one in able if one is reference] or able
        if able:
            top = max(one.goodput for one in able)
            as_good = [one for one in able if one.goodput >= top * (1 - _SAME)]
            return min(as_good, key=lambda one: self.state.space.cost(one.settings))
        failed = {one.settings for one in self.finalists if one.met is False}
        if self.finalists and len(failed) == len(self.finalists):
            return None
        known = {one.settings: one for one in self.finalists}
        left = [trial for trial in self.state.ranked() if trial.rate and trial.settings not in failed]
        rated = [known.get(trial.settings) or Finalist(trial.settings, trial.rate) for trial in left]
        return max(rated, key=lambda one: one.rate, default=None)

    def _too_little(self, best: Finalist) -> str | None:
        """Why the SLO's throughput is not reached; None if it is, or the SLO has none."""
        wanted = next((part for part in self.slo.objectives if part.name == "throughput"), None)
        if wanted is None or best.rate >= wanted.limit:
            return None
        return f"no settings keep {self.slo.text}: the nearest, {best.settings}, sustain {best.rate:g}/s"

    def _baseline(self) -> Finalist | None:
        """The default: as proven, or at the rate that the search found. None if it keeps the SLO at no known rate."""
        found = self._reference()
        if found is not None and found.met is not None:
            return found if found.met else None
        trial = self.state.trials.get(self.default)
        if trial is None or not trial.rate:
            return None
        self.notes.append(f"the default ({self.default}) is not confirmed: its rate is from one run of the search")
        return Finalist(self.default, trial.rate)

    def _why_not_default(self) -> str:
        trial = self.state.trials.get(self.default)
        if trial is not None and trial.out:
            return f"does not keep the SLO: {trial.out}"
        if (reference := self._reference()) is not None and reference.why:
            return f"is not certain to keep the SLO: {reference.why}"
        if trial is not None and trial.bad is not None:
            return f"kept the SLO at no rate that was measured: at {trial.bad_rate:g}/s: {trial.why_bad}"
        return f"was not measured: {self.early or 'no reason is known'}"

    def _rate_is_open(self, one: Finalist) -> bool:
        """Whether the search for its rate was cut short."""
        trial, precision = self.state.trials[one.settings], self.state.effort.precision
        return bool(self.early) and trial.bad_rate > trial.rate * (1 + 2 * precision)

    def _runners_up(self, best: Finalist | None) -> list[RunnerUp]:
        """Why not the others: first the finalists, then the rest by estimate."""
        proven = {one.settings: one for one in self.finalists if best is not None and one.settings != best.settings}
        known = {*proven, *([best.settings] if best else [])}
        others = [trial for trial in self.state.ranked(with_ruled_out=True) if trial.settings not in known]
        return [
            *(RunnerUp(settings=str(s), why=_why_beaten(one, best)) for s, one in proven.items() if best),
            *(RunnerUp(settings=str(trial.settings), why=_why_lost(trial)) for trial in others[:_LISTED]),
        ]

    def _nothing(self, command: str) -> TuningResult:
        """The result if no settings keep the SLO or nothing is known: the nearest settings."""
        chosen, why = self._nearest()
        verdict = Verdict(
            slo=self.slo.text,
            chosen=chosen,
            default=str(self.default),
            met=False,
            command=command,
            runners_up=self._runners_up(None),
            trajectory=self.state.steps,
            notes=[why, *self.notes],
        )
        trials = self.state.trials.values()
        known = self.finalists or any(t.good or (not t.bad.invalid if t.bad else t.out) for t in trials)
        unproven = f"nothing keeps {self.slo.text}" if known else f"nothing was measured: {self.early or why}"
        if self.ended == "interrupted":
            unproven = "the search was interrupted"
        return self._result(verdict, None, 0.0, False, unproven)

    def _nearest(self) -> tuple[str, str]:
        """The settings that violate the SLO least and their figures; "" if no run is valid."""
        none = f"no settings keep {self.slo.text}"
        if self.finalists:
            one = max(self.finalists, key=lambda one: one.rate)
            return str(one.settings), f"{none} with certainty: the nearest, {one.settings}, {one.why}"
        trials = self.state.trials.values()
        if found := [(t.settings, t.bad) for t in trials if t.bad is not None and not t.bad.invalid]:
            settings, measured = min(found, key=lambda pair: pair[1].excess(self.slo))
            parts = [part.name for part in self.slo.objectives if part.name != "throughput"]
            values = ", ".join(f"{name} {part_text(name, measured.value(name))}" for name in parts)
            return str(settings), f"{none}: the nearest, {settings}, reach {values} at {measured.rate:g}/s"
        if invalid := next((trial.bad for trial in trials if trial.bad is not None), None):
            return "", f"could not measure whether any settings keep {self.slo.text}: {invalid.invalid}"
        if out := next((trial for trial in trials if trial.out), None):
            return str(out.settings), f"{none}: {out.settings}: {out.out}"
        return "", f"{none} as far as is known: there are no measurements"


def _why_beaten(one: Finalist, best: Finalist) -> str:
    """Why a finalist was not chosen."""
    if one.met is False:
        return f"not certain to keep the SLO: {one.why}"
    if one.met is None:
        return "not confirmed: the search ended before"
    less = 1 - one.goodput / best.goodput
    if less > _SAME:
        return f"sustains {one.goodput:.3g}/s, {less * 100:.0f} % less"
    if less < -_SAME:
        return f"sustained {one.goodput:.3g}/s, but beside the default it was not shown to be better"
    return f"equally good ({one.goodput:.3g}/s), but more expensive"


def _why_lost(trial: TuningTrial) -> str:
    """Why a trial did not become a finalist."""
    if trial.out:
        return trial.out
    if trial.bad is not None:
        return f"at {trial.bad_rate:.3g}/s: {trial.why_bad}"
    return trial.why_bad or (f"sustains {trial.rate:.3g}/s" if trial.rate else "not measured")


# ---- the table


def settings_table(runs: Sequence[Measurement], slo: Slo, model: ModelConfig, payload_bytes: int) -> list[list[str]]:
    """The heading, then a row for each of the settings, most throughput first.

    A row shows the valid run at the largest rate that kept the SLO, else the one at the smallest rate. Closed loops
    have no row, because they only explore; a run that a longer one contradicts is ignored, as in the search. `model` is
    the baseline; `concurrency` is the mean number of requests in flight.
    """
    by_label: dict[str, list[Measurement]] = {}
    for run in runs:
        if run.load.mode == "open" and not run.invalid:
            by_label.setdefault(run.label, []).append(run)
    chosen = [_representative(found, slo) for found in by_label.values()]
    ordered = sorted(chosen, key=lambda found: (not found[1], -found[0].throughput))
    return [list(COLUMNS), *(_row(run, kept, model, payload_bytes) for run, kept in ordered)]


def _representative(runs: Sequence[Measurement], slo: Slo) -> tuple[Measurement, bool]:
    """(the run to show, whether it kept the SLO)."""
    trial = TuningTrial(CandidateSettings())
    for run in runs:
        trial.add(MeasuredRun(run=run, cost_s=0.0), slo)
    best = trial.good or trial.bad
    assert best is not None, "each run either keeps or violates the SLO"
    return best.run, best is trial.good


def _row(run: Measurement, kept: bool, model: ModelConfig, payload_bytes: int) -> list[str]:
    settings = parse_settings(run.label)
    latency = run.latency
    in_flight = run.throughput * (latency.mean_s or 0.0)  # Little's law
    optimisation = (settings.get("precision") or model.precision, settings.get("optimize") or model.optimize)
    return [
        str(settings),
        "kept" if kept else "missed",
        f"{run.throughput:.4g}",
        "" if latency.p99_s is None else f"{latency.p99_s * 1e3:.4g}",
        f"{run.load.rate:g}",
        str(settings.get("device") or ",".join(model.devices)),
        shown(settings.get("instances") or model.instances),
        shown(settings.get("batch") or model.batching.max_batch_size),
        " ".join(str(value) for value in optimisation if value not in (None, "none")) or "none",
        f"{in_flight:.3g}",
        str(run.requests),
        str(payload_bytes),
    ]
