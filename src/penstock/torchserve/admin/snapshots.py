"""Snapshots: after every change, a file with the configuration and the models, from which a server can start again."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.torchserve.admin.tokens import write_private
from penstock.torchserve.config.files import format_properties

if TYPE_CHECKING:  # `torchserve --start` looks for snapshots without loading the engine
    from penstock.torchserve.admin.models import ModelVersion

log = logging.getLogger("penstock.compat")

SnapshotKind = Literal["startup", "snapshot", "shutdown"]
KEEP: Final = 100  # files; older ones are removed

_NAME = re.compile(r"\d{17}-(startup|snapshot|shutdown)\.cfg")
_OWN: Final = frozenset({"model_snapshot", "load_models"})


def state_of(version: ModelVersion, *, default: bool, weight: float | None) -> dict[str, Any]:
    """The state of a version in a snapshot, from which it can be started again."""
    spec, s = version.spec, version.spec.settings
    state: dict[str, Any] = {
        "defaultVersion": default,
        "marName": spec.mar_name,
        "minWorkers": version.min_workers,
        "maxWorkers": version.max_workers,
        "batchSize": s.batch_size,
        "maxBatchDelay": s.max_batch_delay,
        "responseTimeout": s.response_timeout,
        "startupTimeout": s.startup_timeout,
        "runtimeType": spec.runtime,
    }
    if weight is not None:
        state["traffic"] = weight
    if spec.setup["handler"] != version.files.archive.manifest.handler:
        state["handler"] = spec.setup["handler"]
    if spec.url != spec.mar_name and not spec.url.startswith(("http://", "https://")):  # the store has downloads
        state["modelUrl"] = spec.url
    return state


class Snapshots:
    """Writes `<log location>/config/<yyyyMMddHHmmssSSS>-{startup,snapshot,shutdown}.cfg`.

    `properties` are the keys of config.properties that the server started with.
    """

    def __init__(self, log_location: Path, properties: Mapping[str, str]) -> None:
        self._folder = log_location / "config"
        self._properties = [(key, value) for key, value in properties.items() if key not in _OWN]

    def write(
        self,
        kind: SnapshotKind,
        models: Mapping[str, Mapping[str, Mapping[str, Any]]],
        workflows: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """The new file with the models as {name: {version: state}}, and the workflows as {name: state}.

        On failure logs the error and returns None.
        """
        now_s = time.time()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._new_name(now_s, kind)
            count = sum(len(versions) for versions in models.values())
            snapshot = {"name": file.name, "modelCount": count, "created": int(now_s * 1000), "models": models}
            if workflows:
                snapshot["workflows"] = workflows
            text = format_properties([*self._properties, ("model_snapshot", json.dumps(snapshot, indent=2))])
            write_private(file, text)
            for old in _files(self._folder)[:-KEEP]:
                with suppress(OSError):
                    old.unlink()
        except OSError as e:
            log.error("snapshot_not_written folder=%s error=%s", self._folder, e)
            return None
        return file

    def _new_name(self, now_s: float, kind: SnapshotKind) -> Path:
        """A name that sorts after all others, also within the same millisecond."""
        newest = max((int(file.name[:17]) for file in _files(self._folder)), default=0)
        stamp = max(int(datetime.fromtimestamp(now_s).strftime("%Y%m%d%H%M%S%f")[:17]), newest + 1)
        return self._folder / f"{stamp:017d}-{kind}.cfg"


def last_snapshot(log_location: Path) -> Path | None:
    """The newest snapshot, or None."""
    return max(_files(log_location / "config"), default=None)


def _files(folder: Path) -> list[Path]:
    """The snapshots in a folder, oldest first."""
    try:
        return sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name))
    except OSError:
        return []
