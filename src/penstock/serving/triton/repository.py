"""Triton's model repository and model configuration extensions: the models of the store can be loaded and unloaded.

Changes go through the management of the engine, with its permissions. Source of the configuration: Triton's
`model_config.proto`; the shipped part of it has the fields that are written here.
"""

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.config.schema import BatchingConfig, Config, ModelConfig
from penstock.core.contracts import ManagementBackend, ModelSnapshot
from penstock.core.engine.engine import Engine
from penstock.errors import BadRequest, Conflict, ModelNotFound, ModelNotReady, nearest
from penstock.plugins import is_whole_file
from penstock.serving.triton.load_config import Changes, changes, is_tritons, keys_of
from penstock.types import ModelMetadata, ModelStatus, TensorSpec

_MICROSECONDS: Final = 1e6
# for a platform that Triton lacks, it names its Python backend
_BACKENDS: Final = {"onnxruntime_onnx": "onnxruntime", "pytorch_torchscript": "pytorch", "pytorch_exported": "pytorch"}


def model_config(
    metadata: ModelMetadata,
    reading: ModelSnapshot,
    batching: BatchingConfig,
    versions: Sequence[str],
    labels: Mapping[str, str],
) -> dict[str, Any]:
    """The configuration of a loaded version as the JSON form of Triton's message.

    As in Triton, `dims` leave out axis 0, the rows, and `max_batch_size` is 0 if that is not rows. `labels` has files
    by output; clients see their names alone.
    """
    status, whole = reading.status, metadata.unbatched
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": _BACKENDS.get(metadata.platform, "python"),
        "version_policy": _version_policy(versions),
        "max_batch_size": 0 if whole else status.max_batch_size,
        "input": [{**_tensor(spec, whole), "optional": spec.optional} for spec in metadata.inputs],
        "output": [
            {**_tensor(spec, whole), "label_filename": os.path.basename(labels.get(spec.name, ""))}
            for spec in metadata.outputs
        ],
        "instance_group": _instance_groups(metadata.name, status.devices),
        **_scheduling(batching, status.max_batch_size, reading.max_queue_rows),
        "parameters": {key: {"string_value": _text(value)} for key, value in metadata.parameters.items()},
        "model_transaction_policy": {"decoupled": metadata.streams},
    }


def _version_policy(versions: Sequence[str]) -> dict[str, Any]:
    """The served versions, if they are all numbers as in Triton."""
    if all(version.isdecimal() for version in versions):
        return {"specific": {"versions": [int(version) for version in versions]}}
    return {"all": {}}


def _tensor(spec: TensorSpec, whole: bool) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape[0 if whole else 1 :])}


def _instance_groups(name: str, devices: Sequence[str]) -> list[dict[str, Any]]:
    """One group for each device."""
    groups = []
    for n, (device, count) in enumerate(Counter(devices).items()):
        kind, _, number = device.partition(":")
        gpu = {"kind": "KIND_GPU", "gpus": [int(number)] if number.isdecimal() else []}
        groups.append({"name": f"{name}_{n}", "count": count, **({"kind": "KIND_CPU"} if kind == "cpu" else gpu)})
    return groups


def _scheduling(batching: BatchingConfig, max_batch_size: int, max_queue: int) -> dict[str, Any]:
    """`sequence_batching`, `dynamic_batching`, or neither for a model whose requests run one by one."""
    if batching.max_sequences:
        oldest = {"max_candidate_sequences": batching.max_sequences, "preferred_batch_size": [max_batch_size]}
        idle = round(batching.sequence_idle_s * _MICROSECONDS)
        return {"sequence_batching": {"max_sequence_idle_microseconds": idle, "oldest": oldest}}
    if "none" in (batching.policy, batching.rows):
        return {}
    hold_s = batching.max_hold_s if isinstance(batching.max_hold_s, float | int) else 0.0
    queue_policy = {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": round((batching.slo_s or batching.timeout_s) * _MICROSECONDS),
        "allow_timeout_override": True,
        "max_queue_size": max_queue,
    }
    dynamic = {
        "preferred_batch_size": [max_batch_size],
        "max_queue_delay_microseconds": round(hold_s * _MICROSECONDS),
        "priority_levels": len(batching.priority),
        "default_priority_level": 1,
        "default_queue_policy": queue_policy,
    }
    return {"dynamic_batching": dynamic}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


MOST_FILES: Final = 10_000  # of the store that are looked at
_STATES: Final = {"IDLE": "READY", "FAILED": "UNAVAILABLE", "DRAINED": "UNAVAILABLE", "DRAINING": "UNLOADING"}
_FOLDERS: Final = re.compile(r"(?<![\w.])/(?:[^/\s'\"]+/)*")
_NOT_OF_A_LOAD: Final = ("name", "traffic")  # keys of a section that do not describe a version


