"""Op: one step of a pipeline's node. Rows in = rows out, and an item that fails, fails alone.

An op is made once for each instance of its node, and called in that instance's thread only. The keyword parameters of
its `__init__`, with annotations and defaults, are the keys that a node may set for it: there is no other list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest

Fields = dict[str, Any]
"""What is known of one item, by name. `data` is what the op is given, `result` what it gave; others are free."""

DATA, RESULT, BOX, NODE_NAME, CONTEXT, EVENT = "data", "result", "_box", "node_name", "context", "event"
"""Names of fields with a meaning, spelled as TorchPipe's keys are."""


class Op:
    """What every op declares of itself.

    `reads` and `writes` are fields beside `data` and `result`; `writes = None` says that it may write any. `takes` and
    `gives` are kinds of `data` and `result`: "bytes" (an encoded image), "mat" (an array `[height, width, channels]`
    or `[height, width]`, uint8 or float32), "tensor" (an array whose axis 0 is rows, 1 for one item: `[1, ...]`), or
    "any".
    """

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...] | None] = ()
    takes: ClassVar[str] = "any"
    gives: ClassVar[str] = "any"
    brackets: ClassVar[str] = ""  # the parameter that text in brackets sets, as in Python[pkg.mod:Class]
    wraps: ClassVar[bool] = False  # whether ops may stand in its brackets, which are run before it: Result2Key[X]

    def load(self, device: str) -> None:
        """Called once, in the instance's thread, before the first item. `device` is "cpu", "cuda:0" ..."""

    def unload(self) -> None:
        """Called once, when the instance ends in order."""

    def note(self) -> str:
        """What a user should know of the op as it is configured, in one line for `penstock pipeline check`; or ""."""
        return ""


class ItemOp(Op):
    """An op that looks at one item. Those of a node that follow each other become one call."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        """The result of one item. It may look at and set other fields. Raises what that item fails with."""
        raise NotImplementedError


class BatchOp(Op):
    """An op that looks at many items at once: a model."""

    max_rows: int | None = None  # the most it can take, known once it is loaded; None: any number

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """A result for each item, in their order; an exception in place of one fails that item alone. What it raises is
        every item's, unless the node may be run again in halves."""
        raise NotImplementedError


Array = NDArray[Any]
MAT_TYPES = ("uint8", "float32")


def found(value: Any) -> str:
    """What a value is, in few words: `uint8 array [480, 640, 3]`, `str`."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    if isinstance(value, list):
        return f"list of {found(value[0]) if value else 'nothing'}"
    return type(value).__name__


def as_mat(data: Any, op: str, *, any_type: bool = False) -> Array:
    """The value, if it is an image: an array `[height, width]` or `[height, width, 1 to 4]`, uint8 or float32.

    Raises BadRequest. `any_type` lets other numbers pass.
    """
    if not isinstance(data, np.ndarray):
        raise BadRequest(f"{op} found {found(data)}, expected an image (an array [height, width, channels])")
    shape = data.shape
    if not (data.ndim == 2 or (data.ndim == 3 and 1 <= shape[2] <= 4)) or 0 in shape:
        raise BadRequest(f"{op} found {found(data)}, expected [height, width] or [height, width, 1 to 4 channels]")
    if data.dtype.name not in MAT_TYPES and not (any_type and data.dtype.kind in "biuf"):
        raise BadRequest(f"{op} found {found(data)}, expected uint8 or float32: put FloatMat before it")
    return data


def as_tensor(data: Any, op: str, ndim: int | None = None) -> Array:
    """The value, if it is an array of numbers with `ndim` axes, axis 0 its rows. Raises BadRequest."""
    if not isinstance(data, np.ndarray) or data.dtype.kind not in "biuf":
        raise BadRequest(f"{op} found {found(data)}, expected a tensor (an array of numbers)")
    if data.ndim == 0 or 0 in data.shape or (ndim is not None and data.ndim != ndim):
        shape = "[rows, ...]" if ndim is None else f"{ndim} axes"
        raise BadRequest(f"{op} found {found(data)}, expected {shape}, none of them empty")
    return data
