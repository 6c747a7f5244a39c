"""What `penstock tune` is asked, read from its flags and checked as far as it can be before anything is started."""

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
    from penstock.perf.tune.config import TunedFile
    from penstock.perf.tune.served import Subject
    from penstock.perf.tune.space import Space

MOST_INSTANCES: Final = 16  # of the space that is searched where none is named


class Job(Struct, frozen=True, kw_only=True):
    """What was asked. `folder` takes the results, `file` what is found; `samples` guard the accuracy."""

    subject: Subject
    space: Space
    slo: Slo
    folder: Path
    file: TunedFile | None
    samples: list[Sample] | None
    flags: dict[str, Any]


def read_job(target: str, flags: dict[str, Any]) -> Job:
    """The job that the flags describe. Raises ConfigError."""
    from penstock.perf.bench.measurement import MOST_ERRORS
    from penstock.perf.bench.slo import parse_slo
    from penstock.perf.tune.accuracy import read_samples
    from penstock.perf.tune.config import TunedFile
    from penstock.perf.tune.search import strategy
    from penstock.perf.tune.space import parse_space

    slo = parse_slo(flags["slo"])
    if not any(part.name == "error" for part in slo.objectives):
        # a server that refuses most requests answers the rest soon
        slo = parse_slo(f"{slo.text},error<={MOST_ERRORS:.0%}")
    if slo.latency_s is None:
        raise ConfigError(f'--slo "{flags["slo"]}" bounds no latency; expected for instance "p99<=100ms"')
    space = parse_space(default_space() if flags["space"] is None else flags["space"])
    if flags["gpu"] and not any(knob.name == "device" for knob in space.knobs):
        space = parse_space(f"{space.text},device=cpu,cuda")
    strategy(flags["search"])
    subject, source = read_subject(target, flags)
    _check_devices(subject, space)
    folder = flags["output"] or Path(f"tune-{subject.name}")
    return Job(
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
    from penstock.client.tokens import read_token
    from penstock.config.load import load_config
    from penstock.config.targets import read_options, split_targets
    from penstock.perf.tune.served import Subject
    from penstock.plugins import is_pipeline_file

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
        target=target,
        section=section,
        model=model,
        sets=tuple(sets),
        token=read_token(flags["token_file"]),
        tls_cert=config.server.tls_cert,
    ), toml


def _section(target: str, known: list[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in known:
        raise ConfigError(f"--model {wanted}: {target} has {', '.join(known) or 'no models'}{nearest(wanted, known)}")
    if wanted is None and len(known) != 1:
        raise ConfigError(f"{target} has {', '.join(known) or 'no models'}; choose the one to tune with --model NAME")
    return wanted or known[0]


def _check_devices(subject: Subject, space: Space) -> None:
    """Raises ConfigError for a device that this machine has not."""
    from penstock.core.worker.devices import visible_gpus
    from penstock.perf.tune.served import reachable

    turned = [str(v) for knob in space.knobs if knob.name == "device" for v in knob.values]
    if wrong := reachable(turned or subject.model.devices, visible_gpus()):
        raise ConfigError(wrong)


# ---- where a search may be gone on with


def identity(job: Job) -> dict[str, str]:
    """What must be the same for earlier measurements to count: also the app's own file, and what is sent. Raises
    ConfigError for a file that cannot be read."""
    flags, model = job.flags, job.subject.model
    files = [model.target.rpartition(":")[0] or model.target, *([model.weights] if model.weights else [])]
    return {
        "target": job.subject.target,
        "model": hashlib.sha256(msgspec.json.encode([model, job.subject.sets])).hexdigest()[:16],
        "file": " ".join(_digest(Path(file)) for file in files),
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
    for each in files:
        try:
            with each.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{each}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16] if files else ""
