"""RedisConnection: one connection to the node of a Redis broker that holds the queue, with pipelined commands.

The client library connects, speaks TLS and logs in. This module sends the commands, bounds the wait for replies and
translates errors.

All keys of a queue have one hash tag, so a cluster holds them on one node: one plain connection serves a queue, as with
a single server. Sentinels, or the nodes of a cluster, name that node; it is looked up again after each lost connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from msgspec import Struct

from penstock.config.checks import refused
from penstock.errors import BrokerUnavailable, ConfigError, PenstockError, QueueFull, describe, install_hint
from penstock.streamer.redis.protocol import Script

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


log = logging.getLogger("penstock.streamer")

REPLY_TIMEOUT_S = 15.0  # a broker that forks, saves or is paused may take seconds

Command = Sequence[Any]


class CommandRefused(BrokerUnavailable):
    """The broker replied with an error. `word` is the first word of the error, such as NOGROUP or WRONGTYPE."""

    word = ""


class RedisConnection:
    """Connects with its first `ask`, and again with the first one after an error. Concurrent callers take turns.

    Each connection is to the node that holds `key` at that time.
    """

    def __init__(self, address: BrokerAddress, key: str) -> None:
        self.address = address
        self.connects = 0
        self._lock = asyncio.Lock()
        self._connection, self._finder = _new_connection(address, key)

    @property
    def answered(self) -> bool:
        """Whether the broker exists: it has accepted a connection, or Sentinels or nodes know of its queue."""
        return self.connects > 0 or self._finder.answered

    async def ask(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """The replies. `wait_s`: how long the commands themselves may block.

        Raises ConfigError (a wrong password, a missing right), QueueFull (no memory left), BrokerUnavailable (no
        connection), CommandRefused (any other error reply).
        """
        try:
            async with self._lock, asyncio.timeout(REPLY_TIMEOUT_S + wait_s):
                return await self._ask(commands)
        except (Exception, asyncio.CancelledError) as e:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the library may replace it while it cleans up
                raise asyncio.CancelledError from None
            raise self._translate(e) from None

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """The return value of a script. Raises what `ask` raises."""
        tail = (len(keys), *keys, *arguments)
        try:
            return (await self.ask(("EVALSHA", script.sha, *tail)))[0]
        except CommandRefused as e:
            if e.word != "NOSCRIPT":
                raise
        return (await self.ask(("EVAL", script.text, *tail)))[0]

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        from redis.exceptions import ResponseError

        connection = self._connection
        try:
            if not connection.is_connected:
                await self._finder.connect(connection)
                self.connects += 1
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            replies = []
            first_error: Exception | None = None
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as e:  # the replies that follow must be read all the same
                    first_error = first_error or e
            if first_error is not None:
                raise first_error
            return replies
        except ResponseError as e:
            if is_moved(e):
                await connection.disconnect()
            raise
        except BaseException:  # replies still to come would be taken for replies to later commands
            await connection.disconnect()
            raise

    def _translate(self, error: BaseException) -> BaseException:
        """Penstock's error for an error of the client library or the system."""
        import redis.exceptions as theirs

        if isinstance(error.__cause__, ConfigError):  # of a function that the library called
            error = error.__cause__
        if isinstance(error, (PenstockError, asyncio.CancelledError)):
            return error
        where = f"the Redis broker at {self.address.name}"
        text = str(error).partition("\n")[0] or describe(error)
        if isinstance(error, (theirs.AuthenticationError, theirs.AuthorizationError)) or text.startswith(
            ("WRONGPASS", "NOAUTH", "ERR invalid password", "ERR AUTH", "ERR Client sent AUTH")
        ):
            return ConfigError(f"{where} refuses the user or password it was given: {text}")
        if isinstance(error, theirs.NoPermissionError) or text.startswith("NOPERM"):
            return ConfigError(f"{where} does not give this user the required rights: {text}")
        if isinstance(error, theirs.OutOfMemoryError) or text.startswith("OOM"):
            return QueueFull(
                f"{where} has no memory left (maxmemory) for the request: try again later", retry_after_s=1.0
            )
        if isinstance(error, theirs.BusyLoadingError):
            return BrokerUnavailable(f"{where} is loading its data: try again later", retry_after_s=1.0)
        if isinstance(error, theirs.AskError) and self.address.kind != CLUSTER:
            return ConfigError(f"{where} is a node of a cluster: write redis+cluster://{self.address.name}")
        if is_moved(error):
            return BrokerUnavailable(f"{where} is being moved to another node: {text}", retry_after_s=1.0)
        if isinstance(error, theirs.ResponseError):
            if "unknown command" in text.lower():
                return ConfigError(f"{where} is too old, expected Redis 6.2 or newer: {text}")
            refused = CommandRefused(f"{where} reports: {text}")
            refused.word = "NOSCRIPT" if isinstance(error, theirs.NoScriptError) else text.partition(" ")[0]
            if "WRONGTYPE" in text:  # scripts report it behind other words
                refused = CommandRefused(
                    f"{where} holds other data under the same keys: delete it, or give this model another prefix"
                )
                refused.word = "WRONGTYPE"
            return refused
        if isinstance(error, TimeoutError):
            return BrokerUnavailable(f"{where} did not answer within {REPLY_TIMEOUT_S:g} s", retry_after_s=1.0)
        return BrokerUnavailable(f"{where} cannot be reached: {text}", retry_after_s=1.0)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.disconnect()

    def forget(self) -> None:
        """In a forked child: closes this process's copy of the socket without ending the parent's connection."""
        writer = getattr(self._connection, "_writer", None)
        sock = writer.get_extra_info("socket") if writer is not None else None
        if sock is not None and sock.fileno() >= 0:
            os.close(sock.fileno())


