"""Who may call: bearer tokens, TLS, and the hosts and web pages that a request may name."""

import hmac
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterable
from typing import Final

from penstock.config.checks import load_chain, refuse_der
from penstock.errors import ConfigError, Forbidden, Unauthorized
from penstock.types import Headers

log = logging.getLogger("penstock.serving")

_WEAK: Final = ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK")  # OpenSSL's names
_RENEW: Final = "create new ones: openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem"


def check_token(tokens: frozenset[bytes], authorization: bytes | None) -> None:
    """Raises Unauthorized unless the header is `Bearer` and one of `tokens`; no tokens at all open to everybody.

    Every token is compared in constant time, so the time reveals nothing about a nearly correct one.
    """
    if not tokens:
        return
    kind, _, given = (authorization or b"").partition(b" ")
    given = given.strip()
    right = False
    for token in tokens:
        right |= hmac.compare_digest(token, given)
    if not right or kind.lower() != b"bearer":
        raise Unauthorized("a valid bearer token is needed: Authorization: Bearer TOKEN")


def replace_ssl_context(running: ssl.SSLContext, fresh: ssl.SSLContext) -> None:
    """Lets the listeners that hold `running` use `fresh` for handshakes from now on."""

    def switch(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = fresh

    running.sni_callback = switch  # OpenSSL calls it for every handshake, also without a server name


def make_ssl_context(
    cert: str | None,
    key: str | None,
    client_ca: str | None = None,
    password_file: str | None = None,
    *,
    weak_keys: bool = False,
    advice: str = "name a file with its password in server.tls_password_file (--tls-password-file)",
) -> ssl.SSLContext | None:
    """A server's TLS context, None without a certificate. With `client_ca` clients must show a certificate.

    With `weak_keys`, keys of 1024 bits are accepted with a warning. `advice`: how the password of an encrypted key is
    given. Raises ConfigError for files that cannot be read or do not fit together, and for weaker keys and signatures.
    """
    if cert is None:
        if key is not None or client_ca is not None:
            raise ConfigError("server.tls_key and server.tls_client_ca need server.tls_cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, cert, key, password_file, advice, weak_keys)
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as exc:
            if isinstance(exc, ssl.SSLError):
                refuse_der(client_ca, "x509")
            raise ConfigError(f"TLS client authority '{client_ca}' cannot be loaded: {exc.args[-1]}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_chain(
    context: ssl.SSLContext, cert: str, key: str | None, password_file: str | None, advice: str, weak_keys: bool
) -> None:
    try:
        load_chain(context, cert, key, password_file, advice)
    except (OSError, ssl.SSLError) as exc:
        weak = getattr(exc, "reason", None) in _WEAK
        if weak and weak_keys:
            ciphers = [str(each["name"]) for each in context.get_ciphers() if each["protocol"] != "TLSv1.3"]
            context.set_ciphers(":".join(["@SECLEVEL=1", *ciphers]))
            _load_chain(context, cert, key, password_file, advice, False)
            log.warning("event=weak_certificate file=%s consequence=many_clients_refuse_it hint=%s", cert, _RENEW)
            return
        hint = f"; {_RENEW}" if weak else ""
        text = f"TLS certificate '{cert}' or key '{key or cert}' cannot be loaded: {exc.args[-1]}{hint}"
        raise ConfigError(text) from None


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
