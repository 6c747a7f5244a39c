"""Listener addresses in config.properties."""

import re
from typing import Final, Literal

from msgspec import Struct

from penstock.errors import ConfigError

# default ports of TorchServe 0.12.0
_PORTS: Final = {
    "inference": {"http": 80, "https": 443},
    "management": {"http": 8081, "https": 8444},
    "metrics": {"http": 8082, "https": 8445},
}
_ADDRESS = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.%]+\]|[^:/\s\[\]]+)(?::([0-9]{1,9}))?/?", re.IGNORECASE)


class ListenerAddress(Struct, frozen=True):
    """`host` and `port`, or the `path` of a Unix socket. Groups with equal addresses share a listener."""

    host: str = ""
    port: int = 0
    tls: bool = False
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class GrpcAddress(Struct, frozen=True):
    """The address of a group's gRPC listener: host and port, or the host `unix:PATH`."""

    group: Literal["inference", "management"]
    host: str
    port: int

    @property
    def path(self) -> str:
        """The path of the socket; "" for a port."""
        return self.host.removeprefix("unix:") if self.host.startswith("unix:") else ""

    def __str__(self) -> str:
        if self.path:
            return self.host
        return f"grpc://[{self.host}]:{self.port}" if ":" in self.host else f"grpc://{self.host}:{self.port}"


def parse_address(group: str, text: str) -> ListenerAddress:
    """The address of the "inference", "management" or "metrics" listener. Raises ConfigError."""
    if text.startswith("unix:"):
        path = re.sub(r"^//(?=/)", "", text.removeprefix("unix:"))  # unix:///path means the same
        if not path:
            raise ConfigError(f"{group}_address: found {text!r}, expected a path after unix:")
        return ListenerAddress(path=path)
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{group}_address: found {text!r}, expected http://host:port, https://host:port or unix:/path"
        )
    scheme = (match[1] or "http").lower()
    port = int(match[3]) if match[3] else _PORTS[group][scheme]
    if port > 65535:
        raise ConfigError(f"{group}_address: found port {port}, expected 0 to 65535")
    return ListenerAddress(match[2].strip("[]"), port, scheme == "https")
