"""Peers and Penstock side by side: the same files, the same command line, the same requests.

Runs only by `make test-peers`, which makes the virtual environments with the packages of the peers.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.triton_servers import MODELS, Addresses
from support.urls import fetch

PEERS = Path(os.environ.get("PEERS_VENV", Path(__file__).parents[2] / ".venv-peers")).absolute() / "bin"
OURS = Path(sys.executable).parent
START_S = 90.0


def program(owner: str, name: str) -> str:
    """The command of this name, of "penstock" or of "torchserve"."""
    path = (OURS if owner == "penstock" else PEERS) / name
    if not path.exists():
        pytest.skip(f"there is no {path}: run this by `make test-peers`")
    return str(path)


class PeerServer:
    """`torchserve --start --foreground` of either owner, on ports of its own.

    Without `models`, the configuration determines what is loaded. With `tls`, management has HTTPS.
    """

    def __init__(
        self, owner: str, folder: Path, store: Path, models: list[str], settings: str = "", tls: bool = False
    ) -> None:
        self.owner = owner
        folder.mkdir()
        (folder / "tmp").mkdir()
        ports = _free_ports(5)
        (folder / "config.properties").write_text(
            f"inference_address=http://127.0.0.1:{ports[0]}\n"
            f"management_address=http{'s' * tls}://127.0.0.1:{ports[1]}\n"
            f"metrics_address=http://127.0.0.1:{ports[2]}\n"
            f"grpc_inference_port={ports[3]}\n"
            f"grpc_management_port={ports[4]}\n"
            "default_workers_per_model=1\n"
            "disable_system_metrics=true\n"
            f"vmargs=-Xmx512m -Djava.io.tmpdir={folder}/tmp\n"
            f"{settings}"
        )
        self.url, self.management = f"http://127.0.0.1:{ports[0]}", f"http{'s' * tls}://127.0.0.1:{ports[1]}"
        self.grpc_ports = ports[3], ports[4]  # of inference and management
        self._log = folder / "output"
        command = [program(owner, "torchserve"), "--start", "--foreground", "--disable-token-auth"]
        command += ["--model-store", str(store), "--ts-config", str(folder / "config.properties")]
        command += ["--ncs", "--models", *models] if models else []
        environment = {
            **os.environ,
            "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(folder / "tmp"),
            "LOG_LOCATION": str(folder / "logs"),
            "METRICS_LOCATION": str(folder / "logs"),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        for model in models:
            self._wait(model.partition("=")[0])

    def _wait(self, model: str) -> None:
        end = time.monotonic() + START_S
        answer: Any = None
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError):
                answer = self.post(f"/predictions/{model}", b"ready?")
                if answer[0] == 200:
                    return
            time.sleep(0.1)
        said = self._log.read_text()[-3000:]
        self.close()
        raise AssertionError(f"{self.owner} does not serve {model}, last answer {answer}\n{said}")

    def post(self, path: str, body: bytes, content_type: str = "application/octet-stream") -> tuple[int, bytes]:
        return fetch(urllib.request.Request(self.url + path, body, {"content-type": content_type}))

    def manage(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """The status and the JSON of a management request."""
        headers = {"content-type": "application/json"} if body else {}
        status, found = fetch(urllib.request.Request(self.management + path, body, headers, method=method))
        return status, json.loads(found)

    def printed(self) -> str:
        return self._log.read_text()

    def started(self) -> bool:
        """True once the server has started, False if its process ends instead."""
        end = time.monotonic() + START_S
        while "Model server started" not in self.printed():
            if self._process.poll() is not None or time.monotonic() > end:
                return "Model server started" in self.printed()
            time.sleep(0.1)
        return True

    def close(self) -> None:
        """Ends the server with all of its workers."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


@pytest.fixture(name="free_ports")
def _ports() -> Any:
    return _free_ports


@pytest.fixture(name="program")
def _program() -> Any:
    return program


@pytest.fixture(scope="module")
def serve_triton_models(serve_all: Any) -> Any:
    """Serves the models of `triton/` by Penstock, and returns its addresses."""

    def start() -> Addresses:
        keys = ("management_port=0", "metrics_port=0", f"grpc_port={_free_ports(1)[0]}")
        ports = ["--port", "0", *(word for key in keys for word in ("--set", f"server.{key}"))]
        urls = serve_all(None, "penstock.toml", cwd=MODELS, ports=ports).urls
        return Addresses(*(urls[name].partition("://")[2] for name in ("inference", "grpc", "metrics")))

    return start


@pytest.fixture
def peer_server(tmp_path: Path) -> Iterator[Any]:
    """Starts a server; all are ended after the test."""
    with contextlib.ExitStack() as stack:

        def start(owner: str, store: Path, models: list[str], settings: str = "", tls: bool = False) -> PeerServer:
            server = PeerServer(owner, tmp_path / owner, store, models, settings, tls)
            stack.callback(server.close)
            return server

        yield start
