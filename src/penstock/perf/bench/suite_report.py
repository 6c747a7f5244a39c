"""The results of a benchmark suite: ab_report.csv with TorchServe's columns and more, and a report. Pure.

Figures are medians of the repeats. An unknown figure is empty, never 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from msgspec import structs

from penstock.errors import ConfigError
from penstock.perf.bench.document import (
    UNKNOWN,
    Block,
    Heading,
    Paragraph,
    Plot,
    Report,
    make_report,
    number,
    reproduce,
    seconds,
    table,
)
from penstock.perf.bench.measurement import (
    FIGURES,
    Figure,
    Gpu,
    Load,
    LoadPoint,
    Measurement,
    ServerStats,
    group_by_load,
    p99,
    server_stats,
    throughput,
)
from penstock.perf.bench.plots import draw
from penstock.perf.bench.report import LOADS, evidence
from penstock.perf.bench.results import Origin, as_csv, redacted
from penstock.perf.bench.suite_yaml import SuitePoint

AB_REPORT: Final = "ab_report.csv"


class SuiteRow(LoadPoint, frozen=True, kw_only=True):
    """All repeats of one run, possibly none."""

    point: SuitePoint

    @property
    def settings(self) -> str:
        return f"{self.point.settings}, {self.load.label}"

    @property
    def name(self) -> str:
        return f"{self.point.case.text}: {self.settings}"

    @property
    def spread(self) -> float | None:
        """The range of the repeats' throughputs relative to their median; None for a single one."""
        found = self.values(throughput)
        return (max(found) - min(found)) / median(found) if len(found) > 1 and median(found) else None


def rows_of(points: Sequence[SuitePoint], measurements: Sequence[Measurement]) -> list[SuiteRow]:
    """A row per registration and concurrency, in order."""
    found = {(each.label, each.load.concurrency): each for each in group_by_load(measurements)}
    rows = []
    for point in points:
        for clients in point.case.concurrency:
            load = Load(mode="closed", concurrency=clients)
            there = found.get((point.label, clients)) or LoadPoint(label="", load=load, runs=[], invalid=[])
            row = SuiteRow(point=point, label=point.label, load=load, runs=there.runs, invalid=there.invalid)
            rows.append(row)
    return rows


# ---- ab_report.csv


def _times(figure: Figure, factor: float) -> Figure:
    return lambda m: None if (value := figure(m)) is None else value * factor


def _server(read: Callable[[ServerStats], float | None], factor: float = 1.0) -> Figure:
    """A figure of the server times `factor`."""
    return _times(lambda m: read(server_stats(m)), factor)


def _quantile(name: str, q: str) -> Figure:
    return _server(lambda s: getattr(s, name).get(q), 1e3)


def _handler_s(s: ServerStats) -> float | None:
    """The handler's whole time per batch."""
    parts = [part for part in (s.preprocess_s, s.run_s, s.postprocess_s) if part is not None]
    return sum(parts) if s.run_s is not None else None


def _gpu(read: Callable[[Gpu], float | None]) -> Figure:
    """The mean over the GPUs with a value."""

    def figure(s: ServerStats) -> float | None:
        found = [value for gpu in s.gpus if (value := read(gpu)) is not None]
        return fmean(found) if found else None

    return _server(figure)


_FIGURES: Final[Mapping[str, Figure]] = {
    "TS failed requests": lambda m: sum(m.errors.values()),
    "TS throughput": throughput,
    **{f"TS latency P{q}": _times(FIGURES[f"p{q}_s"], 1e3) for q in ("50", "75", "90", "95", "99")},
    "TS latency P99.9": _times(FIGURES["p999_s"], 1e3),
    "TS latency mean": _times(FIGURES["mean_s"], 1e3),
    "TS latency max": _times(FIGURES["max_s"], 1e3),
    "TS error rate": lambda m: m.error_share * 100,
    **{f"Model_{q}": _quantile("worker_at_s", q) for q in ("p50", "p90", "p99")},
    **{f"Queue time {q}": _quantile("queue_at_s", q) for q in ("p50", "p90", "p99")},
    "predict_mean": _times(FIGURES["run_s"], 1e3),
    "handler_time_mean": _server(_handler_s, 1e3),
    "waiting_time_mean": _times(FIGURES["queue_s"], 1e3),
    "gpu_percentage_mean": _gpu(lambda gpu: gpu.utilization * 100),
    "gpu_memory_percentage_mean": _gpu(
        lambda gpu: gpu.memory_bytes / gpu.total_bytes * 100 if gpu.total_bytes else None
    ),
    "gpu_memory_used_mean": _gpu(lambda gpu: gpu.memory_bytes / 2**20),
    "Batch size mean": FIGURES["mean_batch"],
    "Server CPU cores": FIGURES["cpu_cores"],
    "Server memory MB": _times(FIGURES["memory_bytes"], 2**-20),
}
COLUMNS: Final = (
    "Benchmark", "Batch size", "Batch delay", "Workers", "Model", "Concurrency", "Input", "Requests",
    "TS failed requests", "TS throughput", "TS latency P50", "TS latency P90", "TS latency P99", "TS latency mean",
    "TS error rate", "Model_p50", "Model_p90", "Model_p99", "Queue time p50", "Queue time p90", "Queue time p99",
    "predict_mean", "handler_time_mean", "waiting_time_mean", "worker_thread_mean", "cpu_percentage_mean",
    "memory_percentage_mean", "gpu_percentage_mean", "gpu_memory_percentage_mean", "gpu_memory_used_mean",
    # not in TorchServe's report
    "Mode", "Processor", "TS latency P75", "TS latency P95", "TS latency P99.9", "TS latency max", "Batch size mean",
    "Server CPU cores", "Server memory MB", "Repeats", "Throughput spread %", "SLO met", "Machine", "Invalid",
)  # fmt: skip


