"""RedisWorker and run_redis_workers_forever: load a model and serve a queue of a Redis broker with it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.contracts import Observer
from penstock.core.engine.engine import Engine
from penstock.core.transports.launch import pack_target
from penstock.errors import PenstockError
from penstock.serving.process import runner
from penstock.streamer import local
from penstock.streamer.base import raise_for_caller
from penstock.streamer.model import wrapped
from penstock.streamer.redis.connection import parse_address
from penstock.streamer.redis.worker import BrokerWorker, InstanceWatcher

if TYPE_CHECKING:
    from penstock.streamer.redis.metrics import MetricsOptions

log = logging.getLogger("penstock.streamer")

MODEL = "redis"


class QueueOptions(Struct, frozen=True):
    """The queue that a worker serves, the duration of its leases, its longest wait for results at shutdown, and whether
    it reads and writes pickles."""

    redis_broker: str = "localhost:6379"
    prefix: str = ""
    lease_s: float = 10.0
    drain_s: float = 30.0
    allow_pickle: bool = False


async def serve_queue(
    config: ModelConfig,
    target: Any,
    queue: QueueOptions,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    metrics: MetricsOptions | None = None,
    log_level: str = "",
) -> None:
    """Loads a model and serves its queue until `stop`, from the first ready instance on. `log_level`: see Engine.
    Raises LoadFailed, ConfigError."""
    address, name = parse_address(queue.redis_broker), config.name or MODEL
    watcher = InstanceWatcher()
    observers: list[Observer] = [watcher]
    if metrics is not None:
        from penstock.serving.observe.history import History
        from penstock.serving.observe.prometheus import PrometheusObserver

        observers += [observer := PrometheusObserver(), history := History()]
    engine = Engine(None, observers, log_level)
    options: dict[str, Any] = {"lease_s": queue.lease_s, "allow_pickle": queue.allow_pickle}
    worker = BrokerWorker(engine, name, address, queue.prefix, watcher=watcher, **options)
    loop = asyncio.get_running_loop()
    stopped, ready = loop.create_task(stop.wait()), loop.create_task(watcher.ready.wait())
    loading = loop.create_task(engine.load(name, config, target=target, sys_path=[p for p in sys.path if p]))
    async with AsyncExitStack() as owned:
        owned.push_async_callback(_end, engine, (stopped, ready, loading))
        if metrics is not None:
            from penstock.streamer.redis.metrics import worker_listening

            place = (address, queue.prefix)
            await owned.enter_async_context(worker_listening(engine, observer, history, worker, metrics, place))
        await asyncio.wait([stopped, ready, loading], return_when=asyncio.FIRST_COMPLETED)
        if watcher.ready.is_set() and not stop.is_set():
            log.info("worker_ready broker=%s prefix=%s instances=%s", address.name, queue.prefix, config.instances)
            on_ready()
            loading.add_done_callback(lambda _: stop.set() if loading.exception() else None)
            await worker.run(stop, queue.drain_s)
        if loading.done():
            loading.result()


async def _end(engine: Engine, tasks: Sequence[asyncio.Task[Any]]) -> None:
    stopped, ready, _ = tasks
    stopped.cancel()
    ready.cancel()
    await engine.close(0.0)
    await asyncio.gather(*tasks, return_exceptions=True)


def run_until_stopped(serve: Callable[[asyncio.Event], Any]) -> None:
    """Runs `serve(stop)`. SIGINT, SIGTERM and the end of the parent process set `stop`. After a signal it raises
    SystemExit, so that a program which serves one model after another ends too."""
    signals: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def on_signal(number: int) -> None:
            signals.append(number)
            stop.set()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, on_signal, number)
            loop.add_signal_handler(signal.SIGHUP, log.info, "event=hangup consequence=none")
        parent = multiprocessing.parent_process()
        if parent is not None:
            loop.add_reader(parent.sentinel, _on_parent_end, loop, parent.sentinel, stop)
        await serve(stop)

    runner()(main())
    if signals:
        sys.exit(0)


def _on_parent_end(loop: asyncio.AbstractEventLoop, sentinel: int, stop: asyncio.Event) -> None:
    loop.remove_reader(sentinel)
    stop.set()


class RedisWorker:
    """Serves a model to RedisStreamers over a Redis broker. A child process loads the model.

    `model_class` is a class like ManagedModel, or a function of a list. `prefix` separates models on one broker. After
    `lease_s` without a sign of life, other workers run what this one had taken. `allow_pickle`, here and at the
    callers, sends values of any type, and lets everyone who can write to the broker run code here. Unknown arguments
    are accepted for compatibility with service_streamer and have no effect.
    """

    def __init__(
        self,
        model_class: Any,
        batch_size: int,
        max_latency: float = 0.1,
        redis_broker: str = "localhost:6379",
        prefix: str = "",
        model_init_args: Sequence[Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        *args: Any,
        lease_s: float = 10.0,
        drain_s: float = 30.0,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> None:
        """Public keyword arguments, in the order of service_streamer. Raises ValueError, TypeError; ConfigError for a
        malformed address; LoadFailed if the model cannot be sent to a process."""
        local.check_callable("model_class", model_class)
        local.check_count("batch_size", batch_size)
        local.check_latency(max_latency)
        parse_address(redis_broker)
        self._queue = QueueOptions(redis_broker, prefix, lease_s, drain_s, allow_pickle)
        self._target = wrapped(model_class, model_init_args, model_init_kwargs)
        self._batching = BatchingConfig(max_batch_size=batch_size, max_hold_s=max_latency, timeout_s=local.NEVER_S)
        pack_target(self._target)

    def model_predict(self, batch: list[Any]) -> Any:
        """What the function returns for a batch, called in this process, as tests of service_streamer's users do."""
        return self._target.target(batch)

    def run_forever(self, gpu_id: int | str | None = None) -> None:
        """Serves until SIGINT or SIGTERM, finishes taken requests, and ends the program with SystemExit. Raises the
        model's own error, ConfigError."""
        self.run_copies_forever(1, gpu_id)

    def run_copies_forever(self, worker_num: int, cuda_devices: local.CudaDevices | None = None) -> None:
        """`run_forever` with `worker_num` copies of the model, on `cuda_devices` in turn, fed from one queue."""
        local.check_count("worker_num", worker_num)
        devices = local.devices_of(cuda_devices)
        config = ModelConfig(target=MODEL, instances=worker_num, devices=devices, batching=self._batching)

        def serve(stop: asyncio.Event) -> Coroutine[Any, Any, None]:
            return serve_queue(config, self._target, self._queue, stop=stop)

        try:
            run_until_stopped(serve)
        except PenstockError as e:
            raise_for_caller(e)


