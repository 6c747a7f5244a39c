"""Triton's model configuration in a load request, as keys of `[models.NAME]`.

Triton replaces the whole configuration of the model. Here the target and all that Triton cannot say stay, so its keys
change what they name only. A key that a client read and sends back as it was changes nothing.
"""

from collections.abc import Mapping
from itertools import chain, cycle, islice
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct, field

from penstock.config.schema import MOST_INSTANCES, ModelConfig
from penstock.core.worker.devices import expanded
from penstock.errors import BadRequest

_OWN: Final = frozenset(ModelConfig.__struct_fields__) - {"name"}  # the only key of both
_LEVEL_S: Final = 10.0  # between priorities, as in the default of batching.priority
Natural = Annotated[int, Meta(ge=0)]


class _QueuePolicy(Struct, forbid_unknown_fields=True):
    timeout_action: Literal["REJECT"] = "REJECT"
    default_timeout_microseconds: Natural = 0
    allow_timeout_override: bool = True
    max_queue_size: Natural = 0


class _DynamicBatching(Struct, forbid_unknown_fields=True):
    preferred_batch_size: list[int] = field(default_factory=list)
    max_queue_delay_microseconds: Natural | None = None
    preserve_ordering: bool = False
    priority_levels: Annotated[int, Meta(ge=0, le=100)] | None = None
    default_priority_level: Literal[0, 1] = 1
    default_queue_policy: _QueuePolicy = field(default_factory=_QueuePolicy)


class _Group(Struct, forbid_unknown_fields=True):
    name: str = ""
    kind: Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"] = "KIND_AUTO"
    count: Annotated[int, Meta(ge=1, le=MOST_INSTANCES)] = 1
    gpus: list[Natural] = field(default_factory=list)


class Changes(Struct, forbid_unknown_fields=True):
    """The keys of Triton that can be changed, each None or empty if it is not."""

    max_batch_size: Natural | None = None
    instance_group: list[_Group] = field(default_factory=list)
    dynamic_batching: _DynamicBatching | None = None


def is_tritons(keys: Mapping[str, Any]) -> bool:
    """True unless a key is one of `[models.NAME]`: only `name` is a key of both."""
    return not keys.keys() & _OWN


def changes(name: str, keys: Mapping[str, Any], current: Mapping[str, Any]) -> Changes:
    """What Triton's keys change. `current` is the model's configuration in Triton's form, empty if it is not loaded.

    Raises BadRequest for a key without a counterpart.
    """
    changed = _changed(keys, current)
    if changed.pop("name", name) != name:
        raise BadRequest(f"parameter 'config': name is not '{name[:100]}', which the request names; leave it out")
    try:
        found = msgspec.convert(changed, Changes, strict=False)  # protobuf writes 64-bit numbers as text
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"parameter 'config': {error}; of Triton's keys max_batch_size, instance_group and dynamic_batching can be"
            " changed: leave out the others, or send keys of [models.NAME]"
        ) from None
    batching = found.dynamic_batching or _DynamicBatching()
    largest = current.get("max_batch_size") if found.max_batch_size is None else found.max_batch_size
    for key, wrong in (
        ("preferred_batch_size", batching.preferred_batch_size not in ([], [largest])),
        ("preserve_ordering", batching.preserve_ordering),
        ("default_queue_policy.allow_timeout_override", not batching.default_queue_policy.allow_timeout_override),
    ):
        if wrong:
            raise BadRequest(f"parameter 'config': dynamic_batching.{key} has no counterpart here; leave it out")
    return found


def _changed(keys: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, also of nested objects, whose values are not the current ones."""
    found = {}
    for key, value in keys.items():
        if key not in current or not _same(value, current[key]):
            nested = isinstance(value, dict) and isinstance(current.get(key), dict)
            found[key] = _changed(value, current[key]) if nested else value
    return found


def _same(value: Any, current: Any) -> bool:
    if isinstance(value, dict) and isinstance(current, dict):
        return all(key in current and _same(each, current[key]) for key, each in value.items())
    if isinstance(value, list) and isinstance(current, list):
        return len(value) == len(current) and all(map(_same, value, current))
    return bool(value == current) or (isinstance(value, str) and value == str(current))


def keys_of(found: Changes, model: ModelConfig) -> dict[str, Any]:
    """The keys of a section with the changes."""
    keys: dict[str, Any] = msgspec.to_builtins(model)
    batching = keys["batching"]
    if found.max_batch_size is not None:
        batching["max_batch_size"] = found.max_batch_size or "auto"
        if found.max_batch_size == 0 or batching["rows"] == "none":
            batching["rows"] = "auto" if found.max_batch_size else "none"
    if found.instance_group:
        devices = chain.from_iterable(_devices(group, model) for group in found.instance_group)
        keys["devices"] = list(islice(devices, MOST_INSTANCES + 1))
        keys["instances"] = len(keys["devices"])
    dynamic = found.dynamic_batching
    if dynamic is None:
        return keys
    if batching["policy"] == "none":
        batching["policy"] = "adaptive"
    if dynamic.max_queue_delay_microseconds is not None:
        batching["max_hold_s"] = dynamic.max_queue_delay_microseconds / 1e6
    if dynamic.priority_levels is not None:
        batching["priority"] = [_LEVEL_S * level for level in range(max(1, dynamic.priority_levels))]
    if dynamic.default_queue_policy.default_timeout_microseconds:
        batching["timeout_s"] = dynamic.default_queue_policy.default_timeout_microseconds / 1e6
    if dynamic.default_queue_policy.max_queue_size:
        batching["max_queue"] = dynamic.default_queue_policy.max_queue_size
    return keys


def _devices(group: _Group, model: ModelConfig) -> list[str]:
    """The device of each instance of a group: `count` for each GPU, as in Triton, or on the devices of the section."""
    if group.kind == "KIND_CPU":
        return ["cpu"] * group.count
    if group.kind == "KIND_GPU":
        gpus = [f"cuda:{n}" for n in group.gpus[:MOST_INSTANCES]] or list(expanded(("cuda",)))
        return [device for device in gpus for _ in range(group.count)]
    return list(islice(cycle(model.devices or ("cpu",)), group.count))
