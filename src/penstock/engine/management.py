"""Management: load, swap, unload, scale, default and traffic while the server runs, one change of a model at a time."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from msgspec import structs

from penstock.config.load import model_config
from penstock.config.schema import Config, ModelConfig
from penstock.engine.engine import Engine
from penstock.engine.handle import ModelHandle, slots_of
from penstock.engine.targets import Targets
from penstock.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    Forbidden,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
)
from penstock.types import ModelStatus

log = logging.getLogger("penstock.engine")

ROUTES: Final = ("scale", "default", "traffic")  # behind the name of a model: no version can be named so
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Change = Callable[[], Coroutine[Any, Any, None]]


class Management:
    """See `frontends.base.Management`. Until `started` is set, the models of the configuration are still loading."""

    def __init__(self, engine: Engine, config: Config, sys_path: Sequence[str] = ()) -> None:
        self.started = False
        self._engine = engine
        self._config = config
        self._sys_path = list(sys_path)
        self._targets = Targets(config)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by model, while anybody has it
        self._loading: dict[str, ModelHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def check_open(self) -> None:
        if not self._config.server.management:
            raise Forbidden("changing models is off: set management = true in [server]")
        if self._engine.draining:
            raise ModelNotReady("the server is draining: nothing is changed any more", retry_after_s=1.0)
        if not self.started:
            raise ModelNotReady("the server is starting: its models are still loading", retry_after_s=1.0)

    def statuses(self) -> list[ModelStatus]:
        return self._engine.all_statuses()

    def learned(self, model: str, version: str) -> dict[str, object]:
        try:
            return self._engine.statistics(model, version)
        except ModelNotFound:  # it is out of sight
            return {}

    # ---- changes

    async def put(self, model: str, version: str | None, keys: Mapping[str, Any]) -> None:
        self.check_open()
        config = self._config_of(model, version, keys)
        await self._change(model, partial(self._put, model, config))

    async def unload(self, model: str, version: str | None) -> None:
        """A load of the same version that is under way ends first: it may never end by itself."""
        self.check_open()
        loading = self._loading.get(model)
        aborted = loading is not None and version in (None, loading.version) and self._engine.hidden(loading)
        if loading is not None and aborted:
            await loading.close(0)
        await self._change(model, partial(self._unload, model, version, aborted))

    async def scale(self, model: str, version: str | None, instances: int) -> None:
        self.check_open()
        self._bound(instances)
        await self._change(model, partial(self._scale, model, version, instances))

    async def set_default(self, model: str, version: str) -> None:
        await self._change(model, partial(self._set_default, model, version))

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        await self._change(model, partial(self._set_traffic, model, weights))

    async def _change(self, model: str, change: Change) -> None:
        """Makes the change to its end, also if the caller leaves meanwhile."""
        self.check_open()
        task = asyncio.create_task(self._alone(model, change))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have left: it was told, or nobody is

    async def _alone(self, model: str, change: Change) -> None:
        lock = self._locks.get(model)
        if lock is None:
            lock = self._locks[model] = asyncio.Lock()
        async with lock:
            self.check_open()  # much may have happened before it was our turn
            await change()

    async def _put(self, model: str, config: ModelConfig) -> None:
        try:
            handle = self._engine.prepare(model, config, sys_path=self._sys_path)
        except ConfigError as e:
            raise BadRequest(e.message) from None
        self._loading[model] = handle
        try:
            await self._engine.put(handle, drain_s=self._config.server.drain_s)
        except ModelNotReady:
            if self._engine.draining:
                raise
            raise Conflict(f"model '{model}' version '{config.version}' was unloaded while it was loading") from None
        except (LoadFailed, ConfigError) as e:
            raise self._not_loaded(e, f"model '{model}' version '{config.version}' could not be loaded") from None
        finally:
            del self._loading[model]
        log.info("loaded model=%s version=%s", model, config.version)

    async def _unload(self, model: str, version: str | None, aborted: bool) -> None:
        there = [s.version for s in self._engine.statuses() if s.name == model]
        going: Sequence[str | None] = there if version is None else [version]
        if aborted and not set(there) & set(going):
            return
        drain_s = self._config.server.drain_s
        await asyncio.gather(*(self._engine.unload(model, v, drain_s=drain_s) for v in going or [None]))
        log.info("unloaded model=%s versions=%s", model, ",".join(v for v in going if v))

    async def _scale(self, model: str, version: str | None, instances: int) -> None:
        try:
            await self._engine.scale(model, instances, version, drain_s=self._config.server.drain_s)
        except (LoadFailed, ConfigError) as e:
            raise self._not_loaded(e, f"a new instance of model '{model}' could not be loaded") from None

    async def _set_default(self, model: str, version: str) -> None:
        self._engine.set_default(model, version)

    async def _set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        try:
            self._engine.set_traffic(model, weights)
        except ConfigError as e:
            raise BadRequest(e.message) from None

    # ---- what is allowed

    def _config_of(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ModelConfig:
        """Raises BadRequest, Forbidden."""
        keys = dict(keys)
        if keys.pop("name", model) != model:
            raise BadRequest(f"name: the path names the model '{model}'; leave the key out")
        if keys.setdefault("version", version or "1") != (version or keys["version"]):
            raise BadRequest(f"version: the path names version '{version}'; leave the key out")
        if "traffic" in keys:
            raise BadRequest("traffic: set it by PUT /models/{model}/traffic, once the version is loaded")
        if "target" not in keys:
            raise BadRequest('target: found none, expected for instance "app.py:Model"')
        try:
            config = model_config(keys, model)
        except ConfigError as e:
            raise BadRequest(e.message) from None
        if not _VERSION.fullmatch(config.version) or config.version in ROUTES:
            raise BadRequest(
                f"version: {config.version[:100]!r} cannot be one; expected letters, digits, '.', '_' and '-', 128 at"
                f" most, beginning with a letter or digit, and not {', '.join(ROUTES)}"
            )
        self._bound(slots_of(config)[0])
        return self._guarded(config)

    def _guarded(self, config: ModelConfig) -> ModelConfig:
        """With a target that is allowed. What would run other code, or run it otherwise, is the configuration's alone
        to say: `env`, `trust`, and classes for transport and policy."""
        target, section = self._targets.resolve(config.target)
        own = section or ModelConfig(target=target)
        default = ModelConfig(target=target)
        for key in ("env", "trust"):
            if getattr(config, key) not in (getattr(default, key), getattr(own, key)):
                raise Forbidden(f"{key}: it can only be set in the server's configuration")
        for key, value, known in (
            ("transport", config.transport, own.transport),
            ("batching.policy", config.batching.policy, own.batching.policy),
        ):
            if ":" in value and value != known:
                raise Forbidden(f"{key}: a class can only be named in the server's configuration")
        return structs.replace(config, target=target, env=own.env, trust=own.trust)

    def _bound(self, instances: int) -> None:
        most = self._config.limits.max_instances
        if not 1 <= instances <= most:
            raise BadRequest(f"instances: found {instances}, expected 1 to {most} (limits.max_instances)")

    @staticmethod
    def _not_loaded(error: PenstockError, what: str) -> LoadFailed:
        """What may leave the process: the reason, which may name paths, is in the log."""
        log.warning("load_failed error=%s%s: %s", error, f"\n{error.detail}" if error.detail else "", what)
        return LoadFailed(f"{what}; nothing has changed, and the server's log tells why")
