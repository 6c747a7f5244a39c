"""Runs: the long commands of this user on this machine, with their progress, for the dashboard."""

# A run is a small file in a folder of the user, written anew at most once a second and removed at the end. Commands and
# servers meet there without knowing of each other. A file whose process has ended is left by a crash: the next reader
# removes it. The folder is private, and its files are shown as text, so that a file can do no harm.

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any, Final

WRITE_EVERY_S: Final = 1.0
MOST: Final = 50  # that are shown
MOST_BYTES: Final = 4096  # of one file
_SHOWN: Final = {"kind": str, "name": str, "text": str, "pid": int, "began_s": float, "done": float}


def folder() -> Path:
    """Where the files are: below $XDG_RUNTIME_DIR, or the folder for temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "penstock") if base else Path(tempfile.gettempdir(), f"penstock-{os.getuid()}")


class Run:
    """The file of a running command: its `kind`, such as "caption", and its `name`. Used with `with`.

    Errors of the file system are ignored: a command need not be seen.
    """

    def __init__(self, kind: str, name: str) -> None:
        self._fields = {"kind": kind, "name": name[:200], "pid": os.getpid(), "began_s": time.time()}
        self._path = folder() / f"{os.getpid()}-{kind}.json"
        self._written_s = 0.0

    def __enter__(self) -> Run:
        self.write(0.0, None, "starting")
        self._written_s = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def write(self, done: float, total: float | None, text: str) -> None:
        """Shows that `done` of `total` (None: not known) is done, and a line for people; at most once a second."""
        now_s = time.monotonic()
        if self._written_s and now_s - self._written_s < WRITE_EVERY_S:
            return
        self._written_s = now_s
        fields = {**self._fields, "done": float(done), "total": None if total is None else float(total)}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            if _own(self._path.parent):
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps({**fields, "text": text[:300]}))
                new.replace(self._path)


def running() -> list[dict[str, Any]]:
    """The runs of this user, the newest first; at most MOST."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder().glob("*-*.json"))[:MOST] if _own(folder()) else []:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                with path.open("rb") as file:
                    run = json.loads(file.read(MOST_BYTES))
                if _lives(int(run["pid"])):
                    total = run["total"]
                    shown = {name: kind(run[name]) for name, kind in _SHOWN.items()}
                    found.append({**shown, "total": None if total is None else float(total)})
                else:
                    path.unlink()
    return sorted(found, key=lambda run: -run["began_s"])


def _own(path: Path) -> bool:
    """Whether a folder is ours alone: where everybody can write, another user may have made it first."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
