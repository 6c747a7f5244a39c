"""A job at a server with OpenAI's API under kills, restarts and refusals: each row once, and few tokens twice."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.chat import FILE, ChatServer
from support.pages import free_ports
from support.videos import make_clip

FRAMES = 300  # of each clip
CLIPS = 3
KILLS = 5
LOST = 30  # rows at most by a kill: those that the server has answered since the last sync of a busy disk


class Job:
    """`penstock caption` as a process in a folder of its own."""

    def __init__(self, folder: Path, clips: Path) -> None:
        self.folder, self.clips = folder, clips
        folder.mkdir()
        self.output = folder / "captions.jsonl"
        self._process: subprocess.Popen[str] | None = None

    def start(self, url: str, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "penstock.cli.main", "caption", str(self.clips), "--backend", "openai"]
        self._process = subprocess.Popen(
            [*command, "--server", url, *flags],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self._process

    def run(self, url: str, *flags: str) -> str:
        """What a job printed that captioned everything."""
        printed, _ = self.start(url, *flags).communicate(timeout=120)
        assert self._process is not None
        assert self._process.returncode == 0, printed
        return printed

    def spooled(self) -> int:
        """The number of rows on disk."""
        files = (self.folder / "captions.jsonl.work" / "spool").glob("*.jsonl")
        return sum(file.read_bytes().count(b'"caption"') for file in files)

    def wait_for_rows(self, count: int) -> None:
        end = time.monotonic() + 60
        while self.spooled() < count:
            assert self._process is not None
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    def close(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for n in range(CLIPS):
        make_clip(folder / f"{n}.mp4", FRAMES, size=(64, 48))
    return folder


@pytest.fixture(scope="module")
def whole(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """The output and the tokens of an undisturbed job."""
    with ChatServer() as server:
        job = Job(tmp_path_factory.mktemp("whole") / "job", clips)
        job.run(server.url)
        return job.output.read_bytes(), sum(server.stand_in.tokens)


@pytest.fixture
def make_job(clips: Path, tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    made: list[Job] = []

    def make(name: str) -> Job:
        made.append(Job(tmp_path / name, clips))
        return made[-1]

    yield make
    for job in made:
        job.close()


def test_a_job_killed_at_random_writes_the_same_rows_for_the_same_tokens(
    make_job: Callable[[str], Job], whole: tuple[bytes, int], chaos: SimpleNamespace
) -> None:
    for again in range(chaos.count(1, 10)):
        job = make_job(f"killed{again}")
        with ChatServer(rate=300, latency=0.02, slots=6) as server:
            for _ in range(KILLS):
                process = job.start(server.url)
                job.wait_for_rows(job.spooled() + random.randrange(20, 150))
                process.kill()
                process.communicate()
                assert process.returncode == -signal.SIGKILL
            assert not job.output.exists()
            job.run(server.url)
            spent = sum(server.stand_in.tokens)
        assert job.output.read_bytes() == whole[0]
        rows = FRAMES * CLIPS
        assert spent <= whole[1] * (rows + KILLS * LOST) / rows


def test_a_server_that_restarts_and_refuses_in_storms_costs_no_row(
    make_job: Callable[[str], Job], whole: tuple[bytes, int], chaos: SimpleNamespace
) -> None:
    job = make_job("restarted")
    spent, stop = [0], threading.Event()
    server = ChatServer(rate=400, latency=0.02, slots=8)
    server.start()

    def storm() -> None:
        while not stop.wait(1.0):
            server.stand_in.storm_until_s = time.monotonic() + 0.2

    storms = threading.Thread(target=storm)
    job.start(server.url)
    try:
        storms.start()
        for _ in range(chaos.count(2, 8)):
            job.wait_for_rows(job.spooled() + 100)
            server.stop()
            spent.append(sum(server.stand_in.tokens))
            time.sleep(0.2)
            server.start()
        assert job._process is not None
        printed, _ = job._process.communicate(timeout=120)
    finally:
        stop.set()
        storms.join()
        server.stop()
    spent.append(sum(server.stand_in.tokens))
    assert job._process.returncode == 0, printed
    assert server.stand_in.answers["429"] > 0
    assert job.output.read_bytes() == whole[0]
    assert sum(spent) <= whole[1] * 1.02


ENGINE = f"""
import asyncio, importlib.util, os, pathlib, signal, sys

spec = importlib.util.spec_from_file_location("stand_in", {str(FILE)!r})
module = sys.modules["stand_in"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
how = sys.argv.pop()
starts = len(list(pathlib.Path().glob("start-*")))
pathlib.Path(f"start-{{starts}}").touch()
work, complete = module.StandIn.work, module.StandIn.complete


async def hanging(self):
    await work(self)
    if starts < 2 and self.served > 150:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.Event().wait()


async def counted(self, request):
    found = await complete(self, request)
    with open("tokens", "a") as file:
        file.write(f"{{found[1]['usage']['total_tokens']}}\\n")
    return found


module.StandIn.work, module.StandIn.complete = hanging, counted
asyncio.run(module.main(module.parser().parse_args()))
"""


@pytest.mark.parametrize("how", ["stopped", "listening"])
def test_an_engine_that_hangs_is_killed_and_started_again_and_costs_no_row(
    make_job: Callable[[str], Job], whole: tuple[bytes, int], how: str
) -> None:
    job = make_job(how)
    (job.folder / "engine.py").write_text(ENGINE)
    (port,) = free_ports(1)
    engine = f"{sys.executable} engine.py --port {port} --rate 400 --latency 0.02 {how}"
    printed = job.run(f"http://localhost:{port}", "--engine", engine, "--request-timeout", "2")
    assert printed.count("the engine was killed: it has ") == 2, printed
    assert len(list(job.folder.glob("start-*"))) == 3
    assert job.output.read_bytes() == whole[0]
    spent = sum(map(int, (job.folder / "tokens").read_text().split()))
    assert spent <= whole[1] * 1.02
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
