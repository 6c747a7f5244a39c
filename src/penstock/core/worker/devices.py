"""The devices of workers, and the environment of a worker process: threads, memory and visible devices."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.core.os_threads import usable_cores
from penstock.core.worker.spec import WorkerSpec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KEPT_BYTES = 32 * 2**20
_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 5.0  # of `nvidia-smi`, the fallback without /proc/driver


def threads_of(spec: WorkerSpec) -> int:
    """Threads of numeric libraries in each worker: `threads`, or physical cores / instances, at least 1.

    1 for `instances = "auto"` on the CPU, which already starts enough instances to use the cores.
    """
    if spec.config.threads is not None:
        return spec.config.threads
    if spec.config.instances == "auto" and all(device == "cpu" for device in spec.config.devices):
        return 1
    return max(1, physical_cores() // spec.instances)


def runtime_threads(spec: WorkerSpec) -> int:
    """Threads of a runtime: OMP_NUM_THREADS of the worker's environment, unless the configuration sets them."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if spec.config.threads is None and threads.isdecimal() and int(threads) else threads_of(spec)


def physical_cores() -> int:
    """The number of physical cores that this process may use."""
    import psutil  # only the parent process needs it

    allowed = usable_cores()
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def environment(spec: WorkerSpec, device: str, base: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(environment of a worker on `device`, name of the device inside the worker).

    Thread variables in the user's environment take precedence, unless the configuration sets `threads`.
    """
    env = dict(base)
    threads = str(threads_of(spec))
    for name in THREAD_VARIABLES:
        if spec.config.threads is not None:
            env[name] = threads
        else:
            env.setdefault(name, threads)
    # Idle threads must not spin on the cores of other workers. OpenBLAS spins for 2^26 cycles by default; 2^4 is the
    # minimum. On a busy 2-core machine, the digits model answers 786 requests/s by default and 6,506 with this value.
    env.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    # OpenMP does not spin, except GNU OpenMP (PyTorch), which spins 0.5 ms to bridge the gap between layers. ResNet-50
    # on two idle cores / with one core busy: 75 / 84 ms without spinning, 51 / 135 ms with this value, 50 / 330 ms with
    # GNU's default of 300,000. A small network behind a busy server: 6,300, 8,600 and 7,200 requests/s.
    if "OMP_WAIT_POLICY" not in base and "OMP_WAIT_POLICY" not in spec.config.env:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        env.setdefault("GOMP_SPINCOUNT", "10000")
    # glibc keeps freed blocks up to this size for the next batch. Decoding and resizing a photo costs 430 page faults
    # and 0.5 ms of kernel time without it, 2 page faults and 0.03 ms with it.
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(KEPT_BYTES))
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str(KEPT_BYTES))
    env.setdefault("ORT_DISABLE_TELEMETRY", "1")  # since 1.31, importing ONNX Runtime sends telemetry
    env.setdefault("PYTHONUNBUFFERED", "1")  # a model's output appears at once, also in a pipe
    kind, _, index = device.partition(":")
    if kind == "cuda" and index:
        visible = [d for d in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        numbers = [int(i) for i in index.split(",") if i.isdecimal() and int(i) < len(visible)]
        listed = len(numbers) == len(index.split(","))  # else a UUID, or a number beyond the list
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] for i in numbers) if listed else index
        device = "cuda:0"  # the first visible one; a worker of TorchServe's groups sees several
    env.update(spec.config.env)
    return env, device


def visible_gpus(environment: Mapping[str, str] = os.environ, found: int | None = None) -> int:
    """The number of NVIDIA GPUs (`found`, or counted), limited by CUDA_VISIBLE_DEVICES.

    Does not load the driver's library, because the server process must not.
    """
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return _count() if found is None else found
    named = 0
    for each in (part.strip() for part in shown.split(",")):
        if not each or each.startswith("-"):  # CUDA ignores the rest
            break
        named += 1
    return min(named, _count() if found is None else found) if named else 0


def expanded(devices: Sequence[str]) -> tuple[str, ...]:
    """The devices, with "cuda" replaced by every GPU, if there are any. No devices: the CPU."""
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
