"""`penstock benchmark-suite`: runs what the YAML of TorchServe's suite names, and writes its table and a page."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct, structs

from penstock.cli.measuring import FAILED, INTERRUPTED, exit_code, run_async, warmup
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.perf.bench.measurement import Measurement
    from penstock.perf.bench.plots import Plot
    from penstock.perf.bench.results import Origin, Results
    from penstock.perf.bench.slo import Slo
    from penstock.perf.bench.suite import Job, Wishes
    from penstock.perf.bench.suite_yaml import Point
    from penstock.perf.bench.target import Target


class _How(Struct, frozen=True, kw_only=True):
    """What holds for every run."""

    slo: Slo
    warm_s: float | None
    repeat: int
    seed: int


@click.command("benchmark-suite")
@click.argument("files", nargs=-1, metavar="MODELS.yaml...")
@click.option("--input", "inputs", multiple=True, metavar="FILE", help="as MODELS.yaml, as TorchServe's suite has it")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="folder of the results; by default a new one, benchmark-suite-TIME",
)
@click.option("--resume", is_flag=True, help="go on in DIR: what was measured is not measured again")
@click.option("--data", metavar="FILE|DIR|JSONL|random", help="what is sent, in place of the input of the files")
@click.option("--requests", type=click.IntRange(1), help="how many a run, in place of what the files say")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="runs of each; medians are told")
@click.option("--warmup", default="auto", show_default=True, callback=warmup, help="seconds before each run, or auto")
@click.option("--slo", metavar="TEXT", help="what to choose within, for instance p99<=100ms,error<=0.1%")
@click.option(
    "--model-store", type=click.Path(exists=True, file_okay=False, path_type=Path), help="where archives are found"
)
@click.option("--skip-missing-hardware", is_flag=True, help="leave out runs on GPUs that are not there")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of payloads of chance")
@click.option("--skip", hidden=True, help="of TorchServe's suite: nothing is installed in any case")
def benchmark_suite(files: tuple[str, ...], inputs: tuple[str, ...], **flags: Any) -> None:
    """Run the models of TorchServe's benchmark YAML, or of its template, in every way that it names.

    Exit status: 0 measured; 1 a run is INVALID; 2 wrong usage, or a mistake in a file; 130 interrupted.
    """
    sys.exit(exit_code(lambda: _suite([Path(name) for name in (*files, *inputs)], flags)))


def _read_flags(flags: dict[str, Any]) -> tuple[Wishes, _How, Path]:
    """What is wished of all runs, how they are measured, and the folder of the results. Raises ConfigError."""
    from penstock.perf.bench.results import RUN
    from penstock.perf.bench.slo import Slo, parse_slo
    from penstock.perf.bench.suite import Wishes

    wishes = Wishes(
        store=flags["model_store"],
        data=flags["data"],
        requests=flags["requests"],
        skip_missing_hardware=flags["skip_missing_hardware"],
    )
    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    how = _How(slo=slo, warm_s=flags["warmup"], repeat=flags["repeat"], seed=flags["seed"])
    folder = flags["output"]
    if flags["resume"] and folder is None:
        raise ConfigError("--resume goes on in a folder; name it by --output DIR")
    if folder is not None and not flags["resume"] and (folder / RUN).exists():
        raise ConfigError(f"{folder} holds a run already; go on with it by --resume, or name another folder")
    return wishes, how, folder or Path(f"benchmark-suite-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def _suite(paths: Sequence[Path], flags: dict[str, Any]) -> int:
    """The exit status: 0 when each run says something. Raises PenstockError."""
    from penstock.perf.bench.results import Results
    from penstock.perf.bench.suite import prepare
    from penstock.perf.bench.suite_yaml import read_suite

    if not paths:
        raise ConfigError("no file of models is named; expected for instance penstock benchmark-suite models.yaml")
    wishes, how, folder = _read_flags(flags)
    cases, notes = read_suite(paths)
    with tempfile.TemporaryDirectory(prefix="penstock-") as downloads:
        jobs, left_out = prepare(cases, wishes, Path(downloads))
        notes = [*notes, *left_out]
        for note in notes:
            click.echo(f"penstock: {note}", err=True)
        with Results.open(folder, _origin(paths, jobs, how), resume=flags["resume"]) as results:
            interrupted = False
            try:
                _Runs(jobs, how, results).all()
            except KeyboardInterrupt:
                click.echo("penstock: interrupted; this is what there is", err=True)
                interrupted = True
            except PenstockError:
                with suppress(PenstockError):
                    _reported(jobs, how, results, notes)
                raise
            code = _reported(jobs, how, results, notes)
            return INTERRUPTED if interrupted else code


def _origin(paths: Sequence[Path], jobs: Sequence[Job], how: _How) -> Origin:
    from penstock.perf.bench.machine import machine, versions
    from penstock.perf.bench.redact import typed
    from penstock.perf.bench.results import Origin
    from penstock.perf.bench.suite import digest

    return Origin(
        command="benchmark-suite",
        line=typed(sys.argv[1:]),
        target=f"{', '.join(map(str, paths))} ({digest(jobs)})",
        slo=how.slo.text,
        seed=how.seed,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(["torch", "onnxruntime", "numpy"]),
    )


class _Runs:
    """All runs of a suite, repeat by repeat, so that a disturbance does not fall on one of them alone."""

    def __init__(self, jobs: Sequence[Job], how: _How, results: Results) -> None:
        self._jobs, self._how, self._results = jobs, how, results
        self._done = {_key(m) for m in results.measurements if not m.invalid}
        self._number = 0
        self._count = how.repeat * sum(len(job.points) * len(job.case.concurrency) for job in jobs)

    def all(self) -> None:
        """Measures what is not measured yet. Raises NotWritten."""
        for repeat in range(self._how.repeat):
            for job in self._jobs:
                for point in job.points:
                    self._point(job, point, repeat)

    def _point(self, job: Job, point: Point, repeat: int) -> None:
        """Every number of clients that is not measured yet, on one server."""
        from penstock.perf.bench.results import NotWritten
        from penstock.perf.bench.suite import serving

        first = self._number
        left = [
            (first + i, n) for i, n in enumerate(job.case.concurrency, 1) if (point.label, n, repeat) not in self._done
        ]
        self._number += len(job.case.concurrency)
        try:
            if left:
                with serving(job, point) as target:
                    while left:
                        self._keep(left[0][0], point, self._run(job, point, target, left[0][1], repeat))
                        del left[0]
        except NotWritten:
            raise
        except PenstockError as error:  # also a ConfigError: an input that does not fit the model
            for number, clients in left:  # the next has a server of its own
                self._keep(number, point, self._failed(job, point, clients, repeat, error))

    def _run(self, job: Job, point: Point, target: Target, clients: int, repeat: int) -> Measurement:
        from penstock.perf.bench.protocol import check_of
        from penstock.perf.bench.run import measure
        from penstock.perf.bench.suite import load_of, requests_of

        return run_async(
            measure(
                target,
                requests_of(job, target, self._how.seed),
                load_of(job, clients, self._how.seed),
                slo=self._how.slo,
                warm_s=self._how.warm_s,
                label=point.label,
                repeat=repeat,
                check=check_of(target),
                on_progress=_show if sys.stderr.isatty() else None,
            )
        )

    def _failed(self, job: Job, point: Point, clients: int, repeat: int, error: PenstockError) -> Measurement:
        from penstock.perf.bench.measurement import Measurement
        from penstock.perf.bench.suite import load_of

        started = datetime.now(UTC).isoformat(timespec="seconds")
        load = load_of(job, clients, self._how.seed)
        return Measurement(load=load, label=point.label, repeat=repeat, started=started, invalid=[error.message[:2000]])

    def _keep(self, number: int, point: Point, found: Measurement) -> None:
        told = f"{found.throughput:,.5g}/s"
        if found.latency.p99_s is not None:
            told += f", p99 {found.latency.p99_s * 1e3:,.4g} ms"
        if found.errors:
            told += f", {found.error_share:.1%} errors"
        if found.invalid:
            told = f"INVALID: {found.invalid[0]}"
        try:
            self._results.append(found)
        finally:  # who sees the line may press Ctrl-C at once: it is kept by then; what found no room is told, too
            click.echo(f"[{number}/{self._count}] {point.case.text}, {point.settings}, {found.load.label}: {told}")


def _show(seconds: float, answered: int) -> None:
    """What a run does meanwhile; the line of its end is written over it."""
    click.echo(f"{answered:,} answered in {seconds:.0f} s\r", nl=False, err=True)


def _key(m: Measurement) -> tuple[str, int, int]:
    return m.label, m.load.concurrency, m.repeat


def _reported(jobs: Sequence[Job], how: _How, results: Results, notes: Sequence[str]) -> int:
    """Writes ab_report.csv and the report, tells what to choose; 1 if a run says nothing. Raises PenstockError."""
    from penstock.perf.bench.ab_report import ab_report, report, rows_of
    from penstock.perf.bench.document import Says, markdown
    from penstock.perf.bench.html import page
    from penstock.perf.bench.publish import PAGE, REPORT
    from penstock.perf.bench.results import not_written, write_whole

    latest = {_key(m): m for m in results.measurements}  # one that was invalid is measured again on --resume
    rows = rows_of([point for job in jobs for point in job.points], list(latest.values()))
    origin = results.origin
    told = report(rows, origin.machine, origin.versions, slo=how.slo.text, line=origin.line, notes=notes)
    plots, without = _plots(jobs, list(latest.values()), how.slo.text)
    for block in told.verdict:
        if isinstance(block, Says):
            click.echo(block.text)
    try:
        write_whole(results.folder / "ab_report.csv", ab_report(rows, origin.machine).encode())
        write_whole(results.folder / REPORT, markdown(told).encode())
        write_whole(results.folder / PAGE, page(told, plots, without).encode())
    except OSError as error:
        raise not_written(results.folder, error) from None
    click.echo(f"{results.folder}: ab_report.csv, {REPORT}, {PAGE}")
    return FAILED if any(m.invalid for m in latest.values()) else 0


def _plots(jobs: Sequence[Job], measurements: Sequence[Measurement], slo: str) -> tuple[list[Plot], str]:
    """The plots, and why there are none."""
    from penstock.perf.bench.plots import draw

    if len(jobs) > 1:
        return [], f"they are of one model at a time, and here are {len(jobs)}"
    short = {point.label: point.short for point in jobs[0].points}
    try:
        return draw([structs.replace(m, label=short[m.label]) for m in measurements], slo), ""
    except ConfigError as error:
        return [], error.message
