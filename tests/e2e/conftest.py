import importlib
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
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.torchserve.cli import pid_file
from support.urls import fetch

START_S = 60.0


@pytest.fixture(scope="session")
def image_networks() -> tuple[Any, Any]:
    """The modules `networks` and `export` of examples/resnet50_pipeline."""
    folder = str(Path(__file__).parents[2] / "examples" / "resnet50_pipeline")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("networks"), importlib.import_module("export")
    finally:
        sys.path.remove(folder)
        for name in ("networks", "export"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def mobilenet(image_networks: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mobilenet.onnx, which a folder has to itself: exported once for all tests that need a network of images."""
    path = tmp_path_factory.mktemp("mobilenet") / "mobilenet.onnx"
    image_networks[1].export_mobilenet(path)
    return path


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
        status, said = self.process.wait(), self.said()
        self.close()
        raise RuntimeError(f"no address was said within {START_S:g} s, exit {status}\n{said}")

    def get(self, path: str) -> tuple[int, Any]:
        return self._fetch(urllib.request.Request(self.url + path))

    def post(self, path: str, body: bytes, content_type: str = "application/x-www-form-urlencoded") -> tuple[int, Any]:
        return self._fetch(urllib.request.Request(self.url + path, body, {"content-type": content_type}))

    @staticmethod
    def _fetch(request: urllib.request.Request) -> tuple[int, Any]:
        status, body = fetch(request)
        return status, json.loads(body)

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


TORCHSERVE_CONFIG = {
    "inference_address": "http://127.0.0.1:0",
    "management_address": "http://127.0.0.1:0",
    "metrics_address": "http://127.0.0.1:0",
    "grpc_inference_port": "0",
    "grpc_management_port": "0",
    "model_store": "store",
    "default_workers_per_model": "1",
}


class TorchServeFolder:
    """A folder for the commands `torchserve` and `torch-model-archiver`, with its own temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        unset = [name for name in os.environ if name.startswith("TS_") or name in ("LOG_LOCATION", "METRICS_LOCATION")]
        self.env = {name: value for name, value in os.environ.items() if name not in unset}
        self.env |= {"TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "tmp")}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - the server writes on after the command has ended

    def add_model(self, handler: str, version: str = "1.0", file: str = "m.mar", config: str = "") -> None:
        """Writes an archive with this handler code and model-config.yaml to the store.

        The model's name is the file's up to a hyphen.
        """
        (self.folder / "store").mkdir(exist_ok=True)
        model = {
            "modelName": file.removesuffix(".mar").partition("-")[0],
            "modelVersion": version,
            "handler": "service.py",
        }
        if config:
            model["configFile"] = "model-config.yaml"
        with zipfile.ZipFile(self.folder / "store" / file, "w") as mar:
            mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
            mar.writestr("service.py", handler)
            mar.writestr("model-config.yaml", config)

    def configure(self, file: str = "config.properties", **keys: str) -> None:
        """Writes a config.properties with free ports, the store and these keys."""
        lines = [f"{key}={value}" for key, value in {**TORCHSERVE_CONFIG, **keys}.items()]
        (self.folder / file).write_text("\n".join(lines) + "\n")

    def configure_like(self, text: str) -> None:
        """Writes this config.properties with free ports."""
        text = re.sub(r"(?m)(_address=http://[\d.]+:|_port=)\d+$", r"\g<1>0", text)
        assert text.count(":0\n") == 3
        (self.folder / "config.properties").write_text(text)

    def keys(self) -> dict[str, str]:
        """The keys in key_file.json."""
        found = json.loads((self.folder / "key_file.json").read_text())
        return {name: each["key"] for name, each in found.items()}

    def run(self, command: str, *arguments: str) -> tuple[int, str]:
        """The exit status of a command, and the output of the command and the servers until its end."""
        before = len(self.said())
        program = Path(sys.executable).with_name(command)
        done = subprocess.run(
            [str(program), *arguments], cwd=self.folder, env=self.env, stdout=self._log, stderr=subprocess.STDOUT
        )
        return done.returncode, self.said()[before:]

    def bash(self, line: str) -> str:
        """The output of a README's command, which must succeed; a request goes to this server."""
        if "http://127.0.0.1:8080" in line:
            line = line.replace("http://127.0.0.1:8080", self.url()) + " -s -f"
        env = {**self.env, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{self.env['PATH']}"}
        done = subprocess.run(["bash", "-c", line], cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str, wait: bool = True) -> None:
        """Runs `torchserve --start ARGUMENTS`; returns when the server reports that it has started."""
        before = len(self.said())
        status, said = self.run("torchserve", "--start", *arguments)
        assert status == 0, said
        if wait:
            self.wait_for("Model server started", before)

    def wait_for(self, text: str, since: int = 0) -> str:
        """The output from `since` on, once it contains the text."""
        end = time.monotonic() + START_S
        while text not in (said := self.said()[since:]):
            if time.monotonic() > end or not self.pids():
                raise RuntimeError(f"{text!r} was not said\n{said}")
            time.sleep(0.02)
        return said

    def pids(self) -> list[int]:
        """The server's process, if one runs."""
        found = pid_file.running_pid(str(self.folder / "tmp" / ".model_server.pid"))
        return [] if found is None else [found]

    def url(self, api: str = "Inference") -> str:
        """The URL of the last server's "Inference", "Management" or "Metrics" API."""
        found = re.findall(rf"{api} API bind to: (\S+)", self.said())[-1]
        return found.replace("0.0.0.0", "127.0.0.1")

    def fetch(
        self, url: str, body: bytes | None = None, method: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        found = {k.replace("_", "-"): v for k, v in headers.items()}
        request = urllib.request.Request(url, body, found, method=method)
        return fetch(request)

    def said(self) -> str:
        """The output of servers and commands so far."""
        return os.pread(self._log.fileno(), 2**24, 0).decode(errors="replace")

    def close(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self._log.close()


@pytest.fixture
def torchserve(tmp_path: Path) -> Iterator[TorchServeFolder]:
    """Runs TorchServe's commands in tmp_path."""
    found = TorchServeFolder(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def torchserve_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServeFolder]:
    """`torchserve` with the scope of a test file."""
    found = TorchServeFolder(tmp_path_factory.mktemp("torchserve"))
    yield found
    found.close()
