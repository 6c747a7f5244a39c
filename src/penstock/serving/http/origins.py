"""Which hosts a request may name and which web pages may send it: against DNS rebinding and foreign pages."""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from penstock.errors import Forbidden
from penstock.types import Headers

ANY: Final = "*"
KNOWN: Final = 256  # remembered Host headers


class OriginPolicy:
    """The names in `Host` and the web pages in `Origin` that a listener accepts.

    A server's own hosts are IP addresses, which no DNS answer can point elsewhere, localhost and the machine's name.
    `hosts` and `origins` add to them; "*" allows all, "*.example.com" all names below. If the policy is `closed`,
    requests from other web pages than the server's own and `origins` are refused. `keys` are the configuration keys of
    `hosts` and `origins`.
    """

    def __init__(
        self,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        *,
        closed: bool = False,
        keys: tuple[str, str] = ("server.allowed_hosts", "server.cors_origins"),
    ) -> None:
        self._hosts = {"localhost", "*.localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self.origins = frozenset(origin.lower() for origin in origins)
        self._closed = closed
        self._keys = keys
        self._known: set[bytes] = set()

    def admit(self, headers: Headers, origin: bytes | None, check_host: bool) -> bytes:
        """The CORS headers of the response. Raises Forbidden. `check_host` also checks requests without an origin."""
        page = "" if origin is None else origin.decode("latin-1").lower()
        allowed = bool(page) and (ANY in self.origins or page in self.origins)
        foreign = self._closed and origin is not None and not allowed
        if check_host or foreign:
            host = self._own_host(headers)
            if foreign and (not host or page.partition("://")[2] != host):
                raise Forbidden(f"web pages of the origin {page[:100]!r} are refused; {self._keys[1]} allows them")
        if origin is None or not allowed:
            return b""
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin

    def _own_host(self, headers: Headers) -> str:
        """The Host header in lower case, "" without one: browsers always send it. Raises Forbidden."""
        host = b""
        for name, value in headers:
            if name.lower() == b"host":
                host = value
                if value not in self._known:
                    self._check(value.decode("latin-1").lower())
                    if len(self._known) < KNOWN:
                        self._known.add(value)
        return host.decode("latin-1").lower()

    def _check(self, host: str) -> None:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            below = (pattern[1:] for pattern in self._hosts if pattern.startswith("*."))
            if not {ANY, name} & self._hosts and not name.endswith(tuple(below)):
                raise Forbidden(
                    f"the Host header is {host[:100]!r}, which is not a name of this server; {self._keys[0]} adds names"
                ) from None
