from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0


class RunningExample:
    """`python ARGUMENTS` in an example's folder; with `url` its start is waited for until it says where it listens."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], env: dict[str, str], url: bool) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stop who says much
        # The background jobs of a shell ignore Ctrl-C, and so would all that they start.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **env},
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self.url = self._address() if url else ""

    def _address(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:[1-9][0-9]*", self.said())
            if found:
                return found[0]
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"no address was said within {START_S:g} s, exit {self.process.wait()}\n{self.said()}")

    def get(self, path: str) -> tuple[int, Any]:
        return self._fetch(urllib.request.Request(self.url + path))

    def post(self, path: str, body: bytes, content_type: str = "application/x-www-form-urlencoded") -> tuple[int, Any]:
        return self._fetch(urllib.request.Request(self.url + path, body, {"content-type": content_type}))

    @staticmethod
    def _fetch(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as e:
            with e:
                return e.code, json.load(e)

    def said(self) -> str:
        """What it wrote so far, to stdout and stderr."""
        return os.pread(self._log.fileno(), 2**24, 0).decode(errors="replace")

    def interrupt(self) -> int:
        """The exit status after Ctrl-C, which its workers get too. Raises when one of them outlives it."""
        os.killpg(self.process.pid, signal.SIGINT)
        status = self.process.wait(30)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return status
            time.sleep(0.05)
        raise RuntimeError(f"a process of {self.process.args} is left")

    def close(self) -> None:
        """Ends it and all that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self._log.close()


def _running() -> Iterator[Callable[..., RunningExample]]:
    running: list[RunningExample] = []

    def start(folder: Path, *arguments: str, env: dict[str, str] | None = None, url: bool = True) -> RunningExample:
        running.append(RunningExample(folder, arguments, env or {}, url))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def example() -> Iterator[Callable[..., RunningExample]]:
    """Starts examples: `example(folder, "flask_example.py", "--port", "0")`."""
    yield from _running()


@pytest.fixture(scope="module")
def example_all() -> Iterator[Callable[..., RunningExample]]:
    """`example` for the tests of one file together."""
    yield from _running()
