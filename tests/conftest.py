import compileall
import faulthandler
import gc
import json
import logging
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
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from support.urls import fetch

# The duration of an example depends on the load of the machine.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI needs repeatable results; random search is for developers.
settings.register_profile("ci", settings.get_profile("tests"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "tests")

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # tests send no usage data

_OMP = os.environ.get("OMP_WAIT_POLICY")

if sys.dont_write_bytecode:  # otherwise each of many hundred processes compiles Penstock, a third of its start time
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2, workers=os.cpu_count() or 1)


def pytest_collectstart() -> None:
    """Keeps idle OpenMP threads of the tests from spinning; programs that tests start decide for themselves.

    Also turns garbage collection off until all tests are collected, a sixth of that time. Runs before the first test
    is imported, and not in the controller of `pytest -n`, whose environment all workers would inherit permanently.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.disable()


# The end-to-end files that `make test` runs: one or two for each feature. `make test-all` runs the others too, and the
# tests that kill, flood and deploy.
EVERYDAY = {
    "bench_target", "bulk_send", "caption", "client", "grpc", "http_forms", "inherited", "management",
    "metrics", "model_files", "openai", "pipeline_serve", "plan", "redis", "sequences", "serve", "shared_streamer",
    "shutdown", "steps", "torchpipe", "torchserve_cli", "torchserve_management", "torchserve_modes", "tracing",
    "triton", "unbatched", "vision",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what only `make test-all` runs, keeps the files of this shard (`SHARD=2/3`), and orders for `pytest -n`.

    The files with the most slow tests come first, and then the end-to-end and chaos tests: short files at the end keep
    all workers busy until the end. The order within files, and of the other files, stays.
    """
    for item in items:
        folder, name = item.path.parent.name, item.path.stem.removeprefix("test_")
        everyday = folder not in ("chaos", "deploy", "peers") and (folder != "e2e" or name in EVERYDAY)
        if not everyday or item.get_closest_marker("slow"):
            item.add_marker("extended")
    part, _, shards = os.environ.get("SHARD", "1/1").partition("/")
    if other := [item for item in items if zlib.crc32(item.path.name.encode()) % int(shards) != int(part) - 1]:
        config.hook.pytest_deselected(items=other)
        dropped = {id(item) for item in other}
        items[:] = [item for item in items if id(item) not in dropped]
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-slow[item.path], item.path.parent.name not in ("e2e", "chaos")))


def pytest_collection_finish() -> None:
    """Excludes the millions of objects that all tests share from later garbage collections."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if _OMP is None:
        os.environ.pop("OMP_WAIT_POLICY", None)  # torch, which reads it once, is loaded by now


@pytest.fixture(scope="module", autouse=True)
def left_out() -> None:
    """Also excludes objects that other test files loaded, if they are many: some tests collect very often."""
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item) -> None:
    """Restarts the timer for hanging tests, which pytest stops here: a failed test may hang in its teardown."""
    seconds = float(node.config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(seconds, exit=True, file=node.config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """The report of a `pytest -n` worker, with lone surrogates escaped, because UTF-8 cannot encode them."""
    return _spelt_out((yield))


def _spelt_out(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _spelt_out(each) for key, each in value.items()}
    return type(value)(map(_spelt_out, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True)
def own_surroundings() -> Iterator[None]:
    """Restores what workers or later tests inherit: arguments, `sys.path`, the environment and the root logger."""
    arguments, path, env = sys.argv[:], sys.path[:], dict(os.environ)
    root = logging.getLogger()
    level, handlers = root.level, {*root.handlers}
    yield
    sys.argv[:], sys.path[:] = arguments, path
    root.setLevel(level)
    for handler in {*root.handlers} - handlers:
        root.removeHandler(handler)
    if os.environ != env:
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update(env)


SERVE = [sys.executable, "-m", "penstock.cli.main", "serve"]
FREE_PORTS = [
    "--port",
    "0",
    "--set",
    "server.management_port=0",
    "--set",
    "server.metrics_port=0",
    "--set",
    "server.grpc_port=0",
]


class RunningServer:
    """A real `penstock serve` process; `urls` has its three listeners."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str], ports: Sequence[str]) -> None:
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - an unread pipe would block a verbose process
        self.process = subprocess.Popen(
            [*SERVE, *arguments, *ports],
            pass_fds=[write],
            cwd=cwd,
            env={**os.environ, **env, "PENSTOCK_READY_FD": str(write)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        os.close(write)
        with os.fdopen(read) as pipe:
            line = pipe.readline()  # closed if the process fails
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

    fetch = staticmethod(fetch)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of one name whose labels include `labels`."""
        total = 0.0
        for line in self.get("/metrics", "metrics")[1].decode().splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def said(self) -> str:
        """The stderr output of the server and its workers so far."""
        return os.pread(self._log.fileno(), 2**24, 0).decode(errors="replace")

    def close(self) -> None:
        """Stops the server and discards its output."""
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

    def start(
        source: str | None,
        *arguments: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        ports: Sequence[str] = FREE_PORTS,
    ) -> Any:
        given = list(arguments)
        if source is not None:
            (folder / "app.py").write_text(textwrap.dedent(source))
            flags = next((i for i, a in enumerate(given) if a.startswith("-")), len(given))
            given[:flags] = [a if "." in a else f"app.py:{a}" for a in given[:flags]]
        server = RunningServer(given, cwd or folder, env or {}, ports)
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
    """`serve` with the scope of a test file."""
    yield from _serving(tmp_path_factory.mktemp("served"))


class RunningRedis:
    """A real `redis-server` on its own port, without persistence. `ask` is a client for the test.

    `config` returns a configuration file for a port, which then has all options but those given.
    """

    def __init__(self, folder: Path, *options: str, config: Callable[[int], Path] | None = None) -> None:
        self._options = options
        # Keeps the port reserved before the first start and between two starts.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._fixed = [*fixed, "--dir", str(folder)] if config is None else [str(config(self.port))]
        self.start()

    def start(self, *options: str) -> None:
        """Starts the server, also after `kill`; returns when it answers."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import AuthenticationError, ConnectionError
        from redis.retry import Retry

        self.process = subprocess.Popen(
            ["redis-server", *self._fixed, *self._options, *options],
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
        """Kills the server, as a crash would."""
        self.ask.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends the server and releases its port."""
        self.kill()
        self._held.close()


def _running_redis(folder: Path) -> Iterator[Callable[..., RunningRedis]]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    servers: list[RunningRedis] = []

    def start(*options: str, **config: Any) -> RunningRedis:
        servers.append(RunningRedis(folder, *options, **config))
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
    """`run_redis` with the scope of a test file."""
    yield from _running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def redis_server(run_redis: Callable[..., RunningRedis]) -> RunningRedis:
    """A real Redis server."""
    return run_redis()


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small network in every servable file format: see `support.files.write_models`."""
    from support.files import write_models

    return write_models(tmp_path_factory.mktemp("model_files"))


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray cluster to which this process is connected. Its one node has 8 CPUs, or the file's `HEAD_CPUS`."""
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_gcs_server_port_wait_time_s", "120")  # beside other tests a head took more than 30 s
        soon = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}  # a killed node is noticed
        head = {"num_cpus": getattr(request.module, "HEAD_CPUS", 8), "include_dashboard": False, "_system_config": soon}
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
