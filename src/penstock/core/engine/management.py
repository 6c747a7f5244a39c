"""Management: load, swap, unload, scale, default and traffic while the server runs, one change of a model at a time."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Struct, structs

from penstock import errors
from penstock.config.checks import check_model
from penstock.config.load import model_config
from penstock.config.schema import Config, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.rules import check_devices, devices_of, file_stamps
from penstock.plugins import is_whole_file
from penstock.types import ModelStatus

log = logging.getLogger("penstock.engine")

# keys that only the server's configuration may set
_OWN = ("env", "labels", "options", "preprocess_processes", "python", "requirements", "trust", "weights")
Change = Callable[[], Coroutine[Any, Any, None] | None]


class _Unload(Struct, eq=False):
    """A pending or running unload; `version` None: of all versions. Its only work may be to abort a load."""

    model: str
    version: str | None
    ended_a_load: bool = False


class Management:
    """Implements `ManagementBackend`. Until `started` is set, the configured models are still loading."""

    def __init__(self, engine: Engine, config: Config, sys_path: Sequence[str] = ()) -> None:
        self.started = False
        self._engine = engine
        self._config = config
        self._sections = _by_version(config.models)  # as they were applied last
        self._sys_path = list(sys_path)
        self._targets = AllowedTargets(config)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by model, while in use
        self._unloads: list[_Unload] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def check_open(self) -> None:
        if not self._config.server.management:
            raise errors.Forbidden("changing models is off: set management = true in [server]")
        if self._engine.draining:
            raise errors.ModelNotReady("the server is draining: it accepts no changes", retry_after_s=1.0)
        if not self.started:
            raise errors.ModelNotReady("the server is starting: its models are still loading", retry_after_s=1.0)

    def statuses(self) -> list[ModelStatus]:
        return self._engine.all_statuses()

    def learned(self, model: str, version: str) -> dict[str, object]:
        try:
            return self._engine.statistics(model, version)
        except errors.ModelNotFound:  # not loaded yet, or no longer
            return {}

    # ---- changes

    async def put(self, model: str, version: str | None, keys: Mapping[str, Any]) -> None:
        self.check_open()
        config = self._config_of(model, version, keys)
        await self._change(self._in_turn(model, partial(self._put, model, config)))

    async def unload(self, model: str, version: str | None) -> None:
        """Aborts running and waiting loads and scale-ups of the same version first: they may never end on their own."""
        self.check_open()
        await self._change(self._unload(_Unload(model, version)))

    async def scale(self, model: str, version: str | None, instances: int) -> None:
        self.check_open()
        self._bound(instances)
        await self._change(self._in_turn(model, partial(self._scale, model, version, instances)))

    async def drain(self, model: str, version: str, drained: bool) -> None:
        self.check_open()
        await self._change(self._drain(model, version, drained))

    async def _drain(self, model: str, version: str, drained: bool) -> None:
        await self._in_turn(model, partial(self._engine.set_drained, model, version, drained))
        if drained:  # not in its turn: it can be set back meanwhile
            await self._engine.handle(model, version).drained(self._config.server.drain_s)

    async def set_default(self, model: str, version: str) -> None:
        self.check_open()
        await self._change(self._in_turn(model, partial(self._engine.set_default, model, version)))

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        self.check_open()
        await self._change(self._in_turn(model, partial(self._engine.set_traffic, model, weights)))

    def file_stamps(self) -> dict[str, tuple[int, int, int]]:
        """The stamps of the files of all visible versions. Reads the files, so it is no call for the loop's thread."""
        return {k: v for h in self._engine.handles() for k, v in file_stamps(h.config, self._sys_path).items()}

    async def reload(self, models: Mapping[str, ModelConfig]) -> dict[tuple[str, str], BaseException | None]:
        """Reloads the versions whose section in `models` or files have changed, without losing a request. What was put
        or scaled while the server runs stays, unless the section has changed.

        A version that does not load answers as before. Other new and removed sections are not applied. Returns the
        changed versions, with the errors of those that did not load; the cause of an error is its reason.
        """
        wanted = _by_version(models)
        changes, names = [], []
        for handle in self._engine.handles():
            key = handle.name, handle.version
            section = wanted.pop(key, None)
            config = handle.config if section is None or section == self._sections.get(key) else section
            if config != handle.config or file_stamps(config, self._sys_path) != handle.files:
                put = partial(self._put, handle.name, config, _instances(handle, config))
                changes.append(self._change(self._in_turn(handle.name, put, True)))
                names.append(key)
        for name, version in wanted:
            log.warning("event=not_reloaded model=%s version=%s reason=new_section hint=restart", name, version)
        found = dict(zip(names, await asyncio.gather(*changes, return_exceptions=True), strict=True))
        read = _by_version(models)
        self._sections |= {key: read[key] for key, error in found.items() if error is None and key in read}
        return found

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        """Completes the change, even if the caller leaves meanwhile."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, errors.PenstockError):  # a bug, whose reason no caller receives
            log.error("change_failed error=%s", errors.describe(error), exc_info=error)

    async def _in_turn(self, model: str, change: Change, reload: bool = False) -> None:
        """Makes a change after those of the same model before it. Raises its errors, BadRequest for a ConfigError."""
        lock = self._locks.get(model)
        if lock is None:
            lock = self._locks[model] = asyncio.Lock()
        async with lock:
            if not reload:
                self.check_open()  # the state may have changed before it was our turn
            try:
                if (running := change()) is not None:
                    await running
            except errors.ConfigError as e:
                raise errors.BadRequest(e.message) from None

    async def _put(self, model: str, config: ModelConfig, instances: int | None = None) -> None:
        self._unless_unloaded(model, config.version)
        handle = self._engine.prepare(model, config, sys_path=self._sys_path, instances=instances)
        try:
            await self._engine.put(handle, drain_s=self._config.server.drain_s)
        except (errors.LoadFailed, errors.ConfigError) as e:
            raise self._not_loaded(e, f"model '{model}' version '{config.version}' could not be loaded") from e
        log.info("loaded model=%s version=%s", model, config.version)

    async def _unload(self, unload: _Unload) -> None:
        self._unloads.append(unload)
        try:
            unload.ended_a_load = self._engine.abort(unload.model, unload.version)
            await self._in_turn(unload.model, partial(self._unload_now, unload))
        finally:
            self._unloads.remove(unload)

    async def _unload_now(self, unload: _Unload) -> None:
        there = [s.version for s in self._engine.statuses() if s.name == unload.model]
        going: Sequence[str | None] = there if unload.version is None else [unload.version]
        if unload.ended_a_load and not set(there) & set(going):
            return
        drain_s = self._config.server.drain_s
        await asyncio.gather(*(self._engine.unload(unload.model, v, drain_s=drain_s) for v in going or [None]))
        log.info("unloaded model=%s versions=%s", unload.model, ",".join(v for v in going if v))

    def _unless_unloaded(self, model: str, version: str) -> None:
        """Raises Conflict if an unload waits behind this change, which makes the change pointless."""
        for unload in self._unloads:
            if unload.model == model and unload.version in (None, version):
                unload.ended_a_load = True
                raise errors.Conflict(
                    f"model '{model}' version '{version}' is about to be unloaded: nothing was started"
                )

    async def _scale(self, model: str, version: str | None, instances: int) -> None:
        self._unless_unloaded(model, self._engine.version_of(model, version))
        try:
            await self._engine.scale(model, instances, version, drain_s=self._config.server.drain_s)
        except (errors.LoadFailed, errors.ConfigError) as e:
            raise self._not_loaded(e, f"a new instance of model '{model}' could not be loaded") from None

    # ---- permissions

    def _config_of(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ModelConfig:
        """Raises BadRequest, Forbidden."""
        keys = dict(keys)
        if keys.pop("name", model) != model:
            raise errors.BadRequest(f"name: the path names the model '{model}'; leave the key out")
        if keys.setdefault("version", version or "1") != (version or keys["version"]):
            raise errors.BadRequest(f"version: the path names version '{version}'; leave the key out")
        if "traffic" in keys:
            raise errors.BadRequest("traffic: set it by PUT /models/{model}/traffic, once the version is loaded")
        if "target" not in keys:
            raise errors.BadRequest('target: found none, expected for instance "app.py:Model"')
        try:
            config = model_config(keys, model)
            check_model(config)
            check_devices(config)
        except errors.ConfigError as e:
            raise errors.BadRequest(e.message) from None
        self._bound(config.autoscale.max or len(devices_of(config)))
        return self._guarded(model, config)

    def _guarded(self, model: str, config: ModelConfig) -> ModelConfig:
        """The configuration with an allowed target. Only the server's configuration may set keys that run other code,
        read other files or start more processes: `_OWN`, and classes for transport and policy."""
        target, section = self._targets.resolve(config.target, model, config.version)
        own = section or ModelConfig(target=target)
        default = ModelConfig(target=target)
        for key in _OWN:
            if getattr(config, key) not in (getattr(default, key), getattr(own, key)):
                raise errors.Forbidden(f"{key}: it can only be set in the server's configuration")
        for key, value, known in (
            ("transport", config.transport, own.transport),
            ("batching.policy", config.batching.policy, own.batching.policy),
        ):
            if ":" in value and value != known:
                raise errors.Forbidden(f"{key}: a class can only be named in the server's configuration")
        return structs.replace(config, target=target, **{key: getattr(own, key) for key in _OWN})

    def _bound(self, instances: int) -> None:
        limit = self._config.limits.max_instances
        if not 1 <= instances <= limit:
            raise errors.BadRequest(f"instances: found {instances}, expected 1 to {limit} (limits.max_instances)")

    @staticmethod
    def _not_loaded(error: errors.PenstockError, what: str) -> errors.LoadFailed:
        """The error for the caller; the reason, which may name paths, goes to the log."""
        log.warning("load_failed: %s error=%s%s", what, error, f"\n{error.detail}" if error.detail else "")
        return errors.LoadFailed(f"{what}; nothing has changed; the server's log has the reason")


def _by_version(models: Mapping[str, ModelConfig]) -> dict[tuple[str, str], ModelConfig]:
    return {(model.name or section, model.version): model for section, model in models.items()}


def _instances(handle: ModelHandle, config: ModelConfig) -> int | None:
    """The number of instances that a version keeps, as it was scaled or as its load needs; None: as `config` says."""
    same = all(getattr(config, key) == getattr(handle.config, key) for key in ("instances", "devices", "autoscale"))
    follows = handle.scaler is not None or handle.resident is None
    return handle.instances.count or None if same and follows else None


class AllowedTargets:
    """The targets that may be loaded at run time: configured ones, and the files of the model store.

    Symbolic links are resolved before anything is compared.
    """

    def __init__(self, config: Config) -> None:
        self._known = [(model.name or section, model) for section, model in config.models.items()]
        self._store = None if config.server.model_store is None else os.path.realpath(config.server.model_store)

    def resolve(self, target: str, model: str, version: str) -> tuple[str, ModelConfig | None]:
        """(the target to load, the section that names it, None for a file of the store). Raises Forbidden, BadRequest.

        If several sections have the target, the one of this version wins, else one of the model, else the first. A
        relative path starts at the folder of the configured file, or at the store. The messages name no path of this
        machine.
        """
        where, colon, attribute = target.rpartition(":")
        named = bool(colon and where and attribute) or is_whole_file(target)
        if not named or not target.isprintable():
            raise errors.BadRequest("target: expected for instance app.py:Model, model.onnx or pipeline.toml")
        if "://" in target:
            raise errors.Forbidden("target: models are not loaded from URLs; put the file into server.model_store")
        known = [(name, section) for name, section in self._known if _names(section.target, target)]
        if known:
            _, section = max(known, key=lambda k: (k[0] == model) + (k[0] == model and k[1].version == version))
            return section.target, section
        if self._store is not None and (is_whole_file(target) or _is_file(where)):
            whole = is_whole_file(target)
            file = os.path.realpath(os.path.join(self._store, target if whole else where))
            if file.startswith(self._store + os.sep):
                if not (is_whole_file(file) if whole else file.endswith(".py")) or not os.path.isfile(file):
                    raise errors.BadRequest("target: the model store has no such file")
                if whole:
                    return file, None
                if not attribute.isidentifier():  # "model.py:os.system" is not what the owner of the file offers
                    raise errors.BadRequest(
                        "target: expected the name of a function, class or object of the file, without dots"
                    )
                return f"{file}:{attribute}", None
        raise errors.Forbidden(
            "target: it is neither one that the server's configuration names nor a file in server.model_store"
        )


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _names(known: str, target: str) -> bool:
    if is_whole_file(known):
        return is_whole_file(target) and _same_file(known, target)
    known_where, _, known_attribute = known.rpartition(":")
    where, _, attribute = target.rpartition(":")
    return target == known or (attribute == known_attribute and _same(known_where, where))


def _same(known: str, where: str) -> bool:
    return _is_file(known) and _is_file(where) and _same_file(known, where)


def _same_file(known: str, where: str) -> bool:
    known = os.path.expanduser(known)
    return os.path.realpath(os.path.join(os.path.dirname(known), where)) == os.path.realpath(known)
