"""An ONNX file under Triton's Python backend: the parameter `file` of its configuration, with one thread."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    """Runs the rows of all requests in one call."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = config["parameters"]["file"]["string_value"]
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._input, self._output = config["input"][0]["name"], config["output"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        arrays = [backend.get_input_tensor_by_name(request, self._input).as_numpy() for request in requests]
        rows = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        (result,) = self._session.run([self._output], {self._input: rows})
        responses, start = [], 0
        for array in arrays:
            end = start + len(array)
            responses.append(backend.InferenceResponse([backend.Tensor(self._output, result[start:end])]))
            start = end
        return responses
