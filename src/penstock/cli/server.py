"""The composition root of `penstock serve`: engine, listeners and signals."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from penstock import tracing
from penstock._version import __version__
from penstock.config.checks import LISTENERS, UNIX, device_budgets, is_loopback, thrift_model, tokens_for
from penstock.config.schema import Config
from penstock.core.contracts import HttpSnapshot, ServerSnapshot
from penstock.core.engine.engine import Engine
from penstock.core.engine.management import Management
from penstock.core.engine.rules import check_devices, stamps_of
from penstock.errors import ConfigError, ModelNotFound, PenstockError, describe, install_hint
from penstock.platforms import platform_routes
from penstock.serving.http.admin import management_routes, metrics_routes
from penstock.serving.http.auth import OriginPolicy, make_ssl_context, replace_ssl_context
from penstock.serving.http.dashboard import Dashboard
from penstock.serving.http.descriptors import share_connections
from penstock.serving.http.listener import reading_of
from penstock.serving.http.server import HttpServer, NativeFlavor
from penstock.serving.http.sockets import PortInUse
from penstock.serving.observe.batches import nodes
from penstock.serving.observe.causes import Effect, Scenario
from penstock.serving.observe.history import History, StageTotals, Totals
from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.serving.observe.recorders import ArrivalRecorder, BatchRecords
from penstock.serving.observe.refusals import RefusalLog
from penstock.serving.process import ServerLog, StopSignal, freeze_heap, lame_duck_s, report_ready, runner, say
from penstock.serving.protocols.route import Template
from penstock.serving.triton.calls import TritonExtensions, triton_routes
from penstock.serving.triton.metrics import TritonMetrics
from penstock.serving.triton.statistics import ModelStatistics
from penstock.types import ModelStatus, TensorSpec
from penstock.values import columns

if TYPE_CHECKING:
    from penstock.serving.grpc.listener import GrpcListener
    from penstock.torchpipe.thrift import ThriftServer

T = TypeVar("T")

log = logging.getLogger("penstock.cli")

GRPC_PORT = 8001  # by default
MANAGEMENT_PORT = 8081  # by default
WATCH_S = 0.3  # between two looks at the files of `--reload`: a saved file is live within a second
ADMIN_DRAIN_S = 2.0  # for responses in flight when the management and metrics listeners close
_MAX_ROWS = 5  # of the models table in the banner
_MAX_ELEMENTS = 64  # of an example input in the banner


def run(
    config: Config,
    on_ready: Callable[[dict[str, str]], None] | None = None,
    *,
    record: str | None = None,
    reread: Callable[[], Config] | None = None,
    watched: Sequence[str] | None = None,
) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit status. Raises PenstockError if it cannot start.

    `record` names a new file for the times and sizes of requests. On SIGHUP, `reread` returns the new configuration.
    If `watched` is given, the server also reloads when one of these files or a file of a model changes.
    """
    for section, model in config.models.items():
        check_devices(model, f"models.{section}.")
    del sys.argv[1:]  # a model on a thread of this process that parses options has none
    recorder = None if record is None else ArrivalRecorder(record)
    logs = ServerLog(config.logging)
    code = 1
    try:
        if (traced := config.tracing).endpoint:
            tracing.start(traced.endpoint, ratio=traced.ratio, max_per_s=traced.max_per_s, service=traced.service)
        code = runner()(Server(config, logs, recorder, reread or (lambda: config), watched).main(on_ready))
        return code
    finally:
        tracing.stop()
        if recorder is not None:
            recorder.close()
        if not logs.close():
            os._exit(code)


