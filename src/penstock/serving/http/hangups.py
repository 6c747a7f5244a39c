"""Clients that leave while they owe nothing more and wait for an answer."""

from __future__ import annotations

import asyncio
import select
from typing import Protocol
from weakref import WeakValueDictionary


class HalfClosed(Protocol):
    """A connection whose client sends no more."""

    def abort(self) -> None:
        """Drops the connection."""


class Hangups:
    """Drops half-closed connections whose client has left, as soon as the system knows.

    A socket at the end of its stream stays readable for ever, so that the event loop no longer watches it and learns of
    no reset. An epoll object that is asked for nothing reports just errors and hang-ups, and the loop can watch it.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._watched: WeakValueDictionary[int, HalfClosed] = WeakValueDictionary()

    def watch(self, connection: HalfClosed, transport: asyncio.Transport) -> bool:
        """Calls `connection.abort` when its client has left; False on systems without epoll."""
        if not hasattr(select, "epoll"):
            return False
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._wake)
        fd = transport.get_extra_info("socket").fileno()
        self._watched[fd] = connection
        self._epoll.register(fd, select.EPOLLONESHOT)  # a socket that is closed leaves by itself
        return True

    def _wake(self) -> None:
        assert self._epoll is not None
        for fd, _ in self._epoll.poll(0):
            connection = self._watched.pop(fd, None)
            if connection is not None:
                connection.abort()

    def close(self) -> None:
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
