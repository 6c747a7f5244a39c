"""TorchServe's system metrics: CPU, memory, disk and GPUs, or the output of the user's own command."""

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

from penstock.core.readings import Gpus

log = logging.getLogger("penstock.torchserve")

SCRIPT: Final = "ts/metrics/metric_collector.py"
"""TorchServe's own script, which its documentation gives as an example."""
MAX_BYTES: Final = 2**20  # of a command's output
_MIB: Final = 2**20
_GIB: Final = 2**30
_LINE: Final = re.compile(
    r"\s*(?P<name>[\w ]+)\.[\w ]+:(?P<value>-?[0-9]+\.?[0-9]*([eE][-+]?[0-9]+)?)"
    r"\|#(?P<dimensions>[^|]*)(\|#type:[^|]+)?\|#hostname:.+"
)


class SystemMetric(Struct, frozen=True):
    """One value; `dimensions` exclude the host."""

    name: str
    dimensions: tuple[str, ...]
    value: float


Measure = Callable[[], Awaitable[list[SystemMetric]]]


class SystemProbe:
    """Measures this machine. CPUUtilization covers the time since the last measurement."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._gpus = Gpus()

    async def measure(self) -> list[SystemMetric]:
        """All system metrics, read on a thread."""
        return await asyncio.to_thread(self.read)

    def read(self) -> list[SystemMetric]:
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
        measured = [SystemMetric(name, ("Host",), float(value)) for name, value in found]
        for (index, _), busy, used, total in self._gpus.read():
            where = ("Host", index)
            measured.append(SystemMetric("GPUUtilization", where, round(100 * busy, 2)))
            measured.append(SystemMetric("GPUMemoryUtilization", where, round(100 * used / total, 2) if total else 0.0))
            measured.append(SystemMetric("GPUMemoryUsed", where, used / _MIB))
        return measured


class MetricsCommand:
    """`system_metrics_cmd`: a Python script with arguments, which runs in `folder` for each measurement."""

    def __init__(self, words: Sequence[str], folder: str | None, limit_s: float) -> None:
        self._words, self._folder, self._limit_s = words, folder, limit_s
        self._warned: set[str] = set()

    async def measure(self) -> list[SystemMetric]:
        """The values in the output, up to the first empty line; none if the command does not end in time."""
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
                os.killpg(process.pid, signal.SIGKILL)  # including its children
            await process.wait()
        if process.returncode:
            self._warn(f"it ended with status {process.returncode}")
        return self._parsed(printed.decode("utf-8", "replace"))

    def _parsed(self, text: str) -> list[SystemMetric]:
        found: list[SystemMetric] = []
        for line in text.splitlines():
            if not line.strip():
                break
            measured = parse_line(line)
            if measured is None:
                self._warn(f"it printed {line[:200]!r}, expected Name.Unit:value|#Level:Host|#hostname:h,time")
            else:
                found.append(measured)
        return found

    def _warn(self, problem: str) -> None:
        """Logs each problem once, because it would recur with every measurement."""
        if len(self._warned) < 10 and problem not in self._warned:
            self._warned.add(problem)
            log.warning("system_metrics_cmd=%r %s", " ".join(self._words), problem)


async def _read(stream: asyncio.StreamReader) -> bytes:
    """The whole output, truncated to MAX_BYTES."""
    kept = bytearray()
    while piece := await stream.read(65536):
        kept += piece[: MAX_BYTES - len(kept)]
    return bytes(kept)


def parse_line(line: str) -> SystemMetric | None:
    """The value in a line such as `CPUUtilization.Percent:1.5|#Level:Host|#hostname:h,1795251549`."""
    match = _LINE.fullmatch(line.rstrip())
    if match is None:
        return None
    pairs = [pair.partition(":") for pair in match["dimensions"].split(",") if pair]
    return SystemMetric(match["name"], tuple(found for _, _, found in pairs), float(match["value"]))


def measure_of(command: str | None, folder: str | None, interval_s: float) -> Measure:
    """The function that measures: the user's command if there is one, else a SystemProbe."""
    words = (command or "").split()
    if not words or (words[0] == SCRIPT and not os.path.exists(os.path.join(folder or ".", SCRIPT))):
        return SystemProbe().measure
    return MetricsCommand(words, folder, min(30.0, interval_s)).measure


async def watch(measure: Measure, report: Callable[[list[SystemMetric]], None], interval_s: float) -> None:
    """Measures at once and then every `interval_s`, until cancelled."""
    while True:
        try:
            report(await measure())
        except Exception:
            log.exception("machine_not_measured")
        await asyncio.sleep(interval_s)
