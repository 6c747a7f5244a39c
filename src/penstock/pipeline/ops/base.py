"""Op: one step of a pipeline's node, and the checks of its input. An item that fails fails alone.

Each instance of a node creates its own ops and calls them in its own thread. The keyword parameters of an op's
`__init__`, with their annotations and defaults, are the keys that a node may set.
"""

import inspect
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from penstock.errors import BadRequest, ConfigError, PenstockError, nearest
from penstock.plugins import raised_at
from penstock.values import convert

Array = NDArray[Any]
MAT_TYPES = (np.dtype(np.uint8).num, np.dtype(np.float32).num)  # NumPy computes the name of a type in Python, in 7 us
KINDS = ("bytes", "mat", "tensor", "any")

Fields = dict[str, Any]
"""The fields of one item by name. `data` is the op's input and `result` its output; others are free."""

DATA, RESULT, BOX, NODE_NAME, CONTEXT, EVENT = "data", "result", "_box", "node_name", "context", "event"
CLIENT_REQUEST = "client_request"  # with `client_request = true` in [pipeline]
"""Names of fields with a meaning, spelled as TorchPipe's keys are."""


class Op:
    """The declarations of an op.

    `reads` and `writes` are fields besides `data` and `result`; `writes = None` means any field. `takes` and `gives`
    are the kinds of `data` and `result`: "bytes" (an encoded image), "mat" (an array `[height, width, channels]` or
    `[height, width]`, uint8 or float32; `[0, height, width, channels]` is no image), "tensor" (an array whose axis 0
    is rows, `[1, ...]` for one item), or "any".
    """

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...] | None] = ()
    takes: ClassVar[str] = "any"
    gives: ClassVar[str] = "any"
    brackets: ClassVar[str] = ""  # the parameter that text in brackets sets, as in Python[pkg.mod:Class]
    model_file: ClassVar[bool] = False  # whether it runs the file in its parameter `model`
    gpu: ClassVar[bool] = False  # whether it uses the GPU of its node, besides ops that run model files
    waits: ClassVar[bool] = False  # whether a built-in op for images may wait, for instance for a disk
    wraps: ClassVar[bool] = False  # whether its brackets contain ops that run before it, as in Result2Key[X]

    def load(self, device: str) -> None:
        """Called once, in the instance's thread, before the first item. `device` is "cpu", "cuda:0" ..."""

    def unload(self) -> None:
        """Called once, when the instance shuts down normally."""

    def note(self) -> str:
        """A note for the user about this configuration, in one line for `penstock pipeline check`; or ""."""
        return ""


class ItemOp(Op):
    """An op that processes one item. Consecutive ones of a node become one call."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        """The result of one item. It may read and set other fields. An exception fails the item."""
        raise NotImplementedError


class MatOp(ItemOp):
    """An op from an image to an image. No image, `[0, height, width, channels]`, gives no image."""

    takes = "mat"
    gives = "mat"
    any_type: ClassVar[bool] = False  # whether it also takes numbers other than uint8 and float32

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = as_mat(data, type(self).__name__, any_type=self.any_type)
        return self.image(mat, fields) if mat.ndim < 4 else self.image(black(mat), fields)[None][:0]

    def image(self, mat: Array, fields: Fields) -> Array:
        """The result for one image, which `as_mat` has checked. It may read and set other fields."""
        raise NotImplementedError


class TensorOp(ItemOp):
    """An op from a tensor to a tensor."""

    takes = "tensor"
    gives = "tensor"


class BatchOp(Op):
    """An op that processes many items at once: a model."""

    max_rows: int | None = None  # most items of one call, known when it is loaded; None: any number
    unbatched = False  # axis 0 of its tensors is not rows, known when it is loaded

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """A result for each item, in order. An exception as a result fails that item alone.

        If the call raises, the node runs it again in halves, or all items fail.
        """
        raise NotImplementedError


_AnyOp = TypeVar("_AnyOp", bound=type[Op])


def check_kinds(cls: _AnyOp, name: str) -> _AnyOp:
    """The op if its `takes` and `gives` are kinds. Raises ConfigError."""
    for key in ("takes", "gives"):
        if (kind := getattr(cls, key)) not in KINDS:
            hint = f"{nearest(str(kind), KINDS)} (there are {', '.join(KINDS)})"
            raise ConfigError(f"op '{name}': {key} = {kind!r} is no kind of data{hint}")
    return cls


def found(value: Any) -> str:
    """A short description of a value: `uint8 array [480, 640, 3]`, `str`."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    if is_torch(value):
        gradient = ", with a gradient" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)} on {value.device}{gradient}"
    if isinstance(value, list):
        return f"list of {found(value[0]) if value else 'nothing'}"
    return type(value).__name__


