"""Shared batchers in tests: a directory of their own, programs that use them, and a look at what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.waiting import wait_for


class Batchers:
    """The batchers whose sockets are in one folder, and the programs that use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs: list[subprocess.Popen[str]] = []

    def running(self) -> list[psutil.Process]:
        """The processes of the batchers, also of those that wait for an earlier one to end."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "penstock.streamer.shared.batcher" in line and any(str(self.folder) in word for word in line):
                    found.append(process)
        return found

    def start(self, program: str, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """Starts a Python program, whose text is given, in the folder `cwd`."""
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            cwd=cwd, env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._programs.append(process)
        return process

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(p for p in sys.path if p)
        return {**os.environ, "PENSTOCK_RUNTIME_DIR": str(self.folder), "PYTHONPATH": path}

    def kill(self) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()
        for process in self.running():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def sockets(self) -> list[Path]:
        """The files of sockets, also those that dead batchers left."""
        return [path for path in self.folder.iterdir() if path.is_socket()]

    def log(self) -> str:
        """What the batchers of the folder have logged."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def batchers(folder: Path) -> Iterator[Batchers]:
    """Batchers in this folder; at the end all of them end by themselves."""
    found = Batchers(folder)
    try:
        yield found
        wait_for(lambda: not found.running())
    finally:
        found.kill()
