"""ThreadedStreamer and Streamer: the model runs in a thread of this program, or in processes that it starts.

Their LocalBackend is an Engine with one model that loads in the background while requests wait for it. It runs on the
portal's loop; a loaded model in a thread takes its requests itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.backoff import Backoff
from penstock.config.load import model_config
from penstock.config.schema import BatchingConfig, LimitsConfig, ModelConfig, RayConfig
from penstock.core.arrays import nbytes_of
from penstock.core.contracts import Observer, Ticket
from penstock.core.engine.admission import AdmissionQueue
from penstock.core.engine.engine import Engine
from penstock.core.portal.portal import Portal
from penstock.core.transports.launch import pack_target
from penstock.core.transports.slot import FIRST_RETRY_S, LAST_RETRY_S
from penstock.core.worker import nesting
from penstock.core.worker.spec import Wrapped
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, describe
from penstock.streamer.base import BaseStreamer, ChunkingBackend
from penstock.streamer.model import wrapped
from penstock.types import Item, Sink

if TYPE_CHECKING:
    from penstock.streamer.shared.client import SharedClient

log = logging.getLogger("penstock.streamer")

CudaDevices = int | str | Iterable[int | str]
_CUDA_DEVICE = re.compile("[0-9]{1,4}|(GPU|MIG)-[0-9a-zA-Z/-]{1,100}")
MAX_QUEUE = 65_536  # items: enough for a loop of many thousands of `submit`
NEVER_S = 1e7  # without `timeout_s`, a future may wait without limit
RUN_TIMEOUT_FACTOR = 3  # times `worker_timeout` is the longest run of a batch


# ---- the streamers


class Shared(Struct, frozen=True):
    """The name or path of a shared batcher, and how long it runs after its last client has left."""

    name: str
    linger_s: float


class LocalStreamer(BaseStreamer):
    """A streamer with its own workers."""

    def __init__(
        self,
        target: Wrapped,
        batch_size: int,
        max_latency: float,
        worker_timeout: float | None,
        *,
        slo_s: float | None,
        timeout_s: float | None,
        max_queue: int | None,
        max_queue_bytes: int | None,
        idempotent: bool = True,
        shared: Shared | None = None,
        **keys: Any,
    ) -> None:
        """Public keyword arguments, plus `keys` of ModelConfig."""
        max_queue = MAX_QUEUE if max_queue is None else max_queue
        limits = LimitsConfig() if max_queue_bytes is None else LimitsConfig(max_queue_bytes=max_queue_bytes)
        most = limits.max_queue_bytes
        for name, number in (("batch_size", batch_size), ("max_queue", max_queue), ("max_queue_bytes", most)):
            check_count(name, number)
        for name, seconds in (("worker_timeout", worker_timeout), ("slo_s", slo_s), ("timeout_s", timeout_s)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name}: expected seconds above 0, found {seconds!r}")
        check_latency(max_latency)
        name = str(getattr(target.target, "__name__", type(target.target).__name__))
        batching = BatchingConfig(
            max_batch_size=batch_size,
            max_hold_s=max_latency,
            slo_s=slo_s,
            timeout_s=NEVER_S if timeout_s is None else timeout_s,
            max_queue=max_queue,
            run_timeout_s=NEVER_S if worker_timeout is None else RUN_TIMEOUT_FACTOR * worker_timeout,
            idempotent=idempotent,
        )
        config = ModelConfig(target=name, batching=batching, **keys)
        self._shared = shared is not None
        make: Callable[[], LocalBackend | SharedClient]
        if shared is not None:
            from penstock.streamer.shared.client import shared_backend  # others need none of it

            make = shared_backend(shared.name, shared.linger_s, config, target, limits)
        else:
            packed = target if config.transport == "thread" else pack_target(target)
            sys_path = [path for path in sys.path if path]
            make = partial(LocalBackend, name, config, packed, sys_path, max_queue, limits)
        self._backend: LocalBackend | SharedClient | None = None  # of this process

        def begin() -> LocalBackend | SharedClient:
            self._backend = make()
            return self._backend

        # a worker that imports the module of its model must not start the streamer that the module makes
        lazy = bool(nesting.importing)
        portal = Portal(make=begin, lazy=lazy, word="streamer", own_workers=shared is None)
        super().__init__(portal, name, worker_timeout)

    def statistics(self) -> dict[str, object]:
        """The learned batch costs and the request counters of the model, over all processes that share it."""
        if self._shared:
            from penstock.streamer.shared.client import shared_statistics

            return shared_statistics(self._portal)
        return super().statistics()

    def _loading(self) -> bool:
        return self._backend is not None and self._backend.loading


class ThreadedStreamer(LocalStreamer):
    """Batches the calls of all threads and runs them in one thread of this program.

    `predict_function` receives a list of at most `batch_size` items and returns one result per item. `max_latency` is
    the longest time in seconds that an item waits for others while the worker is idle; a lone item does not wait.
    """

    def __init__(
        self,
        predict_function: Callable[[list[Any]], Any],
        batch_size: int,
        max_latency: float = 0.1,
        worker_timeout: float | None = 20,
        *,
        slo_s: float | None = None,
        timeout_s: float | None = None,
        max_queue: int | None = None,
        max_queue_bytes: int | None = None,
    ) -> None:
        """Public keyword arguments; the last four are named as in the configuration. Raises ValueError, TypeError."""
        check_callable("predict_function", predict_function)
        super().__init__(
            wrapped(predict_function),
            batch_size,
            max_latency,
            worker_timeout,
            slo_s=slo_s,
            timeout_s=timeout_s,
            max_queue=max_queue,
            max_queue_bytes=max_queue_bytes,
            transport="thread",
        )


class Streamer(LocalStreamer):
    """Batches the calls of all threads and runs them in `worker_num` processes, worker i on `cuda_devices[i % n]`.

    `predict_function_or_model` is a module-level function, or a class like ManagedModel, which each worker
    instantiates. The workers start at once in the background, and the first one that is ready answers. With
    `wait_for_worker_ready` the constructor waits for all of them; after `worker_timeout` it warns and returns, and
    loading continues. Without `idempotent`, no item runs again after a worker's death: its caller gets WorkerDied.

    With `shared`, a name or the absolute path of a socket, all processes of this user that give it share one batcher,
    with its workers and its queue: the first one starts it, and it ends `linger_s` seconds after the last one.

    With `ray`, a table of keys of `[models.NAME.ray]` such as {"num_gpus": 0.5}, workers are actors on a Ray cluster.
    """

    def __init__(
        self,
        predict_function_or_model: Any,
        batch_size: int,
        max_latency: float = 0.1,
        worker_num: int = 1,
        cuda_devices: CudaDevices | None = None,
        model_init_args: Sequence[Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        wait_for_worker_ready: bool = False,
        mp_start_method: str = "spawn",
        worker_timeout: float | None = 20,
        *,
        slo_s: float | None = None,
        timeout_s: float | None = None,
        max_queue: int | None = None,
        max_queue_bytes: int | None = None,
        idempotent: bool = True,
        shared: str | None = None,
        linger_s: float = 5.0,
        ray: Mapping[str, Any] | None = None,
    ) -> None:
        """Public keyword arguments, in the order of service_streamer. Raises ValueError, TypeError; LoadFailed if the
        model cannot be sent to a process; ConfigError for a wrong `shared` or `ray`; with `wait_for_worker_ready` also
        the model's own error, and ConfigError if too many batchers of this name run."""
        check_callable("predict_function_or_model", predict_function_or_model)
        check_count("worker_num", worker_num)
        check_start_method(mp_start_method)
        if not linger_s >= 0:
            raise ValueError(f"linger_s: expected seconds from 0, found {linger_s!r}")
        if ray is not None and shared is not None:
            raise ValueError("ray: found with shared, whose batcher starts processes: give one of them")
        super().__init__(
            wrapped(predict_function_or_model, model_init_args, model_init_kwargs),
            batch_size,
            max_latency,
            worker_timeout,
            slo_s=slo_s,
            timeout_s=timeout_s,
            max_queue=max_queue,
            max_queue_bytes=max_queue_bytes,
            transport="process" if ray is None else "ray",
            ray=RayConfig() if ray is None else model_config({"target": "", "ray": dict(ray)}, "streamer").ray,
            instances=worker_num,
            devices=devices_of(cuda_devices),
            idempotent=idempotent,
            shared=None if shared is None else Shared(shared, linger_s),
        )
        if wait_for_worker_ready and not nesting.importing:
            try:
                self._wait_for_worker_ready()
            except DeadlineExceeded as e:
                warnings.warn(f"penstock: {e.message}; calls wait for it", RuntimeWarning, stacklevel=2)
            except BaseException:
                self._portal.close(0.0)
                raise


