"""A listener of TorchServe's gRPC APIs, on the loop of the engine."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

import grpc.aio
from grpc_reflection.v1alpha import reflection
from msgspec import Struct

from penstock.core.contracts import Backend
from penstock.errors import ConfigError
from penstock.serving.http.binding import free_path
from penstock.torchserve.grpc import health, inference, management, open_inference
from penstock.torchserve.grpc.messages import POOL
from penstock.torchserve.grpc.services import Service, Services
from penstock.torchserve.protocol.api import Administration, ListenerConfig

MAX_STREAMS: Final = 1024  # calls of one connection at a time; a client holds more back


class GrpcLimits(Struct, frozen=True, kw_only=True):
    """The bounds of a listener; ages of a connection are endless when they are None."""

    max_request_bytes: int
    max_calls: int
    handshake_s: float = 10.0  # longest time for a connection to become one of gRPC
    max_age_ms: int | None = None
    max_age_grace_ms: int | None = None


class GrpcServer:
    """The services of the groups of `face`. `tls` is (key, certificate chain) as PEM."""

    def __init__(
        self,
        backend: Backend,
        administration: Administration,
        face: ListenerConfig,
        limits: GrpcLimits,
        *,
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        services = _services(backend, administration, face)
        self._names = [service.name for service in services]
        self._handlers = Services(services, backend, administration)
        self._limits = limits
        self._tls = tls
        self._server: Any = None
        self._path = ""

    async def start(self, host: str, port: int, key: str) -> int:
        """Listens on a port, or on the socket `unix:PATH` that `host` names; the port really bound.

        Raises ConfigError naming `key` when it cannot.
        """
        self._server = grpc.aio.server(
            handlers=(self._handlers,),
            options=_options(self._limits),
            maximum_concurrent_rpcs=self._limits.max_calls,
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
                bound = self._server.add_secure_port(address, grpc.ssl_server_credentials([self._tls]))
        except RuntimeError:
            raise ConfigError(
                f"cannot listen for gRPC on {address}: it is in use, or not of this machine; choose another with {key}"
            ) from None
        await self._server.start()
        return int(bound)

    async def close(self, drain_s: float) -> None:
        """Takes no more calls, and drops those that are left after `drain_s`."""
        if self._server is not None:
            await self._server.stop(drain_s)
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _services(backend: Backend, administration: Administration, face: ListenerConfig) -> list[Service]:
    services = []
    if "inference" in face.groups:
        services.append(Service(inference.SERVICE, inference.Inference(backend, administration), "inference"))
        if face.open_inference:
            functions = open_inference.OpenInference(backend, administration, face.codec)
            services.append(Service(open_inference.SERVICE, functions, "inference"))
    if "management" in face.groups:
        disabled = frozenset() if face.model_api else management.GATED
        services.append(Service(management.SERVICE, management.Management(administration), "management", disabled))
    names = [service.name for service in services]
    return [*services, Service(health.SERVICE, health.Health(administration, names))]


def _options(limits: GrpcLimits) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        ("grpc.max_send_message_length", -1),  # answers are bounded where they are made
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", max(1, round(limits.handshake_s * 1000))),
    ]
    if limits.max_age_ms is not None:
        options.append(("grpc.max_connection_age_ms", limits.max_age_ms))
    if limits.max_age_grace_ms is not None:
        options.append(("grpc.max_connection_age_grace_ms", limits.max_age_grace_ms))
    return options
