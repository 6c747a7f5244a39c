"""The composition root of `torchserve`: joins engine, models, listeners, metrics and logs into one running server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.handlers
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock import tracing
from penstock.config.checks import is_loopback
from penstock.core.contracts import HttpSnapshot, Observer, ServerSnapshot
from penstock.core.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.serving.http.listener import reading_of
from penstock.serving.http.server import HttpServer
from penstock.serving.process import StopSignal, freeze_heap, lame_duck_s, report_ready, runner
from penstock.torchserve import SEQUENCE_HEADERS
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.admin.startup import ServerComponents, build_components, load_startup
from penstock.torchserve.cli.listeners import Listeners, grpc_addresses, http_addresses, limits_of
from penstock.torchserve.cli.logs import ServerLogs
from penstock.torchserve.cli.pid_file import pid_path, remove_own
from penstock.torchserve.cli.torchserve import ServerOptions, parser, resolve_options
from penstock.torchserve.config import ListenerAddress, Properties
from penstock.torchserve.metrics.families import default_config, read_config
from penstock.torchserve.metrics.observer import FrontendCounts, MetricsOptions, TorchServeMetrics
from penstock.torchserve.metrics.system import measure_of, watch

if TYPE_CHECKING:
    from penstock.serving.grpc.listener import GrpcListener

log = logging.getLogger("penstock.torchserve")

DRAIN_S: Final = 30.0  # Kubernetes kills a pod after as many seconds by default
STARTED: Final = "Model server started."
STOPPED: Final = "Torchserve stopped."


def main(words: Sequence[str]) -> int:
    """The exit status of the process that `torchserve --start` leaves running. The first word only marks it."""
    try:
        return serve(parser().parse_args(words[1:]))
    finally:
        remove_own(pid_path())


def serve(args: argparse.Namespace) -> int:
    """`run` with the options of the command line, the file and the environment."""
    return run(lambda: resolve_options(args, os.environ), args.log_config)


def run(options_of: Callable[[], ServerOptions], log_config: str | None = None) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit status. Startup errors are logged."""
    early = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)
    logging.getLogger("penstock").addHandler(early)
    try:
        options = options_of()
        logs = ServerLogs(options.properties, log_config)
    finally:
        logging.getLogger("penstock").removeHandler(early)
    code = 1
    try:
        for record in early.buffer:  # warnings from before the log files
            logging.getLogger(record.name).handle(record)
        p = options.properties
        if p.tracing_endpoint:
            tracing.start(
                p.tracing_endpoint, ratio=p.tracing_ratio, max_per_s=p.tracing_max_per_s, service=p.tracing_service
            )
        code = runner()(TorchServe(options, logs).main())
    except PenstockError as error:
        log.error("%s", error.message)
        if error.detail:
            log.error("%s", error.detail)
    finally:
        tracing.stop()
        if not logs.close():
            remove_own(pid_path())
            os._exit(code)
    return code


