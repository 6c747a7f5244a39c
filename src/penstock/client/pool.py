"""A bounded number of persistent connections to one server, for one event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from penstock.client.endpoint import Endpoint, ResponseTimeout
from penstock.client.http import ClientConnection, HttpCall
from penstock.client.response import HttpResponse


class ConnectionPool:
    """Sends requests, at most `size` at the same time; further ones wait for a connection in the order of arrival."""

    def __init__(self, endpoint: Endpoint, size: int, connect_timeout_s: float) -> None:
        self.endpoint = endpoint
        self._size = size
        self._connect_timeout_s = connect_timeout_s
        self._open: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []  # the last one used is the next: others may time out
        self._waiting: deque[asyncio.Future[ClientConnection]] = deque()

    async def send(self, call: HttpCall, *, timeout_s: float, max_response_bytes: int) -> HttpResponse:
        """The response, whatever its status. Raises as `ClientConnection.send`."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        connection = await self.take(timeout_s)
        try:
            left_s = end_s - asyncio.get_running_loop().time()
            return await connection.send(call, timeout_s=left_s, max_response_bytes=max_response_bytes)
        finally:
            self.give_back(connection)

    async def take(self, timeout_s: float) -> ClientConnection:
        """A connection, which the caller gives back. Raises ResponseTimeout if none becomes free in time."""
        if self._idle:
            return self._idle.pop()
        if len(self._open) < self._size:
            connection = ClientConnection(self.endpoint, connect_timeout_s=self._connect_timeout_s)
            self._open.add(connection)
            return connection
        waiter: asyncio.Future[ClientConnection] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():  # it was given a connection at the same time
                self.give_back(waiter.result())
            else:
                waiter.cancel()
            if isinstance(error, TimeoutError):
                url, size = self.endpoint.url, self._size
                raise ResponseTimeout(f"{url}: none of {size} connections became free within {timeout_s:g} s") from None
            raise

    def give_back(self, connection: ClientConnection) -> None:
        """Hands the connection to the next waiter, or keeps it."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)

    def close(self) -> None:
        """Closes all connections at once."""
        for connection in self._open:
            connection.close()