def as_mat(data: Any, op: str, *, any_type: bool = False) -> Array:
    """The value if it is an image: `[height, width]` or `[height, width, 1 to 4]`, uint8 or float32.

    `[0, height, width, 1 to 4]` is no image. `any_type` also accepts other number types. Raises BadRequest.
    """
    if not isinstance(data, np.ndarray):
        raise BadRequest(f"{op} found {found(data)}, expected an image (an array [height, width, channels])")
    shape = data.shape[1:] if data.ndim == 4 and not len(data) else data.shape
    if not (len(shape) == 2 or (len(shape) == 3 and 1 <= shape[2] <= 4)) or 0 in shape:
        raise BadRequest(f"{op} found {found(data)}, expected [height, width] or [height, width, 1 to 4 channels]")
    if data.dtype.num not in MAT_TYPES and not (any_type and data.dtype.kind in "biuf"):
        raise BadRequest(f"{op} found {found(data)}, expected uint8 or float32: put FloatMat before it")
    return data


def black(none: Array) -> Array:
    """An image `[height, width, channels]` in place of none: its result has the size and type of the empty result."""
    return np.zeros(none.shape[1:], none.dtype)


def is_torch(value: Any) -> bool:
    """Whether the value is a tensor of PyTorch. Does not import it."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def as_tensor(data: Any, op: str, *, on_device: bool = False) -> Any:
    """The value if it is an array of numbers whose axis 0 is rows, of which there may be none. Raises BadRequest.

    A tensor of PyTorch becomes an array, or with `on_device` stays what and where it is.
    """
    if is_torch(data):
        data = data if on_device and not data.is_complex() else data.detach().cpu().numpy()
    elif not isinstance(data, np.ndarray):
        raise BadRequest(f"{op} found {found(data)}, expected a tensor (an array of numbers)")
    if isinstance(data, np.ndarray) and data.dtype.kind not in "biuf":
        raise BadRequest(f"{op} found {found(data)}, expected a tensor (an array of numbers)")
    if data.ndim == 0 or 0 in data.shape[1:]:
        raise BadRequest(f"{op} found {found(data)}, expected [rows, ...], with no axis of 0 after the first")
    return data


# ---- the keys that a node may set for an op

REQUIRED: Any = inspect.Parameter.empty
_DOC = re.compile(r"^\s*- `(\w+)`: (.+?)(?=^\s*- `|^\s*$|\Z)", re.MULTILINE | re.DOTALL)


class OpParameter(Struct, frozen=True):
    """One key of an op. `default` is REQUIRED if it must be set."""

    name: str
    type: Any
    default: Any = REQUIRED
    doc: str = ""

    @property
    def required(self) -> bool:
        """Whether the key must be set."""
        return self.default is REQUIRED


def parameters_of(cls: type[Op]) -> dict[str, OpParameter]:
    """The keys of an op by name, documented by lines "- `name`: text" in its docstring."""
    hints = _types(cls.__init__)
    docs = {
        name: " ".join(text.split())
        for base in reversed(cls.__mro__)
        for name, text in _DOC.findall(inspect.cleandoc(base.__doc__ or ""))
    }
    return {  # none of `object.__init__`, which has only *args and **kwargs
        p.name: OpParameter(p.name, hints.get(p.name, Any), p.default, docs.get(p.name, ""))
        for p in list(inspect.signature(cls.__init__).parameters.values())[1:]
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def _types(function: Any) -> dict[str, Any]:
    """The types of annotated parameters, except names that only type checkers import."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(function).items():
        try:
            found |= get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), names)
        except (NameError, AttributeError):
            continue
    return found


def takes_any(cls: type[Op]) -> bool:
    """Whether an op has `**params`, and therefore accepts keys of any name."""
    if cls.__init__ is object.__init__:
        return False
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values())


def check_params(cls: type[Op], params: Mapping[str, Any]) -> dict[str, Any]:
    """The values for an op, converted to its types. Raises ConfigError: unknown, missing, or of a wrong type."""
    known, name = parameters_of(cls), cls.__name__
    for key in params:
        if key not in known and not takes_any(cls):
            listed = ", ".join(known) or "none"
            raise ConfigError(f"{name} has no parameter '{key}'{nearest(key, known)} (it has: {listed})")
    missing = [key for key, p in known.items() if p.required and key not in params]
    if missing:
        raise ConfigError(f"{name} needs {' and '.join(missing)}, not found: set it in the node")
    return {
        key: convert(value, known[key].type, f"{name}: {key}", loose=True) if key in known else value
        for key, value in params.items()
    }


def make_op(cls: type[Op], params: Mapping[str, Any]) -> Op:
    """An op with these parameters. Raises ConfigError, also for values that the op itself rejects."""
    values = check_params(cls, params)
    try:
        return cls(**values)
    except PenstockError:
        raise
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{cls.__name__}: {e}{raised_at(e)}") from e
