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
    """The scores of one item, `[1, classes]` or `[classes]`, or of none, `[0, classes]`. Raises BadRequest."""
    scores: Array = as_tensor(data, op)
    if scores.size not in (0, scores.shape[-1]) or not scores.shape[-1]:
        raise BadRequest(f"{op} found {found(scores)}, expected the scores of one item, [1, classes]")
    return scores


def best(data: Any, op: str) -> tuple[Any, Any]:
    """The class with the highest score in one row of logits, and its probability. Empty arrays if there is no row."""
    scores = one_row(data, op)
    if not scores.size:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    probabilities = softmax(scores).ravel()
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
    """The best class and its probability, as a list of two floats: `[1, classes]` -> [class, score].

    No rows give float32 `[0, 2]`.
    """

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> list[float] | Array:
        index, score = best(data, "SoftmaxMax")
        return [float(index), score] if isinstance(index, int) else np.empty((0, 2), np.float32)


class SoftmaxArgMax(ItemOp):
    """The best class, as an int: `[1, classes]` -> class. Sets the fields `class` and `score` (its probability).

    No rows give empty arrays.
    """

    takes = "tensor"
    writes = ("class", "score")

    def __call__(self, data: Any, fields: Fields) -> int | Array:
        index: int | Array
        index, fields["score"] = best(data, type(self).__name__)
        fields["class"] = index
        return index


class SoftmaxArgMaxTensor(SoftmaxArgMax):
    """SoftmaxArgMax under TorchPipe's name for a separate op."""


class ArgMax(ItemOp):
    """The best class, as an int: `[1, classes]` or `[classes]` -> class. The first of equal scores.

    No rows give an empty array.
    """

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> int | Array:
        scores = one_row(data, "ArgMax")
        return int(scores.argmax()) if scores.size else np.empty(0, np.int64)


class ArgMaxTensor(TensorOp):
    """The best class of each row: `[rows, ..., classes]` -> int64 `[rows, ...]`. The first of equal scores."""

    def __call__(self, data: Any, fields: Fields) -> Array:
        tensor = as_tensor(data, "ArgMaxTensor")
        if not tensor.shape[-1]:
            raise BadRequest(f"ArgMaxTensor found {found(tensor)}, expected [rows, ..., classes]")
        classes: Array = tensor.argmax(-1)
        return classes
