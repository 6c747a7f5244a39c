from __future__ import annotations

import compileall
import faulthandler
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's load, not the code's fault.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A gate gives the same answer twice; searching is for developers.
settings.register_profile("ci", settings.get_profile("tests"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "tests")

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # no test tells anybody

_OMP = os.environ.get("OMP_WAIT_POLICY")

if sys.dont_write_bytecode:  # each of many hundred processes would compile Penstock for itself, a third of its start
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2, workers=os.cpu_count() or 1)


def pytest_collectstart() -> None:
    """Lets no idle threads of OpenMP spin beside the servers that tests wait for; what tests start chooses for itself.

    Asked before the first test is imported, and not by the process which only hands out the tests of `pytest -n`: what
    it has in its environment, the others would have for good.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_finish() -> None:
    """Leaves what all tests have in common, millions of objects, out of every garbage collection that follows."""
    gc.collect()
    gc.freeze()
    if _OMP is None:
        os.environ.pop("OMP_WAIT_POLICY", None)  # torch, which reads it once, is loaded


@pytest.fixture(scope="module", autouse=True)
def left_out() -> None:
    """Leaves out, too, what the tests of other files have loaded since, where that is much: some collect very often."""
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item) -> None:
    """Arms again the watch over hanging tests, which pytest disarms here: a failed test may hang when torn down."""
    seconds = float(node.config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(seconds, exit=True, file=node.config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a process of `pytest -n` tells of a test, where half a character, which no UTF-8 has, is spelt out."""
    return _spelt_out((yield))


def _spelt_out(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _spelt_out(each) for key, each in value.items()}
    return type(value)(map(_spelt_out, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True)
def own_surroundings() -> Iterator[None]:
    """Takes back what a test put on `sys.path` and into the environment: workers and later tests get both."""
    path, env = sys.path[:], dict(os.environ)
    yield
    sys.path[:] = path
    if os.environ != env:
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update(env)


SERVE = [sys.executable, "-m", "penstock.cli.main", "serve"]
FREE_PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]


class RunningServer:
    """A real `penstock serve` in a process of its own; `urls` has its three listeners."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str]) -> None:
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stop who says much
        self.process = subprocess.Popen(
            [*SERVE, *arguments, *FREE_PORTS],
            pass_fds=[write],
            cwd=cwd,
            env={**os.environ, **env, "PENSTOCK_READY_FD": str(write)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        os.close(write)
        with os.fdopen(read) as pipe:
            line = pipe.readline()  # ends with the process if it fails
        if not line:
            out, _ = self.process.communicate()
            said = self.said()
            self._log.close()
            raise RuntimeError(f"the server did not start, exit {self.process.returncode}\n{out}\n{said}")
        self.urls: dict[str, str] = json.loads(line)

    @property
    def url(self) -> str:
        return self.urls["inference"]

    def post(self, path: str, body: bytes, content_type: str = "application/json", **headers: str) -> tuple[int, bytes]:
        named = {"content-type": content_type, **{k.replace("_", "-"): v for k, v in headers.items()}}
        return self.fetch(urllib.request.Request(self.url + path, body, named))

    def get(self, path: str, listener: str = "inference", **headers: str) -> tuple[int, bytes]:
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        return self.fetch(urllib.request.Request(self.urls[listener] + path, headers=named))

    @staticmethod
    def fetch(request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of one name whose labels include `labels`."""
        total = 0.0
        for line in self.get("/metrics", "metrics")[1].decode().splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def said(self) -> str:
        """What the server and its workers wrote to stderr so far."""
        return os.pread(self._log.fileno(), 2**24, 0).decode(errors="replace")

    def close(self) -> None:
        """Stops it, and forgets what it said."""
        self.stop()
        self._log.close()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """(exit status, stdout, stderr) after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            out, _ = self.process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, _ = self.process.communicate()
        return self.process.returncode, out, self.said()


def _serving(folder: Path) -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def start(source: str | None, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Any:
        given = list(arguments)
        if source is not None:
            (folder / "app.py").write_text(textwrap.dedent(source))
            flags = next((i for i, a in enumerate(given) if a.startswith("-")), len(given))
            given[:flags] = [a if "." in a else f"app.py:{a}" for a in given[:flags]]
        server = RunningServer(given, cwd or folder, env or {})
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers; `serve("def f(items): ...", "f")` writes app.py and serves `app.py:f`."""
    yield from _serving(tmp_path)


@pytest.fixture(scope="module")
def serve_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """`serve` for the tests of one file together."""
    yield from _serving(tmp_path_factory.mktemp("served"))


class RunningRedis:
    """A real `redis-server` on a port of its own, which keeps nothing on disk. `ask` is a client of the test's own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        # Held as long as it is wanted: nobody else is given the port between two starts, nor before the first.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self.start()

    def start(self, *options: str) -> None:
        """Starts it, also again after `kill`; returns when it answers."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import AuthenticationError, ConnectionError
        from redis.retry import Retry

        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            ["redis-server", *fixed, "--dir", str(self._folder), *self._options, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.ask = Redis(port=self.port, decode_responses=True, retry=Retry(NoBackoff(), 0))
        end = time.monotonic() + 20
        while True:
            try:
                self.ask.ping()
                return
            except AuthenticationError:
                return
            except ConnectionError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.ask.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it for good."""
        self.kill()
        self._held.close()


def _running_redis(folder: Path) -> Iterator[Callable[..., RunningRedis]]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    servers: list[RunningRedis] = []

    def start(*options: str) -> RunningRedis:
        servers.append(RunningRedis(folder, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def run_redis(tmp_path: Path) -> Iterator[Callable[..., RunningRedis]]:
    """Starts real Redis servers; `run_redis("--requirepass", "x")` gives it options."""
    yield from _running_redis(tmp_path)


@pytest.fixture(scope="module")
def run_redis_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningRedis]]:
    """`run_redis` for the tests of one file together."""
    yield from _running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def redis_server(run_redis: Callable[..., RunningRedis]) -> RunningRedis:
    """A real Redis server."""
    return run_redis()


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small network in every kind of file that may be served: see `support.files.write_models`."""
    from support.files import write_models

    return write_models(tmp_path_factory.mktemp("model_files"))
