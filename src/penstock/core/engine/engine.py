"""Engine: the asyncio face of everything below it, and the Backend that front-ends are handed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from penstock.config.checks import check_model
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.contracts import Observer, ServerSnapshot, Transport
from penstock.core.engine.batcher import Call, release
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.outcomes import notify
from penstock.core.engine.registry import ModelRegistry
from penstock.core.engine.rules import devices_of
from penstock.core.wire.slabs import Slab, SlabPool
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, Conflict, LoadFailed, ModelNotReady
from penstock.plugins import resolve
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, Sink

log = logging.getLogger("penstock.engine")


class Engine:
    """Loads models, and answers requests for them. All calls on one event loop; `Portal` is the face for threads.

    Use as `async with Engine() as engine`, or call `close()` at the end.
    """

    def __init__(self, limits: LimitsConfig | None = None, observers: Sequence[Observer] = ()) -> None:
        self._limits = limits or LimitsConfig()
        self._observers = tuple(observers)
        self._registry = ModelRegistry()
        self._live: set[ModelHandle] = set()  # also those that are out of sight: loading beside another, or draining
        self._pool: SlabPool | None = None
        self._draining = False

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- models

    async def load(self, name: str, config: ModelConfig, *, target: Any = None, sys_path: Sequence[str] = ()) -> None:
        """Starts the instances of a model and returns when one is up. Meanwhile it is in sight as LOADING.

        Raises LoadFailed, TargetNotFound, ConfigError; ModelNotReady when the engine is closed, now or meanwhile.

        `target`: a function, class or object in place of `config.target`, for callers in this process.
        """
        handle = self.prepare(name, config, target=target, sys_path=sys_path)
        try:
            self._registry.add(handle)
            await handle.load()
        except BaseException:
            await self.retire(handle, 0)
            raise

    async def put(self, handle: ModelHandle, *, drain_s: float = 30.0, keep: bool = False) -> None:
        """Loads what was prepared, out of sight; then it answers, beside the other versions or in place of its own.

        Returns when the one it replaces has answered what it accepted. Raises what `load` does; nothing has changed
        then. `keep`: one that does not load stays, as FAILED, while its workers are tried again and again.
        """
        try:
            try:
                await handle.load()
            except (LoadFailed, ConfigError) as e:
                if not keep:
                    raise
                detail = f"\n{e.detail}" if e.detail else ""
                log.warning("load_failed model=%s error=%s: it is tried again%s", handle.name, e, detail)
            if handle.state == "DRAINING":
                raise ModelNotReady(f"model '{handle.name}' was stopped while it was loading")
            old = self._registry.get(handle.name, handle.version)
            if old is None:
                self._registry.add(handle)
            else:
                self._registry.replace(old, handle)
        except BaseException:
            await self.retire(handle, 0)
            raise
        if old is not None:
            await self.retire(old, drain_s)

    def prepare(
        self,
        name: str,
        config: ModelConfig,
        *,
        target: Any = None,
        sys_path: Sequence[str] = (),
        wants_headers: bool = False,
        capture_output: bool = False,
    ) -> ModelHandle:
        """A version that is not loaded and out of sight; to be handed to `put`. The flags are those of `WorkerSpec`.

        Raises ConfigError, ModelNotReady, and Conflict when there are as many versions as may be.
        """
        if self._draining:
            raise ModelNotReady(f"model '{name}' is not loaded: the engine is draining or closed")
        check_model(config, f"model '{name}': ")
        self._bound(name, config.version)
        devices = devices_of(config)
        spec = WorkerSpec(
            name=name,
            version=config.version,
            config=config,
            target=config.target if target is None else target,
            instances=len(devices),
            sys_path=list(sys_path),
            wants_headers=wants_headers,
            capture_output=capture_output,
        )
        transport: Transport = resolve("transport", config.transport)(
            spec,
            slots=len(devices),
            devices=devices,
            pool=self.pool,
            reply_bytes=self._limits.reply_bytes,
        )
        handle = ModelHandle(spec, transport, devices, self._limits.max_queue_bytes, self._observers)
        self._live.add(handle)
        return handle

    def _bound(self, name: str, version: str) -> None:
        there = {(h.name, h.version) for h in self._live} - {(name, version)}
        if len(there) >= self._limits.max_versions:
            raise Conflict(
                f"model '{name}' version '{version}': {len(there)} versions are loaded, as many as limits.max_versions"
                " allows; unload one first"
            )

    def abort(self, name: str, version: str | None) -> bool:
        """Ends loads and scale-ups of a version (None: of all) that are under way: they raise Conflict.

        True if there was a load. To be followed by `unload`, if the version is in sight.
        """
        found = [h for h in self._live if h.name == name and version in (None, h.version)]
        return any([h.abort() for h in found])

    async def retire(self, handle: ModelHandle, drain_s: float) -> None:
        """Takes a handle out of sight at once, answers what it has accepted, and ends its workers."""
        self._registry.remove(handle)
        try:
            await handle.close(drain_s)
        finally:
            self._live.discard(handle)
            if not any((h.name, h.version) == (handle.name, handle.version) for h in self._live):
                notify(self._observers, "on_unload", handle.name, handle.version)

    async def unload(self, name: str, version: str | None = None, *, drain_s: float = 30.0) -> None:
        """Takes a version out of sight, answers what it has accepted, and ends its workers. Raises ModelNotFound."""
        await self.retire(self._registry.find(name, version), drain_s)

    async def scale(self, name: str, instances: int, version: str | None = None, *, drain_s: float = 30.0) -> None:
        """See `ModelHandle.scale`. Raises ModelNotFound too."""
        await self._registry.find(name, version).scale(instances, drain_s)

    def version_of(self, name: str, version: str | None) -> str:
        """The version that is meant: without one, the default. Raises ModelNotFound."""
        return self._registry.find(name, version).version

    def set_default(self, name: str, version: str) -> None:
        """Requests that name no version go to this one from now on. Raises ModelNotFound."""
        self._registry.set_default(name, version)

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Requests that name no version are shared out by these weights, whose sum is 1. Raises ModelNotFound,
        ConfigError."""
        self._registry.set_traffic(name, weights)

    def drain(self) -> None:
        """Readiness is false from now on; requests are still answered."""
        self._draining = True

    async def close(self, drain_s: float = 30.0) -> None:
        """Answers what was accepted, at most for `drain_s`, and ends every worker."""
        self._draining = True
        await asyncio.gather(*(handle.close(drain_s) for handle in self._live))
        for handle in list(self._registry):
            self._registry.remove(handle)
        self._live.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def forget(self) -> None:
        """In a forked child: closes this process's copies of the workers' sockets, and touches nothing else."""
        for handle in self._live:
            handle.forget()

    @property
    def pool(self) -> SlabPool:
        """The shared memory of large payloads; made at first use."""
        if self._pool is None:
            self._pool = SlabPool(self._limits.pool_bytes)
        return self._pool

    # ---- requests

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Call:
        """Queues one item; see `Backend.submit`."""
        registry = self._registry
        try:
            # most servers split no traffic: one dictionary look-up finds the handle
            handle = None if registry.splits else registry.handles.get((model, version))
            if handle is None:
                handle = registry.route(model, version)
            return handle.submit(item, sink, budget_s, priority)
        except BaseException:
            release(item)
            raise

    async def infer(
        self,
        model: str,
        payload: Any,
        *,
        version: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Any:
        """What the model returned for `payload`. Raises the item's own error, or that of `submit`."""
        return await self._ask(model, version, Item(payload), budget_s, priority)

    async def infer_many(
        self,
        model: str,
        payloads: Sequence[Any],
        *,
        version: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> list[Any]:
        """What the model returned for each payload, in order; an item that failed has its exception in its place."""
        if not payloads:
            return []
        item = Item(list(payloads), rows=len(payloads), many=True)
        result: list[Any] = await self._ask(model, version, item, budget_s, priority)
        return result

    async def _ask(self, model: str, version: str | None, item: Item, budget_s: float | None, priority: int) -> Any:
        future: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()

        def sink(result: ItemResult) -> None:
            if result.final and not future.done():
                future.set_result(result)

        call = self.submit(model, version, item, sink, budget_s=budget_s, priority=priority)
        try:
            result = await future
        except asyncio.CancelledError:
            call.cancel()
            raise
        if result.error is not None:
            raise result.error
        return result.body

    async def stream(
        self,
        model: str,
        payload: Any,
        *,
        version: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        """The parts of a streaming model's answer as they come. Leaving the loop early cancels the request."""
        parts: asyncio.Queue[ItemResult] = asyncio.Queue()
        call = self.submit(model, version, Item(payload), parts.put_nowait, budget_s=budget_s, priority=priority)
        try:
            while True:
                part = await parts.get()
                if part.error is not None:
                    raise part.error
                if part.body is not None and part.body != b"":
                    yield part.body
                if part.final:
                    return
        finally:
            call.cancel()

    # ---- what front-ends ask

    def ready(self) -> bool:
        """True when every model has a worker up and the engine is not draining."""
        handles = list(self._registry)
        return not self._draining and bool(handles) and all(h.ready for h in handles)

    def model_ready(self, model: str, version: str | None) -> bool:
        return self._registry.find(model, version).ready and not self._draining

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        handle = self._registry.find(model, version)
        if handle.metadata is None:
            raise ModelNotReady(f"model '{model}' is {handle.state.lower()}", retry_after_s=1.0)
        status = handle.status()
        served = {
            "instances": status.ready_instances,
            "max_batch_size": status.max_batch_size,
            "max_request_bytes": min(self._limits.max_body_bytes, self._limits.pool_bytes),
        }
        found = structs.replace(handle.metadata, parameters={**handle.metadata.parameters, **served})
        return found, self._registry.versions(model)

    def statuses(self) -> list[ModelStatus]:
        return [self._status(h) for h in self._registry]

    def all_statuses(self) -> list[ModelStatus]:
        """`statuses`, and those that are out of sight: loading beside another, or draining."""
        seen = set(self._registry)
        hidden = [structs.replace(h.status(), default=False, traffic=0.0) for h in self._live - seen]
        return self.statuses() + hidden

    def _status(self, handle: ModelHandle) -> ModelStatus:
        default, traffic = self._registry.share(handle)
        return structs.replace(handle.status(), default=default, traffic=traffic)

    @property
    def draining(self) -> bool:
        """True once `drain` or `close` was called."""
        return self._draining

    def statistics(self, model: str, version: str | None = None) -> dict[str, object]:
        """What the scheduler of a model has learned and done. Raises ModelNotFound."""
        return self._registry.find(model, version).statistics()

    def reading(self) -> ServerSnapshot:
        """The models and the pool as they stand, for the gauges of metrics."""
        models = {(h.name, h.version): h for h in (*self._live, *self._registry)}  # the one in sight, of two alike
        readings = [models[key].reading() for key in sorted(models)]
        if self._pool is None:
            return ServerSnapshot(readings)
        return ServerSnapshot(readings, self._pool.in_use_bytes, self._pool.capacity_bytes)

    def allocate(self, nbytes: int) -> Slab | None:
        return self.pool.allocate(nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        self.pool.when_free(wake)
