"""A real Triton with the models of `tests/peers/triton`.

Triton comes from the virtual environment that the benchmarks make, `benchmarks/.venvs/triton`.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).parents[1] / "peers" / "triton"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TWO_VERSIONS = "versions"  # the model that has them
START_S = 120.0


class Addresses(NamedTuple):
    """HOST:PORT of the listeners of a server."""

    http: str
    grpc: str
    metrics: str


class CannotBeMade(Exception):
    """There is no Triton for this machine; the text says why."""


@contextlib.contextmanager
def triton(folder: Path) -> Iterator[Addresses]:
    """A Triton; its files lie in `folder`. Raises CannotBeMade."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from processes import Processes
        from servers import free_ports
        from tensor_servers import triton_command

        try:
            ports = free_ports(3)
            names = ("http-port", "grpc-port", "metrics-port")
            options = {"model-repository": _repository(folder), "model-control-mode": "explicit", "load-model": "*"}
            options |= {"metrics-interval-ms": 200, "strict-readiness": "true", "log-verbose": 0}
            tag = f"triton-{os.getpid()}-"
            command, env = triton_command(tag, {**options, **dict(zip(names, ports, strict=True))})
        except (SystemExit, subprocess.CalledProcessError) as error:
            raise CannotBeMade(f"Triton could not be made: {error}") from None
    finally:
        sys.path.remove(str(BENCHMARKS))

    class Server(Processes):
        def start(self) -> None:
            self._spawn(command, **env)

        def said(self) -> str:
            return self._log.read_text(errors="replace")

    found = Addresses(*(f"127.0.0.1:{port}" for port in ports))
    with Server() as server:
        server.start()
        try:
            end = time.monotonic() + START_S
            while not _ready(found.http):
                if server.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"Triton did not start\n{server.said()[-5000:]}")
                time.sleep(0.1)
            yield found
        finally:
            for region in Path("/dev/shm").glob(f"{tag}*"):  # a killed server leaves its regions
                region.unlink(missing_ok=True)


def _ready(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=10).close()
    except OSError:
        return False
    return True


def _repository(folder: Path) -> Path:
    """Writes the models as Triton wants them: each with a folder for each version."""
    target = shutil.copytree(MODELS / "models", folder / "models")
    for model in target.iterdir():
        for version in ("1", "2") if model.name == TWO_VERSIONS else ("1",):
            (model / version).mkdir()
            shutil.copy(MODELS / "model.py", model / version)
    return target
