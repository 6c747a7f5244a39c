"""The process of a server that belongs to the job: started with it, again after a crash or a hang, ended with it."""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from penstock.backoff import Backoff
from penstock.client.endpoint import ResponseTimeout, parse_url
from penstock.client.http import ClientConnection
from penstock.errors import PenstockError

_logger = logging.getLogger("penstock.bulk")

VLLM_PORT: Final = 8000
ATTEMPTS: Final = 5  # that end within `STABLE_S`, in a row
STABLE_S: Final = 60.0
END_S: Final = 20.0  # from SIGTERM to SIGKILL
HANG_S: Final = 60.0  # without a response; preprocessing can keep the event loop of vLLM busy for seconds
LOOK_S: Final = 5.0  # between two looks whether it responds
TAIL_BYTES: Final = 2000


class EngineFailed(PenstockError, code="engine_failed"):
    """The engine cannot be started, or ends again and again."""


def engine_url(command: str) -> str:
    """Where the server of a command listens: at its --port, or where vLLM does. Raises EngineFailed."""
    try:
        words = " ".join(shlex.split(command))
    except ValueError as e:
        raise EngineFailed(f"--engine: '{command}' is not a command: {e}") from None
    port = re.search(r"(?:^| )--port[= ](\d+)", words)
    return f"http://127.0.0.1:{port[1] if port else VLLM_PORT}"


class Engine:
    """Once the engine has ended too often, `check` raises, and `on_failure` has been called. `log` gets its output.

    An engine that accepts a connection and does not respond for `hang_s` hangs: it is killed, and starts again.
    """

    def __init__(
        self, command: str, log: Path, on_failure: Callable[[EngineFailed], None], *, hang_s: float = HANG_S
    ) -> None:
        self._on_failure, self._hang_s = on_failure, hang_s
        self.failure: EngineFailed | None = None
        self.url = engine_url(command)
        self._hung = ""  # why the process was killed
        self._words, self._log = shlex.split(command), log
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._started = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="penstock-engine", daemon=True)
        self._looker = threading.Thread(target=self._look, name="penstock-engine-look", daemon=True)

    def start(self) -> None:
        """Raises EngineFailed if there is no such program."""
        self._watcher.start()
        self._started.wait()
        self.check()
        self._looker.start()

    def check(self) -> None:
        """Raises EngineFailed."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Ends the process and those that it started."""
        self._ending.set()
        self._signal(signal.SIGTERM)
        self._watcher.join(END_S)
        self._signal(signal.SIGKILL)
        self._watcher.join(END_S)  # no signal ends a process that waits for a driver

    def restart(self, url: str, why: str) -> None:
        """Kills the engine, which then starts again, if it is the server at `url`. Called from any thread."""
        if url.replace("localhost", "127.0.0.1") == self.url:
            self._hung = why
            self._signal(signal.SIGKILL)

    def _look(self) -> None:
        while not self._ending.wait(LOOK_S):
            process = self._process
            if self._is_silent() and process is self._process and not self._ending.is_set():
                self.restart(self.url, f"it has not responded for {self._hang_s:g} s")

    def _is_silent(self) -> bool:
        """Whether it accepts a connection, which it does not do while it loads, and does not respond."""

        async def look() -> bool:
            connection = ClientConnection(parse_url(self.url), connect_timeout_s=self._hang_s)
            try:
                await connection.request("GET", "/health", [], timeout_s=self._hang_s)
            except ResponseTimeout:
                return True
            except PenstockError:
                pass  # it loads, or ends
            finally:
                connection.close()
            return False

        return asyncio.run(look())

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _watch(self) -> None:
        try:
            self._run()
        except EngineFailed as e:
            self.failure = e
            self._on_failure(e)
        finally:
            self._started.set()

    def _run(self) -> None:
        """One thread starts and awaits the process, because Linux ends the process with the thread that started it."""
        pause, ended = Backoff(1.0, 30.0), 0
        with self._log.open("ab") as log:
            while not self._ending.is_set():
                began_s = time.monotonic()
                try:
                    self._process = self._spawn(log)
                except OSError as e:
                    raise EngineFailed(f"--engine: cannot start {self._words[0]}: {e.strerror}") from None
                self._started.set()
                if self._ending.is_set():
                    self._signal(signal.SIGTERM)
                status = self._process.wait()
                self._signal(signal.SIGKILL)  # what it left behind would keep its port and its memory
                if self._ending.is_set():
                    return
                if time.monotonic() - began_s > STABLE_S:
                    ended = 0
                    pause.reset()
                ended += 1
                hung, self._hung = self._hung, ""
                how = f"was killed: {hung}" if hung else f"ended with status {status}"
                how += f"; what it printed is in {self._log}"
                if ended == ATTEMPTS:
                    raise EngineFailed(f"the engine was started {ended} times, and it {how}: {self._tail()}")
                _logger.warning("the engine %s; it starts again", how)
                self._ending.wait(pause.next_s())

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None)

        def with_parent() -> None:
            if sys.platform == "linux":
                libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the engine must not outlive a job that is killed

        return subprocess.Popen(
            self._words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=with_parent,
        )  # fmt: skip

    def _tail(self) -> str:
        """The last line that it printed."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "(nothing)")