def ab_report(rows: Sequence[SuiteRow], machine: Mapping[str, Any]) -> str:
    """The rows as CSV; times in milliseconds, shares in percent."""
    found = [_cells(row, machine) for row in rows]
    return as_csv([COLUMNS, *([cells.get(name) for name in COLUMNS] for cells in found)])


def _cells(row: SuiteRow, machine: Mapping[str, Any]) -> dict[str, object]:
    case, point = row.point.case, row.point
    figures = {name: row.median(figure) for name, figure in _FIGURES.items()}
    figures["Throughput spread %"] = None if row.spread is None else row.spread * 100
    if cores := machine.get("cores"):
        figures["cpu_percentage_mean"] = row.median(_times(FIGURES["cpu_cores"], 100 / cores))
    if gib := machine.get("memory_gib"):
        figures["memory_percentage_mean"] = row.median(_times(FIGURES["memory_bytes"], 100 / (gib * 2**30)))
    return {
        "Benchmark": "penstock", "Batch size": point.batch_size, "Batch delay": case.batch_delay_ms,
        "Workers": point.workers, "Model": case.model, "Concurrency": row.load.concurrency, "Input": case.input,
        "Requests": case.requests, "Mode": case.mode, "Processor": point.processor.text,
        "Repeats": len(row.runs) + len(row.invalid), "Machine": machine_text(machine),
        "SLO met": {True: "yes", False: "no", None: None}[row.met],
        "Invalid": "; ".join(dict.fromkeys(text for m in row.invalid for text in m.invalid)),
    } | {name: None if value is None else round(value, 3) for name, value in figures.items()}  # fmt: skip


def machine_text(machine: Mapping[str, Any]) -> str:
    gpus = machine.get("gpus") or []
    cards = f", {len(gpus)} x {gpus[0]}" if gpus else ""
    return f"{machine.get('cpu', 'unknown CPU')}, {machine.get('cores', '?')} cores{cards}"


# ---- the report


def suite_report(rows: Sequence[SuiteRow], origin: Origin, notes: Sequence[str] = ()) -> Report:
    """The recommendation for each model, then all results."""
    models: dict[str, list[SuiteRow]] = {}
    for row in rows:
        models.setdefault(row.point.case.text, []).append(row)
    rest = [
        *(block for own in models.values() for block in _section(own)),
        *evidence(rows, origin, notes),
        reproduce(origin.line),
    ]
    return make_report("Benchmark suite", [_recommend(name, own, origin.slo) for name, own in models.items()], rest)


def suite_plots(rows: Sequence[SuiteRow], measurements: Sequence[Measurement], slo: str) -> list[Plot]:
    """The plots of a single model. Raises ConfigError for several, and without matplotlib."""
    if (models := len({row.point.case.text for row in rows})) > 1:
        raise ConfigError(f"they show one model, and the suite has {models}")
    short = {row.label: row.point.short for row in rows}
    return draw([structs.replace(m, label=short[m.label]) for m in measurements], slo)


def _recommend(name: str, rows: Sequence[SuiteRow], slo: str) -> Paragraph:
    """The run with the highest throughput, within the SLO if there is one.

    Runs whose repeats overlap with it are a tie: of those, the one with the fewest workers and then the lowest p99.
    """
    measured = [row for row in rows if row.runs]
    met = [row for row in measured if row.met] if slo else measured
    if not measured:
        return Paragraph(f"{name}: no valid measurement.", "bad")
    if not met and any(row.met is None for row in measured):
        return Paragraph(f"{name}: no run is known to meet {slo}; runs marked {UNKNOWN} were too short.", "bad")
    if not met:
        return Paragraph(f"{name}: no run meets {slo}.", "bad")
    top = min(max(met, key=lambda row: row.median(throughput) or 0.0).values(throughput))
    tied = [row for row in met if max(row.values(throughput)) >= top]
    best = min(tied, key=lambda row: (row.point.workers, row.median(p99) or math.inf, -(row.median(throughput) or 0)))
    within = f" within {slo}" if slo else ""
    rate, tail = number(best.median(throughput)), seconds(best.median(p99))
    others = "; ".join(row.settings for row in tied if row is not best)
    tie = f" A tie, because the repeats overlap: {others}." if others else ""
    return Paragraph(f"{best.name}: {rate}/s{within}, p99 {tail}.{tie}", "good")


_SETTINGS: Final[Mapping[str, Callable[[SuiteRow], str]]] = {
    "processor": lambda row: row.point.processor.text,
    "workers": lambda row: str(row.point.workers),
    "batch": lambda row: str(row.point.batch_size),
}
_BATCH: Final[Mapping[str, Callable[[SuiteRow], str]]] = {
    "batch p50": lambda row: _known(row.median(lambda m: server_stats(m).worker_at_s.get("p50")))
}


def _known(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _section(rows: Sequence[SuiteRow]) -> list[Block]:
    case = rows[0].point.case
    text = (
        f"{redacted(case.url)}: {case.requests} requests per run with {case.input or 'its own example'}; a batch waits "
        f"at most {case.batch_delay_ms} ms to fill."
    )
    return [Heading(case.text), Paragraph(text), table({**_SETTINGS, **LOADS, **_BATCH}, rows)]
