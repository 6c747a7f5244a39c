"""Request and response bodies of the management API."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from penstock.errors import BadRequest, ModelNotFound, nearest
from penstock.types import ModelStatus

T = TypeVar("T")


class _Scale(Struct, forbid_unknown_fields=True):
    instances: int


class _Default(Struct, forbid_unknown_fields=True):
    version: str


# ---- responses


def models_body(statuses: Sequence[ModelStatus]) -> bytes:
    """`{"models": [...]}`: every version of every model, sorted by name."""
    return msgspec.json.encode({"models": _sorted(statuses)})


def model_body(statuses: Sequence[ModelStatus], name: str) -> bytes:
    """`{"name", "versions": [...]}` of a model. Raises ModelNotFound."""
    versions = [s for s in statuses if s.name == name]
    if not versions:
        raise ModelNotFound(f"no model '{name[:100]}' is loaded{nearest(name[:100], {s.name for s in statuses})}")
    return changed_body(versions, name)


def changed_body(statuses: Sequence[ModelStatus], name: str) -> bytes:
    """`model_body` without the check: a change may have unloaded the last version."""
    return msgspec.json.encode({"name": name, "versions": _sorted([s for s in statuses if s.name == name])})


def version_body(statuses: Sequence[ModelStatus], name: str, version: str, statistics: Mapping[str, object]) -> bytes:
    """The status of a version; "batching" holds the state of its scheduler. Raises ModelNotFound."""
    model_body(statuses, name)
    found = [s for s in statuses if (s.name, s.version) == (name, version)]
    if not found:
        versions = ", ".join(dict.fromkeys(s.version for s in statuses if s.name == name))
        raise ModelNotFound(f"model '{name[:100]}' has no version '{version[:100]}'; it has {versions}")
    return msgspec.json.encode({**msgspec.structs.asdict(found[0]), "batching": statistics})


def _sorted(statuses: Sequence[ModelStatus]) -> list[ModelStatus]:
    return sorted(statuses, key=lambda s: (s.name, s.version))


# ---- requests; every reader raises BadRequest


def read_keys(body: bytes) -> dict[str, Any]:
    """The keys of `[models.NAME]`."""
    return _read(body, dict[str, Any], '{"target": "app.py:Model"}')


def read_instances(body: bytes) -> int:
    """The number in `{"instances": n}`."""
    return _read(body, _Scale, '{"instances": 2}').instances


def read_version(body: bytes) -> str:
    """The version in `{"version": v}`."""
    return _read(body, _Default, '{"version": "2"}').version


def read_weights(body: bytes) -> dict[str, float]:
    """The weights by version, such as `{"1": 0.9, "2": 0.1}`."""
    return _read(body, dict[str, float], '{"1": 0.9, "2": 0.1}')


def _read(body: bytes, kind: type[T], example: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is invalid: {e}; expected, for example, {example}") from None
