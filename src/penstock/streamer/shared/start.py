"""Joins the batcher of a name, and starts it if none runs. These functions block: a client calls them in a thread.

A client starts a batcher while it holds the lock PATH.lock, and only if no process listens at PATH. The batcher itself
holds PATH.alive from before it listens until its process ends. So two of them never run at the same time, also when
one is just ending, and a file that a dead one left is no obstacle. The client opens nothing that a process forked in
the meantime could keep: neither the listener nor the batcher's own lock.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from penstock.core import os_threads
from penstock.core.transports.launch import python
from penstock.core.wire.messages import FrameDecoder, MessageReader, WorkerFailed, frame_of, write
from penstock.core.worker.nesting import may_start_workers
from penstock.errors import ModelNotReady
from penstock.streamer.shared.address import close, connected, keep, socket_path
from penstock.streamer.shared.messages import VERSION, FromBatcher, JoinMessage, Offer, WelcomeMessage, write_offer

START_S: Final = 60.0  # for a batcher to listen; it waits for the end of the one before
GREET_S: Final = 10.0  # for its answer to a new client
ATTEMPTS: Final = 5  # a batcher may end just when a client arrives
READY: Final = b"1"
STARTER_FD: Final = 3  # of the batcher: a socket to the process that starts it


class Joined(Struct):
    """A socket with the welcome of a batcher, and the descriptors of the shared memory for requests and replies."""

    sock: Any
    welcome: WelcomeMessage
    fds: list[int]

    def close(self) -> None:
        close(self.sock)
        for fd in self.fds:
            os.close(fd)


def join(shared: str, offer: Offer | None) -> Joined:
    """Connects to the batcher of a name or path, which starts with `offer` if none runs.

    Raises ConfigError for a wrong address, directory or user, or if the batcher has other settings; ModelNotReady if
    there is none, or if it does not start; LoadFailed in a worker that must not start another.
    """
    path = socket_path(shared)
    for _ in range(ATTEMPTS):
        sock = connected(path)
        if sock is None:
            if offer is None:
                raise ModelNotReady(f"no batcher listens at {path}: a Streamer(..., shared={shared!r}) starts one")
            sock = _started(path, offer)
        joined = None if sock is None else _greeted(sock, path, offer)
        if joined is not None:
            return joined
    raise ModelNotReady(f"the batcher at {path} ended again and again before it answered; its log is {path}.log")


def _started(path: str, offer: Offer) -> Any:
    """A socket of a new batcher, or of one that another process has started meanwhile; None if it has ended."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sock = connected(path)
        if sock is None:
            _start(path, offer)
            sock = connected(path)
        return sock
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for the copies of processes that were forked meanwhile
        os.close(lock)


def _start(path: str, offer: Offer) -> None:
    """Returns when the batcher listens. It outlives this process: it has its own session and no parent."""
    may_start_workers()
    offered = write_offer(offer)
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    ours, theirs = map(keep, os_threads.socketpair())
    try:
        command = [python(), "-P", "-m", "penstock.streamer.shared.batcher", path]
        os_threads.run_detached(command, {0: null, 1: log, 2: log, STARTER_FD: theirs.fileno()})
        close(theirs)
        ours.settimeout(START_S)
        found = b""
        try:
            for piece in frame_of(offered):
                ours.sendall(piece)
            found = ours.recv(1)
        except TimeoutError:
            raise ModelNotReady(
                f"the batcher at {path} did not listen within {START_S:g} s: an earlier one, which holds {path}.alive,"
                f" may not end; the log is {path}.log"
            ) from None
        except OSError:
            pass
        if found != READY:
            raise ModelNotReady(f"the batcher at {path} ended before it listened; its log is {path}.log")
    finally:
        close(ours)
        close(theirs)
        os.close(log)
        os.close(null)


def _greeted(sock: Any, path: str, offer: Offer | None) -> Joined | None:
    """The welcome on a new connection; None if the batcher ended. Raises what the batcher answers, ModelNotReady."""
    fds: list[int] = []
    try:
        sock.settimeout(GREET_S)
        with suppress(BrokenPipeError, ConnectionResetError):  # it ended, or refuses more clients and says so
            sock.sendall(b"".join(write(JoinMessage(VERSION, None if offer is None else offer.settings))))
        message = _first_message(sock, fds)
        if message is None:
            close(sock)
            return None
        if isinstance(message, WorkerFailed):
            raise message.error
        if not isinstance(message, WelcomeMessage) or len(fds) != 2:
            raise ModelNotReady(f"the process at {path} is no batcher of this version")
        sock.setblocking(False)
        return Joined(sock, message, fds)
    except BaseException as e:
        close(sock)
        for fd in fds:
            os.close(fd)
        if isinstance(e, TimeoutError):
            raise ModelNotReady(f"the batcher at {path} did not answer within {GREET_S:g} s") from None
        raise


def _first_message(sock: Any, fds: list[int]) -> Any:
    """The first message, whose descriptors are added to `fds`; None at the end of the socket."""
    decoder, reader = FrameDecoder(), MessageReader(FromBatcher, _no_memory)
    while True:
        try:
            data, received, _, _ = socket.recv_fds(sock, 2**16, 2)
        except (ConnectionResetError, BrokenPipeError):
            return None
        fds += received
        if not data:
            return None
        frames = decoder.feed(data)
        if frames:
            return reader.read(frames[0])


def _no_memory(offset: int, length: int, writable: bool) -> Any:
    raise ValueError("a first message refers to no shared memory")
