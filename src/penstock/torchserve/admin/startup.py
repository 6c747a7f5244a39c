"""The models that a server has from its start on: those of `load_models`, or those of a snapshot."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from penstock.core.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.torchserve.admin.administration import Administrator
from penstock.torchserve.admin.backend import ModelsBackend
from penstock.torchserve.admin.devices import usable_gpus
from penstock.torchserve.admin.models import Models, Version
from penstock.torchserve.admin.opening import Opener
from penstock.torchserve.admin.snapshots import Snapshots
from penstock.torchserve.admin.tokens import Tokens
from penstock.torchserve.archive.store import ModelStore
from penstock.torchserve.config.properties import Properties, read_properties
from penstock.torchserve.protocol.api import Registration

log = logging.getLogger("penstock.compat")


class Served(Struct, frozen=True):
    """What front-ends are handed, and what the program calls: `load_startup`, `administrator.stop` and `.close`."""

    administrator: Administrator
    backend: ModelsBackend
    opener: Opener
    properties: Properties
    gpus: int
    most_workers: int
    tokens: Tokens | None = None  # to be published when the server listens, and removed at its end


def administer(
    engine: Engine,
    properties: Properties,
    *,
    most_workers: int,
    file: str | None = None,
    snapshots: bool = True,
    folder: Path | None = None,
    cache: Path | None = None,
    model_metrics: Mapping[str, Any] | None = None,
) -> Served:
    """The administration of one server; its tokens are not published yet.

    `file` is what the properties were read from, `folder` where the file of tokens belongs: the working directory.
    `cache` is where archives are unpacked, `model_metrics` that section of metrics.yaml, None for TorchServe's own.
    Raises ConfigError, ArchiveError.
    """
    store = None if properties.model_store is None else Path(properties.model_store)
    models = Models()
    opener = Opener(ModelStore(store, allowed_urls=properties.allowed_urls, cache=cache), properties, model_metrics)
    gpus = usable_gpus(properties.number_of_gpu)
    tokens = None
    if not properties.disable_token_authorization:
        tokens = Tokens(folder or Path.cwd(), properties.token_expiration_min * 60)
    administrator = Administrator(
        engine,
        models,
        opener,
        properties,
        gpus=gpus,
        most_workers=most_workers,
        tokens=tokens,
        snapshots=Snapshots(Path(properties.log_location), _told(properties, file)) if snapshots else None,
    )
    administrator.opening = 1 if properties.load_models or properties.model_snapshot else 0
    return Served(administrator, ModelsBackend(engine, models), opener, properties, gpus, most_workers, tokens)


def _told(properties: Properties, file: str | None) -> dict[str, str]:
    """The file's keys and values as they stand, and what the command line may have said beside."""
    values = {} if file is None else {key: found.value for key, found in read_properties(file).items()}
    if properties.model_store is not None:
        values["model_store"] = os.path.abspath(properties.model_store)
    for key in ("enable_model_api", "disable_token_authorization"):
        if getattr(properties, key):
            values[key] = "true"
    return values


class _Wanted(Struct, frozen=True):
    registration: Registration
    said: Mapping[str, Any]
    default: bool = False
    weight: float | None = None  # of its traffic


async def load_startup(served: Served) -> int:
    """Loads the models, all at once, and returns when each has reported: how many were wanted and are not there.

    One that cannot be opened is logged, and left out; one that does not load stays, and is tried again and again. Of
    the versions of one model the first is the default, or the one that the snapshot says.
    """
    wanted = await _wanted(served)
    served.administrator.opening = len(wanted)
    changes = (served.administrator.change(_load(served, each)) for each in wanted)
    # What no error of ours tells is logged by `change`; it keeps no other model from being served.
    ended = await asyncio.gather(*changes, return_exceptions=True)
    found = [each if isinstance(each, Version) else None for each in ended]
    defaults: dict[str, Version] = {}
    weights: dict[str, dict[str, float]] = {}
    for each, version in zip(wanted, found, strict=True):
        if version is None or version.gone:
            continue
        if each.default or version.name not in defaults:
            defaults[version.name] = version
        if each.weight:
            weights.setdefault(version.name, {})[version.version] = each.weight
    for version in defaults.values():
        served.administrator.prefer(version, weights.get(version.name, {}))
    served.administrator.snapshot("startup")
    return sum(version is None for version in found)


async def _load(served: Served, wanted: _Wanted) -> Version | None:
    properties = served.properties
    workers = properties.default_workers_per_model or min(served.gpus or _cores(), served.most_workers)
    url = wanted.registration.url
    try:
        try:
            version = await served.administrator.claim(
                wanted.registration, wanted.said, workers=workers, at_startup=True
            )
        finally:
            served.administrator.opening -= 1
        if version.min_workers:
            await served.administrator.start(version, keep=True)
    except PenstockError as e:
        log.error("Failed to load model: %s: %s%s", url, e.message, f"\n{e.detail}" if e.detail else "")
        return None
    log.info("loaded model=%s version=%s workers=%d", version.name, version.version, version.up)
    return version


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def _wanted(served: Served) -> Sequence[_Wanted]:
    properties = served.properties
    if properties.model_snapshot is not None:
        return _of_snapshot(properties.model_snapshot)
    listed = properties.load_models
    if [each.lower() for each in listed] == ["all"]:
        names = await asyncio.to_thread(served.opener.names)
        return [_Wanted(Registration(url=name), {}) for name in names]
    pairs = (each.partition("=") if "=" in each else ("", "", each) for each in listed)
    return [
        _Wanted(Registration(url=url.strip(), model_name=name.strip() or None), {}) for name, _, url in pairs if url
    ]


def _of_snapshot(snapshot: Mapping[str, Any]) -> list[_Wanted]:
    """The versions of a snapshot; what is no description of one is logged, and left out."""
    wanted: list[_Wanted] = []
    models = snapshot.get("models")
    for name, versions in (models if isinstance(models, dict) else {}).items():
        for version, state in (versions if isinstance(versions, dict) else {}).items():
            url = (state.get("modelUrl") or state.get("marName")) if isinstance(state, dict) else None
            if not isinstance(url, str):
                log.error("snapshot model=%s version=%s: found no marName, so it is left out", name, version)
                continue
            handler, runtime = state.get("handler"), state.get("runtimeType")
            registration = Registration(
                url=url,
                model_name=name,
                handler=handler if isinstance(handler, str) else None,
                runtime=runtime if isinstance(runtime, str) else None,
            )
            weight = state.get("traffic")
            wanted.append(
                _Wanted(
                    registration,
                    _counts(state),
                    state.get("defaultVersion") is True,
                    weight if isinstance(weight, (int, float)) and 0 <= weight < math.inf else None,
                )
            )
    if not wanted:
        log.warning("Model snapshot is empty. Starting without initial models.")
    return wanted


def _counts(state: Mapping[str, Any]) -> dict[str, int]:
    """The settings of a state; numbers of earlier days may be negative, which says nothing."""
    keys = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")
    least = {"batchSize": 1, "responseTimeout": 1, "startupTimeout": 1}
    return {key: n for key in keys if type(n := state.get(key)) is int and n >= least.get(key, 0)}
