"""A server under measurement: a process of its own, and single blocking requests to it before or after a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from penstock.client.endpoint import Endpoint
from penstock.client.http import ClientConnection
from penstock.client.response import HttpResponse
from penstock.errors import USAGE, ConfigError, PenstockError

START_S: Final = 300.0  # the first start of a model may compile it
STOP_S: Final = 15.0
USAGE_PREFIX: Final = "penstock: "  # of the line that reports wrong usage
_TAIL: Final = 4000  # characters of output in an error
_MOST_OUTPUT: Final = 2**20  # bytes; a model may print without end
# It would otherwise go to the background, and the next server would continue with the models of this one.
_TORCHSERVE_FLAGS: Final = ("--foreground", "--no-config-snapshots")


def fetch(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    content_type: str = "application/json",
    token: str | None = None,
    timeout_s: float = 10.0,
) -> HttpResponse:
    """The response to one request on a new connection; `path` follows the endpoint's prefix. Blocks the thread, which
    must not run an event loop.

    The parameters are those of an HTTP request. Raises as `ClientConnection.request` does.
    """
    headers = [] if body is None else [("Content-Type", content_type)]
    if token is not None:
        headers.append(("Authorization", f"Bearer {token}"))

    async def exchange(connection: ClientConnection) -> HttpResponse:
        try:
            return await connection.request(method, path, headers, [body or b""], timeout_s=timeout_s)
        finally:
            connection.close()

    return asyncio.run(exchange(ClientConnection(endpoint, connect_timeout_s=timeout_s)))


def check_reachable(endpoint: Endpoint) -> None:
    """Raises Unreachable or UntrustedCertificate if no connection can be opened."""

    async def connect(connection: ClientConnection) -> None:
        await connection.connect()
        connection.close()

    asyncio.run(connect(ClientConnection(endpoint)))


def error_line(output: str) -> str:
    """The last error that a command printed, without its prefix; "" if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(USAGE_PREFIX)]
    return lines[-1].removeprefix(USAGE_PREFIX) if lines else ""


class ServerProcess:
    """`penstock serve ARGUMENTS` or `penstock torchserve ARGUMENTS` on free ports of this machine.

    `urls` maps its listeners (inference, management, metrics) to URLs. The environment does not configure it. It has
    its own process group, so that Ctrl-C reaches only the parent, and it stops when this process ends.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        verb: Literal["serve", "torchserve"] = "serve",
        port: int = 0,
        management: bool = False,
        properties: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_s: float = START_S,
    ) -> None:
        """`management` enables management requests that change models. `properties` are keys of config.properties
        (torchserve only). Many parameters: all but the first are keyword options of the process."""
        self.urls: dict[str, str] = {}
        self._verb, self._arguments, self._port = verb, list(arguments), port
        self._management, self._properties = management, dict(properties or {})
        self._cwd, self._start_s = cwd, start_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._alive_fd = -1  # the server stops when this end of the pipe closes
        self._output = ""
        self._stopping = threading.Lock()

    def start(self) -> ServerProcess:
        """Returns the server once its models are ready. Blocks; `stop` from another thread ends the wait.

        Raises PenstockError with the end of its output if it does not start, ConfigError if it reports wrong usage.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        ready, report_fd = os.pipe()
        watched, self._alive_fd = os.pipe()
        try:
            try:
                self._spawn(report_fd, watched)
            finally:
                os.close(report_fd)
                os.close(watched)
            with os.fdopen(ready, "rb") as pipe:  # readable with the line of URLs, and at the end of the process
                line = pipe.readline() if select.select([pipe], [], [], self._start_s)[0] else None
        except BaseException:
            self.stop()
            raise
        if not line:
            self.stop()
            if wrong := self._wrong_usage():
                raise ConfigError(wrong)
            why = f"is not ready after {self._start_s:g} s" if line is None else "did not start"
            raise PenstockError(f"the server {why}; its output:\n{self.output_tail()}")
        self.urls = json.loads(line)
        return self

    def __enter__(self) -> ServerProcess:
        return self if self.urls else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the server; its workers are its children."""
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        assert self._process is not None, "started"
        self._process.wait()

    def output(self) -> str:
        """The output of the server and its workers, at most the last 1 MiB; also after `stop`."""
        if self._folder is not None:
            with contextlib.suppress(OSError), self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _MOST_OUTPUT))
                self._output = log.read(_MOST_OUTPUT).decode(errors="replace")
        return self._output

    def output_tail(self) -> str:
        """The end of the output, for an error."""
        return self.output()[-_TAIL:].strip()

    def _wrong_usage(self) -> str:
        """The reported usage error; "" if the process ended for another reason."""
        if self._verb != "serve" or self._process is None or self._process.returncode != USAGE:
            return ""
        return error_line(self.output())

    def stop(self) -> None:
        """Shuts the server down gracefully and kills it after 15 s. Idempotent."""
        with self._stopping:
            process = self._process
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self.output()
            if self._alive_fd >= 0:
                os.close(self._alive_fd)
                self._alive_fd = -1
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    @property
    def _log(self) -> Path:
        assert self._folder is not None, "started and not stopped"
        return Path(self._folder.name) / "output"

    def _spawn(self, ready_fd: int, parent_fd: int) -> None:
        fds = {"PENSTOCK_READY_FD": str(ready_fd), "PENSTOCK_PARENT_FD": str(parent_fd)}
        with self._log.open("wb") as log:  # a full pipe would block the server
            self._process = subprocess.Popen(
                self._command(),
                pass_fds=(ready_fd, parent_fd),
                cwd=self._cwd,
                env={**self._environment(), **fds},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "penstock.cli.main", self._verb, *self._arguments]
        if self._verb == "torchserve":
            return [*command, *_TORCHSERVE_FLAGS, "--ts-config", str(self._write_properties())]
        sets = ["server.management_port=0", "server.metrics_port=0"]
        sets += ["server.management=true"] * self._management
        return [*command, "--port", str(self._port), *(word for text in sets for word in ("--set", text))]

    def _environment(self) -> dict[str, str]:
        """The environment of this process without settings of other servers."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TS_"))}
        if self._verb == "torchserve":  # it allows one server per temporary folder
            assert self._folder is not None
            env |= dict.fromkeys(("TMPDIR", "TEMP", "LOG_LOCATION", "METRICS_LOCATION"), self._folder.name)
        return env

    def _write_properties(self) -> Path:
        assert self._folder is not None
        keys = {f"{group}_address": "http://127.0.0.1:0" for group in ("inference", "management", "metrics")}
        keys["inference_address"] = f"http://127.0.0.1:{self._port}"
        keys |= {"grpc_inference_port": "0", "grpc_management_port": "0", "disable_token_authorization": "true"}
        keys["enable_model_api"] = "true" if self._management else "false"
        path = Path(self._folder.name) / "config.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in {**keys, **self._properties}.items()))
        return path