class ModelRepository:
    """The sections `[models.NAME]`, loaded or not, and the files of `server.model_store`, each by its name without
    extension."""

    def __init__(self, engine: Engine, config: Config, management: ManagementBackend) -> None:
        self._engine = engine
        self._management = management
        self._store = config.server.model_store
        self._sections: dict[str, list[ModelConfig]] = {}
        for section, model in config.models.items():
            self._sections.setdefault(model.name or section, []).append(model)

    def model_config(self, name: str, version: str | None) -> dict[str, Any]:
        """Triton's configuration of a loaded version. Raises ModelNotFound, ModelNotReady."""
        versions = self._engine.metadata(name, version)[1]
        handle = self._engine.handle(name, version)
        assert handle.metadata is not None
        return model_config(handle.metadata, handle.reading(), handle.batching, versions, handle.config.labels)

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Name, version, state and reason of every model; of those that can answer, with `ready_only`."""
        found = {
            (s.name, s.version): _line(s.name, s.version, _STATES.get(s.state, s.state), self._reason(s))
            for s in self._management.statuses()
        }
        if ready_only:
            return [line for line in found.values() if line["state"] == "READY"]
        for name, sections in self._sections.items():
            for model in sections:
                found.setdefault((name, model.version), _line(name, model.version, "UNAVAILABLE", "not loaded"))
        for name in (await self._files()).keys() - {name for name, _ in found}:
            found[name, ""] = _line(name, "", "UNAVAILABLE", "not loaded")
        return [found[key] for key in sorted(found)]

    def _reason(self, status: ModelStatus) -> str:
        """Why a version has no instance, without the folders of this machine; empty if it has one."""
        if status.state != "FAILED":
            return ""
        return _FOLDERS.sub("", self._engine.handle(status.name, status.version).instances.why_down().message)

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Loads the versions of a model as they are configured.

        With the parameter `config`, the text of a JSON object, loads them as they are with the changes by Triton's
        keys, or one version with the keys of `[models.NAME]`. A loaded version is replaced without losing a request.

        Raises BadRequest, Forbidden, ModelNotFound, ModelNotReady, Conflict, LoadFailed.
        """
        self._management.check_open()
        keys = _config_of(parameters)
        sections = self._sections.get(name)
        if keys is None or is_tritons(keys):
            found = changes(name, keys or {}, self._current(name))
            loaded = [handle.config for handle in self._engine.handles() if handle.name == name and keys]
            sections = loaded or sections or [ModelConfig(target=await self._file_of(name))]
            await self._load_sections(name, sections, found)
            return
        if "target" not in keys:
            keys["target"] = await self._file_of(name) if sections is None else sections[0].target
        await self._management.put(name, None, keys)

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Unloads all versions of a model, if any is loaded. As in Triton, parameters are ignored; here no model
        depends on another one. Raises Forbidden, ModelNotReady.
        """
        with contextlib.suppress(ModelNotFound):
            await self._management.unload(name, None)

    def _current(self, name: str) -> dict[str, Any]:
        """Triton's configuration of a model, empty if it is not loaded."""
        with contextlib.suppress(ModelNotFound, ModelNotReady):
            return self.model_config(name, None)
        return {}

    async def _load_sections(self, name: str, sections: Sequence[ModelConfig], found: Changes) -> None:
        for model in sections:
            keys = keys_of(found, model)
            await self._management.put(name, None, {k: v for k, v in keys.items() if k not in _NOT_OF_A_LOAD})
        traffic = next((model.traffic for model in sections if model.traffic), None)
        if traffic:
            await self._management.set_traffic(name, traffic)

    async def _file_of(self, name: str) -> str:
        """The file of the store with this name. Raises ModelNotFound, Conflict."""
        found = await self._files()
        files = found.get(name)
        if not files:
            known = {*found, *self._sections}
            raise ModelNotFound(f"the repository has no model '{name[:100]}'{nearest(name[:100], known)}")
        if len(files) > 1:
            raise Conflict(
                f"the files {', '.join(files[:4])} have this name; choose one by the parameter config, as in"
                f' {{"target": "{files[0]}"}}'
            )
        return files[0]

    async def _files(self) -> dict[str, list[str]]:
        return {} if self._store is None else await asyncio.to_thread(_files_of, self._store)


def _files_of(store: str) -> dict[str, list[str]]:
    """{name without the ending: model and pipeline files at the top of the store}."""
    found: dict[str, list[str]] = {}
    try:
        with os.scandir(store) as entries:
            for _, entry in zip(range(MOST_FILES), entries, strict=False):
                if is_whole_file(entry.name) and entry.is_file():
                    found.setdefault(os.path.splitext(entry.name)[0], []).append(entry.name)
    except OSError:  # it has been removed
        return {}
    return {name: sorted(files) for name, files in found.items()}


def _config_of(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys in the parameter `config`. Raises BadRequest."""
    for key in parameters:
        if key.startswith("file:"):
            raise BadRequest(f"parameter '{key[:100]}' is not supported: put the file into server.model_store")
        if key != "config":
            raise BadRequest(f"parameter '{key[:100]}' is not supported{nearest(key[:100], ['config'])}")
    text = parameters.get("config")
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        raise BadRequest(
            "parameter 'config' must be a JSON object as text, with keys of [models.NAME] or Triton's, such as"
            ' {"target": "app.py:Model", "instances": 2}'
        ) from None


def _line(name: str, version: str, state: str, reason: str) -> dict[str, str]:
    return {"name": name, "version": version, "state": state, "reason": reason}
