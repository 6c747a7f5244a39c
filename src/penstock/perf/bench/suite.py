"""The runs of a benchmark suite: what is needed is looked up before the first, and each has a server of its own.

A model is registered with its batch size, delay and workers, and the server is asked whether it took them, before
anything is measured: TorchServe's suite sends a delay under a name that its server does not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlencode, urlsplit

import msgspec
from msgspec import Struct, structs

from penstock.client.endpoint import Endpoint, parse_url
from penstock.core.worker.devices import visible_gpus
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Load
from penstock.perf.bench.payload import RANDOM, payloads, request_of
from penstock.perf.bench.server import START_S, Reply, ServerProcess, fetch
from penstock.perf.bench.suite_yaml import Processor, Registration, SuiteCase, points
from penstock.perf.bench.target import Target, open_target
from penstock.plugins import is_whole_file

NAME: Final = "benchmark"  # of the model on its server: that of the file may be no name at all
_ROOM: Final = 2**20  # bytes of a request that are not its payload
_QUEUE: Final = 100  # requests that may wait, as TorchServe has it; a closed loop of more clients needs more


class SuiteOptions(Struct, frozen=True, kw_only=True):
    """What the command line says to all runs. `data` and `requests` take the place of what the files say."""

    store: Path | None = None
    download: Callable[[str, Path], Path] | None = None
    data: str | None = None
    requests: int | None = None
    skip_missing_hardware: bool = False


class SuiteJob(Struct, frozen=True, kw_only=True):
    """One mode of a model, looked up: `source` is an archive on this machine, or a target of `penstock serve`."""

    case: SuiteCase
    source: str
    data: str | None = None

    @property
    def points(self) -> list[Registration]:
        """All ways in which it is registered."""
        return points(self.case)


def prepare(
    cases: Sequence[SuiteCase], wishes: SuiteOptions, downloads: Path, gpus: int | None = None
) -> tuple[list[SuiteJob], list[str]]:
    """What is run, and what of the files is not, in words; before anything is started.

    Archives behind http(s) are loaded into the folder `downloads`. `gpus` is how many there are. Raises ConfigError,
    ArchiveError: a file that is not there, a GPU that is not there.
    """
    gpus = visible_gpus() if gpus is None else gpus
    kept: list[SuiteCase] = []
    notes: list[str] = []
    for case in cases:
        there = tuple(p for p in case.processors if gpus >= _needed(p))
        for processor in (p for p in case.processors if p not in there):
            found = f"{case.text} asks for {processor.text}, and this machine has {gpus or 'none'}"
            if not wishes.skip_missing_hardware:
                raise ConfigError(f"{case.where}: {found}; take it out, or go on without by --skip-missing-hardware")
            notes.append(f"{found}: left out")
        if there:
            kept.append(structs.replace(case, processors=there, requests=wishes.requests or case.requests))
    if not kept:
        raise ConfigError(f"nothing is left to run: {'; '.join(notes) or 'no model is named'}")
    return [_job(case, wishes, downloads) for case in kept], notes


def digest(jobs: Sequence[SuiteJob]) -> str:
    """Tells whether two suites ask for the same runs."""
    said = [
        (structs.replace(job.case, where="", folder=Path()), "" if _is_remote(job.case.url) else job.source, job.data)
        for job in jobs
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def load_of(job: SuiteJob, clients: int, seed: int) -> Load:
    """The closed loop that the suite's files mean."""
    return Load(mode="closed", concurrency=clients, requests=job.case.requests, seed=seed)


def requests_of(job: SuiteJob, target: Target, seed: int) -> list[bytes]:
    """The messages that are sent in turn. Raises ConfigError."""
    found = payloads(job.data, target, seed)
    if job.case.content_type is not None:
        found = [structs.replace(payload, content_type=job.case.content_type) for payload in found]
    return [request_of(target, payload) for payload in found]


@contextmanager
def serving(job: SuiteJob, point: Registration) -> Iterator[Target]:
    """The model on a server of its own, as the point has it; both end with the context. Blocks.

    Raises PenstockError if it does not start, or does not have the settings that were asked for.
    """
    with _archive(job, point) if _is_archive(job.source) else _target(job, point) as target:
        yield target


# ---- looked up beforehand


def _needed(processor: Processor) -> int:
    return 1 if processor.gpus == "all" else processor.gpus


def _job(case: SuiteCase, wishes: SuiteOptions, downloads: Path) -> SuiteJob:
    source = _source(case, wishes, downloads)
    data = wishes.data or case.input
    if data not in (None, RANDOM):
        data = _file(case, str(data), "input") if wishes.data is None else _typed_file(wishes.data)
    if data is None and _is_archive(source):
        raise ConfigError(f"{case.where}: {case.text} has no input, and an archive tells no example; give --data FILE")
    return SuiteJob(case=case, source=source, data=data)


