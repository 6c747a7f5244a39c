"""A file of TOML: its tables and its text, or an error that says what is wrong with it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

Tree = dict[str, Any]


def read(path: str | os.PathLike[str]) -> tuple[Tree, str]:
    """The tables of a file, and its text. Raises ConfigError: it is not there, no text, or no TOML."""
    try:
        text = Path(path).read_bytes().decode()
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
        raise ConfigError(f"{path}: not valid TOML: brackets within brackets, too deep to be read") from None
