"""BrokerAddress and RedisConnection: one connection to a Redis broker, with pipelined commands.

The client library connects, speaks TLS and logs in. This module sends the commands, bounds the wait for replies and
translates errors.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from penstock.errors import BrokerUnavailable, ConfigError, PenstockError, QueueFull, describe, install_hint
from penstock.streamer.redis.protocol import Script

log = logging.getLogger("penstock.broker")

REPLY_TIMEOUT_S = 15.0  # a broker that forks, saves or is paused may take seconds
CLOSE_TIMEOUT_S = 1.0

Command = Sequence[Any]

_SCHEMES = ("redis", "rediss", "unix")
_DEFAULT_PORT = 6379


class BrokerAddress(Struct, frozen=True):
    """`url` is for the client library and may hold a password; `name`, for messages and logs, never does."""

    url: str
    name: str


def parse_address(broker: str) -> BrokerAddress:
    """The address in "host", "host:port", "redis://", "rediss://" or "unix://" form. Raises ConfigError.

    A URL may have a user, a password and a database: `redis://user:password@host:6379/2`,
    `unix://user:password@/run/redis.sock?db=2`. `rediss://` is TLS; query parameters name its certificates
    (`?ssl_ca_certs=/path`).
    """
    url = broker.strip()
    if "://" not in url:
        url = f"redis://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may show the password
        raise _wrong_address("its port is not a number from 0 to 65535, or its host is malformed") from None
    if parts.scheme not in _SCHEMES:
        raise _wrong_address(f"'{parts.scheme}://' is not one of {', '.join(s + '://' for s in _SCHEMES)}")
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise _wrong_address("it names no socket; write unix:///path/to/redis.sock")
        return BrokerAddress(url, f"unix://{parts.path}")
    if not parts.hostname:
        raise _wrong_address("it names no host")
    database = parts.path.strip("/")
    if database and not database.isdigit():
        raise _wrong_address(f"its database '{database}' is not a number")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return BrokerAddress(url, f"{host}:{port or _DEFAULT_PORT}" + (f"/{database}" if database else ""))


def _wrong_address(why: str) -> ConfigError:
    return ConfigError(
        f"the address of the Redis broker is wrong: {why} (expected host:port, redis://[user:password@]host:port/db, "
        "rediss://... or unix:///path)"
    )


class CommandRefused(BrokerUnavailable):
    """The broker replied with an error. `word` is the first word of the error, such as NOGROUP or WRONGTYPE."""

    word = ""


class RedisConnection:
    """Connects with its first `ask`, and again with the first one after an error. Concurrent callers take turns."""

    def __init__(self, address: BrokerAddress) -> None:
        self.address = address
        self.connects = 0
        self._lock = asyncio.Lock()
        self._connection = _new_connection(address)

    async def ask(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """The replies. `wait_s`: how long the commands themselves may block.

        Raises ConfigError (a wrong password, a missing right), QueueFull (no memory left), BrokerUnavailable (no
        connection), CommandRefused (any other error reply).
        """
        try:
            async with self._lock, asyncio.timeout(REPLY_TIMEOUT_S + wait_s):
                return await self._ask(commands)
        except (Exception, asyncio.CancelledError) as e:
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
                await connection.connect()
                # without a password, a broker that wants one refuses large commands with a misleading error
                await connection.send_command("PING", check_health=False)
                await connection.read_response()
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
        except ResponseError:
            raise
        except BaseException:  # replies still to come would be taken for replies to later commands
            await connection.disconnect(nowait=True)
            raise

    def _translate(self, error: BaseException) -> BaseException:
        """Penstock's error for an error of the client library or the system."""
        import redis.exceptions as theirs

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
            return QueueFull(f"{where} has no memory left (maxmemory) for the request: try again later")
        if isinstance(error, theirs.BusyLoadingError):
            return BrokerUnavailable(f"{where} is loading its data: try again later", retry_after_s=1.0)
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
        """Closes the connection; the TLS shutdown may take up to a second."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._connection.disconnect()
        except (OSError, TimeoutError):
            pass  # the other end is gone

    def forget(self) -> None:
        """In a forked child: closes this process's copy of the socket without ending the parent's connection."""
        writer = getattr(self._connection, "_writer", None)
        sock = writer.get_extra_info("socket") if writer is not None else None
        if sock is not None and sock.fileno() >= 0:
            os.close(sock.fileno())


def _new_connection(address: BrokerAddress) -> Any:
    """A connection that is not open yet. Raises ConfigError."""
    try:
        from redis.asyncio.connection import ConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(f"the Redis broker needs the package redis: {install_hint('redis')}") from None
    tls = {"ssl_check_hostname": True} if address.url.startswith("rediss:") else {}
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
        return pool.make_connection()
    except Exception as e:
        raise ConfigError(
            f"the address of the Redis broker {address.name} has parameters that cannot be used: {type(e).__name__}"
        ) from None
