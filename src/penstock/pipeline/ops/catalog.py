"""The ops by name. The requirements of an op, such as OpenCV or a model runtime, are loaded when it is looked up."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from penstock.errors import ConfigError, install_hint
from penstock.pipeline.notation import dialect
from penstock.pipeline.ops.base import BatchOp, ItemOp, Op, check_kinds
from penstock.plugins import load_object

_HOMES = {
    "data": "Add AddInt Copy CopySplit Identity Keep KeyA2KeyB Move Remove Result2Key Result2Other Sleep",
    "decode": "DecodeMat DecodeTensor",
    "geometry": "AlignMat BatchFixHLimitW CropMat CropResizeMat DynamicFixHResizePadMat DynamicResizeMat "
    "FixHResizePadMat FixRatioResizeMat PerspectiveTransformMat PerspectiveTransformMats PillowResizeMat "
    "ResizeCenterPadMat ResizeMat ResizePadMat",
    "mat": "Any2Mat CvtColorMat FloatMat Mat2CpuTensor Mat2GpuTensor Mat2Tensor SaveMat Tensor2Mat Tensor2Vector",
    "python": "Python",
    "scores": "ArgMax ArgMaxTensor SoftmaxArgMax SoftmaxArgMaxTensor SoftmaxCpu SoftmaxMax",
    "tensor": "CpuTensor CropTensor CvtColorTensor FloatNCHWTensor FloatTensor GpuTensor NCHWTensor "
    "PillowResizeTensor ResizePadTensor ResizeTensor",
}
_MODELS = "Model OnnxTensor OpenvinoTensor TensorrtTensor TorchScriptTensor"

BUILTIN = {name: f"penstock.pipeline.ops.{home}:{name}" for home, listed in _HOMES.items() for name in listed.split()}
BUILTIN |= dict.fromkeys(_MODELS.split(), "penstock.pipeline.model_op:ModelOp")
"""The location of each op, "module:Class"."""

_registered: dict[str, type[Op]] = {}


def _known() -> dict[str, str]:
    """The names of all ops by their lower case. Registered ones override others."""
    return {name.lower(): name for name in (*BUILTIN, *dialect().ops, *_registered)}


def names() -> list[str]:
    """The names of all ops, sorted."""
    return sorted(_known().values(), key=str.lower)


def canonical(name: str) -> str:
    """The listed spelling of a name, which is not case-sensitive. Raises ConfigError: what to write instead."""
    known = _known()
    if (found := known.get(name.lower())) is not None:
        return found
    if (why := dialect().absent_ops.get(name.lower())) is not None:
        raise ConfigError(f"TorchPipe's op '{name}' is not available: {why}")
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean '{known[close[0]]}'? There" if close else "; there"
    raise ConfigError(f"unknown op '{name}'{hint} are {len(known)}: see docs/pipelines.md")


def is_model(name: str) -> bool:
    """Whether an op of this name runs a model file."""
    return find(name).model_file


def location(name: str) -> str:
    """Where an op that is not registered is defined, "module:Class"; "" for other names."""
    return BUILTIN.get(name) or dialect().ops.get(name, "")


def find(name: str) -> type[Op]:
    """The class of an op. Raises ConfigError: no such op, or a missing requirement."""
    name = canonical(name)
    if name in _registered:
        return _registered[name]
    try:
        cls: Any = load_object(location(name))
    except Exception as e:
        cause = e.__cause__ or e
        if isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] != "penstock":
            raise ConfigError(f"{name} needs {cause.name}, which is not installed: {install_hint('image')}") from e
        raise
    return cls  # type: ignore[no-any-return]


def class_of(name: str, target: str | None = None) -> type[Op]:
    """The class that runs an op: the `target` of `Python`, otherwise `find(name)`, with its errors."""
    cls = find(name)
    if target is None or cls.brackets != "target":
        return cls
    resolve: Any = load_object("penstock.pipeline.ops.python:resolve")
    return resolve(target)  # type: ignore[no-any-return]


def register(name: str, cls: type[Op]) -> None:
    """Registers an ItemOp or BatchOp under a name in this process, replacing any other. Raises ConfigError.

    `penstock.pipeline.ops.python.adapt` converts other classes.
    """
    if not (inspect.isclass(cls) and issubclass(cls, ItemOp | BatchOp)):
        raise ConfigError(
            f"op '{name}' is {cls!r}, expected a subclass of ItemOp or BatchOp (penstock.pipeline.ops.base)"
        )
    unregister(name)
    _registered[name] = check_kinds(cls, name)


def registered(names: Iterable[str]) -> dict[str, type[Op]]:
    """The registered ops among these, for another process."""
    return {name: _registered[name] for name in map(canonical, names) if name in _registered}


def unregister(name: str) -> None:
    """Removes a registration."""
    for known in [n for n in _registered if n.lower() == name.lower()]:
        del _registered[known]
