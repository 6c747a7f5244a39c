"""The models of `models/` for Penstock; `model.py` has them for Triton."""

# ruff: noqa: RUF012 - this is how the documentation declares tensors
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import penstock

Arrays = dict[str, Any]
NUMBERS = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
]


@penstock.model(inputs={"x": "FP32[-1,4]"}, outputs={"y": "FP32[-1,2]"})
def mlp(x: Any) -> Any:
    return x @ np.arange(8, dtype=np.float32).reshape(4, 2)


class Same:
    inputs = [penstock.TensorSpec(name, name, (-1, -1), optional=True) for name in NUMBERS]
    outputs = [penstock.TensorSpec(f"same_{name}", name, (-1, -1), optional=True) for name in NUMBERS]

    def predict(self, items: list[Arrays]) -> list[Arrays]:
        return [{f"same_{name}": item[name] for name in NUMBERS if name in item} for item in items]


@penstock.model(inputs={"x": "BF16[-1,-1]"}, outputs={"y": "BF16[-1,-1]"})
def bf16(x: Any) -> Any:
    return x


@penstock.model(inputs={"x": "INT32[-1]"}, outputs=[penstock.TensorSpec("total", "INT32", (1,))], rows="none")
def sums(x: Any) -> Any:
    if (x < 0).any():
        raise ValueError("a number is negative")
    return x.sum(keepdims=True).astype(np.int32)


class Count:
    inputs = {"n": "INT32[-1,1]"}
    outputs = {"i": "INT32[-1,1]"}

    def predict(self, items: list[Arrays]) -> Iterator[list[Any]]:
        counts = [int(item["n"].max()) for item in items]
        for i in range(max(counts, default=0)):
            yield [{"i": np.full((1, 1), i, np.int32)} if i < count else None for count in counts]
        if min(counts) < 0:
            raise ValueError("the number is negative")


class Text:
    inputs = [
        penstock.TensorSpec("text_input", "BYTES", (-1, 1)),
        penstock.TensorSpec("repeat", "INT32", (-1, 1), optional=True),
    ]
    outputs = {"text_output": "BYTES[-1,1]"}

    def predict(self, items: list[Arrays]) -> Iterator[list[Any]]:
        counts = [int(item["repeat"].max()) if "repeat" in item else 1 for item in items]
        for i in range(max(counts)):
            yield [
                {"text_output": item["text_input"]} if i < count else None
                for item, count in zip(items, counts, strict=True)
            ]
        if min(counts) < 0:
            raise ValueError("the number is negative")


class Totals:
    inputs = {"x": "INT32[-1,1]"}
    outputs = {"total": "INT32[-1,1]"}

    def predict(self, items: list[Arrays], sequences: list[Any]) -> list[Arrays]:
        for item, sequence in zip(items, sequences, strict=True):
            sequence.state = item["x"] if sequence.state is None else sequence.state + item["x"]
        return [{"total": sequence.state} for sequence in sequences]


class Classes:
    inputs = {"x": "FP32[-1,3]"}
    outputs = {"scores": "FP32[-1,3]", "plain": "FP32[-1,3]"}

    def predict(self, x: Any) -> Arrays:
        return {"scores": x, "plain": x}


class Told:
    inputs = {"x": "FP32[-1,1]"}
    outputs = {"parameters": "BYTES[-1,1]"}

    def predict(self, items: list[Arrays], parameters: list[Arrays]) -> list[Arrays]:
        texts = [json.dumps(each, sort_keys=True).encode() for each in parameters]
        pairs = zip(items, texts, strict=True)
        return [{"parameters": np.full((len(item["x"]), 1), text, object)} for item, text in pairs]


@penstock.model(
    inputs=[penstock.TensorSpec("a", "INT32", (-1, 2)), penstock.TensorSpec("b", "INT32", (-1, 2), optional=True)],
    outputs={"sum": "INT32[-1,2]", "difference": "INT32[-1,2]"},
)
def added(a: Any, b: Any = None) -> Arrays:
    b = np.ones_like(a) if b is None else b
    return {"sum": a + b, "difference": a - b}


def chained(data: list[Any]) -> Arrays:
    a, b = data
    return {"SUM": a + b, "DIFFERENCE": a - b}


class Versions:
    inputs = {"x": "INT32[-1,1]"}
    outputs = {"y": "INT32[-1,1]"}

    def __init__(self, version: int) -> None:
        self.version = np.int32(version)

    def predict(self, x: Any) -> Any:
        return x + self.version


@penstock.model(inputs={"x": "INT32[-1,1]"}, outputs={"y": "INT32[-1,1]"})
def slow(x: Any) -> Any:
    time.sleep(float(x.max()) / 1000)
    return x
