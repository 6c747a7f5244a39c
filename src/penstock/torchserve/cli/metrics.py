"""The metrics of a running TorchServe server: what is joined for them, and what runs for them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from penstock.core.contracts import HttpSnapshot, Observer, ServerSnapshot
from penstock.core.engine.engine import Engine
from penstock.serving.http.server import HttpServer
from penstock.torchserve.admin.startup import Served
from penstock.torchserve.config.properties import Properties
from penstock.torchserve.metrics.declared import default_config, read_config
from penstock.torchserve.metrics.machine import measure_of, watch
from penstock.torchserve.metrics.observer import Counts, TorchServeMetrics


class Metrics:
    """Those of one server. Raises ConfigError for a metrics_config that cannot be."""

    def __init__(self, properties: Properties) -> None:
        path = properties.metrics_config
        config = default_config() if path is None else read_config(path)
        self._properties = properties
        self._kept = TorchServeMetrics(
            config,
            host=socket.gethostname(),
            mode=properties.metrics_mode,
            auto_detect=properties.model_metrics_auto_detect,
            first_worker=properties.initial_worker_port,
        )
        self.observers: list[Observer] = [self._kept.penstock, self._kept]
        self.scrape = self._kept.scrape
        self.model_metrics = None if path is None else config.section()  # what workers are told of the file
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, engine: Engine, served: Served, listeners: Sequence[object]) -> None:
        """From now on the log files are written, and the page shows all of `engine` and `listeners`."""

        def http() -> list[HttpServer]:
            return [listener for listener in listeners if isinstance(listener, HttpServer)]

        def reading() -> ServerSnapshot:
            found = engine.reading()
            servers = http()
            found.http = HttpSnapshot(
                sum(s.connections for s in servers), sum(s.refused for s in servers), _answers(servers)
            )
            return found

        self._kept.penstock.read = reading
        self._kept.counts = lambda: Counts(_answers(http()), dict(served.backend.asked))
        self._run(self._kept.run())
        properties = self._properties
        if not properties.disable_system_metrics:
            interval_s = float(properties.metric_time_interval)
            measure = measure_of(properties.system_metrics_cmd, properties.model_server_home, interval_s)
            self._run(watch(measure, self._kept.measured, interval_s))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        """Writes the last lines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kept.close()


def _answers(servers: Sequence[HttpServer]) -> dict[int, int]:
    counted: Counter[int] = Counter()
    for server in servers:
        counted.update(server.answers())
    return dict(counted)
