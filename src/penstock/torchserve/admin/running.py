"""Runner: the workers of one version after the other - started, scaled, ended. None of it is in sight of clients."""

from __future__ import annotations

from msgspec import structs

from penstock.core.engine.batcher import Call
from penstock.core.engine.engine import Engine
from penstock.errors import BadRequest, ConfigError, Conflict, LoadOutOfMemory, ModelNotReady, PenstockError
from penstock.torchserve.admin.devices import Devices
from penstock.torchserve.admin.models import Version
from penstock.torchserve.protocol.api import ApiError
from penstock.types import Item, Sink


class Runner:
    """Joins versions with the engine; `version.lock` is held while one is changed. What fails raises ApiError."""

    def __init__(self, engine: Engine, devices: Devices, drain_s: float) -> None:
        self._engine = engine
        self._devices = devices
        self._drain_s = drain_s

    async def start(self, version: Version, workers: int, *, keep: bool) -> None:
        """Returns when every worker has reported and one is up; with `keep`, also when none is."""
        async with version.lock:
            try:
                await self._start(version, workers, keep)
            except PenstockError as e:
                raise _failure(version, version.version, e) from e

    async def scale(self, version: Version, least: int, most: int, named: str | None) -> None:
        """Returns when there are from `least` to `most` workers. Nothing has changed when it fails."""
        async with version.lock:
            now = 0 if version.handle is None else len(version.handle.workers())
            wanted = min(max(now, least), most)
            before = version.min_workers, version.max_workers, version.settled
            version.min_workers, version.max_workers = least, most
            version.settled = min(version.settled, wanted)
            try:
                await self._scale(version, now, wanted)
            except PenstockError as e:
                version.min_workers, version.max_workers, version.settled = before
                raise _failure(version, named, e) from e
            version.settled = wanted

    async def end(self, version: Version) -> None:
        """Ends the workers of a version that is `gone`: those that load at once, the others when they are drained."""
        assert version.gone
        if version.loading:
            assert version.handle is not None
            version.handle.abort()
            async with version.lock:
                return
        await self._end(version)

    async def _scale(self, version: Version, now: int, wanted: int) -> None:
        if version.gone:
            raise Conflict(f"model '{version.name}' was unregistered meanwhile")
        if wanted == now:
            return
        if not wanted:
            await self._end(version)
        elif version.handle is None:
            await self._start(version, wanted, keep=False)
        else:
            await version.handle.scale(wanted, self._drain_s)

    async def _start(self, version: Version, workers: int, keep: bool) -> None:
        if version.gone:
            raise Conflict(f"model '{version.name}' was unregistered before its workers were started")
        plan = version.plan
        devices = self._devices.take(plan.settings, workers)
        config = structs.replace(plan.config, instances=workers, devices=devices)
        version.handle = self._engine.prepare(
            plan.name, config, target=plan.target, wants_headers=True, capture_output=True
        )
        version.loading = True
        try:
            await self._engine.put(version.handle, drain_s=self._drain_s, keep=keep)
        except BaseException:
            version.handle = None
            raise
        finally:
            version.loading = False
            self._let_go(version)
        version.settled = workers

    def _let_go(self, version: Version) -> None:
        """The requests that waited for the first worker are queued, or told that there is none."""
        held, version.held = version.held, []

        def submit(item: Item, sink: Sink, budget_s: float | None, priority: int) -> Call:
            return self._engine.submit(version.name, version.version, item, sink, budget_s=budget_s, priority=priority)

        for each in held:
            each.go(submit)

    async def _end(self, version: Version) -> None:
        handle, version.handle = version.handle, None
        if handle is not None:
            await self._engine.retire(handle, self._drain_s)


def _failure(version: Version, named: str | None, error: PenstockError) -> ApiError:
    """What a client is told of workers that did not start."""
    if isinstance(error, Conflict) or version.gone:
        return ApiError("ConflictStatusException", error.message)
    if isinstance(error, ModelNotReady):
        return ApiError("ServiceUnavailableException", error.message)
    if isinstance(error, (ConfigError, BadRequest)):
        return ApiError("BadRequestException", error.message)
    kind = "OutOfMemoryException" if isinstance(error, LoadOutOfMemory) else "InternalServerException"
    text = f"Failed to start workers for model {version.name} version: {named or 'null'}"
    return ApiError(kind, text, detail=error.detail or error.message)
