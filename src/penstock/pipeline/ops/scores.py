"""What a classifier's numbers say: softmax, the best class and its score. `[rows, classes]`, along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.base import Array, Fields, ItemOp, as_tensor, found


def softmax(logits: Array) -> Array:
    """Shares that sum up to 1 along the last axis, float32; float64 stays so."""
    x = logits.astype(np.float64 if logits.dtype == np.float64 else np.float32, copy=False)
    x = np.exp(x - x.max(-1, keepdims=True))
    shares: Array = x / x.sum(-1, keepdims=True)
    return shares


def best(data: Any, op: str) -> tuple[int, float]:
    """The class with the highest score in one row of logits, `[1, classes]` or `[classes]`, and its share."""
    logits = as_tensor(data, op)
    if logits.size != logits.shape[-1]:
        raise BadRequest(f"{op} found {found(logits)}, expected the scores of one item, [1, classes]")
    shares = softmax(logits).ravel()
    index = int(shares.argmax())
    return index, float(shares[index])


class SoftmaxCpu(ItemOp):
    """Shares that sum up to 1: `[rows, classes]` -> float32 `[rows, classes]`.

    Of a list, each; what has not two axes is as it was, as in TorchPipe.
    """

    takes = "tensor"
    gives = "tensor"

    def __call__(self, data: Any, fields: Fields) -> Any:
        if isinstance(data, list | tuple):
            return [self(tensor, fields) for tensor in data]
        tensor = as_tensor(data, "SoftmaxCpu")
        return softmax(tensor) if tensor.ndim == 2 else tensor


class SoftmaxMax(ItemOp):
    """The best class and its share, as a list of two floats: `[1, classes]` -> [class, score]."""

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> list[float]:
        index, score = best(data, "SoftmaxMax")
        return [float(index), score]


class SoftmaxArgMax(ItemOp):
    """The best class, as an int: `[1, classes]` -> class. The fields `class` and `score` have it and its share."""

    takes = "tensor"
    writes = ("class", "score")

    def __call__(self, data: Any, fields: Fields) -> int:
        fields["class"], fields["score"] = best(data, type(self).__name__)
        index: int = fields["class"]
        return index


class SoftmaxArgMaxTensor(SoftmaxArgMax):
    """SoftmaxArgMax, as TorchPipe names it where it is not part of a model."""


class ArgMax(ItemOp):
    """The best class, as an int: `[1, classes]` or `[classes]` -> class. The first of equals."""

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> int:
        tensor = as_tensor(data, "ArgMax")
        if tensor.size != tensor.shape[-1]:
            raise BadRequest(f"ArgMax found {found(tensor)}, expected the scores of one item, [1, classes]")
        return int(tensor.argmax())


class ArgMaxTensor(ItemOp):
    """The best class of each row: `[rows, ..., classes]` -> int64 `[rows, ...]`. The first of equals."""

    takes = "tensor"
    gives = "tensor"

    def __call__(self, data: Any, fields: Fields) -> Array:
        best_classes: Array = as_tensor(data, "ArgMaxTensor").argmax(-1)
        return best_classes
