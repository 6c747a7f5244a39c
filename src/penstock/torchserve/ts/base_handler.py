"""The base class of handlers: it loads an archive's model and runs a batch in three steps.

The functions that use torch or a runtime import it, so a handler that overrides the steps works without them. With
micro-batching, parts of a batch run through the three steps concurrently, each step in its own threads.
"""

import abc
import importlib
import logging
import os
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from typing import Any, Final

from penstock.errors import describe, install_hint
from penstock.torchserve.ts.util import (
    check_valid_pt2_backend,
    list_classes_from_module,
    load_label_mapping,
    require,
    timed,
)

log = logging.getLogger("penstock.model")

XLA_AVAILABLE = find_spec("torch_xla") is not None
ONNX_AVAILABLE = find_spec("onnxruntime") is not None
PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = find_spec("torch") is not None
IPEX_AVAILABLE = False  # Intel ended its extension, whose features moved into PyTorch


class BaseHandler(abc.ABC):  # noqa: B024 - subclasses may add abstract methods
    """`device` is a torch.device and `map_location` its type; `initialize` sets `model`.

    `mapping` is {class number as text: label} from index_to_name.json, or None. `profiler_args` are arguments of
    torch.profiler.profile for runs with ENABLE_TORCH_PROFILER.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}
        if "torch" in sys.modules:
            allow_tensor_cores()

    # ---- loading

    def initialize(self, context: Any) -> None:
        """Loads the model that the manifest names, on the worker's device.

        With `modelFile` that is its only class with the state dict in `serializedFile`. Otherwise `serializedFile` is
        the model: TorchScript (.pt), ONNX (.onnx: `model` is the InferenceSession), or compiled ahead of time or
        exported (.so, .pt2). Reads `pt2`, `trust`, `precision` and `optimize` from model-config.yaml. Raises
        RuntimeError for another file type.
        """
        self.model_yaml_config: dict[str, Any] = getattr(context, "model_yaml_config", None) or {}
        properties = context.system_properties
        self.map_location, self.device = choose_device(properties.get("gpu_id"))
        allow_tensor_cores()
        self.manifest = context.manifest
        described = (self.manifest or {}).get("model", {})
        model_dir = properties.get("model_dir")
        serialized = described.get("serializedFile")
        self.model_pt_path = None if serialized is None else os.path.join(model_dir, serialized)
        self.model = self._load(model_dir, described.get("modelFile"))
        self.model = optimize_model(self.model, self.device, self.model_yaml_config)
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        self.initialized = True

    def _load(self, model_dir: str, model_file: str | None) -> Any:
        path = self.model_pt_path
        if model_file:
            return self._load_pickled_model(model_dir, model_file, path).to(self.device).train(False)
        suffix = os.path.splitext(path or "")[1]
        if suffix == ".pt":
            return self._load_torchscript_model(path).train(False)
        if suffix == ".onnx":
            return setup_ort_session(path, self.map_location, self.device)
        if suffix == ".pt2" or (suffix == ".so" and self._use_torch_export_aot_compile()):
            return self._load_torch_export_aot_compile(path)
        raise RuntimeError("No model weights could be loaded")

    def _load_torchscript_model(self, model_pt_path: Any) -> Any:
        """The TorchScript module in a file. Raises LoadFailed."""
        from penstock.runtimes import torch_files

        return torch_files.load_script(model_pt_path, str(self.device))

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """An instance of the only class in `model_file`, with the weights of the state dict if there is one.

        Raises RuntimeError if the file is missing, ValueError for another number of classes, LoadFailed.
        """
        from penstock.runtimes import torch_files

        if not os.path.isfile(os.path.join(model_dir, model_file)):
            raise RuntimeError("Missing the model.py file")
        if model_dir not in sys.path:
            sys.path.insert(0, model_dir)
        classes = list_classes_from_module(importlib.import_module(model_file.split(".")[0]))
        if len(classes) != 1:
            raise ValueError(f"Expected only one class as model definition. {classes}")
        if not model_pt_path:
            return classes[0]()
        device = str(self.device)
        trust = getattr(self, "model_yaml_config", {}).get("trust", "none")
        # files cannot be loaded directly onto XLA devices
        return torch_files.load_weights(
            classes[0], model_pt_path, "cpu" if device.startswith("xla") else device, trust=trust
        )

    def _load_torch_export_aot_compile(self, model_so_path: Any) -> Any:
        """The callable in a library (.so) or package (.pt2) compiled ahead of time by torch, or in an exported program.

        Raises LoadFailed, RuntimeError.
        """
        import torch

        from penstock.runtimes import torch_files

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the loaders take no device
        if model_so_path.endswith(".so"):
            return torch._export.aot_load(model_so_path, self.device.type)
        with zipfile.ZipFile(model_so_path) as package:
            compiled = any("/aotinductor/" in name for name in package.namelist())
        if compiled:
            return torch._inductor.aoti_load_package(model_so_path)
        return torch_files.load_module(model_so_path, str(self.device))

    def _use_torch_export_aot_compile(self) -> bool:
        pt2 = getattr(self, "model_yaml_config", {}).get("pt2")
        export = pt2.get("export") if isinstance(pt2, dict) else None
        return isinstance(export, dict) and export.get("aot_compile") is True

    # ---- the three steps

    @timed
    def preprocess(self, data: Any) -> Any:
        """The batch's data as one tensor on the device."""
        import torch

        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the tensor, without gradients."""
        import torch

        with torch.inference_mode():
            data = to_device(data, self.device, getattr(self, "model_yaml_config", {}))
            return call_model(self.model, data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """The rows of the model's tensor, one list per request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """The responses of a batch. Records its time in the metric HandlerTime."""
        return self._timed_responses(data, context, lambda d: self.postprocess(self.inference(self.preprocess(d))))

    def _timed_responses(self, data: Any, context: Any, predict: Callable[[Any], Any]) -> Any:
        start = time.perf_counter()
        self.context = context
        output = self._responses(data, context, predict)
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - start) * 1000, 2), None, "ms")
        return output

    def _responses(self, data: Any, context: Any, predict: Callable[[Any], Any]) -> Any:
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            if self.manifest is None:
                self.manifest = context.manifest
            return self._infer_with_profiler(data=data)[0]
        if self.context and self.context.get_request_header(0, "describe") == "True":
            return [self.describe_handle()]
        if self._is_explain():
            return self.explain_handle(self.preprocess(data), data)
        return predict(data)

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """The responses of a batch and torch's profile of it, which is also written for TensorBoard."""
        from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

        if not self.profiler_args:
            self.profiler_args = {"activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA], "record_shapes": True}
        if "on_trace_ready" not in self.profiler_args:
            name = ((self.manifest or {}).get("model") or {}).get("modelName", "")
            folder = os.path.join(tempfile.gettempdir(), "pytorch_profiler", name)
            self.profiler_args["on_trace_ready"] = tensorboard_trace_handler(folder)
            log.info("profiling folder=%s", folder)
        with profile(**self.profiler_args) as prof:
            with record_function("preprocess"):
                prepared = self.preprocess(data)
            if self._is_explain():
                with record_function("explain"):
                    output = self.explain_handle(prepared, data)
            else:
                with record_function("inference"):
                    output = self.inference(prepared)
                with record_function("postprocess"):
                    output = self.postprocess(output)
        log.info("profile\n%s", prof.key_averages().table(sort_by="cpu_time_total", row_limit=10))
        return output, prof

    # ---- explanations and descriptions

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """The result of the subclass's `get_insights` for the batch and the first request's field `target`."""
        inputs, target = None, 0
        row = raw_data[0]
        if isinstance(row, dict):
            inputs = row.get("data") or row.get("body")
            target = row.get("target") or 0
        return self.get_insights(data_preprocess, inputs, target)  # type: ignore[attr-defined]

    def _is_explain(self) -> bool:
        if bool(self.context) and self.context.get_request_header(0, "explain") == "True":
            self.explain = True
            return True
        return False

    def describe_handle(self) -> Any:
        """The model's customized metadata in the management API; None by default."""
        return None

    def get_device(self) -> Any:
        return self.device


def choose_device(gpu_id: int | str | None) -> tuple[str | None, Any]:
    """(map location, torch.device): the worker's GPU, otherwise XLA's device, otherwise the CPU."""
    import torch

    if gpu_id is not None and torch.cuda.is_available():
        return "cuda", torch.device(f"cuda:{gpu_id}")
    if gpu_id is not None and torch.xpu.is_available():
        return "xpu", torch.device(f"xpu:{gpu_id}")
    if gpu_id is not None and torch.backends.mps.is_available():
        return "mps", torch.device("mps")
    if XLA_AVAILABLE:
        return None, importlib.import_module("torch_xla.core.xla_model").xla_device()
    return "cpu", torch.device("cpu")


def allow_tensor_cores() -> None:
    """Lets a CUDA device multiply float32 matrices in TF32, as TorchServe's workers do."""
    import torch

    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")


def setup_ort_session(model_pt_path: Any, map_location: str | None, device: Any = None) -> Any:
    """ONNX Runtime's session of a model, on the handler's GPU if ONNX Runtime supports it. Raises LoadFailed."""
    import torch

    from penstock.runtimes import onnx as onnx_files

    place = "cpu"
    if map_location == "cuda":
        if onnx_files.CUDA in onnx_files.import_onnxruntime().get_available_providers():
            place = str(device or "cuda:0")
        else:
            log.warning("onnx_on_cpu model=%s: this ONNX Runtime has no CUDA", os.path.basename(model_pt_path))
    return onnx_files.open_session(model_pt_path, place, threads=torch.get_num_threads())


def optimize_model(model: Any, device: Any, config: dict[str, Any]) -> Any:
    """The model with `precision`, `optimize` and `pt2` of model-config.yaml applied; uncompiled if compiling fails."""
    precision, optimize = config.get("precision", "fp32"), config.get("optimize", "none")
    if (precision, optimize) != ("fp32", "none"):
        from penstock.runtimes.torch import prepare

        model = prepare(model, str(device), precision=precision, optimize=optimize)
    options = compile_options(config.get("pt2"))
    if options is None:
        return model
    import torch

    try:
        return torch.compile(model, **options)
    except Exception as e:
        log.warning("compile_failed options=%s error=%s: the model runs uncompiled", options, describe(e))
        return model


def compile_options(pt2: Any) -> dict[str, Any] | None:
    """The arguments of torch.compile from `pt2` in model-config.yaml; None: do not compile.

    `pt2` is `{compile: {enable: true, backend, mode ...}}`, or in the old form a backend or the arguments alone. Raises
    ValueError.
    """
    if pt2 is None:
        return None
    if isinstance(pt2, str):
        options: dict[str, Any] = {"backend": pt2}
    elif not isinstance(pt2, dict):
        raise ValueError("pt2 should be str or dict")
    elif "compile" in pt2:
        options = dict(pt2["compile"])
        if options.pop("enable", False) is not True:
            return None
    elif "export" in pt2:
        return None
    else:
        options = dict(pt2)
    return options if "backend" not in options or check_valid_pt2_backend(options["backend"]) else None


def to_device(data: Any, device: Any, config: dict[str, Any]) -> Any:
    """The tensor on the model's device; a float tensor also in the `precision` of model-config.yaml."""
    data = data.to(device)
    precision = config.get("precision", "fp32")
    if precision == "fp32" or not data.is_floating_point():
        return data
    from penstock.runtimes.torch import dtype_of

    return data.to(dtype_of(precision))


def call_model(model: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's output for a tensor; for an ONNX session its first output, as a tensor."""
    if not hasattr(model, "get_inputs"):
        return model(data, *args, **kwargs)
    import torch

    name = model.get_inputs()[0].name
    return torch.from_numpy(model.run(None, {name: data.cpu().numpy()}, *args, **kwargs)[0])


def captum() -> Any:
    """The module `captum.attr`, which explains predictions. Raises ImportError with the extra to install."""
    return require("captum.attr", f"explanations need Captum: {install_hint('explain')}")


def target_class(target: Any) -> Any:
    """The class to explain; a form field holds its digits as bytes."""
    return int(target) if isinstance(target, (bytes, bytearray, str)) else target


# ---- micro-batching

HANDLER_METHODS: Final = ("preprocess", "inference", "postprocess")


class MicroBatching:
    """Replaces a handler's `handle`: the handler sets `self.handle = MicroBatching(self)` in `__init__`.

    `parallelism` is {step: threads}, by default 1 each. It and `micro_batch_size`, in items, may change between
    batches.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_local_data = threading.local()
        self._pools: dict[str, tuple[int, ThreadPoolExecutor]] = {}
        self._parallelism = dict.fromkeys(HANDLER_METHODS, 1)
        self.parallelism = parallelism or {}

    @property
    def parallelism(self) -> dict[str, int]:
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        """Sets the number of threads of the given steps. Raises ValueError."""
        for step, threads in parallelism.items():
            if step not in HANDLER_METHODS or threads < 1:
                raise ValueError(f"parallelism: found {step}: {threads}, expected 1 or more of {HANDLER_METHODS}")
        self._parallelism.update(parallelism)

    def handle(self, data: Any) -> list[Any]:
        """The responses of a batch. Raises the first failed micro-batch's error after all have finished."""
        size = self.micro_batch_size
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        results: list[Future[Any]] = [Future() for _ in parts]
        pools = [self._pool(step) for step in HANDLER_METHODS]

        def run(step: int, index: int, value: Any) -> None:
            self.thread_local_data.micro_batch_idx = index
            try:
                value = getattr(self.handler, HANDLER_METHODS[step])(value)
            except BaseException as e:  # `handle` raises it
                results[index].set_exception(e)
            else:
                if step + 1 < len(pools):
                    pools[step + 1].submit(run, step + 1, index, value)
                else:
                    results[index].set_result(value)

        for index, part in enumerate(parts):
            pools[0].submit(run, 0, index, part)
        wait(results)
        return [response for result in results for response in result.result()]

    def __call__(self, data: Any, context: Any) -> Any:
        """Does what the handler's `handle` does, in micro-batches."""
        return self.handler._timed_responses(data, context, self.handle)

    def get_micro_batch_idx(self) -> int | None:
        """The index of the micro-batch that the calling step processes; None outside a step."""
        return getattr(self.thread_local_data, "micro_batch_idx", None)

    def shutdown(self) -> None:
        """Stops the threads; the next batch starts new ones."""
        while self._pools:
            self._pools.popitem()[1][1].shutdown()

    def _pool(self, step: str) -> ThreadPoolExecutor:
        threads, pool = self._pools.get(step, (0, None))
        if pool is None or threads != self._parallelism[step]:
            if pool is not None:
                pool.shutdown()
            threads = self._parallelism[step]
            pool = ThreadPoolExecutor(threads, thread_name_prefix=f"penstock-{step}")
            self._pools[step] = threads, pool
        return pool
