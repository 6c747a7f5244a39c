"""TensorModel: checks requests of arrays one by one, and runs each batch as one call of a program.

A request is a dict of input name to array `[rows, ...]` (Open Inference), the same in nested lists (a JSON object), or
only nested lists if the program has a single input. Lists with one axis less than the input are a single row, whose
result has no row axis either; so are lists for an input of unknown rank. With `rows = "none"` axis 0 is not rows: each
request is a call of its own, with outputs of any shape.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import numpy as np
from msgspec import Struct, structs

from penstock.config.schema import InputConfig
from penstock.core.arrays import array_of, has_text
from penstock.core.batching.ladder import Ladder, Sizes
from penstock.core.columns import Block, TensorRequest, TensorRows
from penstock.core.worker.lengths import Lengths
from penstock.core.worker.rows import PhasedProgram, TensorPhases, check_rows, cut, groups, joined
from penstock.errors import BadRequest, ConfigError, LoadFailed, WrongRowCount
from penstock.types import DATATYPES, DTYPES, Graphs, TensorSpec

log = logging.getLogger("penstock.worker")

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

ANY_ROWS: Final = (1, 2**31 - 1)
_PLAIN: Final = {"b": "BOOL", "i": "INT64", "u": "INT64", "f": "FP32"}  # datatypes of lists for undeclared inputs


class Input(Struct, frozen=True):
    """An input of a program. Datatype and shape are None if undeclared; -1 is any size, such as the rows on axis 0.
    `pixels`: the values are an image's, of whatever datatype."""

    name: str
    datatype: str | None = None
    shape: tuple[int, ...] | None = None
    alias: str = ""  # another name that requests may use
    required: bool = True
    pixels: bool = False


class Program(Protocol):
    """A model that a runtime has loaded. `rows`: the fewest and most rows of one call; `unbatched`: axis 0 of its
    tensors cannot be rows, see `cannot_be_rows`."""

    platform: str
    inputs: tuple[Input, ...]
    outputs: tuple[TensorSpec, ...]
    rows: tuple[int, int]
    unbatched: bool

    def run(self, arrays: Arrays) -> Arrays:
        """Output name -> array `[rows, ...]` for all rows. `arrays` are in C order."""
        ...


