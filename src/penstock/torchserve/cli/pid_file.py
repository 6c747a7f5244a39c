"""The PID file: one server per temporary folder, started in the background and stopped through this file.

The server locks the file while it lives, so that a reused PID is never taken for the server. The file contains only
the PID, as TorchServe's own launcher reads and writes it.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from penstock.config.load import RESERVED
from penstock.core.os_threads import temporary_folder
from penstock.errors import ConfigError, Conflict

SERVER_MODULE: Final = "penstock.torchserve.cli.server"
JAVA_SERVER: Final = "org.pytorch.serve.ModelServer"  # TorchServe's process, which uses the same file
ALREADY_RUNNING: Final = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
NOT_RUNNING: Final = "TorchServe is not currently running."
STOP_S: Final = 60.0  # as TorchServe's launcher waits


def pid_path() -> str:
    """`.model_server.pid` in the temporary folder (TMPDIR, TEMP, TMP, else /tmp)."""
    return os.path.join(temporary_folder("TMPDIR to a folder for the PID file"), ".model_server.pid")


class PidFile:
    """The locked file of this process or of the server that it started."""

    def __init__(self, path: str) -> None:
        """Raises Conflict if a server runs already (one of two concurrent starts succeeds), ConfigError."""
        self._path = path
        while True:
            if running_pid(path) is not None:
                raise Conflict(ALREADY_RUNNING)
            try:
                self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}; set TMPDIR to a folder") from None
            if _lock(self._handle, fcntl.LOCK_EX) and _is_at(self._handle, path):
                break
            os.close(self._handle)
        self._write(os.getpid())

    def _write(self, pid: int) -> None:
        text = b"%d\n" % pid
        try:
            os.pwrite(self._handle, text, 0)
            os.ftruncate(self._handle, len(text))
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}; set TMPDIR to a folder") from None

    def start_in_background(self, arguments: Sequence[str], module: str = SERVER_MODULE) -> int:
        """Starts `python -m module` in a session of its own, with this process's output, and returns its PID.

        The child takes over the file. Its first argument is the name of TorchServe's main class, by which SageMaker's
        toolkit finds the server among all processes.
        """
        command = [sys.executable, "-m", module, JAVA_SERVER, *arguments]
        # descriptors that these variables name are this process's: the child would write to whatever has their number
        env = {name: value for name, value in os.environ.items() if name not in RESERVED}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=(self._handle,), env=env
        )
        self._write(child.pid)
        os.close(self._handle)
        child.returncode = 0  # the child outlives this process, so nothing waits for it
        return child.pid

    def remove(self) -> None:
        """Removes the file when the server ends."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path)
        os.close(self._handle)


def remove_own(path: str) -> None:
    """Removes the file if it names this process, which `start_in_background` started."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        if int(file.readline(32)) == os.getpid():
            os.remove(path)


def running_pid(path: str) -> int | None:
    """The server's PID, or None. Raises ConfigError for another user's file, which might name any process."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; remove it, or set TMPDIR to a folder") from None
    with os.fdopen(handle) as file:
        if os.fstat(handle).st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to another user; set TMPDIR to a folder of your own")
        try:
            pid = int(file.readline(32))
        except ValueError:
            pid = 0
        return pid if not _lock(handle, fcntl.LOCK_SH) or _is_java(pid) else None


def stop(path: str, wait_s: float = STOP_S) -> str:
    """Stops the server that the file names, waits for its end, and returns the message for the user."""
    pid = running_pid(path)
    if pid is None:
        _remove_orphan(path)
        return NOT_RUNNING
    try:
        ended = _terminate(pid, wait_s)
    except OSError:
        return "TorchServe already stopped."
    finally:
        _remove_orphan(path)
    return "TorchServe has stopped." if ended else "Stopping TorchServe took too long."


def _terminate(pid: int, wait_s: float) -> bool:
    """Sends SIGTERM; True if the process ended in time, even if its parent has not reaped it. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        handle = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGTERM)
            return bool(select.select([handle], [], [], wait_s)[0])
        finally:
            os.close(handle)
    import psutil

    try:
        process = psutil.Process(pid)
        process.terminate()
        process.wait(wait_s)
    except psutil.TimeoutExpired:
        return False
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from None
    return True


def _remove_orphan(path: str) -> None:
    """Removes the file if no server holds it. Locking first makes sure that a new server's file stays."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    if _lock(handle, fcntl.LOCK_EX) and _is_at(handle, path):
        os.remove(path)
    os.close(handle)


def _lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(handle: int, path: str) -> bool:
    """True if the path still leads to the open file, which another process may have removed."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_java(pid: int) -> bool:
    """True for a process of TorchServe, which holds no lock."""
    import psutil

    try:
        words = psutil.Process(pid).cmdline() if pid > 0 else []
    except psutil.Error:
        return False
    return JAVA_SERVER in words and SERVER_MODULE not in words
