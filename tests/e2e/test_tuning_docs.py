"""Runs the page on tuning from top to bottom with short durations: it writes its files and runs its commands."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
# Replaces whatever makes a command long or depends on the machine's speed.
SHORT = (
    (r"--duration \S+", "--duration 0.3 --warmup 0"),
    (r"--budget \S+", "--budget 3s --effort quick --warmup 0.2 --space batch=8,instances=1"),
    (r"(benchmark-suite .*)", r"\1 --requests 60 --warmup 0"),
    (r"p99<=100ms(,error<=0.1%)?", "p50<=60s"),
)
START_S = 120.0


class Shell:
    """Runs commands in a folder; all servers use one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unset = [name for name in os.environ if name.startswith(("PENSTOCK_", "OMP_", "KMP_"))]
        self.env = {name: value for name, value in os.environ.items() if name not in unset}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def run(self, line: str) -> str:
        """The stdout of a command."""
        for long, short in SHORT:
            line = re.sub(long, short, line)
        line = line.replace("http://127.0.0.1:8080", self.url)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        # A machine may be too busy to send on time or to prove a choice within the budget; the output then says so.
        unproven = "--write" in line and "nothing is written to" in done.stderr
        output = f"{line}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0 or unproven or "INVALID" in done.stdout, output
        if unproven:
            (self.folder / "penstock.toml").write_text('[models.ranker]\ntarget = "app.py:Ranker"\n')
        return done.stdout

    @contextmanager
    def serving(self, line: str) -> Iterator[None]:
        """Runs the server of this line meanwhile."""
        others = "".join(f" --set server.{name}_port=0" for name in ("management", "metrics", "grpc"))
        ports = f" --port {self.url.rpartition(':')[2]}{others}"
        log = self.folder / "server.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {line}{ports}"], cwd=self.folder, env=self.env, stdout=out, stderr=out
            )
        try:
            self._wait(process, log)
            yield
        finally:
            end(process)

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        limit = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < limit:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{process.args} is not ready\n{log.read_text(errors='replace')}")


def test_every_file_and_command_of_the_tuning_page_works(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    found = BLOCK.findall(PAGE.read_text())
    assert {language for language, _ in found} == {"", "python", "yaml", "gpu"}
    outputs = {}
    for language, text in found:
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None
            (tmp_path / name[1]).write_text(text)
        elif language == "yaml":
            (tmp_path / "models.yaml").write_text(text)
        elif language == "":
            outputs |= block(shell, text.splitlines())
        else:  # commands that change the machine are not run
            assert all(line.startswith("nvidia-smi ") for line in text.splitlines())
    curve = next(text for line, text in outputs.items() if line == "python curve.py")
    assert [line.split()[:2] for line in curve.splitlines()] == [
        [model, rows] for model in ("Ranker", "Edges") for rows in ("1", "4", "16", "32")
    ]
    loads = [text for line, text in outputs.items() if line.startswith("penstock bench ")]
    assert all("good/s" in text or "INVALID" in text for text in loads)
    assert len([text for text in loads if "32 clients" in text]) >= 3
    assert (tmp_path / "tune-ranker" / "report.html").is_file()
    assert (tmp_path / "penstock.toml").is_file()
    assert (tmp_path / "suite" / "ab_report.csv").read_text().count("ranker,") == 4


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a server. A launcher ends with its server, but ignores signals itself."""
    if process.poll() is None:
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        commands = [(each, " ".join(each.cmdline())) for each in family]
        server = next(each for each, line in commands if "run_cpu" not in line and "serve" in line)
        server.terminate()
        for each in psutil.wait_procs(family, 30)[1]:
            each.kill()
    process.wait(30)


def launchable() -> bool:
    """Whether Intel's launcher can query this machine."""
    if shutil.which("lscpu") is None or shutil.which("taskset") is None:
        return False
    output = subprocess.run(["lscpu", "--parse=CPU,Core,Socket,Node"], capture_output=True, text=True).stdout
    return re.search(r"^\d+,\d+,\d+,\d+", output, re.M) is not None


def block(shell: Shell, lines: list[str]) -> dict[str, str]:
    """The output of each command of a block; a server runs until the block ends."""
    for number, line in enumerate(lines):
        if "run_cpu" in line and not launchable():
            return {}
        if re.search(r"\bpenstock serve ", line):
            before = {each: shell.run(each) for each in lines[:number]}
            with shell.serving(line):
                return before | {each: shell.run(each) for each in lines[number + 1 :]}
    return {line: shell.run(line) for line in lines}
