"""What runs the model file of a node: ONNX Runtime on the CPU, by CUDA, TensorRT or OpenVINO, or PyTorch.

Nothing here imports a runtime before one is opened.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from penstock.errors import ConfigError, LoadFailed
from penstock.pipeline.collate import Normalization
from penstock.runtimes import onnx, onnx_fuse
from penstock.runtimes.tensors import Input, Program

log = logging.getLogger("penstock.pipeline")

Runtime = Literal["auto", "cpu", "cuda", "tensorrt", "openvino", "torch"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "best"]

OPENVINO: Final = "OpenVINOExecutionProvider"
_TORCH_FILES: Final = (".pt", ".pth", ".pt2", ".ts")
_ENGINES: Final = (".trt", ".engine", ".plan")
_CAN: Final = {  # precisions besides fp32
    "tensorrt": ("fp16", "bf16", "int8"),  # int8 of a graph that was quantised
    "torch on cuda": ("fp16", "bf16"),
    "torch": ("bf16",),
}

_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_told: set[str] = set()


def _forget() -> None:
    """In a forked child: sessions have lost their threads, and the lock may be one that nobody gives back."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Opened(Struct, frozen=True):
    """A program over arrays. `raw`: it takes images as uint8, and normalises them. `gpu`: it runs on one."""

    program: Program
    raw: bool = False
    gpu: bool = False


class Wanted(Struct, frozen=True):
    """What a node says of its model. `threads`: of the call of each of its `instances`. `rows`: the fewest and the most
    of a call."""

    model: str
    runtime: Runtime = "auto"
    precision: Precision = "fp32"
    cache: str | None = None
    threads: int = 1
    instances: int = 1
    rows: tuple[int, int] = (1, onnx.PROFILE_ROWS)


