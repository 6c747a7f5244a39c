"""Opener: from what a registration says to a plan, and the archive's files that it needs. Its work is on threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from penstock.errors import ArchiveError
from penstock.torchserve.admin.background import on_thread
from penstock.torchserve.admin.plan import Plan, Source, make_plan
from penstock.torchserve.archive import (
    ArchiveExists,
    ArchiveNotFound,
    DownloadFailed,
    InstallFailed,
    UrlForbidden,
)
from penstock.torchserve.archive.store import ModelStore, UnpackedArchive
from penstock.torchserve.config.properties import Properties
from penstock.torchserve.protocol.api import ApiError, Registration

log = logging.getLogger("penstock.compat")

MOST_YAML_BYTES: Final = 2**20  # real ones have a few KB
MOST_AT_ONCE: Final = 16  # archives that are opened, each on a thread; TorchServe's threads bound it likewise
_KINDS: Final = {
    ArchiveNotFound: "ModelNotFoundException",
    UrlForbidden: "ModelNotFoundException",
    ArchiveExists: "InternalServerException",
    DownloadFailed: "DownloadArchiveException",
    InstallFailed: "ModelException",
}


class Opener:
    """Opens archives of one store. Raises ApiError, with TorchServe's texts where it has one."""

    def __init__(
        self, store: ModelStore, properties: Properties, model_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self._store = store
        self._properties = properties
        self._model_metrics = model_metrics
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._installs: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()  # while anybody has it

    def names(self) -> list[str]:
        """What the store holds."""
        return self._store.names()

    async def open(
        self, registration: Registration, said: Mapping[str, Any], workers: int
    ) -> tuple[Plan, UnpackedArchive]:
        """The plan of a version, and its files, to be closed. See `make_plan`."""
        async with self._turn:
            return await on_thread(partial(self._open, registration, said, workers))

    def _open(self, registration: Registration, said: Mapping[str, Any], workers: int) -> tuple[Plan, UnpackedArchive]:
        url = registration.url
        if not url:
            raise ApiError("BadRequestException", "Parameter url is required.")
        try:
            files = self._store.open(url, name=registration.model_name or "", s3_sse_kms=registration.s3_sse_kms)
        except ArchiveError as e:
            raise _told(e) from e
        except OSError as e:
            raise ApiError("InternalServerException", f"Failed to save model: {url}", detail=str(e)) from e
        try:
            archive = files.archive
            yaml = read_yaml(archive.folder, archive.manifest.config_file)
            source = Source(archive, url, mar_name(url), yaml)
            plan = make_plan(
                source, self._properties, registration, said, workers=workers, model_metrics=self._model_metrics
            )
            return plan, files
        except BaseException:
            self._discard(url, files)
            raise

    async def discard(self, plan: Plan, files: UnpackedArchive) -> None:
        """Gives the files back, and removes what was downloaded for them: its name is free again."""
        await on_thread(partial(self._discard, plan.url, files))

    def _discard(self, url: str, files: UnpackedArchive) -> None:
        files.close()
        self._store.forget(url)

    async def install(self, plan: Plan) -> None:
        """Installs the model's own packages, if that is switched on and there are any."""
        requirements = plan.requirements
        if not self._properties.install_py_dep_per_model or not requirements:
            return
        from penstock.torchserve.archive.requirements import install_requirements

        lock = self._installs.setdefault(plan.folder, asyncio.Lock())
        install = partial(install_requirements, plan.folder, requirements, model=plan.name, venv=plan.settings.use_venv)
        async with lock, self._turn:
            try:
                await on_thread(install)
            except ArchiveError as e:
                raise _told(e) from e


def mar_name(url: str) -> str:
    """What the store calls the archive of this URL."""
    path = unquote(urlsplit(url).path) if "://" in url else url
    return path.rstrip("/").rpartition("/")[2]


def read_yaml(folder: Path, name: str) -> dict[str, Any]:
    """What a model-config.yaml says; empty without one. Raises ApiError."""
    if not name:
        return {}
    try:
        import yaml
    except ImportError:
        raise ApiError(
            "InvalidModelException",
            f"{name} cannot be read without PyYAML: install the extra, pip install 'penstock[yaml]'",
        ) from None
    try:
        with (folder / name).open("rb") as file:
            raw = file.read(MOST_YAML_BYTES + 1)
        if len(raw) > MOST_YAML_BYTES:
            raise ValueError(f"it has more than {MOST_YAML_BYTES} bytes")
        found = yaml.safe_load(raw)
    except FileNotFoundError:
        raise ApiError(
            "InvalidModelException", f"{name}: the manifest names it, but the archive has no such file"
        ) from None
    except Exception as e:  # PyYAML raises many kinds: IndexError for !!int "", AttributeError for !!timestamp x
        text = " ".join(str(e).split())[:300]
        raise ApiError("InvalidModelException", f"{name} is no valid YAML: {text}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ApiError("InvalidModelException", f"{name}: found a {type(found).__name__}, expected keys with values")
    return {str(key): value for key, value in found.items()}


def _told(error: ArchiveError) -> ApiError:
    kind = next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), "InvalidModelException")
    return ApiError(kind, error.message, detail=error.detail)
