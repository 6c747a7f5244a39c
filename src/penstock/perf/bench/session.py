"""One call of `penstock bench`: sends the loads of a plan, tells what is measured as it comes, keeps it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import click
import msgspec
from msgspec import Struct

from penstock.perf.bench.document import align
from penstock.perf.bench.measurement import Load, Measurement, ObjectiveResult, ServerStats
from penstock.perf.bench.modes import LoadPlan, carry_out, in_units
from penstock.perf.bench.origin import Origin
from penstock.perf.bench.payload import check_of
from penstock.perf.bench.report import publish
from penstock.perf.bench.results import Results
from penstock.perf.bench.run import measure
from penstock.perf.bench.slo import Slo
from penstock.perf.bench.target import Target
from penstock.perf.cli import FAILED

INVALID: Final = "INVALID"
_NONE: Final = "n/a"

Column = tuple[str, Callable[[Measurement], str]]


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:,.4g}"


def _latency(name: str) -> Callable[[Measurement], str]:
    return lambda run: _ms(getattr(run.latency, name))


def _errors(run: Measurement) -> str:
    return " ".join(f"{code}:{count:,}" for code, count in sorted(run.errors.items()))


def _met(run: Measurement) -> str:
    if not run.slo:
        return ""
    return {True: "met", False: "MISSED", None: _NONE}[run.met]


_COLUMNS: Final[tuple[Column, ...]] = (
    ("good/s", lambda run: f"{run.throughput:,.5g}"),
    ("in time/s", lambda run: "" if run.goodput is None else f"{run.goodput:,.5g}"),
    ("mean ms", _latency("mean_s")),
    ("p50 ms", _latency("p50_s")),
    ("p90 ms", _latency("p90_s")),
    ("p99 ms", _latency("p99_s")),
    ("p99.9 ms", _latency("p999_s")),
    ("max ms", _latency("max_s")),
    ("errors", _errors),
    (
        "batch",
        lambda run: "" if run.server is None or run.server.mean_batch is None else f"{run.server.mean_batch:.1f}",
    ),
    ("cores", lambda run: "" if run.server is None or run.server.cpu is None else f"{run.server.cpu:.2f}"),
    ("SLO", _met),
)


def name_of(run: Measurement, repeats: int) -> str:
    """The load, with the number of the repeat when there are more."""
    return f"{run.load.label} #{run.repeat + 1}" if repeats > 1 else run.load.label


def rows(runs: Sequence[Measurement]) -> list[list[str]]:
    """The heading, then a row a run, with the columns that any of them knows. An invalid run has no numbers."""
    repeats = max((run.repeat for run in runs), default=0) + 1
    cells = [["" if run.invalid else cell(run) for _, cell in _COLUMNS] for run in runs]
    shown = [i for i in range(len(_COLUMNS)) if i == 0 or any(row[i] for row in cells)]  # the first has INVALID too
    table = [["load", *(_COLUMNS[i][0] for i in shown)]]
    for run, row in zip(runs, cells, strict=True):
        figures = [row[i] for i in shown]
        if run.invalid:
            figures = [INVALID, *figures[1:]]
        table.append([name_of(run, repeats), *figures])
    return table


def notes(runs: Sequence[Measurement]) -> list[str]:
    """What must be known of the runs, each text once, with the loads that it is true of."""
    repeats = max((run.repeat for run in runs), default=0) + 1
    found: dict[str, list[str]] = {}
    for run in runs:
        texts = [*(f"{INVALID}: {text}" for text in run.invalid), *run.caveats]
        if run.first_error is not None:
            texts.append(f"first error: {run.first_error}")
        for text in texts:
            found.setdefault(text, []).append(name_of(run, repeats))
    everybody = len(runs)
    return [text if len(names) == everybody else f"{', '.join(names)}: {text}" for text, names in found.items()]


def server_lines(runs: Sequence[Measurement]) -> list[str]:
    """What the server did in each run that counts, one line each."""
    repeats = max((run.repeat for run in runs), default=0) + 1
    told = ((name_of(run, repeats), _server(run.server)) for run in runs if run.server is not None and not run.invalid)
    return [f"{name}: {text}" for name, text in told if text]


def _server(side: ServerStats) -> str:
    times = (("queue", side.queue_s), ("preprocess", side.preprocess_s), ("run", side.run_s))
    parts = [
        f"{name} {_ms(value)} ms" for name, value in (*times, ("postprocess", side.postprocess_s)) if value is not None
    ]
    if side.batches:
        counts = " ".join(f"<={rows}:{count:,}" for rows, count in side.batches.items() if count)
        parts.append(f"batches by rows {counts}")
    if side.memory_bytes is not None:
        parts.append(f"memory {side.memory_bytes / 2**20:,.0f} MiB")
    parts += [f"{gpu.name} {gpu.utilization:.0%}, {gpu.memory_bytes / 2**20:,.0f} MiB" for gpu in side.gpus]
    return " · ".join(parts)


def line(run: Measurement, repeats: int) -> str:
    """One run in one line, as soon as it is there."""
    name = name_of(run, repeats)
    if run.invalid:
        return f"{name}: {INVALID}"
    failed = f", {run.error_share:.1%} errors" if run.errors else ""
    return f"{name}: {run.throughput:,.5g}/s, p50 {_ms(run.latency.p50_s)} ms, p99 {_ms(run.latency.p99_s)} ms{failed}"


def verdict(runs: Sequence[Measurement], slo: Slo) -> str:
    """Which loads kept the SLO, which did not and why, which cannot tell."""
    repeats = max((run.repeat for run in runs), default=0) + 1
    parts = []
    for word, met in (("kept at", True), ("MISSED at", False), ("cannot be told at", None)):
        names = [name_of(run, repeats) + _why(run, met) for run in runs if run.met is met]
        if names:
            parts.append(f"{word} {', '.join(names)}")
    return f"SLO {slo.text}: {'; '.join(parts)}"


def _why(run: Measurement, met: bool | None) -> str:
    if met:
        return ""
    if run.invalid:
        return f" ({INVALID})"
    broken = [clause for clause in run.slo if clause.met is met]
    if not broken:
        return f" ({run.error_share:.1%} errors)"
    texts = [clause.text if clause.value is None else _found(clause) for clause in broken]
    return f" ({', '.join(texts)}{': too few samples' if met is None else ''})"


def _found(clause: ObjectiveResult) -> str:
    name = re.split(r"\s*[<>]", clause.text)[0]
    return f"{name} is {in_units(name, clause.value or 0.0)}"


_CLEAR: Final = "\r\x1b[K"  # the line of a terminal

Show = Callable[[Load, float, int], None]
"""Told ten times a second how far a load is: seconds since its start, and answers."""


class BenchSession(Struct, kw_only=True):
    """What is to be done, and what was measured so far. With `as_json` nothing is printed before the end."""

    plan: LoadPlan
    slo: Slo
    origin: Origin
    results: Results | None = None
    warm_s: float | None = None
    timeout_s: float | None = None
    as_json: bool = False
    runs: list[Measurement] = []
    found: list[str] = []

    async def send(self, target: Target, requests: list[bytes]) -> None:
        """Runs the plan. Cancelled, it has kept the part of the run that was under way."""
        with _progress(quiet=self.as_json) as show:

            async def one(load: Load, repeat: int) -> Measurement:
                run = await measure(
                    target,
                    requests,
                    load,
                    slo=self.slo,
                    warm_s=self.warm_s,
                    repeat=repeat,
                    check=check_of(target),
                    timeout_s=self.timeout_s,
                    on_progress=lambda seconds, answered: show(load, seconds, answered),
                    on_partial=self.keep,
                )
                self.keep(run)
                return run

            async for text in carry_out(self.plan, self.slo, one):
                self.found.append(text)

    def keep(self, run: Measurement) -> None:
        """One more is measured."""
        self.runs.append(run)
        if self.results is not None:
            self.results.append(run)
        if not self.as_json:
            click.echo(_CLEAR * sys.stderr.isatty() + line(run, self.plan.repeat), err=True)

    def tell(self) -> None:
        """Prints all of it."""
        if self.as_json:
            told = {"origin": self.origin, "measurements": self.runs, "found": self.found}
            click.echo(msgspec.json.format(msgspec.json.encode(told)))
        elif self.runs:
            for text in (*align(rows(self.runs)), *server_lines(self.runs), *notes(self.runs), *self.found):
                click.echo(text)
            if self.slo.objectives and self.plan.mode in ("closed", "open"):
                click.echo(verdict(self.runs, self.slo))

    def close(self) -> None:
        """Writes the summary and the report, if results are kept."""
        if self.results is None:
            return
        self.results.close()
        if self.runs:
            report, page = publish(self.results.folder)
            click.echo(f"kept: {report} and {page}", err=True)

    def code(self) -> int:
        """The exit status: whether all runs count and keep the SLO, or a search found what it looked for."""
        if self.plan.mode in ("ramp", "saturate"):
            known = self.found and all(text.startswith(("knee", "saturates")) for text in self.found)
            return 0 if known else FAILED
        if not self.runs or any(run.invalid or not run.answered for run in self.runs):
            return FAILED
        return FAILED if self.slo.objectives and not all(run.met for run in self.runs) else 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Show]:
    """A line that tells how far the load is, on a terminal. Written as it is: what draws in a thread of its own would
    hold up the generator."""
    if quiet or not sys.stderr.isatty():
        yield lambda load, seconds, answered: None
        return

    def show(load: Load, seconds: float, answered: int) -> None:
        length = f" of {load.seconds:g}" if load.seconds else ""
        sys.stderr.write(f"{_CLEAR}{load.label}: {seconds:.1f}{length} s, {answered:,} answers")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(_CLEAR)
