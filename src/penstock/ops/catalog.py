"""The ops by name. What an op needs (OpenCV, a model runtime) is loaded when its name is looked up, and not before."""

from __future__ import annotations

import inspect
from typing import Any

from penstock.errors import ConfigError, nearest
from penstock.ops.base import BatchOp, ItemOp, Op
from penstock.plugins import load_object

_HOME = {
    "bridge": "Mat2CpuTensor Mat2GpuTensor Mat2Tensor",
    "color": "CvtColorMat FloatMat",
    "data": "Identity",
    "decode": "DecodeMat DecodeTensor",
    "resize": "ResizeMat",
}
BUILTIN = {name: f"penstock.ops.{home}:{name}" for home, listed in _HOME.items() for name in listed.split()} | {
    name: "penstock.pipeline.model_op:ModelOp"
    for name in ("Model", "OnnxTensor", "OpenvinoMat", "OpenvinoTensor", "TensorrtTensor", "TorchScriptTensor")
}
"""Where an op is: "module:Class". Those of models are above this floor, and found at run time."""

_registered: dict[str, type[Op]] = {}


def names() -> list[str]:
    """The names of all ops, sorted."""
    return sorted({*BUILTIN, *_registered}, key=str.lower)


def canonical(name: str) -> str:
    """The name as it is listed; upper and lower case are one. Raises ConfigError with the nearest name."""
    known = {n.lower(): n for n in names()}
    if (found := known.get(name.lower())) is not None:
        return found
    raise ConfigError(f"unknown op '{name}'{nearest(name.lower(), known)} (penstock pipeline ops lists them)")


def find(name: str) -> type[Op]:
    """The class of an op. Raises ConfigError: no such op, or what it needs is not installed."""
    name = canonical(name)
    if name in _registered:
        return _registered[name]
    try:
        cls: Any = load_object(BUILTIN[name])
    except Exception as e:
        if isinstance(e.__cause__, ModuleNotFoundError) and (e.__cause__.name or "").partition(".")[0] != "penstock":
            raise ConfigError(
                f"{name} needs {e.__cause__.name}, which is not installed: pip install penstock[image]"
            ) from e
        raise
    return cls  # type: ignore[no-any-return]


def register(name: str, cls: type[Op]) -> None:
    """Makes `cls` known under a name, in this process; it may take the place of another. Raises ConfigError."""
    if not (inspect.isclass(cls) and issubclass(cls, ItemOp | BatchOp)):
        raise ConfigError(f"op '{name}' is {cls!r}, expected a class made from penstock.ops.base.ItemOp or BatchOp")
    for other in [n for n in _registered if n.lower() == name.lower()]:
        del _registered[other]
    _registered[name] = cls
