"""Workers that serve a queue of a Redis broker, until they are told to end."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.core.transports.launch import pack_spec
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import PenstockError
from penstock.streamer.errors import tell
from penstock.streamer.local import (
    NEVER_S,
    WRAPPER,
    check_callable,
    check_count,
    check_start_method,
    device_of,
)
from penstock.streamer.redis.address import parse
from penstock.streamer.redis.worker import BrokerWorker, Hearing

log = logging.getLogger("penstock.streamer")

MODEL = "redis"


async def serve_queue(
    config: ModelConfig,
    target: Any,
    redis_broker: str,
    prefix: str,
    *,
    lease_s: float = 10.0,
    drain_s: float = 30.0,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Loads a model, and answers what comes for it until `stop`. Raises LoadFailed, ConfigError."""
    address = parse(redis_broker)
    hearing = Hearing()
    engine = Engine(None, [hearing])
    loop = asyncio.get_running_loop()
    stopped = loop.create_task(stop.wait())
    loading = loop.create_task(engine.load(MODEL, config, target=target, sys_path=[p for p in sys.path if p]))
    try:
        await asyncio.wait([stopped, loading], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await loading
            log.info("worker_ready broker=%s prefix=%s instances=%s", address.name, prefix, config.instances)
            on_ready()
            await BrokerWorker(engine, MODEL, address, prefix, hearing=hearing, lease_s=lease_s).run(stop, drain_s)
    finally:
        stopped.cancel()
        await engine.close(0.0)
        await asyncio.gather(stopped, loading, return_exceptions=True)


def run_until_told(serve: Callable[[asyncio.Event], Any]) -> None:
    """Runs `serve(stop)`; `stop` is set by SIGINT and SIGTERM, and by the end of the process that started this one."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
        parent = multiprocessing.parent_process()
        if parent is not None:
            loop.add_reader(parent.sentinel, _orphaned, loop, parent.sentinel, stop)
        await serve(stop)

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())


def _orphaned(loop: asyncio.AbstractEventLoop, sentinel: int, stop: asyncio.Event) -> None:
    loop.remove_reader(sentinel)
    stop.set()


class RedisWorker:
    """Serves a model to those who ask over a Redis broker. The model is made in a process of its own, not in this one.

    `model_class` is a class like ManagedModel, or a function of a list. `prefix` keeps models apart that share a
    broker. `lease_s`: a worker that is silent for so long is dead, and what it had is run by another. Further
    arguments are taken, as those who wrote them expect, and have no effect.
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
        **kwargs: Any,
    ) -> None:
        """Raises ValueError, TypeError, ConfigError for an address that is none, LoadFailed for what cannot be sent to
        a process."""
        check_callable("model_class", model_class)
        check_count("batch_size", batch_size)
        if not max_latency >= 0:
            raise ValueError(f"max_latency: expected seconds from 0, found {max_latency!r}")
        parse(redis_broker)
        self._redis_broker, self._prefix = redis_broker, prefix
        self._lease_s, self._drain_s = lease_s, drain_s
        self._target = Wrapped(
            model_class,
            WRAPPER,
            {"model_init_args": tuple(model_init_args or ()), "model_init_kwargs": dict(model_init_kwargs or {})},
        )
        self._batching = BatchingConfig(max_batch_size=batch_size, max_hold_s=max_latency, timeout_s=NEVER_S)
        pack_spec(WorkerSpec(MODEL, "1", self._config(1, ()), self._target))

    def _config(self, worker_num: int, cuda_devices: Sequence[int | str]) -> ModelConfig:
        devices = tuple(device_of(number) for number in cuda_devices) or ("cpu",)
        return ModelConfig(target=MODEL, instances=worker_num, devices=devices, batching=self._batching)

    def run_forever(self, gpu_id: int | None = None) -> None:
        """Serves until SIGINT or SIGTERM, then answers what it has taken. Raises what the model raises, ConfigError."""
        self.run_copies_forever(1, () if gpu_id is None else (gpu_id,))

    def run_copies_forever(self, worker_num: int, cuda_devices: Sequence[int | str] = ()) -> None:
        """`run_forever` with so many copies of the model, on these devices in turn, fed from one queue."""
        check_count("worker_num", worker_num)
        config = self._config(worker_num, cuda_devices)

        def serve(stop: asyncio.Event) -> Coroutine[Any, Any, None]:
            return serve_queue(
                config,
                self._target,
                self._redis_broker,
                self._prefix,
                lease_s=self._lease_s,
                drain_s=self._drain_s,
                stop=stop,
            )

        try:
            run_until_told(serve)
        except PenstockError as e:
            tell(e)


def run_redis_workers_forever(
    model_class: Any,
    batch_size: int,
    max_latency: float = 0.1,
    worker_num: int = 1,
    cuda_devices: Sequence[int | str] | None = None,
    redis_broker: str = "localhost:6379",
    prefix: str = "",
    mp_start_method: str = "spawn",
    model_init_args: Sequence[Any] | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    block: bool = True,
    lease_s: float = 10.0,
) -> list[BaseProcess]:
    """Serves a model with `worker_num` copies of it, on `cuda_devices` in turn, until SIGINT or SIGTERM.

    With `block=False` a process of its own does so, which is returned in a list: one script can start several models,
    and join them. It ends with this process. Raises what RedisWorker and its `run_forever` raise.
    """
    check_start_method(mp_start_method)
    check_count("worker_num", worker_num)
    worker = RedisWorker(
        model_class,
        batch_size,
        max_latency,
        redis_broker,
        prefix,
        model_init_args,
        model_init_kwargs,
        lease_s=lease_s,
    )
    devices = tuple(cuda_devices or ())
    if block:
        worker.run_copies_forever(worker_num, devices)
        return []
    process = multiprocessing.get_context("spawn").Process(
        target=worker.run_copies_forever, args=(worker_num, devices), name=f"penstock-redis-{prefix}"
    )
    process.start()
    return [process]
