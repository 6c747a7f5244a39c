"""What TorchServe tells of the machine: CPU, memory, disk and GPUs, or what a command of the user's prints instead."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import psutil
from msgspec import Struct

from penstock.serving.observe.system import Gpus

log = logging.getLogger("penstock.observe")

SCRIPT: Final = "ts/metrics/metric_collector.py"
"""TorchServe's own script, which its documentation names as an example."""
MOST_BYTES: Final = 2**20  # of what a command prints
_MIB: Final = 2**20
_GIB: Final = 2**30
_LINE: Final = re.compile(
    r"\s*(?P<name>[\w ]+)\.[\w ]+:(?P<value>-?[0-9][-+0-9.eE]*)\|#(?P<dimensions>[^|]*)(\|#type:[^|]+)?\|#hostname:.+"
)


class Measured(Struct, frozen=True):
    """One value; `dimensions` are without the host."""

    name: str
    dimensions: tuple[str, ...]
    value: float


Measure = Callable[[], Awaitable[list[Measured]]]


class Machine:
    """This machine. CPUUtilization is of the time since the last look."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._gpus: Gpus | None = None

    async def measure(self) -> list[Measured]:
        """All of them, read on a thread."""
        return await asyncio.to_thread(self.read)

    def read(self) -> list[Measured]:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
        found = [
            ("CPUUtilization", psutil.cpu_percent()),
            ("DiskAvailable", disk.free / _GIB),
            ("DiskUsage", disk.used / _GIB),
            ("DiskUtilization", disk.percent),
            ("MemoryAvailable", memory.available / _MIB),
            ("MemoryUsed", memory.used / _MIB),
            ("MemoryUtilization", memory.percent),
        ]
        if self._gpus is None:
            self._gpus = Gpus()
        measured = [Measured(name, ("Host",), float(value)) for name, value in found]
        for (index, _), busy, used, total in self._gpus.read():
            where = ("Host", index)
            measured.append(Measured("GPUUtilization", where, round(100 * busy, 2)))
            measured.append(Measured("GPUMemoryUtilization", where, round(100 * used / total, 2) if total else 0.0))
            measured.append(Measured("GPUMemoryUsed", where, used / _MIB))
        return measured


class Command:
    """`system_metrics_cmd`: a Python script and its arguments, run anew for each look in `folder`."""

    def __init__(self, words: Sequence[str], folder: str | None, limit_s: float) -> None:
        self._words, self._folder, self._limit_s = words, folder, limit_s
        self._warned: set[str] = set()

    async def measure(self) -> list[Measured]:
        """The values of the lines that it prints, up to the first empty one; none if it does not end in time."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._words,
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"it could not be started: {error}")
            return []
        try:
            assert process.stdout is not None
            async with asyncio.timeout(self._limit_s):
                printed = await _read(process.stdout)
                await process.wait()
        except TimeoutError:
            self._warn(f"it did not end within {self._limit_s:g} s")
            return []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it started
            await process.wait()
        if process.returncode:
            self._warn(f"it ended with status {process.returncode}")
        return self._parsed(printed.decode("utf-8", "replace"))

    def _parsed(self, text: str) -> list[Measured]:
        found: list[Measured] = []
        for line in text.splitlines():
            if not line.strip():
                break
            measured = parse(line)
            if measured is None:
                self._warn(f"it printed {line[:200]!r}, expected Name.Unit:value|#Level:Host|#hostname:h,time")
            else:
                found.append(measured)
        return found

    def _warn(self, what: str) -> None:
        """Once for each kind of fault, or the log would have nothing else."""
        if len(self._warned) < 10 and what not in self._warned:
            self._warned.add(what)
            log.warning("system_metrics_cmd=%r %s", " ".join(self._words), what)


async def _read(stream: asyncio.StreamReader) -> bytes:
    """What there is until its end, at most MOST_BYTES; the rest is read and dropped."""
    kept = bytearray()
    while piece := await stream.read(65536):
        kept += piece[: MOST_BYTES - len(kept)]
    return bytes(kept)


def parse(line: str) -> Measured | None:
    """A line such as `CPUUtilization.Percent:1.5|#Level:Host|#hostname:h,1795251549`."""
    match = _LINE.fullmatch(line.rstrip())
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    pairs = [pair.partition(":") for pair in match["dimensions"].split(",") if pair]
    return Measured(match["name"], tuple(found for _, _, found in pairs), value)


def measure_of(command: str | None, folder: str | None, interval_s: float) -> Measure:
    """What is done for each look."""
    words = (command or "").split()
    if not words or (words[0] == SCRIPT and not os.path.exists(os.path.join(folder or ".", SCRIPT))):
        return Machine().measure
    return Command(words, folder, min(30.0, interval_s)).measure


async def watch(measure: Measure, tell: Callable[[list[Measured]], None], interval_s: float) -> None:
    """Looks at once and then every `interval_s`, until it is cancelled."""
    while True:
        try:
            tell(await measure())
        except Exception:
            log.exception("machine_not_measured")
        await asyncio.sleep(interval_s)
