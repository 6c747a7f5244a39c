"""Triton's extensions of a server, for every transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.schema import Config
from penstock.core.contracts import ManagementBackend
from penstock.core.engine.engine import Engine
from penstock.serving.logs import ServerLog
from penstock.serving.triton.repository import ModelRepository
from penstock.serving.triton.settings import LogSettings, SharedMemory, trace_setting
from penstock.serving.triton.statistics import ModelStatistics


class TritonExtensions:
    """Every call takes and returns the JSON form of Triton's messages, and raises PenstockError.

    `repository` has the models: their configuration, the index, load and unload. `memory` has the shared memory.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        management: ManagementBackend,
        statistics: ModelStatistics,
        log: ServerLog,
    ) -> None:
        self.repository = ModelRepository(engine, config, management)
        self.memory = SharedMemory(config.server.shared_memory, config.limits.max_body_bytes)
        self._engine = engine
        self._management = management
        self._statistics = statistics
        self._log_settings = LogSettings(log)

    def statistics(self, name: str, version: str | None) -> dict[str, Any]:
        """`model_stats` of one version, of all versions of a model, or with an empty name of all models.

        Raises ModelNotFound.
        """
        if name:
            self._engine.handle(name, version)
        statuses = [s for s in self._engine.statuses() if name in ("", s.name) and version in (None, s.version)]
        return {"model_stats": [self._statistics.of(s.name, s.version).body(s.name, s.version) for s in statuses]}

    def trace_setting(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The trace settings of a model, or with an empty name of the server. Raises ModelNotFound, BadRequest."""
        if name:
            self._engine.handle(name, None)
        return trace_setting(changes)

    def log_settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The log settings after the changes. Raises BadRequest, and the errors of every change of the server."""
        if changes:
            self._management.check_open()
        return self._log_settings.change(changes)
