"""Link: one connection to a Redis broker. Commands go out together and are answered in order.

The client library connects, speaks TLS and logs in; here is what is asked, how long an answer may take, and what its
refusals mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from penstock.errors import BrokerUnavailable, ConfigError, PenstockError, QueueFull, describe
from penstock.streamer.redis.address import Address
from penstock.streamer.redis.scripts import Script

log = logging.getLogger("penstock.broker")

ANSWER_S = 15.0
"""Longest wait for an answer: a broker that forks, saves or is paused may take seconds."""

CLOSE_S = 1.0

Command = Sequence[Any]


class Refused(BrokerUnavailable):
    """The broker has answered with an error of its own. `word` is its first word, such as NOGROUP."""

    word = ""


class Link:
    """Connects with its first `ask`, and again with the next one after an error. One caller at a time; others wait."""

    def __init__(self, address: Address, answer_s: float = ANSWER_S) -> None:
        self.address = address
        self.connects = 0
        self._answer_s = answer_s
        self._lock = asyncio.Lock()
        self._connection = _connection(address)

    async def ask(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """The replies. `wait_s`: how long the commands themselves may block.

        Raises ConfigError (a wrong password, a missing right), QueueFull (no memory left), BrokerUnavailable (no
        connection), Refused (any other error reply).
        """
        try:
            async with self._lock, asyncio.timeout(self._answer_s + wait_s):
                return await self._ask(commands)
        except (Exception, asyncio.CancelledError) as e:
            raise self._meaning(e) from None

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """What a script gives. Raises what `ask` raises."""
        tail = (len(keys), *keys, *arguments)
        try:
            return (await self.ask(("EVALSHA", script.sha, *tail)))[0]
        except Refused as e:
            if e.word != "NOSCRIPT":
                raise
        return (await self.ask(("EVAL", script.text, *tail)))[0]

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connection
        try:
            if not connection.is_connected:
                await connection.connect()
                # without a password, a broker that wants one takes offence at the size of a command, and says no more
                await connection.send_command("PING", check_health=False)
                await connection.read_response()
                self.connects += 1
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            replies = []
            wrong: Exception | None = None
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except _response_error() as e:  # the replies behind it must be read all the same
                    wrong = wrong or e
            if wrong is not None:
                raise wrong
            return replies
        except _response_error():
            raise
        except BaseException:  # what is still to come would be taken for the answer to something else
            await connection.disconnect(nowait=True)
            raise

    def _meaning(self, error: BaseException) -> BaseException:
        """The error of ours for one of the client library or the system."""
        import redis.exceptions as theirs

        where = f"the Redis broker at {self.address.name}"
        text = _text(error)
        if isinstance(error, (PenstockError, asyncio.CancelledError)):
            return error
        if isinstance(error, (theirs.AuthenticationError, theirs.AuthorizationError)) or text.startswith(
            ("WRONGPASS", "NOAUTH", "ERR invalid password", "ERR AUTH", "ERR Client sent AUTH")
        ):
            return ConfigError(f"{where} refuses the user or password it was given: {text}")
        if isinstance(error, theirs.NoPermissionError) or text.startswith("NOPERM"):
            return ConfigError(f"{where} does not allow this user what is needed: {text}")
        if isinstance(error, theirs.OutOfMemoryError) or text.startswith("OOM"):
            return QueueFull(f"{where} has no memory left (maxmemory) for the request: try again later")
        if isinstance(error, theirs.BusyLoadingError):
            return BrokerUnavailable(f"{where} is loading its data: try again later", retry_after_s=1.0)
        if isinstance(error, theirs.ResponseError):
            if text.startswith("WRONGTYPE"):
                return ConfigError(f"{where} holds other data under the same keys: give this model another prefix")
            if "unknown command" in text.lower():
                return ConfigError(f"{where} is too old, expected Redis 6.2 or newer: {text}")
            refused = Refused(f"{where} says: {text}")
            refused.word = "NOSCRIPT" if isinstance(error, theirs.NoScriptError) else text.partition(" ")[0]
            return refused
        if isinstance(error, TimeoutError):
            return BrokerUnavailable(f"{where} did not answer within {self._answer_s:g} s", retry_after_s=1.0)
        return BrokerUnavailable(f"{where} cannot be reached: {text}", retry_after_s=1.0)

    async def close(self) -> None:
        """Ends the connection; TLS says good-bye first, for at most a second."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._connection.disconnect()
        except (OSError, TimeoutError):
            pass  # the other end is gone

    def forget(self) -> None:
        """In a forked child: closes this process's copy of the socket; the parent and the broker notice nothing."""
        writer = getattr(self._connection, "_writer", None)
        sock = writer.get_extra_info("socket") if writer is not None else None
        if sock is not None and sock.fileno() >= 0:
            import os

            os.close(sock.fileno())


def _response_error() -> type[Exception]:
    import redis.exceptions

    return redis.exceptions.ResponseError


def _text(error: BaseException) -> str:
    return str(error).partition("\n")[0] or describe(error)


def _connection(address: Address) -> Any:
    """A connection that is not open yet. Raises ConfigError."""
    try:
        from redis.asyncio.connection import ConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError("the Redis broker needs the package redis: pip install 'penstock[redis]'") from None
    tls = {"ssl_check_hostname": True} if address.url.startswith("rediss:") else {}
    try:
        pool: Any = ConnectionPool.from_url(
            address.url,
            **tls,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # who calls knows what may be asked again
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
