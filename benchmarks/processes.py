"""Process groups: started in their own folder, paused between their turns, and ended with all their children."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil

ACCEPT_QUEUE = 4096  # the kernel takes less if net.core.somaxconn says so
PIDFD_GETFD = 438  # the number of this system call on every machine


class Processes:
    """A program and all its children. Paused unless inside `awake()`, so an idle one costs nothing."""

    def __init__(self) -> None:
        self._tag = f"penstock-benchmark-{uuid.uuid4().hex}"
        self._folder = tempfile.mkdtemp(prefix="bench-")
        self._log = Path(self._folder, "log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _spawn(self, command: list[str], pass_fds: Sequence[int] = (), **env: str) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                cwd=self._folder,
                start_new_session=True,
                # ONNX Runtime sends no usage data from Penstock's workers, and so from no peer's
                env={**os.environ, "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": self._folder, "BENCH_TAG": self._tag, **env},
            )

    def _spawn_penstock(self, *words: str, **env: str) -> dict[str, str]:
        """Starts `penstock serve` with these words, on free ports; the URLs of its listeners, once it is ready."""
        command = [sys.executable, "-m", "penstock.cli.main", "serve", *words, "--set", "server.port=0"]
        command += [word for key in ("management", "metrics") for word in ("--set", f"server.{key}_port=0")]
        read, write = os.pipe()
        with open(read) as pipe:
            try:
                self._spawn(command, [write], PENSTOCK_READY_FD=str(write), **env)
            finally:
                os.close(write)
            line = pipe.readline()
        if not line:
            raise SystemExit(f"penstock did not start:\n{self._log.read_text()}")
        urls: dict[str, str] = json.loads(line)
        return urls

    def members(self) -> list[psutil.Process]:
        """The running processes: those in its session, and those that left it but carry its tag."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                mine = os.getsid(process.pid) == self.process.pid or process.environ().get("BENCH_TAG") == self._tag
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[Self]:
        """Runs it for the length of the block."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.stop()

    def lengthen_queues(self) -> None:
        """Raises the listen backlog of every listener, whatever the server requested.

        mosec requests 128: with 256 connections, half would retry a second later. If the kernel does not allow
        changes from outside, `wrk` detects runs with too few connections.
        """
        call = ctypes.CDLL(None).syscall
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                pidfd = os.pidfd_open(process.pid)
                try:
                    for c in process.net_connections("tcp"):
                        if c.status == psutil.CONN_LISTEN and (fd := call(PIDFD_GETFD, pidfd, c.fd, 0)) >= 0:
                            with socket.socket(fileno=fd) as listener:
                                listener.listen(ACCEPT_QUEUE)
                finally:
                    os.close(pidfd)

    def close(self) -> None:
        """Kills every process that was started here."""
        process = getattr(self, "process", None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for _ in range(100):  # a dying parent may have forked meanwhile
                if process.poll() is not None and not self.members():
                    break
                self._signal(signal.SIGKILL)
                time.sleep(0.05)
            else:
                raise RuntimeError(f"process {process.pid} cannot be killed: {self.members()}")
        shutil.rmtree(self._folder, ignore_errors=True)
