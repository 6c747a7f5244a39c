"""ModelOp: the op of a node that runs a model file, batch by batch. See docs/pipelines.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec import Struct

from penstock import metrics
from penstock.errors import BadOutput, BadRequest, ConfigError
from penstock.pipeline.collate import (
    PIXELS,
    Collator,
    Normalization,
    array_of,
    calls,
    check,
    chunks,
    dtype_of,
    normalizations,
)
from penstock.pipeline.ops.base import BatchOp, Fields, found
from penstock.pipeline.runtimes import Precision, Runtime, Wanted, cores, open_program, warn_once
from penstock.runtimes.onnx import PROFILE_ROWS
from penstock.runtimes.onnx_fuse import RAW, plain_input
from penstock.runtimes.tensors import ANY_ROWS, Input, Program
from penstock.types import DTYPES, TensorSpec

Array = np.ndarray[Any, Any]

WARMED = 16  # sizes of batches that are run before the first request, on a GPU
MOST_KNOWN = 1024  # dtypes and shapes that are checked once
MOST_VIEWED = 2**20  # bytes of an output that the slices of a batch may keep alive; larger ones are copied apart


class _Key(NamedTuple):
    """What the items of one call are alike in: whether the program normalises their pixels, the shape of one row for
    each input, and dtypes where the program does not tell its own."""

    raw: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]


class _Given(Struct):
    """One item that fits the model: an array for each input, and their rows."""

    arrays: list[Array]
    rows: int
    key: _Key


class ModelOp(BatchOp):
    """Runs a model file: data `[rows, ...]` -> result `[rows, ...]`, a list of them where the model has several inputs
    or outputs.

    - `model`: the file, .onnx, or .pt, .pth, .pt2, .ts of PyTorch.
    - `runtime`: what runs it; auto is TensorRT, else CUDA, on a GPU, and the CPU elsewhere.
    - `precision`: what TensorRT and PyTorch compute in; a warning tells where that cannot be done.
    - `mean`: subtracted from the pixels of each channel, or one number for all.
    - `std`: what pixels are then divided by.
    - `model_cache`: beside this file engines of TensorRT are kept.
    - `threads`: threads inside an operator on the CPU, by default cores / instances.
    - `instances`: of the node, for `threads`.
    - `max_batch`: most rows of one call.
    - `min_batch`: fewest rows of one call; what lacks is filled up.
    - `sizes`: the only numbers of rows that are run.
    - `input_reorder`: for each place of the data, which input of the model it is for: "1, 0" swaps two.
    - `output_reorder`: for each place of the result, which output of the model it has.
    """

    takes = "tensor"
    gives = "tensor"

    def __init__(
        self,
        model: str,
        runtime: Runtime = "auto",
        precision: Precision = "fp32",
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        model_cache: str | None = None,
        threads: int | None = None,
        instances: int = 1,
        max_batch: int | None = None,
        min_batch: int = 1,
        sizes: tuple[int, ...] = (),
        input_reorder: tuple[int, ...] = (),
        output_reorder: tuple[int, ...] = (),
    ) -> None:
        if 0 in std or not all(np.isfinite([*mean, *std])):
            raise ConfigError(f"std and mean: found {std} and {mean}, expected numbers, and no std of 0")
        self._sizes = tuple(sorted(set(sizes)))
        self._asked = self._sizes[-1] if self._sizes else max_batch
        self._least, self._most = min_batch, self._asked or ANY_ROWS[1]
        if not 1 <= self._least <= self._most or min(self._sizes, default=1) < 1:
            told = f"min_batch {min_batch}, max_batch {max_batch}, sizes {list(sizes)}"
            raise ConfigError(f"found {told}, expected 1 <= min_batch <= max_batch")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads = {threads}, expected 1 or more")
        threads = threads or max(1, cores() // instances)
        rows = (min(self._sizes, default=min_batch), self._asked or max(PROFILE_ROWS, min_batch))
        self._wanted = Wanted(model, runtime, precision, model_cache, threads, instances, rows)
        self._mean, self._std = mean, std
        self._orders = (input_reorder, output_reorder)
        self._programs: dict[bool, Program] = {}  # whether it normalises pixels itself -> program
        self._device = "cpu"
        self._label = Path(model).stem

    # ---- life

    def load(self, device: str) -> None:
        """Opens the file. Raises LoadFailed, ConfigError."""
        self._device = device
        opened = open_program(self._wanted, device, self._normalizations_of)
        program, self._takes_raw = opened.program, opened.raw
        specs = [plain_input(i) for i in program.inputs]
        self._inputs = _ordered(specs, self._orders[0], "input_reorder")
        self.outputs = _ordered(program.outputs, self._orders[1], "output_reorder")
        self.inputs = tuple(
            TensorSpec(i.name, i.datatype, i.shape)
            for i in self._inputs
            if i.datatype is not None and i.shape is not None
        )
        self._normalizations = self._normalizations_of(specs)
        self._known: dict[tuple[Any, ...], tuple[int, _Key]] = {}  # dtypes and shapes -> rows, key
        self._collators = [Collator() for _ in self._inputs]
        self._programs = {opened.raw: program}
        self._check_rows(program)
        if opened.gpu:
            self._warm_up()

    def _normalizations_of(self, inputs: Sequence[Input]) -> dict[str, Normalization]:
        return normalizations(inputs, self._mean, self._std)

    def _program(self, raw: bool) -> Program:
        """The program that takes pixels as they are, or the one of floats, which is opened when some come."""
        if raw not in self._programs:
            told = "items that are no uint8 came to a graph of pixels"
            warn_once("mean", self._wanted.model, told, "another session is opened for them")
            self._programs[raw] = open_program(self._wanted, self._device).program
        return self._programs[raw]

    def _check_rows(self, program: Program) -> None:
        """What the graph says of rows bounds what the node does."""
        least, most = program.rows
        if most < ANY_ROWS[1]:
            self.max_rows = most
            if (self._asked or 0) > most:
                told = f"the graph takes {most} rows at once, the node has max_batch {self._asked}"
                warn_once("max_batch", self._wanted.model, told, f"{most} at a time are run: export it with free rows")
        self._sizes = tuple(size for size in self._sizes if least <= size <= most)
        self._most = min(self._most, most)
        self._least = min(max(self._least, least), self._most)

    def _warm_up(self) -> None:
        """Runs batches of zeros: on a GPU the first one of each size is slow, while kernels are chosen for it."""
        if any(i.datatype in (None, "BYTES") or i.shape is None or -1 in i.shape[1:] for i in self._inputs):
            return
        most = self._most if self._most < ANY_ROWS[1] else self._least
        for rows in self._sizes or {*range(self._least, min(most, WARMED) + 1), most}:
            arrays = [
                np.zeros(
                    (rows, *cast(Any, i.shape)[1:]),
                    PIXELS if i.name in self._normalizations else DTYPES[cast(str, i.datatype)],
                )
                for i in self._inputs
            ]
            self([arrays if len(arrays) > 1 else arrays[0]], [{}])

    def unload(self) -> None:
        """Lets the program go."""
        self._programs.clear()

    # ---- a batch

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """A result for each item; BadRequest for one that does not fit the model. One call a shape and dtype."""
        results: list[Any] = [None] * len(data)
        groups: dict[_Key, list[tuple[int, _Given]]] = {}
        for i, item in enumerate(data):
            try:
                given = self._given(item)
            except BadRequest as e:
                results[i] = e
            else:
                groups.setdefault(given.key, []).append((i, given))
        for group in groups.values():
            answers = self._together([given for _, given in group])
            for (i, _), result in zip(group, answers, strict=True):
                results[i] = result
        return results

    def _given(self, item: Any) -> _Given:
        """Raises BadRequest: what was found and what was expected."""
        values = list(item) if isinstance(item, list | tuple) else [item]
        if len(values) != len(self._inputs):
            names = ", ".join(i.name for i in self._inputs)
            expected = f"a list of {len(self._inputs)} tensors" if len(self._inputs) > 1 else "one tensor"
            raise BadRequest(f"the model has the inputs {names}; found {found(item)}, expected {expected}")
        arrays = [array_of(spec, value) for spec, value in zip(self._inputs, values, strict=True)]
        signature = tuple([(array.dtype, array.shape) for array in arrays])
        known = self._known.get(signature)
        if known is None:
            known = self._checked(arrays)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[signature] = known
        return _Given(arrays, *known)

    def _checked(self, arrays: list[Array]) -> tuple[int, _Key]:
        """(rows, key) of arrays, of which only dtypes and shapes are looked at. Raises BadRequest."""
        pairs = list(zip(self._inputs, arrays, strict=True))
        for spec, array in pairs:
            check(spec, array, self._normalizations.get(spec.name))
        rows = {len(array) for array in arrays}
        if len(rows) != 1 or 0 in rows:
            raise BadRequest(f"found tensors of {sorted(rows)} rows (axis 0), expected the same in all, 1 or more")
        raw = self._takes_raw and all(a.dtype == PIXELS for s, a in pairs if s.name in self._normalizations)
        dtypes = tuple(a.dtype for s, a in pairs if s.datatype is None)
        return rows.pop(), _Key(raw, tuple(array.shape[1:] for array in arrays), dtypes)

    def _together(self, group: list[_Given]) -> list[Any]:
        """The results of items that are alike."""
        raw = group[0].key.raw
        program = self._program(raw)
        rows = sum(given.rows for given in group)
        plan = calls(rows, self._sizes) if self._sizes else chunks(rows, self._least, self._most)
        room = sum(plan)
        if room > rows:
            metrics.counter("pipeline_padded_rows_total", room - rows, model=self._label)
        feeds = {}
        for i, (spec, collator) in enumerate(zip(self._inputs, self._collators, strict=True)):
            arrays = [given.arrays[i] for given in group]
            normalization = self._normalizations.get(spec.name)
            if raw and normalization is not None:
                feeds[spec.name + RAW] = collator.batch(arrays, room, PIXELS)
            else:
                dtype = dtype_of(spec, arrays[0], normalization)
                feeds[spec.name] = collator.batch(arrays, room, dtype, normalization)
        parts = []
        start = 0
        for size in plan:
            feed = feeds if len(plan) == 1 else {name: a[start : start + size] for name, a in feeds.items()}
            parts.append(_rows_only(program.run(feed), size, feeds))
            start += size
        found = [np.concatenate(p)[:rows] if len(p) > 1 else p[0][:rows] for p in zip(*parts, strict=True)]
        order = self._orders[1] or range(len(found))
        return _apart([found[place] for place in order], group)


def _rows_only(outputs: dict[str, Array], rows: int, feeds: dict[str, Array]) -> list[Array]:
    """The outputs, in order, none of them in memory of the inputs. Raises BadOutput where axis 0 is not the rows."""
    found = []
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != rows:
            shape = list(array.shape)
            raise BadOutput(f"output '{name}' has the shape {shape} for {rows} rows; expected its axis 0 to be rows")
        found.append(array.copy() if any(np.may_share_memory(array, feed) for feed in feeds.values()) else array)
    return found


def _apart(outputs: list[Array], group: list[_Given]) -> list[Any]:
    """For each item its rows of the output, or of each of several in a list."""
    results: list[Any] = []
    start = 0
    for given in group:
        end = start + given.rows
        slices = [a[start:end].copy() if a.nbytes > MOST_VIEWED and len(group) > 1 else a[start:end] for a in outputs]
        results.append(slices[0] if len(slices) == 1 else slices)
        start = end
    return results


def _ordered(specs: Sequence[Any], order: tuple[int, ...], key: str) -> tuple[Any, ...]:
    if not order:
        return tuple(specs)
    if sorted(order) != list(range(len(specs))):
        names = ", ".join(s.name for s in specs)
        raise ConfigError(f"{key}: found {order}, expected each place once, 0 to {len(specs) - 1}, of {names}")
    return tuple(specs[place] for place in order)
