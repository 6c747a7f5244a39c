"""ModelOp: the op that runs a model file in batches. See docs/pipelines.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct, structs

from penstock import metrics
from penstock.core.worker.profile import coupled
from penstock.core.worker.rows import check_rows
from penstock.core.worker.tensor_model import ANY_ROWS, Input, Program, samples_of
from penstock.errors import BadRequest, ConfigError, WrongRowCount
from penstock.pipeline.collate import PIXELS, Collator, array_of, calls, check_input, chunks, dtype_of, normalizations
from penstock.pipeline.ops.base import Array, BatchOp, Fields, found
from penstock.pipeline.runtimes import ModelFile, Precision, Runtime, cores, open_program, warn_once
from penstock.runtimes.onnx import PROFILE_ROWS, RAW, plain_input
from penstock.runtimes.pixels import Normalization
from penstock.types import TensorSpec

WARMED = 16  # batch sizes that run before the first request, on a GPU
MOST_KNOWN = 1024  # combinations of dtypes and shapes whose check is cached
MOST_VIEWED = 2**20  # bytes of an output that views may keep alive; slices of larger outputs are copied


class _GroupKey(NamedTuple):
    """Items with equal keys run in one call: who normalizes pixels, the row shape of each input, undeclared dtypes."""

    raw: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]


class _ModelItem(Struct):
    """One item that fits the model: an array for each input, and its number of rows."""

    arrays: list[Array]
    rows: int
    key: _GroupKey


class _Signature(Struct, frozen=True):
    """The inputs of an opened model, in the order of the data, and who normalizes them."""

    inputs: tuple[Input, ...]
    normalizations: dict[str, Normalization]
    takes_raw: bool  # the program normalizes pixels itself


class _CallSizes(Struct):
    """The rows that a call may have: from `least` to `most`, or `only` these. `asked`: the most of the node, if set."""

    least: int
    most: int
    only: tuple[int, ...]
    asked: int | None

    def plan(self, rows: int) -> tuple[int, ...]:
        """The sizes of calls that together hold the rows."""
        return calls(rows, self.only) if self.only else chunks(rows, self.least, self.most)

    def limit(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Applies the row limits of the graphs. Without a graph of free rows, only their sizes run."""
        least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
        if len(ranges) > 1 and all(low == high for low, high in ranges):
            self.only = tuple(sorted({high for _, high in ranges}))
        self.only = tuple(size for size in self.only if any(low <= size <= high for low, high in ranges))
        self.most = min(self.most, most)
        self.least = min(max(self.least, least), self.most)


