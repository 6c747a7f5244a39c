"""One call of `penstock bench` or `benchmark-suite`: runs its loads, and prints and stores their measurements."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final

import click
from msgspec import Struct

from penstock.errors import PenstockError
from penstock.perf.bench.document import PAGE, REPORT, UNKNOWN, align, as_lines, by_text, table
from penstock.perf.bench.document import publish as publish_report
from penstock.perf.bench.measurement import STAGES, Load, Measurement, group_by_load, server_stats
from penstock.perf.bench.modes import LoadPlan, run_plan
from penstock.perf.bench.origin import Origin
from penstock.perf.bench.payload import check_of
from penstock.perf.bench.report import INVALID, load_verdict, publish
from penstock.perf.bench.results import NotWritten, Results, json_text
from penstock.perf.bench.run import measure
from penstock.perf.bench.slo import Slo
from penstock.perf.bench.suite import SuiteJob, load_of, requests_of, serving
from penstock.perf.bench.suite_report import AB_REPORT, ab_report, rows_of, suite_plots, suite_report
from penstock.perf.bench.suite_yaml import SuitePoint
from penstock.perf.bench.target import Target
from penstock.perf.cli import FAILED, run_async

_CLEAR: Final = "\r\x1b[K"  # the line of a terminal


class BenchSession(Struct, kw_only=True):
    """The options of `penstock bench` and the measurements so far. With `as_json` nothing is printed before the end."""

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
        """Runs the plan. If cancelled, it has stored the partial result of the current run."""
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
                    on_partial=self.store,
                )
                self.store(run)
                return run

            async for text in run_plan(self.plan, self.slo, one):
                self.found.append(text)

    def store(self, run: Measurement) -> None:
        self.runs.append(run)
        if self.results is not None:
            self.results.append(run)
        if not self.as_json:
            click.echo(_CLEAR * sys.stderr.isatty() + line(run, self.plan.repeat), err=True)

    def print(self) -> None:
        if self.as_json:
            found = {"origin": self.origin, "measurements": self.runs, "found": self.found}
            click.echo(json_text(found), nl=False)
        elif self.runs:
            for text in (*align(rows(self.runs)), *server_lines(self.runs), *notes(self.runs), *self.found):
                click.echo(text)
            if self.slo.objectives and self.plan.mode in ("closed", "open"):
                click.echo("\n".join(as_lines(load_verdict(group_by_load(self.runs), self.slo.text))))

    def close(self) -> None:
        """Writes the summary and the report, if results are stored."""
        if self.results is None:
            return
        self.results.close()
        if self.runs:
            report, page = publish(self.results.folder)
            click.echo(f"written: {report} and {page}", err=True)

    def code(self) -> int:
        """The exit status: whether all runs are valid and meet the SLO, or a search found its result."""
        if self.plan.mode in ("ramp", "saturate"):
            known = self.found and all(text.startswith(("knee", "saturates")) for text in self.found)
            return 0 if known else FAILED
        if not self.runs or any(run.invalid or not run.answered for run in self.runs):
            return FAILED
        return FAILED if self.slo.objectives and not all(run.met for run in self.runs) else 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[Load, float, int], None]]:
    """Shows load, seconds and responses on a terminal; written directly, because a drawing thread would delay the
    generator."""
    if quiet or not sys.stderr.isatty():
        yield lambda load, seconds, answered: None
        return

    def show(load: Load, seconds: float, answered: int) -> None:
        length = f" of {load.seconds:g}" if load.seconds else ""
        sys.stderr.write(f"{_CLEAR}{load.label}: {seconds:.1f}{length} s, {answered:,} responses")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(_CLEAR)


# ---- benchmark-suite


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options that apply to every run of a suite."""

    slo: Slo
    warm_s: float | None
    repeat: int
    seed: int


