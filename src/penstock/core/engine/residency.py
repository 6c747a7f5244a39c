"""ResidencyManager: loads models when they are wanted and lets others leave. The asyncio shell of a Residency."""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backoff import Backoff
from penstock.core.batching.residency import OverBudget, Residency, ResidentModel
from penstock.core.readings import private_bytes
from penstock.errors import ConfigError, LoadFailed, LoadOutOfMemory, ModelNotReady, PenstockError, describe

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
        self._refused: dict[ResidentModel, tuple[float, Backoff, str]] = {}  # until when, after a failed load, and why
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pinning = 0  # pinned models that wait for room
        self._numbers = itertools.count()  # two handles may have the same name and version for a while

    def manages(self, handle: "ModelHandle") -> bool:
        """Whether a budget or `keep_alive_s` applies to the model."""
        config = handle.config
        budgeted = any(device in self._residency.budgets for device in handle.instances.devices())
        return budgeted or config.residency.keep_alive_s is not None

    async def add(self, handle: "ModelHandle", at_once: bool = False) -> None:
        """Takes charge of a version that is not loaded. Loads a pinned one, or one whose instances follow the load;
        with `at_once` any for which there is room: one that does not load must not replace one that answers.

        Raises ConfigError if its budget is too small, and the errors of a load.
        """
        model = _resident(handle, self._residency.budgets)
        model.key = handle.name, f"{handle.version} {next(self._numbers)}"
        self._residency.add(model)
        self._handles[model] = handle
        handle.resident, handle.instances.replaces_in_place = model, True
        handle.on_wanted = partial(self._want, model)
        handle.state = "IDLE"
        if model.pinned:
            await self._make_room(model, handle)
        elif at_once and self._residency.fits(model):
            self._come(model, "new version", time.monotonic())
        else:
            return
        if (error := await self._load(model)) is not None:
            raise error

    async def _make_room(self, model: ResidentModel, handle: "ModelHandle") -> None:
        """Waits until a pinned model fits; meanwhile no other model is loaded. Raises ModelNotReady if it is
        unloaded."""
        self._pinning += 1
        try:
            while True:
                now = time.monotonic()
                for other in self._residency.make_room(model, self._busy(), now) or ():
                    self._begin(self._leave(other, f"made room for {model.key[0]}"))
                if handle.state == "DRAINING" or model not in self._handles:
                    raise ModelNotReady(f"model '{handle.name}' was stopped while it was loading")
                if self._residency.fits(model):
                    self._come(model, "pinned", now)
                    return
                await asyncio.sleep(LOOK_S)
        finally:
            self._pinning -= 1

    def _come(self, model: ResidentModel, reason: str, now: float) -> None:
        held = self._residency.reservation(model)
        model.move("loading", reason, now)
        model.held = held

    def remove(self, handle: "ModelHandle") -> None:
        """Forgets a version that is about to end; its memory counts until it has `gone`."""
        model = handle.resident
        if model is not None:
            for known in (self._handles, self._wanted, self._refused):
                known.pop(model, None)
            if model.place != "out":
                model.move("leaving", "unloaded", time.monotonic())

    def gone(self, handle: "ModelHandle") -> None:
        """The workers of a removed version have ended."""
        if handle.resident is not None and self._residency.models.pop(handle.resident.key, None) is not None:
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
        """Called when a request arrives for a model that is not up. Raises ModelNotReady for a while after a load that
        failed."""
        if model.place in ("loading", "in") or model in self._wanted:
            return
        self._check_refused(model)
        self._wanted[model] = time.monotonic()
        self._turn()
        self._check_refused(model)

    def _check_refused(self, model: ResidentModel) -> None:
        until, _, why = self._refused.get(model, (0.0, None, ""))
        now = time.monotonic()
        if now < until:
            raise ModelNotReady(why, retry_after_s=until - now)

    def _busy(self) -> dict[tuple[str, str], int]:
        """Waiting and running requests by model; also counts arrivals."""
        busy = {}
        for model, handle in self._handles.items():
            busy[model.key] = handle.pending
            requests = handle.requests
            if requests != model.requests:
                model.requests, model.used_s = requests, time.monotonic()
        return busy

    def _turn(self) -> None:
        """Unloads and loads models as far as memory allows."""
        now, residency, busy = time.monotonic(), self._residency, self._busy()
        for model in residency.expired(busy, now):
            self._begin(self._leave(model, "unused"))
        for model in residency.excess(busy, now):
            self._begin(self._leave(model, "budget exceeded"))
        for model in [] if self._pinning else list(self._wanted):
            if model.place == "leaving":
                continue  # it comes back after it has left
            try:
                residency.check(model)
            except OverBudget as e:  # the others need not wait for it
                del self._wanted[model]
                self._refuse(model, self._handles[model], e)
                continue
            leaving = residency.make_room(model, busy, now)
            for other in leaving or ():
                self._begin(self._leave(other, f"made room for {model.key[0]}"))
            if leaving is None or not residency.fits(model):
                break  # its turn comes first
            del self._wanted[model]
            self._come(model, "requested", now)
            self._begin(self._load(model))
        self._wake_up(now)

    def _wake_up(self, now: float) -> None:
        """Sets the timer for the next model that may leave without an event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._residency.next_expiry()
        waiting = self._wanted or self._residency.exceeded
        if waiting and not any(m.place in ("loading", "leaving") for m in self._residency.models.values()):
            at = min(at, now + LOOK_S)
        if at < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(LOOK_S, at - now), self._turn)

    def _begin(self, move: Coroutine[Any, Any, object]) -> None:
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
        if model not in self._handles:
            return
        model.move("out", reason, time.monotonic())
        if handle.pending:  # they had not started
            self._wanted.setdefault(model, time.monotonic())
        self._turn()

    async def _load(self, model: ResidentModel) -> PenstockError | None:
        """The error if it did not load."""
        handle, began = self._handles.get(model), time.monotonic()
        if handle is None:  # unloaded a moment ago
            return None
        drain_s = 0.0
        try:
            await handle.instances.bring_up(DRAIN_S)
            drain_s, now = DRAIN_S, time.monotonic()
            if model in self._handles:
                more = self._residency.loaded(model, _measured(handle), now - began)
                for device in more:
                    log.warning(
                        "more_memory %s device=%s bytes=%d: more than residency.memory_bytes; the larger number counts",
                        handle.instances.label, device, model.need[device],
                    )  # fmt: skip
                self._residency.check(model)  # if it can never fit, it answers its batches and leaves
        except Exception as e:
            error = e if isinstance(e, PenstockError) else LoadFailed(f"model '{handle.name}': {describe(e)}")
            await handle.instances.leave(drain_s)
            if model in self._handles:
                self._not_loaded(model, handle, error)
            return error
        if model not in self._handles:
            return ModelNotReady(f"model '{handle.name}' was stopped while it was loading")
        self._refused.pop(model, None)
        model.used_s = now
        model.move("in", model.reason, now)
        self._turn()
        return None

    def _not_loaded(self, model: ResidentModel, handle: "ModelHandle", error: PenstockError) -> None:
        """Tries a load that ran out of memory again with more room; otherwise answers the requests that waited."""
        now = time.monotonic()
        model.move("out", "not loaded", now)
        if isinstance(error, LoadOutOfMemory) and self._residency.ran_out(model) and not model.pinned:
            log.warning("more_memory %s need=%s: loading it again", handle.instances.label, dict(model.need))
            self._wanted[model] = now
        else:
            self._refuse(model, handle, error)
        self._turn()

    def _refuse(self, model: ResidentModel, handle: "ModelHandle", error: PenstockError) -> None:
        """Answers the requests that waited, and refuses further ones for a while. They learn the cause if it is the
        budget; the text of another error may contain paths."""
        why = str(error) if isinstance(error, OverBudget) else f"model '{model.key[0]}' did not load"
        _, backoff, _ = self._refused.get(model) or (0.0, Backoff(RETRY_S, MOST_RETRY_S), "")
        wait = backoff.next_s()
        self._refused[model] = time.monotonic() + wait, backoff, why
        detail = f"\n{error.detail}" if error.detail else ""
        log.warning("load_failed %s retry_in_s=%g error=%s%s", handle.instances.label, wait, error, detail)
        handle.not_loaded(ModelNotReady(why, retry_after_s=wait))


def _resident(handle: "ModelHandle", budgets: Mapping[str, int]) -> ResidentModel:
    """Raises ConfigError for a model that cannot leave, or whose memory on an accelerator is not declared."""
    config, where = handle.config, f"model '{handle.name}': residency.memory_bytes"
    if config.transport == "inline":
        raise ConfigError(f"model '{handle.name}': residency: an inline model cannot leave; use 'process' or 'thread'")
    if config.batching.max_sequences and not config.residency.pinned:
        raise ConfigError(
            f"model '{handle.name}': it would lose its sequences (batching.max_sequences) when it leaves the memory of"
            " its device; set residency.pinned = true"
        )
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
    """The private memory of all workers that there may be on the CPU, without what they share with the server."""
    pids = [pid for pid in handle.instances.pids().values() if pid != os.getpid()]
    total = sum(map(private_bytes, pids)) * (handle.config.autoscale.max or len(pids)) // max(1, len(pids))
    return {"cpu": total} if total and set(handle.instances.devices()) == {"cpu"} else {}
