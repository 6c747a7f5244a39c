"""The environment of a worker process: threads, memory, visible devices, no reports. Set before it starts."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.os_threads import usable_cores
from penstock.core.worker.spec import WorkerSpec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KEPT_BYTES = 32 * 2**20


def threads_of(spec: WorkerSpec) -> int:
    """Threads of numeric libraries in each worker: `threads`, or physical cores / instances, at least 1.

    One where `instances` is "auto" on the CPU, where as many instances as that gains by are made.
    """
    if spec.config.threads is not None:
        return spec.config.threads
    if spec.config.instances == "auto" and all(device == "cpu" for device in spec.config.devices):
        return 1
    import psutil  # only the parent asks

    allowed = usable_cores()
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    return max(1, cores // spec.instances)


def environment(spec: WorkerSpec, device: str, base: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(environment of a worker on `device`, the name of the device inside of it).

    What the user's own environment says of threads is kept, unless the configuration says otherwise.
    """
    env = dict(base)
    threads = str(threads_of(spec))
    for name in THREAD_VARIABLES:
        if spec.config.threads is not None:
            env[name] = threads
        else:
            env.setdefault(name, threads)
    # Threads that wait must not spin on the cores of the others for long. OpenBLAS's do for 2^26 cycles after each call
    # unless told less (2^4 is the least): the digits model answered 786 requests/s on a busy 2-core machine, 6,506 so.
    env.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    # OpenMP's: not at all, but GNU's, which is PyTorch's, for 0.5 ms, as between layers of a network. ResNet-50 on two
    # cores, nothing else there / one taken by another program: 75 / 84 ms without spinning, 51 / 135 so, 50 / 330 with
    # GNU's own 300,000; a small network behind a busy server 6,300, 8,600 and 7,200 requests/s.
    if "OMP_WAIT_POLICY" not in base and "OMP_WAIT_POLICY" not in spec.config.env:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        env.setdefault("GOMP_SPINCOUNT", "10000")
    # Freed memory is kept for the next batch up to there, as glibc comes to do once blocks of 32 MiB were freed.
    # A photo decoded and resized in turn costs 430 page faults and 0.5 ms of the kernel's time without, 2 and 0.03 so.
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(KEPT_BYTES))
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str(KEPT_BYTES))
    env.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime from 1.31 on reports to its makers, from its import on
    env.setdefault("PYTHONUNBUFFERED", "1")  # what a model prints is seen when it prints it, also through a pipe
    kind, _, index = device.partition(":")
    if kind == "cuda" and index:
        visible = [d for d in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        env["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if int(index) < len(visible) else index
        device = "cuda:0"  # the only one that it sees
    env.update(spec.config.env)
    return env, device
