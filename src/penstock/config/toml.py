"""Reads TOML files, and describes their keys and values in words for error messages and the table of keys."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import inspect

from penstock.errors import ConfigError

Tree = dict[str, Any]

SERVER_TABLES: Final = ("auth", "limits", "metrics", "models", "pipeline", "server")  # any other table is a node
ONE_NODE_KEYS: Final = {"backend", "ops", "model"}  # above all tables: the file is a pipeline of one node


def read(path: str | os.PathLike[str]) -> tuple[Tree, str]:
    """The tables of a file, and its text. Raises ConfigError for a missing, unreadable or malformed file."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # an editor on Windows may write a byte order mark
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; expected a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; expected a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None  # the message ends in line and column
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: brackets are nested too deeply") from None


def is_pipeline(tables: Mapping[str, Any]) -> bool:
    """Whether tables describe a pipeline, and not a configuration of `penstock serve`."""
    nodes = any(isinstance(value, dict) and name not in SERVER_TABLES for name, value in tables.items())
    return "models" not in tables and (nodes or "pipeline" in tables or bool(ONE_NODE_KEYS & tables.keys()))


def describes_pipeline(file: str) -> bool:
    """Whether a TOML file describes a pipeline. False for an unreadable file: loading it as a configuration reports
    the error."""
    try:
        return is_pipeline(read(file)[0])
    except ConfigError:
        return False


def bare(kind: Any) -> Any:
    """The type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_table(kind: Any) -> bool:
    """Whether a key of this type is a table of named keys, such as `[server]`."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def expected(kind: Any) -> str:
    """The values that a key of this type takes, such as "a whole number from 0 to 65535"."""
    return _words(inspect.type_info(kind))


def found(value: Any) -> str:
    """The value in TOML notation, or its type and size."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"{value}"
        case str():
            return f"the string {value!r}" if len(value) <= 60 else f"a string of {len(value)} characters"
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
            # None is an absent key: TOML has no notation for it.
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
    return "a string"


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    most = "" if info.le is None else f"{info.le:.15g}"
    if info.ge is not None:
        return f" from {info.ge:g} to {most}" if most else f", {info.ge:g} or more"
    return "" if info.gt is None else f" above {info.gt:g}" + (f", up to {most}" if most else "")
