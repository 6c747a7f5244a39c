"""Opens the model file of a node with ONNX Runtime (CPU, CUDA, TensorRT, OpenVINO) or PyTorch.

This module imports a runtime only when a file needs it.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from penstock.core.os_threads import usable_cores
from penstock.core.worker.tensor_model import Arrays, Input, Program, ProgramSettings
from penstock.errors import ConfigError, LoadFailed
from penstock.runtimes import onnx
from penstock.runtimes.files import refuse_pointer
from penstock.runtimes.pixels import Normalization

log = logging.getLogger("penstock.pipeline")

Runtime = Literal["auto", "cpu", "cuda", "tensorrt", "openvino", "torch"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "best"]

OPENVINO: Final = "OpenVINOExecutionProvider"
SHORT_S: Final = (
    0.002  # a call of one core that more cores do not shorten: 1.6 ms became 1.5 with 1.4 times the CPU time
)
_TORCH_FILES: Final = (".pt", ".pth", ".pt2", ".ts")
_ENGINES: Final = (".trt", ".engine", ".plan")
_PRECISIONS: Final = {  # besides fp32
    "tensorrt": ("fp16", "bf16", "int8"),  # int8 needs a quantized graph
    "torch on cuda": ("fp16", "bf16"),
    "torch": ("bf16",),
}

_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_warned: set[str] = set()
_calls: set[object] = set()  # that run in this process now, of programs that share its cores


def _forget() -> None:
    """In a forked child, drops sessions and calls, whose threads are gone, and the lock, whose holder may be."""
    global _lock, _shared, _calls
    _lock, _shared, _calls = threading.Lock(), weakref.WeakValueDictionary(), set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class OpenedModel(Struct, frozen=True):
    """A program over arrays. `raw`: it takes images as uint8 and normalizes them. `gpu`: it runs on a GPU."""

    program: Program
    raw: bool = False
    gpu: bool = False


class ModelFile(Struct, frozen=True):
    """A node's settings for its model file.

    `threads` counts for one call, and each of `instances` runs one. While the others are idle, a call on the CPU has
    `idle_threads` if these are more. `rows` are the fewest and the most of a call.
    """

    model: str
    runtime: Runtime = "auto"
    precision: Precision = "fp32"
    cache: str | None = None
    threads: int = 1
    instances: int = 1
    idle_threads: int = 1
    rows: tuple[int, int] = (1, onnx.PROFILE_ROWS)


def cores() -> int:
    """The CPU cores for this process: OMP_NUM_THREADS, which worker processes receive, or its CPU affinity."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    return usable_cores()


def resolve(file: ModelFile, device: str) -> tuple[str, str]:
    """Runtime and device of a model. On a GPU, "auto" is TensorRT, else CUDA.

    Raises ConfigError, or LoadFailed for a missing file or one that no runtime can run.
    """
    path, cache = file.model, file.cache
    if os.path.isdir(path):
        raise LoadFailed(f"model: {path} is a folder, expected a file such as {os.path.join(path, 'model.onnx')}")
    if not os.path.isfile(path):
        other = f"; model::cache {cache} alone is not enough: engines of others cannot be checked and do not run"
        raise LoadFailed(f"model: there is no file {path}{other if cache and os.path.exists(cache) else ''}")
    refuse_pointer(path)
    torch_file = path.lower().endswith(_TORCH_FILES)
    if not torch_file and not path.lower().endswith(".onnx"):
        engine = path.lower().endswith(_ENGINES)
        hint = ": an engine works with one version and GPU, which cannot be checked; name its source model instead"
        raise ConfigError(f"model: found {path}, expected a file .onnx, .pt, .pth, .pt2 or .ts{hint if engine else ''}")
    if (file.runtime == "torch") != torch_file and file.runtime != "auto":
        kind = "a PyTorch file" if torch_file else "an ONNX file"
        raise ConfigError(f"runtime: found {file.runtime} for {path}, which is {kind}; expected auto")
    if file.runtime in ("cpu", "openvino"):
        return file.runtime, "cpu"
    if file.runtime in ("cuda", "tensorrt"):
        return file.runtime, device if device.startswith("cuda") else "cuda:0"
    if torch_file:
        return "torch", device
    if not device.startswith("cuda"):
        return "cpu", device
    return ("tensorrt" if onnx.TENSORRT in onnx.import_onnxruntime().get_available_providers() else "cuda"), device


def open_program(
    file: ModelFile, device: str, normalize: Callable[[Sequence[Input]], Mapping[str, Normalization]] | None = None
) -> OpenedModel:
    """The program of a file. On a GPU it may normalize the inputs that `normalize` returns.

    On the CPU the instances of a process share a program, which runs calls concurrently. Raises ConfigError,
    LoadFailed.
    """
    runtime, device = resolve(file, device)
    if file.cache and os.path.isfile(file.cache):
        warn_once("model::cache", file.cache, "a file from another program", "it is neither used nor changed")
    precision = _precision(file, runtime, device)
    if runtime in ("cpu", "openvino"):
        return OpenedModel(_share(file, runtime))
    if runtime == "torch":
        return OpenedModel(_open_torch(file, device, precision), gpu=device != "cpu")
    graph = None
    if normalize is not None:
        graph = onnx.normalised(
            file.model, lambda inputs: {name: (n.mean, n.scale) for name, n in normalize(inputs).items()}
        )
    return OpenedModel(_open_on_gpu(file, runtime, device, precision, graph), raw=graph is not None, gpu=True)