def check_start_method(method: str) -> None:
    """Raises ValueError for an unknown start method; warns that any other than "spawn" has no effect."""
    if method not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"mp_start_method: expected 'spawn', 'fork' or 'forkserver', found {method!r}")
    if method != "spawn":
        warnings.warn(
            f"penstock: workers start as with mp_start_method='spawn', not {method!r}: they import the module of the "
            "model anew and do not see changes that this process has made since its own import",
            RuntimeWarning,
            stacklevel=3,
        )


def devices_of(given: CudaDevices | None) -> tuple[str, ...]:
    """The engine's names of `cuda_devices`: numbers such as 0, or UUIDs such as GPU-8932f937, alone or in a sequence.
    None or no entry: the CPU. Raises ValueError.

    A number is a device of the machine, as in CUDA_VISIBLE_DEVICES; the engine numbers the visible devices.
    """
    if given is None:
        return ("cpu",)
    entries = given.split(",") if isinstance(given, str) else given if isinstance(given, Iterable) else (given,)
    visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    devices = []
    for entry in entries:
        text = str(entry)
        if not _CUDA_DEVICE.fullmatch(text):
            raise ValueError(f"cuda_devices: expected numbers such as 0 or UUIDs such as GPU-8932f937, found {entry!r}")
        devices.append(f"cuda:{visible.index(text) if text in visible else text}")
    return tuple(devices) or ("cpu",)