class SuiteSession:
    """All runs of a suite, repeat by repeat, so that a disturbance does not hit all repeats of one run."""

    def __init__(self, jobs: Sequence[SuiteJob], options: RunOptions, results: Results) -> None:
        self._jobs, self._options, self._results = jobs, options, results
        self._done = {_run_key(m) for m in results.measurements if not m.invalid}
        self._number = 0
        self._count = options.repeat * sum(len(job.points) * len(job.case.concurrency) for job in jobs)

    def run(self) -> None:
        """Runs everything that is not measured yet. Raises NotWritten."""
        for repeat in range(self._options.repeat):
            for job in self._jobs:
                for point in job.points:
                    self._run_point(job, point, repeat)

    def _run_point(self, job: SuiteJob, point: SuitePoint, repeat: int) -> None:
        """Runs all concurrencies that are not measured yet on one server."""
        numbered = enumerate(job.case.concurrency, self._number + 1)
        left = [(number, n) for number, n in numbered if (point.label, n, repeat) not in self._done]
        self._number += len(job.case.concurrency)
        try:
            if left:
                with serving(job, point) as target:
                    while left:
                        number, clients = left[0]
                        self._store(number, point, self._measure(job, point, target, clients, repeat))
                        del left[0]
        except NotWritten:
            raise
        except PenstockError as error:  # including ConfigError for an input that does not fit the model
            for number, clients in left:
                started = datetime.now(UTC).isoformat(timespec="seconds")
                load, why = load_of(job, clients, self._options.seed), [error.message[:2000]]
                failed = Measurement(load=load, label=point.label, repeat=repeat, started=started, invalid=why)
                self._store(number, point, failed)

    def _measure(self, job: SuiteJob, point: SuitePoint, target: Target, clients: int, repeat: int) -> Measurement:
        return run_async(
            measure(
                target,
                requests_of(job, target, self._options.seed),
                load_of(job, clients, self._options.seed),
                slo=self._options.slo,
                warm_s=self._options.warm_s,
                label=point.label,
                repeat=repeat,
                check=check_of(target),
                on_progress=_show_answered if sys.stderr.isatty() else None,  # the line of the result overwrites it
            )
        )

    def _store(self, number: int, point: SuitePoint, run: Measurement) -> None:
        text = f"{run.throughput:,.5g}/s"
        if run.latency.p99_s is not None:
            text += f", p99 {run.latency.p99_s * 1e3:,.4g} ms"
        if run.errors:
            text += f", {run.error_share:.1%} errors"
        if run.invalid:
            text = f"{INVALID}: {run.invalid[0]}"
        try:
            self._results.append(run)
        finally:  # print only what is stored, because Ctrl-C may follow the line; print it even if the disk is full
            click.echo(f"[{number}/{self._count}] {point.case.text}, {point.settings}, {run.load.label}: {text}")

    def report(self, notes: Sequence[str]) -> bool:
        """Prints the recommendations, writes ab_report.csv and the reports; returns whether every run is valid."""
        folder, origin = self._results.folder, self._results.origin
        measurements = list(
            {_run_key(m): m for m in self._results.measurements}.values()
        )  # --resume repeats invalid runs
        suite_rows = rows_of([point for job in self._jobs for point in job.points], measurements)
        report = suite_report(suite_rows, origin, notes)
        for text in as_lines(report.verdict):
            click.echo(text)
        files = {AB_REPORT: ab_report(suite_rows, origin.machine)}
        publish_report(folder, report, lambda: suite_plots(suite_rows, measurements, origin.slo), files)
        click.echo(f"{folder}: {AB_REPORT}, {REPORT}, {PAGE}")
        return not any(m.invalid for m in measurements)


def _show_answered(seconds: float, answered: int) -> None:
    click.echo(f"{answered:,} answered in {seconds:.0f} s\r", nl=False, err=True)


def _run_key(m: Measurement) -> tuple[str, int, int]:
    return m.label, m.load.concurrency, m.repeat


# ---- text on a terminal


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1e3:,.4g}"


def _latency(name: str) -> Callable[[Measurement], str]:
    return lambda run: _ms(getattr(run.latency, name))


