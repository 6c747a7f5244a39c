"""The servers of `tensors.py`: Penstock and Triton with the same models, batches of at most 64, and one thread."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import psutil
from closed_loop import Sample
from processes import Processes
from servers import HERE, START_S, free_ports, python_of
from tensor_models import MODELS

MAX_BATCH = 64
IDLE_S = 0.3  # without a batch: longer than any takes
LOST = 3  # runs in a row that may be lost to a crash
SETTINGS = (
    "Both: batches of at most 64, one instance unless a row says two, the same ONNX file with one thread. "
    "Penstock: defaults. Triton 2.51: Python backend, dynamic batching without delay; where a row says so, with the "
    "best of several delays."
)


class TensorServer(Processes, ABC):
    """A server of one of MODELS over HTTP and gRPC, paused unless inside `awake()`.

    `http`, `grpc`: HOST:PORT of its listeners; they change when it starts again.
    """

    name: str
    may_crash = False
    http: str
    grpc: str

    def __init__(self, folder: Path, model: str, delay_us: int = 0) -> None:
        """`folder` holds the ONNX files. `delay_us`: how long Triton may keep a request to fill its batch."""
        self.folder, self.model, self.delay_us = folder, model, delay_us
        self._launch()

    @abstractmethod
    def _start(self) -> None:
        """Starts the processes and sets `http` and `grpc`."""

    def _launch(self) -> None:
        super().__init__()
        try:
            self._start()
            self._wait()
            self.lengthen_queues()
            self.stop()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        """Returns when the model is ready on both listeners."""
        end = time.monotonic() + START_S
        host, port = self.grpc.split(":")
        while True:
            try:
                urllib.request.urlopen(f"http://{self.http}/v2/models/{self.model}/ready", timeout=10).close()
                return socket.create_connection((host, int(port)), timeout=10).close()
            except OSError as e:
                if time.monotonic() > end or self.process.poll() is not None:
                    log = self._log.read_text(errors="replace")[-3000:]
                    raise SystemExit(f"{self.name} did not start: {e}\n{log}") from None
                time.sleep(0.1)

    def measure(self, run: Callable[[Self], Sample]) -> Sample:
        """What `run` returns while the server is awake.

        A peer that crashed or hung meanwhile starts again, and the run is repeated.
        """
        for _ in range(LOST):
            failure: Exception | None = None
            sample: Sample = {}
            try:
                with self.awake():
                    sample = run(self)
            except (subprocess.SubprocessError, OSError) as e:
                failure = e
            code = self.process.poll()
            if sample.get("rate") and code is None:
                return sample
            log = self._log.read_text(errors="replace")[-1000:]
            happened = f"{self.name}: exit code {code}, {failure or 'no answers'}; the end of its log:\n{log}"
            if not self.may_crash:
                raise SystemExit(happened)
            print(f"{happened}\nIt starts again, and the run is repeated.", file=sys.stderr)
            self.close()
            self._launch()
        raise SystemExit(f"{self.name} ended in {LOST} runs in a row")

    def processor_s(self) -> tuple[float, float]:
        """Seconds of processor time so far: of the server process, and of its workers."""
        server = workers = 0.0
        for process in self.members():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            if process.pid == self.process.pid:
                server += times.user + times.system
            else:
                workers += times.user + times.system
        return server, workers

    def batches(self) -> dict[int, int]:
        """Batches so far by their rows, from the server's statistics."""
        with urllib.request.urlopen(f"http://{self.http}/v2/models/{self.model}/stats", timeout=10) as response:
            (stats,) = json.load(response)["model_stats"]
        return {int(b["batch_size"]): int(b["compute_infer"]["count"]) for b in stats["batch_stats"]}


class Penstock(TensorServer):
    """`penstock serve` with both listeners."""

    name = "penstock"

    def _start(self) -> None:
        model = MODELS[self.model]
        keys = [f"server.grpc_port={free_ports(1)[0]}", "server.shared_memory=true"]
        keys += [f"models.{self.model}.instances={model.instances}", f"models.{self.model}.threads=1"]
        target = (self.folder if model.target.endswith(".onnx") else HERE) / model.target
        words = ["--max-batch-size", str(MAX_BATCH), *(word for key in keys for word in ("--set", key))]
        started = self._spawn_penstock(f"{self.model}={target}", *words)
        urls = {name: url.partition("://")[2] for name, url in started.items()}
        self.http, self.grpc = urls["inference"], urls["grpc"]


def triton_command(tag: str, options: Mapping[str, object]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a Triton on this machine only; `tag` begins the names of its shared memory."""
    python = Path(python_of("triton"))
    site = next(python.parent.parent.glob("lib/python3*/site-packages"))
    triton = site / "pytriton" / "tritonserver"
    whole = {
        "backend-directory": triton / "backends",
        "backend-config": f"python,shm-region-prefix-name={tag}",
        "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1",
        **options,
    }
    command = [str(triton / "bin" / "tritonserver"), *(f"--{key}={value}" for key, value in whole.items())]
    return command, {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
        "PYTHONPATH": str(site),
        "PYTHONHOME": "/usr",  # of the interpreter that the stub embeds
    }


class Triton(TensorServer):
    """Triton Inference Server with its Python backend. With many gRPC calls it crashes now and then."""

    name = "triton"
    may_crash = True

    def _start(self) -> None:
        repository = Path(self._folder, "models")
        self._write_model(repository / self.model)
        http, grpc = free_ports(2)
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        options = {"model-repository": repository, "http-port": http, "grpc-port": grpc, "allow-metrics": "false"}
        command, env = triton_command(self._tag, options)
        self._spawn(command, **env)

    def _write_model(self, folder: Path) -> None:
        model = MODELS[self.model]
        version = folder / "1"
        version.mkdir(parents=True)
        shutil.copy(HERE / "peers" / "triton" / model.triton, version / "model.py")

        def tensor(spec: tuple[str, tuple[int, ...]]) -> str:
            return f'{{ name: "{spec[0]}" data_type: TYPE_FP32 dims: {list(spec[1])} }}'

        (folder / "config.pbtxt").write_text(
            f'name: "{self.model}"\nbackend: "python"\nmax_batch_size: {MAX_BATCH}\n'
            f"input [ {tensor(model.input)} ]\noutput [ {tensor(model.output)} ]\n"
            f"dynamic_batching {{ max_queue_delay_microseconds: {self.delay_us} }}\n"
            f"instance_group [ {{ count: {model.instances} kind: KIND_CPU }} ]\n"
            f'parameters {{ key: "file" value: {{ string_value: "{self.folder / model.target}" }} }}\n'
        )

    def stop(self) -> None:
        """Waits for requests whose client has gone: paused within one, Triton takes its Python process for dead."""
        with contextlib.suppress(OSError):
            before = None
            while self.process.poll() is None and before != (before := self.batches()):
                time.sleep(IDLE_S)
        super().stop()

    def close(self) -> None:
        super().close()
        for region in Path("/dev/shm").glob(f"{self._tag}*"):  # a killed server leaves its regions
            region.unlink(missing_ok=True)
