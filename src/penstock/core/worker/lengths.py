"""Lengths: rows of different lengths in one call. Inputs are padded to the longest row, and results are cut back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import structs

from penstock.core.batching.lengths import LengthClasses
from penstock.core.columns import TensorRequest
from penstock.errors import BadOutput, BadRequest, ConfigError, LoadFailed, nearest
from penstock.types import TensorSpec

Arrays = dict[str, np.ndarray[Any, Any]]
PROBES: Final = (
    8,
    9,
)  # two lengths, which show the axes of outputs that follow them; fixed sizes are rarely neighbours


class Lengths:
    """The axis of each padded input of a program, and the value that fills it up. The inputs of a request have one
    length. `outputs`: the axes of each output that have this length too; it lacks outputs of unknown shape, all axes of
    which that are as long as the padded inputs are taken for such. A call has at most `max_tokens`: rows x its length,
    which is that of a class if there are few `sizes` of calls."""

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[TensorSpec], given: Sequence[TensorSpec]) -> None:
        """`inputs`: of the program; `given`: those that are declared with a value to pad with.

        Raises ConfigError if the program has others.
        """
        known = {i.name: i for i in inputs}
        self.inputs: dict[str, tuple[int, Any]] = {}
        for spec in given:
            where = f"inputs.{spec.name}"
            if spec.name not in known:
                hint = nearest(spec.name, known)
                raise ConfigError(f"{where}: the model has no such input; it has {', '.join(known)}{hint}")
            datatype, shape = known[spec.name].datatype, known[spec.name].shape
            axis, text = spec.shape.index(-1, 1), f"{spec.datatype} {list(spec.shape)}"
            if datatype not in (None, spec.datatype) or (shape is not None and shape[1:] != spec.shape[1:]):
                raise ConfigError(f"{where}.pad: found for {text}, but the model takes {datatype} {list(shape or ())}")
            self.inputs[spec.name] = axis, spec.pad.encode() if isinstance(spec.pad, str) else spec.pad
        self._first = next((name, axis) for name, (axis, _) in self.inputs.items())
        self.max_tokens: int | None = None
        self.in_classes = False
        self.outputs = {o.name: tuple(k for k, n in enumerate(o.shape) if k and n == -1) for o in outputs}

    def sized(self, inputs: Sequence[Any], length: int) -> list[Any]:
        """The inputs, with this length."""
        found = []
        for i in inputs:
            if i.name in self.inputs and i.shape is not None:
                axis = self.inputs[i.name][0]
                i = structs.replace(i, shape=(*i.shape[:axis], length, *i.shape[axis + 1 :]))
            found.append(i)
        return found

    def learn(self, run: Callable[[int], Arrays]) -> None:
        """Finds the axes of the outputs that follow the length. `run` gives the outputs of rows of a length.

        Raises LoadFailed for an output that cannot be cut back.
        """
        first, second = map(run, PROBES)
        for name, array in first.items():
            sizes = list(enumerate(zip(array.shape, second[name].shape, strict=False)))
            axes = [k for k, pair in sizes if k and pair[0] != pair[1]]
            other = next((k for k in axes if sizes[k][1] != PROBES), None)
            if other is not None:
                a, b = sizes[other][1]
                raise LoadFailed(
                    f"output '{name}' has the size {a} on axis {other} for inputs of length {PROBES[0]}, and {b} for"
                    f" {PROBES[1]}: it cannot be cut back to the length of a request, so leave pad out"
                )
            self.outputs[name] = tuple(axes)

    # ---- requests

    def of(self, arrays: Mapping[str, Any]) -> int:
        """The length of a request; 0 if it has none of the inputs."""
        name, axis = self._first
        if name in arrays:  # nearly always
            return int(arrays[name].shape[axis])
        return next((arrays[name].shape[axis] for name, (axis, _) in self.inputs.items() if name in arrays), 0)

    def check(self, arrays: Arrays) -> None:
        """Raises BadRequest."""
        found = {name: arrays[name].shape[axis] for name, (axis, _) in self.inputs.items() if name in arrays}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"'{name}' {n} (axis {self.inputs[name][0]})" for name, n in found.items())
            raise BadRequest(f"padded inputs must all have the same length, found {shown}")
        LengthClasses(self.max_tokens).check(max(found.values(), default=0))

    def longest(self, requests: Sequence[TensorRequest]) -> int:
        """The length of a call."""
        longest = max([self.of(r.block.arrays) for r in requests])
        return LengthClasses(self.max_tokens).up(longest) if self.in_classes and longest else longest

    def calls(self, requests: Sequence[TensorRequest], places: Sequence[int]) -> list[Sequence[int]]:
        """The places, in order of length, in calls of at most `max_tokens`: the server may have estimated lengths."""
        most = self.max_tokens
        if most is None or sum([requests[i].rows for i in places]) * self.longest(requests) <= most:
            return [places]
        found: list[list[int]] = []
        rows = 0
        for i in sorted(places, key=lambda i: self.of(requests[i].block.arrays)):
            rows += requests[i].rows
            if not found or rows * self.of(requests[i].block.arrays) > most:
                found.append([])
                rows = requests[i].rows
            found[-1].append(i)
        return list(found)

    def others(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of an input that the rows of a call must share."""
        axis, _ = self.inputs.get(name, (0, None))
        return (*shape[1:axis], -1, *shape[axis + 1 :]) if axis else shape[1:]

    def padded(self, name: str, parts: Sequence[Any], rows: int, length: int, empty: Any = np.empty) -> Any:
        """The parts of an input below each other, each filled up to this length. `empty` makes the array."""
        axis, value = self.inputs[name]
        shape = parts[0].shape
        found = empty((rows, *shape[1:axis], length, *shape[axis + 1 :]), parts[0].dtype)
        found[...] = value
        start = 0
        for part in parts:
            stop = start + len(part)
            found[(slice(start, stop), *[slice(None)] * (axis - 1), slice(part.shape[axis]))] = part
            start = stop
        return found

    # ---- results

    def following(self, outputs: Arrays, length: int) -> dict[str, tuple[int, ...]]:
        """The axes of each output that follow the inputs of this length. Raises BadOutput for one that should."""
        found = {}
        for name, array in outputs.items():
            axes = self.outputs.get(name)
            if axes is None:
                axes = tuple(k for k, n in enumerate(array.shape) if k and n == length)
            if any(array.shape[k : k + 1] != (length,) for k in axes):
                raise BadOutput(
                    f"output '{name}' has the shape {list(array.shape)} for inputs of length {length}, expected this"
                    f" length on axis {' and '.join(map(str, axes))}, to be cut back to the length of each request"
                )
            if axes:
                found[name] = axes
        return found


