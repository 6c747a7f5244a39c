"""Snapshots: the configuration and the models as they stand, in a file after every change, to start from again."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from penstock.torchserve.admin.tokens import write_private
from penstock.torchserve.config.property_file import format_properties

log = logging.getLogger("penstock.compat")

Kind = Literal["startup", "snapshot", "shutdown"]
KEEP: Final = 100  # files; older ones are removed

_NAME = re.compile(r"\d{17}-(startup|snapshot|shutdown)\.cfg")
_OWN: Final = frozenset({"model_snapshot", "load_models"})


class Snapshots:
    """Writes `<log location>/config/<yyyyMMddHHmmssSSS>-{startup,snapshot,shutdown}.cfg`.

    `properties` are the keys and values that the server was started with, as in config.properties.
    """

    def __init__(self, log_location: Path, properties: Mapping[str, str]) -> None:
        self._folder = log_location / "config"
        self._properties = [(key, value) for key, value in properties.items() if key not in _OWN]

    def write(self, kind: Kind, models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Path | None:
        """The file, with the models as {name: {version: state}}; None if it could not be written, which is logged."""
        now_s = time.time()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._new_name(now_s, kind)
            count = sum(len(versions) for versions in models.values())
            told = {"name": file.name, "modelCount": count, "created": int(now_s * 1000), "models": models}
            text = format_properties([*self._properties, ("model_snapshot", json.dumps(told, indent=2))])
            write_private(file, text)
            self._forget_old()
        except OSError as e:
            log.error("snapshot_not_written folder=%s error=%s", self._folder, e)
            return None
        return file

    def _new_name(self, now_s: float, kind: Kind) -> Path:
        """Files of one millisecond get the following ones, so that their names tell the newest."""
        newest = max(_stamps(self._folder), default=0)
        stamp = max(int(datetime.fromtimestamp(now_s).strftime("%Y%m%d%H%M%S%f")[:17]), newest + 1)
        return self._folder / f"{stamp:017d}-{kind}.cfg"

    def _forget_old(self) -> None:
        for file in _files(self._folder)[:-KEEP]:
            with suppress(OSError):
                file.unlink()


def last_snapshot(log_location: Path) -> Path | None:
    """The newest snapshot there; None if there is none."""
    return max(_files(log_location / "config"), default=None)


def _files(folder: Path) -> list[Path]:
    """The snapshots in a folder, the oldest first."""
    try:
        return sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name))
    except OSError:
        return []


def _stamps(folder: Path) -> Iterable[int]:
    return (int(file.name[:17]) for file in _files(folder))
