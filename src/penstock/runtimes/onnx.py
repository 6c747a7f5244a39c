"""Runs ONNX models with ONNX Runtime, on the CPU, with CUDA or compiled by TensorRT. Each instance has one session.

Functions import onnxruntime when they are called.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.schema import OPTIMIZATIONS, PRECISIONS
from penstock.core.worker.tensor_model import ANY_ROWS, Array, Arrays, Input, cannot_be_rows
from penstock.errors import ConfigError, LoadFailed, describe
from penstock.plugins import optional_module
from penstock.types import DATATYPES, TensorSpec

log = logging.getLogger("penstock.runtimes")

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
PROFILE_ROWS: Final = 64  # most rows of a TensorRT engine without a configured batch size

_DATATYPES: Final = {
    "tensor(float)": "FP32",
    "tensor(float16)": "FP16",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
    "tensor(bool)": "BOOL",
} | {f"tensor({d})": DATATYPES[d] for d in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")}

# names that tf2onnx, PyTorch's and Paddle's exporters invent for sizes which they do not know
_EXPORTED: Final = re.compile(r"unk__\d+|.*_dim_\d+|.*DynamicDimension.*")

Provider = str | tuple[str, dict[str, Any]]
RAW = "__uint8"  # suffix of a changed input
Steps = Mapping[str, tuple[Array, Array]]


def import_onnxruntime() -> Any:
    """The module `onnxruntime`, with its telemetry off. Raises LoadFailed, which names the extra to install."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at import
    return optional_module("onnxruntime", "ONNX Runtime cannot be imported", "onnx", LoadFailed)


