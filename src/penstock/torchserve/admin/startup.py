"""Builds the administration of a server, and loads the models of `load_models` or of a snapshot at startup."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from penstock.core.engine.engine import Engine
from penstock.core.os_threads import usable_cores
from penstock.errors import ConfigError, PenstockError
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.admin.archives import ArchiveOpener
from penstock.torchserve.admin.files import SavedVersion, Snapshots, Tokens, saved_versions
from penstock.torchserve.admin.model_spec import VersionRequest
from penstock.torchserve.admin.models import ModelsBackend, ModelVersion, VersionRegistry
from penstock.torchserve.admin.workers import usable_gpus
from penstock.torchserve.admin.workflows import Workflows
from penstock.torchserve.archive.store import ModelStore
from penstock.torchserve.config import Properties, read_properties
from penstock.torchserve.protocol.api import RegisterRequest

log = logging.getLogger("penstock.torchserve")


class ServerComponents(Struct, frozen=True):
    """The parts that listeners receive and the program calls: `load_startup`, `administrator.stop` and `.close`."""

    administrator: Administrator
    models: VersionRegistry
    backend: ModelsBackend
    opener: ArchiveOpener
    properties: Properties
    gpus: int
    max_workers: int
    tokens: Tokens | None = None  # published once the server listens, removed when it ends


def build_components(
    engine: Engine,
    properties: Properties,
    *,
    max_workers: int,
    file: str | None = None,
    snapshots: bool = True,
    folder: Path | None = None,
    cache: Path | None = None,
    model_metrics: Mapping[str, Any] | None = None,
) -> ServerComponents:
    """The administration of one server; keyword arguments are the options of the composition root.

    `file` is the source of the properties, `folder` the place of the token file (default: the working directory),
    `cache` the folder for unpacked archives, and `model_metrics` that section of metrics.yaml (None: TorchServe's
    own). Raises ConfigError, ArchiveError.
    """
    store = None if properties.model_store is None else Path(properties.model_store)
    models = VersionRegistry()
    model_store = ModelStore(store, allowed_urls=properties.allowed_urls, cache=cache)
    workflow_store = model_store
    if properties.workflow_store is not None:
        folder_of_wars = Path(properties.workflow_store)
        workflow_store = ModelStore(folder_of_wars, allowed_urls=properties.allowed_urls, cache=cache)
    opener = ArchiveOpener(model_store, properties, model_metrics)
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
        max_workers=max_workers,
        tokens=tokens,
        snapshots=Snapshots(Path(properties.log_location), _effective(properties, file)) if snapshots else None,
    )
    models.opening = 1 if properties.load_models or properties.model_snapshot else 0
    backend = ModelsBackend(engine, models)
    administrator.workflows = backend.workflows = Workflows(administrator, backend, workflow_store, properties)
    return ServerComponents(administrator, models, backend, opener, properties, gpus, max_workers, tokens)


def _effective(properties: Properties, file: str | None) -> dict[str, str]:
    """The keys and values of the file, with those that the command line can set."""
    values = {} if file is None else {key: found.value for key, found in read_properties(file).items()}
    for key in ("model_store", "workflow_store"):
        if getattr(properties, key) is not None:
            values[key] = os.path.abspath(getattr(properties, key))
    for key in ("enable_model_api", "disable_token_authorization"):
        if getattr(properties, key):
            values[key] = "true"
    return values


async def load_startup(components: ServerComponents) -> int:
    """Loads the models concurrently and returns, once each has reported, how many are missing.

    An archive that cannot be opened is logged and skipped. A model whose workers fail to load stays registered, and
    its workers are restarted. The default version is the first of a model, or the snapshot's choice. Raises ConfigError
    if a local archive does not exist.
    """
    administrator, models = components.administrator, components.models
    wanted = await _startup_models(components)
    await _check_archives(components, wanted)
    workflows = (components.properties.model_snapshot or {}).get("workflows")
    models.opening = len(wanted) + bool(workflows)
    changes = (administrator.change(_load(components, each)) for each in wanted)
    # `change` logs unexpected errors; they do not keep other models from being served.
    ended = await asyncio.gather(*changes, return_exceptions=True)
    found = [each if isinstance(each, ModelVersion) else None for each in ended]
    defaults: dict[str, ModelVersion] = {}
    weights: dict[str, dict[str, float]] = {}
    for each, version in zip(wanted, found, strict=True):
        if version is None or version.gone:
            continue
        if each.default or version.name not in defaults:
            defaults[version.name] = version
        if each.weight:
            weights.setdefault(version.name, {})[version.version] = each.weight
    for version in defaults.values():
        administrator.prefer(version, weights.get(version.name, {}))
    missing = await administrator.workflows.restore(workflows if isinstance(workflows, dict) else {})
    models.opening = 0
    administrator.snapshot("startup")
    return missing + sum(version is None for version in found)


async def _check_archives(components: ServerComponents, wanted: Sequence[SavedVersion]) -> None:
    store, urls = components.opener.store, [each.registration.url or "" for each in wanted]
    missing = await asyncio.to_thread(lambda: [url for url in urls if not store.has(url)])
    if missing:
        properties = components.properties
        key, otherwise = (
            ("model_snapshot", ", or start with --ncs") if properties.model_snapshot else ("load_models", "")
        )
        raise ConfigError(
            f"{key}: found no {', '.join(missing)} in {properties.model_store}; add it there, or remove it from"
            f" {key}{otherwise}"
        )


async def _load(components: ServerComponents, model: SavedVersion) -> ModelVersion | None:
    properties, administrator = components.properties, components.administrator
    workers = properties.default_workers_per_model or min(components.gpus or usable_cores(), components.max_workers)
    request = VersionRequest(model.registration, model.settings, workers)
    try:
        try:
            version = await administrator.claim(request, at_startup=True)
        finally:
            components.models.opening -= 1
        if version.min_workers:
            await administrator.start(version, keep=True)
    except PenstockError as e:
        detail = f"\n{e.detail}" if e.detail else ""
        log.error("Failed to load model: %s: %s%s", model.registration.url, e.message, detail)
        return None
    log.info("loaded model=%s version=%s workers=%d", version.name, version.version, version.up)
    return version


async def _startup_models(components: ServerComponents) -> Sequence[SavedVersion]:
    properties = components.properties
    if properties.model_snapshot is not None:
        return saved_versions(properties.model_snapshot)
    listed = properties.load_models
    if [each.lower() for each in listed] == ["all"]:
        names = await asyncio.to_thread(components.opener.store.names)
        return [SavedVersion(RegisterRequest(url=name)) for name in names]
    pairs = (each.partition("=") if "=" in each else ("", "", each) for each in listed)
    return [
        SavedVersion(RegisterRequest(url=url.strip(), model_name=name.strip() or None)) for name, _, url in pairs if url
    ]
