"""`penstock tune`: searches for the best settings within an SLO, reports them and writes them to a configuration."""

from __future__ import annotations

import math
import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from penstock.perf.cli import FAILED, INTERRUPTED, exit_code, seconds, warmup
from penstock.perf.tune.job import TuneJob, identity, read_job

if TYPE_CHECKING:
    from penstock.perf.bench.origin import Origin
    from penstock.perf.bench.results import Results
    from penstock.perf.bench.slo import Slo
    from penstock.perf.tune.rates import Effort
    from penstock.perf.tune.result import TuningResult
    from penstock.perf.tune.runner import Journal
    from penstock.perf.tune.space import CandidateSettings
    from penstock.perf.tune.system import MeasuredRun

SEARCHES: Final = ("auto", "grid", "climb", "halving", "tpe")
JOURNAL: Final = "journal.jsonl"
TABLE: Final = "settings.csv"


@click.command()
@click.argument("target")
@click.option("--slo", required=True, metavar="SLO", help='The SLO to keep, such as "p99<=100ms,error<=0.1%".')
@click.option(
    "--space", metavar="NAME=VALUES,...",
    help="The settings to try, such as batch=1..32,instances=1..8,precision=fp32,bf16,optimize=none,compile,"
    "hold=auto,0,device=cpu,cuda,threads=1,2; also keys of the model such as batching.slo_s [batch and instances].",
)  # fmt: skip
@click.option("--gpu", is_flag=True, help="Add device=cpu,cuda to the space.")
@click.option(
    "--search", type=click.Choice(SEARCHES), default="auto", show_default=True, help="Search strategy; tpe is Optuna's."
)
@click.option(
    "--effort", type=click.Choice(["quick", "normal", "thorough"]), default="normal", show_default=True,
    help="Length of the runs, and how often the best settings are repeated.",
)  # fmt: skip
@click.option("--budget", callback=seconds, metavar="TIME", help="Time limit for measuring: 90s, 10m, 1h [none].")
@click.option("--write", metavar="FILE", help="The penstock.toml to write the result to; its comments stay.")
@click.option("--data", metavar="FILE|DIR|random", help="Requests to send: files, lines of a .jsonl, random tensors.")
@click.option(
    "--accuracy-check", metavar="FILE|DIR",
    help="Inputs (.jsonl, .npz, a folder) whose answers must not change, or expected answers [the requests sent].",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(0), default=0.01, show_default=True,
    help="Accepted difference of numbers in answers, relative to the larger of the number and 1.",
)  # fmt: skip
@click.option("--price", type=click.FloatRange(0, min_open=True), help="Price of an hour: adds cost per million.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Results and reports [tune-NAME].")
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Reuse the measurements of the same search in DIR."
)
@click.option("--model", metavar="NAME", help="The model to tune, if a configuration has several.")
@click.option(
    "--warmup", callback=warmup, default="auto", show_default=True, metavar="auto|S", help="After each model load."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals, search and random data."
)
@click.option("--json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--token-file", type=click.Path(), help="The token that the configuration requires.")
@click.option("--option", "options", multiple=True, metavar="A=B", help="As for serve.")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="As for serve.")
def tune(target: str, **flags: Any) -> None:
    """Find the settings with the most throughput within an SLO.

    TARGET is a target of penstock serve: app.py:Model, model.onnx, the TOML of a pipeline or of a configuration.

    Exit status: 0 found; 1 nothing proven to keep the SLO, or the app failed; 2 wrong usage; 130 interrupted.
    """
    sys.exit(exit_code(lambda: _tune(target, flags)))


# ---- the run


class _Progress:
    """Records and prints each run, new or replayed."""

    def __init__(self, slo: Slo, results: Results) -> None:
        self._slo, self._results = slo, results

    def __call__(self, settings: CandidateSettings, measured: MeasuredRun, replayed: bool) -> None:
        run = measured.run
        if not replayed:
            self._results.append(run)
        why = measured.violation(self._slo) if run.load.mode == "open" else None
        outcome = f"INVALID: {run.invalid[0]}" if run.invalid else why or "kept"
        again = " (measured before)" if replayed else ""
        click.echo(f"{settings}: {run.load.label}: {run.throughput:,.4g}/s, {outcome}{again}", err=True)


def _tune(target: str, flags: dict[str, Any]) -> int:
    """The exit status. Raises PenstockError."""
    from penstock.perf.bench.results import Results
    from penstock.perf.tune.runner import Journal

    job = read_job(target, flags)
    if not flags["resume"]:
        _delete_results(job.folder)
    origin, measured = _origin(job), True
    try:
        with (
            Results.open(job.folder, origin, resume=True) as results,
            Journal.open(job.folder / JOURNAL, identity(job)) as journal,
        ):
            if n := len(journal):
                click.echo(f"resumes in {job.folder}: {n} answers exist (--no-resume starts over)", err=True)
            click.echo(f"{job.tuned.name}: {len(job.space)} settings, search {job.flags['search']}", err=True)
            _warn_of_short_budget(job)
            try:
                result, payload_bytes = _search(job, results, journal, origin.line)
            finally:
                measured = bool(len(journal) or results.measurements)
    except BaseException:
        if not measured:  # the next attempt may have other flags
            _delete_results(job.folder)
        raise
    return _report(job, result, payload_bytes)


