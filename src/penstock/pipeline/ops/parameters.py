"""The keys that a node may set for an op: the parameters of its `__init__`, converted to their annotated types.

Values come from TOML, where TorchPipe's users write numbers and lists as text: `"224"`, `"1"`, `"123.7, 116.3, 103.5"`.
"""

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from penstock.errors import ConfigError, PenstockError, nearest
from penstock.pipeline.ops.base import Op
from penstock.plugins import raised_at

REQUIRED: Any = inspect.Parameter.empty
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_SPLIT = re.compile(r"[,\s]+")
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
        key: convert(value, known[key].type, f"{name}: {key}") if key in known else value
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


def convert(value: Any, type_: Any, where: str) -> Any:
    """The value as `type_`: a scalar, a tuple, a Literal, or a union of those. Raises ConfigError: found, expected."""
    fits, result = _convert(value, type_)
    if not fits:
        raise ConfigError(f"{where} is {value!r} ({type(value).__name__}), expected {describe_type(type_)}")
    return result


def _convert(value: Any, type_: Any) -> tuple[bool, Any]:
    """Whether the value fits, and the converted value."""
    origin = get_origin(type_)
    if type_ is Any:
        return True, value
    if origin in (Union, types.UnionType):
        if value is None:
            return type(None) in get_args(type_), None
        tried = (_convert(value, arm) for arm in get_args(type_) if arm is not type(None))
        return next((found for found in tried if found[0]), (False, None))
    if origin is Literal:
        text = value.strip().lower() if isinstance(value, str) else value
        return next(((True, choice) for choice in get_args(type_) if text == choice), (False, None))
    if origin is tuple:
        return _convert_tuple(value, get_args(type_)[0])
    if isinstance(origin or type_, type) and (origin or type_) in (dict, list):
        return isinstance(value, origin or type_), value
    return _convert_scalar(value, type_)


def _convert_tuple(value: Any, item: Any) -> tuple[bool, Any]:
    if isinstance(value, str):
        value = [part for part in _SPLIT.split(value.strip()) if part]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        return False, None
    found = [_convert(v, item) for v in value]
    return all(fits for fits, _ in found), tuple(v for _, v in found)


def _convert_scalar(value: Any, type_: Any) -> tuple[bool, Any]:
    text = value.strip() if isinstance(value, str) else value
    if type_ is bool:
        word = str(text).lower()
        return word in _TRUE | _FALSE, word in _TRUE
    if type_ is str:
        return isinstance(text, str | int | float), str(text)
    if isinstance(text, bool):
        return False, None
    try:
        if type_ is float:
            return True, float(text)
        if type_ is int:
            return float(text) == int(float(text)), int(float(text))
    except (TypeError, ValueError, OverflowError):
        return False, None
    return isinstance(value, type_), value


def describe_type(type_: Any) -> str:
    """A type in the words of a configuration file: "whole number", "numbers with commas", "one of 'rgb', 'bgr'"."""
    origin, args = get_origin(type_), get_args(type_)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arm) for arm in args if arm is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"{describe_type(args[0])}s with commas between"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "table", list: "array"}
    return words.get(origin or type_) or str(getattr(type_, "__name__", type_))
