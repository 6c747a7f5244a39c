"""Engine: the asyncio face of everything below it, and the Backend that front-ends are handed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.engine.call import Call, release
from penstock.engine.handle import ModelHandle, slots_of
from penstock.engine.registry import ModelRegistry
from penstock.errors import ModelNotReady
from penstock.observe.base import Observer
from penstock.transports.make import make_transport
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, Sink
from penstock.wire.slabs import Slab, SlabPool
from penstock.worker.spec import WorkerSpec


class Engine:
    """Loads models, and answers requests for them. All calls on one event loop; `Portal` is the face for threads.

    Use as `async with Engine() as engine`, or call `close()` at the end.
    """

    def __init__(self, limits: LimitsConfig | None = None, observers: Sequence[Observer] = ()) -> None:
        self._limits = limits or LimitsConfig()
        self._observers = tuple(observers)
        self._registry = ModelRegistry()
        self._pool: SlabPool | None = None
        self._draining = False

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- models

    async def load(self, name: str, config: ModelConfig, *, target: Any = None, sys_path: Sequence[str] = ()) -> None:
        """Starts the instances of a model and returns when one is up.

        Raises LoadFailed, TargetNotFound, ConfigError; ModelNotReady when the engine is closed, now or meanwhile.

        `target`: a function, class or object in place of `config.target`, for callers in this process.
        """
        if self._draining:
            raise ModelNotReady(f"model '{name}' is not loaded: the engine is draining or closed")
        slots, devices = slots_of(config)
        spec = WorkerSpec(
            name=name,
            version=config.version,
            config=config,
            target=config.target if target is None else target,
            instances=slots,
            sys_path=list(sys_path),
        )
        transport = make_transport(
            config.transport,
            spec,
            slots=slots,
            devices=devices,
            pool=self.pool,
            reply_bytes=self._limits.reply_bytes,
        )
        handle = ModelHandle(name, config, transport, devices, self._limits.max_queue_bytes, self._observers)
        self._registry.add(handle)
        try:
            await handle.load()
        except BaseException:
            self._registry.remove(handle)
            await handle.close(0)
            raise

    async def unload(self, name: str, version: str | None = None, *, drain_s: float = 30.0) -> None:
        """Takes a version out of sight, answers what it has accepted, and ends its workers. Raises ModelNotFound."""
        handle = self._registry.find(name, version)
        self._registry.remove(handle)
        await handle.close(drain_s)

    def drain(self) -> None:
        """Readiness is false from now on; requests are still answered."""
        self._draining = True

    async def close(self, drain_s: float = 30.0) -> None:
        """Answers what was accepted, at most for `drain_s`, and ends every worker."""
        self._draining = True
        handles = list(self._registry)
        await asyncio.gather(*(handle.close(drain_s) for handle in handles))
        for handle in handles:
            self._registry.remove(handle)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def forget(self) -> None:
        """In a forked child: closes this process's copies of the workers' sockets, and touches nothing else."""
        for handle in self._registry:
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
        """Queues one item; see `frontends.base.Backend.submit`."""
        try:
            return self._registry.find(model, version).submit(item, sink, budget_s, priority)
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
        return handle.metadata, self._registry.versions(model)

    def statuses(self) -> list[ModelStatus]:
        return [h.status() for h in self._registry]

    def statistics(self, model: str, version: str | None = None) -> dict[str, object]:
        """What the scheduler of a model has learned and done. Raises ModelNotFound."""
        return self._registry.find(model, version).statistics()

    def allocate(self, nbytes: int) -> Slab | None:
        return self.pool.allocate(nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        self.pool.when_free(wake)