def _source(case: SuiteCase, wishes: SuiteOptions, downloads: Path) -> str:
    """Where the model is: the archive's path, or a target of `penstock serve` that begins with a whole path."""
    if _is_remote(case.url):
        return str(_download(case, wishes, downloads))
    if case.url.startswith("file://"):
        return _file(case, unquote(urlsplit(case.url).path), "url")
    module, colon, attribute = case.url.rpartition(":")
    if colon and not is_whole_file(case.url):
        return f"{_file(case, module, 'url')}:{attribute}" if module.endswith(".py") else case.url
    if wishes.store is not None:
        for stored in (wishes.store / case.url, wishes.store / f"{case.url}.mar"):
            if stored.exists():
                return str(stored.resolve())
    return _file(case, case.url, "url")


def _is_remote(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _download(case: SuiteCase, wishes: SuiteOptions, downloads: Path) -> Path:
    """The archive, in its own folder: archives of different URLs may share a name, and cases may share a URL."""
    if wishes.download is None:
        raise ConfigError(f"{case.where}: {case.url}: archives cannot be downloaded here; give a file")
    folder = downloads / hashlib.sha256(case.url.encode()).hexdigest()[:12]
    if folder.exists():
        return next(folder.iterdir())
    folder.mkdir()
    return wishes.download(case.url, folder)


def _typed_file(name: str) -> str:
    if not Path(name).exists():
        raise ConfigError(f"--data {name}: no such file or folder")
    return str(Path(name).resolve())


def _file(case: SuiteCase, name: str, key: str) -> str:
    """The path of what a file of the suite names, from its own folder or from here. Raises ConfigError."""
    for found in (case.folder / name, Path(name)):
        if found.exists():
            return str(found.resolve())
    store = ", nor in --model-store" if key == "url" else ""
    raise ConfigError(f"{case.where}: {case.text}: {key}: no file '{name}' in {case.folder.resolve()}, nor here{store}")


def _is_archive(source: str) -> bool:
    return source.endswith((".mar", ".tar.gz", ".tgz")) or Path(source).is_dir()


# ---- archives, served as TorchServe does


@contextmanager
def _archive(job: SuiteJob, point: Registration) -> Iterator[Target]:
    path = Path(job.source)
    properties = {
        "job_queue_size": str(max(_QUEUE, *job.case.concurrency)),
        "max_request_size": str(max(6553500, _largest(job.data) + _ROOM)),
        "metrics_mode": "prometheus",  # a line for each request in a log is not what is measured
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


def _register(management: Endpoint, url: str, point: Registration) -> None:
    """Registers the archive, and asks what came of it. Raises PenstockError."""
    keys = {
        "url": url,
        "model_name": NAME,
        "batch_size": point.batch_size,
        "max_batch_delay": point.case.batch_delay_ms,
        "initial_workers": point.workers,
        "synchronous": "true",
    }
    _well(point, fetch(management, "POST", f"/models?{urlencode(keys)}", timeout_s=START_S))
    (said,) = _well(point, fetch(management, "GET", f"/models/{NAME}"))
    ready = sum(worker["status"] == "READY" for worker in said["workers"])
    _took(point, {"batch_size": said["batchSize"], "batch_delay": said["maxBatchDelay"], "workers": ready})


def _largest(data: str | None) -> int:
    path = Path(data or "")
    files = [path] if path.is_file() else path.rglob("*") if data and path.is_dir() else []
    return max((file.stat().st_size for file in files if file.is_file()), default=0)


# ---- anything else, served natively


@contextmanager
def _target(job: SuiteJob, point: Registration) -> Iterator[Target]:
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
        assert target.management is not None, "of a server that was started for it"
        (said,) = _well(point, fetch(target.management, "GET", f"/models/{NAME}"))["versions"]
        _took(point, {"batch_size": said["max_batch_size"], "workers": said["ready_instances"]})
        yield target


# ---- both


def _well(point: Registration, reply: Reply) -> Any:
    """What the server answers. Raises PenstockError."""
    if not reply.ok:
        raise PenstockError(f"{point.settings}: the server does not take it: status {reply.status}: {reply.text}")
    return reply.json()


def _took(point: Registration, found: dict[str, int]) -> None:
    """Raises PenstockError where the server has other settings than the point."""
    wanted = {"batch_size": point.batch_size, "batch_delay": point.case.batch_delay_ms, "workers": point.workers}
    for key, value in found.items():
        if value != wanted[key]:
            raise PenstockError(f"{point.settings}: asked for {key} {wanted[key]}, and the server has {value}")
