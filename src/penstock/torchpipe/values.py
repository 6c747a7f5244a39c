"""Tensors at the border: a pipeline knows arrays, TorchPipe's programs give and expect torch's tensors.

Nothing here loads torch: where a program has not, there are no tensors, and results stay arrays.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def _torch() -> Any:
    """The module, if the program has loaded it; not one that another thread is only about to load."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "from_numpy") else None


def to_array(value: Any) -> Any:
    """The array of a tensor, over its memory where that is the CPU's; lists of them too; anything else as it is."""
    torch = _torch()
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return [to_array(v) for v in value]
    return value


def to_tensor(value: Any) -> Any:
    """The tensor of an array, over its memory if it may be written to; lists of them too; anything else as it is."""
    torch = _torch()
    if torch is None:
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return value
        return torch.from_numpy(value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy())
    if type(value) in (list, tuple) and value and all(isinstance(v, np.ndarray) for v in value):
        return [to_tensor(v) for v in value]
    return value


def is_rows(value: Any) -> bool:
    """Whether an array looks like a tensor, of which an item has one row: `[1, ...]`. A picture is taller than that."""
    if type(value) in (list, tuple):
        return bool(value) and all(is_rows(v) for v in value)
    return isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[0] == 1
