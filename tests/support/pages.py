"""Runs the fenced blocks of a page: writes its files, and runs its commands with free ports for the default ones."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_FILE = re.compile(r"# ([\w./-]+\.\w+)(?:, below: (.+))?\n")
_TERMINAL = re.compile(r"^# in another terminal.*\n", re.M)
_START_S = 120.0


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block; the language of a shell block is ""."""
    return _BLOCK.findall(text)


def write(block: str, folder: Path) -> None:
    """Writes a block to the file that its first line names, or inserts it below a line of that file."""
    found = _FILE.match(block)
    assert found is not None, f"the first line of the block names no file:\n{block}"
    path, anchor = folder / found[1], found[2]
    if anchor is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
        return
    before, line, after = re.split(rf"(?m)^([^\n]*{re.escape(anchor)}[^\n]*\n)", path.read_text(), maxsplit=1)
    path.write_text(before + line + block[found.end() :] + after)


def free_ports(count: int) -> list[int]:
    """Ports that nothing uses, and that no connection of another test gets as its own: they are below those."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


class PageShell:
    """Runs shell blocks in a folder. `shorter` maps patterns of what makes a command long to replacements."""

    def __init__(self, folder: Path, *, env: Mapping[str, str] = {}, shorter: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self._shorter = dict(shorter)
        self.ports = dict(zip((8080, 8081, 8082, 7070, 7071), free_ports(5), strict=True))
        (folder / "tmp").mkdir()
        (folder / "tmp" / ".curlrc").write_text("silent\nshow-error\nfail\n")
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "TS_", "OMP_", "KMP_"))}
        self._env |= {
            "PATH": f"{Path(sys.executable).parent}:{self._env['PATH']}",
            "CURL_HOME": str(folder / "tmp"),
            "TMPDIR": str(folder / "tmp"),
            "HF_HUB_OFFLINE": "1",
            "TS_CONFIG_FILE": str(self._torchserve_ports()),
            "PENSTOCK_SERVER__PORT": str(self.ports[8080]),
            "PENSTOCK_SERVER__MANAGEMENT_PORT": str(self.ports[8081]),
            "PENSTOCK_SERVER__METRICS_PORT": str(self.ports[8082]),
            **env,
        }

    def run(self, block: str) -> str:
        """The output of a block without its installations.

        In a block with two terminals, the last command of the first one is a server, which runs until the second one
        has ended.
        """
        first, *others = _TERMINAL.split(re.sub(r"(?m)^pip install .*\n", "", block))
        if not others:
            return self.output(first)
        *before, server = first.splitlines(keepends=True)
        shown = self.output("".join(before))
        with self.serving(server):
            return shown + self.output(others[0])

    def _torchserve_ports(self) -> Path:
        names = ("inference_address", "management_address", "metrics_address", "grpc_inference_port")
        ports = self.ports.values()
        lines = [
            f"{name}={'http://127.0.0.1:' if name.endswith('address') else ''}{port}"
            for name, port in zip((*names, "grpc_management_port"), ports, strict=True)
        ]
        path = self.folder / "tmp" / "config.properties"
        path.write_text("\n".join(lines))
        return path

    def _words(self, script: str) -> list[str]:
        for long, short in self._shorter.items():
            script = re.sub(long, short, script)
        return ["bash", "-ec", re.sub(r"127\.0\.0\.1:(\d+)", lambda m: f"127.0.0.1:{self.ports[int(m[1])]}", script)]

    def output(self, script: str) -> str:
        """The stdout of commands. They must succeed, unless the output says that the machine is too busy."""
        done = subprocess.run(
            self._words(script), cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=300
        )
        busy = "nothing is written to" in done.stderr or "INVALID" in done.stdout
        assert done.returncode == 0 or busy, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, line: str) -> Iterator[None]:
        """Runs the server of this line meanwhile."""
        log = self.folder / "tmp" / "server.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                self._words(f"exec env {line}"),
                cwd=self.folder,
                env=self._env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            end = time.monotonic() + _START_S
            while not self._ready():
                running = process.poll() is None and time.monotonic() < end
                assert running, f"{line}\n{log.read_text()}"
                time.sleep(0.1)
            yield
        finally:
            if process.poll() is None:
                self.stop(process)
            process.wait(60)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Asks a server to end."""
        process.send_signal(signal.SIGTERM)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[8080]}/ping", timeout=5) as answer:
                return b"Healthy" in answer.read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
