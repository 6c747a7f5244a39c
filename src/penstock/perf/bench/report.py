"""The report of a results folder: the verdict first, then the evidence."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.perf.bench.document import (
    UNKNOWN,
    Block,
    BulletList,
    CodeBlock,
    Heading,
    Paragraph,
    Report,
    TableBlock,
    around,
    markdown,
    names_by_text,
    number,
    page,
    percent,
    seconds,
)
from penstock.perf.bench.measurement import (
    STAGES,
    Figure,
    Load,
    LoadPoint,
    Measurement,
    Verdict,
    goodput,
    group_by_load,
    p99,
    server_stats,
    throughput,
)
from penstock.perf.bench.origin import Origin
from penstock.perf.bench.plots import draw
from penstock.perf.bench.results import read, write_whole, writing

REPORT, PAGE, VERDICT = "report.md", "report.html", "verdict.json"


def publish(folder: Path | str, verdict: Verdict | None = None) -> tuple[Path, Path]:
    """Writes report.md, report.html and the verdict into a results folder and returns the paths of the reports.

    Without matplotlib the page says why it has no plots. Raises ConfigError if the folder holds no results, NotWritten.
    """
    folder = Path(folder)
    origin, measurements = read(folder)
    report = compose(origin, measurements, verdict)
    try:
        plots, without = draw(measurements, origin.slo, verdict), ""
    except ConfigError as error:
        plots, without = [], error.message
    with writing(folder):
        if verdict is not None:
            write_whole(folder / VERDICT, msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")
        write_whole(folder / REPORT, markdown(report).encode())
        write_whole(folder / PAGE, page(report, plots, without).encode())
    return folder / REPORT, folder / PAGE


def compose(origin: Origin, measurements: Sequence[Measurement], verdict: Verdict | None = None) -> Report:
    """The whole report, without its plots."""
    points = group_by_load(measurements)
    first: list[Block] = []
    bad = sum(len(point.invalid) for point in points)
    if bad and verdict is None:
        first.append(Paragraph(f"INVALID: {bad} of {len(measurements)} runs measure nothing; see below.", "bad"))
    first += _tuning_verdict(verdict) if verdict else _load_verdict(origin, points)
    rest = [*_settings(verdict), *_loads(points), *_server(points), *_caveats(points, origin.busy), *_errors(points)]
    target = f" of {origin.target}" if origin.target else ""
    return Report(f"penstock {origin.command}{target}", first, [*rest, *_machine(origin)])


# ---- the verdict


def _tuning_verdict(v: Verdict) -> list[Block]:
    rate = f": {number(v.goodput)} good responses/s" if v.goodput is not None else ""
    if not v.chosen:
        blocks: list[Block] = [Paragraph(f"No measurement shows whether {v.slo} can be met.", "bad")]
    elif v.met:
        choice = f"{v.chosen}{rate} within {v.slo}."
        first = Paragraph(f"Chosen: {choice}", "good") if v.proven else Paragraph(f"Not proven: {choice}", "bad")
        blocks = [first, Paragraph(_gain(v))]
    else:
        blocks = [Paragraph(f"No settings meet {v.slo}. Nearest: {v.chosen}{rate}.", "bad"), Paragraph(_gain(v))]
    if v.cost_per_million is not None:
        blocks.append(Paragraph(f"A million requests cost {v.cost_per_million:,.3g} at the given price."))
    if v.notes:
        blocks.append(BulletList(v.notes))
    blocks += _reproduce(v.command)
    if v.runners_up:
        rows = [[r.settings, r.why] for r in v.runners_up]
        blocks += [Heading("Why not the others"), TableBlock(["settings", "reason"], rows)]
    return blocks


def _gain(v: Verdict) -> str:
    if v.chosen == v.default:
        return "That is the default: no other settings were shown to be better."
    if v.gain is None:
        return f"The default ({v.default}) is not known to meet the SLO at any rate, so the gain is unknown."
    between = ""
    if v.interval is not None:
        between = f", between {percent(v.interval[0], signed=True)} and {percent(v.interval[1], signed=True)} (95 %)"
    default = f"{v.default}: {number(v.default_goodput)}/s"
    return f"Against the default ({default}): {percent(v.gain, signed=True)}{between}."


def _load_verdict(origin: Origin, points: Sequence[LoadPoint]) -> list[Block]:
    valid = [point for point in points if point.runs]
    if not valid:
        return [Paragraph("No valid measurement.", "bad")]
    met = [point for point in valid if point.met]
    judged = any(run.slo for point in valid for run in point.runs)
    best = max(met or valid, key=lambda point: point.median(goodput) or 0)
    bullets = []
    if not judged:
        rate, tail = number(best.median(throughput)), seconds(best.median(p99))
        first = Paragraph(f"Highest throughput: {rate}/s, {best.name}, p99 {tail}.")
    else:
        if met:
            rate = number(best.median(goodput))
            lighter = [point for point in valid if point.met is False and _lighter(point.load, best.load)]
            where, mark = ("at", "") if lighter else ("up to", "good")
            but = f", but missed at a lower load ({lighter[0].name})" if lighter else ""
            first = Paragraph(f"SLO {origin.slo} met {where} {rate} good responses/s ({best.name}){but}.", mark)
        elif any(point.met is False for point in valid):
            first = Paragraph(f"No measured load met SLO {origin.slo}.", "bad")
        else:
            first = Paragraph(f"Too few requests to judge SLO {origin.slo}.", "bad")
        bullets = [f"missed, {p.name}: {_missed(p)}" for p in valid if p.met is False]
        bullets += [f"unknown, {p.name}: too few requests" for p in valid if p.met is None]
    return [first, *([BulletList(bullets)] if bullets else []), *_reproduce(origin.line)]


def _lighter(one: Load, other: Load) -> bool:
    return one.mode == other.mode and (one.rate, one.concurrency) < (other.rate, other.concurrency)


def _missed(point: LoadPoint) -> str:
    """The missed objectives with the number of repeats that missed them, and the median of these."""
    found = []
    for text in dict.fromkeys(result.text for run in point.runs for result in run.slo):
        results = [result for run in point.runs for result in run.slo if result.text == text]
        values = [result.value for result in results if result.value is not None and result.met is False]
        if values:
            show = percent if text.startswith("error") else number if text.startswith("throughput") else seconds
            often = f" in {len(values)} of {len(results)}" if len(results) > 1 else ""
            found.append(f"{text} is {show(statistics.median(values))}{often}")
    return ", ".join(found) or f"{percent(max(run.error_share for run in point.runs))} errors"


def _reproduce(command: str) -> list[Block]:
    return [Paragraph("To reproduce:"), CodeBlock(command)] if command else []


# ---- the evidence


def _settings(v: Verdict | None) -> list[Block]:
    return [Heading("Settings"), TableBlock(v.table[0], v.table[1:])] if v and len(v.table) > 1 else []


def _loads(points: Sequence[LoadPoint]) -> list[Block]:
    labels = any(point.label for point in points)
    header = ["load", "SLO", "throughput/s", "goodput/s", "p50", "p90", "p99 (95 %)", "p99.9"]
    rows = [[p.label] * labels + [p.load.label, *_load_cells(p)] for p in points]
    header += ["runs", "requests", "errors"]
    return [Heading("Loads"), TableBlock(["settings"] * labels + header, rows)] if rows else []


def _load_cells(p: LoadPoint) -> list[str]:
    count = f"{len(p.runs)}" + (f" (+{len(p.invalid)} invalid)" if p.invalid else "")
    if not p.runs:
        return ["INVALID", *[""] * 6, count, "", ""]
    return [
        {True: "met", False: "missed", None: UNKNOWN}[p.met],
        _spread(p, throughput),
        number(p.median(lambda m: m.goodput)),
        seconds(p.median(lambda m: m.latency.p50_s)),
        seconds(p.median(lambda m: m.latency.p90_s)),
        _p99(p),
        seconds(p.median(lambda m: m.latency.p999_s)),
        count,
        f"{sum(run.requests for run in p.runs):,}",
        f"{sum(p.errors.values()):,}",
    ]


def _spread(p: LoadPoint, figure: Figure) -> str:
    values = p.values(figure)
    if len(values) < 2:
        return number(p.median(figure))
    return f"{number(p.median(figure))} ({number(min(values))}..{number(max(values))})"


def _p99(p: LoadPoint) -> str:
    """The p99 with the interval of a single run, or with the range of the repeats."""
    middle, values = p.median(p99), p.values(p99)
    if middle is None:
        return UNKNOWN
    if len(values) > 1:
        return around(middle, min(values), max(values))
    low, high = p.runs[0].latency.p99_low_s, p.runs[0].latency.p99_high_s
    return seconds(middle) if low is None or high is None else around(middle, low, high)


def _server(points: Sequence[LoadPoint]) -> list[Block]:
    known = [p for p in points if any(run.server for run in p.runs)]
    if not known:
        return []
    gpus = any(run.server and run.server.gpus for p in points for run in p.runs)
    rows = [
        [
            p.name,
            *(seconds(p.median(figure)) for figure in STAGES.values()),
            number(p.median(lambda m: server_stats(m).mean_batch)),
            number(p.median(lambda m: server_stats(m).cpu)),
            _mebibytes(p.median(lambda m: server_stats(m).memory_bytes)),
            *([_gpus(p)] if gpus else []),
        ]
        for p in known
    ]
    header = ["load", *STAGES, "mean batch", "CPU cores", "memory", *(["GPU"] if gpus else [])]
    note = "Memory is the sum over the server's processes; a shared page counts once per process."
    return [Heading("In the server"), TableBlock(header, rows), Paragraph(note)]


def _mebibytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**20:,.0f} MiB"


def _gpus(p: LoadPoint) -> str:
    gpus = [gpu for run in p.runs if run.server for gpu in run.server.gpus]
    if not gpus:
        return UNKNOWN
    share = statistics.mean(gpu.utilization for gpu in gpus)
    return f"{percent(share)}, {_mebibytes(max(gpu.memory_bytes for gpu in gpus))}"


def _caveats(points: Sequence[LoadPoint], busy: str) -> list[Block]:
    """Why runs are invalid, and the caveats of the others; each text once, with its loads."""
    invalid = _with_loads((text, p.name) for p in points for run in p.invalid for text in run.invalid)
    caveats = _with_loads((text, p.name) for p in points for run in p.runs for text in run.caveats)
    caveats += [busy] if busy else []
    found = (("Invalid runs", invalid), ("Caveats", caveats))
    return [block for name, texts in found if texts for block in (Heading(name), BulletList(texts))]


def _with_loads(texts: Iterable[tuple[str, str]]) -> list[str]:
    return [
        f"{text} ({', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)})"
        for text, names in names_by_text(texts).items()
    ]


def _errors(points: Sequence[LoadPoint]) -> list[Block]:
    rows = [[p.name, ", ".join(f"{code}: {count:,}" for code, count in p.errors.items())] for p in points if p.errors]
    if not rows:
        return []
    first = next((run.first_error for p in points for run in p.runs if run.first_error), None)
    blocks: list[Block] = [Heading("Errors"), TableBlock(["load", "errors by status"], rows)]
    return blocks + ([Paragraph("First error:"), CodeBlock(first)] if first else [])


def _machine(origin: Origin) -> list[Block]:
    facts = {"started": origin.started, "seed": origin.seed, "SLO": origin.slo or "none"} | origin.machine
    facts |= {"penstock": origin.penstock} | origin.versions
    shown = {name: ", ".join(map(str, v)) or "none" if isinstance(v, list) else str(v) for name, v in facts.items()}
    return [Heading("Machine"), TableBlock(["", ""], [*map(list, shown.items())])]
