"""The origin of results: the command without its secrets, the machine, and the versions of the software."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

import psutil
from msgspec import Struct, field

from penstock._version import __version__
from penstock.core.os_threads import usable_cores
from penstock.core.readings import Gpus
from penstock.errors import plain
from penstock.perf.bench.measurement import SCHEMA

MACHINE: Final = ("cpu", "cores", "memory_gib", "gpus")  # the facts that figures depend on
_LIBRARIES: Final = ("penstock", "uvloop", "httptools", "msgspec")
_CPUINFO: Final = Path("/proc/cpuinfo")

HIDDEN: Final = "***"
_NAME: Final = r"[\w.-]*(?:token|key|password|passwd|secret|authorization|credentials?|signature)"
_SIGN: Final = r"""(?:\s*=\s*|["']\s*[=:]\s*|:\s+)"""  # a colon without a space occurs in file.py:Class
_VALUE: Final = r""""(?:[^"\\]|\\.)*"|'[^']*'|(?:(?:bearer|basic)\s+)?[^\s"'&;,}\]]+"""
_SETTING: Final = re.compile(rf"({_NAME}=|--[\w-]+={_NAME}=).+", re.IGNORECASE | re.DOTALL)
_INSIDE: Final = re.compile(rf"(?<![\w.-])({_NAME}{_SIGN})(?:{_VALUE})", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)[^/?#\s]*@")


class Origin(Struct, frozen=True, kw_only=True):
    """The content of run.json. `command` is the name of the command ("bench"), `line` the redacted command line."""

    command: str
    line: str = ""
    target: str = ""
    slo: str = ""
    seed: int = 0
    started: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    penstock: str = __version__
    schema: int = SCHEMA

    @classmethod
    def of_process(cls, command: str, target: str, slo: str, seed: int, libraries: Sequence[str]) -> Self:
        """The origin of results that this process starts to measure."""
        return cls(
            command=command,
            line=command_line(sys.argv[1:]),
            target=target,
            slo=slo,
            seed=seed,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine(),
            versions=versions(libraries),
        )

    @property
    def busy(self) -> str:
        """A caveat if the machine was busy before the run; else ""."""
        load, cores = self.machine.get("load_before", 0.0), self.machine.get("cores", 1)
        return f"the machine was busy before the run began: load {load:g} on {cores} cores" if load > cores / 2 else ""


def machine() -> dict[str, Any]:
    """CPU, usable cores, memory, system, names of GPUs, and the load average of the last minute."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [name for (_, name), *_ in Gpus().read()],
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(libraries: Sequence[str] = ()) -> dict[str, str]:
    """The versions of Python, Penstock (with its commit in a checkout) and the installed ones of `libraries`."""
    found = {"python": platform.python_version()}
    for name in (*_LIBRARIES, *libraries):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if commit := _commit():
        found["penstock"] = f"{found.get('penstock', '')} ({commit})".strip()
    return found


def _commit() -> str:
    """The commit of the checkout with this file; "" for an installed package, even inside another checkout."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists() or not (root / "src" / "penstock").is_dir():
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def redacted(text: str) -> str:
    """The text with *** for the values of names such as `api_key` or `access_token`, and for users in URLs."""
    return _USER.sub(f"{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", plain(text)))


def command_line(words: Sequence[str]) -> str:
    """The redacted command line `penstock WORDS`, quoted for a shell."""
    return shlex.join(["penstock", *map(_redacted_word, words)])


def _redacted_word(word: str) -> str:
    setting = _SETTING.fullmatch(word)  # in KEY=VALUE everything after the sign is the value
    return plain(setting[1]) + HIDDEN if setting else redacted(word)
