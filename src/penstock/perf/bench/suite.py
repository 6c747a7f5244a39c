"""The runs of a benchmark suite: everything they need is checked before the first, and each has its own server.

A model is registered with its batch size, delay and workers, and the server is asked for its settings before anything
is measured: TorchServe's own suite sends the delay under a name that its server ignores.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlencode, urlsplit

import click
import msgspec
from msgspec import Struct, structs

from penstock.client.endpoint import Endpoint, parse_url
from penstock.client.response import HttpResponse
from penstock.core.worker.devices import visible_gpus
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.document import PAGE, REPORT, as_text
from penstock.perf.bench.document import publish as publish_report
from penstock.perf.bench.load_run import run_async
from penstock.perf.bench.measurement import Load, Measurement, Slo
from penstock.perf.bench.report import in_a_line
from penstock.perf.bench.results import NotWritten, Results
from penstock.perf.bench.run import measure
from penstock.perf.bench.server import START_S, ServerProcess, fetch
from penstock.perf.bench.suite_report import AB_REPORT, ab_report, rows_of, suite_plots, suite_report
from penstock.perf.bench.suite_yaml import SuiteCase, SuitePoint, suite_points
from penstock.perf.bench.target import Target, open_target
from penstock.perf.bench.workload import RANDOM, check_of, payloads, request_of
from penstock.plugins import is_whole_file, located

NAME: Final = "benchmark"  # of the model on its server; the name of a file may not be valid
_OVERHEAD: Final = 2**20  # bytes of a request besides its payload
_QUEUE: Final = 100  # TorchServe's default queue; more clients need a larger one


class SuiteOptions(Struct, frozen=True, kw_only=True):
    """The command-line options for all runs. `data` and `requests` override the files. `download` loads an archive from
    an http(s) URL into a folder. `warm_s` None warms up until the load gets no faster."""

    slo: Slo = Slo()
    warm_s: float | None = None
    repeat: int = 1
    seed: int = 0
    model_store: Path | None = None
    download: Callable[[str, Path], Path] | None = None
    data: str | None = None
    requests: int | None = None
    skip_missing_hardware: bool = False


class SuiteJob(Struct, frozen=True, kw_only=True):
    """One mode of a model; `source` is an archive on this machine, or a target of `penstock serve`."""

    case: SuiteCase
    source: str
    data: str | None = None

    @property
    def points(self) -> list[SuitePoint]:
        return suite_points(self.case)


def prepare(
    cases: Sequence[SuiteCase], options: SuiteOptions, downloads: Path, gpus: int | None = None
) -> tuple[list[SuiteJob], list[str]]:
    """(the jobs, what is left out), before anything starts.

    Archives with http(s) URLs are downloaded into `downloads`. `gpus` is the number of GPUs. Raises ConfigError or
    ArchiveError for missing files and GPUs.
    """
    gpus = visible_gpus() if gpus is None else gpus
    kept: list[SuiteCase] = []
    notes: list[str] = []
    for case in cases:
        there = tuple(p for p in case.processors if gpus >= (1 if p.gpus == "all" else p.gpus))
        for processor in (p for p in case.processors if p not in there):
            found = f"{case.text} needs {processor.text}, and this machine has {gpus or 'none'}"
            if not options.skip_missing_hardware:
                raise ConfigError(f"{case.where}: {found}; remove it, or use --skip-missing-hardware")
            notes.append(f"{found}: left out")
        if there:
            kept.append(structs.replace(case, processors=there, requests=options.requests or case.requests))
    if not kept:
        raise ConfigError(f"nothing is left to run: {'; '.join(notes) or 'no model is named'}")
    return [_job(case, options, downloads) for case in kept], notes


def digest(jobs: Sequence[SuiteJob]) -> str:
    """A hash that identifies the runs of a suite."""
    content = [
        (structs.replace(job.case, where="", folder=Path()), "" if _is_remote(job.case.url) else job.source, job.data)
        for job in jobs
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def load_of(job: SuiteJob, clients: int, seed: int) -> Load:
    return Load(mode="closed", concurrency=clients, requests=job.case.requests, seed=seed)


def requests_of(job: SuiteJob, target: Target, seed: int) -> list[bytes]:
    """The messages to send in turn. Raises ConfigError."""
    found = payloads(job.data, target, seed)
    if job.case.content_type is not None:
        found = [structs.replace(payload, content_type=job.case.content_type) for payload in found]
    return [request_of(target, payload) for payload in found]


@contextmanager
def serving(job: SuiteJob, point: SuitePoint) -> Iterator[Target]:
    """The model on its own server with the point's settings, until the context ends. Blocks.

    Raises PenstockError if the server does not start, or does not accept the settings.
    """
    with _archive(job, point) if _is_archive(job.source) else _target(job, point) as target:
        yield target


# ---- checks before the runs


def _job(case: SuiteCase, options: SuiteOptions, downloads: Path) -> SuiteJob:
    source = _source(case, options, downloads)
    data = options.data or case.input
    if options.data not in (None, RANDOM):
        if not Path(str(data)).exists():
            raise ConfigError(f"--data {data}: no such file or folder")
        data = str(Path(str(data)).resolve())
    elif data not in (None, RANDOM):
        data = _file(case, str(data), "input")
    if data is None and _is_archive(source):
        raise ConfigError(f"{case.where}: {case.text} has no input, and an archive has no example; give --data FILE")
    return SuiteJob(case=case, source=source, data=data)


def _source(case: SuiteCase, options: SuiteOptions, downloads: Path) -> str:
    """The path of an archive, or a target of `penstock serve` with an absolute path."""
    if _is_remote(case.url):
        return str(_download(case, options, downloads))
    if case.url.startswith("file://"):
        return _file(case, unquote(urlsplit(case.url).path), "url")
    module, colon, attribute = case.url.rpartition(":")
    if colon and not is_whole_file(case.url):
        return f"{_file(case, module, 'url')}:{attribute}" if module.endswith(".py") else case.url
    if options.model_store is not None:
        for stored in (options.model_store / case.url, options.model_store / f"{case.url}.mar"):
            if stored.exists():
                return str(located(stored))
    return _file(case, case.url, "url")


def _is_remote(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _download(case: SuiteCase, options: SuiteOptions, downloads: Path) -> Path:
    """The archive, in its own folder: archives of different URLs may share a name, and cases may share a URL."""
    if options.download is None:
        raise ConfigError(f"{case.where}: {case.url}: archives cannot be downloaded here; give a file")
    folder = downloads / hashlib.sha256(case.url.encode()).hexdigest()[:12]
    if folder.exists():
        return next(folder.iterdir())
    folder.mkdir()
    return options.download(case.url, folder)


def _file(case: SuiteCase, name: str, key: str) -> str:
    """The path of a file named in the suite, relative to its folder or to the working directory. Raises ConfigError."""
    for found in (case.folder / name, Path(name)):
        if found.exists():
            return str(located(found))
    store = ", nor in --model-store" if key == "url" else ""
    raise ConfigError(f"{case.where}: {case.text}: {key}: no file '{name}' in {case.folder.resolve()}, nor here{store}")


def _is_archive(source: str) -> bool:
    return source.endswith((".mar", ".tar.gz", ".tgz")) or Path(source).is_dir()


# ---- archives, served by `penstock torchserve`


@contextmanager
def _archive(job: SuiteJob, point: SuitePoint) -> Iterator[Target]:
    path = Path(job.source)
    properties = {
        "job_queue_size": str(max(_QUEUE, *job.case.concurrency)),
        "max_request_size": str(max(6553500, _largest(job.data) + _OVERHEAD)),
        "metrics_mode": "prometheus",  # a log line per request would be measured too
    }
    if point.processor.gpus != "all":
        properties["number_of_gpu"] = str(point.processor.gpus)
    words = ["--model-store", str(path.parent)]
    with ServerProcess(words, verb="torchserve", management=True, properties=properties) as server:
        management = parse_url(server.urls["management"])
        _register(management, path.name, point)
        yield Target(
            text=job.case.url,
            endpoint=parse_url(server.urls["inference"]),
            model=NAME,
            path=f"/predictions/{NAME}",
            protocol="torchserve",
            metrics=parse_url(server.urls["metrics"]),
            management=management,
            pids=(server.pid,),
            server=server,
        )


def _register(management: Endpoint, url: str, point: SuitePoint) -> None:
    """Registers the archive and checks its settings. Raises PenstockError."""
    keys = {
        "url": url,
        "model_name": NAME,
        "batch_size": point.batch_size,
        "max_batch_delay": point.case.batch_delay_ms,
        "initial_workers": point.workers,
        "synchronous": "true",
    }
    _json(point, fetch(management, "POST", f"/models?{urlencode(keys)}", timeout_s=START_S))
    (found,) = _json(point, fetch(management, "GET", f"/models/{NAME}"))
    ready = sum(worker["status"] == "READY" for worker in found["workers"])
    _check_settings(point, {"batch_size": found["batchSize"], "batch_delay": found["maxBatchDelay"], "workers": ready})


def _largest(data: str | None) -> int:
    path = Path(data or "")
    files = [path] if path.is_file() else path.rglob("*") if data and path.is_dir() else []
    return max((file.stat().st_size for file in files if file.is_file()), default=0)


# ---- other models, served by `penstock serve`


@contextmanager
def _target(job: SuiteJob, point: SuitePoint) -> Iterator[Target]:
    gpus = point.processor.gpus
    devices = ["cpu"] if not gpus else ["cuda"] if gpus == "all" else [f"cuda:{i}" for i in range(gpus)]
    keys: dict[str, Any] = {
        "instances": point.workers,
        "devices": devices,
        "batching.max_batch_size": point.batch_size,
        "batching.max_hold_s": point.case.batch_delay_ms / 1e3,
        "batching.max_queue": max(_QUEUE, *job.case.concurrency, 16 * point.workers * point.batch_size),
    }
    sets = [f"models.{NAME}.{key}={msgspec.json.encode(value).decode()}" for key, value in keys.items()]
    with open_target(f"{NAME}={job.source}", sets=sets) as target:
        assert target.management is not None, "a server started for the run has one"
        (found,) = _json(point, fetch(target.management, "GET", f"/models/{NAME}"))["versions"]
        _check_settings(point, {"batch_size": found["max_batch_size"], "workers": found["ready_instances"]})
        yield target


def _json(point: SuitePoint, response: HttpResponse) -> Any:
    """The content of a response. Raises PenstockError for a refusal."""
    if not response.ok:
        raise PenstockError(f"{point.settings}: the server refuses: status {response.status}: {response.text}")
    return response.json()


def _check_settings(point: SuitePoint, found: dict[str, int]) -> None:
    """Raises PenstockError if the server has other settings than the point."""
    expected = {"batch_size": point.batch_size, "batch_delay": point.case.batch_delay_ms, "workers": point.workers}
    for key, value in found.items():
        if value != expected[key]:
            raise PenstockError(f"{point.settings}: expected {key} {expected[key]}, but the server has {value}")


# ---- the session


class SuiteSession:
    """All runs of a suite, repeat by repeat, so that a disturbance does not hit all repeats of one run."""

    def __init__(self, jobs: Sequence[SuiteJob], options: SuiteOptions, results: Results) -> None:
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
        try:
            self._results.append(run)
        finally:  # print only what is stored, because Ctrl-C may follow the line; print it even if the disk is full
            click.echo(
                f"[{number}/{self._count}] {point.case.text}, {point.settings}, {run.load.label}: {in_a_line(run)}"
            )

    def report(self, notes: Sequence[str]) -> bool:
        """Prints the recommendations, writes ab_report.csv and the reports; returns whether every run is valid."""
        folder, origin = self._results.folder, self._results.origin
        measurements = list(
            {_run_key(m): m for m in self._results.measurements}.values()
        )  # --resume repeats invalid runs
        suite_rows = rows_of([point for job in self._jobs for point in job.points], measurements)
        report = suite_report(suite_rows, origin, notes)
        click.echo(as_text(report.verdict))
        files = {AB_REPORT: ab_report(suite_rows, origin.machine)}
        publish_report(folder, report, lambda: suite_plots(suite_rows, measurements, origin.slo), files)
        click.echo(f"{folder}: {AB_REPORT}, {REPORT}, {PAGE}")
        return not any(m.invalid for m in measurements)


def _show_answered(seconds: float, answered: int) -> None:
    click.echo(f"{answered:,} answered in {seconds:.0f} s\r", nl=False, err=True)


def _run_key(m: Measurement) -> tuple[str, int, int]:
    return m.label, m.load.concurrency, m.repeat
