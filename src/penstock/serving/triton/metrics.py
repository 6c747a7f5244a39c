"""Triton's metrics, with its names, types, labels and help texts, from the counters of its statistics.

Source: core/src/metrics.cc of Triton, without caches and pinned memory, which do not exist here.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final

import psutil

from penstock.core.contracts import ModelSnapshot
from penstock.core.readings import GpuPower, GpuReading
from penstock.serving.observe.text import Family, Page
from penstock.serving.triton.statistics import Duration, ModelStatistics

_MODEL: Final = ("model", "version")
_PENDING: Final = "Instantaneous number of pending requests awaiting execution per-model."
_US: Final = "duration in microseconds"
_RUN: Final = "(does not include cached requests)"
_COUNTERS: Final = (  # name, help text, attribute of VersionStatistics
    ("request_success", "Number of successful inference requests, all batch sizes", "success.count"),
    ("count", f"Number of inferences performed {_RUN}", "rows"),
    ("exec_count", f"Number of model executions performed {_RUN}", "batches"),
    ("request_duration_us", f"Cumulative inference request {_US} (includes cached requests)", "success"),
    ("queue_duration_us", f"Cumulative inference queuing {_US} (includes cached requests)", "queue"),
    ("compute_input_duration_us", f"Cumulative compute input {_US} {_RUN}", "stages.compute_input"),
    ("compute_infer_duration_us", f"Cumulative compute inference {_US} {_RUN}", "stages.compute_infer"),
    ("compute_output_duration_us", f"Cumulative inference compute output {_US} {_RUN}", "stages.compute_output"),
)
_ENERGY: Final = "GPU energy consumption in joules since the Triton Server started"
_GPUS: Final[tuple[tuple[str, str, Callable[[GpuReading, GpuPower], float | None]], ...]] = (
    ("gpu_utilization", "GPU utilization rate [0.0 - 1.0)", lambda gpu, _: gpu[1]),
    ("gpu_memory_total_bytes", "GPU total memory, in bytes", lambda gpu, _: gpu[3]),
    ("gpu_memory_used_bytes", "GPU used memory, in bytes", lambda gpu, _: gpu[2]),
    ("gpu_power_usage", "GPU power usage in watts", lambda _, power: power.draw_w),
    ("gpu_power_limit", "GPU power management limit in watts", lambda _, power: power.limit_w),
    ("energy_consumption", _ENERGY, lambda _, power: power.energy_j),
)


class TritonMetrics:
    """Writes the metrics of the listed versions, and of the machine."""

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics

    def write_models(self, page: Page, models: Iterable[ModelSnapshot]) -> None:
        queued = {m.key: m.status.queue for m in models}
        found = {key: self._statistics.of(*key) for key in queued}
        for name, text, attribute in _COUNTERS:
            read = ((key, attrgetter(attribute)(each)) for key, each in found.items())
            samples = ((key, round(n.seconds * 1e6) if isinstance(n, Duration) else n) for key, n in read)
            page.write(Family(f"nv_inference_{name}", "counter", _MODEL, text), samples)
        text, labels = "Number of failed inference requests, all batch sizes", (*_MODEL, "reason")
        failures = (((*key, why), n) for key, each in found.items() for why, n in each.failures.items())
        page.write(Family("nv_inference_request_failure", "counter", labels, text), failures)
        page.write(Family("nv_inference_pending_request_count", "gauge", _MODEL, _PENDING), queued.items())

    def write_machine(self, page: Page, gpus: Sequence[tuple[GpuReading, GpuPower]]) -> None:
        memory = psutil.virtual_memory()
        for name, text, number in (
            # since the last call on this thread, of which a page has one
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", psutil.cpu_percent() / 100),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory.total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", memory.total - memory.available),
        ):
            page.write(Family(name, "gauge", (), text), [((), number)])
        for name, text, value in _GPUS if gpus else ():
            kind = "counter" if text is _ENERGY else "gauge"
            read = (((power.uuid,), value(gpu, power)) for gpu, power in gpus)
            page.write(Family(f"nv_{name}", kind, ("gpu_uuid",), text), ((key, n) for key, n in read if n is not None))