class Server:
    """Everything in the server process of `penstock serve`. Its attributes are the listeners and what they share."""

    def __init__(
        self,
        config: Config,
        logs: ServerLog,
        recorder: ArrivalRecorder | None,
        reread: Callable[[], Config],
        watched: Sequence[str] | None,
    ) -> None:
        self._config = config
        self._logs = logs
        self._recorder = recorder
        self._reread = reread
        self._watched = watched
        self._records = BatchRecords()
        self._statistics = ModelStatistics()
        further = TritonMetrics(self._statistics) if config.server.triton_metrics else None
        self._metrics = PrometheusObserver(further=further)
        self._history = History()
        readings = (self._totals, self._records.newest, self._metrics.work, self._pipeline)
        self._dashboard = Dashboard(self._history, lambda: self._metrics.read(), *readings, simulate=_simulate)
        self._engine: Engine | None = None
        self._management: Management | None = None  # once the configured models are loaded
        self._stop = StopSignal(self._report_draining, self._reload)
        self._flavors: dict[str, NativeFlavor] = {}
        self._tokens = {name: tokens_for(config, name) for name in LISTENERS}
        self._admin: list[HttpServer] = []
        self._thrift: ThriftServer | None = None
        self._grpc: GrpcListener | None = None
        self._tls: SSLContext | None = None
        self._limits = config.limits  # of the inference listeners
        self._most_aside = config.limits.max_connections  # of the other listeners
        self.urls: dict[str, str] = {}

    async def main(self, on_ready: Callable[[dict[str, str]], None] | None) -> int:
        shown = self._config.server.dashboard
        refusals = RefusalLog()
        observers = [self._metrics, self._records, self._statistics, self._recorder, self._history if shown else None]
        engine = Engine(
            self._config.limits,
            [refusals, *(each for each in observers if each is not None)],
            self._config.logging.level,
            device_budgets(self._config.devices),
        )
        self._engine = engine
        management = Management(engine, self._config, [os.getcwd()])
        self._stop.catch()
        s = self._config.server
        self._tls = self._make_tls()
        limits = self._config.limits
        main = 1 + (s.thrift_port is not None) + (s.grpc_port != 0)
        most, self._most_aside = share_connections(limits.max_connections, main, 2)
        self._limits = replace(limits, max_connections=most)
        triton = TritonExtensions(engine, self._config, management, self._statistics, self._logs)
        further = (*platform_routes(self._config, os.environ), *triton_routes(triton))
        flavor = self._flavor("inference", s.host, further=further)
        http = HttpServer(triton.memory.count_uses(engine), self._limits, ssl=self._tls, flavor=flavor)
        written: dict[tuple[str, str], float] = defaultdict(float)
        self._metrics.read = lambda: _reading(engine, http, self._grpc, written)
        tasks = [asyncio.ensure_future(self._dashboard.run())] if shown else []
        try:
            engine.expect(model.name or section for section, model in self._config.models.items())
            self._note("inference", *await http.start(s.host, s.port))
            await self._bind_thrift(engine)
            await self._bind_grpc(engine, triton)
            await self._bind_admin(engine, management)
            await self._stop.unless(self._load_models(engine))
            if not self._stop.is_set:
                management.started = True
                self._management = management
                freeze_heap()
                self._announce(engine, on_ready)
                if self._watched is not None:
                    tasks.append(asyncio.ensure_future(self._watch(self._watched, management)))
            await self._stop.wait()
            return 0
        finally:
            engine.drain()
            if management.started:
                await asyncio.sleep(self._lame_duck_s())
            end = time.monotonic() + self._config.server.drain_s
            others = [each for each in (self._thrift, self._grpc) if each is not None]
            await asyncio.gather(*(each.close(self._config.server.drain_s) for each in (http, *others)))
            await engine.close(max(0.0, end - time.monotonic()))
            refusals.close()
            for task in tasks:
                task.cancel()
            self._dashboard.close()
            for server in self._admin:
                await server.close(ADMIN_DRAIN_S)
            triton.memory.close()

    async def _load_models(self, engine: Engine) -> None:
        models = [(model.name or section, model) for section, model in self._config.models.items()]
        at, keep = [os.getcwd()], self._config.server.keep_going
        await asyncio.gather(*(engine.load(name, model, sys_path=at, keep=keep) for name, model in models))
        engine.expect(())
        for name, model in models:
            if model.traffic:
                engine.set_traffic(name, model.traffic)

    def _lame_duck_s(self) -> float:
        s = self._config.server
        hosts = [s.host, s.grpc_host or s.host, *([] if s.thrift_port is None else [s.thrift_host])]
        return lame_duck_s(hosts) if s.lame_duck_s is None else s.lame_duck_s

    async def _watch(self, files: Sequence[str], management: Management) -> None:
        """Reloads when files have changed and stay equal for one more look: editors write a file in several steps."""

        def look() -> dict[str, tuple[int, int, int]]:
            return stamps_of(files) | management.file_stamps()

        known = last = await asyncio.to_thread(look)
        while True:
            await asyncio.sleep(WATCH_S)
            last, before = await asyncio.to_thread(look), last
            if last == before != known:
                known = last
                self._stop.hang_up()

    async def _reload(self) -> None:
        """Reloads, and shows on the dashboard what could not be reloaded."""
        try:
            await self._apply()
        except PenstockError as error:
            self._history.note("", "", "not reloaded", error.message)
            raise

    async def _apply(self) -> None:
        """Applies changed tokens, TLS files, log level and models. Raises ConfigError; then nothing has changed.

        The names of the token, password and TLS files stay: without them the bound ports could open to everyone.
        """
        config = self._reread()
        tokens = {name: tokens_for(self._config, name) for name in LISTENERS}
        for section, model in config.models.items():
            check_devices(model, f"models.{section}.")
        tls, grpc_tls = self._make_tls(), self._make_tls()
        for name, flavor in self._flavors.items():
            flavor.set_tokens(tokens[name], self._guards(tokens, name))
        self._tokens = tokens
        if self._tls is not None and tls is not None:
            replace_ssl_context(self._tls, tls)
            if self._grpc is not None and grpc_tls is not None:
                self._grpc.reload_tls(grpc_tls)
        self._logs.set_level(config.logging.level)
        changed = {} if self._management is None else await self._management.reload(config.models)
        for (name, version), error in changed.items():
            if error is not None:
                self._history.note(name, version, "not reloaded", describe(error.__cause__ or error))
        loaded = ",".join(f"{name}/{version}" for (name, version), error in changed.items() if error is None)
        none = "none_loaded" if changed else "none_changed"
        self._history.note("", "", "reloaded", f"models: {loaded or 'none'}")
        log.info("event=reloaded models=%s also=tokens,tls_files,log_level", loaded or none)

    # ---- listeners

    def _make_tls(self) -> SSLContext | None:
        """A context from the files as they are now. Raises ConfigError."""
        s = self._config.server
        return make_ssl_context(s.tls_cert, s.tls_key, s.tls_client_ca, s.tls_password_file)

    async def _bind_thrift(self, engine: Engine) -> None:
        s = self._config.server
        if s.thrift_port is None:
            return
        from penstock.torchpipe.thrift import ThriftServer

        self._thrift = ThriftServer(engine, thrift_model(self._config), self._limits, ssl=self._tls)
        self._note("thrift", *await self._thrift.start(s.thrift_host, s.thrift_port), "thrift")

    async def _bind_grpc(self, engine: Engine, triton: TritonExtensions) -> None:
        """Binds the gRPC listener; without a configured port, beside another server's, and none without hpack."""
        s = self._config.server
        if s.grpc_port == 0:
            return
        try:
            from penstock.serving.grpc.inference import make_grpc_listener
        except ModuleNotFoundError as error:
            if s.grpc_port is None:
                return
            raise ConfigError(f"server.grpc_port: {error.name} is missing: {install_hint('grpc')}") from None
        tls = self._make_tls()
        host, key = s.grpc_host or ("127.0.0.1" if s.host.startswith(UNIX) else s.host), "server.grpc_port"
        check = self._flavors["inference"].check_guard
        self._grpc = make_grpc_listener(triton.memory.count_uses(engine), triton, self._limits, check, tls)
        start = partial(self._grpc.start, host, key=key)
        port = await _start_beside_others(start, "grpc", s.grpc_port, GRPC_PORT)
        self._note("grpc", host or "::", port, "grpc")

    async def _bind_admin(self, engine: Engine, management: Management) -> None:
        """Binds the management and metrics listeners; without a configured port, management beside another server's.

        Whoever collects metrics would read the other server's at the default port.
        """
        s = self._config.server
        limits = replace(self._limits, max_connections=self._most_aside)
        metrics = metrics_routes(self._metrics.scrape, self._records.body)
        changes = management_routes(engine, management)
        if s.dashboard:
            managed = [each for each in changes if each.path.startswith("/models/")] if s.management else []
            metrics += self._dashboard.routes(lambda: bool(self._tokens["metrics"]), managed)
        for name, routes, host, port in (
            ("management", changes, s.management_host, s.management_port),
            ("metrics", metrics, s.metrics_host, s.metrics_port),
        ):
            server = HttpServer(engine, limits, ssl=self._tls, flavor=self._flavor(name, host, routes))
            key = f"server.{name}_port"
            address = await _start_beside_others(partial(server.start, host, key=key), name, port, MANAGEMENT_PORT)
            self._note(name, *address)
            self._admin.append(server)

    def _guards(self, tokens: Mapping[str, frozenset[bytes]], name: str) -> dict[str, frozenset[bytes] | None]:
        """The tokens that open the routes of a listener which change the server; None closes them.

        Without tokens for management, the listener's tokens open them, if only this machine can connect.
        """
        s = self._config.server
        on_page = name == "metrics"
        hosts = (s.metrics_host, s.management_host) if on_page else (s.host, s.grpc_host or s.host)
        local = all(map(is_loopback, hosts)) or s.tls_client_ca is not None
        others = tokens["metrics" if on_page else "inference"] if local else None
        return {"management": tokens["management"] or others}

    def _flavor(
        self, name: str, host: str, routes: Sequence[Template] = (), further: Sequence[Template] = ()
    ) -> NativeFlavor:
        """The API of a listener. Foreign web pages could otherwise use what is open to this machine, and manage."""
        s = self._config.server
        tokens = self._tokens[name]
        closed = name == "management" or (not tokens and is_loopback(host))
        policy = OriginPolicy((host, *s.allowed_hosts), s.cors_origins, closed=closed)
        check_host = closed and name != "inference"
        guards = self._guards(self._tokens, name)
        flavor = NativeFlavor(tokens, routes, policy=policy, check_host=check_host, further=further, guards=guards)
        self._flavors[name] = flavor
        return flavor

    def _note(self, name: str, host: str, port: int, scheme: str = "http") -> None:
        if host.startswith(UNIX):
            self.urls[name] = host
            return
        scheme += "s" if self._config.server.tls_cert else ""
        self.urls[name] = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _totals(self) -> dict[tuple[str, str], Totals]:
        """The counters that the dashboard shows."""
        stages = self._statistics.stages()
        counted = self._metrics.totals()
        return {key: found._replace(stages=stages.get(key, StageTotals())) for key, found in counted.items()}

    def _pipeline(self, model: str, version: str) -> dict[str, Any] | None:
        """What the dashboard shows of a pipeline; None for another model."""
        assert self._engine is not None
        try:
            metadata = self._engine.handle(model, version).metadata
        except ModelNotFound:  # it loads, or drains
            return None
        graph = metadata.parameters.get("pipeline") if metadata else None
        return None if graph is None else {**graph, "state": nodes(self._metrics.custom((model, version), "pipeline_"))}

    # ---- output

    def _report_draining(self) -> None:
        most_s = self._lame_duck_s() + self._config.server.drain_s
        log.info("event=draining limit_s=%g hint=a second signal stops at once", most_s)

    def _announce(self, engine: Engine, on_ready: Callable[[dict[str, str]], None] | None) -> None:
        example = _example(engine, self.urls["inference"], _curl(self._config))
        say(banner(self.urls, engine.statuses(), example))
        if on_ready is not None:
            on_ready(self.urls)
        report_ready(self.urls)


