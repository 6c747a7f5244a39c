"""Triton's statistics extension: an Observer that counts requests, batches and their nanoseconds for each version."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct, field

from penstock.core.contracts import BatchRecord, Observer
from penstock.errors import BadRequest, PenstockError
from penstock.serving.observe.history import StageTotals

MAX_BATCH_SIZES: Final = 1024  # of one version; batches of further sizes are in the sums only
COUNTED: Final = 64  # responses or batches at once: one by one they would take 15 calls of each request
_NS: Final = 1e9
REASONS: Final = {  # reason of `on_reject` -> reason of a failure in Triton; all others are OTHER
    **dict.fromkeys(("queue_full", "expired", "timeout", "overload"), "REJECTED"),
    "cancelled": "CANCELED",
    **dict.fromkeys(("worker_died", "sequence_lost"), "BACKEND"),
}


class Duration(Struct, gc=False):
    """A number of events and their total time."""

    count: int = 0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        self.count += count
        self.seconds += seconds

    def body(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(self.seconds * _NS)}


class Stages(Struct):
    """The time of decoding and preprocessing, of prediction, and of postprocessing and encoding."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, count: int, stages_s: tuple[float, float, float]) -> None:
        """Adds the stages of one batch, for each of `count` requests or for the batch itself."""
        self.compute_input.add(count, count * stages_s[0])
        self.compute_infer.add(count, count * stages_s[1])
        self.compute_output.add(count, count * stages_s[2])

    def body(self) -> dict[str, dict[str, int]]:
        return {name: getattr(self, name).body() for name in self.__struct_fields__}


class VersionStatistics(Struct):
    """What one version has done since it was loaded."""

    last_s: float = 0.0  # Unix time of the last batch
    rows: int = 0
    batches: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*REASONS.values(), "OTHER"), 0))
    queue: Duration = field(default_factory=Duration)
    stages: Stages = field(default_factory=Stages)
    preprocess_s: float = 0.0  # the model's own part of `compute_input`, and
    postprocess_s: float = 0.0  # ... of `compute_output`
    sizes: dict[int, Stages] = field(default_factory=dict)  # by the rows of a batch

    def add(self, record: BatchRecord, now_s: float) -> None:
        """Counts a batch as Triton does: failed requests are part of it, but are no inferences, and have no times."""
        rows, ran, requests, waited_s = record.rows, record.rows, len(record.waits_s), sum(record.waits_s)
        for wait_s, failed, bad_input in record.failed_requests:
            rows, requests, waited_s = rows - failed, requests - 1, waited_s - wait_s
            ran -= failed if bad_input else 0
        if not ran:  # nothing reached the model
            return
        self.last_s = now_s
        self.rows += rows
        self.batches += 1
        # a batch that was sent ahead waits at the worker, too
        ahead_s = max(0.0, record.seconds - record.run_s) if record.ahead else 0.0
        self.queue.add(requests, max(0.0, waited_s) + requests * ahead_s)
        stages_s = record.stages_s or (0.0, record.run_s, 0.0)
        self.stages.add(requests, stages_s)
        if record.hooks_s is not None:
            self.preprocess_s += requests * record.hooks_s[0]
            self.postprocess_s += requests * record.hooks_s[1]
        size = self.sizes.get(ran)
        if size is None:
            if len(self.sizes) >= MAX_BATCH_SIZES:
                return
            size = self.sizes[ran] = Stages()
        size.add(1, stages_s)

    def totals(self) -> StageTotals:
        stages = self.stages
        return StageTotals(
            self.success.seconds,
            self.queue.seconds,
            stages.compute_input.seconds - self.preprocess_s,
            self.preprocess_s,
            stages.compute_infer.seconds,
            self.postprocess_s,
            stages.compute_output.seconds - self.postprocess_s,
        )

    def body(self, name: str, version: str) -> dict[str, Any]:
        """One element of Triton's `model_stats`. There is no response cache, so its counts are 0."""
        none = Duration().body()
        sums = {part: getattr(self, part).body() for part in ("success", "fail", "queue")}
        return {
            "name": name,
            "version": version,
            "last_inference": round(self.last_s * 1e3),
            "inference_count": self.rows,
            "execution_count": self.batches,
            "inference_stats": {**sums, **self.stages.body(), "cache_hit": none, "cache_miss": none},
            "response_stats": {},
            "batch_stats": [{"batch_size": rows, **self.sizes[rows].body()} for rows in sorted(self.sizes)],
            "memory_usage": [],
        }


class ModelStatistics(Observer):
    """The statistics of every loaded version. Answers and batches are kept as they come, and counted many at once."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._versions: dict[tuple[str, str], VersionStatistics] = {}
        self._answers: list[tuple[str, str, Sequence[float], int]] = []
        self._batches: list[tuple[BatchRecord, float]] = []

    def of(self, model: str, version: str) -> VersionStatistics:
        """The counters of a version; zeros before its first request."""
        self._count()
        return self._version(model, version)

    def stages(self) -> dict[tuple[str, str], StageTotals]:
        """The summed times of the requests of every version."""
        self._count()
        return {key: found.totals() for key, found in self._versions.items()}

    def _version(self, model: str, version: str) -> VersionStatistics:
        found = self._versions.get((model, version))
        if found is None:
            found = self._versions[model, version] = VersionStatistics()
        return found

    def _count(self) -> None:
        answers, self._answers = self._answers, []
        for model, version, latencies_s, failed in answers:
            found, done = self._version(model, version), len(latencies_s) - failed
            found.success.add(done, sum(latencies_s[:done]))
            found.fail.add(failed, sum(latencies_s[done:]))
        batches, self._batches = self._batches, []
        for record, at_s in batches:
            self._version(record.model, record.version).add(record, at_s)

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        self._answers.append((model, version, latencies_s, failed))
        if len(self._answers) >= COUNTED:
            self._count()

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        self._version(model, version).failures["OTHER" if isinstance(error, BadRequest) else "BACKEND"] += 1

    def on_reject(self, model: str, version: str, reason: str) -> None:
        found = self._version(model, version)
        found.fail.add(1, 0.0)
        found.failures[REASONS.get(reason, "OTHER")] += 1

    def on_complete(self, record: BatchRecord) -> None:
        if record.outcome == "ok":
            self._batches.append((record, self._clock()))
            if len(self._batches) >= COUNTED:
                self._count()

    def on_unload(self, model: str, version: str) -> None:
        self._count()
        self._versions.pop((model, version), None)
