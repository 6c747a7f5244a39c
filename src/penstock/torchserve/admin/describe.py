"""The description of a version in `GET /models/{m}`: settings, workers, queue and the handler's own metadata."""

import asyncio
import itertools
import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import to_builtins

from penstock.core.contracts import Ticket
from penstock.core.engine.engine import Engine, result_of
from penstock.core.engine.instances import WorkerSnapshot
from penstock.core.readings import Gpus, resident_bytes
from penstock.errors import ModelNotFound, ModelNotReady, QueueFull
from penstock.torchserve.admin.model_spec import SEQUENCE_KEYS
from penstock.torchserve.admin.models import ModelVersion
from penstock.torchserve.admin.workers import DeviceAllocator
from penstock.torchserve.protocol.api import ApiError
from penstock.types import Item, Sink

_TIMES: Final = (
    "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout", "maxRetryTimeoutInSec", "clientTimeoutInMills",
)  # fmt: skip


class ModelDescriber:
    """Describes versions. Worker ids count up over all models, from `initial_worker_port`."""

    def __init__(self, engine: Engine, devices: DeviceAllocator, first_id: int) -> None:
        self._engine = engine
        self._devices = devices
        self._ids = itertools.count(first_id)
        self._gpus = Gpus()

    def number(self, version: ModelVersion) -> list[WorkerSnapshot]:
        """The version's workers, each with an id in `version.worker_ids`. Call this after every change of workers."""
        workers = [] if version.handle is None else version.handle.instances.workers()
        version.worker_ids = {w.slot: version.worker_ids.get(w.slot) or next(self._ids) for w in workers}
        return workers

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
            "workers": [_worker(w, version.worker_ids[w.slot], usage) for w in self.number(version)],
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
            except (ModelNotFound, ModelNotReady, QueueFull) as e:
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
