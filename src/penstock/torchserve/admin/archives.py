"""Opens archives for registration: download, unpack, read the configuration, install packages. Runs on threads."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from penstock.config.load import load_yaml
from penstock.core.engine.packages import install_requirements
from penstock.errors import ArchiveError, ConfigError, LoadFailed
from penstock.torchserve.admin.model_spec import ArchiveSource, ModelSpec, VersionRequest, make_spec
from penstock.torchserve.archive import ArchiveExists, ArchiveNotFound, DownloadFailed, InstallFailed, UrlForbidden
from penstock.torchserve.archive.store import ModelStore, UnpackedArchive
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError
from penstock.values import found

MAX_CONCURRENT: Final = 16  # archives opened at the same time, each on a thread; TorchServe has a similar limit
_KINDS: Final = {
    ArchiveNotFound: "ModelNotFoundException",
    UrlForbidden: "ModelNotFoundException",
    ArchiveExists: "InternalServerException",
    DownloadFailed: "DownloadArchiveException",
    InstallFailed: "ModelException",
}

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """The result of blocking work. Unlike asyncio's, the daemon thread does not delay the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the thread settles it even if the caller is cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="penstock-archives", daemon=True).start()
    return await asyncio.wrap_future(future)


class ArchiveOpener:
    """Opens the archives of one store. Raises ApiError, with TorchServe's texts where it has one."""

    def __init__(
        self, store: ModelStore, properties: Properties, model_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.store = store
        self._properties = properties
        self._model_metrics = model_metrics
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._installs: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()  # while in use

    async def open(self, request: VersionRequest) -> tuple[ModelSpec, UnpackedArchive]:
        """The spec of a version, and its files, which the caller closes."""
        async with self._slots:
            return await run_in_thread(partial(self._open, request))

    def _open(self, request: VersionRequest) -> tuple[ModelSpec, UnpackedArchive]:
        registration = request.registration
        url = registration.url or ""
        if request.functions is not None:
            files = UnpackedArchive(request.functions)
        else:
            files = open_archive(self.store, registration.url, registration.model_name, registration.s3_sse_kms)
        try:
            archive = files.archive
            if archive.manifest.is_workflow:
                raise ApiError("InvalidModelException", f"{url} is a workflow: register it with POST /workflows")
            yaml = read_yaml(archive.folder, archive.manifest.config_file)
            source = ArchiveSource(archive, url, mar_name(url), yaml, self.store.packages(files))
            return make_spec(source, self._properties, request, model_metrics=self._model_metrics), files
        except BaseException:
            self._discard(url, files)
            raise

    async def discard(self, spec: ModelSpec, files: UnpackedArchive) -> None:
        """Closes the files and removes their download, which frees its name."""
        await run_in_thread(partial(self._discard, spec.url, files))

    def _discard(self, url: str, files: UnpackedArchive) -> None:
        files.close()
        self.store.forget(url)

    async def install(self, spec: ModelSpec) -> None:
        """Installs the model's requirements, if there are any and install_py_dep_per_model is on."""
        if not self._properties.install_py_dep_per_model or not spec.requirements:
            return
        lock = self._installs.setdefault(spec.packages, asyncio.Lock())
        file, venv = spec.folder / spec.requirements, spec.settings.use_venv
        install = partial(install_requirements, file, spec.packages, model=spec.name, venv=venv)
        async with lock, self._slots:
            try:
                await run_in_thread(install)
            except LoadFailed as e:
                failed = f"Custom pip package installation failed for model {spec.name}"
                raise api_error(InstallFailed(failed, detail=e.detail)) from e


def open_archive(store: ModelStore, url: str | None, name: str | None, s3_sse_kms: bool) -> UnpackedArchive:
    """The unpacked archive of a model or workflow. Raises ApiError."""
    if url is None:
        raise ApiError("BadRequestException", "Parameter url is required.")
    try:
        return store.open(url, name=name or "", s3_sse_kms=s3_sse_kms)
    except ArchiveError as e:
        raise api_error(e) from e
    except OSError as e:
        raise ApiError("InternalServerException", f"Failed to save model: {url}", detail=str(e)) from e


def mar_name(url: str) -> str:
    """The name of this URL's archive in the store."""
    path = unquote(urlsplit(url).path) if "://" in url else url
    return path.rstrip("/").rpartition("/")[2]


def read_yaml(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a model-config.yaml; empty if `name` is. Raises ApiError."""
    if not name:
        return {}
    if not (folder / name).is_file():
        message = f"{name}: the manifest names it, but the archive has no such file"
        raise ApiError("InvalidModelException", message)
    try:
        table, _ = load_yaml(folder / name, name)
    except ConfigError as e:
        raise ApiError("InvalidModelException", e.message) from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ApiError("InvalidModelException", f"{name}: found {found(table)}, expected keys with values")
    return {str(key): value for key, value in table.items()}


def api_error(error: ArchiveError) -> ApiError:
    """The error of an archive as clients know it."""
    kind = next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), "InvalidModelException")
    return ApiError(kind, error.message, detail=error.detail)
