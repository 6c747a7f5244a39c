"""The ops by name. What an op needs (OpenCV, a model runtime) is loaded when its name is looked up, and not before."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from penstock.errors import ConfigError, install_hint
from penstock.pipeline.ops.base import BatchOp, ItemOp, Op
from penstock.plugins import load_object

_HOMES = {
    "crop": "CropMat CropResizeMat PerspectiveTransformMat PerspectiveTransformMats",
    "data": "Add AddInt Copy Identity Keep KeyA2KeyB Move Remove Result2Key Result2Other Sleep",
    "decode": "DecodeMat DecodeTensor",
    "mat": "Any2Mat CvtColorMat FloatMat Mat2CpuTensor Mat2GpuTensor Mat2Tensor Tensor2Mat Tensor2Vector",
    "python": "Python",
    "resize": "AlignMat BatchFixHLimitW DynamicFixHResizePadMat DynamicResizeMat FixHResizePadMat FixRatioResizeMat "
    "PillowResizeMat ResizeCenterPadMat ResizeMat ResizePadMat",
    "save": "SaveMat",
    "scores": "ArgMax ArgMaxTensor SoftmaxArgMax SoftmaxArgMaxTensor SoftmaxCpu SoftmaxMax",
    "tensor": "CpuTensor CropTensor CvtColorTensor FloatNCHWTensor FloatTensor GpuTensor NCHWTensor "
    "PillowResizeTensor ResizePadTensor ResizeTensor",
}
_MODELS = "Model OnnxTensor OpenvinoMat OpenvinoTensor TensorrtTensor TorchScriptTensor"

BUILTIN = (
    {name: f"penstock.pipeline.ops.{home}:{name}" for home, listed in _HOMES.items() for name in listed.split()}
    | {"C10Exception": "penstock.pipeline.ops.data:Raise", "RuntimeError": "penstock.pipeline.ops.data:Raise"}
    | dict.fromkeys(_MODELS.split(), "penstock.pipeline.model_op:ModelOp")
)
"""Where an op is: "module:Class". Those of models are above this floor, and found at run time."""

ALIASES = {"cp": "Copy", "Del": "Remove", "Empty": "Identity", "mv": "Move", "rm": "Remove"}
"""Other names that TorchPipe has for an op."""

_GPU = "it runs on a GPU by a library that is not used here; use"
_LATER = "branches are not built yet"
_LLM = "language models are served as a model of their own, not as nodes"
_NONE = "nothing needs it here"

NOT_HERE = {
    "CalTorchBatchSize": "rows are counted by the tensor's first axis",
    "CompareLongKey": f"{_LATER}; write a Python op that compares",
    "CopySplit": "it is a test of TorchPipe's own; write a Python op that splits",
    "CreateTensor": "it is a test of TorchPipe's own; write a Python op",
    "CvtColorNvTensor": f"{_GPU} CvtColorTensor",
    "EnsureInputHasEvent": f"{_NONE}: every item is waited for or has a callback",
    "EventLoop": f"{_NONE}: nodes always run at once",
    "FakeInstance": "sizes of a batch are told by `sizes` and `min`",
    "HasKey": f"{_LATER}; write a Python op that looks for the field",
    "Jump": f"{_LATER}; name the node in `next`",
    "LastBatchTensor": _LLM,
    "LoadTensor": "write a Python op that reads the file when it is loaded",
    "LoadTensors": "write a Python op that reads the files when it is loaded",
    "MapReduce": f"{_LATER}; write a Python op that takes the list",
    "Max": "a node's largest batch is its key `max`",
    "Parallel": "give the node more instances",
    "PipelineReviser": _NONE,
    "PPLCopyMakeBorderTensor": f"{_GPU} ResizePadTensor",
    "PPLCropTensor": f"{_GPU} CropTensor",
    "PPLResizePadTensor": f"{_GPU} ResizePadTensor",
    "PPLResizeTensor": f"{_GPU} ResizeTensor",
    "PPLRotateTensor": f"{_GPU} a Python op",
    "PPLWarpAffineTensor": f"{_GPU} PerspectiveTransformMat or a Python op",
    "Range": "sizes of a batch are told by `sizes` and `min`",
    "Remote": "it is not finished in TorchPipe either; serve the other model, and call it from a Python op",
    "RemoveV0": "write Remove[a,b]",
    "ResizeNvTensor": f"{_GPU} ResizeTensor",
    "ResizeTensorV1": f"{_GPU} ResizeTensor",
    "Ring": f"{_NONE}: nodes always run at once",
    "SaveTensor": "write a Python op that saves with numpy.save",
    "SubProcess": "a worker process holds the whole pipeline: use --workers",
    "SyncRing": f"{_NONE}: nodes always run at once",
    "Tensor2NvTensor": f"{_NONE}: tensors are arrays",
}
"""Ops that TorchPipe has and this catalog has not, and what to do instead. Wrappers of streams vanish before."""

_registered: dict[str, type[Op]] = {}


def _known() -> dict[str, str]:
    """The names of all ops, by their lower case; those that are registered come before others."""
    return {name.lower(): name for name in (*BUILTIN, *ALIASES, *_registered)}


def names() -> list[str]:
    """The names of all ops, sorted."""
    return sorted(_known().values(), key=str.lower)


def canonical(name: str) -> str:
    """The name as it is listed; upper and lower case are one. Raises ConfigError: what to write instead."""
    known = _known()
    if (found := known.get(name.lower())) is not None:
        return found
    if (why := {n.lower(): text for n, text in NOT_HERE.items()}.get(name.lower())) is not None:
        raise ConfigError(f"the op '{name}' is TorchPipe's, and not here: {why}")
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    told = f"; did you mean '{known[close[0]]}'? There" if close else "; there"
    raise ConfigError(f"unknown op '{name}'{told} are {len(known)}: see docs/pipelines.md")


def is_model(name: str) -> bool:
    """Whether an op of this name runs a model's file."""
    return BUILTIN.get(name, "").endswith(":ModelOp")


def find(name: str) -> type[Op]:
    """The class of an op. Raises ConfigError: no such op, or what it needs is not installed."""
    name = canonical(name)
    if name in _registered:
        return _registered[name]
    try:
        cls: Any = load_object(BUILTIN[ALIASES.get(name, name)])
    except Exception as e:
        cause = e.__cause__ or e
        if isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] != "penstock":
            raise ConfigError(f"{name} needs {cause.name}, which is not installed: {install_hint('image')}") from e
        raise
    return cls  # type: ignore[no-any-return]


def class_of(name: str, target: str | None = None) -> type[Op]:
    """The class that an op is in the end: what `Python`'s target names, else as `find`, raising what that does."""
    cls = find(name)
    if target is None or cls.brackets != "target":
        return cls
    resolve: Any = load_object("penstock.pipeline.ops.python:resolve")
    return resolve(target)  # type: ignore[no-any-return]


def register(name: str, cls: type[Op]) -> None:
    """Makes `cls` known under a name, in this process; it may take the place of another. Raises ConfigError.

    For what is no ItemOp or BatchOp, see `penstock.pipeline.ops.python.adapt`.
    """
    if not (inspect.isclass(cls) and issubclass(cls, ItemOp | BatchOp)):
        raise ConfigError(
            f"op '{name}' is {cls!r}, expected a class made from penstock.pipeline.ops.base.ItemOp or BatchOp"
        )
    unregister(name)
    _registered[name] = cls


def unregister(name: str) -> None:
    """Forgets what was registered under a name."""
    for known in [n for n in _registered if n.lower() == name.lower()]:
        del _registered[known]
