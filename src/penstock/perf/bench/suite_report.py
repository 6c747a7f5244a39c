"""What a benchmark suite measured, as ab_report.csv and as a page: the columns of TorchServe's report, and more. Pure.

Of several repeats of a run the medians are told. What cannot be told is empty: never a zero.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from penstock.perf.bench.document import (
    UNKNOWN,
    Block,
    BulletList,
    CodeBlock,
    Heading,
    Paragraph,
    Report,
    TableBlock,
    number,
    seconds,
)
from penstock.perf.bench.measurement import Figure as Figure
from penstock.perf.bench.measurement import Gpu, Load, LoadPoint, Measurement, ServerStats, p99, throughput
from penstock.perf.bench.measurement import group_by_load as joined
from penstock.perf.bench.origin import redacted
from penstock.perf.bench.suite_yaml import Registration

Value = float | int | str | None


class SuiteRow(LoadPoint, frozen=True, kw_only=True):
    """All repeats of one run; none yet, or some of them invalid."""

    point: Registration

    @property
    def repeats(self) -> int:
        """How many there are."""
        return len(self.runs) + len(self.invalid)

    @property
    def name(self) -> str:
        """As it stands in sentences."""
        return f"{self.point.settings}, {self.load.label}"

    @property
    def spread(self) -> float | None:
        """How far the throughputs of repeats lie apart, by their median; None for a single one."""
        found = self.values(throughput)
        return (max(found) - min(found)) / median(found) if len(found) > 1 and median(found) else None


def rows_of(points: Sequence[Registration], measurements: Sequence[Measurement]) -> list[SuiteRow]:
    """A row for each registration and number of clients, in their order, with what was measured of it."""
    found = {(each.label, each.load.concurrency): each for each in joined(measurements)}
    rows = []
    for point in points:
        for clients in point.case.concurrency:
            there = found.get((point.label, clients))
            row = SuiteRow(
                point=point,
                label=point.label,
                load=Load(mode="closed", concurrency=clients),
                runs=there.runs if there else [],
                invalid=there.invalid if there else [],
            )
            rows.append(row)
    return rows


# ---- ab_report.csv


def _ms(name: str) -> Figure:
    """A percentile of the latency, in milliseconds."""

    def figure(m: Measurement) -> float | None:
        seconds: float | None = getattr(m.latency, name)
        return None if seconds is None else seconds * 1e3

    return figure


def _server(read: Callable[[ServerStats], float | None], factor: float = 1.0) -> Figure:
    """What the server tells of itself, times `factor`."""

    def figure(m: Measurement) -> float | None:
        value = None if m.server is None else read(m.server)
        return None if value is None else value * factor

    return figure


def _at(name: str, q: str) -> Figure:
    return _server(lambda s: getattr(s, name).get(q), 1e3)


def _handler_s(s: ServerStats) -> float | None:
    """All that the handler does with a batch."""
    parts = [part for part in (s.preprocess_s, s.run_s, s.postprocess_s) if part is not None]
    return sum(parts) if s.run_s is not None else None


def _gpu(read: Callable[[Gpu], float | None]) -> Figure:
    """The mean of the GPUs that tell it."""

    def figure(s: ServerStats) -> float | None:
        found = [value for gpu in s.gpus if (value := read(gpu)) is not None]
        return fmean(found) if found else None

    return _server(figure)


_FIGURES: Final[Mapping[str, Figure]] = {
    "TS failed requests": lambda m: sum(m.errors.values()),
    "TS throughput": throughput,
    "TS latency P50": _ms("p50_s"),
    "TS latency P90": _ms("p90_s"),
    "TS latency P99": _ms("p99_s"),
    "TS latency mean": _ms("mean_s"),
    "TS error rate": lambda m: m.error_share * 100,
    "Model_p50": _at("worker_at_s", "p50"),
    "Model_p90": _at("worker_at_s", "p90"),
    "Model_p99": _at("worker_at_s", "p99"),
    "Queue time p50": _at("queue_at_s", "p50"),
    "Queue time p90": _at("queue_at_s", "p90"),
    "Queue time p99": _at("queue_at_s", "p99"),
    "predict_mean": _server(lambda s: s.run_s, 1e3),
    "handler_time_mean": _server(_handler_s, 1e3),
    "waiting_time_mean": _server(lambda s: s.queue_s, 1e3),
    "gpu_percentage_mean": _gpu(lambda gpu: gpu.utilization * 100),
    "gpu_memory_percentage_mean": _gpu(
        lambda gpu: gpu.memory_bytes / gpu.total_bytes * 100 if gpu.total_bytes else None
    ),
    "gpu_memory_used_mean": _gpu(lambda gpu: gpu.memory_bytes / 2**20),
    "TS latency P75": _ms("p75_s"),
    "TS latency P95": _ms("p95_s"),
    "TS latency P99.9": _ms("p999_s"),
    "TS latency max": _ms("max_s"),
    "Batch size mean": _server(lambda s: s.mean_batch),
    "Server CPU cores": _server(lambda s: s.cpu),
    "Server memory MB": _server(lambda s: s.memory_bytes, 2**-20),
}
COLUMNS: Final = (
    "Benchmark", "Batch size", "Batch delay", "Workers", "Model", "Concurrency", "Input", "Requests",
    "TS failed requests", "TS throughput", "TS latency P50", "TS latency P90", "TS latency P99", "TS latency mean",
    "TS error rate", "Model_p50", "Model_p90", "Model_p99", "Queue time p50", "Queue time p90", "Queue time p99",
    "predict_mean", "handler_time_mean", "waiting_time_mean", "worker_thread_mean", "cpu_percentage_mean",
    "memory_percentage_mean", "gpu_percentage_mean", "gpu_memory_percentage_mean", "gpu_memory_used_mean",
    # What TorchServe's report does not have.
    "Mode", "Processor", "TS latency P75", "TS latency P95", "TS latency P99.9", "TS latency max", "Batch size mean",
    "Server CPU cores", "Server memory MB", "Repeats", "Throughput spread %", "SLO met", "Machine", "Invalid",
)  # fmt: skip


def ab_report(rows: Sequence[SuiteRow], machine: Mapping[str, Any]) -> str:
    """The rows as CSV; times in milliseconds, shares in per cent."""
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(_cells(row, machine) for row in rows)
    return out.getvalue()


def _cells(row: SuiteRow, machine: Mapping[str, Any]) -> dict[str, Value]:
    case = row.point.case
    cells: dict[str, Value] = {
        "Benchmark": "penstock", "Batch size": row.point.batch_size, "Batch delay": case.batch_delay_ms,
        "Workers": row.point.workers, "Model": case.model, "Concurrency": row.load.concurrency, "Input": case.input,
        "Requests": case.requests, "Mode": case.mode, "Processor": row.point.processor.text,
        "Repeats": row.repeats, "Machine": machine_text(machine),
        "Invalid": "; ".join(dict.fromkeys(text for m in row.invalid for text in m.invalid)),
    }  # fmt: skip
    cells["SLO met"] = {True: "yes", False: "no", None: None}[row.met]
    cells |= {name: _rounded(row.median(figure)) for name, figure in _FIGURES.items()}
    cells["Throughput spread %"] = _rounded(None if row.spread is None else row.spread * 100)
    if cores := machine.get("cores"):
        cells["cpu_percentage_mean"] = _rounded(row.median(_server(lambda s: s.cpu, 100 / cores)))
    if gib := machine.get("memory_gib"):
        share = row.median(_server(lambda s: s.memory_bytes, 100 / (gib * 2**30)))
        cells["memory_percentage_mean"] = _rounded(share)
    return cells


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def machine_text(machine: Mapping[str, Any]) -> str:
    """The machine in a few words."""
    gpus = machine.get("gpus") or []
    cards = f", {len(gpus)} x {gpus[0]}" if gpus else ""
    return f"{machine.get('cpu', 'unknown CPU')}, {machine.get('cores', '?')} cores{cards}"


# ---- the page


def report(
    rows: Sequence[SuiteRow],
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    slo: str = "",
    line: str = "",
    notes: Sequence[str] = (),
) -> Report:
    """What to choose for each model first, then all that was measured. `line` is what was typed."""
    names = dict.fromkeys(row.point.case.text for row in rows)
    rest: list[Block] = []
    for name in names:
        rest += _section([row for row in rows if row.point.case.text == name])
    if told := [*notes, *_caveats(rows)]:
        rest += [Heading("To know"), BulletList(told)]
    known = [f"{name}: {version}" for name, version in versions.items()]
    rest += [Heading("Where"), BulletList([f"machine: {machine_text(machine)}", *known])]
    if line:
        rest += [Paragraph("To reproduce it:"), CodeBlock(line)]
    return Report("Benchmark suite", [_choice(name, rows, slo) for name in names], rest)


def _caveats(rows: Sequence[SuiteRow]) -> list[str]:
    """Each once, with the runs that it is true of, unless that is all."""
    found: dict[str, list[str]] = {}
    for row in rows:
        texts = [text for m in row.runs for text in m.caveats]
        texts += [f"the first error: {m.first_error}" for m in row.runs if m.first_error]
        texts += [f"INVALID, repeat {m.repeat + 1}: {text}" for m in row.invalid for text in m.invalid if row.runs]
        for text in dict.fromkeys(texts):
            found.setdefault(text, []).append(f"{row.point.case.text}, {row.name}")
    all_of_them = sum(bool(row.runs) for row in rows)
    return [text if len(names) == all_of_them else f"{'; '.join(names)}: {text}" for text, names in found.items()]


def _choice(name: str, rows: Sequence[SuiteRow], slo: str) -> Paragraph:
    """What got the most through, within the SLO if there is one."""
    own = [row for row in rows if row.point.case.text == name and row.runs]
    kept = [row for row in own if row.met] if slo else own
    if not own:
        return Paragraph(f"{name}: nothing was measured.", "bad")
    if not kept and any(row.met is None for row in own):
        return Paragraph(
            f"{name}: nothing is known to keep {slo}; where the table says {UNKNOWN}, a run was too short.", "bad"
        )
    if not kept:
        return Paragraph(f"{name}: nothing that was tried keeps {slo}.", "bad")
    best = max(kept, key=lambda row: row.median(_FIGURES["TS throughput"]) or 0.0)
    within = f" within {slo}" if slo else ""
    told = f"{best.name}: {_shown(best, 'TS throughput')}/s{within}"
    return Paragraph(f"{name}: {told}, p99 {seconds(best.median(p99))}.", "good")


_SHOWN: Final = {
    "requests/s": "TS throughput", "p50 ms": "TS latency P50", "p90 ms": "TS latency P90", "p99 ms": "TS latency P99",
    "mean ms": "TS latency mean", "errors %": "TS error rate", "wait ms": "waiting_time_mean",
    "batch ms": "Model_p50", "mean batch": "Batch size mean", "CPU cores": "Server CPU cores",
}  # fmt: skip


def _section(rows: Sequence[SuiteRow]) -> list[Block]:
    case = rows[0].point.case
    slo = any(m.slo for row in rows for m in row.runs)
    header = ["processor", "workers", "batch", "clients", *_SHOWN, *(["SLO"] * slo)]
    what = f"{redacted(case.url)}: {case.requests} requests a run, of {case.input or 'its own example'}"
    delay = f"a batch is held {case.batch_delay_ms} ms at most to be filled"
    return [Heading(case.text), Paragraph(f"{what}; {delay}."), TableBlock(header, [_line(row, slo) for row in rows])]


def _line(row: SuiteRow, slo: bool) -> list[str]:
    cells = [row.point.processor.text, str(row.point.workers), str(row.point.batch_size), str(row.load.concurrency)]
    if row.runs:
        cells += [_shown(row, column) for column in _SHOWN.values()]
    else:
        why = f"INVALID: {row.invalid[0].invalid[0][:200]}" if row.invalid else "not run"
        cells += [why, *[""] * (len(_SHOWN) - 1)]
    return cells + [{True: "met", False: "missed", None: UNKNOWN}[row.met]] * slo


def _shown(row: SuiteRow, column: str) -> str:
    return number(row.median(_FIGURES[column]))
