"""YAML files: bounded in size, with the line of an error. PyYAML is the extra `yaml`."""

from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.plugins import optional_module

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
