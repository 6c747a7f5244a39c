"""Administrator: TorchServe's management API on the engine. See `frontends.torchserve.base.Administration`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from penstock.core.engine.engine import Engine
from penstock.errors import PenstockError, describe
from penstock.torchserve.admin.background import on_thread
from penstock.torchserve.admin.describing import Describer, state_of
from penstock.torchserve.admin.devices import Devices
from penstock.torchserve.admin.models import Models, Version
from penstock.torchserve.admin.opening import Opener
from penstock.torchserve.admin.plan import said_by
from penstock.torchserve.admin.running import Runner
from penstock.torchserve.admin.snapshots import Kind, Snapshots
from penstock.torchserve.admin.tokens import Tokens
from penstock.torchserve.config.properties import Properties
from penstock.torchserve.protocol.api import ApiError, ChangeResult, Registration

log = logging.getLogger("penstock.compat")

T = TypeVar("T")
END_S: Final = 5.0
_LATER = ChangeResult("Processing worker updates...", 202)


class Administrator:
    """Changes models while the server runs. A change goes on to its end, also if its caller leaves.

    Those of one version are made one after the other; an unregistration ends what is under way. `tokens` None: nobody
    is asked for one. `snapshots` None: none is written. `most_workers` is the most that a version may have.
    """

    def __init__(
        self,
        engine: Engine,
        models: Models,
        opener: Opener,
        properties: Properties,
        *,
        gpus: int,
        most_workers: int,
        tokens: Tokens | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._engine = engine
        self._models = models
        self._opener = opener
        self._properties = properties
        self._most_workers = most_workers
        self._tokens = tokens
        self._snapshots = snapshots
        self._started = False
        self._stopping = False
        self.opening = 0  # archives of the start that are not opened yet: not healthy
        self._tasks: set[asyncio.Task[Any]] = set()
        devices = Devices(gpus)
        self._describer = Describer(engine, devices, properties.initial_worker_port)
        self._runner = Runner(engine, devices, float(properties.unregister_model_timeout))

    # ---- what is asked

    def check_token(self, group: str, authorization: bytes | None) -> None:
        if self._tokens is not None:
            self._tokens.check("management" if group == "management" else "inference", authorization)

    def new_token(self, group: str, authorization: bytes | None) -> None:
        if self._tokens is None:
            raise ApiError(
                "ResourceNotFoundException", "Requested resource is not found, please refer to API document."
            )
        try:
            self._tokens.renew(group, authorization)
        except OSError as e:
            log.error("tokens_not_written file=%s error=%s", self._tokens.file, e)
            raise ApiError("InternalServerException", "The key file could not be written; the old key holds") from e

    def healthy(self) -> bool:
        return (
            not self.opening
            and not self._engine.draining
            and all(version.healthy for version in self._models.defaults())
        )

    async def describe(self, model: str, version: str | None, *, customized: bool = False) -> list[dict[str, Any]]:
        found = self._models.versions(model) if version == "all" else [self._models.find(model, version)]
        return await self._describer.describe(found, customized=customized)

    def models(self, limit: int, page_token: int) -> tuple[list[tuple[str, str]], int | None]:
        defaults = self._models.defaults()
        end = page_token + limit
        page = [(version.name, version.plan.url) for version in defaults[page_token:end]]
        return page, end if end <= len(defaults) else None

    # ---- changes

    async def register(self, registration: Registration) -> ChangeResult:
        return await self.change(self._register(registration))

    async def scale(
        self,
        model: str,
        version: str | None,
        *,
        min_worker: int | None = None,
        max_worker: int | None = None,
        synchronous: bool = False,
    ) -> ChangeResult:
        self._check_open()
        found = self._models.find(model, version)
        least = 1 if min_worker is None else min_worker
        most = least if max_worker is None else max_worker
        if most < least:
            raise ApiError("BadRequestException", "max_worker cannot be less than min_worker.")
        self._bound("min_worker", least)
        task = self._begin(self._scale(found, least, most, version))
        return await asyncio.shield(task) if synchronous else _LATER

    async def set_default(self, model: str, version: str) -> ChangeResult:
        self._check_open()
        self._models.set_default(model, version)
        self.snapshot("snapshot")
        return ChangeResult(f'Default version successfully updated for model "{model}" to "{version}"')

    def prefer(self, version: Version, weights: Mapping[str, float]) -> None:
        """At the start: requests that name no version go to this one, or are shared out."""
        self._models.set_default(version.name, version.version)
        if weights:
            self._models.set_traffic(version.name, weights)

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> ChangeResult:
        self._check_open()
        self._models.set_traffic(model, weights)
        self.snapshot("snapshot")
        return ChangeResult(f'Traffic successfully updated for model "{model}"')

    async def unregister(self, model: str, version: str | None) -> ChangeResult:
        self._check_open()
        found = self._models.find(model, version)
        self._models.check_removal(found)
        await self.change(self._remove(found))
        self.snapshot("snapshot")
        log.info("unregistered model=%s version=%s", found.name, found.version)
        return ChangeResult(f'Model "{found.name}" unregistered')

    # ---- how they are made

    async def claim(
        self, registration: Registration, said: Mapping[str, Any], *, workers: int, at_startup: bool = False
    ) -> Version:
        """The version that the registration means, in sight but without workers; `workers` is how many it is to have
        if nobody says so. Raises ApiError."""
        plan, files = await self._opener.open(registration, said, workers)
        s = plan.settings
        version = Version(plan, files, s.min_workers, s.max_workers, at_startup)
        try:
            self._bound("initial_workers", s.min_workers)
            self._check_open()
            self._models.add(version)
        except ApiError:
            await self._opener.discard(plan, files)
            raise
        try:
            await self._opener.install(plan)
        except BaseException:
            await self._remove(version)
            raise
        return version

    async def start(self, version: Version, *, keep: bool) -> None:
        """Starts the workers of a claimed version. If they do not start it is unregistered, and ApiError raised; with
        `keep` it stays, and they are tried again and again."""
        try:
            await self._runner.start(version, version.min_workers, keep=keep)
        except BaseException:
            await self._remove(version)
            raise
        finally:
            self._describer.number(version)

    async def _register(self, registration: Registration) -> ChangeResult:
        version = await self.claim(
            registration, said_by(registration), workers=self._properties.default_workers_per_model
        )
        named = f'Model "{version.name}" Version: {version.version} registered with'
        wanted = version.min_workers
        if not wanted:
            self.snapshot("snapshot")
            log.info("registered model=%s version=%s workers=0", version.name, version.version)
            return ChangeResult(f"{named} 0 initial workers. Use scale workers API to add workers for the model.")
        if registration.synchronous is False:
            self._begin(self._start_later(version))
            return _LATER
        await self.start(version, keep=False)
        self.snapshot("snapshot")
        log.info("registered model=%s version=%s workers=%d", version.name, version.version, version.up)
        if version.up < wanted:
            return ChangeResult("Workers scaling in progress...", 206)
        return ChangeResult(f"{named} {wanted} initial workers")

    async def _start_later(self, version: Version) -> None:
        self._describer.number(version)
        await self.start(version, keep=True)
        self.snapshot("snapshot")
        log.info("registered model=%s version=%s workers=%d", version.name, version.version, version.up)

    async def _scale(self, version: Version, least: int, most: int, named: str | None) -> ChangeResult:
        try:
            await self._runner.scale(version, least, most, named)
        finally:
            self._describer.number(version)
        self.snapshot("snapshot")
        log.info("scaled model=%s version=%s workers=%d", version.name, version.version, version.up)
        suffix = f", version: {named}" if named is not None else ""
        return ChangeResult(f"Workers scaled to {least} for model: {version.name}{suffix}")

    async def _remove(self, version: Version) -> None:
        """Out of sight at once; then its workers answer what they have, and its files are given back, with what was
        downloaded."""
        if version.gone:
            return
        self._models.remove(version)
        try:
            await self._runner.end(version)
        finally:
            await self._opener.discard(version.plan, version.files)

    def _bound(self, key: str, workers: int) -> None:
        if not 0 <= workers <= self._most_workers:
            raise ApiError("BadRequestException", f"{key}: found {workers}, expected 0 to {self._most_workers}")

    def _check_open(self) -> None:
        if self._stopping or self._engine.draining:
            raise ApiError("ServiceUnavailableException", "The server is stopping: no model is changed any more")

    # ---- tasks

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def change(self, change: Coroutine[Any, Any, T]) -> T:
        """Makes a change to its end, also if the caller leaves meanwhile; `close` waits for it."""
        return await asyncio.shield(self._begin(change))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, PenstockError):  # its caller may not be waiting, and is not told the detail
            level = logging.INFO if isinstance(error, ApiError) and error.status < 500 else logging.WARNING
            log.log(level, "change_failed error=%s%s", error, f"\n{error.detail}" if error.detail else "")
        elif error is not None:
            log.error("change_failed error=%s", describe(error), exc_info=error)

    # ---- the end

    def snapshot(self, kind: Kind) -> None:
        """Writes one, unless there are to be none, or the server is stopping. One that ends before it has started
        leaves none: nothing was served that could be restored."""
        self._started = self._started or kind != "shutdown"
        if self._snapshots is None or self._stopping or not self._started:
            return
        models: dict[str, dict[str, Any]] = {}
        for version in self._models:
            default, weight = self._models.is_default(version), self._models.weight(version)
            state = state_of(version, default=default, weight=weight)
            models.setdefault(version.name, {})[version.version] = state
        self._snapshots.write(kind, models)

    def stop(self) -> None:
        """No model is changed any more. To be called before the engine is closed; writes the last snapshot."""
        self.snapshot("shutdown")
        self._stopping = True

    async def close(self) -> None:
        """Gives the files of all models back. To be called when the engine is closed; archives that are still being
        opened are not waited for longer than END_S."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(on_thread(version.files.close) for version in self._models))
