"""`penstock worker`: serves a model to RedisStreamers over a Redis broker."""

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any

import click

from penstock.config.load import load_config
from penstock.config.schema import ModelConfig
from penstock.config.targets import devices_list, number_or_auto, split_targets
from penstock.core.worker.spec import Wrapped
from penstock.errors import ConfigError, PenstockError
from penstock.streamer.redis.address import parse_address
from penstock.streamer.redis.serve import QueueOptions, run_until_stopped, serve_queue

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
    return config.models[name]


@click.command()
@click.argument("target", metavar="TARGET")
@click.option(
    "--redis",
    default="localhost:6379",
    envvar="PENSTOCK_REDIS",
    metavar="BROKER",
    help="host:port or a URL: redis://, redis+sentinel://, redis+cluster://, rediss for TLS, or unix:// "
    "[localhost:6379]. Use PENSTOCK_REDIS to keep a password out of the process list.",
)
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
def worker(
    target: str, redis: str, prefix: str, lease: float, drain: float, sets: tuple[str, ...], **flags: Any
) -> None:
    """Serve a model to RedisStreamers, over a Redis broker.

    TARGET is app.py:obj or pkg.mod:obj, such as a ManagedModel, or any other model that `penstock serve` accepts.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    batching = {"max_batch_size": flags["max_batch_size"]}
    keys = {"instances": flags["workers"], "devices": flags["devices"], "batching": batching}
    try:
        config = build_config(target, keys, sets)
        broker = parse_address(redis)

        def ready() -> None:
            click.echo(f"penstock worker: {target} serves {broker.name} prefix='{prefix}'")

        def serve(stop: asyncio.Event) -> Coroutine[Any, Any, None]:
            queue = QueueOptions(redis, prefix, lease, drain, flags["allow_pickle"])
            return serve_queue(config, Wrapped(config.target, SERVED), queue, stop=stop, on_ready=ready)

        run_until_stopped(serve)
    except PenstockError as e:
        click.echo(f"penstock: {e}", err=True)
        if e.detail:
            click.echo(e.detail, err=True)
        sys.exit(e.exit_status)
