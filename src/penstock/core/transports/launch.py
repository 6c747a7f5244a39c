"""Starts a worker process with its socket, shared memory and environment, all unnamed."""

import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from penstock.core import os_threads
from penstock.core.wire.messages import Buffer, Pickled, frame_of
from penstock.core.wire.slabs import SlabPool, anonymous_file
from penstock.core.worker.devices import environment
from penstock.core.worker.nesting import DEPTH_VARIABLE, may_start_workers
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import LoadFailed
from penstock.plugins import FILE_MODULE, module_name

_MAINS = (b"__main__", b"__mp_main__")  # of a script, and of a script spawned by multiprocessing


class Child(Struct, eq=False):
    """The parent's handle of a running worker process."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    pidfd: int | None  # readable when the process has ended; None if the system has no pidfd
    replies: mmap.mmap
    output_fd: int | None = None  # its output; None: it shares the parent's stdout and stderr
    reply_fd: int = -1  # of `replies`, if they are lent

    def kill(self) -> None:
        """Kills the process and what it has started. Only before `ended`: later the number may be another's."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: all of them are zombies
            os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> str:
        """How the process ended, in words. It must have ended, or be about to. Ends what it has left behind."""
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # the parent ignores SIGCHLD
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
                self.kill()  # its number is still its own: it is not reaped yet
        code = self.process.wait()
        if code >= 0:
            return f"exited with code {code}"
        if code == -signal.SIGKILL:  # not by its transport, which would know why
            return "was killed by SIGKILL: probably memory ran out, see the limit of the container or the machine"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def close(self) -> None:
        self.sock.close()
        if self.reply_fd >= 0:
            os.close(self.reply_fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        with suppress(BufferError):  # objects still refer to it: the last one unmaps it
            self.replies.close()

    def forget(self) -> None:
        """In a forked child: closes its copies, and keeps it from waiting for a process that is not its own."""
        self.process.returncode = 0
        self.close()
        if self.output_fd is not None:
            os.close(self.output_fd)


class PackedSpec(Struct, frozen=True):
    """A spec for the worker, and the files to load before it: (location, module name). The module `main` is also
    `__main__` in the worker."""

    data: bytes
    files: list[tuple[str, str]] = []
    main: str = ""


class PackedTarget(Pickled):
    """A pickled target, and what a worker loads before it; see PackedSpec. A worker receives it as Pickled."""

    __slots__ = ("data", "files", "main")

    def __init__(self, data: bytes, files: list[tuple[str, str]], main: str) -> None:
        super().__init__(data, [])
        self.data, self.files, self.main = data, files, main

    def __reduce__(self) -> tuple[object, ...]:
        return Pickled, (self.data, [])


def pack_spec(spec: WorkerSpec) -> PackedSpec:
    """Raises LoadFailed, naming what cannot be sent."""
    data = _dumps(spec, spec.target)
    if isinstance(spec.target, PackedTarget):  # perhaps of another program, whose main module this is not
        return PackedSpec(data, spec.target.files, spec.target.main)
    return PackedSpec(data, *_needed(data))


def pack_target(target: Any) -> PackedTarget:
    """The packed target for workers that start later: only the thread that imports a module can pack its objects
    while the import is in progress. Raises LoadFailed, naming what cannot be sent."""
    data = _dumps(target, target)
    return PackedTarget(data, *_needed(data))


def _dumps(value: object, target: Any) -> bytes:
    try:
        return pickle.dumps(value, 5)
    except Exception as e:
        raise LoadFailed(_unsendable(target, e), detail=repr(e)) from e


def _unsendable(target: Any, why: Exception) -> str:
    arguments: dict[str, Any] = {}
    if isinstance(target, Wrapped):
        target, arguments = target.target, target.arguments
    for name, value in arguments.items():
        try:
            pickle.dumps(value, 5)
        except Exception as e:
            return f"{name}, a {type(value).__name__}, cannot be sent to a worker process ({e})"
    return (
        f"the target, a {type(target).__name__}, cannot be sent to a worker process ({why}): "
        "give a function or class at the top level of a file, or a string such as app.py:Model"
    )


def _needed(data: bytes) -> tuple[list[tuple[str, str]], str]:
    """The files, and the main module, that a worker needs to unpickle `data`; see PackedSpec. Raises LoadFailed."""
    main = sys.modules["__main__"]
    if any(name in data for name in _MAINS):
        where, name = _script(main)
        sys.modules.setdefault(name, main)  # results with the script's classes return under this name
        return [(where, name)], name
    named = [name for name in list(sys.modules) if name.startswith(FILE_MODULE) and name.encode() in data]
    files = [(str(sys.modules[name].__file__), name) for name in named]
    return files, next((name for name in named if sys.modules[name] is main), "")


def _script(main: Any) -> tuple[str, str]:
    """(location of the parent's script, its name in a worker, where `__main__` is another). Raises LoadFailed."""
    module, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if module is None and not (file and os.path.isfile(file)):
        raise LoadFailed(
            "the target needs the main program, which has no file that a worker process could load: give a function"
            " or class at the top level of a file"
        )
    path = Path(file or "").resolve()
    if path.suffix == ".py" and b"__name__" not in path.read_bytes():
        raise LoadFailed(
            f"{path.name} has no line if __name__ == '__main__': each worker process imports the file of its function"
            " or class, and would run the main code again; put that code under such a line"
        )
    return (module.name, module.name) if module is not None else (str(path), module_name(path))  # python -m


def python() -> str:
    """The interpreter of this environment. `sys.executable` of a server with Python built in, such as uWSGI, is the
    server, or the Python outside of the virtual environment."""
    folder, name = os.path.split(sys.executable)
    outside = sys.prefix != sys.base_prefix and not folder.startswith(sys.prefix)
    if not outside and ("python" in name or "pypy" in name):
        return sys.executable
    found = os.path.join(sys.prefix, "bin", "python3")
    return found if os.path.exists(found) else sys.executable


def _paths(spec: WorkerSpec) -> list[str | None]:
    """Where a worker looks for modules; None stands for the paths of an interpreter of its own."""
    own = filter(None, spec.config.env.get("PYTHONPATH", "").split(os.pathsep))
    if spec.config.python is None:
        return list(dict.fromkeys([*spec.sys_path, *own, *(p or os.getcwd() for p in sys.path)]))
    given = (path for path in spec.sys_path if not path.startswith((sys.prefix, sys.base_prefix)))
    return list(dict.fromkeys([*given, *own, None]))


def launch(
    spec: WorkerSpec, packed: PackedSpec, device: str, pool: SlabPool | None, reply_bytes: int
) -> tuple[Child, list[Buffer]]:
    """(a started child, its first message). Raises OSError; LoadFailed in a worker that must not start another."""
    depth = may_start_workers()
    env, inner_device = environment(spec, device, os.environ)
    env[DEPTH_VARIABLE] = str(depth + 1)
    ours, theirs = os_threads.socketpair()
    reply_fd = write_fd = -1
    read_fd = None
    try:
        reply_fd = anonymous_file(reply_bytes)
        pool_fd, pool_bytes = (pool.fd, pool.capacity_bytes) if pool is not None else (-1, 0)
        if spec.capture_output:
            read_fd, write_fd = os.pipe()
        numbers = [os.getpid(), theirs.fileno(), pool_fd, pool_bytes, reply_fd, reply_bytes]
        process = os_threads.popen(
            [spec.config.python or python(), "-P", "-m", "penstock.core.transports.child", *map(str, numbers)],
            pass_fds=[fd for fd in (theirs.fileno(), pool_fd, reply_fd) if fd >= 0],
            env=env,
            stdin=subprocess.DEVNULL,
            # where this process started without, the descriptor may be any file's
            stdout=write_fd if write_fd >= 0 else None if sys.__stdout__ else subprocess.DEVNULL,
            stderr=write_fd if write_fd >= 0 else None if sys.__stderr__ else subprocess.DEVNULL,
            process_group=0,  # its own group: its children end with it, and Ctrl-C reaches the parent only
        )
        replies = mmap.mmap(reply_fd, reply_bytes)
        if not spec.lends:  # the map has a descriptor of its own
            os.close(reply_fd)
            reply_fd = -1
    except BaseException:
        ours.close()
        for fd in (reply_fd, read_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        raise
    finally:
        theirs.close()
        if write_fd >= 0:
            os.close(write_fd)
    pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    ours.setblocking(False)
    head = pickle.dumps((_paths(spec), inner_device, device, packed.files, packed.main), 5)
    return Child(process, ours, pidfd, replies, read_fd, reply_fd), frame_of(head, [packed.data])
