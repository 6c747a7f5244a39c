"""Runs `penstock tune`: reads and checks the flags, tunes, reports, and writes the configuration."""

import hashlib
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from msgspec import Struct

from penstock.client.endpoint import read_token
from penstock.config.load import load_config
from penstock.config.schema import ModelConfig
from penstock.config.targets import read_options, split_targets
from penstock.core.engine.rules import check_devices
from penstock.core.os_threads import usable_cores
from penstock.errors import FAILED, INTERRUPTED, ConfigError, nearest
from penstock.perf.bench.document import PAGE, REPORT, Report, align, markdown, publish
from penstock.perf.bench.measurement import MOST_ERRORS, Measurement, Slo, parse_slo
from penstock.perf.bench.plots import draw
from penstock.perf.bench.report import VERDICT, compose
from penstock.perf.bench.results import RECORDS, RUN, SUMMARY, Origin, Results, as_csv, json_text, read
from penstock.perf.tune.accuracy import AccuracySample, read_samples
from penstock.perf.tune.app import AppUnderTest
from penstock.perf.tune.config_file import TunedFile, TunedModel
from penstock.perf.tune.rates import EFFORTS, TuningTrial
from penstock.perf.tune.runner import JOURNAL, Journal, MeasuredRun, RunObserver
from penstock.perf.tune.search import strategy
from penstock.perf.tune.space import CandidateSettings, SearchSpace, parse_settings, parse_space, shown
from penstock.perf.tune.tuner import TuningResult, tune
from penstock.plugins import is_pipeline_file
from penstock.runs import Run

MOST_INSTANCES: Final = 16  # of the default space
TABLE: Final = "settings.csv"
COLUMNS: Final = (
    "settings", "slo", "throughput_per_s", "p99_ms", "offered_per_s", "device", "workers", "batch", "optimisation",
    "concurrency", "requests", "payload_bytes",
)  # fmt: skip


class TuneJob(Struct, frozen=True, kw_only=True):
    """A checked job. `folder` receives the results, `file` the chosen settings; `samples` guard the accuracy."""

    tuned: TunedModel
    space: SearchSpace
    slo: Slo
    folder: Path
    file: TunedFile | None
    samples: list[AccuracySample] | None
    flags: dict[str, Any]


def read_job(target: str, flags: dict[str, Any]) -> TuneJob:
    """The job that the flags describe. Raises ConfigError."""
    slo = parse_slo(flags["slo"])
    if not any(part.name == "error" for part in slo.objectives):
        # a server that rejects most requests is quick with the rest
        slo = parse_slo(f"{slo.text},error<={MOST_ERRORS:.0%}")
    if slo.latency_s is None:
        raise ConfigError(f'--slo "{flags["slo"]}" bounds no latency; expected for instance "p99<=100ms"')
    batch_and_instances = f"batch=1..32,instances=1..{min(MOST_INSTANCES, max(2, usable_cores()))}"
    strategy(flags["search"])
    tuned, source = _tuned_model(target, flags)
    sizes = tuned.model.batching.sizes
    listed = list(sizes) if isinstance(sizes, tuple) else []
    default = batch_and_instances.partition(",")[2] if listed else batch_and_instances
    space = parse_space(default if flags["space"] is None else flags["space"])
    if listed and space.values("batch") and not space.values("sizes"):
        raise ConfigError(
            f"--space: found batch, but the model has batching.sizes = {listed}, whose last one is the largest"
            " batch; leave batch out, or add sizes=auto"
        )
    if flags["gpu"] and not space.values("device"):
        space = parse_space(f"{space.text},device=cpu,cuda")
    devices = tuple(map(str, space.values("device")))
    check_devices(msgspec.structs.replace(tuned.model, devices=devices or tuned.model.devices))
    folder = flags["output"] or Path(f"tune-{tuned.name}")
    return TuneJob(
        tuned=tuned,
        space=space,
        slo=slo,
        folder=folder,
        file=None if flags["write"] is None else TunedFile(flags["write"], tuned.section, tuned.model, source),
        samples=None if flags["accuracy_check"] is None else read_samples(flags["accuracy_check"]),
        flags=flags,
    )


def _tuned_model(target: str, flags: dict[str, Any]) -> tuple[TunedModel, str | None]:
    """(the model to tune, the TOML that defines it if there is one). Raises ConfigError."""
    if "://" in target or target.endswith(".mar"):
        what = "a running server" if "://" in target else "a TorchServe archive"
        raise ConfigError(
            f"TARGET '{target}' is {what}; expected a target of penstock serve: tune starts its own servers"
        )
    toml, models = split_targets((target,))
    options = read_options(flags["options"])
    if options and not models:
        raise ConfigError(f"--option is for a model named on the command line; for the models of {toml} use --set")
    base = {"models": {name: {**keys, **({"options": options} if options else {})} for name, keys in models.items()}}
    pipelines = [keys["target"] for keys in models.values() if is_pipeline_file(keys["target"])]
    config = load_config(toml, env={}, sets=flags["sets"], base=base, pipelines=pipelines)
    section = _section(target, list(config.models), flags["model"])
    sets = [*flags["sets"], *(f'models."{section}".options.{text}' for text in flags["options"])]
    tuned = TunedModel(
        target=target,
        section=section,
        model=config.models[section],
        sets=tuple(sets),
        token=read_token(flags["token_file"]),
        tls_cert=config.server.tls_cert,
    )
    return tuned, toml


