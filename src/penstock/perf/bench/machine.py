"""Where a measurement was made: the machine, and the versions of what ran on it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from penstock.serving.observe.system import Gpus

_LIBRARIES: Final = ("penstock", "uvloop", "httptools", "msgspec")
_CPUINFO: Final = Path("/proc/cpuinfo")


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
