"""What a process inherits, on every command: closed, full and broken standard files, arguments, paths and limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import RedisStreamer
from support.captioner import FakeCaptioner
from support.videos import make_clip

FREE_PORTS = ["--port=0", *(f"--set=server.{name}_port=0" for name in ("management", "metrics", "grpc"))]

# Research code parses its options wherever it likes. Its answer shows what it has seen.
MODEL = """
import argparse
import json
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=4)
parser.parse_args()


class Model:
    def load(self, device):
        self.depth = parser.parse_args().depth
        import pkgv
        self.version = pkgv.V

    def predict(self, items):
        for number in (0, 1, 2):
            os.fstat(number)
        return [[self.depth, parser.parse_args().depth, self.version] for _ in items]


model = Model()


def served(items):
    model.load("cpu")
    return model.predict(items)


def handle(data, context):
    return model.load("cpu") if data is None else [json.dumps(one) for one in model.predict(data)]
"""
ANSWER = [4, 4, 7]
PROGRAM = """
import json, sys
from penstock import Streamer
from app import served

if __name__ == "__main__":
    sys.argv += ["--not", "known"]
    with Streamer(served, 4) as streamer:
        answer = streamer.predict([1])[0]
    with open("answer.json", "w") as file:
        json.dump(answer, file)
