"""PyTorch models (TorchScript, exported programs, modules with a state dict): casts, optimizes and runs them.

Functions import torch when they are called.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.config.schema import OPTIMIZATIONS, PRECISIONS
from penstock.core.worker.tensor_model import (
    ANY_ROWS,
    Array,
    Arrays,
    Input,
    Program,
    ProgramSettings,
    cannot_be_rows,
    refuse_inputs,
)
from penstock.errors import BadOutput, ConfigError, LoadFailed, describe
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.pixels import Image, images_of
from penstock.runtimes.torch_files import import_torch, kind_of, load_exported, load_module, quiet
from penstock.runtimes.weights import share
from penstock.types import DATATYPES, TensorSpec

_COLLECTION: Final = re.compile(r"(typing\.)?(list|tuple|dict|sequence|mapping)\[.*Tensor", re.IGNORECASE)
MOST_POWERS: Final = 32  # sizes of batches with "auto"


# ---- precision and optimization


def prepare(
    module: Any, device: str = "cpu", *, precision: str = "fp32", optimize: str = "none", shapes: int | None = None
) -> Any:
    """The module moved, cast, and optimized. Raises ConfigError, LoadFailed.

    `optimize_for_inference` freezes TorchScript and fuses its operators, after scripting a Python module. `compile` is
    `torch.compile`, for Python modules and exported programs: with dynamic sizes, or anew for each of so many `shapes`.
    """
    torch = import_torch()
    dtype = dtype_of(precision)
    try:
        module = module.train(False).to(device)
        exported = False
    except NotImplementedError:  # an exported program keeps its mode and device
        exported = True
    if exported and dtype is not torch.float32:
        raise ConfigError(
            f"precision: found {precision}, but the graph of an exported program fixes its dtypes;"
            " export the model in this precision"
        )
    if dtype is not torch.float32:
        module = module.to(dtype)
    if optimize == "none":
        return module
    if optimize == "graph":
        raise ConfigError(
            "optimize: found graph, which is for model files and modules without a handler on a CUDA device, not for"
            f" {device}; leave it out"
        )
    if optimize == "compile":
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError("optimize: found compile, which TorchScript does not support; use optimize_for_inference")
        if shapes is None:
            return torch.compile(module, dynamic=True)
        _allow_compilations(torch, shapes)
        return torch.compile(module, dynamic=False)
    if optimize != "optimize_for_inference":
        raise ConfigError(f"optimize: found {optimize!r}, expected one of {', '.join(OPTIMIZATIONS)}")
    if exported:
        raise ConfigError("optimize: found optimize_for_inference, which exported programs do not support; use compile")
    return _frozen(torch, module)


def _prepared(module: Any, settings: ProgramSettings, shapes: Iterable[Sequence[int]]) -> Any:
    """`shapes` are those of the inputs. If only their rows are open, and batches have a few sizes, it is compiled for
    each: kernels for fixed sizes are faster."""
    known = [-1 not in shape[1:] for shape in shapes]
    count = len(settings.sizes) if isinstance(settings.sizes, tuple) else MOST_POWERS
    precision, optimize = settings.precision, settings.optimize or "none"
    if optimize == "graph" and settings.device.startswith("cuda"):
        optimize = "none"  # the graphs are captured from the module as it is
    sized = settings.padded and known and all(known)
    return prepare(module, settings.device, precision=precision, optimize=optimize, shapes=count if sized else None)


def _allow_compilations(torch: Any, count: int) -> None:
    """Lets a module be compiled so often before PyTorch runs it uncompiled; its own limit is 8."""
    import torch._dynamo.config as config

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.7
    setattr(config, limit, max(getattr(config, limit), count))


def _frozen(torch: Any, module: Any) -> Any:
    with quiet():
        if not isinstance(module, torch.jit.ScriptModule):
            try:
                module = torch.jit.script(module)
            except Exception as e:
                raise LoadFailed(
                    f"optimize_for_inference needs TorchScript, but {type(module).__name__} cannot be scripted:"
                    f" {describe(e)}; use optimize = 'compile'",
                    detail=str(e),
                ) from e
        return torch.jit.optimize_for_inference(torch.jit.freeze(module))


def dtype_of(precision: str) -> Any:
    """The torch dtype of a precision. Raises ConfigError."""
    torch = import_torch()
    if precision not in PRECISIONS:
        raise ConfigError(f"precision: found {precision!r}, expected one of {', '.join(PRECISIONS)}")
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]


# ---- programs


class TorchProgram:
    """Runs a prepared module on one device under `inference_mode`.

    Floating-point inputs are cast to `precision`, or to the dtype in `casts`; half precision in outputs becomes FP32.
    `forward` receives the inputs in `keywords` by name, and the others in order. Each constructor argument is one
    property of a `Program`.
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
        images: Mapping[str, Image] = {},
        casts: Mapping[str, Any] = {},
    ) -> None:
        self._torch = import_torch()
        self._module, self._device, self._keywords = module, device, keywords
        self._dtype = _half_of(module) if precision == "fp32" else dtype_of(precision)
        self._casts = casts
        self.inputs, self.outputs, self.platform = inputs, outputs, platform
        self.rows, self.unbatched = rows, unbatched
        self._images = {name: normaliser(image, device) for name, image in images.items()}

    def run(self, arrays: Arrays) -> Arrays:
        """Raises what the module raises; BadOutput for an output that is not a tensor."""
        tensors = {name: self._tensor(array) for name, array in arrays.items()}
        return {name: value.cpu().numpy() for name, value in self.forward(tensors).items()}

    def forward(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The outputs for tensors on the device, see `DeviceModel`. Raises as `run`."""
        positional, named = [], {}
        for spec in self.inputs:
            if spec.name not in tensors:
                continue
            tensor = tensors[spec.name]
            if spec.name in self._images:
                tensor = self._images[spec.name](tensor)
            dtype = self._casts.get(spec.name, self._dtype)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            if spec.name in self._keywords:
                named[spec.name] = tensor
            else:
                positional.append(tensor)
        with self._torch.inference_mode():
            found = self._module(*positional, **named)
            return {name: self._output(name, value) for name, value in self._named(found).items()}

    def _tensor(self, array: Array) -> Any:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)

    def _named(self, found: Any) -> dict[str, Any]:
        """The outputs by name: the keys of a dict, the declared names, or OUTPUT__0, OUTPUT__1 ..."""
        if isinstance(found, Mapping):
            return {str(name): value for name, value in found.items() if value is not None}
        several = list(found) if isinstance(found, (list, tuple)) else [found]
        names = [spec.name for spec in self.outputs]
        if len(names) != len(several):
            names = [f"OUTPUT__{i}" for i in range(len(several))]
        return {name: value for name, value in zip(names, several, strict=True) if value is not None}

    def _output(self, name: str, value: Any) -> Any:
        if not isinstance(value, self._torch.Tensor):
            raise BadOutput(f"output '{name}' of the model is a {type(value).__name__}, expected a tensor")
        return value.float() if value.dtype in (self._torch.float16, self._torch.bfloat16) else value


def _half_of(module: Any) -> Any:
    """The dtype of half precision that all floating-point weights of a module have; None if they have none."""
    weights = module.parameters() if hasattr(module, "parameters") else ()
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {dtype_of("fp16"), dtype_of("bf16")} else None


def normaliser(image: Image, device: str) -> Callable[[Any], Any]:
    """A function from pixels on the device to the network's input, in new memory."""
    torch = import_torch()
    mean, scale = (torch.from_numpy(a).to(device) for a in (image.normalization.mean, image.normalization.scale))
    dtype = getattr(torch, image.dtype)

    def normalise(pixels: Any) -> Any:
        # contiguous, because the network may use `view`
        floats = pixels.permute(image.axes).to(torch.float32, memory_format=torch.contiguous_format)
        return floats.sub(mean).mul_(scale).to(dtype)

    return normalise


def on_device(program: TorchProgram, device: str, *, graphs: bool = False) -> Program:
    """The program, in three phases on a CUDA device, there with or without graphs."""
    if not device.startswith("cuda"):
        return program
    from penstock.runtimes.cuda import CudaDevice

    return DeviceProgram(program, CudaDevice(device), graphs=graphs)


def _opened(program: TorchProgram, settings: ProgramSettings) -> Program:
    return on_device(program, settings.device, graphs=settings.optimize in (None, "graph"))


def open_program(path: str, settings: ProgramSettings) -> Program:
    """The program in a file of any kind. Raises LoadFailed, ConfigError."""
    import_torch().set_num_threads(settings.threads)
    if kind_of(path) == "exported":
        refuse_inputs(settings, "an exported program")
        return of_exported(load_exported(path, settings.device), settings)
    return of_module(load_module(path, settings.device, trust=settings.trust), settings, own=True)


def of_module(module: Any, settings: ProgramSettings, *, own: bool = False) -> Program:
    """The program of an `nn.Module` or TorchScript module. Raises LoadFailed, ConfigError.

    Its inputs are the tensors that `forward` takes; the settings' `inputs` add their datatypes and shapes. A module
    that nothing else uses, `own`, may share its weights.
    """
    torch = import_torch()
    scripted = isinstance(module, torch.jit.ScriptModule)
    found = _of_schema(module) if scripted else _of_signature(module)
    platform = "pytorch_torchscript" if scripted else "pytorch_eager"
    inputs = settings.inputs
    ready = _prepared(module, settings, [spec.shape for spec in inputs])
    if own:
        share(ready)
    known = frozenset(i.name for i in found if not i.name.startswith("INPUT__"))
    for spec in inputs:
        if spec.datatype == "BYTES":
            raise ConfigError(f"inputs.{spec.name}: found BYTES, but PyTorch has no string tensors")
    if inputs:
        found = tuple(
            Input(spec.name) if spec.name in settings.images else Input(spec.name, spec.datatype, spec.shape)
            for spec in inputs
        )
    found, images = images_of(found, settings.images)
    keywords = known if all(i.name in known for i in found) else frozenset()
    device, precision = settings.device, settings.precision
    opened = TorchProgram(
        ready, device, found, platform=platform, precision=precision, keywords=keywords, images=images
    )
    return _opened(opened, settings)


def of_exported(program: Any, settings: ProgramSettings) -> Program:
    """The program of an ExportedProgram, which declares datatypes and shapes itself. Raises LoadFailed, ConfigError."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    values = [nodes.get(name) for name in program.graph_signature.user_inputs]
    arguments, named = program.example_inputs or (values, {})
    names = [*program.graph_signature.user_inputs[: len(arguments)], *named]
    results = [nodes.get(name) for name in program.graph_signature.user_outputs]
    unbatched = cannot_be_rows(*([_size(value) for value in side] for side in (values, results)))
    inputs = [_spec(str(name), value, unbatched) for name, value in zip(names, values, strict=False)]
    if len(names) != len(values) or not all(inputs):
        raise LoadFailed("the exported program takes inputs other than tensors with rows; export one without them")
    told = [str(name) for name in program.graph_signature.user_outputs]
    told = [f"{name}__{i}" if name in told[:i] else name for i, name in enumerate(told)]  # a tensor returned twice
    outputs = [_spec(name, value, unbatched) for name, value in zip(told, results, strict=True)]
    if program.call_spec.out_spec.type not in (None, tuple, list):
        outputs = [None]  # a dict names its outputs
    ready = _prepared(program.module(), settings, [i.shape for i in inputs if i])
    share(ready)
    sent, images = images_of([Input(i.name, i.datatype, i.shape) for i in inputs if i], settings.images)
    opened = TorchProgram(
        ready,
        settings.device,
        sent,
        platform="pytorch_exported",
        keywords=frozenset(named),
        casts={str(name): getattr(value, "dtype", None) for name, value in zip(names, values, strict=False)},
        outputs=tuple(o for o in outputs if o) if all(outputs) else (),
        rows=_rows_of(program, values),
        unbatched=unbatched,
        images=images,
    )
    return _opened(opened, settings)


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
    """The parameters of `forward`; INPUT__0 if it names none, as with *args. Raises LoadFailed if it needs lists."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    found = [(p.name, p.annotation, p.default is inspect.Parameter.empty) for p in parameters]
    return _inputs(_tensors(found, lambda kind: not _COLLECTION.match(str(kind))))


def _of_schema(module: Any) -> tuple[Input, ...]:
    """The tensors that a TorchScript `forward` takes. Raises LoadFailed if it needs anything else."""
    found = [(a.name, a.type, not a.has_default_value()) for a in module.forward.schema.arguments[1:]]
    return _inputs(_tensors(found, lambda kind: str(kind) in ("Tensor", "Optional[Tensor]")))


def _tensors(parameters: Iterable[tuple[str, Any, bool]], is_tensor: Callable[[Any], bool]) -> list[tuple[str, bool]]:
    """Name and necessity of the parameters that are tensors, of (name, type, necessity)."""
    for name, kind, needed in parameters:
        if needed and not is_tensor(kind):
            raise LoadFailed(
                f"`forward` needs '{name}', which is {kind}; expected tensors: wrap the module in one that takes them"
            )
    return [(name, needed) for name, kind, needed in parameters if is_tensor(kind)]


def _inputs(names: list[tuple[str, bool]]) -> tuple[Input, ...]:
    if not names:
        return (Input("INPUT__0"),)
    return tuple(Input(name, alias=f"INPUT__{i}", required=needed) for i, (name, needed) in enumerate(names))
