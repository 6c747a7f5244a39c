"""Every block of the README runs in a fresh checkout, in order and as written; only ports and durations differ."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())
SHELL = [text for language, text in BLOCKS if not language]
TERMINAL = re.compile(r"^# in another terminal.*\n", re.M)
SHORTER = {
    "--concurrency 1,8,64": "--concurrency 8 --duration 0.3 --warmup 0",
    "--budget 5m": "--budget 15s --effort quick --warmup 0.2 --space batch=8,instances=1",
    "p99<=20ms": "p50<=60s",
}
START_S = 120.0


class Checkout:
    """A folder with the tracked examples and the README's files, and free ports for the servers that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(["git", "ls-files", "-z", "examples"], cwd=ROOT, capture_output=True, check=True)
        for name in tracked.stdout.decode().rstrip("\0").split("\0"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for language, text in BLOCKS:
            if language:
                name = re.match(r"# (\w+\.\w+)\n", text)
                assert name is not None, f"a {language} block does not name its file"
                (folder / name[1]).write_text(text)
        self.ports = dict(zip((8080, 8081, 8082, 7070, 7071), free_ports(5), strict=True))
        serving, management, metrics, *grpc = self.ports.values()
        addresses = zip(("inference", "management", "metrics"), (serving, management, metrics), strict=True)
        lines = [f"{name}_address=http://127.0.0.1:{port}" for name, port in addresses]
        lines += [f"grpc_{n}_port={port}" for n, port in zip(("inference", "management"), grpc, strict=True)]
        (folder / "ts.properties").write_text("\n".join(lines))
        (folder / "tmp").mkdir()
        (folder / ".curlrc").write_text("silent\nshow-error\nfail\n")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "TS_", "OMP_", "KMP_"))}
        self.env |= {
            "PATH": f"{Path(sys.executable).parent}:{self.env['PATH']}",
            "CURL_HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "HF_HUB_OFFLINE": "1",
            "TS_CONFIG_FILE": str(folder / "ts.properties"),
            "PENSTOCK_SERVER__PORT": str(serving),
            "PENSTOCK_SERVER__MANAGEMENT_PORT": str(management),
            "PENSTOCK_SERVER__METRICS_PORT": str(metrics),
        }

    def script(self, text: str) -> list[str]:
        """The words that run a block without its installations, on this folder's ports."""
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        text = re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{self.ports[int(found[1])]}", text)
        return ["bash", "-ec", re.sub(r"(?m)^pip install .*\n", "", text)]

    def run(self, text: str) -> str:
        """The output of a block. A block with two terminals starts what the first one runs, and ends it afterwards."""
        first, *others = TERMINAL.split(text)
        if not others:
            return self._output(self.script(first))
        *before, server = first.splitlines(keepends=True)
        shown = self._output(self.script("".join(before)))
        with self._serving(server):
            return shown + self._output(self.script(others[0]))

    def _output(self, words: list[str]) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=300)
        unproven = "nothing is written to" in done.stderr  # what the tuner says on a busy machine
        assert done.returncode == 0 or unproven, f"{words[-1]}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def _serving(self, line: str) -> Iterator[None]:
        with open(self.folder / "server.log", "w+") as log:
            words = self.script("exec " + line)
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
            try:
                end = time.monotonic() + START_S
                while not self._ready():
                    running = process.poll() is None and time.monotonic() < end
                    assert running, f"{line}\n{(self.folder / 'server.log').read_text()}"
                    time.sleep(0.1)
                yield
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                process.wait(60)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[8080]}/ping", timeout=5) as answer:
                return b"Healthy" in answer.read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"))


def block(part: str) -> str:
    """The one shell block with this text."""
    (found,) = [text for text in SHELL if part in text]
    return found


SETUP = ("make demo", "python3 -m venv")
RUN = ("app.py:shout", "photos.toml", "torchserve --start", "penstock caption", "penstock tune")


def test_each_shell_block_has_a_test() -> None:
    assert [sum(part in text for part in (*SETUP, *RUN)) for text in SHELL] == [1] * (len(SETUP) + len(RUN))
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_make_targets_and_the_extras_exist_and_a_virtual_environment_precedes_pip() -> None:
    lines = [line for text in SHELL for line in text.splitlines()]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "demo-captions"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    pip = [line for line in lines if line.startswith("pip install")]
    venv = lines.index("python3 -m venv .venv")
    assert lines[venv + 1] == ". .venv/bin/activate"
    assert venv < lines.index(pip[0])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in pip:
        named = re.fullmatch(r"pip install (?:\.|'\.\[([a-z,]+)\]')", line)
        assert named is not None, line
        assert set((named[1] or "bench").split(",")) <= extras.keys()


def test_the_first_model_answers_and_is_measured(checkout: Checkout) -> None:
    shown = checkout.run(block("app.py:shout"))
    assert shown.startswith("HELLO")
    assert 'penstock_answers_total{model="shout",version="1",outcome="ok"} 1' in shown


def test_the_streamer_runs(checkout: Checkout) -> None:
    shown = checkout.run("python streamed.py\n")
    assert shown == "['HELLO']\n['HELLO', 'WORLD']\n"


def test_the_pipeline_recognises_the_digit(checkout: Checkout) -> None:
    (probabilities,) = json.loads(checkout.run(block("photos.toml")))
    assert probabilities.index(max(probabilities)) == 7


def test_the_torchserve_commands_archive_serve_and_stop(checkout: Checkout) -> None:
    shown = checkout.run(block("torchserve --start"))
    assert "HELLO" in shown
    assert "TorchServe has stopped." in shown


@pytest.mark.slow
def test_the_videos_are_generated_and_captioned(checkout: Checkout) -> None:
    checkout.run(block("penstock caption"))
    lines = (checkout.folder / "captions.jsonl").read_text().splitlines()
    assert [json.loads(line)["frame"] for line in lines] == [*range(60), *range(60)]


@pytest.mark.slow
def test_the_model_is_measured_and_tuned(checkout: Checkout) -> None:
    checkout.run(block("penstock tune"))
