"""The job of `penstock tune`: its flags, read and checked as far as possible before anything starts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from penstock.errors import ConfigError, nearest

if TYPE_CHECKING:
    from penstock.perf.bench.slo import Slo
    from penstock.perf.tune.accuracy import Sample
    from penstock.perf.tune.config_file import TunedFile
    from penstock.perf.tune.server import TunedModel
    from penstock.perf.tune.space import SearchSpace

MOST_INSTANCES: Final = 16  # of the default space


class TuneJob(Struct, frozen=True, kw_only=True):
    """A checked job. `folder` receives the results, `file` the chosen settings; `samples` guard the accuracy."""

    tuned: TunedModel
    space: SearchSpace
    slo: Slo
    folder: Path
    file: TunedFile | None
    samples: list[Sample] | None
    flags: dict[str, Any]


def read_job(target: str, flags: dict[str, Any]) -> TuneJob:
    """The job that the flags describe. Raises ConfigError."""
    from penstock.perf.bench.measurement import MOST_ERRORS
    from penstock.perf.bench.slo import parse_slo
    from penstock.perf.tune.accuracy import read_samples
    from penstock.perf.tune.config_file import TunedFile
    from penstock.perf.tune.search import strategy
    from penstock.perf.tune.space import parse_space

    slo = parse_slo(flags["slo"])
    if not any(part.name == "error" for part in slo.objectives):
        # a server that rejects most requests answers the rest quickly
        slo = parse_slo(f"{slo.text},error<={MOST_ERRORS:.0%}")
    if slo.latency_s is None:
        raise ConfigError(f'--slo "{flags["slo"]}" bounds no latency; expected for instance "p99<=100ms"')
    space = parse_space(default_space() if flags["space"] is None else flags["space"])
    if flags["gpu"] and not any(p.name == "device" for p in space.parameters):
        space = parse_space(f"{space.text},device=cpu,cuda")
    strategy(flags["search"])
    tuned, source = _tuned_model(target, flags)
    _check_devices(tuned, space)
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


def default_space() -> str:
    """The space without --space: batch sizes, and up to one instance per core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"batch=1..32,instances=1..{min(MOST_INSTANCES, max(2, cores))}"


def _tuned_model(target: str, flags: dict[str, Any]) -> tuple[TunedModel, str | None]:
    """(the model to tune, the TOML that defines it if there is one). Raises ConfigError."""
    from penstock.client.endpoint import read_token
    from penstock.config.load import load_config
    from penstock.config.targets import read_options, split_targets
    from penstock.perf.tune.server import TunedModel
    from penstock.plugins import is_pipeline_file

    if "://" in target or target.endswith(".mar"):
        what = "a running server" if "://" in target else "a TorchServe archive"
        raise ConfigError(
            f"TARGET '{target}' is {what}; expected a target of penstock serve: tune starts its own servers"
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


def _check_devices(tuned: TunedModel, space: SearchSpace) -> None:
    """Raises ConfigError for a device that this machine lacks."""
    from penstock.core.worker.devices import visible_gpus
    from penstock.perf.tune.server import missing_device

    devices = [str(v) for p in space.parameters if p.name == "device" for v in p.values]
    if wrong := missing_device(devices or tuned.model.devices, visible_gpus()):
        raise ConfigError(wrong)


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
