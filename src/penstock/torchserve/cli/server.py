"""The composition root of `torchserve`: engine, models, listeners and logs, joined into one running server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import logging.handlers
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import structs

from penstock.config.addresses import Address
from penstock.config.checks import is_loopback
from penstock.config.schema import LimitsConfig
from penstock.core.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.serving.http.server import HttpServer
from penstock.serving.lifetime import Stop, runner, settle, tell_ready
from penstock.torchserve.admin.launch import pid_path, remove_own
from penstock.torchserve.admin.logs import Logs
from penstock.torchserve.admin.startup import Served, administer, load_startup
from penstock.torchserve.admin.tls import Pem
from penstock.torchserve.cli.flags import Settings, parser, settings_of
from penstock.torchserve.cli.grpc import GrpcAddress, grpc_addresses, grpc_listeners
from penstock.torchserve.cli.metrics import Metrics
from penstock.torchserve.config.properties import Properties
from penstock.torchserve.http.listener import make_listener
from penstock.torchserve.protocol.api import Group, ListenerConfig

if TYPE_CHECKING:
    from penstock.torchserve.grpc.server import GrpcServer

log = logging.getLogger("penstock.cli")

DRAIN_S: Final = 30.0
GROUPS: Final[tuple[Group, ...]] = ("inference", "management", "metrics")
STARTED: Final = "Model server started."
STOPPED: Final = "Torchserve stopped."
_SLOWEST: Final = 2**20  # bytes/s of a client that sends the largest body


def main(words: Sequence[str] | None = None) -> int:
    """What the process runs that `torchserve --start` leaves behind; its exit status."""
    try:
        return serve(parser().parse_args(words))
    finally:
        remove_own(pid_path())


def serve(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; the process's exit status. What keeps it from starting is logged."""
    said = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)
    logging.getLogger("penstock").addHandler(said)
    try:
        settings = settings_of(args, os.environ)
        logs = Logs(settings.properties, args.log_config)
    finally:
        logging.getLogger("penstock").removeHandler(said)
    code = 1
    try:
        for record in said.buffer:  # what was warned of before there were files
            logging.getLogger(record.name).handle(record)
        code = runner()(TorchServe(settings, logs.say).main())
    except PenstockError as error:
        log.error("%s", error.message)
        if error.detail:
            log.error("%s", error.detail)
    finally:
        if not logs.close():
            remove_own(pid_path())
            os._exit(code)
    return code


