"""Who may call: bearer tokens, and TLS."""

import hmac
import logging
import ssl
from typing import Final

from penstock.config.tls import load_chain, refuse_der
from penstock.errors import ConfigError, Unauthorized

log = logging.getLogger("penstock.frontends")

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
