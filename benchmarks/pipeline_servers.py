"""The servers of `pipeline.py`: the example's two servers, and loops without a server."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from closed_loop import Sample
from processes import Processes
from servers import HERE, free_ports

EXAMPLE = HERE.parent / "examples" / "resnet50_pipeline"
IMAGES = EXAMPLE / "images"
SCALED = {"resnet50": 224, "mobilenet": 224, "small": 128}
WARM_UP = 2  # calls of each client of a run that are not counted, beside those of the first run
MOST_S = 120.0


class Service(Processes):
    """One server of the Thrift service, which the example's client calls."""

    def __init__(self, port: int, command: Sequence[str], clients: int) -> None:
        super().__init__()
        self._port = port
        self._spawn([sys.executable, *command])
        try:
            self.load(clients, 2)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            log = self._log.read_text(errors="replace")
            self.close()
            raise RuntimeError(f"{' '.join(command)} does not answer: {error}\n{log}") from None
        self.stop()

    def load(self, clients: int, seconds: float) -> Sample:
        """The output of the example's client for a number of clients."""
        command = [sys.executable, str(EXAMPLE / "client_qps.py"), "--json", "--img_dir", str(IMAGES)]
        flags = {
            "port": self._port,
            "request_client": clients,
            "seconds": seconds,
            "warm_up": WARM_UP,
            "pid": self.process.pid,
        }
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(done.stdout)

    def run(self, clients: int, seconds: float) -> Sample:
        """One run, while all other servers are paused."""
        with self.awake():
            return self.load(clients, seconds)


def naive(net: str, options: argparse.Namespace, *flags: str) -> Service:
    """The usual service."""
    (port,) = free_ports(1)
    device = ["--device", "cuda"] if options.gpu else []
    command = [str(EXAMPLE / "main_naive.py"), "--model", net, "--port", str(port), *device, *flags]
    return Service(port, command, 10)


def pipeline(toml: Path) -> Service:
    """`penstock serve` of a pipeline."""
    (port,) = free_ports(1)
    keys = [f"server.{name}=0" for name in ("port", "management_port", "metrics_port")]
    sets = [word for key in [*keys, f"server.thrift_port={port}"] for word in ("--set", key)]
    return Service(port, ["-m", "penstock.cli.main", "serve", str(toml), *sets], 10)


def bare(net: str, batch: int, threads: int, seconds: float) -> Sample:
    """A loop that decodes images and runs the session on prepared tensors, in a number of threads."""
    command = [sys.executable, str(HERE / "pipeline_bare.py"), net, str(batch), str(threads), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


@contextmanager
def written(text: str) -> Iterator[Path]:
    """A TOML file with this text, next to the example's files, so its paths keep their meaning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.toml")
        path.write_text(text)
        yield path


def variant(net: str, *, scaled: bool = False, processes: bool = False, gpu: bool = False) -> str:
    """The example's TOML of a network, with absolute paths."""
    text = (EXAMPLE / f"{net}.toml").read_text()
    text = text.replace(f'"{net}.onnx"', f'"{EXAMPLE / net}.onnx"').replace(f'"{net}.trt"', f'"{EXAMPLE / net}.trt"')
    if scaled:
        text = text.replace('"DecodeMat"', f'"DecodeMat(scale_h={SCALED[net]}, scale_w={SCALED[net]})"')
    if processes:  # the two nodes before the model
        count = len(os.sched_getaffinity(0))
        text = re.sub(r"^(\[cpu_\w+\])$", rf"\1\nprocesses = {count}", text, flags=re.MULTILINE)
    return text.replace("max = 4", f'max = 4\ndevice = "{"cuda:0" if gpu else "cpu"}"')
