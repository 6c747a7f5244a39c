"""The report of a results folder: the verdict first, then the evidence."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.perf.bench import document
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
    by_text,
    facts,
    make_report,
    memory,
    number,
    percent,
    reproduce,
    seconds,
    table,
    value_text,
)
from penstock.perf.bench.measurement import (
    FIGURES,
    STAGES,
    Figure,
    Load,
    LoadPoint,
    Measurement,
    Verdict,
    goodput,
    group_by_load,
    p99,
    throughput,
)
from penstock.perf.bench.plots import draw
from penstock.perf.bench.results import Origin, read

VERDICT: Final = "verdict.json"
MET: Final[dict[bool | None, str]] = {True: "met", False: "missed", None: UNKNOWN}
INVALID: Final = "INVALID"


def in_a_line(run: Measurement) -> str:
    """The main figures of a run, or why it has none."""
    if run.invalid:
        return f"{INVALID}: {run.invalid[0]}"
    tails = ((name, getattr(run.latency, f"{name}_s")) for name in ("p50", "p99"))
    known = "".join(f", {name} {seconds(value)}" for name, value in tails if value is not None)
    return f"{run.throughput:,.5g}/s{known}{f', {percent(run.error_share)} errors' if run.errors else ''}"


def publish(folder: Path | str, verdict: Verdict | None = None) -> tuple[Path, Path]:
    """Writes report.md, report.html and the verdict into a results folder and returns the paths of the reports.

    Raises ConfigError if the folder holds no results, NotWritten.
    """
    origin, measurements = read(folder)
    report = compose(origin, measurements, verdict)
    files = {VERDICT: verdict} if verdict else {}
    return document.publish(Path(folder), report, lambda: draw(measurements, origin.slo, verdict), files)


def compose(origin: Origin, measurements: Sequence[Measurement], verdict: Verdict | None = None) -> Report:
    """The whole report, without its plots."""
    points = group_by_load(measurements)
    bad = sum(len(point.invalid) for point in points)
    warning = f"{INVALID}: {bad} of {len(measurements)} runs measure nothing; see below." if bad and not verdict else ""
    first = _tuning_verdict(verdict) if verdict else [*load_verdict(points, origin.slo), reproduce(origin.line)]
    header, *rows = verdict.table if verdict and verdict.table else [[]]
    loads = table({"settings": lambda p: p.label, **LOADS}, points)
    rest = [Heading("Settings"), TableBlock(header, rows), Heading("Loads"), loads, *evidence(points, origin)]
    target = f" of {origin.target}" if origin.target else ""
    return make_report(f"penstock {origin.command}{target}", [Paragraph(warning, "bad"), *first], rest)


def evidence(points: Sequence[LoadPoint], origin: Origin, notes: Sequence[str] = ()) -> list[Block]:
    """What is known of the loads besides their own figures, and of the machine."""
    return [*findings(points, origin, notes), Heading("Machine"), facts(_machine(origin))]


def findings(points: Sequence[LoadPoint], origin: Origin, notes: Sequence[str] = ()) -> list[Block]:
    """What is known of the loads besides their own figures."""
    measured = sum(bool(p.runs or p.invalid) for p in points)
    invalid = by_text([(text, p.name) for p in points for run in p.invalid for text in run.invalid], measured)
    caveats = by_text([(text, p.name) for p in points for run in p.runs for text in run.caveats], measured)
    return [
        Heading("In the server"),
        table(_SERVER, [p for p in points if any(run.server for run in p.runs)], _SERVER_NOTE),
        Heading("Invalid runs"),
        BulletList(invalid),
        Heading("Caveats"),
        BulletList([*notes, *caveats, *filter(None, [origin.busy])]),
        Heading("Errors"),
        table(_ERRORS, [p for p in points if p.errors]),
        CodeBlock("First error:", next((run.first_error for p in points for run in p.runs if run.first_error), "")),
    ]


# ---- the verdict


def _tuning_verdict(v: Verdict) -> list[Block]:
    rate = f": {number(v.goodput)} good responses/s" if v.goodput is not None else ""
    if not v.chosen:
        first = Paragraph(f"No measurement shows whether {v.slo} can be met.", "bad")
    elif v.met:
        choice = f"{v.chosen}{rate} within {v.slo}."
        first = Paragraph(f"Chosen: {choice}", "good") if v.proven else Paragraph(f"Not proven: {choice}", "bad")
    else:
        first = Paragraph(f"No settings meet {v.slo}. Nearest: {v.chosen}{rate}.", "bad")
    cost = v.cost_per_million
    return [
        first,
        Paragraph(_gain(v) if v.chosen else ""),
        Paragraph("" if cost is None else f"A million requests cost {cost:,.3g} at the given price."),
        BulletList(v.notes),
        reproduce(v.command),
        Heading("Why not the others"),
        TableBlock(["settings", "reason"], [[r.settings, r.why] for r in v.runners_up]),
    ]


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


def load_verdict(points: Sequence[LoadPoint], slo: str) -> list[Block]:
    """Which loads meet the SLO; without one, the highest throughput."""
    valid = [point for point in points if point.runs]
    if not valid:
        return [Paragraph("No valid measurement.", "bad")]
    met = [point for point in valid if point.met]
    # "up to" is true only if no lighter load missed the SLO, as it may on a server that batches
    best = max(met or valid, key=lambda point: point.median(goodput) or 0)
    if not any(run.slo for point in valid for run in point.runs):
        rate, tail = number(best.median(throughput)), seconds(best.median(p99))
        return [Paragraph(f"Highest throughput: {rate}/s, {best.name}, p99 {tail}.")]
    if met:
        rate = number(best.median(goodput))
        lighter = [point for point in valid if point.met is False and _lighter(point.load, best.load)]
        where, mark = ("at", "") if lighter else ("up to", "good")
        but = f", but missed at a lower load ({lighter[0].name})" if lighter else ""
        first = Paragraph(f"SLO {slo} met {where} {rate} good responses/s ({best.name}){but}.", mark)
    elif any(point.met is False for point in valid):
        first = Paragraph(f"No measured load met SLO {slo}.", "bad")
    else:
        first = Paragraph(f"Too few requests to judge SLO {slo}.", "bad")
    missed = [f"missed, {point.name}: {_missed(point)}" for point in valid if point.met is False]
    unknown = [f"unknown, {point.name}: too few requests" for point in valid if point.met is None]
    return [first, BulletList([*missed, *unknown])]


def _lighter(one: Load, other: Load) -> bool:
    return one.mode == other.mode and (one.rate, one.concurrency) < (other.rate, other.concurrency)


def _missed(point: LoadPoint) -> str:
    """The missed objectives with the number of repeats that missed them, and the median of these."""
    found = []
    for text in dict.fromkeys(result.text for run in point.runs for result in run.slo):
        results = [result for run in point.runs for result in run.slo if result.text == text]
        values = [result.value for result in results if result.value is not None and result.met is False]
        if values:
            often = f" in {len(values)} of {len(results)}" if len(results) > 1 else ""
            found.append(f"{text} is {value_text(results[0].name, statistics.median(values))}{often}")
    return ", ".join(found) or f"{percent(max(run.error_share for run in point.runs))} errors"


# ---- the evidence


def _valid(text: Callable[[LoadPoint], str]) -> Callable[[LoadPoint], str]:
    """The text of a point with valid runs; "" for any other."""
    return lambda p: text(p) if p.runs else ""


def _seconds(figure: Figure) -> Callable[[LoadPoint], str]:
    return _valid(lambda p: seconds(p.median(figure)))


def _number(figure: Figure) -> Callable[[LoadPoint], str]:
    return _valid(lambda p: number(p.median(figure)))


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


def _gpus(p: LoadPoint) -> str:
    gpus = [gpu for run in p.runs if run.server for gpu in run.server.gpus]
    if not gpus:
        return ""
    share = statistics.mean(gpu.utilization for gpu in gpus)
    return f"{percent(share)}, {memory(max(gpu.memory_bytes for gpu in gpus))}"


def _judged(p: LoadPoint) -> str:
    return MET[p.met] if any(run.slo for run in p.runs) else ""


def _batches(p: LoadPoint) -> str:
    counts = Counter[str]()
    for run in p.runs:
        counts.update(run.server.batches if run.server else {})
    return " ".join(f"<={rows}:{count:,}" for rows, count in counts.items() if count)


LOADS: Final[Mapping[str, Callable[[LoadPoint], str]]] = {
    "load": lambda p: p.load.label,
    "SLO": lambda p: _judged(p) if p.runs else INVALID if p.invalid else "not run",
    "throughput/s": _valid(lambda p: _spread(p, throughput)),
    "goodput/s": _number(FIGURES["goodput_per_s"]),
    "mean": _seconds(FIGURES["mean_s"]),
    "p50": _seconds(FIGURES["p50_s"]),
    "p90": _seconds(FIGURES["p90_s"]),
    "p99 (95 %)": _valid(lambda p: _p99(p)),
    "p99.9": _seconds(FIGURES["p999_s"]),
    "max": _seconds(FIGURES["max_s"]),
    "runs": lambda p: f"{len(p.runs)}" + (f" (+{len(p.invalid)} invalid)" if p.invalid else ""),
    "requests": _valid(lambda p: f"{sum(run.requests for run in p.runs):,}"),
    "errors": _valid(lambda p: f"{sum(p.errors.values()):,}"),
}
_SERVER: Final[Mapping[str, Callable[[LoadPoint], str]]] = {
    "load": lambda p: p.name,
    **{name: _seconds(figure) for name, figure in STAGES.items()},
    "mean batch": _number(FIGURES["mean_batch"]),
    "CPU cores": _number(FIGURES["cpu_cores"]),
    "memory": lambda p: memory(p.median(FIGURES["memory_bytes"])),
    "GPU": _gpus,
    "batches by rows": _batches,
}
_SERVER_NOTE: Final = "Memory is the sum over the server's processes; a shared page counts once per process."
_ERRORS: Final[Mapping[str, Callable[[LoadPoint], str]]] = {
    "load": lambda p: p.name,
    "errors by status": lambda p: ", ".join(f"{code}: {count:,}" for code, count in p.errors.items()),
}


def _machine(origin: Origin) -> dict[str, str]:
    known = {"started": origin.started, "seed": origin.seed, "SLO": origin.slo or "none"} | origin.machine
    known |= {"penstock": origin.penstock} | origin.versions
    return {name: ", ".join(map(str, v)) or "none" if isinstance(v, list) else str(v) for name, v in known.items()}