def run_redis_workers_forever(
    model_class: Any,
    batch_size: int,
    max_latency: float = 0.1,
    worker_num: int = 1,
    cuda_devices: local.CudaDevices | None = None,
    redis_broker: str = "localhost:6379",
    prefix: str = "",
    mp_start_method: str = "spawn",
    model_init_args: Sequence[Any] | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    block: bool = True,
    lease_s: float = 10.0,
    allow_pickle: bool = False,
) -> list[BaseProcess]:
    """Serves a model with `worker_num` copies of it, on `cuda_devices` in turn, until SIGINT or SIGTERM.

    With `block=False`, a child process serves and is returned in a list, so that one script can start several models
    and join them. It ends with this process. Raises what RedisWorker and its `run_forever` raise. The parameters are
    those of service_streamer.
    """
    local.check_start_method(mp_start_method)
    local.check_count("worker_num", worker_num)
    model = (model_class, batch_size, max_latency, redis_broker, prefix, model_init_args, model_init_kwargs)
    worker = RedisWorker(*model, lease_s=lease_s, allow_pickle=allow_pickle)
    local.devices_of(cuda_devices)
    if block:
        worker.run_copies_forever(worker_num, cuda_devices)
        return []
    process = multiprocessing.get_context("spawn").Process(
        target=worker.run_copies_forever, args=(worker_num, cuda_devices), name=f"penstock-redis-{prefix}"
    )
    process.start()
    return [process]
