"""Engine: the asyncio API of the core, and the Backend of the front-ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from msgspec import structs

from penstock import tracing
from penstock.config.checks import check_model
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.contracts import Observer, ServerSnapshot, Ticket, Transport
from penstock.core.engine.admission import WaitingRequest
from penstock.core.engine.calls import Call, notify, release
from penstock.core.engine.direct import DirectDriver, DirectTransport
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.inbox import inbox_of
from penstock.core.engine.packages import provide
from penstock.core.engine.registry import ModelRegistry, holder, version_order
from penstock.core.engine.residency import ResidencyManager
from penstock.core.engine.rules import devices_of, sequence_of
from penstock.core.engine.tracing import RequestTracer
from penstock.core.os_threads import usable_cores
from penstock.core.wire.slabs import Slab, SlabPool
from penstock.core.worker.devices import runtime_threads
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, Conflict, LoadFailed, ModelNotReady
from penstock.plugins import resolve
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, SequenceRequest, Sink

log = logging.getLogger("penstock.engine")

_DECLARE: Final = (
    'the model declares no inputs, which some clients need: set inputs = {"x": "FP32[-1,64]"} and outputs alike in'
    " @penstock.model, or in [models.NAME]; see models.md"
)


async def result_of(submit: Callable[[Sink], Ticket]) -> Any:
    """The body of the final result. Raises the errors of `submit` and of the item. Cancels what its caller cancels."""
    future: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()

    def sink(result: ItemResult) -> None:
        if result.final and not future.done():
            future.set_result(result)

    ticket = submit(sink)
    try:
        result = await future
    except asyncio.CancelledError:
        ticket.cancel()
        raise
    if result.error is not None:
        try:
            raise result.error
        finally:  # its traceback refers to this frame: a cycle would keep the payload until the next collection
            del result, ticket, future, sink
    return result.body


def _warn_of_threads(spec: WorkerSpec, devices: Sequence[str]) -> None:
    """Warns of instances on the CPU whose threads together are more than its cores."""
    if spec.config.transport == "process" and "cpu" in devices:
        threads, cores = runtime_threads(spec), usable_cores()
        if threads > 1 and devices.count("cpu") * threads > cores:
            log.warning(
                "event=threads_above_cores model=%s version=%s instances=%d threads=%d cores=%d"
                " consequence=they_slow_each_other hint=%r",
                *(spec.name, spec.version, devices.count("cpu"), threads, cores),
                "leave threads and OMP_NUM_THREADS out, or have fewer instances",
            )


class Engine:
    """Loads models and answers requests. All calls must come from one event loop; `Portal` is the API for threads.

    Use as `async with Engine() as engine`, or call `close()` at the end.
    """

    def __init__(
        self,
        limits: LimitsConfig | None = None,
        observers: Sequence[Observer] = (),
        log_level: str = "",
        budgets: Mapping[str, int] | None = None,
    ) -> None:
        """With `log_level`, the output and the log records of workers appear in the log of this process. `budgets`: the
        bytes of each device that models may use; they are then loaded when they are wanted."""
        self._limits = limits or LimitsConfig()
        self._traced = tracing.tracer is not None
        self._observers = tuple(observers)
        if tracing.tracer is not None:
            self._observers += (RequestTracer(tracing.tracer),)
        self._registry: ModelRegistry[ModelHandle] = ModelRegistry()
        self._live: set[ModelHandle] = set()  # includes hidden ones, which load or drain
        self._pool: SlabPool | None = None
        self.log_level = log_level
        self._residency = ResidencyManager(budgets or {})
        self.draining = False

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- models

    def expect(self, names: Iterable[str]) -> None:
        """Until the next call, requests for these models get ModelNotReady where they would get ModelNotFound."""
        self._registry.expected = frozenset(names)

    async def load(
        self, name: str, config: ModelConfig, *, target: Any = None, sys_path: Sequence[str] = (), keep: bool = False
    ) -> None:
        """Starts the instances of a model and waits until one is up. Until then the model is visible as LOADING.

        `target`: a function, class or object that overrides `config.target`, for callers in this process. `keep`: see
        `put`.

        Raises LoadFailed, TargetNotFound, ConfigError; ModelNotReady if the engine is closed or closes meanwhile.
        """
        handle = self.prepare(name, config, target=target, sys_path=sys_path)
        try:
            self._show(handle, None)
            await self._bring_up(handle, keep)
        except BaseException:
            await self.retire(handle, 0)
            raise

    async def put(self, handle: ModelHandle, *, drain_s: float = 30.0, keep: bool = False) -> None:
        """Loads a prepared version while it is hidden, then makes it visible; it replaces an equal version.

        Returns when a replaced version has answered its accepted requests. Raises the errors of `load`; then nothing
        has changed. `keep`: a version that does not load stays as FAILED, and its workers are restarted repeatedly.
        """
        try:
            await self._bring_up(handle, keep)
            if handle.state == "DRAINING":
                raise ModelNotReady(f"model '{handle.name}' was stopped while it was loading")
            old = self._registry.get(handle.name, handle.version)
            self._show(handle, old)
        except BaseException:
            await self.retire(handle, 0)
            raise
        if old is not None:
            await self.retire(old, drain_s)

    def _show(self, handle: ModelHandle, old: ModelHandle | None) -> None:
        """Makes a version visible, in place of `old`, and the default if its configuration says so."""
        if old is None:
            self._registry.add(handle)
        else:
            self._registry.replace(old, handle)
        if handle.config.default:
            self._registry.set_default(handle.name, handle.version)
        elif old is not None and old.config.default:
            self._registry.unset_default(handle.name)
        self._route(handle.name)

    async def _bring_up(self, handle: ModelHandle, keep: bool) -> None:
        """Loads a version. If residency manages it, the first request does, unless another version of it is up."""
        try:
            await provide(handle.spec)
            others = self._registry.versions(handle.name).values()
            if self._residency.manages(handle):
                await self._residency.add(handle, at_once=any(other.instances.up for other in others))
            else:
                await handle.load()
        except (LoadFailed, ConfigError) as e:
            if not keep:
                raise
            detail = f"\n{e.detail}" if e.detail else ""
            log.warning("load_failed model=%s error=%s: retrying%s", handle.name, e, detail)

    def prepare(
        self,
        name: str,
        config: ModelConfig,
        *,
        target: Any = None,
        sys_path: Sequence[str] = (),
        wants_headers: bool = False,
        capture_output: bool = False,
        instances: int | None = None,
    ) -> ModelHandle:
        """A hidden version for `put`, not loaded yet. `WorkerSpec` defines the flags. `instances`: at first, in place
        of the configured number.

        Raises ConfigError, ModelNotReady, and Conflict at the maximum number of versions.
        """
        if self.draining:
            raise ModelNotReady(f"model '{name}' is not loaded: the engine is draining or closed")
        if target is None and not isinstance(config.target, str):  # a class or function, from Python
            target = config.target
            config = structs.replace(config, target=getattr(target, "__name__", type(target).__name__))
        check_model(config, f"model '{name}': ")
        self._check_version_limit(name, config.version)
        devices = devices_of(config if instances is None else structs.replace(config, instances=instances))
        spec = WorkerSpec(
            name=name,
            version=config.version,
            config=config,
            target=config.target if target is None else target,
            instances=len(devices),
            sys_path=list(sys_path),
            wants_headers=wants_headers,
            capture_output=capture_output or bool(self.log_level),
            log_level=self.log_level,
            traced=self._traced,
        )
        _warn_of_threads(spec, devices)
        driver = self._direct_driver(name, config)
        transport: Transport
        if driver is not None:
            transport = DirectTransport(spec, len(devices), devices, driver)
        else:
            transport = resolve("transport", config.transport)(
                spec, slots=len(devices), devices=devices, pool=self.pool, reply_bytes=self._limits.reply_bytes
            )
        handle = ModelHandle(spec, transport, devices, self._limits.max_queue_bytes, self._observers, driver=driver)
        if driver is not None:
            handle.on_state = partial(asyncio.get_running_loop().call_soon_threadsafe, self._route, name)
        self._live.add(handle)
        return handle

    def _direct_driver(self, name: str, config: ModelConfig) -> DirectDriver | None:
        """The driver of a model in threads that answers the threads of a portal. None for a model whose instances come
        and go with the load: that is decided on the loop."""
        loop = asyncio.get_running_loop()
        inbox = inbox_of(loop)
        if inbox is None or config.transport != "thread" or config.autoscale.max is not None:
            return None
        return DirectDriver(name, inbox, loop)

    def _route(self, name: str) -> None:
        """Lets requests for a model go to its own threads while they can answer all of them."""
        inbox = inbox_of(asyncio.get_running_loop())
        if inbox is None:
            return
        handle = None if name in self._registry.splits else self._registry.handles.get((name, None))
        with inbox.guard:
            old = inbox.routes.pop(name, None)
            driver = None if handle is None or handle.state != "READY" or self.draining else handle.driver
            if handle is not None and isinstance(driver, DirectDriver):
                inbox.routes[name] = driver
                driver.submit_row = handle.submit if handle.sequences is None else None
            if old is not None and old is not inbox.routes.get(name):
                old.submit_row = None
                old.woken()  # nobody else tells it any more that the answered threads have run

    def _check_version_limit(self, name: str, version: str) -> None:
        loaded = {(h.name, h.version) for h in self._live} - {(name, version)}
        if len(loaded) >= self._limits.max_versions:
            raise Conflict(
                f"model '{name}' version '{version}': {len(loaded)} versions are loaded, the maximum of"
                " limits.max_versions; unload one first"
            )

    def abort(self, name: str, version: str | None) -> bool:
        """Aborts pending loads and scale-ups of a version (None: all versions); they raise Conflict.

        True if there was a load. The caller then unloads the version if it is visible.
        """
        found = [h for h in self._live if h.name == name and version in (None, h.version)]
        return any([h.instances.abort() for h in found])

    async def retire(self, handle: ModelHandle, drain_s: float) -> None:
        """Hides a handle at once, answers its accepted requests and ends its workers."""
        self._registry.remove(handle)
        self._route(handle.name)
        self._residency.remove(handle)
        try:
            await handle.close(drain_s)
        finally:
            self._residency.gone(handle)
            self._live.discard(handle)
            if not any((h.name, h.version) == (handle.name, handle.version) for h in self._live):
                notify(self._observers, "on_unload", handle.name, handle.version)

    async def unload(self, name: str, version: str | None = None, *, drain_s: float = 30.0) -> None:
        """Hides a version, answers its accepted requests and ends its workers. Raises ModelNotFound."""
        await self.retire(self._registry.find(name, version), drain_s)

    async def scale(self, name: str, instances: int, version: str | None = None, *, drain_s: float = 30.0) -> None:
        """See `ModelHandle.scale`. Also raises ModelNotFound."""
        await self._registry.find(name, version).scale(instances, drain_s)

    def version_of(self, name: str, version: str | None) -> str:
        """The version, or the default version for None. Raises ModelNotFound."""
        return self._registry.find(name, version).version

    def set_drained(self, name: str, version: str, drained: bool) -> None:
        """See `ModelHandle.set_drained`. Also raises ModelNotFound, and Conflict if no other version would answer the
        requests without a version."""
        handle = self._registry.find(name, version)
        if drained and not any(h.ready for h in self._registry.versions(name).values() if h is not handle):
            raise Conflict(
                f"no other version of model '{name}' is ready: every request would fail; load one first, or unload this"
            )
        if drained and self._registry.holds_default(handle):
            raise Conflict(f"version '{version}' is the default that was set for '{name}': set another one first")
        handle.set_drained(drained)
        self._route(name)

    def set_default(self, name: str, version: str) -> None:
        """Sends requests without a version to this one. Raises ModelNotFound."""
        self._registry.set_default(name, version)
        self._route(name)

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Splits requests without a version by weights whose sum is 1. Raises ModelNotFound, ConfigError."""
        self._registry.set_traffic(name, weights)
        self._route(name)

    def drain(self) -> None:
        """Makes the engine unready; it still answers requests."""
        self.draining = True

    async def close(self, drain_s: float = 30.0) -> None:
        """Answers accepted requests for at most `drain_s`, then ends every worker."""
        self.draining = True
        for handle in self._live:
            self._route(handle.name)
        self._residency.close()
        await asyncio.gather(*(handle.close(drain_s) for handle in self._live))
        for handle in list(self._registry):
            self._registry.remove(handle)
        self._live.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def forget(self) -> None:
        """In a forked child: closes this process's copies of the workers' sockets and nothing else."""
        for handle in self._live:
            handle.instances.forget()

    @property
    def pool(self) -> SlabPool:
        """The shared memory of large payloads; created at first use."""
        if self._pool is None:
            self._pool = SlabPool(self._limits.pool_bytes)
        return self._pool

    # ---- requests

    @property
    def guard(self) -> AbstractContextManager[object]:
        """What a coroutine holds while it submits requests, because threads of models may answer others."""
        inbox = inbox_of(asyncio.get_running_loop())
        return nullcontext() if inbox is None else inbox.guard

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Call | WaitingRequest:
        """Queues one item; see `Backend.submit`. Called with the guard."""
        registry = self._registry
        try:
            # without a traffic split, one dictionary look-up finds the handle, unless the newest version is not up
            handle = None if registry.splits else registry.handles.get((model, version))
            if handle is None or (version is None and handle.state != "READY"):
                handle = registry.route(model, version)
            if handle.sequences is not None and version is None:
                item.sequence = sequence_of(item)
                handle = holder(registry, handle, item.sequence)
            return handle.submit(item, sink)
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
        sequence: SequenceRequest | None = None,
    ) -> Any:
        """The result of the model for `payload`. Raises the error of the item or of `submit`."""
        item = Item(payload, budget_s=budget_s, priority=priority, sequence=sequence)
        return await self._ask(model, version, item)

    async def infer_many(
        self,
        model: str,
        payloads: Sequence[Any],
        *,
        version: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> list[Any]:
        """The result of the model for each payload, in order; an exception for an item that failed."""
        if not payloads:
            return []
        item = Item(list(payloads), rows=len(payloads), many=True, budget_s=budget_s, priority=priority)
        result: list[Any] = await self._ask(model, version, item)
        return result

    async def _ask(self, model: str, version: str | None, item: Item) -> Any:
        return await result_of(lambda sink: self._submit_here(model, version, item, sink))

    def _submit_here(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """`submit` for a coroutine: `sink` is called on its loop, whichever thread answers."""
        loop = asyncio.get_running_loop()
        item.source = tracing.caller()

        def on_loop(result: ItemResult) -> None:
            loop.call_soon_threadsafe(sink, result)

        with self.guard:
            return self.submit(model, version, item, sink if inbox_of(loop) is None else on_loop)

    async def stream(
        self,
        model: str,
        payload: Any,
        *,
        version: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
        sequence: SequenceRequest | None = None,
    ) -> AsyncIterator[Any]:
        """Yields the parts of a streaming model's answer. Leaving the loop early cancels the request."""
        parts: asyncio.Queue[ItemResult] = asyncio.Queue()
        item = Item(payload, budget_s=budget_s, priority=priority, sequence=sequence)
        call = self._submit_here(model, version, item, parts.put_nowait)
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

    def observe(self, observer: Observer) -> None:
        """Adds an observer; it hears of what happens from now on. Called with the guard."""
        self._observers += (observer,)
        for handle in (*self._live, *self._registry):
            handle.observe(self._observers)

    # ---- state, for front-ends

    def ready(self) -> bool:
        """True if every model has a worker up and the engine is not draining."""
        handles = self._registry.handles
        if self.draining or not handles:
            return False
        for handle in handles.values():  # noqa: SIM110 - a generator costs a rare health check, on cold caches, 0.01 ms
            if not handle.ready and handle.state != "DRAINED":
                return False
        return True

    def model_ready(self, model: str, version: str | None) -> bool:
        return self._registry.find(model, version).ready and not self.draining

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        handle = self._registry.find(model, version)
        if handle.metadata is None:
            if handle.on_wanted is not None:
                handle.on_wanted()
            raise ModelNotReady(f"model '{model}' is {handle.state.lower()}", retry_after_s=1.0)
        status = handle.status()
        served: dict[str, Any] = {
            "instances": status.ready_instances,
            "max_batch_size": 0 if handle.metadata.unbatched else status.max_batch_size,
            "max_request_bytes": min(self._limits.max_body_bytes, self._limits.pool_bytes),
        }
        if not handle.metadata.inputs and handle.metadata.platform == "python":
            served["hint"] = _DECLARE
        if handle.mode == "continuous":
            served["mode"] = handle.mode
        if handle.config.preprocess_processes:
            served["preprocess_processes"] = handle.config.preprocess_processes
        if handle.sequences is not None:
            served["max_sequences"] = handle.batching.max_sequences
        found = structs.replace(handle.metadata, parameters={**handle.metadata.parameters, **served})
        return found, sorted(self._registry.versions(model), key=version_order)

    def handle(self, model: str, version: str | None) -> ModelHandle:
        """The version, or the default version for None. Raises ModelNotFound."""
        return self._registry.find(model, version)

    def handles(self) -> list[ModelHandle]:
        """The visible versions."""
        return list(self._registry)

    def statuses(self) -> list[ModelStatus]:
        return [self._status(h) for h in self._registry]

    def all_statuses(self) -> list[ModelStatus]:
        """`statuses`, and the hidden versions, which load or drain."""
        hidden = [structs.replace(h.status(), default=False, traffic=0.0) for h in self._live - set(self._registry)]
        return self.statuses() + hidden

    def _status(self, handle: ModelHandle) -> ModelStatus:
        default, traffic = self._registry.share(handle)
        return structs.replace(handle.status(), default=default, traffic=traffic)

    def statistics(self, model: str, version: str | None = None) -> dict[str, object]:
        """The statistics of the model's scheduler. Raises ModelNotFound."""
        return self._registry.find(model, version).statistics()

    def reading(self) -> ServerSnapshot:
        """The state of the models and the pool, for the metric gauges."""
        models = {(h.name, h.version): h for h in (*self._live, *self._registry)}  # visible ones win
        visible = set(self._registry)
        readings = []
        for key in sorted(models):
            readings.append(reading := models[key].reading())
            default, traffic = self._registry.share(models[key]) if models[key] in visible else (False, 0.0)
            reading.status = structs.replace(reading.status, default=default, traffic=traffic)
        devices = self._residency.snapshot()
        if self._pool is None:
            return ServerSnapshot(readings, devices=devices)
        return ServerSnapshot(readings, self._pool.in_use_bytes, self._pool.capacity_bytes, devices=devices)

    def allocate(self, nbytes: int) -> Slab | None:
        return self.pool.allocate(nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        self.pool.when_free(wake)
