"""The programs of the captioning benchmark: captioners behind HTTP, clients that send a clip, and their costs.

CPU time covers all threads and processes, user and system. The start of a client (its imports, its first connection)
is measured with one frame and subtracted from the longer run, because a job of ten thousand videos pays for it once.
Frames/s count from the time at which the client opens the video.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from captioning_clips import EXAMPLE, pan, scenes
from closed_loop import Sample
from metering import Failed, Memory, run
from processes import Processes
from servers import HERE, free_ports, python_of

START_S = 120.0
CPU_CLOCK = 2  # with a process's number above it: its processor time in nanoseconds; /proc tells hundredths of seconds
FLASK, PUBLISHED, PENSTOCK = "flask, one process", "published", "penstock"
THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """`app` is the app for Penstock, `folder` the model for the published handler (None: it only prepares frames).

    `clip` is the file for a height, `right` checks the caption of the frame with a given number.
    """

    name: str
    app: str
    folder: Path | None
    clip: Callable[[int], Path]
    right: Callable[[int, str], bool]


def _says(frame: int, caption: str) -> bool:
    return f"number {' '.join(f'{frame % 1000:03d}')} " in caption


NONE = Model("none", f"{HERE}/captioning_models.py:Captioner", None, pan, lambda frame, caption: caption == str(frame))
TINY = Model("tiny", f"{EXAMPLE}/app.py", EXAMPLE / "captioner", scenes, _says)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a client sends: the published way, and the frames per prebatch (None: the default of Penstock)."""

    mode: str = "stream-prebatch"
    prebatch: int | None = None
    copies: int = 1  # of the clip, one after the other (penstock's client alone)
    core: int | None = None  # where the client runs
    flags: tuple[str, ...] = ()  # more of `penstock caption`