def _search(job: TuneJob, results: Results, journal: Journal, command: str) -> tuple[TuningResult, int]:
    """(the result, the mean size of the requests)."""
    from penstock.perf.tune.app import AppOptions, AppUnderTest
    from penstock.perf.tune.tuner import TuningOptions
    from penstock.perf.tune.tuner import tune as search

    flags = job.flags
    options = AppOptions(
        samples=job.samples,
        tolerance=flags["tolerance"],
        data=flags["data"],
        seed=flags["seed"],
        warm_s=flags["warmup"],
    )
    app = AppUnderTest(job.tuned, job.space, job.slo, options)
    try:
        app.start()
        tuning = TuningOptions(
            search=flags["search"],
            budget_s=flags["budget"] or math.inf,
            seed=flags["seed"],
            effort=_effort(flags["effort"]),
            price=flags["price"],
            command=command,
        )
        observer = _Progress(job.slo, results)
        return search(app, job.space, job.slo, tuning, journal=journal, observer=observer), app.payload_bytes
    finally:
        app.close()


def _warn_of_short_budget(job: TuneJob) -> None:
    """Warns of a budget that is too short for the proof, however fast the model is."""
    least_s, budget_s = _effort(job.flags["effort"]).proof_s(math.inf, job.slo), job.flags["budget"]
    if budget_s and budget_s < least_s:
        click.echo(
            f"--budget {budget_s:g}s ends before anything is proven: the runs of the proof alone take {least_s:g}s "
            f"or more with --effort {job.flags['effort']}",
            err=True,
        )


def _effort(name: str) -> Effort:
    """The value of --effort."""
    from penstock.perf.tune.rates import Effort

    if name == "quick":
        return Effort(
            probe_s=0.4, probe_samples=100, sure_s=1.0, sure_samples=300, latencies=3.0, most_s=6.0, precision=0.1,
            proof=1.0, repeats=2, finalists=2,
        )  # fmt: skip
    return Effort(probe_s=3.0, sure_s=10.0, sure_samples=10_000, repeats=5) if name == "thorough" else Effort()


# ---- the result


def _report(job: TuneJob, result: TuningResult, payload_bytes: int) -> int:
    """Writes the reports and the configuration, prints the verdict, and returns the exit status."""
    from penstock.perf.bench.document import Report, align, markdown
    from penstock.perf.bench.report import compose, publish
    from penstock.perf.bench.results import read, write_error, write_whole
    from penstock.perf.tune.result import as_csv, settings_table

    origin, measurements = read(job.folder)
    table = settings_table(measurements, job.slo, job.tuned.model, payload_bytes)
    verdict = msgspec.structs.replace(result.verdict, table=table)
    report = compose(origin, measurements, verdict)
    text, page = publish(job.folder, verdict)
    try:
        write_whole(job.folder / TABLE, as_csv(table).encode())
    except OSError as e:
        raise write_error(job.folder, e) from e
    if job.flags["json"]:
        click.echo(msgspec.json.format(msgspec.json.encode(verdict)))
    else:
        click.echo(markdown(Report(report.title, report.verdict, [])))
        click.echo("\n".join(align(table)))
    click.echo(f"full report: {text} and {page}", err=True)
    _write(job, result, page)
    if result.ended == "interrupted":
        return INTERRUPTED
    return FAILED if _unproven(job, result) else 0


def _unproven(job: TuneJob, result: TuningResult) -> str:
    """Why the result cannot be relied on; "" if it can."""
    if result.ended == "interrupted":
        return "the search was interrupted"
    if result.chosen is None:
        return f"nothing keeps {job.slo.text}"
    if result.confirmed:
        return ""
    if result.ended == "failed":
        return "the search failed before the choice was proven; run the same command to resume"
    return "there was no time left to prove the choice; give a longer --budget"


def _write(job: TuneJob, result: TuningResult, page: Path) -> None:
    from penstock.perf.tune.server import keys_of

    if job.file is None:
        return
    if why := _unproven(job, result):
        click.echo(f"nothing is written to {job.file.path}: {why}", err=True)
        return
    assert result.chosen is not None, "proven"
    note = (
        f"{job.slo.text} was kept at {result.rate:g} requests/s on {datetime.now(UTC):%Y-%m-%d}\n"
        f"{result.chosen}; {page} has the other settings"
    )
    job.file.write(keys_of(result.chosen), note)
    click.echo(f"written: {job.file.path}; serve it: penstock serve {shlex.quote(job.flags['write'])}", err=True)


def _delete_results(folder: Path) -> None:
    """Deletes the files of a run, and the folder if that leaves it empty."""
    from penstock.perf.bench.report import PAGE, REPORT, VERDICT
    from penstock.perf.bench.results import RECORDS, RUN, SUMMARY

    for name in (RUN, RECORDS, SUMMARY, JOURNAL, REPORT, PAGE, VERDICT, TABLE):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _origin(job: TuneJob) -> Origin:
    from penstock.perf.bench.origin import Origin, command_line, machine, versions

    return Origin(
        command="tune",
        line=command_line(sys.argv[1:]),
        target=job.tuned.target,
        slo=job.slo.text,
        seed=job.flags["seed"],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(("torch", "onnxruntime", "numpy", "optuna")),
    )
