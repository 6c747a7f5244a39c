"""Source: where a key stands, for errors and warnings that name file, line, node and key."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from penstock.errors import ConfigError

log = logging.getLogger("penstock.pipeline")

_HEAD = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*(\"[^\"]+\"|'[^']+'|[\w.-]+)\s*=")


class Source:
    """What a pipeline is read from. `text` is the file's, where there is one: it tells lines."""

    def __init__(self, name: str, text: str = "") -> None:
        self.name = name
        self._text = text
        self._spelled: dict[tuple[str, str], str] = {}

    def spelled(self, node: str, key: str, given: str) -> None:
        """A key of a node was given in another spelling, by which messages call it."""
        self._spelled[node, key] = given

    def error(self, node: str, key: str, message: str) -> ConfigError:
        """That something is wrong at a key of a node; `node` is empty for keys above all tables."""
        return ConfigError(f"{self._where(node, key)}: {message}")

    def warn(self, node: str, key: str, message: str) -> None:
        """Tells of what is passed over."""
        log.warning("%s: %s", self._where(node, key), message)

    def _where(self, node: str, key: str) -> str:
        key = self._spelled.get((node, key), key)
        line = next((n for n, table, name in self._keys() if (table, name) == (node, key)), None)
        table = f"[{node}]" if node else ""
        parts = f"{table} {key}".strip()
        return f"{self.name}{'' if line is None else f', line {line}'}{': ' if parts else ''}{parts}"

    def _keys(self) -> Iterator[tuple[int, str, str]]:
        """Line, table and key of each key, and of each table with the key "". A sketch of TOML, good for messages."""
        table = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            if head := _HEAD.match(line):
                table = ".".join(part.strip().strip("\"'") for part in head[1].split("."))
                yield number, table, ""
            elif key := _KEY.match(line):
                yield number, table, key[1].strip("\"'")
