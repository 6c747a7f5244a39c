"""The models of `models/` under Triton's Python backend; `app.py` has them for Penstock."""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as backend

Arrays = dict[str, Any]


def mlp(x: Arrays) -> Arrays:
    return {"y": x["x"] @ np.arange(8, dtype=np.float32).reshape(4, 2)}


def same(x: Arrays) -> Arrays:
    return {f"same_{name}": array for name, array in x.items()}


def sums(x: Arrays) -> Arrays:
    if (x["x"] < 0).any():
        raise backend.TritonModelException("a number is negative")
    return {"total": x["x"].sum(keepdims=True).astype(np.int32)}


def classes(x: Arrays) -> Arrays:
    return {"scores": x["x"], "plain": x["x"]}


def added(x: Arrays) -> Arrays:
    b = x.get("b", np.ones_like(x["a"]))
    return {"sum": x["a"] + b, "difference": x["a"] - b}


def slow(x: Arrays) -> Arrays:
    time.sleep(float(x["x"].max()) / 1000)
    return {"y": x["x"]}


PLAIN: dict[str, Callable[[Arrays], Arrays]] = {
    "mlp": mlp, "same": same, "sums": sums, "classes": classes, "added": added, "slow": slow,
}  # fmt: skip


class TritonPythonModel:
    """Answers as the function of the model's name does."""

    def initialize(self, args: dict[str, str]) -> None:
        self.name, self.version = args["model_name"], args["model_version"]
        config = json.loads(args["model_config"])
        self.inputs = [each["name"] for each in config["input"]]
        self.totals: dict[int, Any] = {}

    def execute(self, requests: list[Any]) -> list[Any] | None:
        if self.name in ("count", "text"):
            for request in requests:
                self.stream(request)
            return None
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        try:
            outputs = self.outputs(request)
        except backend.TritonModelException as error:
            return backend.InferenceResponse(error=backend.TritonError(str(error)))
        return backend.InferenceResponse(outputs)

    def outputs(self, request: Any) -> list[Any]:
        if self.name == "bf16":
            given = backend.get_input_tensor_by_name(request, "x")
            return [backend.Tensor.from_dlpack("y", given.to_dlpack())]
        return [backend.Tensor(name, array) for name, array in self.compute(request).items()]

    def compute(self, request: Any) -> Arrays:
        x = self.arrays(request)
        if self.name == "told":
            text = json.dumps(json.loads(request.parameters() or "{}"), sort_keys=True)
            return {"parameters": np.full((len(x["x"]), 1), text, object)}
        if self.name == "versions":
            return {"y": x["x"] + np.int32(self.version)}
        if self.name == "totals":
            place = int(backend.get_input_tensor_by_name(request, "CORRID").as_numpy().item())
            start = backend.get_input_tensor_by_name(request, "START").as_numpy().item()
            self.totals[place] = x["x"] if start else self.totals[place] + x["x"]
            return {"total": self.totals[place]}
        return PLAIN[self.name](x)

    def arrays(self, request: Any) -> Arrays:
        found = {name: backend.get_input_tensor_by_name(request, name) for name in self.inputs}
        return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}

    def stream(self, request: Any) -> None:
        """Sends the numbers below `n`, or `text_input` as often as `repeat` says; a negative number is an error."""
        sender, x = request.get_response_sender(), self.arrays(request)
        times = int(x["n" if self.name == "count" else "repeat"].max()) if "n" in x or "repeat" in x else 1
        for i in range(times):
            array = np.full((1, 1), i, np.int32) if self.name == "count" else x["text_input"]
            tensor = backend.Tensor("i" if self.name == "count" else "text_output", array)
            sender.send(backend.InferenceResponse([tensor]))
        final = backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if times < 0:
            sender.send(backend.InferenceResponse(error=backend.TritonError("the number is negative")), final)
        else:
            sender.send(flags=final)