def check_count(name: str, number: int) -> None:
    """Raises TypeError, ValueError unless `number` is a whole number from 1."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name}: expected a whole number, found {number!r}")
    if number < 1:
        raise ValueError(f"{name}: expected 1 or more, found {number}")


def check_latency(max_latency: float) -> None:
    """Raises ValueError for a negative number."""
    if not max_latency >= 0:
        raise ValueError(f"max_latency: expected seconds from 0, found {max_latency!r}")


def check_callable(name: str, given: object) -> None:
    """Raises TypeError unless `given` is a function or a class with `init_model`."""
    if not callable(given) or (isinstance(given, type) and not hasattr(given, "init_model")):
        expected = "a function of a list, or a class like ManagedModel, with init_model"
        raise TypeError(f"{name}: expected {expected}, found {given!r}")


# ---- the backend


class LocalBackend(ChunkingBackend, Observer):
    """The backend of a streamer with its own workers. At most `max_queue` items wait.

    The first worker that is ready answers; the others join it when they have loaded. When loading fails, every waiting
    request fails, and so do requests of the next 0.1 s, 0.2 s ... 30 s; the first request after that period starts
    another load.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        target: Any,
        sys_path: Sequence[str],
        max_queue: int,
        limits: LimitsConfig,
        log_level: str = "",
    ) -> None:
        """`log_level`: see Engine."""
        self._name, self._config, self._target, self._sys_path = name, config, target, sys_path
        self.max_queue, self.max_queue_bytes = max_queue, limits.max_queue_bytes
        self._engine = Engine(limits, [self], log_level)
        self._pending = AdmissionQueue()
        self._failure: PenstockError | None = None
        self._backoff, self._retry_at_s = Backoff(FIRST_RETRY_S, LAST_RETRY_S), 0.0
        self._start_loading()

    def _start_loading(self) -> None:
        self._loaded, self._failure = False, None
        self._load_task = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        try:
            await self._engine.load(self._name, self._config, target=self._target, sys_path=self._sys_path)
        except Exception as e:
            error = e if isinstance(e, PenstockError) else PenstockError(f"internal error: {describe(e)}")
            if not isinstance(error, ModelNotReady):  # the streamer was destroyed
                log.warning(
                    "load_failed model=%s error=%s: its callers get an error\n%s", self._name, error, error.detail
                )
            self._loaded, self._failure = False, error
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
            self._release_pending()
        else:
            self._serve()

    def observe(self, observer: Observer) -> None:
        """See Engine."""
        with self._engine.guard:
            self._engine.observe(observer)

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        if state == "ready" and not self._loaded:
            asyncio.get_running_loop().call_soon(self._serve)  # the engine is not ready before this hook returns

    def _serve(self) -> None:
        if self._failure is None:
            self._loaded = True
            self._backoff.reset()
            self._release_pending()

    def _retry_if_due(self) -> None:
        """Starts another load after a failed one. Raises the failure while the retry is not due."""
        if self._failure is not None:
            if time.monotonic() < self._retry_at_s:
                raise self._failure.with_traceback(None)
            self._start_loading()

    @property
    def loading(self) -> bool:
        return not self._load_task.done()

    async def ready(self) -> None:
        """Waits until every worker has loaded the model or failed. Raises the failure if none is ready."""
        self._retry_if_due()
        await asyncio.shield(self._load_task)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def submit_within_bounds(self, item: Item, sink: Sink) -> Ticket:
        """Submits to the engine, or keeps the request until the model is loaded."""
        if self._loaded:
            return self._engine.submit(self._name, None, item, sink)
        self._retry_if_due()
        nbytes, most = nbytes_of(item.payload), self.max_queue_bytes
        waiting = self._pending
        if waiting.rows + item.rows > self.max_queue or waiting.nbytes + nbytes > most:
            items = f"{waiting.rows} of {self.max_queue} items, {waiting.nbytes} of {most} bytes"
            found = f"{items} wait for the model to load"
            raise QueueFull(f"the queue is full ({found}): try again later")
        return waiting.add(item, sink, nbytes=nbytes)

    def _release_pending(self) -> None:
        """Submits the waiting requests to the engine, or fails them if loading failed."""
        if self._failure is None:
            with self._engine.guard:
                self._pending.forward(partial(self._engine.submit, self._name, None))
        else:
            self._pending.fail(self._failure)

    def statistics(self, model: str) -> dict[str, object]:
        """See `PortalBackend.statistics`; empty until the model is loaded."""
        return self._engine.statistics(self._name) if self._loaded else {}

    async def close(self, drain_s: float) -> None:
        """See `PortalBackend.close`. Waits for loading to finish only if requests wait for the model."""
        end = time.monotonic() + drain_s
        if self._pending:
            await asyncio.wait([self._load_task], timeout=drain_s)
        await self._engine.close(max(0.0, end - time.monotonic()))
        self._failure = ModelNotReady("the streamer was destroyed")
        self._release_pending()

    def forget(self) -> None:
        self._engine.forget()
