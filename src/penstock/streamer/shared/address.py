"""Where processes of one user find a shared batcher: a Unix socket in a directory that only this user can enter.

Both ends check the user at the other end, which the kernel reports. So what crosses the socket crosses no trust
boundary: whoever can write to it can already read the memory of both processes and send them signals.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from typing import Any, Final

from penstock.core import os_threads
from penstock.errors import ConfigError

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
