"""`penstock tune`: searches for the best settings within an SLO, and tells and writes what was found."""

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

from penstock.cli.tune_job import Job, identity, read_job
from penstock.perf.cli import FAILED, INTERRUPTED, exit_code, seconds, warmup

if TYPE_CHECKING:
    from penstock.perf.bench.origin import Origin
    from penstock.perf.bench.results import Results
    from penstock.perf.bench.slo import Slo
    from penstock.perf.simulate.capacity import Effort
    from penstock.perf.tune.journal import Journal
    from penstock.perf.tune.space import Settings
    from penstock.perf.tune.trial import Reading
    from penstock.perf.tune.tuner import Outcome

SEARCHES: Final = ("auto", "grid", "climb", "halving", "tpe")
JOURNAL: Final = "journal.jsonl"
TABLE: Final = "settings.csv"


# ---- the run


class _Watch:
    """Told of each run that ended, now or in an earlier start: keeps it, and says so."""

    def __init__(self, slo: Slo, results: Results) -> None:
        self._slo, self._results = slo, results

    def __call__(self, settings: Settings, reading: Reading, replayed: bool) -> None:
        run = reading.run
        if not replayed:
            self._results.append(run)
        why = reading.breaks(self._slo) if run.load.mode == "open" else None
        kept = f"INVALID: {run.invalid[0]}" if run.invalid else why or "kept"
        again = " (measured before)" if replayed else ""
        click.echo(f"{settings}: {run.load.label}: {run.throughput:,.4g}/s, {kept}{again}", err=True)


def _tune(target: str, flags: dict[str, Any]) -> int:
    """The exit status. Raises PenstockError."""
    from penstock.perf.bench.results import Results
    from penstock.perf.tune.journal import Journal

    job = read_job(target, flags)
    if not flags["resume"]:
        _forget(job.folder)
    origin, measured = _origin(job), True
    try:
        with (
            Results.open(job.folder, origin, resume=True) as results,
            Journal.open(job.folder / JOURNAL, identity(job)) as journal,
        ):
            if n := len(journal):
                click.echo(f"goes on in {job.folder}: {n} answers are there (--no-resume begins anew)", err=True)
            click.echo(f"{job.subject.name}: {len(job.space)} settings, search {job.flags['search']}", err=True)
            _warn_of_the_budget(job)
            try:
                outcome, payload_bytes = _searched(job, results, journal, origin.line)
            finally:
                measured = bool(len(journal) or results.measurements)
    except BaseException:
        if not measured:  # the next one may be of other words
            _forget(job.folder)
        raise
    return _told(job, outcome, payload_bytes)


def _searched(job: Job, results: Results, journal: Journal, command: str) -> tuple[Outcome, int]:
    """(what came of it, the mean size of what was sent)."""
    from penstock.perf.tune.app import App, Check
    from penstock.perf.tune.tuner import tune as search

    flags = job.flags
    app = App(
        job.subject,
        job.space,
        job.slo,
        check=Check(samples=job.samples, tolerance=flags["tolerance"]),
        data=flags["data"],
        seed=flags["seed"],
        warm_s=flags["warmup"],
    )
    try:
        app.start()
        outcome = search(
            app,
            job.space,
            job.slo,
            search=flags["search"],
            budget_s=flags["budget"] or math.inf,
            seed=flags["seed"],
            journal=journal,
            effort=_effort(flags["effort"]),
            price=flags["price"],
            command=command,
            watch=_Watch(job.slo, results),
        )
        return outcome, app.payload_bytes
    finally:
        app.close()


def _warn_of_the_budget(job: Job) -> None:
    """Says at once that a budget leaves no time for the proof, however fast the model is."""
    least_s, budget_s = _effort(job.flags["effort"]).proof_s(math.inf, job.slo), job.flags["budget"]
    if budget_s and budget_s < least_s:
        click.echo(
            f"--budget {budget_s:g}s is over before anything is proven: the runs of the proof alone take {least_s:g}s "
            f"or more with --effort {job.flags['effort']}",
            err=True,
        )


def _effort(name: str) -> Effort:
    """How long is measured, by the word of --effort."""
    from penstock.perf.simulate.capacity import Effort

    if name == "quick":
        return Effort(
            probe_s=0.4, probe_samples=100, sure_s=1.0, sure_samples=300, latencies=3.0, most_s=6.0, precision=0.1,
            proof=1.0, repeats=2, finalists=2,
        )  # fmt: skip
    return Effort(probe_s=3.0, sure_s=10.0, sure_samples=10_000, repeats=5) if name == "thorough" else Effort()


# ---- what came of it


def _told(job: Job, outcome: Outcome, payload_bytes: int) -> int:
    """Writes the reports and the configuration, tells the verdict, and gives the exit status."""
    from penstock.perf.bench.document import Report, align, markdown
    from penstock.perf.bench.report import compose, publish
    from penstock.perf.bench.results import read, write_error, write_whole
    from penstock.perf.tune.table import as_csv, rows

    origin, measurements = read(job.folder)
    table = rows(measurements, job.slo, job.subject.model, payload_bytes)
    verdict = msgspec.structs.replace(outcome.verdict, table=table)
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
    click.echo(f"{text} and {page} tell all of it", err=True)
    _write(job, outcome, page)
    if outcome.ended == "interrupted":
        return INTERRUPTED
    return FAILED if _unproven(job, outcome) else 0


