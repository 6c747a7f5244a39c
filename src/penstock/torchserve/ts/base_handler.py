"""The base class of handlers: it loads an archive's model and runs a batch in three steps.

Only the steps that use torch import it, so a handler that overrides them works without torch.
"""

from __future__ import annotations

import abc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from penstock.torchserve.ts import loading
from penstock.torchserve.ts.loading import IPEX_AVAILABLE as IPEX_AVAILABLE
from penstock.torchserve.ts.loading import ONNX_AVAILABLE as ONNX_AVAILABLE
from penstock.torchserve.ts.loading import PROFILER_AVAILABLE as PROFILER_AVAILABLE
from penstock.torchserve.ts.loading import PT2_AVAILABLE as PT2_AVAILABLE
from penstock.torchserve.ts.loading import PT230_AVAILABLE as PT230_AVAILABLE
from penstock.torchserve.ts.loading import XLA_AVAILABLE as XLA_AVAILABLE
from penstock.torchserve.ts.loading import setup_ort_session as setup_ort_session
from penstock.torchserve.ts.util import load_label_mapping, require, timed

log = logging.getLogger("penstock.model")


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
            loading.allow_tensor_cores()

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
        self.map_location, self.device = loading.choose_device(properties.get("gpu_id"))
        loading.allow_tensor_cores()
        self.manifest = context.manifest
        described = (self.manifest or {}).get("model", {})
        model_dir = properties.get("model_dir")
        serialized = described.get("serializedFile")
        self.model_pt_path = None if serialized is None else os.path.join(model_dir, serialized)
        self.model = self._load(model_dir, described.get("modelFile"))
        self.model = loading.optimize_model(self.model, self.device, self.model_yaml_config)
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
        """The TorchScript module in a file."""
        return loading.load_torchscript(model_pt_path, self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """An instance of the only class in `model_file`, with the weights of the state dict.

        Raises RuntimeError if the file is missing, ValueError for another number of classes.
        """
        trust = getattr(self, "model_yaml_config", {}).get("trust", "none")
        return loading.load_eager(model_dir, model_file, model_pt_path, self.device, trust)

    def _load_torch_export_aot_compile(self, model_so_path: Any) -> Any:
        """The callable in a file written by torch.export or its compiler."""
        return loading.load_exported(model_so_path, self.device)

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
            data = loading.to_device(data, self.device, getattr(self, "model_yaml_config", {}))
            return loading.call(self.model, data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """The rows of the model's tensor, one list per request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """The answers of a batch. Records its time in the metric HandlerTime."""
        return self._timed_answers(data, context, lambda d: self.postprocess(self.inference(self.preprocess(d))))

    def _timed_answers(self, data: Any, context: Any, predict: Callable[[Any], Any]) -> Any:
        start = time.perf_counter()
        self.context = context
        output = self._answers(data, context, predict)
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - start) * 1000, 2), None, "ms")
        return output

    def _answers(self, data: Any, context: Any, predict: Callable[[Any], Any]) -> Any:
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            if self.manifest is None:
                self.manifest = context.manifest
            return self._infer_with_profiler(data=data)[0]
        if self._is_describe():
            return [self.describe_handle()]
        if self._is_explain():
            return self.explain_handle(self.preprocess(data), data)
        return predict(data)

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """The answers of a batch and torch's profile of it, which is also written for TensorBoard."""
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

    def _is_describe(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "describe") == "True"

    def describe_handle(self) -> Any:
        """The model's customized metadata in the management API; None by default."""
        return None

    def get_device(self) -> Any:
        return self.device


def captum() -> Any:
    """The module `captum.attr`, which explains answers. Raises ImportError with the extra to install."""
    return require("captum.attr", "explanations need Captum: pip install '.[explain]'")


def target_class(target: Any) -> Any:
    """The class to explain; a form field holds its digits as bytes."""
    return int(target) if isinstance(target, (bytes, bytearray, str)) else target
