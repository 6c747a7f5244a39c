"""ResidencyManager: loads models when they are wanted and lets others leave. The asyncio shell of a Residency."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from penstock.core.batching.residency import Residency, ResidentModel
from penstock.errors import ConfigError, LoadOutOfMemory, ModelNotReady, PenstockError

if TYPE_CHECKING:
    from penstock.core.engine.handle import ModelHandle

log = logging.getLogger("penstock.engine")

DRAIN_S = 600.0  # a model that leaves answers its batches; `run_timeout_s` ends them earlier
RETRY_S, MOST_RETRY_S = 1.0, 30.0  # after a load that failed, doubled each time
LOOK_S = 0.1  # the least time until the next look at models that have requests


class ResidencyManager:
    """Keeps the models of an engine within the budgets of their devices.

    A model is loaded by its first request, which waits for it; a pinned one is loaded at once and stays.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self._residency = Residency(budgets)
        self._handles: dict[ResidentModel, ModelHandle] = {}
        self._wanted: dict[ResidentModel, float] = {}  # in order of arrival
        self._refused: dict[ResidentModel, tuple[float, float]] = {}  # model -> (until, seconds) after a failed load
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def manages(self, handle: "ModelHandle") -> bool:
        """Whether a budget or `keep_alive_s` applies to the model."""
        config = handle.config
        budgeted = any(device in self._residency.budgets for device in handle.instances.devices())
        return budgeted or config.residency.keep_alive_s is not None

    async def add(self, handle: "ModelHandle") -> None:
        """Takes charge of a version that is not loaded. Loads a pinned one, or one whose instances follow the load.

        Raises ConfigError if its budget is too small, and for a pinned version the errors of a load.
        """
        model = _resident(handle, self._residency.budgets)
        self._residency.add(model)
        self._handles[model] = handle
        handle.resident, handle.instances.frugal = model, True
        handle.on_wanted = partial(self._want, model)
        handle.state = "IDLE"
        if model.pinned:
            leaving = self._residency.make_room(model, self._busy(), time.monotonic()) or []
            model.move("loading", "pinned", time.monotonic())
            for other in leaving:
                await self._leave(other, f"made room for {model.key[0]}")
            await self._load(model)

    def remove(self, handle: "ModelHandle") -> None:
        model = handle.resident
        if model is not None:
            self._handles.pop(model, None)
            self._wanted.pop(model, None)
            if self._residency.models.get(model.key) is model:
                del self._residency.models[model.key]
            self._turn()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def snapshot(self) -> list[tuple[str, int, int]]:
        """(device, budget in bytes, bytes of the models on it) of each device with a budget."""
        residency = self._residency
        return [(device, budget, residency.used(device)) for device, budget in residency.budgets.items()]

    # ---- moves

    def _want(self, model: ResidentModel) -> None:
        """A request came for a model that is not up. Raises ModelNotReady for a while after a load that failed."""
        if model.place in ("loading", "in") or model in self._wanted:
            return
        until, _ = self._refused.get(model, (0.0, 0.0))
        now = time.monotonic()
        if now < until:
            raise ModelNotReady(f"model '{model.key[0]}' did not load", retry_after_s=until - now)
        self._wanted[model] = now
        self._turn()

    def _busy(self) -> dict[tuple[str, str], int]:
        """Requests that wait or run, by model; counts those that came."""
        busy = {}
        for model, handle in self._handles.items():
            busy[model.key] = handle.pending
            requests = handle.requests
            if requests != model.requests:
                model.requests, model.used_s = requests, time.monotonic()
        return busy

    def _turn(self) -> None:
        """Lets models leave and come, as far as there is room."""
        now, residency, busy = time.monotonic(), self._residency, self._busy()
        for model in residency.expired(busy, now):
            self._begin(self._leave(model, "unused"))
        for model in list(self._wanted):
            leaving = residency.make_room(model, busy, now)
            for other in leaving or ():
                self._begin(self._leave(other, f"made room for {model.key[0]}"))
            if leaving is None or not residency.fits(model):
                break  # its turn comes first
            del self._wanted[model]
            model.move("loading", "requested", now)
            self._begin(self._load(model))
        self._wake_up(now)

    def _wake_up(self, now: float) -> None:
        """Sets the timer for the next model that may leave without an event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._residency.next_expiry()
        if self._wanted and not any(m.place in ("loading", "leaving") for m in self._handles):
            at = min(at, now + LOOK_S)
        if at < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(LOOK_S, at - now), self._turn)

    def _begin(self, move: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(move)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self, model: ResidentModel, reason: str) -> None:
        handle = self._handles.get(model)
        if handle is None or model.place != "in":
            return
        model.move("leaving", reason, time.monotonic())
        model.evictions += 1
        log.info("model_left %s reason=%s", handle.instances.label, reason.replace(" ", "_"))
        await handle.instances.leave(DRAIN_S)
        model.move("out", reason, time.monotonic())
        if handle.pending and model in self._handles:  # they had not started
            self._wanted.setdefault(model, time.monotonic())
        self._turn()

    async def _load(self, model: ResidentModel) -> None:
        handle, began = self._handles[model], time.monotonic()
        try:
            await handle.instances.bring_up(DRAIN_S)
        except PenstockError as e:
            await handle.instances.leave(0.0)
            self._not_loaded(model, handle, e)
            if model.pinned:
                raise
            return
        now = time.monotonic()
        self._refused.pop(model, None)
        more = self._residency.loaded(model, _measured(handle), now - began, now)
        for device in more:
            log.warning(
                "more_memory %s device=%s bytes=%d: more than residency.memory_bytes; the larger number counts",
                handle.instances.label, device, model.need[device],
            )  # fmt: skip
        model.used_s = now
        model.move("in", model.reason, now)
        self._turn()

    def _not_loaded(self, model: ResidentModel, handle: "ModelHandle", error: PenstockError) -> None:
        """Tries a load that ran out of memory again with more room; otherwise answers the requests that waited."""
        now = time.monotonic()
        model.move("out", "not loaded", now)
        if isinstance(error, LoadOutOfMemory) and self._residency.ran_out(model) and not model.pinned:
            log.warning("more_memory %s need=%s: loading it again", handle.instances.label, dict(model.need))
            self._wanted[model] = now
        else:
            _, before = self._refused.get(model, (0.0, RETRY_S / 2))
            wait = min(MOST_RETRY_S, 2 * before)
            self._refused[model] = now + wait, wait
            detail = f"\n{error.detail}" if error.detail else ""
            log.warning("load_failed %s retry_in_s=%g error=%s%s", handle.instances.label, wait, error, detail)
            handle.fail_waiting(ModelNotReady(f"model '{model.key[0]}' did not load", retry_after_s=wait))
        self._turn()


def _resident(handle: "ModelHandle", budgets: Mapping[str, int]) -> ResidentModel:
    """Raises ConfigError for a model on an accelerator without `memory_bytes`, whose memory cannot be measured."""
    config, where = handle.config, f"model '{handle.name}': residency.memory_bytes"
    each = config.residency.memory_bytes
    devices = list(handle.instances.devices())
    if each is None:
        for device in devices:
            if device in budgets and (device != "cpu" or config.transport == "thread"):
                raise ConfigError(f"{where}: found none, expected the bytes of an instance on {device}")
    if config.autoscale.max is not None:  # room for all that the load may start
        devices = [devices[k % len(devices)] for k in range(config.autoscale.max)]
    need = {device: (each or 0) * devices.count(device) for device in dict.fromkeys(devices)}
    keep_alive_s = config.residency.keep_alive_s
    return ResidentModel(
        (handle.name, handle.version),
        need,
        pinned=config.residency.pinned or config.autoscale.max is not None,
        keep_alive_s=math.inf if keep_alive_s is None else keep_alive_s,
        declared=each is not None,
    )


def _measured(handle: "ModelHandle") -> dict[str, int]:
    """The memory of the workers on the CPU: what each has for itself, without what it shares with the server."""
    total = 0
    for pid in handle.instances.pids().values():
        if pid != os.getpid():
            with suppress(psutil.Error):  # the worker has just died
                total += int(psutil.Process(pid).memory_full_info().uss)
    return {"cpu": total} if total and set(handle.instances.devices()) == {"cpu"} else {}
