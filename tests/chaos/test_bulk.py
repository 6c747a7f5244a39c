"""A bulk job under kills, interrupts, refusals and disconnects: no caption is lost, repeated, moved or mixed."""

import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from support.captioner import FakeCaptioner, with_status, with_wait
from support.captioner import caption as good
from support.videos import make_clip

FRAMES = 150  # of each clip
CLIPS = 3
WINDOW = 5  # initial window of two-frame requests for a FakeCaptioner with batches of four
SOURCE = """
    import time
    from pathlib import Path

    import penstock

    REVISION = Path(__file__).with_name("revision").read_text()

    @penstock.model(max_batch_size=2)
    class Captioner:
        inputs = [
            penstock.TensorSpec("frames", "UINT8", (-1, -1, -1, 3), optional=True),
            penstock.TensorSpec("frame_index", "INT64", (-1,), optional=True),
        ]
        outputs = [penstock.TensorSpec("caption", "BYTES", (-1,)), penstock.TensorSpec("frame_index", "INT64", (-1,))]
        parameters = {
            "task": "image-to-text", "model": "null", "revision": REVISION, "height": 8, "width": 8, "prompt": "",
            "max_new_tokens": 4, "precision": "fp32",
        }

        def predict(self, items):
            time.sleep(0.01)
            return [
                {"caption": [f"{REVISION} frame {n}" for n in item["frame_index"]], "frame_index": item["frame_index"]}
                for item in items
            ]
"""


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of videos."""
    folder = tmp_path_factory.mktemp("clips")
    for n in range(CLIPS):
        make_clip(folder / f"{n}.mp4", FRAMES, size=(64, 48))
    return folder


class Jobs:
    """Runs `penstock caption` as a process in one folder; kills leftovers."""

    def __init__(self, folder: Path, clips: Path) -> None:
        self.folder, self.clips = folder, clips
        self.running: list[subprocess.Popen[str]] = []

    def start(self, url: str, output: str, *flags: str, **how: Any) -> subprocess.Popen[str]:
        """Starts a job."""
        arguments = ["caption", str(self.clips), "--server", url, "-o", output, "--prebatch-size", "2", *flags]
        job = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **how,
        )
        self.running.append(job)
        return job

    def run(self, url: str, output: str, *flags: str, **how: Any) -> tuple[int, str]:
        """(exit status, output) of a job that ended by itself."""
        job = self.start(url, output, *flags, **how)
        printed, _ = job.communicate(timeout=120)
        return job.returncode, printed

    def spooled(self, output: str) -> int:
        """The number of rows on disk."""
        files = (self.folder / f"{output}.work" / "spool").glob("*.jsonl")
        return sum(file.read_bytes().count(b'"caption"') for file in files)

    def rows(self, output: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / output).read_text().splitlines()]

    def close(self) -> None:
        for job in self.running:
            if job.poll() is None:
                job.kill()
            job.communicate()


@pytest.fixture
def jobs(tmp_path: Path, clips: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path, clips)
    yield made
    made.close()


@pytest.fixture
def captioner(serve: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Starts the server, always on the same port, with a revision of the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(revision: str = "r1") -> Any:
        (tmp_path / "revision").write_text(revision)
        return serve(SOURCE, "Captioner", "--set", f"server.port={port}")

    return start


def looped(path: Path, frames: int) -> Path:
    """A 1080p clip of about this many frames, made by repeating the packets of two seconds."""
    av = importlib.import_module("av")
    short = make_clip(
        path.with_name("short.mp4"), 60, size=(1920, 1080), fps=30, options={"g": "30", "preset": "ultrafast"}
    )
    with av.open(str(short)) as source, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.dts is not None]
        length = sum(packet.duration for packet in packets)
        for turn in range(frames // len(packets)):
            for packet in packets:
                copy = av.Packet(bytes(packet))
                copy.pts, copy.dts = packet.pts + turn * length, packet.dts + turn * length
                copy.duration, copy.time_base, copy.is_keyframe = packet.duration, packet.time_base, packet.is_keyframe
                copy.stream = stream
                out.mux(copy)
    short.unlink()
    return path


def wait_for(true: Callable[[], Any], job: subprocess.Popen[str]) -> None:
    """Returns when the condition holds; fails if the job ends first."""
    end = time.monotonic() + 60
    while not true():
        assert job.poll() is None, f"the job ended before, {job.returncode}: {job.communicate()[0]}"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def expected(clips: Path, revision: str = "r1") -> list[tuple[str, int, str]]:
    return [(str(path), n, f"{revision} frame {n}") for path in sorted(clips.iterdir()) for n in range(FRAMES)]


def as_told(rows: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [(row["video"], row["frame"], row["caption"]) for row in rows]


def test_a_job_killed_at_random_writes_the_same_output(
    captioner: Callable[..., Any], jobs: Jobs, chaos: SimpleNamespace
) -> None:
    server = captioner()
    assert jobs.run(server.url, "whole.jsonl")[0] == 0
    whole = (jobs.folder / "whole.jsonl").read_bytes()
    assert as_told(jobs.rows("whole.jsonl")) == expected(jobs.clips)
    for again in range(chaos.count(1, 20)):
        output = f"killed{again}.jsonl"
        for _ in range(5):
            before = jobs.spooled(output)
            job = jobs.start(server.url, output)
            more = random.randrange(1, 60)
            wait_for(lambda: jobs.spooled(output) >= before + more, job)  # noqa: B023 - called here
            job.kill()
            assert job.wait() == -signal.SIGKILL
        assert not (jobs.folder / output).exists()
        assert jobs.run(server.url, output)[0] == 0
        assert (jobs.folder / output).read_bytes() == whole


def test_a_server_that_is_killed_and_restarted_costs_no_caption(captioner: Callable[..., Any], jobs: Jobs) -> None:
    server = captioner()
    job = jobs.start(server.url, "captions.jsonl")
    for _ in range(2):
        before = jobs.spooled("captions.jsonl")
        wait_for(lambda: jobs.spooled("captions.jsonl") > before + 40, job)  # noqa: B023 - called here
        server.process.kill()
        server.process.wait()
        server = captioner()
    printed, _ = job.communicate(timeout=120)
    assert job.returncode == 0, printed
    assert as_told(jobs.rows("captions.jsonl")) == expected(jobs.clips)


def test_another_model_at_the_same_address_stops_the_job(captioner: Callable[..., Any], jobs: Jobs) -> None:
    server = captioner()
    job = jobs.start(server.url, "captions.jsonl")
    wait_for(lambda: jobs.spooled("captions.jsonl") > 20, job)
    server.process.kill()
    server.process.wait()
    server = captioner("r2")
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 3, printed
    assert "'r1'" in printed
    assert "'r2'" in printed
    assert not (jobs.folder / "captions.jsonl").exists()
    spools = (jobs.folder / "captions.jsonl.work" / "spool").glob("*")
    assert b"r2 frame" not in b"".join(file.read_bytes() for file in spools)
    code, printed = jobs.run(server.url, "captions.jsonl")
    assert code == 2
    assert 'revision: was "r1", is "r2"' in printed
    assert "--restart" in printed
    assert jobs.run(server.url, "captions.jsonl", "--restart")[0] == 0
    assert as_told(jobs.rows("captions.jsonl")) == expected(jobs.clips, "r2")


def test_ctrl_c_keeps_requests_in_flight_and_the_same_command_continues(jobs: Jobs) -> None:
    gate = threading.Event()
    with FakeCaptioner() as server:
        server.script_next(*[with_wait(gate)] * WINDOW)
        job = jobs.start(server.url, "captions.jsonl")
        wait_for(lambda: len(server.seen) == WINDOW, job)
        job.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert job.poll() is None
        gate.set()
        printed, _ = job.communicate(timeout=30)
        assert job.returncode == 130, printed
        assert "run the same command again" in printed
        assert jobs.spooled("captions.jsonl") == 2 * len(server.seen) == 2 * WINDOW
        assert jobs.run(server.url, "captions.jsonl")[0] == 0
    rows = jobs.rows("captions.jsonl")
    assert [(row["video"], row["frame"]) for row in rows] == [(v, n) for v, n, _ in expected(jobs.clips)]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_job_at_once(jobs: Jobs, first: signal.Signals) -> None:
    gate = threading.Event()
    with FakeCaptioner() as server:
        server.script_next(*[with_wait(gate)] * WINDOW)
        job = jobs.start(server.url, "captions.jsonl")
        wait_for(lambda: len(server.seen) == WINDOW, job)
        job.send_signal(first)
        time.sleep(0.3)
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        assert job.wait(5) == 130
        gate.set()
        assert jobs.run(server.url, "captions.jsonl")[0] == 0
    assert len(jobs.rows("captions.jsonl")) == CLIPS * FRAMES


def test_a_server_that_is_not_up_at_the_beginning_is_awaited_and_then_reported(jobs: Jobs) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, printed = jobs.run(f"http://127.0.0.1:{port}", "captions.jsonl", "--wait", "0")
    assert code == 3
    assert f"127.0.0.1:{port}" in printed
    assert "Traceback" not in printed
    with FakeCaptioner() as server:
        server.metadata.extend([with_status(503, "Retry-After: 1")] * 100)
        code, printed = jobs.run(server.url, "captions.jsonl", "--wait", "0")
        assert code == 3
        assert "not ready" in printed
        server.metadata.clear()
        server.metadata.append(with_status(503, "Retry-After: 1"))
        code, printed = jobs.run(server.url, "captions.jsonl")
        assert code == 0
        assert "waiting for it" in printed


def test_one_of_two_servers_may_start_later(jobs: Jobs) -> None:
    came = threading.Event()

    def first(request: Any, server: FakeCaptioner) -> None:
        good(request, server)
        came.set()

    with FakeCaptioner() as late:
        late.stop()
        late.script_next(first)
        with FakeCaptioner() as server:
            server.script_next(*[good] * 15, *[with_wait(came)] * 100)  # then only the other one answers
            job = jobs.start(server.url, "captions.jsonl", "--server", late.url, "--wait", "0")
            wait_for(lambda: jobs.spooled("captions.jsonl") >= 20, job)
            late.start()
            printed, _ = job.communicate(timeout=60)
            assert job.returncode == 0, printed
            assert "continues without a server" in printed
            assert late.seen
    assert len(jobs.rows("captions.jsonl")) == CLIPS * FRAMES


def test_a_server_that_never_returns_ends_the_job_with_unfinished_videos(jobs: Jobs) -> None:
    with FakeCaptioner() as server:
        job = jobs.start(server.url, "captions.jsonl", "--give-up", "1")
        wait_for(lambda: jobs.spooled("captions.jsonl") > 5, job)
        server.stop()
        printed, _ = job.communicate(timeout=60)
        assert job.returncode == 3, printed
        assert "stopped:" in printed
        assert not (jobs.folder / "failures.jsonl").exists()
        server.start()
        assert jobs.run(server.url, "captions.jsonl")[0] == 0
    assert len(jobs.rows("captions.jsonl")) == CLIPS * FRAMES


def test_a_full_disk_ends_the_job_and_keeps_committed_captions(jobs: Jobs) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    with FakeCaptioner() as server:
        code, printed = jobs.run(server.url, "captions.jsonl", preexec_fn=small_files)
        assert code == 3, printed
        assert "cannot write" in printed
        assert "Traceback" not in printed
        kept = jobs.spooled("captions.jsonl")
        assert kept > 10
        seen = len(server.seen)
        assert jobs.run(server.url, "captions.jsonl")[0] == 0
        assert 2 * (len(server.seen) - seen) <= CLIPS * FRAMES - kept + CLIPS * 2
    assert [row["frame"] for row in jobs.rows("captions.jsonl")] == [*range(FRAMES)] * CLIPS


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a file system")
def test_a_full_file_system_loses_no_caption(jobs: Jobs, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        with FakeCaptioner() as server:
            code, printed = jobs.run(server.url, "small/captions.jsonl")
            assert code == 3, printed
            assert "No space left on device" in printed
            assert subprocess.run(["mount", "-o", "remount,size=4m", str(small)]).returncode == 0
            assert jobs.run(server.url, "small/captions.jsonl")[0] == 0
        assert [row["frame"] for row in jobs.rows("small/captions.jsonl")] == [*range(FRAMES)] * CLIPS
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_ctrl_c_while_waiting_for_a_server_ends_the_job_at_once(jobs: Jobs) -> None:
    with FakeCaptioner() as server:
        server.metadata.extend([with_status(503)] * 1000)
        job = jobs.start(server.url, "captions.jsonl", "--wait", "60")
        wait_for(lambda: server.asked, job)
        job.send_signal(signal.SIGINT)
        assert job.wait(5) == 130


def test_memory_does_not_grow_with_the_length_of_a_video(tmp_path: Path, chaos: SimpleNamespace) -> None:
    frames = chaos.count(480, 54_000)  # half a minute, half an hour
    folder = tmp_path / "videos"
    folder.mkdir()
    looped(folder / "long.mp4", frames)
    jobs, used = Jobs(tmp_path, folder), []
    with FakeCaptioner(height=224, width=224, max_batch_size=64) as server:
        job = jobs.start(server.url, "captions.jsonl", "--prebatch-size", "auto")
        process = psutil.Process(job.pid)
        wait_for(lambda: jobs.spooled("captions.jsonl") > 100, job)
        while job.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                used.append(process.memory_info().rss)
            time.sleep(0.05)
            server.seen.clear()  # frees 150 kB per frame
    assert job.returncode == 0, job.communicate()[0]
    assert [row["frame"] for row in jobs.rows("captions.jsonl")] == [*range(frames)]
    used = [rss for rss in used if rss]
    print("MB:", [rss >> 20 for rss in used[:: max(1, len(used) // 20)]])
    early, late = max(used[: len(used) // 2]), max(used[len(used) // 2 :])
    assert late < 400e6
    assert late < early + 40e6
    jobs.close()
