"""Reads TOML and YAML files, and distinguishes models from configurations of a server."""

import os
import tomllib
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.plugins import BUILTIN, load_object, optional_module

Tree = dict[str, Any]


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


def describes_model(file: str) -> bool:
    """Whether a TOML file describes a model, such as a pipeline, and no configuration.

    False for an unreadable file: loading it as a configuration reports the error.
    """
    try:
        tables, _ = read(file)
    except ConfigError:
        return False
    tests: list[Any] = [load_object(where) for where in BUILTIN["toml"].values()]
    return any(test(tables) for test in tests)


MAX_YAML_BYTES: Final = 2**20  # real files have a few KB


def load_yaml(path: Path | str, shown: str) -> tuple[Any, Any]:
    """The value in a YAML file, and its root node, which knows the lines of all keys.

    Raises ConfigError, which names the file as `shown` and the line.
    """
    yaml: Any = optional_module("yaml", f"{shown} cannot be read without PyYAML", "yaml")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_YAML_BYTES:
        raise ConfigError(f"{shown}: found more than {MAX_YAML_BYTES} bytes, expected a configuration file")
    try:
        # two passes, because constructing the value merges the nodes of `<<` into others
        return yaml.safe_load(raw), yaml.compose(raw, Loader=yaml.SafeLoader)
    except Exception as error:  # PyYAML raises many types: IndexError for !!int "", AttributeError for !!timestamp x
        mark = getattr(error, "problem_mark", None)
        where = shown if mark is None else f"{shown}:{mark.line + 1}"
        text = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: not valid YAML: {text}") from None
