"""The Ray transport: one actor per slot, on any node of a cluster, one call per batch.

Ray places the actors by what `[models.NAME.ray]` asks for. A dead actor or node ends the actor's calls, and the slot
starts another one. The other end is `actor.py`.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import structs

from penstock.config.schema import RayConfig
from penstock.core.contracts import TransportListener
from penstock.core.transports.process import PackingTransport, unpickle
from penstock.core.transports.slot import WorkerSlot
from penstock.core.wire.messages import FromWorker, RunBatch, WorkerFailed, head_of
from penstock.core.wire.slabs import Slab, SlabPool
from penstock.core.worker.devices import environment
from penstock.core.worker.nesting import DEPTH_VARIABLE, may_start_workers
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, ItemFailed, LoadFailed, PenstockError, WorkerDied, describe, install_hint
from penstock.ray.actor import Message, RayReader, RayWorker, RayWriter, here, with_views
from penstock.types import Batch, BatchPart, ItemResult, Ready

LEAST, BELOW = (2, 60), (3, 0)  # the versions of Ray that are supported

_connecting = threading.Lock()
_forked = False  # from a process that had a connection: Ray's threads are missing


def _after_fork() -> None:
    global _forked, _connecting
    import ray

    _forked, _connecting = ray.is_initialized(), threading.Lock()


def check_ray() -> None:
    """Raises ConfigError if Ray is not installed, or in a version that is not supported. Does not import it: that takes
    seconds."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ConfigError(f"transport = 'ray' and penstock.ray need the package ray: {install_hint('ray')}") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not LEAST <= numbers < BELOW:
        least, below = (".".join(map(str, numbers)) for numbers in (LEAST, BELOW))
        raise ConfigError(f"ray: found version {found}, expected {least} or newer below {below}: {install_hint('ray')}")


def connect(address: str) -> None:
    """Connects this process to a running cluster, unless it is connected. Without an address it takes RAY_ADDRESS,
    else a cluster that runs on this machine.

    Blocks for seconds. The connection ends with the process. Raises ConfigError, LoadFailed.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray.address: found {address}, which is for Ray's client: run on a node of the cluster, and give the"
            " address of its head, such as 10.0.0.1:6379"
        )
    import ray

    with _connecting:
        if _forked:
            raise LoadFailed("this process was forked from one that is connected to Ray: start it with spawn instead")
        if ray.is_initialized():
            return
        try:
            ray.init(address=address or "auto", configure_logging=False)
        except Exception as e:  # ConnectionError, RuntimeError for another version, and Ray's own
            where = f"at {address}" if address else "that RAY_ADDRESS or this machine names"
            raise LoadFailed(
                f"the Ray cluster {where} cannot be used ({describe(e)}): check that it runs, with the same versions of"
                " Ray and Python; 'ray start --head' starts one",
                detail=repr(e),
            ) from e
    os.register_at_fork(after_in_child=_after_fork)


def wanted(config: RayConfig, device: str) -> dict[str, float]:
    """The resources of one instance, by Ray's names."""
    gpus = config.num_gpus if config.num_gpus is not None else float(device.startswith("cuda"))
    return {"CPU": config.num_cpus, "GPU": gpus, **config.resources}


def no_room(want: dict[str, float], timeout_s: float) -> str:
    """Why the cluster has not placed an instance. Blocks; raises errors of Ray."""
    import ray

    asked = {name: amount for name, amount in want.items() if amount}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes)
    free = ray.available_resources()
    has = ", ".join(
        f"{name} {sum(node.get(name, 0) for node in nodes):g} ({free.get(name, 0):g} free)" for name in asked
    )
    needs = ", ".join(f"{name} {amount:g}" for name, amount in asked.items())
    why = "other work takes it" if fits else "no node has as much"
    return (
        f"the Ray cluster placed no instance with {needs} within ray.placement_timeout_s={timeout_s:g}, because {why}:"
        f" its {len(nodes)} nodes have {has}; add a node, or ask for less in [models.NAME.ray]"
    )


log = logging.getLogger("penstock.ray")

