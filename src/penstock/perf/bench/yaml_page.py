"""A YAML file of keys: what it says, and at which line; for errors that name the place."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError

MOST_BYTES: Final = 2**20


class Page:
    """One file: what it says, and where. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import yaml
        except ImportError:
            raise ConfigError(f"{path} cannot be read without PyYAML: pip install 'penstock[yaml]'") from None
        try:
            with path.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        if len(raw) > MOST_BYTES:
            raise ConfigError(f"{path}: found more than {MOST_BYTES} bytes, expected the models of a benchmark suite")
        try:
            data = yaml.safe_load(raw)
            self._root: Any = yaml.compose(raw, Loader=yaml.SafeLoader)
        except Exception as error:  # PyYAML raises many kinds, also AttributeError and IndexError
            mark = getattr(error, "problem_mark", None)
            text = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
            raise ConfigError(f"{path}{'' if mark is None else f':{mark.line + 1}'}: no valid YAML: {text}") from None
        if not isinstance(data, dict) or not data:
            raise ConfigError(f"{path}: found {kind_of(data)}, expected Model_name: eager_mode: url: ...")
        self._check(self._root, set())
        self.data: dict[str, Any] = data

    def where(self, at: tuple[str | int, ...]) -> str:
        """The file and the line of what stands under these keys."""
        node, line = self._root, 0
        for step in at:
            pairs = node.value if hasattr(node, "value") and isinstance(node.value, list) else []
            if isinstance(step, int):
                key = node = pairs[step]
            else:
                found = [pair for pair in pairs if isinstance(pair, tuple) and pair[0].value == step]
                if not found:
                    break
                key, node = found[0]
            line = key.start_mark.line
        return f"{self.path}:{line + 1}"

    def wrong(self, at: tuple[str | int, ...], found: str, expected: str) -> ConfigError:
        """The error of what stands under these keys."""
        return ConfigError(f"{self.where(at)}: found {found}, expected {expected}")

    def _check(self, node: Any, seen: set[int]) -> None:
        """Keys are texts, and none stands twice: YAML would keep the last one without a word."""
        if id(node) in seen or not isinstance(node.value, list):
            return
        seen.add(id(node))
        keys: set[str] = set()
        for entry in node.value:
            if not isinstance(entry, tuple):
                self._check(entry, seen)
                continue
            key, value = entry
            name = str(key.value)
            if key.tag != "tag:yaml.org,2002:str" and name != "<<":
                raise ConfigError(f"{self.path}:{key.start_mark.line + 1}: found the key {name}, expected a text")
            if name in keys:
                raise ConfigError(f"{self.path}:{key.start_mark.line + 1}: the key {name!r} stands twice; remove one")
            keys.add(name)
            self._check(value, seen)


def kind_of(value: object) -> str:
    """What a value is, as an error tells it."""
    if value is None:
        return "nothing"
    return "keys" if isinstance(value, dict) else "a list" if isinstance(value, list) else shown(value)


def shown(value: object) -> str:
    """The value, in as many characters as an error has room for: lists in lists in lists may have no end."""
    return (repr(value) if isinstance(value, str) else reprlib.repr(value))[:100]