def _of_server(name: str, form: str) -> Callable[[Measurement], str]:
    def text(run: Measurement) -> str:
        value = getattr(run.server, name, None)
        return "" if value is None else format(value, form)

    return text


_COLUMNS: Final[Mapping[str, Callable[[Measurement], str]]] = {
    "in time/s": lambda run: "" if run.goodput is None else f"{run.goodput:,.5g}",
    "mean ms": _latency("mean_s"),
    "p50 ms": _latency("p50_s"),
    "p90 ms": _latency("p90_s"),
    "p99 ms": _latency("p99_s"),
    "p99.9 ms": _latency("p999_s"),
    "max ms": _latency("max_s"),
    "errors": lambda run: " ".join(f"{code}:{count:,}" for code, count in sorted(run.errors.items())),
    "batch": _of_server("mean_batch", ".1f"),
    "cores": _of_server("cpu", ".2f"),
    "SLO": lambda run: {True: "met", False: "MISSED", None: UNKNOWN}[run.met] if run.slo else "",
}


def name_of(run: Measurement, repeats: int) -> str:
    """The load, with the number of the repeat if there are several."""
    return f"{run.load.label} #{run.repeat + 1}" if repeats > 1 else run.load.label


def _names(runs: Sequence[Measurement]) -> list[str]:
    repeats = max((run.repeat for run in runs), default=0) + 1
    return [name_of(run, repeats) for run in runs]


def rows(runs: Sequence[Measurement]) -> list[Sequence[str]]:
    """The heading and a row per run, with the columns that any run has. An invalid run has no figures."""
    names = {id(run): name for run, name in zip(runs, _names(runs), strict=True)}
    columns = {name: partial(_cell, cell) for name, cell in _COLUMNS.items()}
    found = table({"load": lambda run: names[id(run)], "good/s": _good, **columns}, runs)
    return [found.header, *found.rows]


def _good(run: Measurement) -> str:
    return INVALID if run.invalid else f"{run.throughput:,.5g}"


def _cell(cell: Callable[[Measurement], str], run: Measurement) -> str:
    return "" if run.invalid else cell(run)


def notes(runs: Sequence[Measurement]) -> list[str]:
    """The caveats, reasons of INVALID and first errors, each once with its loads."""
    found: list[tuple[str, str]] = []
    for run, name in zip(runs, _names(runs), strict=True):
        errors = [] if run.first_error is None else [f"first error: {run.first_error}"]
        found += [(text, name) for text in [*(f"{INVALID}: {t}" for t in run.invalid), *run.caveats, *errors]]
    return by_text(found, len(set(_names(runs))))


def server_lines(runs: Sequence[Measurement]) -> list[str]:
    """A line per valid run about the server."""
    named = zip(runs, _names(runs), strict=True)
    lines = ((name, _server(run)) for run, name in named if not run.invalid)
    return [f"{name}: {text}" for name, text in lines if text]


def _server(run: Measurement) -> str:
    server = server_stats(run)
    parts = [f"{name} {_ms(value)} ms" for name, figure in STAGES.items() if (value := figure(run)) is not None]
    if server.batches:
        counts = " ".join(f"<={rows}:{count:,}" for rows, count in server.batches.items() if count)
        parts.append(f"batches by rows {counts}")
    if server.memory_bytes is not None:
        parts.append(f"memory {server.memory_bytes / 2**20:,.0f} MiB")
    parts += [f"{gpu.name} {gpu.utilization:.0%}, {gpu.memory_bytes / 2**20:,.0f} MiB" for gpu in server.gpus]
    return " · ".join(parts)


def line(run: Measurement, repeats: int) -> str:
    name = name_of(run, repeats)
    if run.invalid:
        return f"{name}: {INVALID}"
    failed = f", {run.error_share:.1%} errors" if run.errors else ""
    return f"{name}: {run.throughput:,.5g}/s, p50 {_ms(run.latency.p50_s)} ms, p99 {_ms(run.latency.p99_s)} ms{failed}"
