"""BrokerAddress: where the Redis broker is. A fixed server, a master that Sentinels name, or a cluster."""

import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from msgspec import Struct

from penstock.errors import ConfigError

SENTINEL, CLUSTER = "sentinel", "cluster"

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_DEFAULT_PORT, _SENTINEL_PORT = 6379, 26379
_MULTIPLE = re.compile(r"(rediss?)\+(sentinel|cluster)://(?:([^/?#]*)@)?([^/?#@]*)([^?#]*)(?:\?(.*))?")

Node = tuple[str, int]  # host, port


class BrokerAddress(Struct, frozen=True):
    """`url` is for the client library and may hold a password; `name`, for messages and logs, never does.

    `kind`: "" for a fixed server, "sentinel" or "cluster". `nodes` are the Sentinels, or some nodes of the cluster;
    `service` is the Sentinels' name of the master; `login` the user and password of the Sentinels themselves.
    """

    url: str
    name: str
    kind: str = ""
    nodes: tuple[Node, ...] = ()
    service: str = ""
    login: tuple[str | None, str | None] = (None, None)


def parse_address(broker: str) -> BrokerAddress:
    """The address of a broker. Raises ConfigError.

    - "host", "host:port", `redis://user:password@host:6379/2` (database 2), `unix://user:password@/run/redis.sock?db=2`
    - `redis+sentinel://user:password@host:26379,host:26379/service/2?sentinel_password=...`
    - `redis+cluster://user:password@host:6379,host:6379`

    With `rediss` for `redis` the connection is TLS; query parameters name its files: `ssl_ca_certs`, `ssl_certfile`,
    `ssl_keyfile`.
    """
    url = broker.strip()
    if "://" not in url:
        url = f"redis://{url}"
    if (found := _MULTIPLE.fullmatch(url)) is not None:
        return _multiple(*found.groups(default=""))
    parts = _split(url)
    if parts.scheme not in _SCHEMES:
        raise _wrong_address(f"'{parts.scheme}://' is not one of {', '.join(s + '://' for s in _SCHEMES)}")
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise _wrong_address("it names no socket; write unix:///path/to/redis.sock")
        return BrokerAddress(url, f"unix://{parts.path}")
    host, port = _node(parts, _DEFAULT_PORT)
    database = _database(parts.path.strip("/"))
    return BrokerAddress(url, _shown(host, port) + (f"/{database}" if database else ""))


def _multiple(scheme: str, kind: str, login: str, hosts: str, path: str, query: str) -> BrokerAddress:
    """An address with several nodes. The URL for the client library has the first one's place."""
    port = _SENTINEL_PORT if kind == SENTINEL else _DEFAULT_PORT
    nodes = tuple(_node(_split(f"//{text.strip()}"), port) for text in hosts.split(","))
    service, _, database = path.strip("/").partition("/")
    if kind == CLUSTER:
        if service not in ("", "0"):
            raise _wrong_address(f"its database is '{service}', but a cluster has only database 0")
        service, database = "", ""
    elif not service:
        raise _wrong_address("it does not name the Sentinels' service; write redis+sentinel://host:26379/service")
    database = _database(database)
    keys = dict(parse_qsl(query, keep_blank_values=True))
    sentinel_login = (keys.pop("sentinel_username", None), keys.pop("sentinel_password", None))
    if kind == CLUSTER and sentinel_login != (None, None):
        raise _wrong_address("a cluster has no sentinel_username and sentinel_password")
    url = f"{scheme}://{login}@" if login else f"{scheme}://"
    url += _shown(*nodes[0]) + f"/{database}" + (f"?{urlencode(keys)}" if keys else "")
    _split(url)
    name = f"{scheme}+{kind}://{','.join(_shown(*node) for node in nodes)}"
    name += "".join(f"/{part}" for part in (service, database) if part)
    return BrokerAddress(url, name, kind, nodes, unquote(service), sentinel_login)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text may show the password
        raise _wrong_address("its port is not a number from 0 to 65535, or its host is malformed") from None
    return parts


def _node(parts: SplitResult, port: int) -> Node:
    if not parts.hostname:
        raise _wrong_address("it names no host")
    return parts.hostname, parts.port or port


def _database(text: str) -> str:
    if text and not text.isdigit():
        raise _wrong_address(f"its database '{text}' is not a number")
    return text


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wrong_address(why: str) -> ConfigError:
    return ConfigError(
        f"the address of the Redis broker is wrong: {why} (expected host:port, redis://[user:password@]host:port/db, "
        "unix:///path, redis+sentinel://host:port,host:port/service/db or redis+cluster://host:port,host:port; rediss "
        "for TLS)"
    )