"""


class Started:
    """A command that a shell starts: `shell` follows `exec COMMAND`, `before` precedes it."""

    def __init__(self, folder: Path, command: list[str], shell: str, before: str, env: dict[str, str]) -> None:
        read, write = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read at the end
        self.process = subprocess.Popen(
            ["bash", "-c", f'{before}\nexec "$@" {shell}', "bash", *command],
            cwd=folder,
            env={**os.environ, **env, "PENSTOCK_READY_FD": str(write)},
            pass_fds=[write],
            stdout=self._said,
            stderr=self._said,
        )
        os.close(write)
        self._ready = os.fdopen(read)

    def urls(self) -> dict[str, str]:
        """The addresses of a server that is ready."""
        line = self._ready.readline()
        assert line, f"not ready, exit {self.process.wait(20)}\n{self.said()}"
        found: dict[str, str] = json.loads(line)
        return found

    def said(self) -> str:
        return os.pread(self._said.fileno(), 2**24, 0).decode(errors="replace")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(40)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._ready.close()
        self._said.close()


class Commands:
    """The commands by name. Each starts in the given surroundings, and returns the answer and the exit status."""

    def __init__(self, folder: Path, broker: str, captioner: str) -> None:
        self.folder, self._broker, self._captioner = folder, broker, captioner
        self._started: list[Started] = []
        self._number = 0
        (folder / "app.py").write_text(MODEL)
        (folder / "program.py").write_text(PROGRAM)
        for name in ("lib", "store", "tmp"):
            (folder / name).mkdir()
        (folder / "lib" / "pkgv.py").write_text("V = 7\n")
        manifest = {"modelName": "m", "modelVersion": "1.0", "handler": "app.py"}
        with zipfile.ZipFile(folder / "store" / "m.mar", "w") as mar:
            mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}))
            mar.writestr("app.py", MODEL)
        lines = [f"{api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
        lines += ["grpc_inference_port=0", "grpc_management_port=0", "default_workers_per_model=1"]
        (folder / "config.properties").write_text("\n".join([*lines, "model_store=store", "load_models=all", ""]))
        make_clip(folder / "clip.mp4", 3)

    def start(self, *command: str, shell: str = "", before: str = "", **env: str) -> Started:
        env = {"TMPDIR": str(self.folder / "tmp"), **env}
        self._started.append(Started(self.folder, [sys.executable, *command], shell, before, env))
        return self._started[-1]

    def penstock(self, *arguments: str, **surroundings: str) -> Started:
        return self.start("-m", "penstock.cli.main", *arguments, **surroundings)

    def serve(self, *arguments: str, **surroundings: str) -> tuple[Any, int]:
        env = f"models.m.env={{PYTHONPATH='{self.folder / 'lib'}'}}"
        server = self.penstock("serve", "m=app.py:Model", *FREE_PORTS, "--set", env, *arguments, **surroundings)
        return fetch(server.urls()["inference"] + "/predictions/m"), server.stop()

    def torchserve(self, **surroundings: str) -> tuple[Any, int]:
        surroundings["PYTHONPATH"] = str(self.folder / "lib")
        flags = ["--foreground", "--ncs", "--disable-token-auth"]
        server = self.start("-m", "penstock.torchserve.cli.torchserve", *flags, **surroundings)
        return fetch(server.urls()["inference"] + "/predictions/m"), server.stop()

    def worker(self, **surroundings: str) -> tuple[Any, int]:
        self._number += 1
        prefix, env = f"p{self._number}", f"env={{PYTHONPATH='{self.folder / 'lib'}'}}"
        flags = ["--redis", self._broker, "--prefix", prefix, "--set", env]
        worker = self.penstock("worker", "app.py:served", *flags, **surroundings)
        with RedisStreamer(redis_broker=self._broker, prefix=prefix) as streamer:
            try:
                return streamer.predict([1])[0], worker.stop()
            except Exception as e:
                raise AssertionError(worker.said()) from e

    def caption(self, **surroundings: str) -> tuple[Any, int]:
        (self.folder / "captions.jsonl").unlink(missing_ok=True)
        job = self.penstock("caption", "clip.mp4", "--restart", "--server", self._captioner, **surroundings)
        status = job.process.wait(60)
        return len((self.folder / "captions.jsonl").read_text().splitlines()), status

    def streamer(self, **surroundings: str) -> tuple[Any, int]:
        (self.folder / "answer.json").unlink(missing_ok=True)
        program = self.start("program.py", PYTHONPATH=str(self.folder / "lib"), **surroundings)
        status = program.process.wait(60)
        assert status == 0, program.said()
        return json.loads((self.folder / "answer.json").read_text()), status

    def said(self) -> str:
        """The output of the last command."""
        return self._started[-1].said()

    def close(self) -> None:
        for started in self._started:
            started.close()


def fetch(url: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, b"1"), timeout=60) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, run_redis_all: Callable[..., Any]) -> Iterator[Commands]:
    with FakeCaptioner() as captioner:
        found = Commands(tmp_path_factory.mktemp("inherited"), run_redis_all().address, captioner.url)
        yield found
        found.close()


SURROUNDINGS = {
    "usual": {},
    "all_closed": {"shell": "<&- >&- 2>&-"},
    "full_disk": {"shell": "> /dev/full 2> /dev/full"},
    "no_reader": {"shell": "> >(:)"},
    "few_descriptors": {"before": "ulimit -n 64"},
}


@pytest.mark.parametrize("command", ["serve", "torchserve", "worker", "caption", "streamer"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_command_answers_and_ends_well(commands: Commands, command: str, surroundings: str) -> None:
    """Its model sees a program without arguments, with the packages of its own PYTHONPATH."""
    answer, status = getattr(commands, command)(**SURROUNDINGS[surroundings])
    assert answer == (3 if command == "caption" else ANSWER)
    assert status == 0, commands.said()


@pytest.mark.parametrize("shell", ["<&-", ">&-", "2>&-", "> /dev/full", "2> /dev/full"])
def test_a_server_needs_no_standard_file(commands: Commands, shell: str) -> None:
    assert commands.serve(shell=shell) == (ANSWER, 0), commands.said()


@pytest.mark.parametrize("transport", ["thread", "inline"])
def test_a_model_in_the_process_of_the_server_sees_no_arguments(commands: Commands, transport: str) -> None:
    server = commands.penstock(
        "serve",
        "m=app.py:Model",
        *FREE_PORTS,
        f"--set=models.m.transport={transport}",
        PYTHONPATH=str(commands.folder / "lib"),
    )
    assert (fetch(server.urls()["inference"] + "/predictions/m"), server.stop()) == (ANSWER, 0), server.said()
