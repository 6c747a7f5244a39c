"""The workers of model versions: started, scaled, stopped and described, on the GPUs that may be used."""

import asyncio
import itertools
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from msgspec import structs, to_builtins

from penstock import errors
from penstock.config.schema import AutoscaleConfig, ModelConfig
from penstock.core.contracts import Ticket
from penstock.core.engine.engine import Engine, result_of
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.instances import WorkerSnapshot
from penstock.core.readings import Gpus, resident_bytes
from penstock.core.worker.devices import visible_gpus
from penstock.core.worker.spec import Wrapped
from penstock.torchserve.admin.model_spec import SEQUENCE_KEYS, ModelSettings, ModelSpec
from penstock.torchserve.admin.models import ModelVersion
from penstock.torchserve.protocol.api import ApiError
from penstock.types import Item, Sink

_TIMES: Final = (
    "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout", "maxRetryTimeoutInSec", "clientTimeoutInMills",
)  # fmt: skip


def usable_gpus(limit: int | None, environment: Mapping[str, str] = os.environ, found: int | None = None) -> int:
    """The number of GPUs that CUDA_VISIBLE_DEVICES shows, at most `limit` (number_of_gpu)."""
    count = visible_gpus(environment, found)
    return count if limit is None else min(count, limit)


class DeviceAllocator:
    """Assigns GPUs round robin over all models; a model with deviceIds keeps to its own."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._next = 0

    def kind(self, settings: ModelSettings) -> str:
        """ "gpu" or "cpu": the device type of the model's workers."""
        return "cpu" if not self.gpus or settings.device_type == "cpu" else "gpu"

    def take(self, settings: ModelSettings, workers: int) -> tuple[str, ...]:
        """The devices of a model that starts this many workers, in order of use."""
        if self.kind(settings) == "cpu":
            return ("cpu",)
        own = [i for i in settings.device_ids if i < self.gpus]
        if own:
            return _device_names(own, settings.gpus)
        first = self._next
        self._next = (first + workers * settings.gpus) % self.gpus
        return _device_names([(first + i) % self.gpus for i in range(self.gpus)], settings.gpus)


def _device_names(ids: Sequence[int], each: int) -> tuple[str, ...]:
    """The devices of workers with `each` GPUs: whole groups if there are enough, else one with all of them."""
    starts = range(0, max(1, len(ids) - each + 1), each)
    return tuple("cuda:" + ",".join(map(str, ids[i : i + each])) for i in starts)


