"""A server in a process of its own, for as long as it is measured: started, watched, and ended with its parent."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from penstock.client.endpoint import Endpoint
from penstock.client.errors import ConnectionLost, MalformedResponse, ResponseTimeout, Unreachable, UntrustedCertificate
from penstock.errors import ConfigError, PenstockError

MOST_BYTES: Final = 2**24  # of an answer that is read: a page of metrics has some 100 kB


class Reply(Struct, frozen=True):
    """The answer, whatever its status."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:500].decode(errors="replace").strip()

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


def fetch(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    content_type: str = "application/json",
    token: str | None = None,
    timeout_s: float = 10.0,
) -> Reply:
    """The answer to one request, on a connection of its own; `path` is put behind the endpoint's prefix.

    Raises Unreachable, UntrustedCertificate, ResponseTimeout, ConnectionLost, MalformedResponse.
    """
    headers = {"Connection": "close"}
    if body is not None:
        headers["Content-Type"] = content_type
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection = _opened(endpoint, timeout_s)
    try:
        connection.request(method, endpoint.prefix + path, body, headers)
        answer = connection.getresponse()
        return Reply(answer.status, _body(answer, time.monotonic() + timeout_s))
    except TimeoutError:
        raise ResponseTimeout(f"{endpoint.url} has not answered within {timeout_s:g} s") from None
    except OSError as exc:  # http.client.RemoteDisconnected too
        raise ConnectionLost(f"{endpoint.url}: the connection ended before the answer: {exc}") from None
    except http.client.HTTPException as exc:
        raise MalformedResponse(f"{endpoint.url} does not answer in HTTP: {type(exc).__name__}: {exc}") from None
    finally:
        connection.close()


def check_reachable(endpoint: Endpoint, timeout_s: float = 10.0) -> None:
    """Whether anybody is there: raises Unreachable, UntrustedCertificate."""
    _opened(endpoint, timeout_s).close()


def _body(answer: http.client.HTTPResponse, until_s: float) -> bytes:
    """Also of a server that sends for ever. Raises TimeoutError."""
    body = bytearray()
    while len(body) < MOST_BYTES and (part := answer.read1(MOST_BYTES - len(body))):
        body += part
        if time.monotonic() > until_s:
            raise TimeoutError
    return bytes(body)


def _opened(endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    if endpoint.tls is None:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=endpoint.tls)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as exc:
        raise UntrustedCertificate(f"{endpoint.url}: certificate not trusted: {exc.verify_message}") from None
    except OSError as exc:  # also a name that is not known, TLS that is not spoken, and the timeout
        raise Unreachable(f"{endpoint.url}: cannot connect: {exc.strerror or exc}") from None
    except UnicodeError:
        raise Unreachable(f"{endpoint.url}: '{endpoint.host}' is no name that a host can have") from None
    return connection


Verb = Literal["serve", "torchserve"]

START_S: Final = 300.0  # the first start of a model may compile it
STOP_S: Final = 15.0
USAGE: Final = 2  # exit status of `penstock serve` for what is wrong in its words, which it tells in a line
TOLD: Final = "penstock: "  # at the beginning of that line
_SAID: Final = 4000  # characters of what it said, in the error of one that did not start
_KEPT: Final = 2**20  # bytes of what it said: a model may print for ever
_TORCHSERVE_FLAGS: Final = ("--foreground", "--no-config-snapshots")


class ServerProcess:
    """`penstock serve ARGUMENTS` or `penstock torchserve ARGUMENTS`, on free ports of this machine.

    `urls` has its listeners by name: inference, management, metrics. Nothing of the environment configures it, it is
    in a process group of its own (Ctrl-C is the parent's alone), and it stops when this process is gone.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        verb: Verb = "serve",
        port: int = 0,
        management: bool = False,
        properties: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        start_s: float = START_S,
    ) -> None:
        """`management` lets models be changed by requests. `properties` are keys of config.properties (torchserve)."""
        self.urls: dict[str, str] = {}
        self._verb, self._arguments, self._port = verb, list(arguments), port
        self._management, self._properties = management, dict(properties or {})
        self._cwd, self._env, self._start_s = cwd, dict(env or {}), start_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._alive_fd = -1  # the end of it tells the server that this process is gone
        self._said = ""
        self._stopping = threading.Lock()

    def start(self) -> ServerProcess:
        """Returns it once its models can answer; blocks, and `stop` of another thread ends the wait.

        Raises PenstockError, with the last it said, if it does not start; ConfigError if it takes what it is to serve
        for wrong usage.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        ready, told = os.pipe()
        watched, self._alive_fd = os.pipe()
        try:
            try:
                self._spawn(told, watched)
            finally:
                os.close(told)
                os.close(watched)
            with os.fdopen(ready, "rb") as pipe:
                # Readable at the line, and at the process's end too.
                line = pipe.readline() if select.select([pipe], [], [], self._start_s)[0] else None
        except BaseException:
            self.stop()
            raise
        if not line:
            self.stop()
            if wrong := self._wrong_usage():
                raise ConfigError(wrong)
            why = f"is not ready after {self._start_s:g} s" if line is None else "did not start"
            raise PenstockError(f"the server {why}; it said:\n{self.last_words()}")
        self.urls = json.loads(line)
        return self

    def __enter__(self) -> ServerProcess:
        return self if self.urls else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Number of the serving process; its workers are its children."""
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the serving process runs."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Returns when it ends by itself, or is stopped."""
        assert self._process is not None, "started"
        self._process.wait()

    def said(self) -> str:
        """What it and its workers printed so far, of more than 1 MiB the end; also after `stop`."""
        if self._folder is not None:
            with contextlib.suppress(OSError), self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _KEPT))
                self._said = log.read(_KEPT).decode(errors="replace")
        return self._said

    def last_words(self) -> str:
        """The end of what it said, for an error."""
        return self.said()[-_SAID:].strip()

    def _wrong_usage(self) -> str:
        """What it said of it; "" if it did not end by that."""
        if self._verb != "serve" or self._process is None or self._process.returncode != USAGE:
            return ""
        told = [line for line in self.said().splitlines() if line.startswith(TOLD)]
        return told[-1].removeprefix(TOLD) if told else ""

    def stop(self) -> None:
        """Ends it: what it has is answered, and after 15 s it is killed. May be called more than once."""
        with self._stopping:
            process = self._process
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self.said()
            if self._alive_fd >= 0:
                os.close(self._alive_fd)
                self._alive_fd = -1
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    @property
    def _log(self) -> Path:
        assert self._folder is not None, "started and not stopped"
        return Path(self._folder.name) / "said"

    def _spawn(self, ready_fd: int, parent_fd: int) -> None:
        fds = {"PENSTOCK_READY_FD": str(ready_fd), "PENSTOCK_PARENT_FD": str(parent_fd)}
        with self._log.open("wb") as log:  # a pipe that nobody reads would stop who says much
            self._process = subprocess.Popen(
                self._command(),
                pass_fds=(ready_fd, parent_fd),
                cwd=self._cwd,
                env={**self._environment(), **self._env, **fds},
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
        """That of this process, without the settings of other servers."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TS_"))}
        if self._verb == "torchserve":  # one server a temporary folder
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
