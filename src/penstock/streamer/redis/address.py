"""Where a broker is: "host:port" or a URL, and a name for it that may be shown."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from penstock.errors import ConfigError

_SCHEMES = ("redis", "rediss", "unix")
_DEFAULT_PORT = 6379


class Address(Struct, frozen=True):
    """`url` is for the client library and may hold a password; `name` is for messages and logs and does not."""

    url: str
    name: str


def parse(broker: str) -> Address:
    """The address that "host", "host:port", "redis://", "rediss://" or "unix://" names. Raises ConfigError.

    A URL may have a user, a password and a database: `redis://user:password@host:6379/2`,
    `unix://user:password@/run/redis.sock?db=2`. `rediss://` is TLS; the keys of its certificates are parameters
    (`?ssl_ca_certs=/path`).
    """
    url = broker.strip()
    if "://" not in url:
        url = f"redis://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may show the password
        raise _wrong("its port is not a number from 0 to 65535, or its host is malformed") from None
    if parts.scheme not in _SCHEMES:
        raise _wrong(f"'{parts.scheme}://' is not one of {', '.join(s + '://' for s in _SCHEMES)}")
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise _wrong("it names no socket; write unix:///path/to/redis.sock")
        return Address(url, f"unix://{parts.path}")
    if not parts.hostname:
        raise _wrong("it names no host")
    database = parts.path.strip("/")
    if database and not database.isdigit():
        raise _wrong(f"its database '{database}' is not a number")
    return Address(url, f"{_host(parts)}:{port or _DEFAULT_PORT}" + (f"/{database}" if database else ""))


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"[{host}]" if ":" in host else host


def _wrong(why: str) -> ConfigError:
    return ConfigError(
        f"the address of the Redis broker is wrong: {why} (expected host:port, redis://[user:password@]host:port/db, "
        "rediss://... or unix:///path)"
    )
