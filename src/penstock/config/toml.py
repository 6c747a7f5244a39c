"""Reads TOML files, and tells pipelines from configurations of a server."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

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
