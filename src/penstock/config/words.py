"""The kinds of the configuration keys in plain words, for error messages and for the table of keys."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import inspect


def bare(kind: Any) -> Any:
    """The type without its `Annotated` notes."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_table(kind: Any) -> bool:
    """True if a key of this kind is a table of named keys, such as `[server]`."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def expected(kind: Any) -> str:
    """What a key of this kind takes, such as "a whole number from 0 to 65535"."""
    return _words(inspect.type_info(kind))


def found(value: Any) -> str:
    """The value as it would stand in a TOML file, and what it is."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"{value}"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else f"a text of {len(value)} characters"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return "a table"
        case None:
            return "nothing"
    return f"a {type(value).__name__} ({value})"


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return _words(info.type)
        case inspect.UnionType():
            # None stands for an absent key: TOML has no word for it.
            return " or ".join(_words(t) for t in info.types if not isinstance(t, inspect.NoneType))
        case inspect.LiteralType():
            return " or ".join(f'"{value}"' for value in info.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.VarTupleType():
            return f"a list{f' of {info.min_length} or more' if info.min_length else ''}, each {_words(info.item_type)}"
        case inspect.DictType() | inspect.StructType():
            return "a table"
    return "a text"


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    if info.ge is not None and info.le is not None:
        return f" from {info.ge:g} to {info.le:g}"
    if info.ge is not None:
        return f", {info.ge:g} or more"
    return f" above {info.gt:g}" if info.gt is not None else ""