class ModelOp(BatchOp):
    """Runs a model file: data `[rows, ...]` -> result `[rows, ...]`, or a list of them for several inputs or outputs.

    - `model`: the file, .onnx, or .pt, .pth, .pt2, .ts of PyTorch. Several files of one network, each with another
      fixed number of rows, share the batches.
    - `runtime`: what runs it; auto is TensorRT, else CUDA, on a GPU, and the CPU elsewhere.
    - `precision`: the precision of TensorRT and PyTorch; a warning reports an unavailable one.
    - `mean`: subtracted from the pixels of each channel, or one number for all.
    - `std`: the divisor of the pixels after that.
    - `model_cache`: TensorRT engines are stored next to this file, or next to one for each model.
    - `threads`: threads inside an operator on the CPU, by default cores / instances, and more beside idle ones.
    - `instances`: instances of the node, for `threads`.
    - `max_batch`: most rows of one call.
    - `min_batch`: fewest rows of one call; smaller calls are padded.
    - `sizes`: the only numbers of rows that run.
    - `input_reorder`: for each position of the data, the index of the model's input: "1, 0" swaps two.
    - `output_reorder`: for each position of the result, the index of the model's output.
    - `rows`: axis0, or none if axis 0 is not rows: items run one by one, uncut; auto is none where the file or five
      runs at the start show it.
    """

    takes = "tensor"
    gives = "tensor"
    model_file = True

    def __init__(
        self,
        model: str | list[str],
        runtime: Runtime = "auto",
        precision: Precision = "fp32",
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        model_cache: str | list[str] | None = None,
        threads: int | None = None,
        instances: int = 1,
        max_batch: int | None = None,
        min_batch: int = 1,
        sizes: tuple[int, ...] = (),
        input_reorder: tuple[int, ...] = (),
        output_reorder: tuple[int, ...] = (),
        rows: Literal["auto", "axis0", "none"] = "auto",
    ) -> None:
        """One parameter for each key that a node may set. Raises ConfigError."""
        if 0 in std or not all(np.isfinite([*mean, *std])):
            raise ConfigError(f"std and mean: found {std} and {mean}, expected numbers, and no std of 0")
        only = tuple(sorted(set(sizes)))
        asked = only[-1] if only else max_batch
        self._sizes = _CallSizes(min_batch, asked or ANY_ROWS[1], only, asked)
        if not 1 <= min_batch <= self._sizes.most or min(only, default=1) < 1:
            given = f"min_batch {min_batch}, max_batch {max_batch}, sizes {list(sizes)}"
            raise ConfigError(f"found {given}, expected 1 <= min_batch <= max_batch")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads = {threads}, expected 1 or more")
        idle_threads = threads or cores()
        threads = threads or max(1, cores() // instances)
        self._rows = rows
        sizes_of_calls = (min(only, default=min_batch), asked or max(PROFILE_ROWS, min_batch))
        models = [model] if isinstance(model, str) else model
        caches = model_cache[: len(models)] if isinstance(model_cache, list) else [model_cache]
        if not models or len(caches) not in (1, len(models)):
            raise ConfigError(
                f"model: found {len(models)} files and {len(caches)} of model_cache, expected one for each"
            )
        if len(caches) < len(models) and caches[0]:
            caches = [f"{caches[0]}.{place}" for place in range(len(models))]
        self._files = [
            ModelFile(file, runtime, precision, cache, threads, instances, idle_threads, sizes_of_calls)
            for file, cache in zip(models, caches if len(caches) == len(models) else caches * len(models), strict=True)
        ]
        self._mean_std = (mean, std)
        self._orders = (input_reorder, output_reorder)
        self._programs: dict[bool, list[Program]] = {}  # of each file, by whether they normalize pixels themselves

    def load(self, device: str) -> None:
        """Opens the file. Raises LoadFailed, ConfigError."""
        self._device = device
        opened = [open_program(file, device, self._normalizations_of) for file in self._files]
        programs = [one.program for one in opened]
        _check_same(programs, self._files)
        raw = opened[0].raw
        self.unbatched = self._rows == "none" or (self._rows == "auto" and not _may_have_rows(programs[0]))
        specs = [plain_input(i if self.unbatched else _with_rows(i)) for i in programs[0].inputs]
        inputs = _ordered(specs, self._orders[0], "input_reorder")
        self.outputs = _ordered(programs[0].outputs, self._orders[1], "output_reorder")
        self.inputs = tuple(
            TensorSpec(i.name, i.datatype, i.shape) for i in inputs if i.datatype is not None and i.shape is not None
        )
        self._signature = _Signature(inputs, self._normalizations_of(specs), raw)
        self._known: dict[tuple[Any, ...], tuple[int, _GroupKey]] = {}  # dtypes and shapes -> rows, key
        self._collators = [Collator() for _ in inputs]
        self._programs = {raw: programs}
        if not self.unbatched:
            self._limit_rows([program.rows for program in programs])
            if self._rows == "auto" and 1 not in (self._sizes.most, self.max_rows):
                self._check_rows()
        self.max_rows = 1 if self.unbatched else self.max_rows
        if opened[0].gpu and not self.unbatched:
            self._warm_up()

    def _normalizations_of(self, inputs: Sequence[Input]) -> dict[str, Normalization]:
        return normalizations(inputs, *self._mean_std)

    def _programs_for(self, raw: bool) -> list[Program]:
        """The programs for pixels, or those for floats, which are opened when the first floats arrive."""
        if raw not in self._programs:
            reason = "items other than uint8 for a graph that takes pixels"
            warn_once("mean", self._files[0].model, reason, "another session is opened for them")
            self._programs[raw] = [open_program(file, self._device).program for file in self._files]
        return self._programs[raw]

    def _limit_rows(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Applies the row limits of the graphs. Warns if the node has larger batches."""
        self._sizes.limit(ranges)
        if (most := max(high for _, high in ranges)) < ANY_ROWS[1]:
            self.max_rows = most
            if (asked := self._sizes.asked or 0) > most:
                reason = f"the graph takes {most} rows at once, the node has max_batch {asked}"
                warn_once("max_batch", self._files[0].model, reason, f"{most} run at a time: export it with free rows")

    def _samples(self) -> list[list[Array]]:
        """Two rows, with pixels for inputs that are normalized; nothing if a size is unknown."""
        samples = samples_of(self._signature.inputs)
        for sample in samples:
            for name in self._signature.normalizations:
                sample[name] = (255 * sample[name]).astype(PIXELS)
        return [list(sample.values()) for sample in samples]

    def _check_rows(self) -> None:
        """Has items run one by one from now on if the rows of the model depend on each other."""
        found = "a row has other results beside another"
        try:
            one, two = self._samples()
            alone = [ModelOp.__call__(self, [one], [])[0] for _ in range(2)]
            pairs = [ModelOp.__call__(self, pair, []) for pair in ([one, two], [two, one], [one, two])]
            if not coupled(alone, [pairs[0][0], pairs[1][1], pairs[2][0]]):
                return
        except WrongRowCount as e:
            found = e.message
        except Exception:  # no samples, or a model that takes no random ones
            return
        self.unbatched = True
        reason = f"{found}: results depend on other rows"
        warn_once("rows", self._files[0].model, reason, "items run one by one; rows = 'axis0' if that is wrong")

    def _warm_up(self) -> None:
        """Runs batches of random numbers, because a GPU selects kernels during the first batch of each size."""
        sizes = self._sizes
        most = sizes.most if sizes.most < ANY_ROWS[1] else sizes.least
        for sample in self._samples()[:1]:
            for rows in sizes.only or {*range(sizes.least, min(most, WARMED) + 1), most}:
                ModelOp.__call__(self, [[np.repeat(array, rows, axis=0) for array in sample]], [])

    def unload(self) -> None:
        self._programs.clear()

    # ---- a batch

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """A result for each item, or BadRequest if it does not fit the model. One call for each shape and dtype."""
        results: list[Any] = [None] * len(data)
        groups: dict[Any, list[tuple[int, _ModelItem]]] = {}
        for i, value in enumerate(data):
            try:
                item = self._item(value)
            except BadRequest as e:
                results[i] = e
            else:
                groups.setdefault(i if self.unbatched else item.key, []).append((i, item))
        for group in groups.values():
            answers = self._run([item for _, item in group])
            for (i, _), result in zip(group, answers, strict=True):
                results[i] = result
        return results

    def _item(self, value: Any) -> _ModelItem:
        """Raises BadRequest: what was found and what was expected."""
        inputs = self._signature.inputs
        values = list(value) if isinstance(value, list | tuple) else [value]
        if len(values) != len(inputs):
            names = ", ".join(i.name for i in inputs)
            expected = f"a list of {len(inputs)} tensors" if len(inputs) > 1 else "one tensor"
            raise BadRequest(f"the model has the inputs {names}; found {found(value)}, expected {expected}")
        arrays = [array_of(spec, one) for spec, one in zip(inputs, values, strict=True)]
        layout = tuple([(array.dtype, array.shape) for array in arrays])
        known = self._known.get(layout)
        if known is None:
            known = self._checked(arrays)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[layout] = known
        return _ModelItem(arrays, *known)

    def _checked(self, arrays: list[Array]) -> tuple[int, _GroupKey]:
        """Rows and key of arrays, which depend on dtypes and shapes only. Raises BadRequest."""
        signature = self._signature
        pairs = list(zip(signature.inputs, arrays, strict=True))
        for spec, array in pairs:
            check_input(spec, array, signature.normalizations.get(spec.name))
        rows = {len(array) for array in arrays}
        if len(rows) != 1 and not self.unbatched:
            raise BadRequest(f"found tensors of {sorted(rows)} rows (axis 0), expected the same in all")
        raw = signature.takes_raw and all(a.dtype == PIXELS for s, a in pairs if s.name in signature.normalizations)
        dtypes = tuple(a.dtype for s, a in pairs if s.datatype is None)
        return rows.pop(), _GroupKey(raw, tuple(array.shape[1:] for array in arrays), dtypes)

    def _run(self, group: list[_ModelItem]) -> list[Any]:
        """The results of items with equal keys."""
        raw = group[0].key.raw
        programs = self._programs_for(raw)
        if self.unbatched and group[0].rows >= self._sizes.least:
            return [self._run_alone(group[0], programs[0])]
        rows = sum(item.rows for item in group)
        plan = self._sizes.plan(rows or 1)  # without rows, one of padding gives the shapes and types of the outputs
        total = sum(plan)
        if total > rows:
            metrics.counter("pipeline_padded_rows_total", total - rows, model=Path(self._files[0].model).stem)
        feeds = self._feeds(group, total)
        parts = []
        start = 0
        for size in plan:
            feed = feeds if len(plan) == 1 else {name: a[start : start + size] for name, a in feeds.items()}
            program = next((p for p in programs if p.rows[0] <= size <= p.rows[1]), programs[0])
            outputs = program.run(feed)
            check_rows(outputs, size)
            parts.append(_own(outputs, feeds))
            start += size
        joined = [np.concatenate(p)[:rows] if len(p) > 1 else p[0][:rows] for p in zip(*parts, strict=True)]
        order = self._orders[1] or range(len(joined))
        return _split([joined[place] for place in order], group)

    def _run_alone(self, item: _ModelItem, program: Program) -> Any:
        """The outputs of an item without rows, as they are."""
        feeds = self._feeds([item], None)
        outputs = _own(program.run(feeds), feeds)
        found = [outputs[place] for place in self._orders[1] or range(len(outputs))]
        return found[0] if len(found) == 1 else found

    def _feeds(self, group: list[_ModelItem], rows: int | None) -> dict[str, Array]:
        """The inputs of a call, padded to `rows`; None: each has as many as it has."""
        feeds = {}
        for i, (spec, collator) in enumerate(zip(self._signature.inputs, self._collators, strict=True)):
            arrays = [item.arrays[i] for item in group]
            total = len(arrays[0]) if rows is None else rows
            normalization = self._signature.normalizations.get(spec.name)
            if group[0].key.raw and normalization is not None:
                feeds[spec.name + RAW] = collator.batch(arrays, total, PIXELS)
            else:
                dtype = dtype_of(spec, arrays[0], normalization)
                feeds[spec.name] = collator.batch(arrays, total, dtype, normalization)
        return feeds


def _may_have_rows(program: Program) -> bool:
    """Whether axis 0 may be rows: here also if their number is fixed, because an item of a pipeline has rows, which are
    padded."""
    shapes = [spec.shape for spec in program.inputs] + [spec.shape for spec in program.outputs]
    sizes = {shape[0] if shape else None for shape in shapes}
    return not program.unbatched or (len(sizes) == 1 and None not in sizes)


def _with_rows(spec: Input) -> Input:
    return structs.replace(spec, shape=(-1, *spec.shape[1:])) if spec.shape else spec


def _check_same(programs: Sequence[Program], files: Sequence[ModelFile]) -> None:
    """Raises ConfigError if the files have other inputs or outputs, apart from the number of rows."""
    signatures = []
    for program in programs:
        specs: list[Any] = [*program.inputs, *program.outputs]
        signatures.append([(spec.name, spec.datatype, spec.shape and spec.shape[1:]) for spec in specs])
    for file, other in zip(files, signatures, strict=True):
        if other != signatures[0]:
            raise ConfigError(
                f"model: {file.model} has the inputs and outputs {other}, expected those of {files[0].model},"
                f" {signatures[0]}, with another number of rows"
            )


def _own(outputs: dict[str, Array], feeds: dict[str, Array]) -> list[Array]:
    """The outputs in order, copied if they share memory with an input."""
    shared = [any(np.may_share_memory(array, feed) for feed in feeds.values()) for array in outputs.values()]
    return [array.copy() if copy else array for array, copy in zip(outputs.values(), shared, strict=True)]


def _split(outputs: list[Array], group: list[_ModelItem]) -> list[Any]:
    """Each item's rows of the output, or a list of its rows of several outputs."""
    results: list[Any] = []
    start = 0
    for item in group:
        end = start + item.rows
        slices = [a[start:end].copy() if a.nbytes > MOST_VIEWED and len(group) > 1 else a[start:end] for a in outputs]
        results.append(slices[0] if len(slices) == 1 else slices)
        start = end
    return results


def _ordered(specs: Sequence[Any], order: tuple[int, ...], key: str) -> tuple[Any, ...]:
    if not order:
        return tuple(specs)
    if sorted(order) != list(range(len(specs))):
        names = ", ".join(s.name for s in specs)
        raise ConfigError(f"{key}: found {order}, expected each index once, 0 to {len(specs) - 1}, of {names}")
    return tuple(specs[place] for place in order)
