"""`penstock tune`: checks what is asked before anything is started, searches, and tells and writes what was found."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import Struct

from penstock.cli.measuring import FAILED, INTERRUPTED, exit_code, seconds, warmup
from penstock.errors import ConfigError, nearest

if TYPE_CHECKING:
    from penstock.bench.results import Origin, Results
    from penstock.bench.slo import Slo
    from penstock.tune.accuracy import Sample
    from penstock.tune.capacity import Effort
    from penstock.tune.config import TunedFile
    from penstock.tune.journal import Journal
    from penstock.tune.served import Subject
    from penstock.tune.space import Settings, Space
    from penstock.tune.trial import Reading
    from penstock.tune.tuner import Outcome

SEARCHES: Final = ("auto", "grid", "climb", "halving", "tpe")
MOST_INSTANCES: Final = 16  # of the space that is searched where none is named
JOURNAL: Final = "journal.jsonl"
TABLE: Final = "settings.csv"


class _Job(Struct, frozen=True, kw_only=True):
    """What was asked, checked as far as it can be without loading the app."""

    subject: Subject
    space: Space
    slo: Slo
    folder: Path
    file: TunedFile | None
    samples: list[Sample] | None
    flags: dict[str, Any]


# ---- before anything is started


def read_job(target: str, flags: dict[str, Any]) -> _Job:
    """The job that the flags describe. Raises ConfigError."""
    from penstock.bench.slo import parse_slo
    from penstock.tune.accuracy import read_samples
    from penstock.tune.config import TunedFile
    from penstock.tune.search import strategy
    from penstock.tune.space import parse_space

    slo = parse_slo(flags["slo"])
    if all(part.name == "throughput" for part in slo.parts):
        raise ConfigError(f'--slo "{slo.text}" bounds no latency and no errors; expected for instance "p99<=100ms"')
    space = parse_space(flags["space"] or default_space())
    if flags["gpu"] and not any(knob.name == "device" for knob in space.knobs):
        space = parse_space(f"{space.text},device=cpu,cuda")
    strategy(flags["search"])
    subject, source = read_subject(target, flags)
    _check_devices(subject, space)
    folder = flags["output"] or Path(f"tune-{subject.name}")
    return _Job(
        subject=subject,
        space=space,
        slo=slo,
        folder=folder,
        file=None if flags["write"] is None else TunedFile(flags["write"], subject.section, subject.model, source),
        samples=None if flags["accuracy_check"] is None else read_samples(flags["accuracy_check"]),
        flags=flags,
    )


def default_space() -> str:
    """What is searched where no space is named: sizes of batches, and instances up to one a core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"batch=1..32,instances=1..{min(MOST_INSTANCES, max(2, cores))}"


def read_subject(target: str, flags: dict[str, Any]) -> tuple[Subject, str | None]:
    """(what is to be tuned, the TOML that it was read from if it is one). Raises ConfigError."""
    from penstock.cli.serve import read_options, split_targets
    from penstock.cli.tokens import read_token
    from penstock.config.load import load_config
    from penstock.plugins import is_pipeline_file
    from penstock.tune.served import Subject

    if "://" in target or target.endswith(".mar"):
        what = "a server that runs" if "://" in target else "an archive of TorchServe"
        raise ConfigError(
            f"TARGET '{target}' is {what}; expected what penstock serve takes: tune starts its own servers"
        )
    toml, models = split_targets((target,))
    options = read_options(flags["options"])
    if options and not models:
        raise ConfigError(f"--option is for a model named on the command line; for those of {toml} use --set")
    base = {"models": {name: {**keys, **({"options": options} if options else {})} for name, keys in models.items()}}
    pipelines = [keys["target"] for keys in models.values() if is_pipeline_file(keys["target"])]
    config = load_config(toml, env={}, sets=flags["sets"], base=base, pipelines=pipelines)
    section = _section(target, list(config.models), flags["model"])
    sets = [*flags["sets"], *(f'models."{section}".options.{text}' for text in flags["options"])]
    model = config.models[section]
    return Subject(
        target=target, section=section, model=model, sets=tuple(sets), token=read_token(flags["token_file"])
    ), toml