def _section(target: str, known: list[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in known:
        raise ConfigError(f"--model {wanted}: {target} has {', '.join(known) or 'no models'}{nearest(wanted, known)}")
    if wanted is None and len(known) != 1:
        raise ConfigError(f"{target} has {', '.join(known) or 'no models'}; choose the one to tune with --model NAME")
    return wanted or known[0]


def identity(job: TuneJob) -> dict[str, str]:
    """What must be equal for a search to resume from earlier measurements, including the app's file and the requests.

    Raises ConfigError for a file that cannot be read.
    """
    flags, model = job.flags, job.tuned.model
    files = [model.target.rpartition(":")[0] or model.target, *([model.weights] if model.weights else [])]
    return {
        "target": job.tuned.target,
        "model": hashlib.sha256(msgspec.json.encode([model, job.tuned.sets])).hexdigest()[:16],
        "file": " ".join(_digest(Path(file)) for file in files),
        "space": job.space.text,
        "slo": job.slo.text,
        "search": f"{flags['search']} {flags['effort']}",
        "seed": str(flags["seed"]),
        "data": f"{flags['data']} {_digest(Path(flags['data'])) if flags['data'] else ''}".strip(),
    }


def _digest(path: Path) -> str:
    """The digest of a file or of all files in a folder; "" if there is none."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256()
    for each in files:
        try:
            with each.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{each}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16] if files else ""


# ---- the run


def _progress(job: TuneJob, results: Results, shown: Run) -> RunObserver:
    """Records, shows and prints each run, new or replayed, with the settings of the space and the time so far: "3 of
    12, 2:10 of 5:00"."""
    budget_s, seen = job.flags["budget"], set[CandidateSettings]()

    def observe(settings: CandidateSettings, measured: MeasuredRun, replayed: bool, spent_s: float) -> None:
        run = measured.run
        if settings in job.space:
            seen.add(settings)
        if not replayed:
            results.append(run)
        why = measured.violation(job.slo) if run.load.mode == "open" else None
        found = f"INVALID: {run.invalid[0]}" if run.invalid else why or "met"
        so_far = f"{len(seen)} of {len(job.space)}, {_clock(spent_s)}{f' of {_clock(budget_s)}' if budget_s else ''}"
        shown.write(len(seen), len(job.space), f"{so_far}: {settings}")
        again = " (measured before)" if replayed else ""
        click.echo(f"{so_far}: {settings}: {run.load.label}: {run.throughput:,.4g}/s, {found}{again}", err=True)

    return observe


def _clock(seconds: float) -> str:
    """Minutes and seconds: 2:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run_job(target: str, flags: dict[str, Any]) -> int:
    """Runs `penstock tune` and returns its exit status. Raises PenstockError."""
    job = read_job(target, flags)
    if not flags["resume"]:
        _delete_results(job.folder)
    libraries = ("torch", "onnxruntime", "numpy", "optuna")
    origin, measured = Origin.of_process("tune", job.tuned.target, job.slo.text, flags["seed"], libraries), True
    try:
        with (
            Results.open(job.folder, origin, resume=True) as results,
            Journal.open(job.folder / JOURNAL, identity(job)) as journal,
        ):
            if n := len(journal):
                click.echo(f"resumes in {job.folder}: {n} measurements exist (--no-resume starts over)", err=True)
            click.echo(f"{job.tuned.name}: {len(job.space)} settings, search {job.flags['search']}", err=True)
            _warn_of_short_budget(job)
            try:
                result, tuned, payload_bytes = run_search(job, results, journal, origin.line)
            finally:
                measured = bool(len(journal) or results.measurements)
    except BaseException:
        if not measured:  # the next attempt may have other flags
            _delete_results(job.folder)
        raise
    return _report(msgspec.structs.replace(job, tuned=tuned), result, payload_bytes)


def run_search(job: TuneJob, results: Results, journal: Journal, command: str) -> tuple[TuningResult, TunedModel, int]:
    """(the result, the model that was tuned, the mean size of the requests)."""
    flags = job.flags
    app = AppUnderTest(
        job.tuned,
        job.space,
        job.slo,
        samples=job.samples,
        tolerance=flags["tolerance"],
        data=flags["data"],
        seed=flags["seed"],
        warm_s=flags["warmup"],
    )
    try:
        app.start()
        with Run("tune", job.tuned.target) as shown:
            result = tune(
                app,
                job.space,
                job.slo,
                search=flags["search"],
                budget_s=flags["budget"] or math.inf,
                seed=flags["seed"],
                effort=EFFORTS[flags["effort"]],
                price=flags["price"],
                command=command,
                journal=journal,
                observer=_progress(job, results, shown),
            )
        return result, app.tuned, app.payload_bytes
    finally:
        app.close()


def _warn_of_short_budget(job: TuneJob) -> None:
    """Warns of a budget that is too short for the proof, however fast the model is."""
    least_s, budget_s = EFFORTS[job.flags["effort"]].proof_s(math.inf, job.slo), job.flags["budget"]
    if budget_s and budget_s < least_s:
        click.echo(
            f"--budget {budget_s:g}s ends before anything is proven: the runs of the proof alone take {least_s:g}s "
            f"or more with --effort {job.flags['effort']}",
            err=True,
        )


# ---- the result


def _report(job: TuneJob, result: TuningResult, payload_bytes: int) -> int:
    """Writes the reports and the configuration, prints the verdict, and returns the exit status."""
    origin, measurements = read(job.folder)
    table = settings_table(measurements, job.slo, job.tuned.model, payload_bytes)
    verdict = msgspec.structs.replace(result.verdict, table=table)
    report, files = compose(origin, measurements, verdict), {VERDICT: verdict, TABLE: as_csv(table)}
    text, page = publish(job.folder, report, lambda: draw(measurements, origin.slo, verdict), files)
    if job.flags["json"]:
        click.echo(json_text(verdict), nl=False)
    else:
        click.echo(markdown(Report(report.title, report.verdict, [])))
        click.echo("\n".join(align(table)))
    click.echo(f"full report: {text} and {page}", err=True)
    _write(job, result, page)
    if result.ended == "interrupted":
        return INTERRUPTED
    return FAILED if result.unproven else 0


def _write(job: TuneJob, result: TuningResult, page: Path) -> None:
    if result.unproven:
        nothing = "no settings are recommended" if job.file is None else f"nothing is written to {job.file.path}"
        click.echo(f"{nothing}: {result.unproven}", err=True)
    if result.unproven or job.file is None:
        return
    assert result.chosen is not None, "proven"
    note = (
        f"{job.slo.text} was met at {result.rate:g} requests/s on {datetime.now(UTC):%Y-%m-%d}\n"
        f"{result.chosen}; {page} has the other settings"
    )
    job.file.write(job.tuned.keys(result.chosen), note)
    click.echo(f"written: {job.file.path}; serve it: penstock serve {shlex.quote(job.flags['write'])}", err=True)


def _delete_results(folder: Path) -> None:
    """Deletes the files of a run, and the folder if that leaves it empty."""
    for name in (RUN, RECORDS, SUMMARY, JOURNAL, REPORT, PAGE, VERDICT, TABLE):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


# ---- the table of settings


def settings_table(runs: Sequence[Measurement], slo: Slo, model: ModelConfig, payload_bytes: int) -> list[list[str]]:
    """The heading, then a row for each of the settings, most throughput first.

    A row shows the valid run at the largest rate that met the SLO, else the one at the smallest rate. Closed loops
    have no row, because they only explore; a run that a longer one contradicts is ignored, as in the search. `model` is
    the baseline; `concurrency` is the mean number of requests in flight.
    """
    by_label: dict[str, list[Measurement]] = {}
    for run in runs:
        if run.load.mode == "open" and not run.invalid:
            by_label.setdefault(run.label, []).append(run)
    chosen = [_representative(found, slo) for found in by_label.values()]
    ordered = sorted(chosen, key=lambda found: (not found[1], -found[0].throughput))
    return [list(COLUMNS), *(_row(run, met, model, payload_bytes) for run, met in ordered)]


def _representative(runs: Sequence[Measurement], slo: Slo) -> tuple[Measurement, bool]:
    """(the run to show, whether it met the SLO)."""
    trial = TuningTrial(CandidateSettings())
    for run in runs:
        trial.add(MeasuredRun(run=run, cost_s=0.0), slo)
    best = trial.good or trial.bad
    assert best is not None, "each run either meets or violates the SLO"
    return best.run, best is trial.good


def _row(run: Measurement, met: bool, model: ModelConfig, payload_bytes: int) -> list[str]:
    settings = parse_settings(run.label)
    latency = run.latency
    in_flight = run.throughput * (latency.mean_s or 0.0)  # Little's law
    optimisation = (settings.get("precision") or model.precision, settings.get("optimize") or model.optimize)
    return [
        str(settings),
        "met" if met else "missed",
        f"{run.throughput:.4g}",
        "" if latency.p99_s is None else f"{latency.p99_s * 1e3:.4g}",
        f"{run.load.rate:g}",
        str(settings.get("device") or ",".join(model.devices)),
        shown(settings.get("instances") or model.instances),
        shown(settings.get("batch") or model.batching.max_batch_size),
        " ".join(str(value) for value in optimisation if value not in (None, "none")) or "none",
        f"{in_flight:.3g}",
        str(run.requests),
        str(payload_bytes),
    ]
