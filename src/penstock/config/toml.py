"""Reads TOML files, and tells models from configurations of a server."""

import os
import tomllib
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.plugins import BUILTIN, load_object

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
