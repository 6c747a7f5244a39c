"""Snapshots: after every change, a file with the configuration and the models, from which a server can start again.

`torchserve --start` looks for snapshots, so this module loads no engine.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct, to_builtins

from penstock.torchserve.protocol.api import RegisterRequest

if TYPE_CHECKING:
    from penstock.torchserve.admin.models import ModelVersion

log = logging.getLogger("penstock.torchserve")

SnapshotKind = Literal["startup", "snapshot", "shutdown"]
KEEP: Final = 100  # files, a choice: each has a few kB; older ones are removed

_NAME = re.compile(r"\d{17}-(startup|snapshot|shutdown)\.cfg")
_SPECIAL: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f"}  # characters with an escape of their own
_OWN: Final = frozenset({"model_snapshot", "load_models"})
_LEAST: Final = {
    "minWorkers": 0, "maxWorkers": 0, "batchSize": 1, "maxBatchDelay": 0, "responseTimeout": 1, "startupTimeout": 1,
}  # fmt: skip
"""The settings in the state of a version, and their minima: older snapshots have negative numbers for those not set."""


class SavedVersion(Struct, frozen=True):
    """A version to load at startup; `weight` is its weight in the traffic split."""

    registration: RegisterRequest
    settings: Mapping[str, Any] = {}
    default: bool = False
    weight: float | None = None


def state_of(version: ModelVersion, *, default: bool, weight: float | None) -> dict[str, Any]:
    """The state of a version in a snapshot, from which it can be started again."""
    spec = version.spec
    settings = to_builtins(spec.settings) | {"minWorkers": version.min_workers, "maxWorkers": version.max_workers}
    state: dict[str, Any] = {"defaultVersion": default, "marName": spec.mar_name}
    state |= {key: settings[key] for key in _LEAST} | {"runtimeType": spec.runtime}
    if weight is not None:
        state["traffic"] = weight
    if spec.setup["handler"] != version.files.archive.manifest.handler:
        state["handler"] = spec.setup["handler"]
    if spec.url != spec.mar_name and not spec.url.startswith(("http://", "https://")):  # the store has downloads
        state["modelUrl"] = spec.url
    return state


def saved_versions(snapshot: Mapping[str, Any]) -> list[SavedVersion]:
    """The versions of a snapshot. An invalid entry is logged and skipped."""
    saved: list[SavedVersion] = []
    for name, versions in _tables(snapshot.get("models")):
        for version, state in _tables(versions):
            read = _read_state(name, state) if isinstance(state, dict) else None
            if read is None:
                log.error("snapshot model=%s version=%s: found no marName, so it is skipped", name, version)
            else:
                saved.append(read)
    if not saved:
        log.warning("Model snapshot is empty. Starting without initial models.")
    return saved


def _tables(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _read_state(name: str, state: Mapping[str, Any]) -> SavedVersion | None:
    """The version with the state that `state_of` wrote; None without an archive."""
    url = state.get("modelUrl") or state.get("marName")
    if not isinstance(url, str):
        return None
    handler, runtime = (v if isinstance(v := state.get(key), str) else None for key in ("handler", "runtimeType"))
    weight = state.get("traffic")
    return SavedVersion(
        RegisterRequest(url=url, model_name=name, handler=handler, runtime=runtime),
        {key: n for key, least in _LEAST.items() if type(n := state.get(key)) is int and n >= least},
        state.get("defaultVersion") is True,
        weight if isinstance(weight, int | float) and 0 <= weight < math.inf else None,
    )


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


def format_properties(values: Iterable[tuple[str, str]]) -> str:
    """The ASCII text of a file that `parse_properties` and Java read back as these keys and values."""
    return "".join(f"{_escape(key, is_key=True)}={_escape(value, is_key=False)}\n" for key, value in values)


def _escape(text: str, *, is_key: bool) -> str:
    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        if " " <= character <= "~":
            return character if character == " " and match.start() and not is_key else f"\\{character}"
        units = character.encode("utf-16-be", "surrogatepass").hex()
        return _SPECIAL.get(character) or re.sub("(....)", r"\\u\1", units)

    return re.sub(r"[\\=:#! ]|[^ -~]", escaped, text)


def write_private(file: Path, text: str) -> None:
    """Replaces the file atomically; only its owner may read it."""
    new = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as f:
            f.write(text)
        new.replace(file)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
