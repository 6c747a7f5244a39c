"""Triton's trace and logging extensions: the log level can be changed; traces do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.errors import BadRequest, nearest
from penstock.serving.logs import ServerLog

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
    """Raises BadRequest."""
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
