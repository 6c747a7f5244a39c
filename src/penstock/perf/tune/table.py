"""What each of the settings bore, a row each: the table that a tuning guide has. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Final

from penstock.config.schema import ModelConfig
from penstock.perf.bench.measurement import Measurement
from penstock.perf.bench.slo import Slo
from penstock.perf.simulate.capacity import Trial
from penstock.perf.tune.space import Settings, parse_settings, shown
from penstock.perf.tune.trial import Reading

COLUMNS: Final = (
    "device", "concurrency", "requests", "workers", "batch", "payload_bytes", "optimisation", "throughput_per_s",
    "p99_ms", "offered_per_s", "slo", "settings",
)  # fmt: skip


def rows(runs: Sequence[Measurement], slo: Slo, model: ModelConfig, payload_bytes: int) -> list[list[str]]:
    """The heading, then a row for each of the settings, most throughput first: its valid run with the largest rate that
    kept the SLO, else that with the smallest rate. Closed loops, which only explore, have none. As in the search a run
    that a longer one contradicts counts for nothing.

    `model` is the app as it is; `concurrency` is how many requests were under way on average.
    """
    by_label: dict[str, list[Measurement]] = {}
    for run in runs:
        if run.load.mode == "open" and not run.invalid:
            by_label.setdefault(run.label, []).append(run)
    shown_runs = [_of_settings(found, slo) for found in by_label.values()]
    ordered = sorted(shown_runs, key=lambda found: (not found[1], -found[0].throughput))
    return [list(COLUMNS), *(_row(run, kept, model, payload_bytes) for run, kept in ordered)]


def as_csv(table: Sequence[Sequence[str]]) -> str:
    """The rows as a file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return out.getvalue()


def _of_settings(runs: Sequence[Measurement], slo: Slo) -> tuple[Measurement, bool]:
    """(the run that tells most of them, whether it kept the SLO)."""
    trial = Trial(Settings())
    for run in runs:
        trial.add(Reading(run=run, cost_s=0.0), slo)
    told = trial.good or trial.bad
    assert told is not None, "one of them is valid"
    return told.run, told is trial.good


def _row(run: Measurement, kept: bool, model: ModelConfig, payload_bytes: int) -> list[str]:
    settings = parse_settings(run.label)
    latency = run.latency
    busy = run.throughput * (latency.mean_s or 0.0)  # Little's law
    return [
        str(settings.get("device") or ",".join(model.devices)),
        f"{busy:.3g}",
        str(run.requests),
        shown(settings.get("instances") or model.instances),
        shown(settings.get("batch") or model.batching.max_batch_size),
        str(payload_bytes),
        _optimisation(settings, model),
        f"{run.throughput:.4g}",
        "" if latency.p99_s is None else f"{latency.p99_s * 1e3:.4g}",
        f"{run.load.rate:g}",
        "kept" if kept else "missed",
        str(settings),
    ]


def _optimisation(settings: Settings, model: ModelConfig) -> str:
    """Precision, and what else was done to the model: "bf16 compile"; "none" for a model as it is."""
    named = (settings.get("precision") or model.precision, settings.get("optimize") or model.optimize)
    return " ".join(str(value) for value in named if value not in (None, "none")) or "none"
