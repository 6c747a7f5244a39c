"""The files that a server writes: snapshots, and the keys of its APIs.

A snapshot is written after every change. It has the configuration and the models, and a server can start from it.

`torchserve --start` looks for snapshots, so this module loads no engine.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct, to_builtins

from penstock.errors import ConfigError
from penstock.torchserve.protocol.api import ApiError, RegisterRequest

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


# ---- keys

FILE: Final = "key_file.json"
KEY_BYTES: Final = 24  # 192 random bits, 32 characters

_WRONG: Final = "Token either incorrect, expired, or not provided correctly"


class Tokens:
    """The inference key and the management key, which expire, and the API key, which renews them.

    The file has mode 0600. It is written only by `publish`, so that a server that fails to start does not overwrite
    the file of another server in the same folder.
    """

    def __init__(self, folder: Path, expiration_s: float, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self.file = folder / FILE
        self._now = now
        self._expiration_s = expiration_s
        self._api = secrets.token_urlsafe(KEY_BYTES)
        self._keys = {kind: self._new_key() for kind in ("management", "inference")}

    def publish(self) -> None:
        """Writes the file. Raises ConfigError on failure."""
        try:
            self._write()
        except OSError as e:
            raise ConfigError(
                f"{self.file}: the token file cannot be written: {e.strerror}; start in a folder of your own, or with"
                " --disable-token-auth"
            ) from None

    def remove(self) -> None:
        """Removes the file, unless it belongs to another server by now."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(self.file.read_bytes())["API"]["key"] == self._api:
                self.file.unlink()

    def check(self, kind: str, authorization: bytes | None) -> None:
        """Raises ApiError unless the header is `Bearer` and the key of `kind` ("management" or "inference")."""
        key, expires = self._keys[kind]
        if not _is(key, authorization) or self._now() >= expires:
            raise ApiError("InvalidKeyException", f"Token Authorization failed. {_WRONG}")

    def renew(self, kind: str, authorization: bytes | None) -> None:
        """Creates a new key of `kind`, if the header is `Bearer` and the API key.

        Raises ApiError, and OSError if the file cannot be written; the old key then stays valid.
        """
        if not _is(self._api, authorization):
            raise ApiError("InvalidKeyException", f"Token Authentication failed. {_WRONG}")
        if kind not in self._keys:
            raise ApiError("BadRequestException", f"type: found {kind[:100]!r}, expected management or inference")
        old, self._keys[kind] = self._keys[kind], self._new_key()
        try:
            self._write()
        except OSError:
            self._keys[kind] = old
            raise

    def _new_key(self) -> tuple[str, datetime]:
        try:
            expires = self._now() + timedelta(seconds=self._expiration_s)
        except OverflowError:
            expires = datetime.max.replace(tzinfo=UTC)
        return secrets.token_urlsafe(KEY_BYTES), expires

    def _write(self) -> None:
        layout: dict[str, dict[str, str]] = {
            kind: {"key": key, "expiration time": expires.isoformat().replace("+00:00", "Z")}
            for kind, (key, expires) in self._keys.items()
        }
        write_private(self.file, json.dumps({**layout, "API": {"key": self._api}}, indent=2))


def _is(key: str, authorization: bytes | None) -> bool:
    return hmac.compare_digest(b"Bearer " + key.encode(), authorization or b"")
