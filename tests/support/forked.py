"""Worker processes that are forked in milliseconds, from a process that has imported what they need.

`forking(modules)` replaces the start of the interpreter for the workers of this process. Everything else is real. Only
for workers that borrow no memory: they are not children of the process that they work for.
"""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from penstock.core import os_threads
from penstock.core.transports import child

MOST_BYTES = 4096


class Forked:
    """A worker, as `subprocess.Popen` is one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def wait(self) -> int:
        if self.returncode is None:
            select.select([self._pidfd], [], [])
            os.close(self._pidfd)
            self.returncode = 0
        return 0


@contextmanager
def forking(modules: Sequence[str]) -> Iterator[None]:
    """Workers of this process are forked meanwhile. `modules` are imported before."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(sys.path), *modules]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL) as server, ours:
        theirs.close()

        def start(command: list[str], pass_fds: list[int], **keys: Any) -> Forked:
            numbers = [int(n) for n in command[-6:]]
            socket.send_fds(ours, [json.dumps([numbers, pass_fds]).encode()], pass_fds)
            return Forked(int(ours.recv(MOST_BYTES)))

        with mock.patch.object(os_threads, "popen", start):
            yield
        ours.close()
        server.wait()


def serve(sock: socket.socket) -> None:
    """Forks a worker for each request, until the other end closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    parent = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MOST_BYTES, 3)
        if not data:
            return
        if pid := os.fork():
            sock.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
            continue
        sock.close()
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        numbers, named = json.loads(data)
        known = dict(zip(named, fds, strict=True))
        _, own, pool, pool_bytes, reply, reply_bytes = numbers
        fds = [known[own], known.get(pool, -1), pool_bytes, known[reply], reply_bytes]
        child.main([str(n) for n in (parent, *fds)])


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    for name in sys.argv[3:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
