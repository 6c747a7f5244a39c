"""Where a server is: host, port, whether TLS is spoken, and the path that its routes stand under."""

from __future__ import annotations

import ssl
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from penstock.errors import ConfigError

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Endpoint(Struct, frozen=True):
    """`prefix` is "" or starts with "/"; `tls` None is plain HTTP."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL and in the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def local(self) -> bool:
        """Whether what is sent stays on this machine."""
        return self.host in LOOPBACK or self.host.startswith("127.")


def parse_url(url: str, tls: ssl.SSLContext | None = None) -> Endpoint:
    """The endpoint of `http://host[:port][/prefix]` or https; `tls` is used for https only, and made when None.

    Raises ConfigError for anything else, also for a user or password in it: they would end in logs.
    """
    wanted = "expected http://HOST[:PORT][/PATH] or https://..."
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as exc:
        raise ConfigError(f"server '{url}' is no address ({exc}); {wanted}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"server '{url}' has no scheme that is known; {wanted}")
    if "@" in parts.netloc:
        raise ConfigError(f"the server's address holds a user or password; give a token instead, and {wanted}")
    if not host or parts.query or parts.fragment or not _plain(parts.path) or not _plain(host):
        raise ConfigError(f"server '{url}' has no host, or more than a path after it; {wanted}")
    secure = parts.scheme == "https"
    context = (tls or tls_context()) if secure else None
    return Endpoint(host, port or (443 if secure else 80), parts.path.rstrip("/"), context)


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def tls_context(ca: str | None = None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """A context that checks certificate and host name: against the system's authorities, or those in the file `ca`.

    `cert` and `key` are the client's own, for servers that ask for one. Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as exc:  # also ssl.SSLError
        files = ", ".join(path for path in (ca, cert, key) if path)
        raise ConfigError(f"TLS files {files} cannot be read: {exc.strerror or exc}") from None
    return context