class WorkerManager:
    """Starts, scales and stops the workers of versions. Changes hold `version.lock` and raise ApiError.

    Worker ids count up over all models, from `first_id`.
    """

    def __init__(self, engine: Engine, devices: DeviceAllocator, drain_s: float, first_id: int) -> None:
        self._engine = engine
        self._devices = devices
        self._drain_s = drain_s
        self._ids = itertools.count(first_id)

    async def start(self, version: ModelVersion, workers: int, *, keep: bool) -> None:
        """Returns when every worker has reported and at least one is up; with `keep`, also when none is."""
        async with version.lock:
            try:
                await self._start(version, workers, keep)
            except errors.PenstockError as e:
                raise _failure(version, version.version, e) from e
            finally:
                self.number(version)

    async def scale(self, version: ModelVersion, minimum: int, maximum: int, named: str | None) -> None:
        """Returns when there are `minimum` to `maximum` workers. A failure changes nothing."""
        async with version.lock:
            now = 0 if version.handle is None else len(version.handle.instances.workers())
            target = min(max(now, minimum), maximum)
            before = version.min_workers, version.max_workers, version.expected
            version.min_workers, version.max_workers = minimum, maximum
            version.expected = min(version.expected, target)
            try:
                await self._scale(version, now, target)
            except errors.PenstockError as e:
                version.min_workers, version.max_workers, version.expected = before
                raise _failure(version, named, e) from e
            finally:
                self.number(version)
            version.expected = target

    async def replace(self, version: ModelVersion, spec: ModelSpec) -> None:
        """Starts the same number of workers of the new spec, then stops the old ones. A failure changes nothing."""
        async with version.lock:
            old = version.handle
            if old is None or version.gone:
                version.spec = spec
                return
            config = structs.replace(
                spec.config,
                instances=max(1, len(old.instances.workers())),
                devices=old.config.devices,
                autoscale=_autoscale(version),
            )
            try:
                handle = self._prepare(spec, config)
                await self._engine.put(handle, drain_s=self._drain_s)
            except errors.PenstockError as e:
                raise _failure(version, version.version, e) from e
            version.spec, version.handle = spec, handle

    def number(self, version: ModelVersion) -> list[WorkerSnapshot]:
        """The version's workers, each with an id in `version.worker_ids`."""
        workers = [] if version.handle is None else version.handle.instances.workers()
        version.worker_ids = {w.slot: version.worker_ids.get(w.slot) or next(self._ids) for w in workers}
        return workers

    def _prepare(self, spec: ModelSpec, config: ModelConfig) -> ModelHandle:
        target = Wrapped(None, config.target, {"setup": spec.setup})
        return self._engine.prepare(spec.name, config, target=target, wants_headers=True, capture_output=True)

    async def stop(self, version: ModelVersion) -> None:
        """Stops the workers of a version that is `gone`: loading workers at once, the others after draining."""
        assert version.gone
        if version.loading:
            assert version.handle is not None
            version.handle.instances.abort()
            async with version.lock:
                return
        await self._retire(version)

    async def _scale(self, version: ModelVersion, now: int, target: int) -> None:
        if version.gone:
            raise errors.Conflict(f"model '{version.name}' was unregistered during the change")
        if not target and (version.handle is None or not version.max_workers):  # else the load may start one
            await self._retire(version)
        elif version.handle is None:
            await self._start(version, target, keep=False)
        else:
            version.handle.follow_load(AutoscaleConfig())
            try:
                if target != now:
                    await version.handle.scale(target, self._drain_s)
            finally:
                version.handle.follow_load(_autoscale(version))

    async def _start(self, version: ModelVersion, workers: int, keep: bool) -> None:
        if version.gone:
            raise errors.Conflict(f"model '{version.name}' was unregistered before its workers started")
        spec = version.spec
        devices = self._devices.take(spec.settings, workers)
        config = structs.replace(spec.config, instances=workers, devices=devices, autoscale=_autoscale(version))
        version.handle = self._prepare(spec, config)
        version.loading = True
        try:
            await self._engine.put(version.handle, drain_s=self._drain_s, keep=keep)
        except BaseException:
            version.handle = None
            raise
        finally:
            version.loading = False
            # without a worker they fail
            version.pending.forward(partial(self._engine.submit, version.name, version.version))
        version.expected = workers

    async def _retire(self, version: ModelVersion) -> None:
        handle, version.handle = version.handle, None
        if handle is not None:
            await self._engine.retire(handle, self._drain_s)


def _autoscale(version: ModelVersion) -> AutoscaleConfig:
    """minWorkers to maxWorkers as limits of the load, unless they are equal. An instance with sequences stays."""
    fewest, most = version.min_workers, version.max_workers
    if fewest >= most or version.spec.config.batching.max_sequences:
        return AutoscaleConfig()
    return AutoscaleConfig(min=max(1, fewest), max=most, scale_to_zero=fewest == 0)


def _failure(version: ModelVersion, named: str | None, error: errors.PenstockError) -> ApiError:
    """The error that a client receives when workers do not start."""
    if isinstance(error, errors.Conflict) or version.gone:
        return ApiError("ConflictStatusException", error.message)
    if isinstance(error, errors.ModelNotReady):
        return ApiError("ServiceUnavailableException", error.message)
    if isinstance(error, (errors.ConfigError, errors.BadRequest)):
        return ApiError("BadRequestException", error.message)
    status = 507 if isinstance(error, errors.LoadOutOfMemory) else 500
    text = f"Failed to start workers for model {version.name} version: {named or 'null'}"
    return ApiError("InternalServerException", text, status=status, detail=error.detail or error.message)


# ---- descriptions