STOP_S = 5.0  # for `unload`
LAST_S = 0.1  # after the report of a death, for the responses before it
NODE_LOST = "node has died"  # in the text of Ray's error, which has no other sign of it
GROUPS = {"run": 1, "watch": 1}  # threads of the actor, by the calls that they serve


class RayTransport(PackingTransport):
    """One actor per slot. Slabs are copied to the cluster's object store, and never pinned."""

    def __init__(
        self,
        spec: WorkerSpec,
        slots: int = 1,
        devices: Sequence[str] = ("cpu",),
        pool: SlabPool | None = None,
        reply_bytes: int = 0,
    ) -> None:
        """See SlotTransport. Raises ConfigError without a supported Ray."""
        check_ray()
        config = spec.config
        if config.threads is None:  # of the machine that runs this process would be the wrong ones
            config = structs.replace(config, threads=max(1, int(config.ray.num_cpus)))
        spec = structs.replace(spec, config=config, capture_output=False)  # Ray forwards what they print
        super().__init__(spec, slots, devices, pool, reply_bytes)

    def _make(self, number: int, device: str) -> WorkerSlot:
        return _RaySlot(self, self._spec, number, device)

    async def start(self, listener: TransportListener) -> None:
        """See `Transport.start`. Raises LoadFailed if there is no cluster, or the target cannot be sent to it."""
        _ = self.packed
        await asyncio.to_thread(connect, self._spec.config.ray.address)
        await super().start(listener)


