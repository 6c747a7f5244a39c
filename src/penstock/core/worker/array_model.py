"""ArrayModel: a Python model with declared tensors, whose `predict` receives the arrays of a whole batch by name.

The model is a program, as a model file is, so requests are checked, gathered and answered in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.worker.python_model import is_generator, of_torch, options_of
from penstock.core.worker.tensor_model import (
    ANY_ROWS,
    Array,
    Arrays,
    Input,
    Program,
    ProgramSettings,
    TensorModel,
    cannot_be_rows,
)
from penstock.errors import BadOutput, LoadFailed
from penstock.plugins import resolve
from penstock.types import DATATYPES, DTYPES, TensorSpec

if TYPE_CHECKING:
    import asyncio

_NO_HOOKS = ("preprocess", "postprocess", "explain", "admit", "step")  # they take one item, or a list of items


class ArrayModel(TensorModel):
    """The TensorModel around a loaded Python model. Hooks and attributes that are not about items are the model's."""

    __penstock_arrays__ = True

    def __init__(
        self,
        model: Any,
        predict: Callable[..., Any],
        inputs: Sequence[TensorSpec],
        outputs: tuple[TensorSpec, ...],
        device: str = "cpu",
    ) -> None:
        """Raises LoadFailed for a model that takes arrays and has members for items."""
        hook = next((hook for hook in _NO_HOOKS if getattr(model, hook, None) is not None), None)
        if hook is not None or is_generator(predict):
            found = "it is a generator" if hook is None else f"'{hook}' does not"
            raise LoadFailed(
                f"predict({', '.join(i.name for i in inputs)}) receives the arrays of a whole batch, but {found}:"
                " do this work in predict, which returns arrays, or write predict(items)"
            )
        program = self._python = PythonProgram(predict, inputs, outputs)
        opened: Program = program
        if of_torch(model):
            make: Any = resolve("runtime", "arrays")
            opened = make(predict, program.inputs, outputs, device, unbatched=program.unbatched)
        super().__init__(lambda _: opened, ProgramSettings(inputs=tuple(inputs)))
        self._model = model
        self.load("cpu")
        self.__penstock_options__ |= options_of(model)
        self.platform, self.task = getattr(model, "platform", "python"), getattr(model, "task", "")
        self.parameters = getattr(model, "parameters", None)

    def warmup(self) -> Any:
        """The samples of the model itself, if it has a hook for them."""
        hook = getattr(self._model, "warmup", None)
        return super().warmup() if hook is None else hook()

    def unload(self) -> None:
        """Unloads the model."""
        super().unload()
        try:
            if (unload := getattr(self._model, "unload", None)) is not None:
                unload()
        finally:
            self._python.close()


def by_name(found: Any, names: list[str]) -> dict[str, Any]:
    """What `predict` returned, by the names of the outputs, in their order. Raises BadOutput."""
    if not isinstance(found, Mapping):
        if len(names) > 1:
            raise BadOutput(
                f"predict returned a {type(found).__name__}, expected a dictionary of the outputs {', '.join(names)}"
            )
        found = {(names or ["output_0"])[0]: found}
    if names and found.keys() != set(names):
        given = ", ".join(map(str, found)) or "nothing"
        raise BadOutput(f"predict returned {given}, but the model declares the outputs {', '.join(names)}")
    return {str(name): found[name] for name in names or found}


class PythonProgram:
    """A Program that calls `predict` with an array for each input, and checks what it returns."""

    platform = "python"
    rows = ANY_ROWS

    def __init__(
        self,
        predict: Callable[..., Any],
        inputs: Sequence[TensorSpec],
        outputs: tuple[TensorSpec, ...],
        called: str = "predict",
    ) -> None:
        """Raises LoadFailed for an optional input without a default. `called`: its name in messages."""
        self._predict, self.outputs, self._called = predict, outputs, called
        self._specs = {o.name: (np.dtype(DTYPES[o.datatype]), (-1, *o.shape[1:]), o.datatype) for o in outputs}
        defaults = {p.name for p in inspect.signature(predict).parameters.values() if p.default is not p.empty}
        for spec in (*inputs, *outputs):
            if not spec.shape:
                raise LoadFailed(f"'{spec.name}' has no axes; expected the rows on axis 0, as in FP32[-1]")
            if spec.optional and spec in inputs and spec.name not in defaults:
                raise LoadFailed(f"input '{spec.name}' is optional: give the parameter of predict a default, as None")
        self.inputs = tuple(Input(i.name, i.datatype, i.shape, required=i.name not in defaults) for i in inputs)
        self.unbatched = cannot_be_rows([i.shape[0] for i in inputs], [o.shape[0] for o in outputs])
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, arrays: Arrays) -> Arrays:
        """Raises what `predict` raises; BadOutput for outputs other than the declared ones."""
        # a lone request may be read-only, but whether a model may change its input must not depend on the others
        found = self._predict(**{name: a if a.flags.writeable else a.copy() for name, a in arrays.items()})
        if inspect.iscoroutine(found):
            found = self._await(found)
        return {name: self.checked(name, value) for name, value in by_name(found, list(self._specs)).items()}

    def checked(self, name: str, value: Any) -> Array:
        """The output as an array in C order. Raises BadOutput, and an exception in place of a row."""
        dtype, shape, datatype = self._specs.get(name, (None, (), ""))
        cells = isinstance(value, (list, tuple))
        for row in value if cells else ():
            if isinstance(row, Exception):
                raise row  # alone, once the batch has run in halves
        try:
            # text in a list would lose its trailing NULs in an array of text
            array: Array = np.asarray(value, object if cells and datatype == "BYTES" else None, order="C")
        except (ValueError, TypeError, RuntimeError) as e:
            raise BadOutput(
                f"output '{name}': {self._called} returned a {type(value).__name__} that is no array: {e}"
            ) from e
        if array.dtype.kind in "US":
            array = array.astype(object)
        if dtype is None:
            return array
        fits = len(shape) == array.ndim and all(w in (-1, f) for w, f in zip(shape, array.shape, strict=True))
        if fits and array.dtype == dtype:
            return array
        advice = ""
        if array.dtype != dtype:
            declare = f", or declare {DATATYPES[array.dtype.name]}" if array.dtype.name in DATATYPES else ""
            advice = f": return numpy.asarray({name}, '{dtype}'){declare}"
        raise BadOutput(
            f"output '{name}': {self._called} returned {array.dtype} {list(array.shape)}, but the model declares"
            f" {datatype} {list(shape)}, which is {dtype}{advice}"
        )

    def _await(self, coroutine: Any) -> Any:
        import asyncio  # only async models need it

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(coroutine)
        except asyncio.CancelledError:
            raise RuntimeError("the model's coroutine was cancelled from inside") from None

    def close(self) -> None:
        """Closes the event loop of an async model."""
        if self._loop is not None:
            self._loop.close()
