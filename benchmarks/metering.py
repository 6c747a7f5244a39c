"""The cost of a program: CPU time of all its processes, and peaks of memory.

Memory is sampled every 20 ms. "RSS" is the peak of each process as the kernel reports it; "own" excludes mapped
files, and counts shared memory once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from closed_loop import Sample

RUN_S = 240.0
SAMPLE_S = 0.02


class Failed(Exception):
    """A program failed."""


class Memory:
    """Peaks during a block, in MB. Processes in `pids` may end meanwhile."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._rss: dict[int, float] = {}
        self.own_mb = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def rss_mb(self) -> float:
        return sum(self._rss.values())

    def __enter__(self) -> Memory:
        for pid in self._pids:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins here
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            own, shared = 0.0, 0.0
            for pid in self._pids:
                with contextlib.suppress(OSError, KeyError):
                    found = _status(pid)
                    self._rss[pid] = found["VmHWM"]
                    own += found["RssAnon"]
                    shared = max(shared, found["RssShmem"])
            self.own_mb = max(self.own_mb, own + shared)


def _status(pid: int) -> dict[str, float]:
    """The memory of a process in MB."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 / 1e6 for words in lines if words[-1:] == ["kB"]}


def run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> Sample:
    """CPU seconds of a program and the children it waited for, and its memory. Raises Failed.

    Its output is in `folder`, in the files `out` and `err`.
    """
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **env})
    watchdog = threading.Timer(RUN_S, process.kill)
    watchdog.start()
    try:
        with Memory([process.pid]) as memory:
            _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    finally:
        watchdog.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise Failed(f"status {process.returncode}: {(folder / 'err').read_text()[-2000:]}")
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "rss_mb": memory.rss_mb, "own_mb": memory.own_mb}
