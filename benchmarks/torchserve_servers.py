"""`torchserve --start` of either project, with the same archive, config.properties and flags."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from harness import HERE, Sample, Server, Workload, free_ports, python_of

HANDLERS = HERE / "handlers"
START_S = 120.0
QUIET = """<?xml version="1.0"?>
<Configuration status="ERROR">
 <Appenders><Console name="console" target="SYSTEM_ERR"/></Appenders>
 <Loggers><Root level="error"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""


@dataclasses.dataclass(frozen=True)
class Archive:
    """A model archive, with a request to it and the right answer."""

    file: Path
    body: bytes
    answer: bytes

    @property
    def model(self) -> str:
        return self.file.stem


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model's settings: `batchSize`, `minWorkers`, `maxBatchDelay`."""

    batch: int
    workers: int
    delay_ms: int


def load(name: str) -> ModuleType:
    """A file of `handlers/` as a module."""
    spec = importlib.util.spec_from_file_location(name, HANDLERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_archive(store: Path, model: str, handler: str, *flags: str) -> Path:
    """`store/MODEL.mar`, written by `penstock archive`, which TorchServe reads too."""
    command = [sys.executable, "-m", "penstock.cli.main", "archive", "--force", "--model-name", model]
    command += ["--version", "1.0", "--handler", f"{HANDLERS}/{handler}.py", "--export-path", str(store), *flags]
    subprocess.run(command, check=True)
    return store / f"{model}.mar"


def network(store: Path, model: str, handler: str, kind: str, pixels: tuple[int, ...], *flags: str) -> Archive:
    """The archive of the class `kind` of `handlers/HANDLER_model.py` with random weights, and a picture for it."""
    import torch

    torch.manual_seed(1)
    net = getattr(load(f"{handler}_model"), kind)().eval()
    weights = store / f"{model}.pt"
    torch.save(net.state_dict(), weights)
    file = f"{HANDLERS}/{handler}_model.py"
    archive = make_archive(store, model, handler, "--model-file", file, "--serialized-file", str(weights), *flags)
    weights.unlink()
    image = torch.randint(0, 256, (1, *pixels), dtype=torch.uint8)
    with torch.inference_mode():
        found = net(image.float() / 255).argmax(1).item()
    return Archive(archive, image.numpy().tobytes(), str(found).encode())


class TorchServe(Server):
    """One of the servers, paused unless inside `awake()`. `kind`: "penstock", "torchserve", "torchserve, unlogged".

    `memory`: after a second of 16 connections; `started_s`: from the command to the first right prediction.
    """

    def __init__(self, kind: str, archive: Archive, setting: Setting) -> None:
        self._archive, self._setting = archive, setting
        super().__init__(kind, Workload(archive.model, archive.body, archive.answer, binary=True))
        self.memory = self._memory()

    def _start_peer(self) -> str:
        folder, ports = Path(self._folder), free_ports(5)
        (folder / "config.properties").write_text(self._properties(ports))
        ours = self.name == "penstock"
        bin_ = Path(sys.executable if ours else python_of("torchserve")).parent
        command = [str(bin_ / "torchserve"), "--start", "--foreground", "--disable-token-auth", "--ncs"]
        command += ["--model-store", str(self._archive.file.parent), "--ts-config", str(folder / "config.properties")]
        if self.name.endswith("unlogged"):
            (folder / "log4j2.xml").write_text(QUIET)
            command += ["--log-config", str(folder / "log4j2.xml")]
        logs = f"{folder}/logs"
        path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
        self._began = time.monotonic()
        self._spawn(command, PATH=path, LOG_LOCATION=logs, METRICS_LOCATION=logs)
        return f"http://127.0.0.1:{ports[0]}/predictions/{self._archive.model}"

    def _start_penstock(self, sets: Any) -> str:
        return self._start_peer()

    def _properties(self, ports: list[int]) -> str:
        model, setting = self._archive.model, self._setting
        of_model = {
            "defaultVersion": True,
            "marName": self._archive.file.name,
            "minWorkers": setting.workers,
            "maxWorkers": setting.workers,
            "batchSize": setting.batch,
            "maxBatchDelay": setting.delay_ms,
            "responseTimeout": 120,
        }
        inference, management, metrics, grpc, grpc_management = ports
        settings = {
            "inference_address": f"http://127.0.0.1:{inference}",
            "management_address": f"http://127.0.0.1:{management}",
            "metrics_address": f"http://127.0.0.1:{metrics}",
            "grpc_inference_port": grpc,
            "grpc_management_port": grpc_management,
            "load_models": self._archive.file.name,
            "models": json.dumps({model: {"1.0": of_model}}),
            "disable_system_metrics": "true",
            "vmargs": f"-Djava.io.tmpdir={self._folder}",
        }
        return "".join(f"{k}={v}\n" for k, v in settings.items())

    def _wait(self) -> None:
        """Returns as soon as the model answers; asks every 10 ms."""
        end = self._began + START_S
        last: Exception | None = None
        request = urllib.request.Request(self.url, self.workload.body, {"content-type": self.workload.content_type})
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = response.read()
            except OSError as e:
                last = e
                time.sleep(0.01)
                continue
            self.started_s = time.monotonic() - self._began
            return self.workload.check(answer)
        raise SystemExit(f"{self.name} did not answer at {self.url}: {last}\n{self._log.read_text()[-3000:]}")

    def closed_loop(self, connections: int, seconds: int) -> Sample:
        """One run of `wrk`, after the work of earlier runs: TorchServe finishes it although no client waits."""
        with self.awake():
            request = urllib.request.Request(self.url, self.workload.body, {"content-type": self.workload.content_type})
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
        return super().closed_loop(connections, seconds)

    def _memory(self) -> Sample:
        """Resident memory of the process tree in MB, as a sum, and with shared pages counted once."""
        found = {"rss_mb": 0.0, "pss_mb": 0.0}
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                found["rss_mb"] += info.rss / 1e6
                found["pss_mb"] += info.pss / 1e6
        return found


def start_once(kind: str, archive: Archive) -> Sample:
    """Start time and memory with one worker, of a server that is ended again."""
    with TorchServe(kind, archive, Setting(1, 1, 100)) as server:
        return {"start_s": server.started_s, **server.memory}
