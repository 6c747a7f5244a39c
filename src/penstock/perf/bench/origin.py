"""What was typed, as it may be kept: without what is secret by its name, and without the users of URLs. Pure."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil
from msgspec import Struct, field

from penstock._version import __version__
from penstock.errors import plain
from penstock.perf.bench.measurement import SCHEMA
from penstock.serving.observe.system import Gpus

_LIBRARIES: Final = ("penstock", "uvloop", "httptools", "msgspec")
_CPUINFO: Final = Path("/proc/cpuinfo")


MACHINE: Final = ("cpu", "cores", "memory_gib", "gpus")  # what figures depend on


class Origin(Struct, frozen=True, kw_only=True):
    """Where results come from, as in run.json. `command` is the verb ("bench"), `line` what was typed, redacted."""

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

    @property
    def busy(self) -> str:
        """That other work was on the machine when the run began, if there was."""
        load, cores = self.machine.get("load_before", 0.0), self.machine.get("cores", 1)
        return f"the machine was busy before the run began: load {load:g} on {cores} cores" if load > cores / 2 else ""


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, system, GPUs by name, and how busy it all was a moment ago."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [name for (_, name), *_ in Gpus().read()],
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(libraries: Sequence[str] = ()) -> dict[str, str]:
    """Python's, Penstock's (with its commit when it is run from its own checkout), and those of `libraries` that are
    installed."""
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
    """Of the checkout that this file is in; "" when it was installed, be it into somebody's checkout."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists() or not (root / "src" / "penstock").is_dir():
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


HIDDEN: Final = "***"
_NAME: Final = r"[\w.-]*(?:token|key|password|passwd|secret|authorization|credentials?|signature)"
_SIGN: Final = r"""(?:\s*=\s*|["']\s*[=:]\s*|:\s+)"""  # a colon alone stands in file.py:Class too
_VALUE: Final = r""""(?:[^"\\]|\\.)*"|'[^']*'|(?:(?:bearer|basic)\s+)?[^\s"'&;,}\]]+"""
_SETTING: Final = re.compile(rf"({_NAME}=|--[\w-]+={_NAME}=).+", re.IGNORECASE | re.DOTALL)
_INSIDE: Final = re.compile(rf"(?<![\w.-])({_NAME}{_SIGN})(?:{_VALUE})", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)[^/?#\s]*@")


def redacted(text: str) -> str:
    """The text with *** for the values of names such as `api_key` or `access_token`, and for who a URL says to be."""
    return _USER.sub(f"{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", plain(text)))


def command_line(words: Sequence[str]) -> str:
    """The command line `penstock WORDS`, as it can be pasted into a shell, redacted."""
    return shlex.join(["penstock", *map(_word, words)])


def _word(word: str) -> str:
    setting = _SETTING.fullmatch(word)  # KEY=VALUE: all that stands behind it is the value
    return plain(setting[1]) + HIDDEN if setting else redacted(word)