def cannot_be_rows(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Whether the declared sizes on axis 0 rule out rows: a fixed size other than 1, or outputs that do not follow the
    inputs.

    A size is a number, a name, -1 if unknown, or None for a scalar.
    """
    known = set(inputs) - {-1}
    first = known.pop() if known else -1
    fixed = isinstance(first, int) and first != -1
    if not inputs or known or (fixed and (first != 1 or -1 in inputs)):
        return True
    return any(size not in (first, -1) and not (first == -1 and isinstance(size, str)) for size in outputs)


def samples_of(inputs: Sequence[Input], unbatched: bool = False) -> list[Arrays]:
    """Two warm-up rows, or requests without rows; empty if a size is unknown.

    Floats are random between 0 and 1, which is valid for indices, pixels and probabilities. The samples have different
    means, because a model that mixes rows may depend only on their mean. So are pixels, between 0 and 100. Other
    numbers are zeros, which are valid as indices and flags.
    """
    if any(i.datatype in (None, "BYTES") or i.shape is None or -1 in i.shape[1:] for i in inputs):
        return []
    shapes = []
    for i in inputs:
        first, *others = cast(Any, i.shape)
        dtype, most = np.dtype(DTYPES[cast(str, i.datatype)]), 100 if i.pixels else 1
        shapes.append((i.name, dtype, (max(1, first * unbatched), *others), most * (i.pixels or dtype.kind == "f")))
    random = np.random.default_rng(0)
    return [{n: (most * random.uniform(low, low + 0.25, s)).astype(d) for n, d, s, most in shapes} for low in (0, 0.7)]


class ProgramSettings(Struct, frozen=True):
    """The keys of `[models.NAME]` that a program needs. `optimize`: None for what suits the program and the device.
    `most_rows`: the batch size, None for "auto". `sizes`: the key of that name, "any" for a model without rows."""

    device: str = "cpu"
    precision: str = "fp32"
    optimize: str | None = None
    trust: str = "none"
    threads: int = 1
    inputs: tuple[TensorSpec, ...] = ()
    images: Mapping[str, InputConfig] = {}  # those of the inputs that have a layout
    most_rows: int | None = None
    sizes: Sizes = None

    @property
    def padded(self) -> bool:
        """Whether batches are padded to a few sizes, which all run at the load: by default on CUDA."""
        return self.device.startswith("cuda") if self.sizes is None else self.sizes != "any"


def refuse_inputs(settings: ProgramSettings, what: str) -> None:
    """Raises ConfigError if the key `inputs` is set for a program that declares its own, except for images and for
    padded texts."""
    if any(spec.name not in settings.images and spec.pad is None for spec in settings.inputs):
        raise ConfigError(
            f"inputs: {what} declares its own inputs; leave the key out, except for images with a layout and for texts"
            " with pad"
        )


class TensorModel:
    """The model around the program that `open_program` returns for the settings."""

    __penstock_takes__ = ("precision", "optimize", "threads")  # through its settings, not through `load`
    __penstock_columns__ = True  # see `columns.py`

    def __init__(self, open_program: Callable[[ProgramSettings], Program], settings: ProgramSettings) -> None:
        self._open, self._settings = open_program, settings
        self._program: Program | None = None
        self._unbatched = False
        self._ladder: Ladder | None = None
        self._lengths: Lengths | None = None
        self.__penstock_graphs__: Graphs | None = None
        self.inputs: tuple[TensorSpec, ...] = ()  # empty unless all are known
        self._whole_inputs: tuple[TensorSpec, ...] = ()  # with their sizes on axis 0
        self.outputs: tuple[TensorSpec, ...] = ()
        self.platform = "python"

    def load(self, device: str) -> None:
        """Raises LoadFailed, ConfigError."""
        settings = structs.replace(self._settings, device=device)
        program = self._program = self._open(settings)
        self.platform, self.outputs = program.platform, program.outputs
        self._lengths = self._padded_lengths(program)
        known = [i for i in program.inputs if i.datatype is not None and i.shape is not None]
        if len(known) == len(program.inputs):
            self._whole_inputs = tuple(
                TensorSpec(i.name, cast(str, i.datatype), cast(Any, i.shape), not i.required) for i in known
            )
            pads = {spec.name: spec.pad for spec in settings.inputs}
            self.inputs = tuple(
                structs.replace(spec, shape=(-1, *spec.shape[1:]), pad=pads.get(spec.name))
                for spec in self._whole_inputs
            )
        self.__penstock_options__ = self._options(device)
        if hasattr(program, "stage") and not program.unbatched:
            self.__penstock_phases__ = TensorPhases(cast(PhasedProgram, program), self._one_call, self._lengths)
        if settings.optimize == "compile" and not program.unbatched and not settings.padded:
            self._compile()

    def _padded_lengths(self, program: Program) -> Lengths | None:
        """The inputs that are padded. Raises ConfigError, LoadFailed."""
        given = [spec for spec in self._settings.inputs if spec.pad is not None]
        if not given:
            return None
        if program.unbatched:
            raise ConfigError(f"inputs.{given[0].name}.pad: the model takes one request at a time; leave pad out")
        found = Lengths(program.inputs, program.outputs, given)

        def run(length: int) -> Arrays:
            (sample, _) = samples_of(found.sized(program.inputs, length))
            return self._run(sample, 1)

        try:
            found.learn(run)
        except LoadFailed:
            raise
        except Exception:  # it needs other values, or has sizes that are not known
            log.info("lengths_not_tried: the declared shapes tell which axes of the outputs are cut back")
        return found

    def _options(self, device: str) -> dict[str, Any]:
        """The batching options that the program requires; see `@penstock.model`."""
        if self._loaded.unbatched:
            return {"rows": "none"}
        found: dict[str, Any] = {}
        if any(i.shape is None or -1 in i.shape[1:] for i in self._loaded.inputs):
            # requests of different shapes cannot run in one call, unless they are padded
            found["bucket"] = "shape" if self._lengths is None else "length"
        if self._loaded.rows[1] < ANY_ROWS[1]:
            found["max_batch_size"] = self._loaded.rows[1]
        if device.startswith("cuda"):  # where kernels, graphs and engines are prepared for each size
            found["sizes"] = "auto"
        return found

    @property
    def _loaded(self) -> Program:
        if self._program is None:
            raise LoadFailed("the model is not loaded")
        return self._program

    def unload(self) -> None:
        """Releases the program and its device memory."""
        self._program = None
        self.__dict__.pop("__penstock_phases__", None)

    def __penstock_unbatch__(self) -> None:
        self._unbatched, self.inputs, self._lengths = True, self._whole_inputs, None

    def __penstock_pad__(self, ladder: Ladder | None) -> None:
        self._ladder = ladder
        if self._lengths is not None:
            self._lengths.in_classes = ladder is not None
        if (capture := getattr(self._program, "capture", None)) is not None:
            self.__penstock_graphs__ = capture([] if ladder is None else {self._size(rows) for rows in ladder.sizes})

    def __penstock_bound__(self, max_tokens: int | None) -> None:
        if self._lengths is not None:
            self._lengths.max_tokens = max_tokens

    def warmup(self) -> list[Arrays]:
        """Two rows, or requests without rows; nothing if a size is unknown."""
        return samples_of(self._loaded.inputs, self._unbatched)

    def _compile(self) -> None:
        """Compiles for one row and for several, which takes longer than a warm-up may."""
        for rows in (1, 2):
            for sample in self.warmup()[:1]:
                with suppress(WrongRowCount):  # the warm-up reports it
                    self._run({name: np.repeat(array, rows, axis=0) for name, array in sample.items()}, rows)

    # ---- requests

    def preprocess(self, item: Any) -> TensorRequest:
        """The checked request. Raises BadRequest, which fails only this request."""
        if type(item) is TensorRequest:
            return item
        inputs = self._loaded.inputs
        if isinstance(item, dict):
            given = self._renamed(item)
        elif isinstance(item, (bytes, bytearray, memoryview)):
            raise BadRequest("found bytes; expected JSON, or tensors by the Open Inference Protocol")
        elif len(inputs) > 1 and sum(i.required for i in inputs) != 1:
            names = ", ".join(i.name for i in inputs)
            raise BadRequest(f"the model has the inputs {names}; expected an object with one value for each")
        else:
            given = {next(i for i in inputs if i.required or len(inputs) == 1).name: item}
        named = isinstance(item, dict)
        tensors = named and all(isinstance(value, np.ndarray) for value in given.values())
        specs = {i.name: i for i in inputs}
        arrays: Arrays = {}
        singles = set()
        for name, value in given.items():
            array = _array(specs[name], value)
            rank = None if (shape := specs[name].shape) is None else len(shape)
            single = not tensors and (not self._unbatched if rank is None else array.ndim == rank - 1)
            singles.add(single)
            arrays[name] = array[np.newaxis] if single else array
            _check_shape(specs[name], arrays[name], self._unbatched)
        rows = {name: len(array) for name, array in arrays.items()}
        if (len(set(rows.values())) > 1 or len(singles) > 1) and not self._unbatched:
            found = ", ".join(f"'{name}' {n}" for name, n in rows.items())
            raise BadRequest(f"inputs must all have the same number of rows (axis 0), found {found}")
        if self._lengths is not None:
            self._lengths.check(arrays)
        count = next(iter(rows.values()), 1)  # without any optional input, one
        return TensorRequest(Block(arrays, count), 0, count, singles == {True}, named)

    def _renamed(self, item: dict[Any, Any]) -> dict[str, Any]:
        inputs = self._loaded.inputs
        names = {i.alias: i.name for i in inputs if i.alias} | {i.name: i.name for i in inputs}
        given: dict[str, Any] = {}
        known = ", ".join(i.name for i in inputs)
        for key, value in item.items():
            if key not in names:
                raise BadRequest(f"unknown input '{str(key)[:100]}'; the model has {known}")
            if names[key] in given:
                raise BadRequest(f"input '{names[key]}' is given twice")
            given[names[key]] = value
        missing = [i.name for i in inputs if i.required and i.name not in given]
        if missing:
            raise BadRequest(f"input '{missing[0]}' is missing; the model needs {known}")
        return given

    # ---- batches

    def predict(self, requests: list[TensorRequest]) -> list[Any]:
        """The results: each a dict of output name to array, or the array of the only output. One call per shape."""
        if self._unbatched:
            return [self._run_alone(request) for request in requests]
        calls = groups(requests, self._lengths)
        if len(calls) == 1:
            return self._run_together(requests)
        results: list[Any] = [None] * len(requests)
        for places in calls:
            found = self._run_together([requests[i] for i in places])
            for i, result in zip(places, found, strict=True):
                results[i] = result
        return results

    def _run_alone(self, request: TensorRequest) -> Any:
        if request.rows < self._loaded.rows[0] and not self._loaded.unbatched:
            return self._run_together([request])[0]  # padded
        outputs = self._loaded.run({name: np.ascontiguousarray(array) for name, array in request.arrays.items()})
        single = request.single and all(np.shape(array)[:1] == (1,) for array in outputs.values())
        return TensorRows(Block(outputs, request.rows), 0, request.rows, single, request.named).plain()

    def _run_together(self, requests: Sequence[TensorRequest]) -> list[Any]:
        rows = sum([r.rows for r in requests])
        lengths = self._lengths
        return cut(self._run(joined(requests, rows, None, lengths), rows), requests, rows, lengths)

    def _run(self, arrays: Arrays, rows: int) -> Arrays:
        """The outputs of all rows. Splits rows beyond the program's maximum into calls, and pads to its minimum, or to
        the next size of the ladder.

        Raises WrongRowCount.
        """
        most = self._most
        if rows <= most and self._size(rows) == rows:
            outputs = self._loaded.run(arrays)
            check_rows(outputs, rows)
            return outputs
        parts = []
        for start in range(0, rows or 1, most):  # no rows run as padding, for the shapes and types of the outputs
            chunk = arrays if rows <= most else {n: a[start : start + most] for n, a in arrays.items()}
            count = min(most, rows - start)
            size = self._size(count)
            if count < size:
                chunk = {n: _padded(a, size) for n, a in chunk.items()}
            outputs = self._loaded.run(chunk)
            check_rows(outputs, size, count)
            parts.append({n: a[:count] if count < size else a for n, a in outputs.items()})
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @property
    def _most(self) -> int:
        """The most rows of a call."""
        most = self._loaded.rows[1]
        return most if self._ladder is None else min(most, self._ladder.top)

    def _one_call(self, rows: int) -> int:
        """The rows of a single call for so many rows, with padding; 0 if they need several."""
        return self._size(rows) if 0 < rows <= self._most else 0

    def _size(self, rows: int) -> int:
        """The rows of the call for so many rows, with padding."""
        least, most = self._loaded.rows
        size = max(rows, least, 1)
        return size if self._ladder is None else max(size, min(most, self._ladder.up(rows)))


def _padded(array: Array, rows: int) -> Array:
    """The array with its last row repeated up to `rows`; without a row, zeros or empty texts."""
    if not len(array):
        return np.full((rows, *array.shape[1:]), b"" if array.dtype.hasobject else 0, array.dtype)
    return np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])


def _array(spec: Input, value: Any) -> Array:
    """The value as an array of the input's datatype. Raises BadRequest."""
    if not isinstance(value, (np.ndarray, np.generic)):
        if spec.datatype is not None:
            return array_of(spec.name, value, spec.datatype)
        return _plain(spec.name, value)
    array = np.asarray(value)
    if spec.datatype is not None and array.dtype != np.dtype(DTYPES[spec.datatype]):
        found = DATATYPES.get(array.dtype.name, array.dtype.name)
        raise BadRequest(f"input '{spec.name}': datatype must be {spec.datatype}, found {found}")
    if spec.datatype is None and array.dtype.kind not in _PLAIN:
        raise BadRequest(f"input '{spec.name}': datatype must be numeric, found {array.dtype}")
    return array


def _plain(name: str, value: Any) -> Array:
    """Lists of whole numbers as INT64, lists with a fraction as FP32, as PyTorch treats literals."""
    try:
        kind = "f" if has_text(value) else np.asarray(value).dtype.kind
    except (ValueError, OverflowError):
        kind = "f"  # `array_of` reports the error
    return array_of(name, value, _PLAIN.get(kind, "FP32"))


def _check_shape(spec: Input, array: Array, unbatched: bool) -> None:
    found, expected = array.shape, spec.shape
    if array.ndim == 0:
        raise BadRequest(f"input '{spec.name}': shape {list(found)} has no rows, expected them on axis 0")
    if expected is None:
        return
    shown = [*(expected if unbatched else (-1, *expected[1:]))]
    if len(found) != len(shown) or any(w not in (-1, f) for w, f in zip(shown, found, strict=True)):
        raise BadRequest(f"input '{spec.name}': shape must be {shown} (-1 is any size), found {list(found)}")
