"""`penstock worker` serves a model to RedisStreamers over a Redis broker; `penstock queue` shows what waits there."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from penstock import tracing
from penstock.config.load import load_config
from penstock.config.schema import LoggingConfig, ModelConfig
from penstock.config.targets import devices_list, errors_end_the_command, number_or_auto, split_targets
from penstock.core.worker.spec import Wrapped
from penstock.errors import ConfigError
from penstock.serving.process import ServerLog, say
from penstock.streamer.redis.connection import parse_address
from penstock.streamer.redis.serve import QueueOptions, run_until_stopped, serve_queue

if TYPE_CHECKING:
    from penstock.streamer.redis.metrics import MetricsOptions

SERVED = "penstock.streamer.model:served"


def build_config(target: str, keys: dict[str, Any], sets: tuple[str, ...]) -> ModelConfig:
    """The configuration of the one model. `sets`: KEY=VALUE with the keys of `[models.NAME]`, as `keys`, in which None
    means absent. Raises ConfigError."""
    toml, models = split_targets((target,))
    if toml is not None:
        raise ConfigError(f"a worker serves one model: name app.py:obj or pkg.mod:obj instead of {toml}")
    ((name, found),) = models.items()
    config = load_config(
        None, env={}, sets=[f"models.{name}.{text}" for text in sets], base={"models": {name: {**found, **keys}}}
    )
    return msgspec.structs.replace(config.models[name], name=config.models[name].name or name)


_broker = click.option(
    "--redis",
    default="localhost:6379",
    envvar="PENSTOCK_REDIS",
    metavar="BROKER",
    help="host:port or a URL: redis://, redis+sentinel://, redis+cluster://, rediss for TLS, or unix:// "
    "[localhost:6379]. Use PENSTOCK_REDIS to keep a password out of the process list.",
)


def _metrics_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The flags of the metrics listener, which `_listener` reads."""
    for option in (
        click.option("--insecure", is_flag=True, help="Allow a public metrics address without a token."),
        click.option("--metrics-token-file", metavar="FILE", help="Bearer tokens that open the metrics listener."),
        click.option("--metrics-host", default="127.0.0.1", help="Address of the metrics listener [127.0.0.1]."),
        click.option(
            "--metrics-port",
            type=click.IntRange(0, 65535),
            help="Serve /metrics and /healthz on this port; 0 takes a free one. By default there is no listener.",
        ),
    ):
        command = option(command)
    return command


def _listener(command: str, flags: dict[str, Any]) -> MetricsOptions | None:
    """The metrics listener that the flags describe. Raises ConfigError, also for an unguarded public address."""
    if flags["metrics_port"] is None:
        return None
    from penstock.config.checks import check_bind, tokens_for
    from penstock.streamer.redis.metrics import MetricsOptions

    host, port = flags["metrics_host"], flags["metrics_port"]
    server = {"metrics_host": host, "metrics_port": port, "insecure": flags["insecure"]}
    base = {"server": server, "auth": {"metrics_token_file": flags["metrics_token_file"]}}
    config = load_config(None, env={}, base=base)
    check_bind(config)

    def announce(url: str) -> None:
        say(f"penstock {command}: metrics at {url}/metrics")

    return MetricsOptions(host, port, tokens_for(config, "metrics"), announce)


_log_flag = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="Lines of the log on stderr: text, or one JSON object each [text].",
)


@contextlib.contextmanager
def _logging(form: Literal["text", "json"]) -> Iterator[None]:
    """The log of `penstock serve` on stderr, in this format."""
    logs = ServerLog(LoggingConfig(format=form))
    try:
        yield
    finally:
        logs.close()


@click.command()
@click.argument("target", metavar="TARGET")
@_broker
@click.option("--prefix", default="", help="Separates models on one broker; must equal the RedisStreamer's prefix.")
@click.option("--workers", callback=number_or_auto, metavar="N|auto", help="Loaded copies of the model [1].")
@click.option(
    "--devices", callback=devices_list, metavar="D,D", help="Devices for the copies in turn, such as cuda:0,cuda:1."
)
@click.option("--max-batch-size", callback=number_or_auto, metavar="N|auto", help="Most items in a batch.")
@click.option(
    "--lease",
    type=click.FloatRange(min=0.1),
    default=10.0,
    metavar="SECONDS",
    help="Silence after which a worker counts as dead and others take over its requests [10].",
)
@click.option(
    "--drain",
    type=click.FloatRange(min=0),
    default=30.0,
    metavar="SECONDS",
    help="Longest wait for results at shutdown [30].",
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Also read and write pickles, as RedisStreamer(allow_pickle=True) does. Everyone who can write to the broker "
    "can then run code here.",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set any key of [models.NAME].")
@_metrics_flags
@_log_flag
@click.option(
    "--trace-endpoint",
    metavar="URL",
    help="OTLP/HTTP address of a collector for the traces of requests, such as http://127.0.0.1:4318/v1/traces.",
)
def worker(
    target: str, redis: str, prefix: str, lease: float, drain: float, sets: tuple[str, ...], **flags: Any
) -> None:
    """Serve a model to RedisStreamers, over a Redis broker.

    TARGET is app.py:obj or pkg.mod:obj, such as a ManagedModel, or any other model that `penstock serve` accepts. On
    SIGTERM or SIGINT the worker takes no more requests, answers those that it has taken, hands back what it cannot
    finish within --drain seconds, and ends with status 0.
    """
    batching = {"max_batch_size": flags["max_batch_size"]}
    keys = {"instances": flags["workers"], "devices": flags["devices"], "batching": batching}
    with errors_end_the_command(), _logging(flags["log_format"]):
        config = build_config(target, keys, sets)
        broker = parse_address(redis)
        metrics = _listener("worker", flags)

        if flags["trace_endpoint"]:
            tracing.start(flags["trace_endpoint"])
        del sys.argv[1:]  # a model on a thread of this process that parses options has none

        def ready() -> None:
            say(f"penstock worker: {target} serves {broker.name} prefix='{prefix}'")

        def serve(stop: asyncio.Event) -> Coroutine[Any, Any, None]:
            queue = QueueOptions(redis, prefix, lease, drain, flags["allow_pickle"])
            return serve_queue(
                *(config, Wrapped(config.target, SERVED), queue),
                stop=stop,
                on_ready=ready,
                metrics=metrics,
                log_level="INFO",
            )

        try:
            run_until_stopped(serve)
        finally:
            tracing.stop()


@click.command()
@_broker
@click.option(
    "--prefix", "prefixes", multiple=True, help="Prefix of a queue; may be repeated. By default the queue without one."
)
@_metrics_flags
@_log_flag
def queue(redis: str, prefixes: tuple[str, ...], **flags: Any) -> None:
    """Show what waits in the queues of a Redis broker.

    Prints one line of JSON for each queue: the requests that wait and run, how long the oldest one has waited, in
    seconds, the workers, and the dead letters. With --metrics-port it serves this state to Prometheus until SIGTERM:
    a scaler can read it there while no worker runs.
    """
    from penstock.streamer.redis.metrics import QueueMetrics, serve_queues

    with errors_end_the_command(), _logging(flags["log_format"]):
        address, options = parse_address(redis), _listener("queue", flags)

        async def show(stop: asyncio.Event) -> None:
            queues = QueueMetrics(address, prefixes or ("",))
            if options is not None:
                await serve_queues(queues, options, stop)
                return
            try:
                for state in await queues.states():
                    click.echo(msgspec.json.encode(state))
            finally:
                await queues.close()

        run_until_stopped(show)
