"""The keys that a node may set for an op: the parameters of its `__init__`, converted to their annotated types.

Values come from TOML, where TorchPipe's users write numbers and lists as text: `"224"`, `"1"`, `"123.7, 116.3, 103.5"`.
"""

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, get_type_hints

from msgspec import Struct

from penstock.errors import ConfigError, PenstockError, nearest
from penstock.pipeline.ops.base import Op
from penstock.plugins import raised_at
from penstock.values import convert

REQUIRED: Any = inspect.Parameter.empty
_DOC = re.compile(r"^\s*- `(\w+)`: (.+?)(?=^\s*- `|^\s*$|\Z)", re.MULTILINE | re.DOTALL)


class OpParameter(Struct, frozen=True):
    """One key of an op. `default` is REQUIRED if it must be set."""

    name: str
    type: Any
    default: Any = REQUIRED
    doc: str = ""

    @property
    def required(self) -> bool:
        """Whether the key must be set."""
        return self.default is REQUIRED


def parameters_of(cls: type[Op]) -> dict[str, OpParameter]:
    """The keys of an op by name, documented by lines "- `name`: text" in its docstring."""
    hints = _types(cls.__init__)
    docs = {
        name: " ".join(text.split())
        for base in reversed(cls.__mro__)
        for name, text in _DOC.findall(inspect.cleandoc(base.__doc__ or ""))
    }
    return {  # none of `object.__init__`, which has only *args and **kwargs
        p.name: OpParameter(p.name, hints.get(p.name, Any), p.default, docs.get(p.name, ""))
        for p in list(inspect.signature(cls.__init__).parameters.values())[1:]
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def _types(function: Any) -> dict[str, Any]:
    """The types of annotated parameters, except names that only type checkers import."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(function).items():
        try:
            found |= get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), names)
        except (NameError, AttributeError):
            continue
    return found


def takes_any(cls: type[Op]) -> bool:
    """Whether an op has `**params`, and therefore accepts keys of any name."""
    if cls.__init__ is object.__init__:
        return False
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values())


def check_params(cls: type[Op], params: Mapping[str, Any]) -> dict[str, Any]:
    """The values for an op, converted to its types. Raises ConfigError: unknown, missing, or of a wrong type."""
    known, name = parameters_of(cls), cls.__name__
    for key in params:
        if key not in known and not takes_any(cls):
            listed = ", ".join(known) or "none"
            raise ConfigError(f"{name} has no parameter '{key}'{nearest(key, known)} (it has: {listed})")
    missing = [key for key, p in known.items() if p.required and key not in params]
    if missing:
        raise ConfigError(f"{name} needs {' and '.join(missing)}, not found: set it in the node")
    return {
        key: convert(value, known[key].type, f"{name}: {key}", loose=True) if key in known else value
        for key, value in params.items()
    }


def make_op(cls: type[Op], params: Mapping[str, Any]) -> Op:
    """An op with these parameters. Raises ConfigError, also for values that the op itself rejects."""
    values = check_params(cls, params)
    try:
        return cls(**values)
    except PenstockError:
        raise
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{cls.__name__}: {e}{raised_at(e)}") from e