class _RaySlot(WorkerSlot):
    """One place for an actor. A task starts it, receives its responses in the order of batches, and ends with it."""

    def __init__(self, transport: PackingTransport, spec: WorkerSpec, number: int, device: str) -> None:
        super().__init__(spec, number, device.partition(":")[0])  # Ray chooses the GPU
        self._transport = transport
        self._wanted = wanted(spec.config.ray, device)
        self._task: asyncio.Task[None] | None = None
        self._actor: Any = None
        self._error: PenstockError | None = None  # the reason for ending the actor
        self._inbox = RayReader(FromWorker)

    # ---- start and end

    def launch(self) -> None:
        """Raises LoadFailed in a worker that must not start another."""
        depth = may_start_workers()
        self._actor = self._error = None
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._task = self.loop.create_task(self._live(depth + 1))

    def abandon(self, batch_id: int) -> None:
        if self.up:
            self._actor.abandon.remote(batch_id)

    def kill(self, why: PenstockError) -> None:
        if self._task is not None and self._error is None:
            self._error = why
            self._task.cancel()

    async def stop(self, idle: bool) -> None:
        task = self._task
        if task is None:
            return
        if idle and self.up:
            unloading = asyncio.ensure_future(_result(self._actor.unload.options(concurrency_group="run").remote()))
            await asyncio.wait({task, unloading}, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
            await _end(unloading)
        self.kill(WorkerDied("the workers were stopped before the batch was answered"))
        await asyncio.wait({task})

    async def _live(self, depth: int) -> None:
        try:
            await self._place(depth)
            ready = await self._load()
            run = "stream" if ready.metadata.streams else "run"
            returns = {"num_returns": "streaming"} if ready.metadata.streams else {}
            self._call = getattr(self._actor, run).options(concurrency_group="run", **returns)
            self.is_up(ready)
            await self._receive_all()
            error: PenstockError = WorkerDied("the worker ended")
        except asyncio.CancelledError:
            error = self._error or WorkerDied("the workers were stopped")
        except PenstockError as e:
            error = e
        except Exception as e:
            error = self._death(e)
        actor, self._actor, self._task = self._actor, None, None
        if actor is not None:
            self.loop.run_in_executor(None, _kill, actor)
        self.down(error)

    def _create(self, depth: int) -> Any:
        """The actor, which waits for a place. Blocks."""
        import ray

        env, _ = environment(self.spec, "cpu", {})
        env[DEPTH_VARIABLE] = str(depth)
        resources = dict(self._wanted)
        options: dict[str, Any] = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU")}
        return (
            ray.remote(concurrency_groups=GROUPS)(RayWorker)
            .options(
                **options,
                resources=resources,
                runtime_env={"env_vars": env},
                scheduling_strategy="SPREAD",  # so that a lost node takes as few workers as possible
                max_restarts=0,
                max_task_retries=0,  # the engine decides which items run again
            )
            .remote()
        )

    async def _place(self, depth: int) -> None:
        """Starts an actor on a node, and another one if that node is lost before. Raises LoadFailed after
        `placement_timeout_s`, and errors of Ray."""
        most_s = self.spec.config.ray.placement_timeout_s
        end_s = self.loop.time() + most_s
        while True:
            self._actor = await asyncio.to_thread(self._create, depth)
            placed = asyncio.ensure_future(_result(self._actor.__ray_ready__.remote()))
            try:
                if not (await asyncio.wait({placed}, timeout=max(0.0, end_s - self.loop.time())))[0]:
                    raise LoadFailed(await asyncio.to_thread(no_room, self._wanted, most_s))
                placed.result()
                return
            except Exception as e:
                if NODE_LOST not in str(e):
                    raise
                log.info("node_lost model=%s slot=%d: its worker starts on another", self.spec.name, self.number)
            finally:
                await _end(placed)

    async def _load(self) -> Ready:
        """Waits for the model. Raises LoadFailed, TargetNotFound, and errors of Ray."""
        inner = "cuda:0" if self.device == "cuda" else self.device
        load = self._actor.load.options(concurrency_group="run")
        message = self._inbox.read(await load.remote(self._transport.packed, here(), inner, self.device))
        if isinstance(message, WorkerFailed):
            raise message.error
        ready: Ready = message.ready
        return ready

    async def _receive_all(self) -> None:
        """Receives responses until the actor dies. Raises errors of Ray, and WorkerDied after an invalid response."""
        receiving = asyncio.ensure_future(self._receive())
        watching = asyncio.ensure_future(_result(self._actor.watch.options(concurrency_group="watch").remote()))
        both = receiving, watching
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self.sent:
                await asyncio.wait({receiving}, timeout=LAST_S)  # what it had answered counts
            (receiving if receiving.done() else watching).result()
        finally:
            await _end(*both)

    async def _receive(self) -> None:
        while True:
            reply = await self._replies.get()
            if hasattr(reply, "__aiter__"):
                async for each in reply:
                    self._on_message(await each)
            else:
                for message in await reply:
                    self._on_message(message)

    def _death(self, error: Exception) -> PenstockError:
        """The error for callers of an actor whose call failed; Ray's own text names addresses."""
        node = "; its node left the cluster" if NODE_LOST in str(error) else ""
        if not self.up:
            return LoadFailed(f"the worker on the Ray cluster died while it loaded the model{node}", detail=str(error))
        return WorkerDied(f"the worker on the Ray cluster died{node}", detail=str(error))

    # ---- batches

    def submit(self, batch: Batch) -> list[Slab] | BatchPart:
        outbox = RayWriter()
        try:
            items = outbox.items(with_views(batch.items), self.spec.wants_headers, self.asks_requests)
            self._replies.put_nowait(self._call.remote(outbox.message(head_of(RunBatch(batch.id, items, [])))))
        except Exception as e:
            log.exception("batch_not_sent model=%s: its callers get an error", self.spec.name)
            error = ItemFailed(f"the batch cannot be sent to a worker: {describe(e)}", detail=repr(e))
            return BatchPart(batch.id, [ItemResult(error=error) for _ in batch.items])
        return []  # Ray has a copy

    def _on_message(self, message: Message) -> None:
        try:
            part = self._inbox.read(message).part
            sent = self.answered(part)
        except Exception as e:  # a worker with invalid messages is treated as dead
            log.exception("worker_broken model=%s slot=%d: it is killed", self.spec.name, self.number)
            raise WorkerDied(f"the worker's answer cannot be read: {type(e).__name__}") from e
        unpickle(part.results)
        self.deliver(sent.on_part, part)


async def _result(reference: Any) -> Any:
    return await reference


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks, and takes the errors of those that have just ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _kill(actor: Any) -> None:
    import ray

    try:
        ray.kill(actor)
    except Exception as e:  # the cluster is gone, and the actor with it
        log.warning("worker_not_killed error=%s", describe(e))
