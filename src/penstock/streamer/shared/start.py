"""Joins the batcher of a name, and starts it if none runs. These functions block: a client calls them in a thread.

A client starts a batcher while it holds the lock PATH.lock, and only if no process listens at PATH. The batcher itself
holds PATH.alive from before it listens until its process ends. So two of them never run at the same time, also when
one is just ending, and a file that a dead one left is no obstacle. The client opens nothing that a process forked in
the meantime could keep: neither the listener nor the batcher's own lock.

The socket is in a directory that only this user can enter, and both ends check the user at the other end, which the
kernel reports. So no trust boundary lies between them: a process that can write to the socket can already read the
memory of both processes and send them signals.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from penstock.core import os_threads
from penstock.core.transports.launch import python
from penstock.core.wire.messages import FrameDecoder, MessageReader, WorkerFailed, frame_of, write
from penstock.core.worker.nesting import may_start_workers
from penstock.errors import ConfigError, ModelNotReady
from penstock.streamer.shared.messages import VERSION, FromBatcher, JoinMessage, Offer, WelcomeMessage, write_offer

DIRECTORY_VARIABLE: Final = "PENSTOCK_RUNTIME_DIR"
CONNECT_S: Final = 10.0  # for a batcher with a full backlog
MAX_PATH_BYTES: Final = 107  # of a Unix socket on Linux
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OPEN: set[Any] = set()  # sockets of this process


def socket_path(shared: str) -> str:
    """The path of a batcher's socket from its name or its absolute path. Creates the directory.

    Names are in $PENSTOCK_RUNTIME_DIR, or in `penstock-UID` of the directory for temporary files. Raises ConfigError.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise ConfigError("a shared streamer needs Linux, which reports the user at the other end of a socket")
    if os.path.isabs(shared):
        path = os.path.normpath(shared)
    elif _NAME.fullmatch(shared):
        root = os.environ.get(DIRECTORY_VARIABLE)
        if not root:
            advice = f"{DIRECTORY_VARIABLE} to a directory of your own for the socket"
            root = f"{os_threads.temporary_folder(advice)}/penstock-{os.geteuid()}"
        path = os.path.join(os.path.abspath(root), f"{shared}.sock")
    else:
        raise ConfigError(
            f"shared: found {shared!r}, expected an absolute path, or a name of at most 64 letters, digits, '.', '_'"
            " and '-' that begins with a letter or a digit"
        )
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the path of the socket, {path}, has more than {MAX_PATH_BYTES} bytes: set {DIRECTORY_VARIABLE} to a"
            " shorter directory"
        )
    _check_directory(os.path.dirname(path))
    return path


def _check_directory(directory: str) -> None:
    """Creates the directory. Raises ConfigError unless this user owns it, and no other can use it."""
    try:
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass
        found = os.lstat(directory)
    except OSError as e:
        raise ConfigError(
            f"the directory {directory} for the socket cannot be made: {e.strerror}; set {DIRECTORY_VARIABLE}"
        ) from e
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{directory}, for the socket, is not a directory: remove it, or set {DIRECTORY_VARIABLE}")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the directory {directory} for the socket belongs to user {found.st_uid}, expected user {os.geteuid()}:"
            f" set {DIRECTORY_VARIABLE} to a directory of your own"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"the directory {directory} for the socket has mode {mode:04o}, expected 0700: others could reach the"
            f" socket; run chmod 700 {directory}"
        )


def connected(path: str) -> Any:
    """A socket that is connected to the batcher; None if none listens. Raises ConfigError."""
    sock = keep(os_threads.unix_socket())
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(path)
        check_peer(sock)
    except (FileNotFoundError, ConnectionRefusedError):  # never started; or dead, and its file is left
        close(sock)
        return None
    except BaseException as e:
        close(sock)
        if isinstance(e, OSError):
            raise ConfigError(f"the batcher at {path} cannot be reached: {e}") from e
        raise
    return sock


def listening(path: str) -> Any:
    """A non-blocking listener in place of the file that a dead batcher left. The caller holds the batcher's lock.

    Raises ConfigError if something else is at the path.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is not a socket: remove it, or use another name")
        os.unlink(path)
    except FileNotFoundError:
        pass
    sock = os_threads.unix_socket()
    before = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    sock.listen(socket.SOMAXCONN)
    sock.setblocking(False)
    return sock


def check_peer(sock: Any) -> None:
    """Raises ConfigError unless the process at the other end belongs to the user of this process."""
    uid = peer_uid(sock)
    if uid != os.geteuid():
        raise ConfigError(f"the other end of the socket belongs to user {uid}, expected user {os.geteuid()}")


def peer_uid(sock: Any) -> int:
    """The user of the process at the other end, as the kernel recorded it when that process connected or listened."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


def keep(sock: Any) -> Any:
    """The socket. A process that is forked before `close` closes its copy, so that the peer sees the end in time."""
    _OPEN.add(sock)
    return sock


def close(sock: Any) -> None:
    """Closes a socket of `keep`. Idempotent."""
    _OPEN.discard(sock)
    sock.close()


def _after_fork() -> None:
    for sock in list(_OPEN):
        close(sock)


os.register_at_fork(after_in_child=_after_fork)


START_S: Final = 60.0  # for a batcher to listen; it waits for the end of the previous batcher
GREET_S: Final = 10.0  # for its response to a new client
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
