"""What a benchmark suite measured, as ab_report.csv and as a page: the columns of TorchServe's report, and more. Pure.

Of several repeats of a run the medians are told. What cannot be told is empty: never a zero.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from msgspec import Struct

from penstock.bench.document import NOT_TOLD, Block, Bullets, Code, Heading, Report, Says, Table, number
from penstock.bench.measurement import Measurement, ServerSide
from penstock.bench.suite_yaml import Point

Value = float | int | str | None
Figure = Callable[[Measurement], float | None]


class Row(Struct, frozen=True, kw_only=True):
    """All repeats of one run; none yet, or some of them invalid."""

    point: Point
    concurrency: int
    repeats: list[Measurement]

    @property
    def clients(self) -> str:
        """As it stands in sentences."""
        return f"{self.concurrency} client{'s' * (self.concurrency != 1)}"

    @property
    def valid(self) -> list[Measurement]:
        """Those that say something about the server."""
        return [m for m in self.repeats if not m.invalid]

    @property
    def met(self) -> bool | None:
        """Whether every repeat kept the SLO; None if that cannot be told."""
        told = [m.met for m in self.repeats]
        return None if not told or None in told else all(told)

    def median(self, figure: Figure) -> float | None:
        """Of what the valid repeats tell."""
        found = [value for m in self.valid if (value := figure(m)) is not None]
        return median(found) if found else None

    @property
    def spread(self) -> float | None:
        """How far the throughputs of repeats lie apart, by their median; None for a single one."""
        found = [m.throughput for m in self.valid]
        return (max(found) - min(found)) / median(found) if len(found) > 1 and median(found) else None


def rows_of(points: Sequence[Point], measurements: Sequence[Measurement]) -> list[Row]:
    """A row for each registration and number of clients, in their order, with what was measured of it."""
    found: dict[tuple[str, int], list[Measurement]] = {}
    for m in measurements:
        found.setdefault((m.label, m.load.concurrency), []).append(m)
    return [
        Row(point=point, concurrency=clients, repeats=found.get((point.label, clients), []))
        for point in points
        for clients in point.case.concurrency
    ]


# ---- ab_report.csv


def _ms(name: str) -> Figure:
    """A percentile of the latency, in milliseconds."""

    def figure(m: Measurement) -> float | None:
        seconds: float | None = getattr(m.latency, name)
        return None if seconds is None else seconds * 1e3

    return figure


def _server(read: Callable[[ServerSide], float | None], factor: float = 1.0) -> Figure:
    """What the server tells of itself, times `factor`."""

    def figure(m: Measurement) -> float | None:
        value = None if m.server is None else read(m.server)
        return None if value is None else value * factor

    return figure


def _at(name: str, q: str) -> Figure:
    return _server(lambda s: getattr(s, name).get(q), 1e3)


def _handler_s(s: ServerSide) -> float | None:
    """All that the handler does with a batch."""
    parts = [part for part in (s.preprocess_s, s.run_s, s.postprocess_s) if part is not None]
    return sum(parts) if s.run_s is not None else None


def _gpu(read: Callable[[Any], float]) -> Figure:
    return _server(lambda s: sum(read(gpu) for gpu in s.gpus) / len(s.gpus) if s.gpus else None)


_FIGURES: Final[Mapping[str, Figure]] = {
    "TS throughput": lambda m: m.throughput,
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


def ab_report(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """The rows as CSV; times in milliseconds, shares in per cent."""
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(_cells(row, machine) for row in rows)
    return out.getvalue()


def _cells(row: Row, machine: Mapping[str, Any]) -> dict[str, Value]:
    case = row.point.case
    cells: dict[str, Value] = {
        "Benchmark": "penstock", "Batch size": row.point.batch_size, "Batch delay": case.batch_delay_ms,
        "Workers": row.point.workers, "Model": case.model, "Concurrency": row.concurrency, "Input": case.input,
        "Requests": case.requests, "Mode": case.mode, "Processor": row.point.processor.text,
        "Repeats": len(row.repeats), "Machine": machine_text(machine),
        "Invalid": "; ".join(dict.fromkeys(text for m in row.repeats for text in m.invalid)),
    }  # fmt: skip
    if not row.valid:
        return cells
    cells["TS failed requests"] = sum(sum(m.errors.values()) for m in row.valid)
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
    rows: Sequence[Row],
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
        rest += [Heading("To know"), Bullets(told)]
    known = [f"{name}: {version}" for name, version in versions.items()]
    rest += [Heading("Where"), Bullets([f"machine: {machine_text(machine)}", *known])]
    if line:
        rest += [Says("To reproduce it:"), Code(line)]
    return Report("Benchmark suite", [_choice(name, rows, slo) for name in names], rest)


def _caveats(rows: Sequence[Row]) -> list[str]:
    """Each once, with the runs that it is true of, unless that is all."""
    found: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row.point.case.text}, {row.point.settings}, {row.clients}"
        for text in dict.fromkeys(text for m in row.valid for text in m.caveats):
            found.setdefault(text, []).append(name)
    all_of_them = sum(bool(row.valid) for row in rows)
    return [text if len(names) == all_of_them else f"{'; '.join(names)}: {text}" for text, names in found.items()]


def _choice(name: str, rows: Sequence[Row], slo: str) -> Says:
    """What got the most through, within the SLO if there is one."""
    own = [row for row in rows if row.point.case.text == name and row.valid]
    kept = [row for row in own if row.met] if slo else own
    if not own:
        return Says(f"{name}: nothing was measured.", "bad")
    if not kept:
        return Says(f"{name}: nothing that was tried keeps {slo}.", "bad")
    best = max(kept, key=lambda row: row.median(_FIGURES["TS throughput"]) or 0.0)
    within = f" within {slo}" if slo else ""
    told = f"{best.point.settings}, {best.clients}: {_shown(best, 'TS throughput')}/s{within}"
    return Says(f"{name}: {told}, p99 {_shown(best, 'TS latency P99')} ms.", "good")


_SHOWN: Final = {
    "requests/s": "TS throughput", "p50 ms": "TS latency P50", "p90 ms": "TS latency P90", "p99 ms": "TS latency P99",
    "mean ms": "TS latency mean", "errors %": "TS error rate", "wait ms": "waiting_time_mean",
    "batch ms": "Model_p50", "mean batch": "Batch size mean", "CPU cores": "Server CPU cores",
}  # fmt: skip


def _section(rows: Sequence[Row]) -> list[Block]:
    case = rows[0].point.case
    slo = any(m.slo for row in rows for m in row.repeats)
    header = ["processor", "workers", "batch", "clients", *_SHOWN, *(["SLO"] * slo)]
    what = f"{case.url}: {case.requests} requests a run, of {case.input or 'its own example'}"
    delay = f"a batch is held {case.batch_delay_ms} ms at most to be filled"
    return [Heading(case.text), Says(f"{what}; {delay}."), Table(header, [_line(row, slo) for row in rows])]


def _line(row: Row, slo: bool) -> list[str]:
    cells = [row.point.processor.text, str(row.point.workers), str(row.point.batch_size), str(row.concurrency)]
    if row.valid:
        cells += [_shown(row, column) for column in _SHOWN.values()]
    else:
        why = f"INVALID: {row.repeats[0].invalid[0][:200]}" if row.repeats else "not run"
        cells += [why, *[""] * (len(_SHOWN) - 1)]
    return cells + [{True: "met", False: "missed", None: NOT_TOLD}[row.met]] * slo


def _shown(row: Row, column: str) -> str:
    return number(row.median(_FIGURES[column]))
