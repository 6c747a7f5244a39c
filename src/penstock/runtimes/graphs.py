"""Graphs: the kernels of a call with a fixed number of rows, which the device starts again as a whole.

A small batch spends most of its time in the thread that launches kernels one by one. The replay of a graph is a single
launch. In return its tensors have fixed places: a call copies its inputs there, and the next one overwrites its
results. So a call copies its results elsewhere before it returns. Both copies are kernels, which the device runs in the
order of their launch, and only the copies can be read while the next call runs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.worker.profile import NEGLIGIBLE, STEADY
from penstock.core.worker.tensor_model import Arrays

Tensors = dict[str, Any]  # on the device
Replay = Callable[[], Tensors]


class NotCaptured(Exception):
    """Why the kernels of a model cannot be a graph."""


class Graph:
    """The kernels of a call, captured on `inputs`. It is one of the `Kernels` of a device, for up to `rows` rows."""

    def __init__(self, inputs: Tensors, replay: Replay, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._inputs, self._replay, self._kinds = inputs, replay, _kinds(inputs)

    def takes(self, tensors: Tensors) -> bool:
        """Whether these are the inputs that were captured, apart from their number of rows."""
        return _kinds(tensors) == self._kinds

    def __call__(self, tensors: Tensors) -> Tensors:
        """The results of a call, with padding; the next calls leave them alone."""
        for name, tensor in tensors.items():
            fill(self._inputs[name], tensor)
        return {name: tensor.clone() for name, tensor in self._replay().items()}


def _kinds(tensors: Tensors) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()}


def padded(tensor: Any, rows: int) -> Any:
    """A tensor of PyTorch with at least one row, and its last row repeated up to `rows`."""
    if len(tensor) == rows:
        return tensor
    found = tensor.new_empty((rows, *tensor.shape[1:]))
    fill(found, tensor)
    return found


def fill(place: Any, tensor: Any) -> None:
    """Copies the rows of a tensor to the first ones of `place`, and its last row to all others."""
    count = len(tensor)
    place[:count] = tensor
    if count < len(place):
        place[count:] = tensor[-1:]


def difference(found: Arrays, expected: Arrays) -> str | None:
    """The first output that differs by more than the order of sums explains; None if there is none."""
    for name in found.keys() | expected.keys():
        if name not in found or name not in expected or not _close(found[name], expected[name]):
            return name
    return None


def _close(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    largest = np.abs(b[np.isfinite(b)]).max(initial=0)
    return bool(np.allclose(a, b, rtol=0, atol=NEGLIGIBLE + STEADY * float(largest), equal_nan=True))