class ModelDescriber:
    """Describes versions, with their workers as `WorkerManager.number` gives them."""

    def __init__(self, engine: Engine, devices: DeviceAllocator, workers: WorkerManager) -> None:
        self._engine = engine
        self._devices = devices
        self._workers = workers
        self._gpus = Gpus()

    async def describe(self, versions: Sequence[ModelVersion], *, customized: bool) -> list[dict[str, Any]]:
        """The JSON objects of the versions. Raises ApiError for `customized` without workers."""
        usage = await self._usage() if self._devices.gpus else {}
        found = [self._describe(version, usage) for version in versions]
        if customized:
            metadata = await asyncio.gather(*(self._customized(version) for version in versions))
            for description, each in zip(found, metadata, strict=True):
                description["customizedMetadata"] = each
        return found

    def _describe(self, version: ModelVersion, usage: dict[str, str]) -> dict[str, Any]:
        spec, s = version.spec, version.spec.settings
        settings = to_builtins(s)
        queued = len(version.pending) + (0 if version.handle is None else version.handle.status().queue)
        return {
            "modelName": spec.name,
            "modelVersion": spec.version,
            "modelUrl": spec.url or None,
            "runtime": spec.runtime,
            "minWorkers": version.min_workers,
            "maxWorkers": version.max_workers,
            **{key: settings[key] for key in _TIMES},
            "parallelType": s.parallel_type,
            "parallelLevel": s.parallel_level if s.torchrun is None else s.torchrun.nproc_per_node,
            "deviceType": self._devices.kind(s),
            **({"deviceIds": list(s.device_ids)} if s.device_ids else {}),
            "continuousBatching": s.continuous_batching,
            "useJobTicket": s.use_job_ticket,
            "useVenv": s.use_venv,
            "stateful": s.sequence_batching,
            **{key: settings[key] for key in SEQUENCE_KEYS},
            "loadedAtStartup": version.at_startup,
            "workers": [_worker(w, version.worker_ids[w.slot], usage) for w in self._workers.number(version)],
            "jobQueueStatus": {"remainingCapacity": max(0, s.job_queue_size - queued), "pendingRequests": queued},
        }

    async def _customized(self, version: ModelVersion) -> dict[str, Any]:
        """The handler's description of itself. Raises the handler's error."""
        item = Item(
            b"",
            codec="torchserve",
            request_id=str(uuid.uuid4()),
            headers=[(b"describe", b"True"), (b"explain", b"False")],
        )

        def submit(sink: Sink) -> Ticket:
            try:
                return self._engine.submit(version.name, version.version, item, sink)
            except (errors.ModelNotFound, errors.ModelNotReady, errors.QueueFull) as e:
                raise ApiError(
                    "ServiceUnavailableException",
                    f'Model "{version.name}" has no worker to serve describe request. Please use scale workers API to'
                    " add workers.",
                ) from e

        body = await result_of(submit)
        try:
            metadata = json.loads(bytes(body))
        except ValueError:
            metadata = None
        return metadata if isinstance(metadata, dict) else {}

    async def _usage(self) -> dict[str, str]:
        """The usage of each GPU by device name, read on a thread because the driver may be slow."""

        def read() -> dict[str, str]:
            return {
                f"cuda:{index}": f"gpuId::{index} utilization.gpu [%]::{busy:.0%} memory.used [MiB]::{used >> 20} MiB"
                for (index, _), busy, used, _ in self._gpus.read()
            }

        return await asyncio.to_thread(read)


def _worker(worker: WorkerSnapshot, number: int, usage: dict[str, str]) -> dict[str, Any]:
    since = datetime.fromtimestamp(worker.since_s, UTC).isoformat(timespec="milliseconds")
    gpu = worker.device != "cpu"
    return {
        "id": str(number),
        "startTime": since.replace("+00:00", "Z"),
        "status": "READY" if worker.up else "UNLOADING",
        "memoryUsage": resident_bytes(worker.pid) if worker.pid else 0,
        "pid": worker.pid,
        "gpu": gpu,
        "gpuUsage": usage.get(worker.device, "failed to obtained gpu usage") if gpu else "N/A",
    }
