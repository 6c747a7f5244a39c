"""The gRPC listener: our HTTP/2 connections on the sockets and within the limits of the HTTP listener."""

import ssl
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.grpc.dispatch import CallDispatcher
from penstock.serving.grpc.protocol import GrpcConnection, SharedState
from penstock.serving.http.auth import replace_ssl_context
from penstock.serving.http.listener import INF, Listener
from penstock.serving.http.server import SocketServer

MAX_STREAMS: Final = 1024  # concurrent calls per connection; the client queues the others
RECEIVE_BYTES: Final = 2**18  # of one read


class GrpcLimits(Struct, frozen=True):
    """The bounds of a listener, with its own share of `max_connections`. An age of None means unlimited."""

    limits: LimitsConfig
    max_age_ms: int | None = None
    max_age_grace_ms: int | None = None


class GrpcListener:
    """Serves the calls of a dispatcher. `drain` is called before the listener closes, to end idle streams."""

    def __init__(
        self,
        backend: Backend,
        dispatcher: CallDispatcher,
        bounds: GrpcLimits,
        tls: ssl.SSLContext | None = None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        listener = Listener(backend, bounds.limits)
        most = bounds.limits.max_header_bytes
        age_s, grace_s = (INF if ms is None else ms / 1000 for ms in (bounds.max_age_ms, bounds.max_age_grace_ms))
        receive = memoryview(bytearray(RECEIVE_BYTES + most))
        shared = SharedState(listener, dispatcher, MAX_STREAMS, most, age_s, grace_s, receive)
        self._tls = _with_h2(tls)
        self._server = SocketServer(listener, lambda: GrpcConnection(shared), b"", self._tls)
        self._drain = drain

    async def start(self, host: str, port: int, key: str) -> int:
        """Listens on a port, or on the socket of a `host` such as `unix:PATH`. Returns the bound port.

        Raises ConfigError, naming the configuration key `key`.
        """
        if host.startswith("unix:"):
            await self._server.start_unix(host.removeprefix("unix:"), key)
            return port
        return (await self._server.start(host, port, key))[1]

    def reload_tls(self, fresh: ssl.SSLContext) -> None:
        """Uses another certificate for new connections, if the listener has TLS."""
        if self._tls is not None:
            _with_h2(fresh)
            replace_ssl_context(self._tls, fresh)

    async def close(self, drain_s: float) -> None:
        """Answers the calls that were sent, and drops those that are unfinished after `drain_s`."""
        self._drain()
        await self._server.close(drain_s)


def _with_h2(tls: ssl.SSLContext | None) -> ssl.SSLContext | None:
    """The same context, for HTTP/2: clients insist on its name in the handshake."""
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    return tls
