"""Scores of classifiers: softmax, the best class and its score, along the last axis of `[rows, classes]`."""

from typing import Any

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.base import Array, Fields, ItemOp, TensorOp, as_tensor, found


def softmax(logits: Array) -> Array:
    """Probabilities that sum to 1 along the last axis, float32; float64 for float64."""
    x = logits.astype(np.float64 if logits.dtype == np.float64 else np.float32, copy=False)
    x = np.exp(x - x.max(-1, keepdims=True))
    probabilities: Array = x / x.sum(-1, keepdims=True)
    return probabilities


def one_row(data: Any, op: str) -> Array:
    """The scores of one item, `[1, classes]` or `[classes]`. Raises BadRequest."""
    scores = as_tensor(data, op)
    if scores.size != scores.shape[-1]:
        raise BadRequest(f"{op} found {found(scores)}, expected the scores of one item, [1, classes]")
    return scores


def best(data: Any, op: str) -> tuple[int, float]:
    """The class with the highest score in one row of logits, and its probability."""
    probabilities = softmax(one_row(data, op)).ravel()
    index = int(probabilities.argmax())
    return index, float(probabilities[index])


class SoftmaxCpu(TensorOp):
    """Probabilities that sum to 1: `[rows, classes]` -> float32 `[rows, classes]`.

    Applies to each tensor of a list. A tensor without two axes stays unchanged, as in TorchPipe.
    """

    def __call__(self, data: Any, fields: Fields) -> Any:
        if isinstance(data, list | tuple):
            return [self(tensor, fields) for tensor in data]
        tensor = as_tensor(data, "SoftmaxCpu")
        return softmax(tensor) if tensor.ndim == 2 else tensor


class SoftmaxMax(ItemOp):
    """The best class and its probability, as a list of two floats: `[1, classes]` -> [class, score]."""

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> list[float]:
        index, score = best(data, "SoftmaxMax")
        return [float(index), score]


class SoftmaxArgMax(ItemOp):
    """The best class, as an int: `[1, classes]` -> class. Sets the fields `class` and `score` (its probability)."""

    takes = "tensor"
    writes = ("class", "score")

    def __call__(self, data: Any, fields: Fields) -> int:
        fields["class"], fields["score"] = best(data, type(self).__name__)
        index: int = fields["class"]
        return index


class SoftmaxArgMaxTensor(SoftmaxArgMax):
    """SoftmaxArgMax under TorchPipe's name for a separate op."""


class ArgMax(ItemOp):
    """The best class, as an int: `[1, classes]` or `[classes]` -> class. The first of equal scores."""

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> int:
        return int(one_row(data, "ArgMax").argmax())


class ArgMaxTensor(TensorOp):
    """The best class of each row: `[rows, ..., classes]` -> int64 `[rows, ...]`. The first of equal scores."""

    def __call__(self, data: Any, fields: Fields) -> Array:
        classes: Array = as_tensor(data, "ArgMaxTensor").argmax(-1)
        return classes