class TorchServe:
    """Everything that one server runs, in one process besides the workers."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        """`say` puts a line on stdout for those who wait for it."""
        self._settings = settings
        self._say = say
        self._properties = settings.properties
        self._limits = limits_of(settings.properties)
        self._stop = Stop(lambda: log.info("event=draining limit_s=%g hint=once more stops at once", DRAIN_S))
        self._listeners: list[HttpServer | GrpcServer] = []
        self._urls: dict[str, str] = {}
        self._pem: Pem | None = None
        self._metrics = Metrics(settings.properties)

    async def main(self) -> int:
        """Returns 0 after a signal. Raises PenstockError if it cannot start."""
        self._stop.catch()
        engine = Engine(self._limits, self._metrics.observers)
        served = administer(
            engine,
            self._properties,
            most_workers=self._limits.max_instances,
            file=self._settings.file,
            snapshots=self._settings.snapshots,
            model_metrics=self._metrics.model_metrics,
        )
        try:
            self._metrics.start(engine, served, self._listeners)
            await self._listen(served)
            if served.tokens is not None:
                served.tokens.publish()
                log.info("tokens=%s: every request needs one; see there", served.tokens.file)
            loads = asyncio.ensure_future(load_startup(served))
            try:
                await self._stop.unless(loads)
            finally:
                loads.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await loads
            if not self._stop.told:
                settle()
                self._say(STARTED)
                tell_ready(self._urls)
            await self._stop.wait()
            return 0
        finally:
            await self._end(engine, served)

    async def _end(self, engine: Engine, served: Served) -> None:
        """Answers what was accepted, then ends the workers."""
        served.administrator.stop()
        engine.drain()
        end = time.monotonic() + DRAIN_S
        await asyncio.gather(*(listener.close(DRAIN_S) for listener in self._listeners))
        await engine.close(max(0.0, end - time.monotonic()))
        await served.administrator.close()
        await self._metrics.close()
        if served.tokens is not None:
            served.tokens.remove()
        if self._pem is not None:
            self._pem.close()
        self._say(STOPPED)

    # ---- listeners

    async def _listen(self, served: Served) -> None:
        listeners = listeners_of(self._properties)
        self._warn_open([*(address for address, _ in listeners), *grpc_addresses(self._properties)])
        for address, groups in listeners:
            listener = make_listener(
                served.backend,
                served.administrator,
                face_of(self._properties, groups),
                self._limits,
                ssl=self._tls() if address.tls else None,
                scrape=self._metrics.scrape,
            )
            bound = await _start(listener, address, min(groups, key=GROUPS.index))
            self._listeners.append(listener)
            for group in sorted(groups, key=GROUPS.index):
                log.info("%s API bind to: %s", group.capitalize(), bound)
                self._urls[group] = str(bound)
        await self._listen_grpc(served)

    async def _listen_grpc(self, served: Served) -> None:
        for listener, at in grpc_listeners(
            served, self._limits, lambda group: face_of(self._properties, {group}), self._own_pem
        ):
            self._listeners.append(listener)
            port = await listener.start(at.host, at.port, f"grpc_{at.group}_{'address' if at.path else 'port'}")
            log.info("%s gRPC API bind to: %s", at.group.capitalize(), structs.replace(at, port=port))

    def _own_pem(self) -> Pem:
        if self._pem is None:
            self._pem = Pem(self._properties)
        return self._pem

    def _tls(self) -> ssl.SSLContext:
        return self._own_pem().context()

    def _warn_open(self, addresses: Iterable[Address | GrpcAddress]) -> None:
        """The addresses of the file are obeyed; those that other machines can reach are told."""
        found = [str(address) for address in addresses if not address.path and not is_loopback(address.host)]
        if found:
            guarded = not self._properties.disable_token_authorization
            log.warning(
                "addresses=%s consequence=other_machines_can_reach_them tokens=%s hint=use 127.0.0.1 behind a proxy",
                ",".join(found),
                "on" if guarded else "off",
            )


async def _start(listener: HttpServer, address: Address, group: Group) -> Address:
    """Where it listens now. Raises ConfigError."""
    key = f"{group}_address"
    if address.path:
        await listener.start_unix(address.path, key)
        return address
    host, port = await listener.start(address.host, address.port, key)
    return structs.replace(address, host=host, port=port)


def listeners_of(properties: Properties) -> list[tuple[Address, set[Group]]]:
    """The groups of routes of each listener: equal addresses share one, but for port 0, which is another one each time.

    One that inference and management share has the metrics too.
    """
    found: list[tuple[Address, set[Group]]] = []
    for group in GROUPS:
        if group == "metrics" and not properties.enable_metrics_api:
            continue
        address = properties.address(group)
        same = [groups for other, groups in found if other == address and (address.port or address.path)]
        if same:
            same[0].add(group)
        else:
            found.append((address, {group}))
    for _, groups in found:
        if {"inference", "management"} <= groups and properties.enable_metrics_api:
            groups.add("metrics")
    return found


def face_of(properties: Properties, groups: Iterable[Group]) -> ListenerConfig:
    """How a listener of these groups shows itself."""
    return ListenerConfig(
        groups=frozenset(groups),
        codec="torchserve" if properties.decode_input_request else "torchserve_raw",
        cors_origin=properties.cors_allowed_origin,
        cors_methods=properties.cors_allowed_methods,
        cors_headers=properties.cors_allowed_headers,
        open_inference=properties.ts_open_inference_protocol,
        model_api=properties.enable_model_api,
        metrics_api=properties.enable_metrics_api,
    )


def limits_of(properties: Properties) -> LimitsConfig:
    """The bounds of the core under which the largest request can come, also over a slow line."""
    pool_bytes = max(LimitsConfig().pool_bytes, 2 * properties.max_request_size)
    return LimitsConfig(
        max_body_bytes=properties.max_request_size,
        pool_bytes=pool_bytes,
        max_queue_bytes=max(LimitsConfig().max_queue_bytes, pool_bytes),
        body_timeout_s=max(LimitsConfig().body_timeout_s, properties.max_request_size / _SLOWEST),
    )


if __name__ == "__main__":
    sys.exit(main())