async def _start_beside_others(start: Callable[..., Awaitable[T]], name: str, port: int | None, default: int) -> T:
    """What `start(port=...)` returns. Without a configured port it takes the default, or else a free one."""
    try:
        return await start(port=default if port is None else port)
    except PortInUse:
        if port is not None:
            raise
    found = await start(port=0)
    listens = found[1] if isinstance(found, tuple) else found
    log.warning("event=port_in_use listener=%s port=%d consequence=listens_on_%d", name, default, listens)
    return found


def _simulate(scenario: Scenario) -> Effect:
    from penstock.perf.simulate.effects import effect  # only where somebody looks

    return effect(scenario)


def _reading(
    engine: Engine, http: HttpServer, grpc: GrpcListener | None, written: dict[tuple[str, str], float]
) -> ServerSnapshot:
    """The state that gauges show. `written` sums the seconds of writing by model version."""
    reading = engine.reading()
    for listener in (http.listener, *(() if grpc is None else (grpc.listener,))):
        new, listener.counts.write_s = listener.counts.write_s, defaultdict(float)
        for (name, version), seconds in new.items():
            with suppress(PenstockError):  # it is unloaded
                written[name, engine.handle(name, version).version] += seconds
    for model in reading.models:
        model.write_s = written.get(model.key, 0.0)
    reading.listeners = {"http": reading_of([http.listener])}
    if grpc is not None:
        reading.listeners["grpc"] = reading_of([grpc.listener])
    reading.http = HttpSnapshot(http.connections, http.listener.counts.refused, http.listener.counts.responses())
    return reading


