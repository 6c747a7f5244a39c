"""The commands of the captioning example's README, on one machine and on two (network namespaces)."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_for

pytest.importorskip("av")
pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "video_captioning"
FRAMES = 60
START_S = 60.0


def section(title: str) -> list[str]:
    """The commands under a heading of the README, in order."""
    text = re.split(r"(?m)^#+ ", (EXAMPLE / "README.md").read_text())
    (found,) = [part for part in text if part.partition("\n")[0] == title]
    blocks = re.findall(r"(?ms)^```\n(.*?)^```", found)
    return [line for block in blocks for line in block.splitlines() if not line.startswith(("{", "pip "))]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


class Machine:
    """A working folder and its network: the machine's own, or a namespace."""

    def __init__(self, folder: Path, namespace: str | None, start: Callable[..., Any]) -> None:
        folder.mkdir()
        self.folder, self._namespace, self._start = folder, namespace, start
        self._enter = ["ip", "netns", "exec", namespace] if namespace else []

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a line of the README to its end."""
        command = [*self._enter, "bash", "-c", line]
        return subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=120)

    def sent(self) -> int | None:
        """The bytes sent over the virtual cable; None without one."""
        if self._namespace is None:
            return None
        links = subprocess.run(
            ["ip", "-n", self._namespace, "-s", "-j", "link"], capture_output=True, check=True
        ).stdout
        return sum(link["stats64"]["tx"]["bytes"] for link in json.loads(links) if link["ifname"] != "lo")

    def serve(self, line: str) -> None:
        """Starts a server's line; returns when it listens. The fixture ends it."""
        # exec, so that the fixture's process is the command itself
        become = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        ports = "--set server.management_port=0 --set server.metrics_port=0 --set server.grpc_port=0"
        line = f"exec {line} {ports}"
        server = self._start(self.folder, "-c", become, *self._enter, "bash", "-c", line, env=environment(), url=False)
        wait_for(lambda: "READY" in server.said(), START_S, process=server.process, said=server.said)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check(machine: Machine) -> None:
    """Asserts that every frame of both clips has its caption, in order."""
    rows = [json.loads(line) for line in (machine.folder / "captions.jsonl").read_text().splitlines()]
    assert [(row["video"], row["frame"]) for row in rows] == [
        (f"videos/clip-{clip:03d}.mp4", frame) for clip in range(2) for frame in range(FRAMES)
    ]
    numbers = ["".join(row["caption"].split()[1:4]) for row in rows]
    wrong = [n for n, row in zip(numbers, rows, strict=True) if n != f"{row['frame']:03d}"]
    assert len(wrong) <= 0.005 * len(rows), wrong


def make_videos(machine: Machine) -> None:
    (line,) = [line for line in section("One machine") if "make_videos.py" in line]
    asked = line.replace("--clips 6 --frames 300", f"--clips 2 --frames {FRAMES}")
    assert asked != line
    made = machine.run(asked.replace("make_videos.py", str(EXAMPLE / "make_videos.py")))
    assert made.returncode == 0, made.stderr


@pytest.mark.slow
def test_the_commands_of_the_readme_caption_clips_on_one_machine(example: Callable[..., Any], tmp_path: Path) -> None:
    serve, caption, _, again, verify = section("One machine")
    assert caption == again
    port = str(free_port())
    gpu, storage = (Machine(tmp_path / name, None, example) for name in ("gpu", "storage"))
    gpu.serve(serve.replace("app.py", f"{EXAMPLE}/app.py") + f" --port {port}")
    make_videos(storage)
    assert "8080" in caption
    done = storage.run(caption.replace("8080", port))
    assert done.returncode == 0, done.stderr
    check(storage)
    verified = storage.run(verify.replace("verify.py", str(EXAMPLE / "verify.py")))
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.startswith(f"{2 * FRAMES} frames in order, ")


def test_the_clients_command_is_the_same_behind_a_tunnel() -> None:
    serve, tunnel, caption = section("Through a tunnel")
    assert [serve, caption] == section("One machine")[:2]
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)", caption)
    assert f"-L {port}:127.0.0.1:8080 " in tunnel


@pytest.fixture
def machines(example: Callable[..., Any], tmp_path: Path) -> Iterator[tuple[Machine, Machine, str]]:
    """(storage, gpu-box, address of gpu-box): two connected namespaces if the system allows them, else loopback."""
    names = [f"penstock-{os.getpid()}-{end}" for end in ("storage", "gpu")]
    made = join(names)
    storage, gpu = (Machine(tmp_path / name, name if made else None, example) for name in names)
    yield storage, gpu, "10.213.7.2" if made else "127.0.0.1"
    if made:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=True)


def join(names: list[str]) -> bool:
    """Whether two connected namespaces could be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    storage, gpu = names
    ends = [f"pen{os.getpid() % 10**7}{end}" for end in "sg"]
    lines = [f"netns add {name}" for name in names]
    lines += [f"link add {ends[0]} netns {storage} type veth peer name {ends[1]} netns {gpu}"]
    for name, end, address in zip(names, ends, ("10.213.7.1/24", "10.213.7.2/24"), strict=True):
        lines += [
            f"-n {name} addr add {address} dev {end}",
            f"-n {name} link set {end} up",
            f"-n {name} link set lo up",
        ]
    for line in lines:
        if subprocess.run(["ip", *line.split()], capture_output=True).returncode != 0:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
            return False
    return True


@pytest.mark.slow
def test_the_commands_of_the_readme_caption_clips_across_two_machines_with_a_token_and_tls(
    machines: tuple[Machine, Machine, str],
) -> None:
    storage, gpu, address = machines
    port = "8443" if address != "127.0.0.1" else str(free_port())

    def adapted(line: str) -> str:
        line = line.replace("app.py", f"{EXAMPLE}/app.py").replace("DNS:gpu-box", f"IP:{address}")
        return line.replace("gpu-box", address).replace("8443", port)

    certificate, token, serve, caption = map(adapted, section("With a token and TLS"))
    for line in (certificate, token):
        done = gpu.run(line)
        assert done.returncode == 0, done.stderr
    assert (gpu.folder / "token").stat().st_mode & 0o777 == 0o600
    make_videos(storage)
    gpu.serve(serve)
    for name in ("cert.pem", "token"):
        shutil.copy(gpu.folder / name, storage.folder)

    without = storage.run(caption.replace("--token-file token", "") + " --wait 0")
    assert without.returncode != 0
    assert "token" in without.stderr
    untrusted = storage.run(caption.replace("--ca cert.pem", "") + " --wait 0")
    assert untrusted.returncode != 0
    assert "certificate" in untrusted.stderr
    assert not (storage.folder / "captions.jsonl").exists()

    done = storage.run(caption)
    assert done.returncode == 0, done.stderr
    check(storage)
    assert storage.sent() is None or storage.sent() > 2 * FRAMES * 64 * 64 * 3