def pad(items: Sequence[Any], value: Any = 0) -> np.ndarray[Any, Any]:
    """The items, lists or arrays `[length, ...]`, as one array `[items, longest, ...]`; the value fills up the others.

    Raises ValueError for an item without a length, for other axes that differ, and for a value that the items' type
    does not have.
    """
    arrays = [np.asarray(item) for item in items]
    for place, array in enumerate(arrays):
        if not array.ndim:
            raise ValueError(f"item {place} is a {type(items[place]).__name__}, which has no length: expected lists")
        if array.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(f"item {place} has the shape {list(array.shape)}, the first {list(arrays[0].shape)}")
    dtype = np.result_type(*[a.dtype for a in arrays if a.size] or [np.asarray(value).dtype])
    filled = np.asarray(value).astype(dtype)
    if filled != value and value == value:  # NaN differs from itself
        raise ValueError(f"the value {value!r} is none of the items' type, {dtype}")
    longest = max(map(len, arrays), default=0)
    found = np.full((len(arrays), longest, *(arrays[0].shape[1:] if arrays else ())), filled, dtype)
    for row, array in zip(found, arrays, strict=True):
        row[: len(array)] = array
    return found


def shortened(array: Any, axes: Sequence[int], length: int) -> Any:
    """The array with this length on the axes, in C order."""
    return np.ascontiguousarray(array[tuple(slice(length if k in axes else None) for k in range(array.ndim))])
