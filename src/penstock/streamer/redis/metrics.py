"""The state of queues, the metrics of queues and of a worker, and the listener that serves them to Prometheus."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec import Struct

from penstock.config.checks import is_loopback
from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.core.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.serving.http.auth import OriginPolicy
from penstock.serving.http.dashboard import Dashboard
from penstock.serving.http.server import HttpServer, NativeFlavor
from penstock.serving.observe.history import History
from penstock.serving.observe.prometheus import METRICS_TYPE, PrometheusObserver
from penstock.serving.observe.text import Family, Page
from penstock.serving.protocols.route import HttpRequest, Template, methods_route
from penstock.serving.protocols.routes import TEMPLATES
from penstock.streamer.redis.connection import BrokerAddress, RedisConnection
from penstock.streamer.redis.protocol import GROUP, RELEASED, QueueKeys, Script
from penstock.streamer.redis.worker import BrokerWorker
from penstock.types import ItemResult

STATE = Script("""
-- queue, dead letters | group, the consumer of released entries. Returns {entries, entries in the hands of workers,
-- milliseconds for which the oldest other entry has waited, workers, dead letters}.
local entries, dead = redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[2])
local running, workers, last, oldest = 0, 0, '-', nil
local function older(id)
  local ms = tonumber(string.match(id, '%d+'))
  if not oldest or ms < oldest then oldest = ms end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local g = {}
    for i = 1, #group, 2 do g[group[i]] = group[i + 1] end
    if g.name == ARGV[1] then
      last = '(' .. g['last-delivered-id']
      for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
        local c = {}
        for i = 1, #consumer, 2 do c[consumer[i]] = consumer[i + 1] end
        if c.name ~= ARGV[2] then
          workers, running = workers + 1, running + c.pending
        elseif c.pending > 0 then
          older(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])[1][1])
        end
      end
    end
  end
  local first = redis.call('XRANGE', KEYS[1], last, '+', 'COUNT', 1)[1]
  if first then older(first[1]) end
