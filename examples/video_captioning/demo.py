"""Captions clips over HTTP and proves that no frame is lost: `python demo.py` (about a minute on two cores).

Makes clips in a temporary folder, starts the captioner with two workers, captions every frame with
`penstock caption`, and verifies the frame numbers in order. Then kills a second run with SIGKILL in the middle, starts
it again, and compares its output with the first one's byte by byte. The exit status is 0 only if every check passes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from make_videos import make_clip
from verify import read_rows, verify

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
EXAMPLE = Path(__file__).parent
START_S = 120.0
KILL_S = 60.0
WIDTH, HEIGHT = 480, 270


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


@contextmanager
def server(instances: int) -> Iterator[str]:
    """The address of a captioner with that many workers, running during the block."""
    command = [PENSTOCK, "serve", str(EXAMPLE / "app.py"), "--instances", str(instances), "--port", "0"]
    command += ["--set", "server.management_port=0", "--set", "server.metrics_port=0"]
    # One thread per worker: more would use the other's core. Idle OpenMP threads must not spin next to the decoders.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with TemporaryFile() as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _address(process, log.fileno())
        finally:
            process.terminate()
            process.wait(30)


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        output = os.pread(log, 2**20, 0).decode(errors="replace")
        if found := re.search(r"inference +(http://127\.0\.0\.1:\d+)", output):
            return found[1]
        time.sleep(0.05)
    output = os.pread(log, 2**20, 0).decode(errors="replace")
    raise SystemExit(f"the captioner did not start within {START_S:g} s, or exited\n{output}")


def caption_command(videos: Path, url: str, output: Path) -> list[str]:
    return [PENSTOCK, "caption", str(videos), "--server", url, "-o", str(output)]


def killed_in_the_middle(command: list[str], spool: Path, frames: int) -> int:
    """Runs a job until a third of its frames are spooled, and kills it. Returns the number of spooled frames."""
    process = subprocess.Popen([*command, "--progress", "none"])
    end = time.monotonic() + KILL_S
    while spooled(spool) < frames // 3:
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise SystemExit(f"the job ended before it could be killed: status {process.wait()}")
        time.sleep(0.005)
    process.kill()
    process.wait()
    done = spooled(spool)
    if done == frames:
        raise SystemExit("the job finished before it was killed; use more --frames")
    return done


def spooled(spool: Path) -> int:
    """How many rows a job has spooled so far."""
    return sum(path.read_bytes().count(b'"caption"') for path in spool.glob("*.jsonl"))


def demo(folder: Path, clips: int, frames: int) -> list[str]:
    """Runs everything in `folder`; returns the failed checks."""
    videos, total = folder / "videos", clips * frames
    videos.mkdir()
    say(f"{clips} clips of {frames} frames, {WIDTH}x{HEIGHT}, H.264")
    truth = {}
    for index in range(clips):
        path = videos / f"clip-{index:03d}.mp4"
        truth[path.name] = make_clip(path, frames, (WIDTH, HEIGHT), seed=index)
        print(f"{path.name}: {truth[path.name][0]} ...", flush=True)
    say("starting the captioner: two workers behind HTTP")
    with server(2) as url:
        first, second = folder / "captions.jsonl", folder / "again.jsonl"
        command = caption_command(videos, url, first)
        say(" ".join(["penstock", *command[1:]]))
        began = time.monotonic()
        status = subprocess.run(command).returncode
        took_s = time.monotonic() - began
        if status != 0:
            return [f"penstock caption exited with status {status}"]
        report = verify(read_rows(first), truth)
        print(f"{report}; {total / took_s:.0f} frames/s including the start of the command", flush=True)
        command = caption_command(videos, url, second)
        say("the same again, killed in the middle")
        done = killed_in_the_middle(command, second.with_name(second.name + ".work") / "spool", total)
        print(f"SIGKILL after {done} of {total} frames", flush=True)
        say("and resumed")
        status = subprocess.run(command).returncode
    faults = list(report.faults)
    if status != 0:
        faults.append(f"the resumed job exited with status {status}")
    elif first.read_bytes() != second.read_bytes():
        faults.append("the output of the resumed job differs from the uninterrupted one")
    else:
        print(f"identical: {first.stat().st_size} bytes")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=6)
    parser.add_argument("--frames", type=int, default=300, help="per clip")
    parser.add_argument("--keep", type=Path, help="copy the clips and captions to this new folder")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="penstock-captions-") as name:
        faults = demo(Path(name), options.clips, options.frames)
        if options.keep:
            shutil.copytree(name, options.keep)
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        say("every frame was captioned once, in order; the killed job lost nothing")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