def _share(file: ModelFile, runtime: str) -> Program:
    """This process's program of the file. A changed file is opened again."""
    stat = os.stat(file.model)
    threads = (file.threads, file.instances, file.idle_threads)
    key = (os.path.realpath(file.model), stat.st_mtime_ns, stat.st_size, *threads, runtime)
    with _lock:
        found: Program | None = _shared.get(key)
        if found is None:
            found = _shared[key] = _openvino(file) if runtime == "openvino" else _on_cpu(file)
        return found


def _on_cpu(file: ModelFile) -> Program:
    """A program on the CPU with `threads` per instance, and more for a call that runs alone. Raises LoadFailed."""
    # a call runs in its own thread and in the session's, one fewer than configured, which all calls share
    threads = 1 + file.instances * (file.threads - 1)
    program = onnx.OnnxProgram(onnx.open_session(file.model, threads=threads))
    if file.idle_threads <= threads:
        return program
    wide = onnx.OnnxProgram(onnx.open_session(file.model, threads=file.idle_threads))
    return _CoreSharingProgram(program, wide, file.idle_threads)


class _CoreSharingProgram:
    """One file in two sessions: a call has all cores while two or more are idle for each that runs, otherwise its own.

    One session cannot serve both: two calls at once in the threads of one session of all cores, instead of a core each,
    gave 21 images of ResNet-50 a second instead of 25. A call that more cores do not shorten keeps to one.
    """

    def __init__(self, narrow: Program, wide: Program, threads: int) -> None:
        self.platform, self.inputs, self.outputs = narrow.platform, narrow.inputs, narrow.outputs
        self.rows, self.unbatched = narrow.rows, narrow.unbatched
        self._narrow, self._wide, self._threads = narrow, wide, threads
        self._row_s = 0.0  # moving average of the seconds of a row on one core; at most, if it had several

    def run(self, arrays: Arrays) -> Arrays:
        """As the program of the file."""
        rows = max([1, *map(len, arrays.values())])
        call = object()
        _calls.add(call)
        wide = 2 * len(_calls) <= self._threads and rows * self._row_s > SHORT_S
        begin_s = time.monotonic()
        try:
            return (self._wide if wide else self._narrow).run(arrays)
        finally:
            _calls.discard(call)
            row_s = (time.monotonic() - begin_s) * (self._threads if wide else 1) / rows
            self._row_s += (row_s - self._row_s) * (0.2 if self._row_s else 1.0)


def _openvino(file: ModelFile) -> Program:
    available = onnx.import_onnxruntime().get_available_providers()
    if OPENVINO not in available:
        raise LoadFailed(
            f"runtime: openvino needs the {OPENVINO} of ONNX Runtime, and this one has {', '.join(available)}:"
            " pip install onnxruntime-openvino instead of onnxruntime"
        )
    options = {"device_type": "CPU", "num_of_threads": file.instances * file.threads}
    threads = 1 + file.instances * (file.threads - 1)
    return onnx.OnnxProgram(onnx.open_session(file.model, threads=threads, providers=[(OPENVINO, options), onnx.CPU]))


def _open_on_gpu(file: ModelFile, runtime: str, device: str, precision: str, graph: bytes | None) -> Program:
    if runtime == "tensorrt":
        least, most = file.rows
        try:
            session = onnx.open_tensorrt(
                file.model, device, precision=precision, least_rows=least, most_rows=most, graph=graph, cache=file.cache
            )
            return onnx.OnnxProgram(session)
        except LoadFailed as e:
            if file.runtime != "auto":
                raise
            warn_once("runtime", file.model, f"TensorRT does not run it ({e.message[:200]})", "CUDA does")
            _precision(file, "cuda", device)
    return onnx.OnnxProgram(onnx.open_session(file.model, device, graph=graph))


def _open_torch(file: ModelFile, device: str, precision: str) -> Program:
    from penstock.runtimes import torch

    return torch.open_program(file.model, ProgramSettings(device, precision, threads=file.threads))


def _precision(file: ModelFile, runtime: str, device: str) -> str:
    """The precision that the runtime uses. Warns if it is not the configured one."""
    available = _PRECISIONS.get(f"{runtime} on {device.partition(':')[0]}", _PRECISIONS.get(runtime, ()))
    if file.precision == "best":
        return "fp16" if "fp16" in available else "fp32"
    if file.precision in ("fp32", *available):
        return file.precision
    where = "the CPU" if runtime == "cpu" else f"{runtime} on {device}"
    warn_once(
        "precision",
        file.model,
        f"{file.precision}, which {where} does not have",
        "it runs in fp32, or as the file says",
    )
    return "fp32"


def warn_once(key: str, file: str, found: str, consequence: str) -> None:
    """Logs a warning once per model and key, however many instances there are."""
    text = f"model={Path(file).name} key={key} found={found!r} consequence={consequence!r}"
    if text not in _warned:
        _warned.add(text)
        log.warning(text)
