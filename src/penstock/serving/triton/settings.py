"""Triton's extensions for trace settings, log settings and system shared memory.

The log level can be changed; traces do not exist. Regions of shared memory are POSIX objects that clients registered.
"""

import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, cast

from penstock.core.contracts import Backend
from penstock.core.wire.regions import TABLE_VARIABLE, Region, publish
from penstock.errors import BadRequest, Conflict, Forbidden, RegionExists, RegionNotFound, nearest
from penstock.serving.process import ServerLog
from penstock.serving.triton.region_uses import RegionUses

TRACE_OFF: Final[Mapping[str, Any]] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_LEVELS: Final = ("debug", "info", "warning", "error")
_FLAGS: Final = ("log_info", "log_warning", "log_error")  # on from the level of the same position in _LEVELS[1:]


def trace_setting(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The trace settings of a server without traces. Raises BadRequest for a change of them."""
    for name, value in changes.items():
        if name not in TRACE_OFF:
            raise BadRequest(f"unknown trace setting '{name[:100]}'{nearest(name[:100], TRACE_OFF)}")
        if value is not None and value not in (TRACE_OFF[name], [TRACE_OFF[name]]):
            raise BadRequest(f"trace setting '{name}': this server has no traces; it has metrics and statistics")
    return dict(TRACE_OFF)


class LogSettings:
    """The log level of the server process, under Triton's names."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log

    def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Applies the changes and returns all settings. Raises BadRequest; then nothing has changed."""
        settings = self._settings()
        for name, value in changes.items():
            _check(name, value, settings)
            settings[name] = value
        level = _level_of(settings)
        if level != self._log.level:
            self._log.set_level(level)
        return self._settings()

    def _settings(self) -> dict[str, Any]:
        at = _LEVELS.index(self._log.level)
        flags = {name: at <= n for n, name in enumerate(_FLAGS, 1)}
        return {"log_file": "", **flags, "log_verbose_level": int(at == 0), "log_format": "default"}


def _check(name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """Checks one change. Raises BadRequest."""
    if name not in settings:
        raise BadRequest(f"unknown log setting '{name[:100]}'{nearest(name[:100], settings)}")
    if name in ("log_file", "log_format"):
        if value != settings[name]:
            key = "file" if name == "log_file" else "format"
            raise BadRequest(f"log setting '{name}' cannot be changed while the server runs; set logging.{key}")
        return
    kind = int if name == "log_verbose_level" else bool
    if type(value) is not kind or value < 0:
        wanted = "a whole number from 0" if kind is int else "true or false"
        raise BadRequest(f"log setting '{name}' must be {wanted}, found {value!r:.40}")


def _level_of(settings: Mapping[str, Any]) -> str:
    """The level with these settings. Raises BadRequest: a level includes all that are more severe."""
    flags = [settings[name] for name in _FLAGS]
    if settings["log_verbose_level"] and all(flags):
        return _LEVELS[0]
    first = flags.index(True) if True in flags else len(flags)
    if first == len(flags) or settings["log_verbose_level"] or not all(flags[first:]):
        raise BadRequest(
            "a log level includes all that are more severe: errors are always logged, log_info needs log_warning, and"
            " log_verbose_level above 0 needs log_info"
        )
    return _LEVELS[1 + first]


FOLDER: Final = "/dev/shm"
MOST_REGIONS: Final = 1024  # a choice: each holds a descriptor
_KEY: Final = re.compile(r"/?(?!\.\.?$)[^/\0]{1,255}")


class SharedMemory:
    """The registered regions. One descriptor each stays open until the region is unregistered.

    `most_bytes`: of one tensor.
    """

    def __init__(self, enabled: bool, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._regions: dict[str, Region] = {}
        self._uses: Counter[str] = Counter()  # by requests in flight
        self._folder = tempfile.mkdtemp(prefix="penstock-") if enabled else None
        if self._folder is not None:
            os.environ[TABLE_VARIABLE] = self._table
            publish(self._table, most_bytes, {})

    @property
    def _table(self) -> str:
        assert self._folder is not None
        return os.path.join(self._folder, "regions")

    def status(self, name: str) -> list[dict[str, Any]]:
        """Name, key, offset and byte_size of a region, or of all regions if the name is empty.

        Raises RegionNotFound."""
        if name and name not in self._regions:
            raise RegionNotFound(f"no region of shared memory has the name '{name[:100]}'")
        found = [self._regions[name]] if name else self._regions.values()
        return [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in found]

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises Forbidden unless `server.shared_memory` is set, BadRequest, RegionExists, Conflict at MOST_REGIONS."""
        if self._folder is None:
            raise Forbidden("shared memory is off: set shared_memory = true in [server]")
        if not 0 < len(name) <= 255:
            raise BadRequest(f"the name of a region has 1 to 255 characters, found {len(name)}")
        if name in self._regions:
            raise RegionExists(f"the region '{name}' is registered already; unregister it first")
        if len(self._regions) >= MOST_REGIONS:
            raise Conflict(f"{MOST_REGIONS} regions are registered, the most there can be; unregister one first")
        fd = _open(key, offset, byte_size)
        self._change({**self._regions, name: Region(name, key, offset, byte_size, os.getpid(), fd)})

    def unregister(self, name: str) -> None:
        """Removes a region, or all regions if the name is empty. An unknown region is no error, as in Triton.

        Raises Conflict for regions that requests in flight use; the others are removed.
        """
        asked = [name] if name in self._regions else [] if name else list(self._regions)
        used = [each for each in asked if self._uses[each]]
        gone = [self._regions[each] for each in asked if each not in used]
        if gone:
            self._change({n: region for n, region in self._regions.items() if region not in gone})
        for region in gone:
            os.close(region.fd)
            del self._uses[region.name]
        if used:
            raise Conflict(f"requests in progress use {', '.join(used)[:200]}; unregister regions after the answers")

    def count_uses(self, backend: Backend) -> Backend:
        """The backend for listeners whose requests may name regions."""
        if self._folder is None:
            return backend
        return cast(Backend, RegionUses(backend, lambda: self._regions, self._uses))

    def close(self) -> None:
        if self._folder is not None:
            self._uses.clear()
            self.unregister("")
            os.environ.pop(TABLE_VARIABLE, None)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _change(self, regions: dict[str, Region]) -> None:
        publish(self._table, self._most_bytes, regions)
        self._regions = regions


def _open(key: str, offset: int, byte_size: int) -> int:
    """The descriptor of the object. Raises BadRequest unless it holds these bytes."""
    if not _KEY.fullmatch(key):
        raise BadRequest(f"key '{key[:100]}' must be the name of a POSIX shared memory object, such as /tensors")
    if offset < 0 or byte_size < 1:
        raise BadRequest(f"offset {offset} and byte_size {byte_size} must be at least 0 and 1")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(os.path.join(FOLDER, key.removeprefix("/")), flags)
    except OSError as error:
        raise BadRequest(f"the shared memory object '{key[:100]}' cannot be opened: {error.strerror}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or offset + byte_size > found.st_size:
        os.close(fd)
        raise BadRequest(
            f"{byte_size} bytes from {offset} are not inside the shared memory object '{key[:100]}', which has"
            f" {found.st_size if stat.S_ISREG(found.st_mode) else 0} bytes"
        )
    return fd
