"""The report of a folder of results: the verdict first, then what it rests on."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.perf.bench.document import (
    NOT_TOLD,
    Block,
    BulletList,
    CodeBlock,
    Heading,
    Paragraph,
    Report,
    TableBlock,
    around,
    markdown,
    number,
    page,
    percent,
    seconds,
)  # fmt: skip
from penstock.perf.bench.measurement import (
    SPLIT,
    Get,
    LoadPoint,
    Measurement,
    Verdict,
    p99,
    points,
    side,
    throughput,
    worth,
)
from penstock.perf.bench.origin import Origin
from penstock.perf.bench.plots import draw
from penstock.perf.bench.results import read, write_error, write_whole

REPORT, PAGE, VERDICT = "report.md", "report.html", "verdict.json"


def publish(folder: Path | str, verdict: Verdict | None = None) -> tuple[Path, Path]:
    """Where report.md and report.html are, made from the folder's results. The verdict is kept beside them.

    Without matplotlib the page has no plots, and says so. Raises ConfigError for what is no folder of results,
    PenstockError when it cannot be written to.
    """
    folder = Path(folder)
    origin, measurements = read(folder)
    report = compose(origin, measurements, verdict)
    try:
        plots, without = draw(measurements, origin.slo, verdict), ""
    except ConfigError as error:
        plots, without = [], error.message
    try:
        if verdict is not None:
            write_whole(folder / VERDICT, msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")
        write_whole(folder / REPORT, markdown(report).encode())
        write_whole(folder / PAGE, page(report, plots, without).encode())
    except OSError as e:
        raise write_error(folder, e) from e
    return folder / REPORT, folder / PAGE


def compose(origin: Origin, measurements: Sequence[Measurement], verdict: Verdict | None = None) -> Report:
    """The whole report, without its plots."""
    found = points(measurements)
    first: list[Block] = []
    if bad := sum(len(point.invalid) for point in found):
        first.append(
            Paragraph(f"INVALID: {bad} of {len(measurements)} runs say nothing about the server; see below.", "bad")
        )
    first += _tuned(verdict) if verdict else _judged(origin, found)
    rest = [
        *_settings(verdict),
        *_loads(found),
        *_server(found),
        *_doubts(found, origin.busy),
        *_errors(found),
        *_machine(origin),
    ]
    target = f" of {origin.target}" if origin.target else ""
    return Report(f"penstock {origin.command}{target}", first, rest)


def _tuned(v: Verdict) -> list[Block]:
    borne = f": {number(v.goodput)} good answers/s" if v.goodput is not None else ""
    told: list[Block]
    if not v.chosen:
        told = [Paragraph(f"Nothing was measured that could tell whether {v.slo} can be kept.", "bad")]
    elif v.met:
        says = Paragraph(f"Chosen: {v.chosen}{borne} within {v.slo}.", "good")
        told = [
            says if v.proven else Paragraph(f"Not proven: {v.chosen}{borne} within {v.slo}.", "bad"),
            Paragraph(_gain(v)),
        ]
    else:
        told = [
            Paragraph(f"Nothing that was tried keeps {v.slo}. Nearest: {v.chosen}{borne}.", "bad"),
            Paragraph(_gain(v)),
        ]
    if v.cost_per_million is not None:
        told.append(Paragraph(f"A million requests cost {v.cost_per_million:,.3g} at the price that was given."))
    if v.notes:
        told.append(BulletList(v.notes))
    if v.command:
        told += [Paragraph("To reproduce:"), CodeBlock(v.command)]
    if v.runners_up:
        told += [
            Heading("Why not the others"),
            TableBlock(["settings", "why not"], [[r.settings, r.why] for r in v.runners_up]),
        ]
    return told


def _settings(v: Verdict | None) -> list[Block]:
    return [Heading("Settings"), TableBlock(v.table[0], v.table[1:])] if v and len(v.table) > 1 else []


def _gain(v: Verdict) -> str:
    if v.chosen == v.default:
        return "That is the default: nothing that was tried is better."
    if v.gain is None:
        return f"The default ({v.default}) is not known to keep the SLO at any rate, so there is no gain to tell."
    between = ""
    if v.interval is not None:
        between = f", between {percent(v.interval[0], signed=True)} and {percent(v.interval[1], signed=True)} (95 %)"
    default = f"{v.default}: {number(v.default_goodput)}/s"
    return f"Against the default ({default}): {percent(v.gain, signed=True)}{between}."


def _judged(origin: Origin, found: Sequence[LoadPoint]) -> list[Block]:
    seen = [point for point in found if point.runs]
    if not seen:
        return [Paragraph("Nothing valid was measured.", "bad")]
    if not any(run.slo for point in seen for run in point.runs):
        best = max(seen, key=lambda point: point.median(worth) or 0)
        most = f"Most throughput: {number(best.median(throughput))}/s, {best.name}, p99 {seconds(best.median(p99))}."
        return [Paragraph(most), *_again(origin)]
    told: list[Block] = []
    if kept := [point for point in seen if point.met]:
        best = max(kept, key=lambda point: point.median(worth) or 0)
        told.append(
            Paragraph(f"SLO {origin.slo} kept up to {number(best.median(worth))} good answers/s ({best.name}).", "good")
        )
    elif any(point.met is False for point in seen):
        told.append(Paragraph(f"SLO {origin.slo} kept at no load that was measured.", "bad"))
    else:
        told.append(Paragraph(f"Whether SLO {origin.slo} is kept cannot be told.", "bad"))
    missed = [f"missed, {p.name}: {_worst(p)}" for p in seen if p.met is False]
    untold = [f"cannot be told, {p.name}: too few requests" for p in seen if p.met is None]
    if missed or untold:
        told.append(BulletList(missed + untold))
    return [*told, *_again(origin)]


def _worst(point: LoadPoint) -> str:
    """Which clauses were missed in how many repeats, with their median."""
    found = []
    for text in dict.fromkeys(clause.text for run in point.runs for clause in run.slo):
        clauses = [clause for run in point.runs for clause in run.slo if clause.text == text]
        values = [clause.value for clause in clauses if clause.value is not None]
        if (count := sum(clause.met is False for clause in clauses)) and values:
            show = percent if text.startswith("error") else number if text.startswith("throughput") else seconds
            often = f" in {count} of {len(clauses)}" if len(clauses) > 1 else ""
            found.append(f"{text} is {show(statistics.median(values))}{often}")
    return ", ".join(found)


def _again(origin: Origin) -> list[Block]:
    return [Paragraph("To reproduce:"), CodeBlock(origin.line)] if origin.line else []


def _loads(found: Sequence[LoadPoint]) -> list[Block]:
    labels = any(point.label for point in found)
    header = ["load", "runs", "requests", "errors", "throughput/s", "goodput/s", "p50", "p90", "p99 (95 %)", "p99.9"]
    rows = []
    for p in found:
        row = [p.load.label, _count(p)]
        if p.runs:
            row += [
                f"{sum(run.requests for run in p.runs):,}",
                f"{sum(p.errors.values()):,}",
                _spread(p, throughput),
            ]
            row += [number(p.median(lambda m: m.goodput)), seconds(p.median(lambda m: m.latency.p50_s))]
            row += [
                seconds(p.median(lambda m: m.latency.p90_s)),
                _p99(p),
                seconds(p.median(lambda m: m.latency.p999_s)),
            ]
            row.append({True: "kept", False: "missed", None: NOT_TOLD}[p.met])
        else:
            row += ["INVALID"] + [""] * 8
        rows.append([p.label] * labels + row)
    return [Heading("Loads"), TableBlock(["settings"] * labels + header + ["SLO"], rows)] if rows else []


def _count(p: LoadPoint) -> str:
    return f"{len(p.runs)}" + (f" (+{len(p.invalid)} invalid)" if p.invalid else "")


def _spread(p: LoadPoint, get: Get) -> str:
    values = p.values(get)
    if len(values) < 2:
        return number(p.median(get))
    return f"{number(p.median(get))} ({number(min(values))}..{number(max(values))})"


def _p99(p: LoadPoint) -> str:
    """With the interval of one run, or between which values the repeats lie."""
    middle, values = p.median(p99), p.values(p99)
    if middle is None:
        return NOT_TOLD
    if len(values) > 1:
        return around(middle, min(values), max(values))
    low, high = p.runs[0].latency.p99_low_s, p.runs[0].latency.p99_high_s
    return seconds(middle) if low is None or high is None else around(middle, low, high)


def _server(found: Sequence[LoadPoint]) -> list[Block]:
    rows = [
        [
            p.name,
            *(seconds(p.median(get)) for get in SPLIT.values()),
            number(p.median(lambda m: side(m).mean_batch)),
            number(p.median(lambda m: side(m).cpu)),
            _mebibytes(p.median(lambda m: side(m).memory_bytes)),
            *([_gpus(p)] if any(run.server and run.server.gpus for q in found for run in q.runs) else []),
        ]
        for p in found
        if any(run.server for run in p.runs)
    ]
    header = ["load", *SPLIT, "mean batch", "CPU cores", "memory", "GPU"]
    shared = "Memory is what its processes hold; a page that several share counts for each of them."
    return [Heading("In the server"), TableBlock(header[: len(rows[0])], rows), Paragraph(shared)] if rows else []


def _mebibytes(value: float | None) -> str:
    return NOT_TOLD if value is None else f"{value / 2**20:,.0f} MiB"


def _gpus(p: LoadPoint) -> str:
    gpus = [gpu for run in p.runs if run.server for gpu in run.server.gpus]
    if not gpus:
        return NOT_TOLD
    share = statistics.mean(gpu.utilization for gpu in gpus)
    return f"{percent(share)}, {_mebibytes(max(gpu.memory_bytes for gpu in gpus))}"


def _doubts(found: Sequence[LoadPoint], busy: str) -> list[Block]:
    """Why runs are invalid, and what is to be known of the others, each said once."""
    why = _each((text, p.name) for p in found for run in p.invalid for text in run.invalid)
    known = _each((text, p.name) for p in found for run in p.runs for text in run.caveats)
    told: list[Block] = []
    if why:
        told += [Heading("Invalid runs"), BulletList(why)]
    known += [busy] if busy else []
    if known:
        told += [Heading("To be known"), BulletList(known)]
    return told


def _each(told: Iterable[tuple[str, str]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for text, name in told:
        found.setdefault(text, []).append(name)
    shown = {text: list(dict.fromkeys(names)) for text, names in found.items()}
    return [
        f"{text} ({', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)})"
        for text, names in shown.items()
    ]


def _errors(found: Sequence[LoadPoint]) -> list[Block]:
    rows = [[p.name, ", ".join(f"{code}: {count:,}" for code, count in p.errors.items())] for p in found if p.errors]
    if not rows:
        return []
    first = next((run.first_error for p in found for run in p.runs if run.first_error), None)
    told: list[Block] = [Heading("Errors"), TableBlock(["load", "errors by status"], rows)]
    if first:
        told += [Paragraph("The first of them:"), CodeBlock(first)]
    return told


def _machine(origin: Origin) -> list[Block]:
    facts = {"started": origin.started, "seed": origin.seed, "SLO": origin.slo or "none"} | origin.machine
    facts |= {"penstock": origin.penstock} | origin.versions
    return [Heading("Machine"), TableBlock(["", ""], [[name, _fact(value)] for name, value in facts.items()])]


def _fact(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
