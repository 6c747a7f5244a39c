"""The address of a server (host, port, TLS, path prefix), its token, and the errors on the way to it."""

import logging
import os
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from penstock.config.checks import load_chain
from penstock.errors import ConfigError, DeadlineExceeded, PenstockError

log = logging.getLogger("penstock.client")

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_warned: set[str] = set()  # servers that get a token unencrypted


class Endpoint(Struct, frozen=True):
    """`prefix` is empty or starts with "/"; `tls` None means plain HTTP; `socket` is the path of a Unix socket."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    socket: str = ""

    @property
    def authority(self) -> str:
        """Host and port as written in a URL and in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        if self.socket:
            return f"unix:{self.socket}"
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def local(self) -> bool:
        """Whether traffic stays on this machine."""
        return bool(self.socket) or self.host in LOOPBACK or self.host.startswith("127.")


def parse_url(url: str, tls: ssl.SSLContext | None = None) -> Endpoint:
    """The endpoint of `http://host[:port][/prefix]`, https or `unix:/path`. Without `tls`, https has a default context.

    Raises ConfigError for anything else, including a user or password, which would end up in logs.
    """
    expected = "expected http://HOST[:PORT][/PATH] or https://..."
    if url.startswith("unix:/") and "\0" not in url:
        return Endpoint("localhost", 80, socket=url.removeprefix("unix:"))
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as exc:
        raise ConfigError(f"server '{url}' is not a valid address ({exc}); {expected}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"server '{url}' has no known scheme; {expected}")
    if "@" in parts.netloc:
        raise ConfigError(f"the server address contains a user or password; use a token instead, and {expected}")
    if not host or parts.query or parts.fragment or not _is_plain(parts.path) or not _is_plain(host):
        raise ConfigError(f"server '{url}' has no host, or has more than a path after it; {expected}")
    secure = parts.scheme == "https"
    context = (tls or tls_context()) if secure else None
    return Endpoint(host, port or (443 if secure else 80), parts.path.rstrip("/"), context)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def tls_context(ca: str | None = None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """A context that verifies certificate and host name against the system's authorities or the file `ca`.

    `cert` and `key` identify the client; a file may hold both. Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            load_chain(context, cert, key, None, advice="")
    except OSError as exc:  # includes ssl.SSLError
        files = ", ".join(file for file in (ca, cert, key) if file is not None)
        raise ConfigError(f"cannot read the TLS files {files}: {exc.strerror or exc}") from None
    return context


def authorization(token: str | None) -> list[tuple[str, str]]:
    """The header that carries the token."""
    return [] if token is None else [("Authorization", f"Bearer {token}")]


def check_token_privacy(endpoint: Endpoint, token: str | None) -> None:
    """Logs a warning, once for each server, if others can read the token on its way."""
    if token is not None and endpoint.tls is None and not endpoint.local and endpoint.url not in _warned:
        _warned.add(endpoint.url)
        log.warning("server=%s the token is sent unencrypted; use https or a tunnel", endpoint.url)


def read_token(path: str | None) -> str | None:
    """The first line of the file, or else the variable PENSTOCK_TOKEN. Raises ConfigError.

    Command lines take a file because every user of the machine can read the arguments of a process.
    """
    if path is None:
        return os.environ.get("PENSTOCK_TOKEN") or None
    try:
        token = Path(path).read_text().strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the token file {path} cannot be read: {e}") from None
    if not token:
        raise ConfigError(f"the token file {path} is empty; its first line must be the token")
    return token


# ---- errors, independent of what a response means


class Unreachable(PenstockError, code="unreachable", retryable=True):
    """The connection could not be opened; nothing of the request was sent."""


class UntrustedCertificate(PenstockError, code="not_trusted"):
    """The client does not trust the server's certificate for this host name."""


class ConnectionLost(PenstockError, code="connection_lost", retryable=True):
    """The connection ended before the response was complete. The server may have run the request."""


class ResponseTimeout(DeadlineExceeded, code="no_answer", retryable=True):
    """The server did not respond in time. It may hang, and it may have run the request."""


class MalformedResponse(PenstockError, code="malformed_answer", retryable=True):
    """The server did not send valid HTTP/1.1."""


class ResponseTooLarge(MalformedResponse, code="answer_too_large"):
    """The response exceeds the caller's limit. The client closes the connection without storing it."""
