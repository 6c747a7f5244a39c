"""Calls of a program for several requests: which can share one, their rows in one array, the results of each.

A program on a device may run such a call in three phases.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.core.columns import Block, Empty, TensorRequest, TensorRows
from penstock.core.worker.lengths import Lengths, shortened
from penstock.errors import WrongRowCount

Arrays = dict[str, np.ndarray[Any, Any]]


def groups(requests: Sequence[TensorRequest], lengths: Lengths | None = None) -> Sequence[Sequence[int]]:
    """The places of the requests that can run in one call, for each call. `lengths`: of a model that pads them."""
    block = requests[0].block
    for request in requests:
        if request.block is not block:
            break
    else:
        return [range(len(requests))] if lengths is None else lengths.calls(requests, range(len(requests)))
    found: dict[object, list[int]] = {}
    last, places = None, list[int]()
    for i, request in enumerate(requests):
        if request.block is not last:
            last = request.block
            others = _sizes if lengths is None else lengths.others
            key = tuple([(name, a.dtype.str, others(name, a.shape)) for name, a in sorted(last.arrays.items())])
            places = found.setdefault(key or i, [])  # without inputs, which give the number of rows, alone
        places.append(i)
    if lengths is not None:
        return [call for places in found.values() for call in lengths.calls(requests, places)]
    return list(found.values())


def _sizes(_: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:]


def joined(
    requests: Sequence[TensorRequest], rows: int, empty: Empty | None = None, lengths: Lengths | None = None
) -> Arrays:
    """The arrays of these requests in C order: views of their block if they are neighbours in it, else a copy. With
    `empty`, memory of it. With `lengths`, all as long as the longest."""
    ranges: list[tuple[Block, int, int]] = []  # of neighbouring rows
    block, start, stop = requests[0].block, requests[0].start, requests[0].start
    for r in requests:
        if r.block is not block or r.start != stop:
            ranges.append((block, start, stop))
            block, start = r.block, r.start
        stop = r.start + r.rows
    longest = 0 if lengths is None else lengths.longest(requests)
    if not ranges and (empty is None or block.placed) and (lengths is None or lengths.of(block.arrays) == longest):
        return {name: np.ascontiguousarray(array) for name, array in block.slices(start, rows).items()}
    ranges.append((block, start, stop))
    found = {}
    for name, array in block.arrays.items():
        if lengths is not None and name in lengths.inputs:
            parts = [b.arrays[name][i:k] for b, i, k in ranges]
            found[name] = lengths.padded(name, parts, rows, longest, empty or np.empty)
            continue
        out = None if empty is None else empty((rows, *array.shape[1:]), array.dtype)
        found[name] = np.concatenate([b.arrays[name][i:k] for b, i, k in ranges], out=out)
    return found


def cut(arrays: Arrays, requests: Sequence[TensorRequest], rows: int, lengths: Lengths | None = None) -> list[Any]:
    """The rows of each request. With `lengths`, cut back to its own. Raises BadOutput."""
    outputs = Block(arrays, rows)
    results: list[Any] = []
    start, axes, longest = 0, {}, 0
    if lengths is not None and requests:
        longest = lengths.longest(requests)
        axes = lengths.following(arrays, longest)
    for r in requests:
        found = TensorRows(outputs, start, r.rows, r.single, r.named)
        if axes and lengths is not None and (own := lengths.of(r.block.arrays)) != longest:
            shorter = {n: shortened(a, axes.get(n, ()), own) for n, a in outputs.slices(start, r.rows).items()}
            found = TensorRows(Block(shorter, r.rows), 0, r.rows, r.single, r.named)
        results.append(found if r.planned else found.plain())
        start += r.rows
    return results


def check_rows(outputs: Arrays, rows: int, real: int | None = None) -> None:
    """Raises WrongRowCount unless axis 0 of every output of a call holds its rows, of which `real` are no padding."""
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != rows:
            padded = "" if real in (None, rows) else f" ({real} of a request, padded to {rows})"
            raise WrongRowCount(
                f"output '{name}' has the shape {list(array.shape)} for {rows} rows{padded}; expected its axis 0 to be"
                ' rows, or set rows = "none"'
            )


class PhasedProgram(Protocol):
    """A program on a device that overlaps calls: each phase may be called by a thread of its own. They raise what `run`
    raises."""

    empty: Empty  # memory from which the device copies by itself

    def stage(self, arrays: Arrays, rows: int) -> Any:
        """Starts to copy the inputs of a call, which are arrays of `empty`. On the device they are padded to `rows`."""
        ...

    def launch(self, staged: Any) -> Any:
        """Starts the call behind that copy, and behind all calls that were launched before."""
        ...

    def fetch(self, launched: Any) -> tuple[Arrays, float]:
        """Waits for the outputs; with the seconds that the call alone took on the device."""
        ...


class TensorPhases:
    """See `phases.Phases`: the batches of a TensorModel in the phases of its program."""

    def __init__(self, program: PhasedProgram, one_call: Callable[[int], int], lengths: Lengths | None = None) -> None:
        """`one_call`: the rows of a call for so many rows, with padding; 0 if they need several."""
        self._program, self._one_call, self._lengths = program, one_call, lengths
        self.empty = program.empty

    def stage(self, requests: Sequence[TensorRequest]) -> Any:
        """Starts to copy the rows of a batch; None if it is not a single call. Raises what the program raises."""
        rows = sum([r.rows for r in requests])
        size = self._one_call(rows)
        if not size or len(groups(requests, self._lengths)) > 1:
            return None
        return requests, rows, size, self._program.stage(joined(requests, rows, self.empty, self._lengths), size)

    def launch(self, staged: Any) -> Any:
        """Starts the call. Raises what the program raises."""
        *batch, call = staged
        return *batch, self._program.launch(call)

    def fetch(self, launched: Any) -> tuple[list[Any], float]:
        """Waits for the results, see `predict`; with the seconds on the device. Raises as `predict`."""
        requests, rows, size, call = launched
        outputs, seconds = self._program.fetch(call)
        check_rows(outputs, size, rows)
        if size > rows:
            outputs = {name: array[:rows] for name, array in outputs.items()}
        return cut(outputs, requests, rows, self._lengths), seconds