class TorchServe:
    """One server: everything except the workers runs in this process."""

    def __init__(self, options: ServerOptions, logs: ServerLogs) -> None:
        self._options = options
        self._logs = logs
        self._print_line = logs.print_line
        self._stop = StopSignal(
            lambda: log.info("event=draining limit_s=%g hint=once more stops at once", DRAIN_S), self._reload
        )
        self._listeners: Listeners | None = None
        self._administrator: Administrator | None = None  # once the models of the start are loaded
        self._metrics = ServerMetrics(options.properties)

    async def main(self) -> int:
        """Returns 0 after a signal. Raises PenstockError if the server cannot start."""
        self._stop.catch()
        properties = self._options.properties
        for variable, default in SEQUENCE_HEADERS.items():
            name = getattr(properties, default.replace("request", "header_key"))
            if name != default:
                os.environ[variable] = name
        limits = limits_of(properties)
        engine = Engine(limits, self._metrics.observers)
        components = build_components(
            engine,
            properties,
            max_workers=limits.max_instances,
            file=self._options.file,
            snapshots=self._options.snapshots,
            model_metrics=self._metrics.model_metrics,
        )
        listeners = self._listeners = Listeners(components, limits)
        try:
            self._metrics.start(engine, components, listeners.running)
            _warn_public(properties)
            await listeners.start(self._metrics.scrape)
            if components.tokens is not None:
                components.tokens.publish()
                log.info("tokens=%s: every request needs one; see there", components.tokens.file)
            await self._stop.unless(load_startup(components))
            if not self._stop.is_set:
                self._administrator = components.administrator
                freeze_heap()
                self._print_line(STARTED)
                report_ready(listeners.urls)
            await self._stop.wait()
            return 0
        finally:
            await self._close(engine, components, listeners)

    async def _reload(self) -> None:
        """Applies changed TLS files, log levels and archives. Raises ConfigError."""
        if self._listeners is not None:
            self._listeners.reload_tls()
        self._logs.reload()
        if self._administrator is not None:
            await self._administrator.reload()

    async def _close(self, engine: Engine, components: ServerComponents, listeners: Listeners) -> None:
        """Answers accepted requests, then stops the workers."""
        components.administrator.stop()
        engine.drain()
        if self._administrator is not None:
            await asyncio.sleep(lame_duck_s([address.host for address in _addresses(self._options.properties)]))
        end = time.monotonic() + DRAIN_S
        await asyncio.gather(*(listener.close(DRAIN_S) for listener in listeners.running))
        await engine.close(max(0.0, end - time.monotonic()))
        await components.administrator.close()
        await self._metrics.close()
        if components.tokens is not None:
            components.tokens.remove()
        listeners.close_tls()
        self._print_line(STOPPED)


def _addresses(properties: Properties) -> list[ListenerAddress]:
    return [*(address for address, _ in http_addresses(properties)), *grpc_addresses(properties)]


def _warn_public(properties: Properties) -> None:
    """Warns of addresses that other machines can reach; they are used as configured."""
    found = [str(address) for address in _addresses(properties) if not is_loopback(address.host)]
    if found:
        log.warning(
            "addresses=%s consequence=other_machines_can_reach_them tokens=%s hint=use 127.0.0.1 behind a proxy",
            ",".join(found),
            "off" if properties.disable_token_authorization else "on",
        )


class ServerMetrics:
    """The metrics of one server. Raises ConfigError for an invalid metrics_config."""

    def __init__(self, properties: Properties) -> None:
        path = properties.metrics_config
        config = default_config() if path is None else read_config(path)
        self._properties = properties
        options = MetricsOptions(
            config=config,
            host=socket.gethostname(),
            mode=properties.metrics_mode,
            auto_detect=properties.model_metrics_auto_detect,
            first_worker=properties.initial_worker_port,
        )
        self._observer = TorchServeMetrics(options)
        self.observers: list[Observer] = [self._observer.penstock, self._observer]
        self.scrape = self._observer.scrape
        self.model_metrics = None if path is None else config.section()  # the part of the file that workers receive
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, engine: Engine, components: ServerComponents, listeners: Sequence[HttpServer | GrpcListener]
    ) -> None:
        """Starts writing the log files; the page then shows `engine` and `listeners`."""

        def http() -> list[HttpServer]:
            return [listener for listener in listeners if isinstance(listener, HttpServer)]

        def snapshot() -> ServerSnapshot:
            found = engine.reading()
            servers = http()
            refused = sum(s.listener.counts.refused for s in servers)
            others = [listener for listener in listeners if not isinstance(listener, HttpServer)]
            found.listeners = {
                name: reading_of(each.listener for each in named)
                for name, named in (("http", servers), ("grpc", others))
                if named
            }
            found.http = HttpSnapshot(sum(s.connections for s in servers), refused, _responses(servers))
            return found

        self._observer.penstock.read = snapshot
        self._observer.counts = lambda: FrontendCounts(_responses(http()), components.backend.take_requests())
        self._run(self._observer.run())
        properties = self._properties
        if not properties.disable_system_metrics:
            interval_s = float(properties.metric_time_interval)
            measure = measure_of(properties.system_metrics_cmd, properties.model_server_home, interval_s)
            self._run(watch(measure, self._observer.measured, interval_s))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._observer.close()


def _responses(servers: Sequence[HttpServer]) -> dict[int, int]:
    counted: Counter[int] = Counter()
    for server in servers:
        counted.update(server.listener.counts.responses())
    return dict(counted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
