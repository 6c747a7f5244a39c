"""The gRPC listeners of `torchserve`, where grpcio is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError
from penstock.torchserve.admin.startup import Served
from penstock.torchserve.admin.tls import Pem
from penstock.torchserve.config.properties import Properties
from penstock.torchserve.protocol.api import Group, ListenerConfig

if TYPE_CHECKING:
    from penstock.torchserve.grpc.server import GrpcServer

log = logging.getLogger("penstock.cli")

GRPC_GROUPS: Final[tuple[Group, ...]] = ("inference", "management")


class GrpcAddress(Struct, frozen=True):
    """Where the listener of a group listens: host and port, or the host `unix:PATH`."""

    group: Group
    host: str
    port: int

    @property
    def path(self) -> str:
        """That of the socket, "" for a port."""
        return self.host.removeprefix("unix:") if self.host.startswith("unix:") else ""

    def __str__(self) -> str:
        if self.path:
            return self.host
        return f"grpc://[{self.host}]:{self.port}" if ":" in self.host else f"grpc://{self.host}:{self.port}"


def grpc_addresses(properties: Properties) -> list[GrpcAddress]:
    """Where the properties want it."""
    return [
        GrpcAddress(group, getattr(properties, f"grpc_{group}_address"), getattr(properties, f"grpc_{group}_port"))
        for group in GRPC_GROUPS
    ]


def grpc_listeners(
    served: Served,
    limits: LimitsConfig,
    face: Callable[[Group], ListenerConfig],
    pem: Callable[[], Pem],
) -> Iterable[tuple[GrpcServer, GrpcAddress]]:
    """The listeners, not started yet; none, and a warning, without grpcio. Raises ConfigError."""
    try:
        from penstock.torchserve.grpc.server import GrpcLimits, GrpcServer
    except ModuleNotFoundError as error:
        log.warning("event=no_grpc missing=%s consequence=http_only hint=pip install penstock[grpc]", error.name)
        return
    properties = served.properties
    tls = _read(pem()) if properties.enable_grpc_ssl else None
    for address in grpc_addresses(properties):
        bounds = GrpcLimits(
            max_request_bytes=properties.max_request_size,
            max_calls=limits.max_connections,
            handshake_s=limits.header_timeout_s,
            max_age_ms=getattr(properties, f"grpc_{address.group}_max_connection_age_ms"),
            max_age_grace_ms=getattr(properties, f"grpc_{address.group}_max_connection_age_grace_ms"),
        )
        yield GrpcServer(served.backend, served.administrator, face(address.group), bounds, tls=tls), address


def _read(pem: Pem) -> tuple[bytes, bytes]:
    pem.context()  # raises ConfigError for files that do not fit together
    try:
        return Path(pem.key).read_bytes(), Path(pem.certificate).read_bytes()
    except OSError as error:
        raise ConfigError(f"enable_grpc_ssl: {error.filename} cannot be read: {error.strerror}") from None
