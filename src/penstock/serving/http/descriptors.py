"""The descriptors of the process: how many connections each listener may hold, whether any are left, and hang-ups."""

import asyncio
import contextlib
import logging
import os
import resource
import select
import sys
from typing import Final, Protocol
from weakref import WeakValueDictionary

from penstock.errors import ConfigError

log = logging.getLogger("penstock.serving")

RESERVED: Final = 256  # for workers, files and libraries
LEAST: Final = 32  # with fewer, a server with one model fails while it starts
MARGIN: Final = 8  # descriptors that accepting leaves to the others
SIDE_SHARE: Final = 16  # a side port gets this fraction of the connections, if not all fit
FEW: Final = 1000  # connections of inference; to allow fewer deserves a warning


def raise_limit(wanted: int) -> int:
    """How many descriptors the process may have, after raising its soft limit to `wanted` as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # RLIM_INFINITY is -1
        most = wanted if hard < 0 else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS refuses more than OPEN_MAX
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return sys.maxsize if soft < 0 else soft


def share_connections(wanted: int, main: int, side: int) -> tuple[int, int]:
    """The most connections of each of `main` inference ports and of each of `side` other ports: at most `wanted`.

    The sum fits into the descriptors of the process, so that a flood on one port leaves room on the others. Raises
    ConfigError for too few to start.
    """
    needed = wanted * (main + side) + RESERVED
    limit = raise_limit(needed)
    if limit < LEAST:
        raise ConfigError(f"the process may open {limit} files, expected at least {LEAST}: raise the limit (ulimit -n)")
    if limit >= needed:
        return wanted, wanted
    room = limit - min(RESERVED, limit // 2)
    aside = min(wanted, max(1, room // SIDE_SHARE))
    most = min(wanted, max(1, (room - aside * side) // main))
    log.log(
        logging.WARNING if most < min(FEW, wanted) else logging.INFO,
        "event=few_descriptors limit=%d max_connections=%d consequence=at_most_%d_connections_for_inference_and_%d_"
        "for_each_other_port hint=raise the hard limit of open files (ulimit -Hn)",
        limit, wanted, most, aside,
    )  # fmt: skip
    return most, aside


def none_left() -> bool:
    """Whether at most MARGIN descriptors are left: the system gives the lowest free number."""
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 <= soft <= lowest + MARGIN


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