class _AbruptConnection:
    """Base class of the client library's connections. It closes the socket at once and sends no TLS close_notify.

    uvloop hangs or fails if its loop closes while a connection waits for the peer's close_notify. The library closes
    connections too, for example when a password is refused.
    """

    _writer: Any

    async def disconnect(self, *args: Any, **keys: Any) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(*args, **keys)  # type: ignore[misc]


def _new_connection(address: BrokerAddress, key: str) -> tuple[Any, NodeFinder]:
    """A connection that is not open yet, and what opens it. Raises ConfigError."""
    try:
        from redis.asyncio.connection import ConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(f"the Redis broker needs the package redis: {install_hint('redis')}") from None
    tls: dict[str, Any] = {}
    if address.url.startswith("rediss:"):
        given = dict(parse_qsl(urlsplit(address.url).query))
        key_file = given.get("ssl_keyfile") or given.get("ssl_certfile", "")
        password = refused(key_file, "give its password as the parameter ssl_password")
        tls = {"ssl_check_hostname": True, "ssl_password": password}
    try:
        pool: Any = ConnectionPool.from_url(
            address.url,
            **tls,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # only the caller knows which commands may be repeated
            socket_timeout=None,
            socket_connect_timeout=5.0,
            health_check_interval=0,
            **({} if address.url.startswith("unix:") else {"socket_keepalive": True}),
        )
        make = pool.connection_class = type("Connection", (_AbruptConnection, pool.connection_class), {})
        return pool.make_connection(), NodeFinder(address, key, make, pool.connection_kwargs)
    except Exception as e:
        raise ConfigError(
            f"the address of the Redis broker {address.name} has parameters that cannot be used: {type(e).__name__}"
        ) from None


# ---- where the queue is

LOOKUP_S = 2.0  # for each of the nodes asked


class NodeFinder:
    """`make(**options)` creates a connection of the client library."""

    def __init__(self, address: BrokerAddress, key: str, make: Any, options: Mapping[str, Any]) -> None:
        self._address, self._key = address, key
        self._make = make
        self.answered = False  # a node has replied, though perhaps that it cannot serve now
        bounds = {"socket_connect_timeout": LOOKUP_S, "socket_timeout": LOOKUP_S}
        self._options = {**options, **bounds}
        if address.kind == SENTINEL:
            user, password = address.login
            self._options |= {"username": user, "password": password, "db": 0}

    async def connect(self, connection: Any) -> None:
        """Connects. Raises errors of the client library and the system."""
        from redis.exceptions import BusyLoadingError

        if self._address.kind:
            connection.host, connection.port = await self._find()
            self.answered = True
        try:
            await self._log_in(connection)
        except BusyLoadingError:
            self.answered = True
            raise

    async def _log_in(self, connection: Any) -> None:
        await connection.connect()
        if self._address.kind == SENTINEL:
            await _check_master(connection)
        else:
            # without a password, a broker that wants one refuses large commands with a misleading error
            await connection.send_command("PING", check_health=False)
            await connection.read_response()

    async def _find(self) -> Node:
        """Asks the nodes in turn. Raises ConnectionError if none knows, and at once what a refused password raises."""
        from redis.exceptions import AuthenticationError, ClusterDownError, RedisError

        ask = self._ask_cluster if self._address.kind == CLUSTER else self._ask_sentinel
        last: Exception | None = None
        for node in self._address.nodes:
            try:
                if (found := await ask(node)) is not None:
                    return found
            except AuthenticationError:
                raise
            except (RedisError, OSError, TimeoutError) as e:
                self.answered = self.answered or isinstance(e, ClusterDownError)
                last = e
        service = f" '{self._address.service}'" if self._address.service else ""
        raise ConnectionError(f"no node knows the master{service}" + (f" ({last})" if last is not None else ""))

    async def _ask_sentinel(self, node: Node) -> Node | None:
        found = await self._ask(node, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        return None if found is None else (found[0].decode(), int(found[1]))

    async def _ask_cluster(self, node: Node) -> Node:
        from redis.exceptions import AskError, MovedError

        try:
            await self._ask(node, "EXISTS", self._key)
        except MovedError as e:
            return e.host or node[0], e.port
        except AskError:
            pass  # the slot is leaving this node, which has it until all its keys are gone
        return node

    async def _ask(self, node: Node, *command: str) -> Any:
        connection = self._make(**{**self._options, "host": node[0], "port": node[1]})
        try:
            await connection.connect()
            await connection.send_command(*command, check_health=False)
            return await connection.read_response(disable_decoding=True)
        finally:
            await connection.disconnect()


async def _check_master(connection: Any) -> None:
    """Raises ConnectionError if a Sentinel named a server that is no longer the master."""
    from redis.exceptions import NoPermissionError

    await connection.send_command("ROLE", check_health=False)
    try:
        role = (await connection.read_response(disable_decoding=True))[0]
    except NoPermissionError:
        return  # a write to a replica fails too, only later
    if role != b"master":
        await connection.disconnect()
        raise ConnectionError(f"{connection.host}:{connection.port} is now a {role.decode()}")


def is_moved(error: BaseException) -> bool:
    """Whether the queue is no longer on the node that reported this error, or cannot be changed there for a while: the
    node was demoted, its slots move, or it lacks replicas."""
    import redis.exceptions as theirs

    kinds = (theirs.AskError, theirs.TryAgainError, theirs.ClusterDownError, theirs.ReadOnlyError)
    if not isinstance(error, theirs.ResponseError):
        return False
    text = str(error)
    return (
        isinstance(error, kinds)
        or text.startswith("NOREPLICAS")
        or "-READONLY" in text  # a script of Redis 6.2 reports it behind other words
        or (text.startswith("UNBLOCKED") and "instance state changed" in text)
    )
