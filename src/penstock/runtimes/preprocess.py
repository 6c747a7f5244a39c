"""PreprocessPool: the helper processes of one worker, which run `preprocess` of its model."""

# `preprocess` in Python holds the interpreter that must feed the GPU; helper processes have interpreters of their own.
# A helper constructs the class with the same options and calls `load_preprocess`, never `load`, so it needs no GPU, and
# it sees none. It runs as a model whose `predict` returns what `preprocess` made: the helpers of a worker are the
# instances of that model in an engine, on a loop of the pool's own thread. So one queue feeds them, arrays cross in
# shared memory, and a death, a hang, a bad item or a failed load is handled as for any other model.
# The thread that receives batches waits for the helpers while the model predicts the batch before. A model that runs
# batches side by side is given each one when it is preprocessed.
# A batch is cut into a few chunks for each helper: one chunk would leave helpers idle while the slowest one ends, and
# a message for each item would cost the worker's interpreter what the helpers save.
# A helper that hangs must be replaced, and its chunk run again, before the worker itself counts as hanging; so the
# limits of a helper are parts of the worker's `run_timeout_s`.

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import structs

from penstock import metrics
from penstock.config.schema import MOST, BatchingConfig, LimitsConfig, ModelConfig
from penstock.core.contracts import Observer
from penstock.core.engine.engine import Engine
from penstock.core.portal.loop_thread import LoopThread
from penstock.core.transports.process import LendingTransport
from penstock.core.wire.messages import Unsent
from penstock.core.wire.objects import picklable
from penstock.core.worker.predict import Unit
from penstock.core.worker.python_model import constructed
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import ModelNotReady, PenstockError, WorkerDied, describe
from penstock.types import MetricDelta

# choices
CHUNKS: Final = 4  # of a batch for each helper
HANG_PART: Final = 3  # a helper is replaced after this part of `run_timeout_s`, for its items to run again in time
WAIT_PART: Final = 2  # an item waits for a helper for at most this part of it
UNBOUNDED_BYTES: Final = 2**46  # the worker's batches bound what waits


class PreprocessModel:
    """What a helper runs."""

    preprocess: Callable[[Any], Any]

    def __init__(self, target: Any, options: dict[str, Any]) -> None:
        self._target, self._options = target, options

    def load(self, device: str) -> None:
        """Raises LoadFailed, and the errors of the user's code."""
        model = constructed(self._target, self._options)
        load = getattr(model, "load_preprocess", None)
        if load is not None:
            load()
        hook = model.preprocess
        self.preprocess = lambda v: hook(v.value, **v.asked) if type(v) is Unit else hook(v)

    def predict(self, items: list[Any]) -> list[Any]:
        return [picklable(item) for item in items]


class PreprocessPool(LoopThread, Observer):
    """The running helpers of a worker; see `python_model.Helpers`. Any thread but its own may call it."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Returns when the helpers have loaded. Raises LoadFailed, TargetNotFound if none has."""
        self._spec, self._name = spec, f"{spec.name}.preprocess"  # in the log
        self._deltas: list[MetricDelta] = []  # for the metrics of the thread that is given values next
        super().__init__("penstock-preprocess")

    async def prepare(self) -> None:
        spec = self._spec
        self._engine = Engine(LimitsConfig(max_queue_bytes=UNBOUNDED_BYTES), [self], spec.log_level)
        model = Wrapped(spec.target, f"{__name__}:{PreprocessModel.__name__}", {"options": spec.config.options})
        try:
            await self._engine.load(self._name, _config(spec.config), target=model, sys_path=spec.sys_path)
        except BaseException:
            await self._engine.close(0.0)
            raise

    def __call__(self, values: list[Any]) -> list[Any]:
        """The preprocessed values, in order; Unsent in place of one that failed."""
        found = self.run(self._preprocessed(values))
        self._record()
        return found

    def soon(self, values: list[Any], done: Callable[[list[Any]], None]) -> None:
        """Passes them to `done` instead, in the pool's thread."""

        async def pass_on() -> None:
            found = await self._preprocessed(values)
            self._record()
            done(found)

        self.begin(pass_on())

    def close(self) -> None:
        """Ends the helpers. Idempotent."""
        if not self._ending:
            self.run(self._engine.close(0.0))
            self.stop()

    async def _preprocessed(self, values: list[Any]) -> list[Any]:
        chunks = cut(values, self._spec.config.preprocess_processes)
        asked = [self._engine.infer_many(self._name, chunk) for chunk in chunks]
        results: list[Any] = []
        for chunk, found in zip(chunks, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            results += found if isinstance(found, list) else [found] * len(chunk)
        return [Unsent(_of_helper(value)) if isinstance(value, BaseException) else value for value in results]

    def _record(self) -> None:
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            metrics.record(*structs.astuple(delta))

    # ---- observer

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        self._deltas += deltas

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        if state == "died":
            self._deltas.append(MetricDelta("counter", "preprocess_deaths", 1.0))
        elif state == "failed":
            asyncio.get_running_loop().call_soon(self._fail_if_hopeless)

    def _fail_if_hopeless(self) -> None:
        """Answers what waits for a helper when none is up and none will be soon."""
        handle = self._engine.handle(self._name, None)
        if not handle.instances.up and handle.instances.back_in_s() is None:
            why = handle.instances.why_down()
            handle.not_loaded(ModelNotReady(f"no helper process runs: {why.message}", detail=why.detail))


def cut(values: list[Any], helpers: int) -> list[list[Any]]:
    """The values in equal chunks, but for the last one, so that all helpers end at about the same time."""
    size = math.ceil(len(values) / (CHUNKS * helpers)) or 1
    return [values[at : at + size] for at in range(0, len(values), size)]


def _config(model: ModelConfig) -> ModelConfig:
    """The configuration of the helpers of a model. They share the cores with all workers: each has one thread."""
    limit_s = model.batching.run_timeout_s
    return ModelConfig(
        target=model.target,
        version=model.version,
        transport=f"{LendingTransport.__module__}:{LendingTransport.__name__}",  # results are not copied
        instances=model.preprocess_processes,
        load_timeout_s=model.load_timeout_s,
        threads=1,
        env={"CUDA_VISIBLE_DEVICES": "", **model.env},
        restart=structs.replace(model.restart, quarantine_s=0.0),  # that of the worker itself knows the bodies
        batching=BatchingConfig(
            policy="none",
            max_batch_size=MOST,
            max_queue=MOST,
            timeout_s=limit_s / WAIT_PART,
            run_timeout_s=limit_s / HANG_PART,
            retry_split=model.batching.retry_split,
            idempotent=model.batching.idempotent,
        ),
    )


def _of_helper(error: BaseException) -> PenstockError:
    """The error of an item. One that is not from the user's code, which has a traceback, says where it comes from."""
    if not isinstance(error, PenstockError):
        return WorkerDied(f"preprocess helper: {describe(error)}")
    if "Traceback" in error.detail:
        return error
    return type(error)(f"preprocess helper: {error.message}", retry_after_s=error.retry_after_s, detail=error.detail)
