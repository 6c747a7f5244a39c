"""The GPUs that workers may use, told without a driver's library: the process that asks serves requests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 5.0  # of `nvidia-smi`, where the driver shows nothing under /proc


def visible_gpus(environment: Mapping[str, str] = os.environ, found: int | None = None) -> int:
    """How many NVIDIA GPUs there are (`found`), at most those that CUDA_VISIBLE_DEVICES names."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return _count() if found is None else found
    named = 0
    for each in (part.strip() for part in shown.split(",")):
        if not each or each.startswith("-"):  # CUDA looks no further
            break
        named += 1
    return min(named, _count() if found is None else found) if named else 0


def expanded(devices: Sequence[str]) -> tuple[str, ...]:
    """The devices with "cuda" as all GPUs in turn; it stays what it is where there is none. Without any the CPU."""
    found: list[str] = []
    for device in devices or ("cpu",):
        found += ([f"cuda:{i}" for i in range(visible_gpus())] if device == "cuda" else []) or [device]
    return tuple(found)


def _count() -> int:
    try:
        return len(list(_DRIVER.iterdir()))
    except OSError:
        pass
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines())