end
local now = redis.call('TIME')
local waited = oldest and now[1] * 1000 + math.floor(now[2] / 1000) - oldest or 0
return {entries, math.min(running, entries), math.max(waited, 0), workers, dead}
""")


class QueueState(Struct, frozen=True):
    """`waiting` requests are in no worker's hands, the oldest of them for `wait_s` seconds; workers have taken the
    `running` ones. `workers` includes a dead one until others have removed it, after a minute."""

    prefix: str
    waiting: int
    running: int
    wait_s: float
    workers: int
    dead_letters: int


class QueueReader:
    """Reads the state of one queue, over its own connection."""

    def __init__(self, address: BrokerAddress, prefix: str) -> None:
        self.prefix = prefix
        self._keys = QueueKeys(prefix)
        self._connection = RedisConnection(address, self._keys.queue)

    async def read(self) -> QueueState:
        """The state now; all zeros if there is no queue. Raises what `RedisConnection.ask` raises."""
        keys = (self._keys.queue, self._keys.dead)
        entries, running, waited_ms, workers, dead = await self._connection.run(STATE, keys, (GROUP, RELEASED))
        waiting = entries - running
        return QueueState(self.prefix, waiting, running, waited_ms / 1000 if waiting else 0.0, workers, dead)

    async def close(self) -> None:
        await self._connection.close()


READ_S = 5.0  # less than the 10 s for which Prometheus waits
MAX_CONNECTIONS = 100
CLOSE_S = 2.0
HEALTH = ("/healthz", "/readyz")
EVENTS = ("taken", "answered", "expired", "inherited", "released", "dead_letters")


def _gauge(name: str, help: str) -> Family:
    return Family(name, "gauge", ("prefix",), help)


UP = _gauge("penstock_redis_up", "1 if the broker answered. Otherwise the queue has no other metrics.")
QUEUE: tuple[tuple[str, Family], ...] = (
    ("waiting", _gauge("penstock_redis_queue_waiting_requests", "Requests that no worker has taken.")),
    ("running", _gauge("penstock_redis_queue_running_requests", "Requests that workers have taken.")),
    ("wait_s", _gauge("penstock_redis_queue_wait_seconds", "Time for which the oldest waiting request has waited.")),
    ("workers", _gauge("penstock_redis_queue_workers", "Workers that serve the queue.")),
    ("dead_letters", _gauge("penstock_redis_queue_dead_letters", "Dead letters that the broker keeps.")),
)
WORKER_EVENTS = Family(
    "penstock_redis_requests_total", "counter", ("prefix", "event"), "Requests that this worker handled, by event."
)
ROUND_TRIP = _gauge("penstock_redis_round_trip_seconds", "Time of this worker's last write to the broker.")


class MetricsOptions(Struct, frozen=True):
    """The address of the metrics listener, and the bearer tokens that open it. `announce` receives its URL."""

    host: str
    port: int
    tokens: frozenset[bytes] = frozenset()
    announce: Callable[[str], None] = lambda url: None


class QueueMetrics:
    """The page of some queues of a broker."""

    def __init__(self, address: BrokerAddress, prefixes: Sequence[str]) -> None:
        self._readers = [QueueReader(address, prefix) for prefix in prefixes]

    async def states(self) -> list[QueueState]:
        """The state of each queue. Raises BrokerUnavailable, ConfigError."""
        return list(await asyncio.gather(*(reader.read() for reader in self._readers)))

    async def scrape(self) -> bytes:
        """The page. A broker that does not answer is a value on it, not an error."""
        found = await asyncio.gather(*map(_read, self._readers))
        page = Page()
        prefixes = [reader.prefix for reader in self._readers]
        page.write(UP, (((p,), float(state is not None)) for p, state in zip(prefixes, found, strict=True)))
        states = [state for state in found if state is not None]
        for field, family in QUEUE:
            page.write(family, (((state.prefix,), float(getattr(state, field))) for state in states))
        return page.encode()

    async def close(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self._readers))


async def _read(reader: QueueReader) -> QueueState | None:
    try:
        async with asyncio.timeout(READ_S):
            return await reader.read()
    except (PenstockError, TimeoutError):
        return None


def worker_page(prefix: str, counts: Mapping[str, object]) -> bytes:
    """The counters of a worker, from `BrokerWorker.statistics`."""
    page = Page()
    page.write(ROUND_TRIP, [((prefix,), float(str(counts.get("round_trip_s", 0.0))))])
    page.write(WORKER_EVENTS, (((prefix, event), float(str(counts.get(event, 0)))) for event in EVENTS))
    return page.encode()


class _OnBroker:
    """An engine that is ready only while its worker reaches the broker."""

    def __init__(self, engine: Engine, worker: BrokerWorker) -> None:
        self._engine, self._worker = engine, worker

    def ready(self) -> bool:
        return self._worker.connected and self._engine.ready()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@asynccontextmanager
async def worker_listening(
    engine: Engine,
    observer: PrometheusObserver,
    history: History,
    worker: BrokerWorker,
    options: MetricsOptions,
    queue: tuple[BrokerAddress, str],
) -> AsyncIterator[None]:
    """Serves the metrics of a worker: its model's, its own counters, and the state of its `queue`, the address
    and the prefix; and the dashboard of its model. Raises ConfigError if it cannot bind."""
    address, prefix = queue
    queues = QueueMetrics(address, [prefix])
    observer.read = engine.reading

    def round_trip_s() -> float:
        return float(str(worker.statistics()["round_trip_s"]))

    dashboard = Dashboard(history, engine.reading, observer.totals, work=observer.work, broker=round_trip_s)
    ticks = asyncio.get_running_loop().create_task(dashboard.run())

    async def scrape() -> bytes:
        (model, _), state = await asyncio.gather(observer.scrape(), queues.scrape())
        return model + worker_page(prefix, worker.statistics()) + state

    try:
        backend, routes = cast(Backend, _OnBroker(engine, worker)), dashboard.routes(lambda: bool(options.tokens))
        async with listening(backend, options, scrape, also=routes):
            yield
    finally:
        ticks.cancel()
        dashboard.close()
        await queues.close()


@asynccontextmanager
async def listening(
    backend: Backend,
    options: MetricsOptions,
    scrape: Callable[[], Awaitable[bytes]],
    health: Sequence[str] = HEALTH,
    also: Sequence[Template] = (),
) -> AsyncIterator[None]:
    """Serves GET /metrics, the result of `scrape`, the paths of `health`, which report on `backend`, and the routes of
    `also`. Raises ConfigError if it cannot bind."""

    async def metrics(request: HttpRequest) -> ItemResult:
        return ItemResult(body=await scrape(), content_type=METRICS_TYPE)

    page = methods_route("/metrics", "Metrics in the Prometheus text format", GET=metrics)
    routes = (page, *(template for template in TEMPLATES if template.path in health), *also)
    closed = not options.tokens and is_loopback(options.host)
    policy = OriginPolicy((options.host,), closed=closed)
    flavor = NativeFlavor(options.tokens, routes, policy=policy, check_host=closed)
    server = HttpServer(backend, LimitsConfig(max_connections=MAX_CONNECTIONS), flavor=flavor)
    host, port = await server.start(options.host, options.port, "--metrics-port")
    try:
        options.announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        yield
    finally:
        await server.close(CLOSE_S)


async def serve_queues(queues: QueueMetrics, options: MetricsOptions, stop: asyncio.Event) -> None:
    """Serves the page of `queues` until `stop`. Raises ConfigError if it cannot bind."""
    engine = Engine(None)  # has no models: the listener needs a backend
    try:
        async with listening(engine, options, queues.scrape, ("/healthz",)):
            await stop.wait()
    finally:
        await queues.close()
        await engine.close(0.0)
