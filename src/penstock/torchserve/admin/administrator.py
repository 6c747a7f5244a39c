"""TorchServe's management operations on the engine, behind its HTTP and gRPC APIs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.core.engine.engine import Engine
from penstock.errors import PenstockError, describe
from penstock.torchserve.admin.archives import ArchiveOpener, run_in_thread
from penstock.torchserve.admin.files import SnapshotKind, Snapshots, Tokens, state_of
from penstock.torchserve.admin.model_spec import VersionRequest
from penstock.torchserve.admin.models import ModelVersion, VersionRegistry
from penstock.torchserve.admin.workers import DeviceAllocator, ModelDescriber, WorkerManager
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError, ChangeResult, RegisterRequest

if TYPE_CHECKING:
    from penstock.torchserve.admin.workflows import Workflows

log = logging.getLogger("penstock.torchserve")

T = TypeVar("T")
CLOSE_S: Final = 5.0  # a choice: the engine has drained by then, and only files are left to release
_IN_PROGRESS = ChangeResult("Processing worker updates...", 202)


class Administrator:
    """Changes models while the server runs. A change completes even if its caller leaves. Failures raise ApiError.

    `version` None is the default version. Changes of one version run one after the other; unregistering ends a change
    in progress. The constructor takes the parts of the server as keyword arguments: `tokens` None turns token checks
    off, `snapshots` None writes no snapshots, and `max_workers` is the maximum per version. `build_components` sets
    `workflows`.
    """

    workflows: Workflows

    def __init__(
        self,
        engine: Engine,
        models: VersionRegistry,
        opener: ArchiveOpener,
        properties: Properties,
        *,
        gpus: int,
        max_workers: int,
        tokens: Tokens | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._engine = engine
        self._models = models
        self.check_complete = models.check_complete
        self._opener = opener
        self._properties = properties
        self._max_workers = max_workers
        self._tokens = tokens
        self._snapshots = snapshots
        self._started = False
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        devices = DeviceAllocator(gpus)
        drain_s, first_id = float(properties.unregister_model_timeout), properties.initial_worker_port
        self._workers = WorkerManager(engine, devices, drain_s, first_id)
        self._describer = ModelDescriber(engine, devices, self._workers)

    # ---- queries

    def check_token(self, group: str, authorization: bytes | None) -> None:
        """Raises ApiError (InvalidKeyException) unless tokens are off or the header is `Bearer` and the group's key."""
        if self._tokens is not None:
            self._tokens.check("management" if group == "management" else "inference", authorization)

    def new_token(self, group: str, authorization: bytes | None) -> None:
        """Creates a new key for "management" or "inference", authorized by the API key, and rewrites the key file."""
        if self._tokens is None:
            raise ApiError(
                "ResourceNotFoundException", "Requested resource is not found, please refer to API document."
            )
        try:
            self._tokens.renew(group, authorization)
        except OSError as e:
            log.error("tokens_not_written file=%s error=%s", self._tokens.file, e)
            message = "The key file could not be written; the old key stays valid"
            raise ApiError("InternalServerException", message) from e

    def healthy(self) -> bool:
        """False if the default version of any model has fewer live workers than its minWorkers.

        First workers that are still loading do not count, as in TorchServe, unless `ready_ping` is on.
        """
        return self._all_up(loading=self._properties.ready_ping)

    def ready(self) -> bool:
        """`healthy`, and the first workers of every model are loaded."""
        return self._all_up(loading=True)

    def _all_up(self, loading: bool) -> bool:
        return (
            not self._models.opening
            and not self._engine.draining
            and all(version.healthy and not (loading and version.loading) for version in self._models.defaults())
        )

    async def describe(self, model: str, version: str | None, *, customized: bool = False) -> list[dict[str, Any]]:
        """The objects of `GET /models/{m}[/{version}|/all]`; `version` "all" means every version."""
        found = self._models.all_of(model) if version == "all" else [self._models.find(model, version)]
        return await self._describer.describe(found, customized=customized)

    def models(self) -> list[tuple[str, str]]:
        """(name, url) of each default version, by name; functions of workflows, which have no URL, are left out."""
        return [(version.name, version.spec.url) for version in self._models.defaults() if version.spec.url]

    # ---- changes

    async def register(self, registration: RegisterRequest) -> ChangeResult:
        return await self.change(self._register(registration))

    async def scale(
        self,
        model: str,
        version: str | None,
        *,
        min_worker: int | None = None,  # None: 1
        max_worker: int | None = None,  # None: min_worker
        synchronous: bool = False,
    ) -> ChangeResult:
        self._check_open()
        found = self._models.find(model, version)
        minimum = 1 if min_worker is None else min_worker
        maximum = minimum if max_worker is None else max_worker
        if maximum < minimum:
            raise ApiError("BadRequestException", "max_worker cannot be less than min_worker.")
        self._check_workers("min_worker", minimum)
        task = self._begin(self._scale(found, minimum, maximum, version))
        return await asyncio.shield(task) if synchronous else _IN_PROGRESS

    async def set_default(self, model: str, version: str) -> ChangeResult:
        self._check_open()
        self._models.set_default(model, version)
        self.snapshot("snapshot")
        return ChangeResult(f'Default version successfully updated for model "{model}" to "{version}"')

    def prefer(self, version: ModelVersion, weights: Mapping[str, float]) -> None:
        """At startup: makes the version the default, and splits the traffic if there are weights."""
        self._models.set_default(version.name, version.version)
        if weights:
            self._models.set_traffic(version.name, weights)

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> ChangeResult:
        """Splits requests without a version by weight; at least one weight is above 0. A Penstock extension."""
        self._check_open()
        self._models.set_traffic(model, weights)
        self.snapshot("snapshot")
        return ChangeResult(f'Traffic successfully updated for model "{model}"')

    async def unregister(self, model: str, version: str | None) -> ChangeResult:
        self._check_open()
        found = self._models.find(model, version)
        self._models.check_removal(found)
        await self.change(self.remove(found))
        self.snapshot("snapshot")
        log.info("unregistered model=%s version=%s", found.name, found.version)
        return ChangeResult(f'Model "{found.name}" unregistered')

    async def reload(self) -> None:
        """Loads the versions again whose archive in the store has changed, without losing a request.

        A version that does not load serves as before, and `_ended` logs the reason.
        """
        await asyncio.gather(*(self.change(self._reload(each)) for each in list(self._models)), return_exceptions=True)

    # ---- steps of a change

    async def _reload(self, version: ModelVersion) -> None:
        if version.request is None or "://" in version.spec.url or not version.files.digest:  # a folder has no digest
            return
        spec, files = await self._opener.open(version.request)
        try:
            if files.digest == version.files.digest:
                return
            if (spec.name, spec.version) != (version.name, version.version):
                raise ApiError("ConflictStatusException", f"{spec.url} is now {spec.name} version {spec.version}")
            await self._opener.install(spec)
            await self._workers.replace(version, spec)
            version.files, files = files, version.files
            log.info("event=reloaded model=%s version=%s", version.name, version.version)
        finally:
            await run_in_thread(files.close)

    async def claim(self, request: VersionRequest, *, at_startup: bool = False) -> ModelVersion:
        """Opens the archive and adds the version to the registry, still without workers. Raises ApiError."""
        spec, files = await self._opener.open(request)
        s = spec.settings
        version = ModelVersion(spec, files, s.min_workers, s.max_workers, at_startup, request=request)
        try:
            self._check_workers("initial_workers", s.min_workers)
            self._check_open()
            self._models.add(version)
        except ApiError:
            await self._opener.discard(spec, files)
            raise
        try:
            await self._opener.install(spec)
        except BaseException:
            await self.remove(version)
            raise
        return version

    async def start(self, version: ModelVersion, *, keep: bool) -> None:
        """Starts the workers of a claimed version.

        If they fail, the version is unregistered and ApiError raised; with `keep` it stays, and its workers are
        restarted.
        """
        try:
            await self._workers.start(version, version.min_workers, keep=keep)
        except BaseException:
            await self.remove(version)
            raise

    async def _register(self, registration: RegisterRequest) -> ChangeResult:
        workers = self._properties.default_workers_per_model
        version = await self.claim(VersionRequest(registration, None, workers))
        prefix = f'Model "{version.name}" Version: {version.version} registered with'
        wanted = version.min_workers
        if not wanted:
            self._registered(version)
            return ChangeResult(f"{prefix} 0 initial workers. Use scale workers API to add workers for the model.")
        if not registration.synchronous:
            self._begin(self._start_in_background(version))
            return _IN_PROGRESS
        await self.start(version, keep=False)
        self._registered(version)
        if version.up < wanted:
            return ChangeResult("Workers scaling in progress...", 206)
        return ChangeResult(f"{prefix} {wanted} initial workers")

    async def _start_in_background(self, version: ModelVersion) -> None:
        await self.start(version, keep=True)
        self._registered(version)

    def _registered(self, version: ModelVersion) -> None:
        self.snapshot("snapshot")
        log.info("registered model=%s version=%s workers=%d", version.name, version.version, version.up)

    async def _scale(self, version: ModelVersion, minimum: int, maximum: int, named: str | None) -> ChangeResult:
        await self._workers.scale(version, minimum, maximum, named)
        self.snapshot("snapshot")
        log.info("scaled model=%s version=%s workers=%d", version.name, version.version, version.up)
        suffix = f", version: {named}" if named is not None else ""
        return ChangeResult(f"Workers scaled to {minimum} for model: {version.name}{suffix}")

    async def remove(self, version: ModelVersion) -> None:
        """Unregisters the version at once, stops its workers after draining, and releases its files and download."""
        if version.gone:
            return
        self._models.remove(version)
        try:
            await self._workers.stop(version)
        finally:
            await self._opener.discard(version.spec, version.files)

    def _check_workers(self, key: str, workers: int) -> None:
        if not 0 <= workers <= self._max_workers:
            raise ApiError("BadRequestException", f"{key}: found {workers}, expected 0 to {self._max_workers}")

    def _check_open(self) -> None:
        if self._stopping or self._engine.draining:
            raise ApiError("ServiceUnavailableException", "The server is stopping and changes no models")

    # ---- tasks

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def change(self, change: Coroutine[Any, Any, T]) -> T:
        """Runs a change to completion, even if the caller leaves; `close` waits for it."""
        return await asyncio.shield(self._begin(change))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, PenstockError):  # the caller may have left, and never receives the detail
            level = logging.INFO if isinstance(error, ApiError) and error.status < 500 else logging.WARNING
            log.log(level, "change_failed error=%s%s", error, f"\n{error.detail}" if error.detail else "")
        elif error is not None:
            log.error("change_failed error=%s", describe(error), exc_info=error)

    # ---- shutdown

    def snapshot(self, kind: SnapshotKind) -> None:
        """Writes a snapshot, unless they are off, the server is stopping, or it never started."""
        self._started = self._started or kind != "shutdown"
        if self._snapshots is None or self._stopping or not self._started:
            return
        models: dict[str, dict[str, Any]] = {}
        for version in self._models:
            if version.request is not None and version.request.workflow:
                continue
            name = version.name
            split = self._models.splits.get(name)
            weight = None if split is None else split.weights.get(version.version)
            state = state_of(version, default=self._models.handles[name, None] is version, weight=weight)
            models.setdefault(name, {})[version.version] = state
        self._snapshots.write(kind, models, self.workflows.states())

    def stop(self) -> None:
        """Refuses further changes and writes the last snapshot. Call this before closing the engine."""
        self.snapshot("shutdown")
        self._stopping = True

    async def close(self) -> None:
        """Releases the files of all models. Call this after closing the engine. Waits at most CLOSE_S for changes."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(run_in_thread(version.files.close) for version in self._models))
        await self.workflows.close()
