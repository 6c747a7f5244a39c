"""TorchProgram: a PyTorch module as a program over arrays, with the names and shapes of its inputs."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import BadOutput, ConfigError, LoadFailed
from penstock.runtimes import torch as loaders
from penstock.runtimes.tensor_model import ANY_ROWS, Arrays, Input, cannot_be_rows
from penstock.types import DATATYPES, TensorSpec


class TorchProgram:
    """Runs a prepared module on one device under `inference_mode`.

    Floating-point inputs are cast to `precision`, floating-point outputs back to FP32. `forward` receives the inputs in
    `keywords` by name, and the others in order. Each constructor argument is one property of a `Program`.
    """

    def __init__(
        self,
        module: Any,
        device: str,
        inputs: tuple[Input, ...],
        *,
        platform: str,
        precision: str = "fp32",
        keywords: frozenset[str] = frozenset(),
        outputs: tuple[TensorSpec, ...] = (),
        rows: tuple[int, int] = ANY_ROWS,
        unbatched: bool = False,
    ) -> None:
        self._torch = loaders.import_torch()
        self._module, self._device, self._keywords = module, device, keywords
        self._dtype = None if precision == "fp32" else loaders.dtype_of(precision)
        self.inputs, self.outputs, self.platform = inputs, outputs, platform
        self.rows, self.unbatched = rows, unbatched

    def run(self, arrays: Arrays) -> Arrays:
        """Raises what the module raises; BadOutput for an output that is not a tensor."""
        positional, named = [], {}
        for spec in self.inputs:
            if spec.name not in arrays:
                continue
            tensor = self._tensor(arrays[spec.name])
            if spec.name in self._keywords:
                named[spec.name] = tensor
            else:
                positional.append(tensor)
        with self._torch.inference_mode():
            found = self._module(*positional, **named)
        return {name: self._array(name, value) for name, value in self._named(found).items()}

    def _tensor(self, array: np.ndarray[Any, Any]) -> Any:
        tensor = self._torch.from_numpy(array if array.flags.writeable else array.copy())
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(self._device, dtype)

    def _named(self, found: Any) -> dict[str, Any]:
        """The outputs by name: the keys of a dict, the declared names, or OUTPUT__0, OUTPUT__1 ..."""
        if isinstance(found, Mapping):
            return {str(name): value for name, value in found.items() if value is not None}
        several = list(found) if isinstance(found, (list, tuple)) else [found]
        if len(self.outputs) == len(several):
            return {spec.name: value for spec, value in zip(self.outputs, several, strict=True)}
        return {f"OUTPUT__{i}": value for i, value in enumerate(several)}

    def _array(self, name: str, value: Any) -> np.ndarray[Any, Any]:
        if not isinstance(value, self._torch.Tensor):
            raise BadOutput(f"output '{name}' of the model is a {type(value).__name__}, expected a tensor")
        if value.is_floating_point() and value.dtype in (self._torch.float16, self._torch.bfloat16):
            value = value.float()
        array: np.ndarray[Any, Any] = value.cpu().numpy()
        return array


# ---- programs by kind of file


def of_module(
    module: Any, device: str, *, precision: str = "fp32", optimize: str = "none", inputs: tuple[TensorSpec, ...] = ()
) -> TorchProgram:
    """The program of an `nn.Module` or TorchScript module. Raises LoadFailed, ConfigError.

    Its inputs are the tensors that `forward` takes; `inputs` adds their datatypes and shapes.
    """
    torch = loaders.import_torch()
    scripted = isinstance(module, torch.jit.ScriptModule)
    found = _of_schema(module) if scripted else _of_signature(module)
    platform = "pytorch_torchscript" if scripted else "pytorch_eager"
    ready = loaders.prepare(module, device, precision=precision, optimize=optimize)
    known = frozenset(i.name for i in found if not i.name.startswith("INPUT__"))
    for spec in inputs:
        if spec.datatype == "BYTES":
            raise ConfigError(f"inputs.{spec.name}: found BYTES, but PyTorch has no string tensors")
    if inputs:
        found = tuple(Input(spec.name, spec.datatype, spec.shape) for spec in inputs)
    keywords = known if all(i.name in known for i in found) else frozenset()
    return TorchProgram(ready, device, found, platform=platform, precision=precision, keywords=keywords)


def of_exported(program: Any, device: str, *, precision: str = "fp32", optimize: str = "none") -> TorchProgram:
    """The program of an ExportedProgram, which declares datatypes and shapes itself. Raises LoadFailed, ConfigError."""
    ready = loaders.prepare(program.module(), device, precision=precision, optimize=optimize)
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    values = [nodes.get(name) for name in program.graph_signature.user_inputs]
    arguments, named = program.example_inputs or (values, {})
    names = [*program.graph_signature.user_inputs[: len(arguments)], *named]
    results = [nodes.get(name) for name in program.graph_signature.user_outputs]
    unbatched = cannot_be_rows(*([_size(value) for value in side] for side in (values, results)))
    inputs = [_spec(str(name), value, unbatched) for name, value in zip(names, values, strict=False)]
    if len(names) != len(values) or not all(inputs):
        raise LoadFailed("the exported program takes inputs other than tensors with rows; export one without them")
    outputs = [
        _spec(str(name), value, unbatched)
        for name, value in zip(program.graph_signature.user_outputs, results, strict=True)
    ]
    if program.call_spec.out_spec.type not in (None, tuple, list):
        outputs = [None]  # a dict names its outputs
    return TorchProgram(
        ready,
        device,
        tuple(Input(i.name, i.datatype, i.shape) for i in inputs if i),
        platform="pytorch_exported",
        keywords=frozenset(named),
        outputs=tuple(o for o in outputs if o) if all(outputs) else (),
        rows=_rows_of(program, values),
        unbatched=unbatched,
    )


def _size(value: Any) -> int | str | None:
    """The size of a tensor on axis 0: a number, or the name of an open size; None for any other value."""
    shape = tuple(getattr(value, "shape", ()))
    return None if not shape else shape[0] if type(shape[0]) is int else str(shape[0])


def _spec(name: str, value: Any, unbatched: bool) -> TensorSpec | None:
    """Name, datatype and shape of a tensor in an exported graph; None for any other value."""
    shape = tuple(getattr(value, "shape", ()))
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    datatype = "FP32" if dtype == "bfloat16" else DATATYPES.get(dtype)
    if not shape or datatype is None:
        return None
    sizes = tuple(n if type(n) is int else -1 for n in shape)
    return TensorSpec(name, datatype, sizes if unbatched else (-1, *sizes[1:]))


def _rows_of(program: Any, values: list[Any]) -> tuple[int, int]:
    """The fewest and most rows that the graph takes; any if its inputs differ, which therefore have none."""
    sizes = {str(value.shape[0]): value.shape[0] for value in values}
    size = next(iter(sizes.values()))
    if len(sizes) != 1:
        return ANY_ROWS
    if type(size) is int:
        return (size, size)
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return ANY_ROWS
    return (max(1, int(bounds.lower)), ANY_ROWS[1] if bounds.upper > ANY_ROWS[1] else int(bounds.upper))


def _of_signature(module: Any) -> tuple[Input, ...]:
    """The parameters of `forward`; INPUT__0 if it names none, as with *args."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return _inputs([(p.name, p.default is inspect.Parameter.empty) for p in parameters])


def _of_schema(module: Any) -> tuple[Input, ...]:
    """The tensors that a TorchScript `forward` takes."""
    arguments = [a for a in module.forward.schema.arguments[1:] if "Tensor" in str(a.type)]
    return _inputs([(a.name, not a.has_default_value()) for a in arguments])


def _inputs(names: list[tuple[str, bool]]) -> tuple[Input, ...]:
    if not names:
        return (Input("INPUT__0"),)
    return tuple(Input(name, alias=f"INPUT__{i}", required=needed) for i, (name, needed) in enumerate(names))