def banner(urls: dict[str, str], models: Sequence[ModelStatus], example: str) -> str:
    """At most 12 lines: addresses, models and an example request."""
    rows = [("MODEL", "VERSION", "INSTANCES", "BATCH", "DEVICE", "STATE")]
    for m in models[:_MAX_ROWS]:
        devices = ",".join(dict.fromkeys(m.model_devices or m.devices))
        rows.append(
            (m.name, m.version, str(m.instances), str(m.model_batch_size or m.max_batch_size), devices, m.state)
        )
    lines = [f"penstock {__version__}"]
    lines += [f"  {name:<10} {url}" for name, url in urls.items()]
    lines += [f"  {line}" for line in columns(rows)]
    if len(models) > _MAX_ROWS:
        lines.append(f"  ... and {len(models) - _MAX_ROWS} more: GET {urls['management']}/models")
    lines.append(f"  {example}")
    return "\n".join(lines)


def _curl(config: Config) -> str:
    """`curl` with the TLS and token options that the inference listener requires."""
    words = ["curl"]
    if config.server.tls_cert:
        words.append("-k")  # the certificate has a host name, this URL an address
    token_file = config.auth.token_file or config.auth.inference_token_file
    if token_file:
        token = f"$(grep -m1 '^[^#]' {shlex.quote(os.path.abspath(token_file))})"
        words.append(f'-H "Authorization: Bearer {token}"')
    return " ".join(words)


def _example(engine: Engine, url: str, curl: str) -> str:
    """A working curl command: an inference if the model declares small inputs, otherwise its metadata."""
    if url.startswith(UNIX):
        curl, url = f"{curl} --unix-socket {shlex.quote(url.removeprefix(UNIX))}", "http://localhost"
    name = next((m.name for m in engine.statuses() if m.state == "READY"), None)
    if name is None:
        return f"{curl} {url}/readyz"
    metadata, _ = engine.metadata(name, None)
    tensors = [_zeros(spec) for spec in metadata.inputs]
    if not tensors or any(t is None for t in tensors):
        return f"{curl} {url}/v2/models/{name}"
    body = json.dumps({"inputs": tensors}, separators=(",", ":"))
    return f"{curl} -d {shlex.quote(body)} {url}/v2/models/{name}/infer"


def _zeros(spec: TensorSpec) -> dict[str, Any] | None:
    shape = [1 if n < 0 else n for n in spec.shape]
    count = math.prod(shape)
    if count > _MAX_ELEMENTS or spec.datatype == "BYTES":
        return None
    zero: Any = False if spec.datatype == "BOOL" else 0
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": [zero] * count}
