"""EngineCache: compiled TensorRT engines on disk, reused only if their whole key and all their files match."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import describe

log = logging.getLogger("penstock.runtimes")

SIDECAR = "engine.json"


class EngineCache:
    """The folder of engines for one key: the digest of a model, its shapes, precision, device and versions.

    A sidecar, `engine.json`, holds the whole key and the digest of every file. An engine is code that runs on the
    device, so an engine that does not match the sidecar is deleted, not loaded.
    """

    def __init__(self, root: Path, key: dict[str, Any]) -> None:
        self._key = key
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.folder = root / digest[:32]

    @classmethod
    def of_user(cls, key: dict[str, Any]) -> EngineCache:
        """The cache in `$XDG_CACHE_HOME/penstock/engines`, by default `~/.cache/penstock/engines`."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return cls(Path(home) / "penstock" / "engines", key)

    @classmethod
    def next_to(cls, path: str, key: dict[str, Any]) -> EngineCache:
        """The cache in the folder `PATH.penstock`; a file at `PATH` itself is not touched.

        If the folder is not usable, logs a warning and falls back to the user's cache.
        """
        cache = cls.of_user(key)
        folder = Path(path + ".penstock")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.parent):
                wrong = "" if folder.stat().st_uid == os.getuid() else "it is another user's"
        except OSError as e:
            wrong = describe(e)
        if wrong:
            log.warning("engine_cache folder=%s unusable=%r consequence=kept_in_%s", folder, wrong, cache.folder)
        else:
            cache.folder = folder
        return cache

    @contextmanager
    def open(self) -> Iterator[Path]:
        """The folder, locked for this process, with matching engines or empty; a warning reports deleted engines.

        Writes the sidecar when the context ends.
        """
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder.with_suffix(".lock"), "a") as lock:  # may be another program's file: never truncate
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits while another instance builds the same engine
            if self.folder.exists() and (wrong := self._wrong()):
                log.warning("engine_cache folder=%s ignored=%r consequence=engines_are_built_anew", self.folder, wrong)
                shutil.rmtree(self.folder)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            yield self.folder
            text = json.dumps({"key": self._key, "files": self._files()}, indent=1)
            (self.folder / SIDECAR).write_text(text)

    def _wrong(self) -> str:
        """Why the engines in the folder cannot be used; "" if they can."""
        if self.folder.stat().st_uid != os.getuid():
            return "the folder is another user's"
        if not any(self.folder.iterdir()):
            return ""
        try:
            sidecar = json.loads((self.folder / SIDECAR).read_text())
        except (OSError, ValueError):
            return f"there is no readable {SIDECAR}"
        stored = sidecar if isinstance(sidecar, dict) else {}
        key: dict[str, Any] = stored["key"] if isinstance(stored.get("key"), dict) else {}
        if key != self._key:
            names = sorted(name for name in self._key | key if key.get(name) != self._key.get(name))
            found = [f"{n} {str(key.get(n))[:60]!r}, expected {str(self._key.get(n))[:60]!r}" for n in names]
            return f"{SIDECAR} describes other engines: found {'; '.join(found)}"
        return "" if stored.get("files") == self._files() else "files differ from those that were written"

    def _files(self) -> dict[str, str]:
        files = {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*")) if path.is_file()}
        return {name: file_digest(str(path)) for name, path in files.items() if name != SIDECAR}


def file_digest(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