def cores() -> int:
    """The processor cores that this process is meant to use: OMP_NUM_THREADS, which worker processes are given, or
    those that it may run on."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(wanted: Wanted, device: str) -> tuple[str, str]:
    """(runtime, device) of a model, where "auto" is decided: TensorRT, else CUDA, on a GPU. Raises ConfigError,
    LoadFailed for a file that is not there, or that none can run.
    """
    path = wanted.model
    _check_file(wanted)
    torch_file = path.lower().endswith(_TORCH_FILES)
    if not torch_file and not path.lower().endswith(".onnx"):
        engine = path.lower().endswith(_ENGINES)
        told = ": an engine is bound to versions and a GPU, and cannot be checked; name the model that it was made of"
        raise ConfigError(f"model: found {path}, expected a file .onnx, .pt, .pth, .pt2 or .ts{told if engine else ''}")
    if (wanted.runtime == "torch") != torch_file and wanted.runtime != "auto":
        one = "a file of PyTorch" if torch_file else "an ONNX file"
        raise ConfigError(f"runtime: found {wanted.runtime} for {path}, which is {one}; expected auto")
    if wanted.runtime in ("cpu", "openvino"):
        return wanted.runtime, "cpu"
    gpu = device if device.startswith("cuda") else "cuda:0"
    if wanted.runtime in ("cuda", "tensorrt"):
        return wanted.runtime, gpu
    if torch_file:
        return "torch", device
    if not device.startswith("cuda"):
        return "cpu", device
    return ("tensorrt" if onnx.TENSORRT in onnx.import_onnxruntime().get_available_providers() else "cuda"), device


def _check_file(wanted: Wanted) -> None:
    path, cache = wanted.model, wanted.cache
    if os.path.isdir(path):
        raise LoadFailed(f"model: {path} is a folder, expected a file such as {os.path.join(path, 'model.onnx')}")
    if os.path.isfile(path):
        return
    told = ""
    if cache and os.path.exists(cache):
        told = (
            f"; model::cache {cache} alone is not enough: an engine that others made cannot be checked, and is not run"
        )
    raise LoadFailed(f"model: there is no file {path}{told}")


def open_program(
    wanted: Wanted, device: str, normalize: Callable[[Sequence[Input]], Mapping[str, Normalization]] | None = None
) -> Opened:
    """The program of a file; on a GPU it may take the inputs that `normalize` names as they are.

    On the CPU the instances of a process share one: ONNX Runtime runs calls side by side. Raises ConfigError,
    LoadFailed.
    """
    runtime, device = resolve(wanted, device)
    if wanted.cache and os.path.isfile(wanted.cache):
        warn_once("model::cache", wanted.cache, "a file that others wrote", "it is not used, nor changed")
    precision = _precision(wanted, runtime, device)
    if runtime in ("cpu", "openvino"):
        return Opened(_share(wanted, runtime))
    if runtime == "torch":
        return Opened(_open_torch(wanted, device, precision), gpu=device != "cpu")
    graph = None
    if normalize is not None:
        graph = onnx_fuse.normalised(
            wanted.model, lambda inputs: {name: (n.mean, n.scale) for name, n in normalize(inputs).items()}
        )
    return Opened(_open_on_gpu(wanted, runtime, device, precision, graph), raw=graph is not None, gpu=True)


def _share(wanted: Wanted, runtime: str) -> Program:
    """The program of this file in this process, opened if there is none, or the file was written anew."""
    stat = os.stat(wanted.model)
    key = (os.path.realpath(wanted.model), stat.st_mtime_ns, stat.st_size, wanted.threads, wanted.instances, runtime)
    with _lock:
        found: Program | None = _shared.get(key)
        if found is None:
            providers = _openvino(wanted.instances * wanted.threads) if runtime == "openvino" else None
            # a call runs in its own thread and in those of the session, one less than it is told: all calls share these
            threads = 1 + wanted.instances * (wanted.threads - 1)
            session = onnx.open_session(wanted.model, threads=threads, providers=providers)
            found = _shared[key] = onnx.OnnxProgram(session)
        return found


def _openvino(threads: int) -> list[onnx.Provider]:
    available = onnx.import_onnxruntime().get_available_providers()
    if OPENVINO not in available:
        raise LoadFailed(
            f"runtime: openvino needs the {OPENVINO} of ONNX Runtime, and this one has {', '.join(available)}:"
            " pip install onnxruntime-openvino in place of onnxruntime"
        )
    return [(OPENVINO, {"device_type": "CPU", "num_of_threads": threads}), onnx.CPU]


def _open_on_gpu(wanted: Wanted, runtime: str, device: str, precision: str, graph: bytes | None) -> Program:
    if runtime == "tensorrt":
        least, most = wanted.rows
        try:
            return onnx.OnnxProgram(
                onnx.open_tensorrt(
                    wanted.model,
                    device,
                    precision=precision,
                    least_rows=least,
                    most_rows=most,
                    graph=graph,
                    cache=wanted.cache,
                )
            )
        except LoadFailed as e:
            if wanted.runtime != "auto":
                raise
            warn_once("runtime", wanted.model, f"TensorRT does not run it ({e.message[:200]})", "CUDA does")
            _precision(wanted, "cuda", device)
    return onnx.OnnxProgram(onnx.open_session(wanted.model, device, graph=graph))


def _open_torch(wanted: Wanted, device: str, precision: str) -> Program:
    from penstock.runtimes import torch, torch_program

    torch.import_torch().set_num_threads(wanted.threads)
    if torch.kind_of(wanted.model) == "exported":
        return torch_program.of_exported(torch.load_exported(wanted.model, device), device, precision=precision)
    return torch_program.of_module(torch.load_module(wanted.model, device), device, precision=precision)


def _precision(wanted: Wanted, runtime: str, device: str) -> str:
    """That which the runtime computes in; a warning tells where it is not the one that was asked for."""
    can = _CAN.get(f"{runtime} on {device.partition(':')[0]}", _CAN.get(runtime, ()))
    if wanted.precision == "best":
        return "fp16" if "fp16" in can else "fp32"
    if wanted.precision in ("fp32", *can):
        return wanted.precision
    told = f"{wanted.precision}, which {'the CPU' if runtime == 'cpu' else f'{runtime} on {device}'} has not"
    warn_once("precision", wanted.model, told, "it runs in fp32, or in what stands in the file")
    return "fp32"


def warn_once(key: str, file: str, found: str, consequence: str) -> None:
    """A warning of one key for one model, however many instances of it there are."""
    text = f"model={Path(file).name} key={key} found={found!r} consequence={consequence!r}"
    if text not in _told:
        _told.add(text)
        log.warning(text)
