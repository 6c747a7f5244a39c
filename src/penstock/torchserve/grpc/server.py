"""A listener of TorchServe's gRPC APIs, on the engine's event loop."""

import contextlib
import os
from typing import Any, Final

import grpc.aio
from grpc_reflection.v1alpha import reflection
from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.errors import ListenFailed
from penstock.serving.http.sockets import free_path
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config.properties import ListenerConfig
from penstock.torchserve.grpc.inference import HealthService, InferenceService, OpenInferenceService
from penstock.torchserve.grpc.management import GATED, ManagementService
from penstock.torchserve.grpc.services import POOL, CallDispatcher, GrpcService

MAX_STREAMS: Final = 1024  # concurrent calls per connection; the client queues the others


class GrpcLimits(Struct, frozen=True):
    """The bounds of a listener, with its own share of `max_connections`. An age of None means unlimited."""

    limits: LimitsConfig
    max_age_ms: int | None = None
    max_age_grace_ms: int | None = None


class GrpcServer:
    """The services of the groups of `config`. `tls` is (key, certificate chain) as PEM.

    Of `[limits]`, gRPC has no bound on the time of a message, nor on unread answers of a whole connection.
    """

    def __init__(
        self,
        backend: Backend,
        administration: Administrator,
        config: ListenerConfig,
        limits: GrpcLimits,
        *,
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        services = _services(backend, administration, config)
        self._names = [service.name for service in services]
        self._handlers = CallDispatcher(services, backend, administration)
        self._limits = limits
        self._tls = tls
        self._changed: Any = None  # the certificate for the next handshake
        self._server: Any = None
        self._path = ""

    async def start(self, host: str, port: int, key: str) -> int:
        """Listens on a port, or on the socket of a `host` such as `unix:PATH`. Returns the bound port.

        Raises ConfigError, naming the configuration key `key`.
        """
        self._server = grpc.aio.server(
            handlers=(self._handlers,),
            options=_options(self._limits),
            maximum_concurrent_rpcs=self._limits.limits.max_connections,
        )
        reflection.enable_server_reflection([*self._names, reflection.SERVICE_NAME], self._server, pool=POOL)
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
                certificate = grpc.ssl_server_certificate_configuration([self._tls])
                credentials = grpc.dynamic_ssl_server_credentials(certificate, self._certificate)
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ListenFailed(
                f"cannot listen for gRPC on {address}: the address is in use or not on this machine; choose"
                f" another with {key}"
            ) from None
        await self._server.start()
        return int(bound)

    def reload_tls(self, tls: tuple[bytes, bytes]) -> None:
        """Uses another certificate for new connections, if the listener has TLS."""
        self._changed = grpc.ssl_server_certificate_configuration([tls])

    def _certificate(self) -> Any:
        """A changed certificate, once; None keeps the last one. gRPC calls this in its own thread at each handshake."""
        changed, self._changed = self._changed, None
        return changed

    async def close(self, drain_s: float) -> None:
        """Stops accepting calls, and drops those that are unfinished after `drain_s`."""
        if self._server is not None:
            await self._server.stop(drain_s)
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _services(backend: Backend, administration: Administrator, config: ListenerConfig) -> list[GrpcService]:
    services = []
    if "inference" in config.groups:
        services.append(GrpcService(InferenceService.NAME, InferenceService(backend, administration), "inference"))
        if config.properties.ts_open_inference_protocol:
            open_inference = OpenInferenceService(backend, administration, config.codec)
            services.append(GrpcService(OpenInferenceService.NAME, open_inference, "inference"))
    if "management" in config.groups:
        disabled = frozenset() if config.properties.enable_model_api else GATED
        management = ManagementService(administration)
        services.append(GrpcService(ManagementService.NAME, management, "management", disabled))
    names = [service.name for service in services]
    return [*services, GrpcService(HealthService.NAME, HealthService(administration, names))]


def _options(bounds: GrpcLimits) -> list[tuple[str, int]]:
    limits = bounds.limits
    options = [
        ("grpc.so_reuseport", 0),  # a port in use is an error
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),  # the handler's side bounds answers
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