class Captioner(Processes):
    """A captioner behind HTTP, paused unless inside `awake()`. `kind`: penstock, published, or flask."""

    def __init__(
        self,
        kind: str,
        model: Model,
        *,
        workers: int = 2,
        batch: int = 1,
        delay_ms: int = 100,
        flags: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.kind, self.model = kind, model
        self._workers, self.batch, self._delay_ms = workers, batch, delay_ms
        try:
            self.url = self._start_penstock(flags) if kind == PENSTOCK else self._start_published()
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> str:
        """Its configuration in a few words."""
        if self.kind == FLASK:
            return "1 process, 1 thread"
        words = f"{self._workers} worker" + "s" * (self._workers > 1)
        return words if self.kind == PENSTOCK else f"{words}, batch {self.batch} in {self._delay_ms} ms"

    def _start_penstock(self, flags: Sequence[str]) -> str:
        started = self._spawn_penstock(self.model.app, "--instances", str(self._workers), *flags, **THREADS)
        return started["inference"]

    def _start_published(self) -> str:
        workload = {
            "flask": self.kind == FLASK,
            "folder": None if self.model.folder is None else str(self.model.folder),
            "ports": (ports := free_ports(5)),
            "workers": self._workers,
            "batch": self.batch,
            "delay_ms": self._delay_ms,
        }
        peers = HERE / "peers"
        command = [python_of("published"), str(peers / "serve_published.py")]
        self._spawn(command, BENCH_WORKLOAD=json.dumps(workload), PYTHONPATH=str(peers), **THREADS)
        return f"http://127.0.0.1:{ports[0]}/predictions/model"

    def cpu_s(self) -> float:
        """The CPU time of all its running processes."""
        found = 0.0
        for process in self.members():
            with contextlib.suppress(OSError):
                found += time.clock_gettime((~process.pid << 3) | CPU_CLOCK)
        return found

    def pin(self, worker: int, others: int) -> None:
        """Pins its worker processes to one core and its server process to another."""
        for process in self.members():
            core = others if process.pid == self.process.pid else worker
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})

    def warm(self, clip: Path) -> None:
        """Sends requests until it answers, and then enough requests to reach every worker."""
        end = time.monotonic() + START_S
        while True:
            try:
                self.run(clip, 128, Setting())
                return
            except Failed as e:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise SystemExit(f"{self.kind} did not answer: {e}\n{self._log.read_text()[-3000:]}") from None
                time.sleep(0.2)

    def run(self, clip: Path, frames: int, setting: Setting) -> Sample:
        """The cost of captioning the first `frames` frames, including the start. Raises Failed if a caption is
        missing."""
        with self.awake(), tempfile.TemporaryDirectory() as folder:
            send = self._penstock_client if self.kind == PENSTOCK else self._published_client
            command, read = send(clip, frames, setting, Path(folder))
            pids = [process.pid for process in self.members()]
            before_s = self.cpu_s()
            if setting.core is not None:
                command = ["taskset", "-c", str(setting.core), *command]
            with Memory(pids) as server:
                client = run(command, Path(folder), THREADS)
            server_s = self.cpu_s() - before_s
            rows, told = read()
        if rows != frames * setting.copies:
            raise Failed(f"{rows} captions of {frames * setting.copies} frames")
        memory = {"server_rss_mb": server.rss_mb, "server_own_mb": server.own_mb}
        return {**told, **{f"client_{key}": value for key, value in client.items()}, "server_cpu_s": server_s, **memory}

    def _published_client(self, clip: Path, frames: int, setting: Setting, folder: Path) -> Any:
        command = [python_of("published"), str(HERE / "peers" / "published_client.py"), self.url, str(clip)]
        command += ["--mode", setting.mode, "--prebatch", str(setting.prebatch or 32), "--frames", str(frames)]

        def read() -> tuple[int, Sample]:
            said = json.loads((folder / "out").read_text())
            return len(said["captions"]), {key: said[key] for key in ("sent_bytes", "seconds")}

        return command, read

    def _penstock_client(self, clip: Path, frames: int, setting: Setting, folder: Path) -> Any:
        output = folder / "captions.jsonl"
        clips = [folder / f"{number}-{clip.name}" for number in range(setting.copies)]
        for copy in clips:  # a file of the run's own: what the server has answered before it would answer from memory
            shutil.copy(clip, copy)
        command = [sys.executable, "-m", "penstock.cli.main", "caption", *map(str, clips), "--server", self.url]
        command += ["-o", str(output), "--mode", setting.mode, "--max-frames", str(frames), "--progress", "json"]
        if setting.mode == "stream-prebatch" and setting.prebatch is not None:
            command += ["--prebatch-size", str(setting.prebatch)]
        command += setting.flags

        def read() -> tuple[int, Sample]:
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            if [row["frame"] for row in rows] != list(range(frames)) * setting.copies:
                raise Failed("captions are not in the order of the frames")
            wrong = sum(not self.model.right(row["frame"], row["caption"]) for row in rows)
            if wrong > 0.01 * len(rows):
                raise Failed(f"{wrong} of {len(rows)} captions name another frame")
            said = [json.loads(line) for line in (folder / "err").read_text().splitlines() if line.startswith("{")]
            return len(rows), {key: said[-1]["summary"][key] for key in ("sent_bytes", "seconds")}

        return command, read


def per_frame(whole: Sample, start_s: float, frames: int) -> Sample:
    """The row of a run over `frames` frames; `start_s` is the cost of a client with a single frame."""
    client_ms = 1e3 * (whole["client_cpu_s"] - start_s) / (frames - 1)
    server_ms = 1e3 * whole["server_cpu_s"] / frames
    found = {
        "rate": frames / whole["seconds"],
        "total_ms": client_ms + server_ms,
        "client_ms": client_ms,
        "server_ms": server_ms,
        "frame_kb": whole["sent_bytes"] / frames / 1e3,
    }
    memory = ("client_rss_mb", "client_own_mb", "server_rss_mb", "server_own_mb")
    return found | {key: whole[key] for key in memory}


@contextlib.contextmanager
def captioners(*wanted: tuple[str, dict[str, Any]], model: Model) -> Iterator[list[Captioner]]:
    """These servers, with Flask in place of TorchServe if there is no Java."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Captioner(FLASK if kind == PUBLISHED and not shutil.which("java") else kind, model, **how)
            )
            for kind, how in wanted
        ]
