"""Threads, locks, loops, cores and files of the operating system, even after gevent has patched the standard library.

A patched `threading` module creates greenlets, and a blocked greenlet would stop the background loop. This module does
not import gevent, because a patched program has already imported it.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import fcntl
import functools
import importlib.util
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import asyncio


def patched() -> bool:
    """Whether gevent has patched `threading`."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _original(module: str, name: str) -> Any:
    return sys.modules["gevent.monkey"].get_original(module, name)


def new_lock() -> Any:
    """A lock that blocks the whole thread, including its greenlets."""
    return _original("_thread", "allocate_lock")() if patched() else threading.Lock()


def new_rlock() -> Any:
    """A lock that its thread may take again, for what a garbage collection may call."""
    return _original("_thread", "RLock")() if patched() else threading.RLock()


def new_queue() -> Any:
    """A `queue.SimpleQueue` between threads."""
    return _original("queue", "SimpleQueue")() if patched() else queue.SimpleQueue()


thread_id: Final[Callable[[], int]] = _original("_thread", "get_ident") if patched() else _thread.get_ident
"""The identifier of this thread, the same for all of its greenlets: gevent does not patch what was imported before."""


def processor_clock() -> int:
    """The clock of this thread's processor time, for `time.clock_gettime`; without such clocks, that of the process."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return time.CLOCK_PROCESS_CPUTIME_ID
    return time.pthread_getcpuclockid(thread_id())


def start_thread(
    main: Callable[..., None], *arguments: object, name: str, leave: Callable[[], None] | None = None
) -> None:
    """Runs `main(*arguments)` in a daemon thread.

    A thread that runs models has a `leave`, which makes `main` return soon. The interpreter calls it when it exits,
    waits for such threads, and interrupts those that still run after half of EXIT_S.
    """
    if leave is not None:
        main, arguments = _run_joined, (leave, main, *arguments)
    if patched():
        _original("_thread", "start_new_thread")(main, arguments)
    else:
        threading.Thread(target=main, args=arguments, name=name, daemon=True).start()


# When the interpreter ends, it unwinds each daemon thread that wants it back. C++ code that had released it, as torch
# does in each operator, does not expect that: the process aborts ("terminate called without an active exception").
EXIT_S: Final = 2.0
UNWOUND_S: Final = 10  # most that the rest of the exit may take beside calls that do not return
_joined: dict[Any, _JoinedThread] = {}  # by a lock that each holds while it runs


class _JoinedThread(NamedTuple):
    pid: int  # a fork keeps none of its parent's threads
    number: int
    leave: Callable[[], None]

    def interrupt(self) -> None:
        """Raises SystemExit in the thread, between two operators of a long call."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.number), ctypes.py_object(SystemExit))


def _run_joined(leave: Callable[[], None], main: Callable[..., None], *arguments: object) -> None:
    running = new_lock()
    running.acquire()
    _joined[running] = _JoinedThread(os.getpid(), thread_id(), leave)
    try:
        main(*arguments)
    finally:
        del _joined[running]
        running.release()


@atexit.register  # runs after those of the modules that import this one
def _join_threads() -> None:
    end = time.monotonic() + EXIT_S
    threads = {running: thread for running, thread in _joined.copy().items() if thread.pid == os.getpid()}
    for thread in threads.values():
        thread.leave()
    for running, thread in threads.items():
        if not running.acquire(timeout=max(0.0, end - EXIT_S / 2 - time.monotonic())):
            thread.interrupt()
            if not running.acquire(timeout=max(0.0, end - time.monotonic())):
                _park_unwound_threads()


def _park_unwound_threads() -> None:
    """Makes `std::terminate` put its thread to sleep, until the process has exited or a timer kills it."""
    with suppress(OSError, AttributeError, ValueError):  # no C++ code is loaded, or this is not the main thread
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library["_ZSt13set_terminatePFvvE"](ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
        signal.alarm(UNWOUND_S)


def usable_cores() -> int:
    """The number of cores that this process may use: its affinity, and the CPU quota of its container, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, cpu_quota(Path("/"))))


def cpu_quota(root: Path) -> float:
    """The CPU time per second that the cgroup of this process and those above it allow; inf without a limit.

    A container may see its own cgroup as the top one, at a path that its system does not have: missing levels are
    skipped. `root` is the root of the file system.
    """
    quotas, cgroups = [math.inf], root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = {"", "unified"} if not controllers else {controllers, "cpu"} if "cpu" in controllers.split(",") else ()
        own = Path(path.lstrip("/"))
        quotas += [_quota_of(cgroups / name / level) for name in names for level in (own, *own.parents)]
    return min(quotas)


def _quota_of(cgroup: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # of version 2, and of version 1
        try:
            quota, period = map(float, " ".join((cgroup / name).read_text() for name in names).split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:  # -1: no limit
            return quota / period
    return math.inf


def keep_standard_files() -> None:
    """Opens /dev/null in place of closed descriptors 0 to 2, which the next file, socket or event loop would get.

    What is printed would then end up in that file, and libuv aborts when it closes one of these numbers.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def silence(stream: Any) -> None:
    """Sends what a stream of descriptor 1 or 2 has not written, and all that follows, to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def temporary_folder(advice: str) -> str:
    """The directory for temporary files. Raises ConfigError, which ends with `advice`, if there is none to write to."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(f"no directory for temporary files can be written; set {advice}") from None


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name, replacing an older one, when the block ends without an error. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop."""
    keep_standard_files()
    import uvloop  # here, because workers load this module

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets without gevent's hooks."""
    if not patched():
        return socket.socketpair()
    import _socket

    return cast(tuple[socket.socket, socket.socket], _socket.socketpair())


def unix_socket() -> socket.socket:
    """An unconnected Unix socket without gevent's hooks."""
    if not patched():
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    import _socket

    return cast(socket.socket, _socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def popen(*arguments: Any, **keys: Any) -> subprocess.Popen[bytes]:
    """A `subprocess.Popen` without gevent's hooks."""
    process: subprocess.Popen[bytes] = (_subprocess() if patched() else subprocess).Popen(*arguments, **keys)
    return process


def run_detached(command: list[str], files: dict[int, int]) -> None:
    """Runs a command that forks and ends at once, and leaves its child behind. `files`: its descriptors, from ours.

    Other threads may fork meanwhile: a `Popen` would then wait for the end of the forked processes, which keep its
    pipe. The command must close descriptors that it inherits besides `files`.
    """
    spawn, wait = (_original("os", f) if patched() else getattr(os, f) for f in ("posix_spawn", "waitpid"))
    # above all of theirs: no copy overwrites another one's source
    copies = {theirs: fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, max(files) + 1) for theirs, ours in files.items()}
    try:
        actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in copies.items()]
        pid = spawn(command[0], command, os.environ, file_actions=actions)
    finally:
        for ours in copies.values():
            os.close(ours)
    try:
        wait(pid, 0)
    except ChildProcessError:  # a server that waits for all of its children was faster
        pass


@functools.cache
def _subprocess() -> Any:
    """An unpatched copy of the module: gevent removes functions that its classes need."""
    spec = importlib.util.find_spec("subprocess")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