def _unproven(job: Job, outcome: Outcome) -> str:
    """Why nothing was found that could be relied on; "" if something was."""
    if outcome.ended == "interrupted":
        return "the search was interrupted"
    if outcome.chosen is None:
        return f"nothing keeps {job.slo.text}"
    if outcome.confirmed:
        return ""
    if outcome.ended == "failed":
        return "the search failed before the choice was proven; the same command goes on"
    return "there was no time left to prove the choice; give a longer --budget"


def _write(job: Job, outcome: Outcome, page: Path) -> None:
    from penstock.perf.tune.served import keys_of

    if job.file is None:
        return
    if why := _unproven(job, outcome):
        click.echo(f"nothing is written to {job.file.path}: {why}", err=True)
        return
    assert outcome.chosen is not None, "proven"
    note = (
        f"{job.slo.text} was kept at {outcome.rate:g} requests/s on {datetime.now(UTC):%Y-%m-%d}\n"
        f"{outcome.chosen}; what else was tried is in {page}"
    )
    job.file.write(keys_of(outcome.chosen), note)
    click.echo(f"written: {job.file.path}; penstock serve {shlex.quote(job.flags['write'])} serves with it", err=True)


def _forget(folder: Path) -> None:
    """Takes away what a run left there, and nothing else but the folder that is empty then."""
    from penstock.perf.bench.report import PAGE, REPORT, VERDICT
    from penstock.perf.bench.results import RECORDS, RUN, SUMMARY

    for name in (RUN, RECORDS, SUMMARY, JOURNAL, REPORT, PAGE, VERDICT, TABLE):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _origin(job: Job) -> Origin:
    from penstock.perf.bench.origin import Origin, command_line, machine, versions

    return Origin(
        command="tune",
        line=command_line(sys.argv[1:]),
        target=job.subject.target,
        slo=job.slo.text,
        seed=job.flags["seed"],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(("torch", "onnxruntime", "numpy", "optuna")),
    )


@click.command()
@click.argument("target")
@click.option("--slo", required=True, metavar="SLO", help='What must be kept, such as "p99<=100ms,error<=0.1%".')
@click.option(
    "--space", metavar="KNOB=VALUES,...",
    help="What is tried, such as batch=1..32,instances=1..8,precision=fp32,bf16,optimize=none,compile,hold=auto,0,"
    "device=cpu,cuda,threads=1,2; also keys of the model, such as batching.slo_s [batch and instances].",
)  # fmt: skip
@click.option("--gpu", is_flag=True, help="Add device=cpu,cuda to the space.")
@click.option(
    "--search",
    type=click.Choice(SEARCHES),
    default="auto",
    show_default=True,
    help="How it is searched; tpe: Optuna's.",
)
@click.option(
    "--effort", type=click.Choice(["quick", "normal", "thorough"]), default="normal", show_default=True,
    help="How long each run is, and how often the best are repeated.",
)  # fmt: skip
@click.option("--budget", callback=seconds, metavar="TIME", help="Measures no longer than 90s, 10m, 1h [no limit].")
@click.option("--write", metavar="FILE", help="The penstock.toml that is to have what was found; comments in it stay.")
@click.option("--data", metavar="FILE|DIR|random", help="What is sent: files, lines of a .jsonl, tensors of chance.")
@click.option(
    "--accuracy-check", metavar="FILE|DIR",
    help="Inputs (.jsonl, .npz, a folder) whose answers must stay as they are, or as told there [of what is sent].",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(0), default=0.01, show_default=True,
    help="What numbers of the answers may differ by, of themselves or of 1.",
)  # fmt: skip
@click.option("--price", type=click.FloatRange(0, min_open=True), help="Of an hour of this machine: cost per million.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Results and reports [tune-NAME].")
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="What DIR has of this very search is not measured again.",
)
@click.option("--model", metavar="NAME", help="Which of the models of a configuration.")
@click.option(
    "--warmup",
    callback=warmup,
    default="auto",
    show_default=True,
    metavar="auto|S",
    help="After each load of the model.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of arrivals, search and random data."
)
@click.option("--json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--token-file", type=click.Path(), help="The token that the configuration asks for.")
@click.option("--option", "options", multiple=True, metavar="A=B", help="As of serve.")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="As of serve.")
def tune(target: str, **flags: Any) -> None:
    """Find the settings with the most throughput within an SLO.

    TARGET is what penstock serve takes: app.py:Model, model.onnx, the TOML of a pipeline or of a configuration.

    Exit status: 0 found; 1 nothing proven to keep the SLO, or the app failed; 2 wrong usage; 130 interrupted.
    """
    sys.exit(exit_code(lambda: _tune(target, flags)))
