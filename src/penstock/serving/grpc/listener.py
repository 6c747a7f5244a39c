"""A gRPC listener on the engine's event loop."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.errors import ListenFailed
from penstock.serving.grpc.dispatch import CallDispatcher
from penstock.serving.http.sockets import free_path
from penstock.serving.protocols.protobuf import ProtoSet

MAX_STREAMS: Final = 1024  # concurrent calls per connection; the client queues the others


class GrpcLimits(Struct, frozen=True):
    """The bounds of a listener, with its own share of `max_connections`. An age of None means unlimited."""

    limits: LimitsConfig
    max_age_ms: int | None = None
    max_age_grace_ms: int | None = None


class GrpcTls(Struct, frozen=True):
    """Key, certificate chain and the authority of client certificates, as PEM; `client_ca` makes them mandatory."""

    key: bytes
    chain: bytes
    client_ca: bytes | None = None


class GrpcListener:
    """Serves the calls of a dispatcher. `drain` is called before the listener closes, to end idle streams.

    Of `[limits]`, gRPC has no bound on the time of a message, nor on unread answers of a whole connection.
    """

    def __init__(
        self,
        dispatcher: CallDispatcher,
        limits: GrpcLimits,
        tls: GrpcTls | None = None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._tls = tls
        self._drain = drain
        self._changed: Any = None  # the certificate for the next handshake
        self._server: Any = None
        self._path = ""

    async def start(self, host: str, port: int, key: str) -> int:
        """Listens on a port, or on the socket of a `host` such as `unix:PATH`. Returns the bound port.

        Raises ConfigError, naming the configuration key `key`.
        """
        self._server = grpc.aio.server(
            handlers=(self._dispatcher,),
            options=_options(self._limits),
            maximum_concurrent_rpcs=self._limits.limits.max_connections,
        )
        address = host
        if host.startswith("unix:"):
            self._path = host.removeprefix("unix:")
            free_path(self._path, key)
        else:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                credentials = grpc.dynamic_ssl_server_credentials(
                    _configuration(self._tls), self._certificate, self._tls.client_ca is not None
                )
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ListenFailed(
                f"cannot listen for gRPC on {address}: the address is in use or not on this machine; choose"
                f" another with {key}"
            ) from None
        await self._server.start()
        return int(bound)

    def reload_tls(self, key: bytes, chain: bytes, client_ca: bytes | None = None) -> None:
        """Uses another certificate for new connections, if the listener has TLS."""
        self._changed = _configuration(GrpcTls(key, chain, client_ca))

    def _certificate(self) -> Any:
        """A changed certificate, once; None keeps the last one. gRPC calls this in its own thread at each handshake."""
        changed, self._changed = self._changed, None
        return changed

    async def close(self, drain_s: float) -> None:
        """Stops accepting calls, and drops those that are unfinished after `drain_s`."""
        self._drain()
        if self._server is not None:
            await self._server.stop(drain_s)
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def serve_reflection(dispatcher: CallDispatcher, protos: ProtoSet, names: Sequence[str], guard: str = "") -> None:
    """Adds the standard reflection service, which describes the services `names`."""

    class Receiver:  # takes the place of a server
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            """The handlers of the other method, in the form that a server asks for calls."""

        def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
            for name, handler in handlers.items():
                dispatcher.add(f"/{service}/{name}", handler, guard)

    servicer = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME], pool=protos.pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, Receiver())


def _configuration(tls: GrpcTls) -> Any:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.chain)], tls.client_ca)


def _options(bounds: GrpcLimits) -> list[tuple[str, int]]:
    limits = bounds.limits
    options = [
        ("grpc.so_reuseport", 0),  # a port in use is an error
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),  # the model's side bounds answers
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.server_handshake_timeout_ms", _ms(limits.header_timeout_s)),
        ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),
        ("grpc.keepalive_time_ms", _ms(limits.idle_timeout_s)),  # a client with calls must answer a ping
        ("grpc.keepalive_timeout_ms", _ms(limits.write_timeout_s)),
    ]
    if bounds.max_age_ms is not None:
        options.append(("grpc.max_connection_age_ms", bounds.max_age_ms))
    if bounds.max_age_grace_ms is not None:
        options.append(("grpc.max_connection_age_grace_ms", bounds.max_age_grace_ms))
    return options


def _ms(seconds: float) -> int:
    return min(2**31 - 1, max(1, round(seconds * 1000)))