def open_session(
    path: str,
    device: str = "cpu",
    *,
    threads: int = 1,
    providers: Sequence[Provider] | None = None,
    graph: bytes | None = None,
    stream: int | None = None,
) -> Any:
    """An InferenceSession on `device` ("cpu", "cuda:0") with `threads` intra-operator threads, which do not spin.

    `providers` replace the device's default providers, and `graph` replaces the content of the file. `stream` is the
    address of the CUDA stream on which the session runs, instead of its own. Raises LoadFailed.
    """
    ort = import_onnxruntime()
    if not os.path.isfile(path):
        raise LoadFailed(f"there is no file {path}")
    chosen = list(providers) if providers is not None else providers_of(device, stream)
    first = chosen[0] if isinstance(chosen[0], str) else chosen[0][0]
    available = ort.get_available_providers()
    if first not in available:
        raise LoadFailed(
            f"device {device} needs the {first} of ONNX Runtime, but this build has {', '.join(available)}:"
            " install onnxruntime-gpu instead of onnxruntime"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # waiting threads must not occupy the cores of other workers
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(graph or path, options, providers=chosen)
    except Exception as e:  # its errors have no common class
        raise LoadFailed(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {describe(e)[:500]}") from e
    if session.get_providers()[0] != first:  # the session would run on the CPU, reported only in a log line
        raise LoadFailed(f"the {first} of ONNX Runtime could not be started; its log states the reason")
    return session


def providers_of(device: str, stream: int | None = None) -> list[Provider]:
    """The providers of a device. Operators without a CUDA kernel run on the CPU. Raises ConfigError."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return [CPU]
    if kind == "cuda":
        return [(CUDA, {"device_id": int(index or 0), **_on(stream)}), CPU]
    raise ConfigError(f"devices: found {device!r}, expected cpu or cuda:0 for an ONNX model")


def _on(stream: int | None) -> dict[str, str]:
    """The option of a provider that runs on a stream."""
    return {} if stream is None else {"user_compute_stream": str(stream)}


def open_tensorrt(
    path: str,
    device: str,
    *,
    threads: int = 1,
    precision: str = "fp32",
    most_rows: int = PROFILE_ROWS,
    least_rows: int = 1,
    graph: bytes | None = None,
    cache: str | None = None,
    stream: int | None = None,
) -> Any:
    """A session that TensorRT compiles for the device. Later sessions reuse the cached engine.

    The engine is cached next to the file `cache`, or in the user's cache directory. `graph` replaces the content of the
    file. The keyword arguments are independent settings of the engine. Raises LoadFailed, ConfigError.
    """
    ort = import_onnxruntime()
    if TENSORRT not in ort.get_available_providers():
        raise LoadFailed(
            "optimize = 'compile' needs the TensorRT provider of ONNX Runtime on a CUDA device, but this build has"
            f" {', '.join(ort.get_available_providers())}"
        )
    index = int(device.partition(":")[2] or 0)
    options: dict[str, Any] = {"device_id": index, **_on(stream)}
    options |= {"trt_fp16_enable": precision == "fp16", "trt_bf16_enable": precision == "bf16"}
    options |= {"trt_int8_enable": True} if precision == "int8" else {}
    inputs = open_session(path, "cpu", threads=threads, graph=graph).get_inputs()
    profile = _profile(inputs, least_rows, most_rows)
    if profile is None:  # engines are built for request shapes while serving, so there is no engine to cache
        providers = [(TENSORRT, options), *providers_of(device, stream)]
        return open_session(path, device, threads=threads, providers=providers, graph=graph)
    key = {
        "model": file_digest(path) if graph is None else hashlib.sha256(graph).hexdigest(),
        "shapes": profile,
        "precision": precision,
        "device": gpu_name(device),
        "onnxruntime": ort.__version__,
        "tensorrt": tensorrt_version(),
    }
    with (EngineCache.next_to(cache, key) if cache else EngineCache.of_user(key)).open() as folder:
        options |= {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(folder), **profile}
        providers = [(TENSORRT, options), *providers_of(device, stream)]
        return open_session(path, device, threads=threads, providers=providers, graph=graph)


def _profile(inputs: Sequence[Any], least_rows: int, most_rows: int) -> dict[str, str] | None:
    """The profile of an engine: {} if the graph fixes all sizes, None if a size other than the rows is dynamic.

    One for all batches, tuned for the largest: TensorRT takes a profile for each size, but ONNX Runtime builds
    several and runs in the first only (its pull request 31624 would change that).
    """
    shapes = {i.name: list(i.shape) for i in inputs}
    if any(not isinstance(n, int) for shape in shapes.values() for n in shape[1:]):
        return None
    if all(isinstance(shape[0], int) for shape in shapes.values()):
        return {}

    def with_rows(rows: int) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, [rows, *shape[1:]]))}" for name, shape in shapes.items())

    return {
        "trt_profile_min_shapes": with_rows(least_rows),
        "trt_profile_opt_shapes": with_rows(most_rows),
        "trt_profile_max_shapes": with_rows(most_rows),
    }


def gpu_name(device: str) -> str:
    """The GPU model and driver version that an engine depends on. Raises LoadFailed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise LoadFailed(f"there is no driver for {device}: {e}") from e
    handle, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    index = int(device.partition(":")[2] or 0)
    if any((cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(handle), index), cuda.cuDeviceGetName(name, 128, handle))):
        raise LoadFailed(f"this process cannot use a GPU {device}")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return f"{name.value.decode(errors='replace')} driver {version.value}"


def tensorrt_version() -> str:
    """The version of the TensorRT package; "" without a package, where TensorRT itself refuses incompatible engines."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


class OnnxProgram:
    """A session as a program over arrays, with the names, datatypes and shapes of its graph."""

    platform = "onnxruntime_onnx"

    def __init__(self, session: Any) -> None:
        self._session = session
        specs = [_spec(i, "input") for i in session.get_inputs()]
        self.outputs = tuple(_spec(o, "output") for o in session.get_outputs())
        self.unbatched = cannot_be_rows(*([_size(v) for v in s] for s in (session.get_inputs(), session.get_outputs())))
        sizes = [s.shape[0] for s in specs]
        firsts = sizes if self.unbatched else [-1] * len(specs)
        self.inputs = tuple(
            Input(s.name, s.datatype, (first, *s.shape[1:])) for s, first in zip(specs, firsts, strict=True)
        )
        self.rows = (rows := max(sizes), rows) if max(sizes, default=-1) > 0 else ANY_ROWS
        self._names = [o.name for o in self.outputs]

    def run(self, arrays: Arrays) -> Arrays:
        """Raises what ONNX Runtime raises; MemoryError if it ran out of memory."""
        feeds = {i.name: _text(arrays[i.name]) if i.datatype == "BYTES" else arrays[i.name] for i in self.inputs}
        try:
            found = self._session.run(self._names, feeds)
        except Exception as e:
            if lacked_memory(e):
                raise MemoryError(describe(e)) from e
            raise
        return dict(zip(self._names, found, strict=True))


def lacked_memory(error: Exception) -> bool:
    """Whether an error of ONNX Runtime means out of memory."""
    return "allocate memory" in str(error) or "out of memory" in str(error).lower()


def _size(value: Any) -> int | str | None:
    """The size of an input or output of a graph on axis 0, see `cannot_be_rows`."""
    if not value.shape:
        return None
    first = value.shape[0]
    named = isinstance(first, str) and first and not _EXPORTED.fullmatch(first)
    return first if named or isinstance(first, int) else -1


def _spec(value: Any, side: str) -> TensorSpec:
    """An input or output of a graph. Raises LoadFailed unless it is a tensor, and an input has rows."""
    datatype = _DATATYPES.get(value.type)
    shape = tuple(n if isinstance(n, int) and n >= 0 else -1 for n in value.shape)
    if datatype is None or (side == "input" and not shape):
        which = f"of shape {value.shape}" if value.shape else "that is a scalar or has an unknown rank"
        maps = "map(" in value.type  # of scikit-learn's classifiers
        hint = "; convert the model without ZipMap: options={'zipmap': False} of skl2onnx" if maps else ""
        expected = "expected a tensor of numbers or strings whose axis 0 is rows"
        raise LoadFailed(f"{side} '{value.name}' of the graph is a {value.type} {which}; {expected}{hint}")
    return TensorSpec(value.name, datatype, shape)


def _text(array: Array) -> Array:
    """BYTES as the strings that ONNX Runtime requires."""
    cells = [cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else cell for cell in array.ravel()]
    found = np.empty(array.shape, object)
    found.ravel()[:] = cells
    return found


def compiled(device: str, precision: str, optimize: str) -> bool:
    """Whether TensorRT compiles the graph. Raises ConfigError for settings that the device does not support."""
    cuda = device.startswith("cuda")
    if precision not in PRECISIONS or optimize not in OPTIMIZATIONS:
        raise ConfigError(
            f"found precision {precision!r} and optimize {optimize!r}, expected one of {', '.join(PRECISIONS)} and of"
            f" {', '.join(OPTIMIZATIONS)}"
        )
    if optimize == "graph":
        raise ConfigError(
            "optimize: found graph, which is for PyTorch models; leave it out for an ONNX model, or set compile for"
            " TensorRT on a CUDA device"
        )
    if optimize == "compile" and not cuda:
        raise ConfigError(
            "optimize: found compile, which uses TensorRT for an ONNX model and needs a CUDA device; leave it out:"
            " ONNX Runtime fuses operators by itself"
        )
    if precision != "fp32" and optimize != "compile":
        where = "optimize = 'compile' (TensorRT)" if cuda else "a CUDA device and optimize = 'compile' (TensorRT)"
        raise ConfigError(
            f"precision: found {precision}, but an ONNX graph runs in its own datatypes; {precision} needs"
            f" {where}, or a graph exported in {precision}"
        )
    return optimize == "compile"


# ---- pixel normalization (cast from uint8, mean, standard deviation) inside the graph, with the package `onnx`:
# the device receives a quarter of the bytes, and Python does not touch the pixels


def normalised(path: str, steps_of: Callable[[list[Input]], Steps]) -> bytes | None:
    """The graph of a file, with uint8 inputs that it converts to `(x - mean) * scale` in float32.

    `steps_of` receives the inputs and returns the mean and scale by input name, in shapes that broadcast to the input.
    A changed input is named `NAME__uint8`. Returns None without the package `onnx`, and for weights in external files,
    which a graph loaded from bytes cannot find. Raises LoadFailed.
    """
    try:
        import onnx
    except ImportError:
        return None
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as e:  # protobuf errors have no common class
        raise LoadFailed(f"{path} cannot be read as an ONNX model: {describe(e)[:500]}") from e
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer):
        return None
    graph = model.graph
    weights = {t.name for t in graph.initializer}
    steps = steps_of([_input(onnx, value) for value in graph.input if value.name not in weights])
    if not steps:
        return None
    before: list[Any] = []
    for value in graph.input:
        if value.name in steps:
            before += _steps(onnx, graph, value, *steps[value.name])
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend(before + rest)
    found: bytes = model.SerializeToString()
    return found


def plain_input(spec: Input) -> Input:
    """An input as the file declares it, whether or not the graph was changed."""
    return Input(spec.name.removesuffix(RAW), "FP32", spec.shape) if spec.name.endswith(RAW) else spec


def _input(onnx: Any, value: Any) -> Input:
    kind = value.type.tensor_type
    names = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.DOUBLE: "FP64"}
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return Input(value.name, names.get(kind.elem_type, "other"), shape)


def _steps(onnx: Any, graph: Any, value: Any, mean: Array, scale: Array) -> list[Any]:
    """The nodes from the new uint8 input to the original one; their constants are added to the graph."""
    name, kind = value.name, value.type.tensor_type
    kinds, node = onnx.TensorProto, onnx.helper.make_node
    kind.elem_type, was = kinds.UINT8, kind.elem_type
    value.name = raw = name + RAW
    for suffix, constant in (("mean", mean), ("scale", scale)):
        graph.initializer.append(onnx.numpy_helper.from_array(constant.astype(np.float32), f"{raw}.{suffix}"))
    last = [f"{raw}.result"] if was != kinds.FLOAT else [name]
    nodes = [
        node("Cast", [raw], [f"{raw}.float"], to=kinds.FLOAT),
        node("Sub", [f"{raw}.float", f"{raw}.mean"], [f"{raw}.middle"]),
        node("Mul", [f"{raw}.middle", f"{raw}.scale"], last),
    ]
    if was != kinds.FLOAT:
        nodes.append(node("Cast", last, [name], to=was))
    return nodes


# ---- compiled TensorRT engines on disk

SIDECAR = "engine.json"


class EngineCache:
    """The folder of compiled engines for one key: the digest of a model, its shapes, precision, device and versions.

    A sidecar, `engine.json`, holds the whole key and the digest of every file. An engine is code that runs on the
    device, so an engine that does not match the sidecar is deleted, not loaded.
    """

    def __init__(self, root: Path, key: dict[str, Any]) -> None:
        self._key = key
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.folder = root / digest[:32]

    @classmethod
    def of_user(cls, key: dict[str, Any]) -> EngineCache:
        """The cache in `$XDG_CACHE_HOME/penstock/engines`, by default `~/.cache/penstock/engines`."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return cls(Path(home) / "penstock" / "engines", key)

    @classmethod
    def next_to(cls, path: str, key: dict[str, Any]) -> EngineCache:
        """The cache in the folder `PATH.penstock`; a file at `PATH` itself is not touched.

        If the folder is not usable, logs a warning and falls back to the user's cache.
        """
        cache = cls.of_user(key)
        folder = Path(path + ".penstock")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.parent):
                wrong = "" if folder.stat().st_uid == os.getuid() else "it is another user's"
        except OSError as e:
            wrong = describe(e)
        if wrong:
            log.warning("engine_cache folder=%s unusable=%r consequence=kept_in_%s", folder, wrong, cache.folder)
        else:
            cache.folder = folder
        return cache

    @contextmanager
    def open(self) -> Iterator[Path]:
        """The folder, locked for this process, with matching engines or empty; a warning reports deleted engines.

        Writes the sidecar when the context ends.
        """
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder.with_suffix(".lock"), "a") as lock:  # may be another program's file: never truncate
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits while another instance builds the same engine
            if self.folder.exists() and (wrong := self._wrong()):
                log.warning("engine_cache folder=%s ignored=%r consequence=engines_are_built_anew", self.folder, wrong)
                shutil.rmtree(self.folder)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            yield self.folder
            text = json.dumps({"key": self._key, "files": self._files()}, indent=1)
            (self.folder / SIDECAR).write_text(text)

    def _wrong(self) -> str:
        """Why the engines in the folder cannot be used; "" if they can."""
        if self.folder.stat().st_uid != os.getuid():
            return "the folder is another user's"
        if not any(self.folder.iterdir()):
            return ""
        try:
            sidecar = json.loads((self.folder / SIDECAR).read_text())
        except (OSError, ValueError):
            return f"there is no readable {SIDECAR}"
        stored = sidecar if isinstance(sidecar, dict) else {}
        key: dict[str, Any] = stored["key"] if isinstance(stored.get("key"), dict) else {}
        if key != self._key:
            names = sorted(name for name in self._key | key if key.get(name) != self._key.get(name))
            found = [f"{n} {str(key.get(n))[:60]!r}, expected {str(self._key.get(n))[:60]!r}" for n in names]
            return f"{SIDECAR} describes other engines: found {'; '.join(found)}"
        return "" if stored.get("files") == self._files() else "files differ from those that were written"

    def _files(self) -> dict[str, str]:
        files = {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*")) if path.is_file()}
        return {name: file_digest(str(path)) for name, path in files.items() if name != SIDECAR}


def file_digest(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