def _section(target: str, known: list[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in known:
        raise ConfigError(f"--model {wanted}: {target} has {', '.join(known) or 'no models'}{nearest(wanted, known)}")
    if wanted is None and len(known) != 1:
        raise ConfigError(f"{target} has {', '.join(known) or 'no models'}; choose the one to tune with --model NAME")
    return wanted or known[0]


def _check_devices(subject: Subject, space: Space) -> None:
    """Raises ConfigError for a device that this machine has not."""
    from penstock.tune.served import reachable
    from penstock.worker.devices import visible_gpus

    turned = [str(v) for knob in space.knobs if knob.name == "device" for v in knob.values]
    if wrong := reachable(turned or subject.model.devices, visible_gpus()):
        raise ConfigError(wrong)


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
    from penstock.bench.results import Results
    from penstock.tune.journal import Journal

    job = read_job(target, flags)
    if not flags["resume"]:
        _forget(job.folder)
    origin = _origin(job)
    with (
        Results.open(job.folder, origin, resume=True) as results,
        Journal.open(job.folder / JOURNAL, _identity(job)) as journal,
    ):
        if len(journal):
            click.echo(f"goes on in {job.folder}: {len(journal)} answers are there (--no-resume begins anew)", err=True)
        outcome, payload_bytes = _searched(job, results, journal, origin.line)
    return _told(job, outcome, payload_bytes)


def _searched(job: _Job, results: Results, journal: Journal, command: str) -> tuple[Outcome, int]:
    """(what came of it, the mean size of what was sent)."""
    from penstock.tune.app import App, Check
    from penstock.tune.tuner import tune as search

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


def _effort(name: str) -> Effort:
    """How long is measured, by the word of --effort."""
    from penstock.tune.capacity import Effort

    if name == "quick":
        return Effort(
            probe_s=0.4, probe_samples=100, sure_s=1.0, sure_samples=300, latencies=3.0, most_s=6.0, precision=0.1,
            repeats=2, finalists=2,
        )  # fmt: skip
    return Effort(probe_s=3.0, sure_s=10.0, sure_samples=10_000, repeats=5) if name == "thorough" else Effort()


# ---- what came of it


def _told(job: _Job, outcome: Outcome, payload_bytes: int) -> int:
    """Writes the reports and the configuration, tells the verdict, and gives the exit status."""
    from penstock.bench.document import Report, markdown
    from penstock.bench.publish import publish
    from penstock.bench.report import compose
    from penstock.bench.results import not_written, read, write_whole
    from penstock.bench.table import plain
    from penstock.tune.table import as_csv, rows

    origin, measurements = read(job.folder)
    report = compose(origin, measurements, outcome.verdict)
    text, page = publish(job.folder, outcome.verdict)
    table = rows(measurements, job.slo, job.subject.model, payload_bytes)
    try:
        write_whole(job.folder / TABLE, as_csv(table).encode())
    except OSError as e:
        raise not_written(job.folder, e) from e
    if job.flags["json"]:
        click.echo(msgspec.json.format(msgspec.json.encode(outcome.verdict)))
    else:
        click.echo(markdown(Report(report.title, report.verdict, [])))
        click.echo("\n".join(plain(table)))
    click.echo(f"{text} and {page} tell all of it", err=True)
    _write(job, outcome, page)
    if outcome.ended == "interrupted":
        return INTERRUPTED
    return FAILED if outcome.chosen is None else 0


def _write(job: _Job, outcome: Outcome, page: Path) -> None:
    from penstock.tune.served import keys_of

    if job.file is None:
        return
    if outcome.chosen is None or outcome.ended == "interrupted":
        why = "the search was interrupted" if outcome.chosen else f"nothing keeps {job.slo.text}"
        click.echo(f"{job.file.path} is as it was: {why}", err=True)
        return
    sure = "confirmed by repeats" if outcome.confirmed else "not confirmed: the time was over"
    note = (
        f"{job.slo.text} was kept at {outcome.rate:g} requests/s on {datetime.now(UTC):%Y-%m-%d}, {sure}\n"
        f"{outcome.chosen}; what else was tried is in {page}"
    )
    job.file.write(keys_of(outcome.chosen), note)
    click.echo(f"written: {job.file.path}; penstock serve {shlex.quote(job.flags['write'])} serves with it", err=True)


# ---- where a search may be gone on with


def _identity(job: _Job) -> dict[str, str]:
    """What must be the same for earlier measurements to count: also the app's own file, and what is sent."""
    flags = job.flags
    file = job.subject.model.target.rpartition(":")[0] or job.subject.model.target
    return {
        "target": job.subject.target,
        "model": hashlib.sha256(msgspec.json.encode([job.subject.model, job.subject.sets])).hexdigest()[:16],
        "file": _digest(Path(file)),
        "space": job.space.text,
        "slo": job.slo.text,
        "search": f"{flags['search']} {flags['effort']}",
        "seed": str(flags["seed"]),
        "data": f"{flags['data']} {_digest(Path(flags['data'])) if flags['data'] else ''}".strip(),
    }


def _digest(path: Path) -> str:
    """Of a file, or of all in a folder; "" for what is none."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16] if files else ""


def _forget(folder: Path) -> None:
    """Takes away what an earlier run left there, and nothing else."""
    from penstock.bench.publish import PAGE, REPORT, VERDICT
    from penstock.bench.results import RECORDS, RUN, SUMMARY

    for name in (RUN, RECORDS, SUMMARY, JOURNAL, REPORT, PAGE, VERDICT, TABLE):
        (folder / name).unlink(missing_ok=True)


def _origin(job: _Job) -> Origin:
    from penstock.bench.machine import machine, versions
    from penstock.bench.results import Origin

    return Origin(
        command="tune",
        line=shlex.join(["penstock", *sys.argv[1:]]),
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

    Exit status: 0 found; 1 nothing keeps the SLO, or the app failed; 2 wrong usage; 130 interrupted.
    """
    sys.exit(exit_code(lambda: _tune(target, flags)))
