"""Conversions between a pipeline and a TorchPipe program: tensors to arrays and back, and errors to RuntimeErrors.

Nothing here imports torch. In a program without it there are no tensors, and results stay arrays.
"""

import sys
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import BadRequest, PenstockError


def _torch() -> Any:
    """The module if the program has fully imported it, otherwise None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "from_numpy") else None


def to_array(value: Any) -> Any:
    """The array of a tensor, without a copy on the CPU; also in lists of lists. Other values stay unchanged."""
    torch = _torch()
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return [to_array(v) for v in value]
    if type(value) is list and value and all(type(v) is list for v in value):
        return [to_array(v) for v in value]
    return value


def to_tensor(value: Any) -> Any:
    """The tensor of an array, without a copy if it is writable; also in lists of lists. Others stay unchanged."""
    torch = _torch()
    if torch is None:
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return value
        return torch.from_numpy(value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy())
    if type(value) in (list, tuple) and value and all(isinstance(v, np.ndarray) for v in value):
        return [to_tensor(v) for v in value]
    if type(value) is list and value and all(type(v) is list for v in value):
        return [to_tensor(v) for v in value]
    return value


def is_rows(value: Any) -> bool:
    """Whether an array looks like one row of a tensor, `[1, ...]`, and not like an image, which is higher than 1."""
    if type(value) in (list, tuple):
        return bool(value) and all(is_rows(v) for v in value)
    return isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[0] == 1


class NoData(BadRequest, IndexError):
    """An item without the field `data`."""


class NoSuchNode(BadRequest, IndexError):
    """An item for an unknown node."""


def as_runtime_error(error: PenstockError) -> PenstockError:
    """The error as an instance of both its own class and RuntimeError, as TorchPipe's programs catch it.

    Its detail becomes a note, which is visible if nothing catches the error. It is pickled as its own class.
    """
    if isinstance(error, RuntimeError):
        return error
    cls = type(error)
    both = _COMBINED.get(cls) or _COMBINED.setdefault(cls, _combined(cls))
    made = both(error.message, retry_after_s=error.retry_after_s, detail=error.detail)
    if error.detail:
        made.add_note(error.detail)
    return made


def _combined(cls: type[PenstockError]) -> type[PenstockError]:
    def reduce(self: PenstockError) -> Any:
        return partial(cls, retry_after_s=self.retry_after_s, detail=self.detail), (self.message,)

    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, RuntimeError), names)


_COMBINED: dict[type[PenstockError], type[PenstockError]] = {}
