"""Tensors of torch between a process and its own child, as arrays are: their memory apart from the pickle.

torch's own pickles copy that memory several times. Nothing here imports torch before there is a tensor.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from typing import Any


def dumps(value: object, buffer_callback: Callable[[pickle.PickleBuffer], object]) -> bytes:
    """`pickle.dumps(value, 5)`, with the memory of plain CPU tensors handed to `buffer_callback` as that of arrays."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):  # nobody has a tensor, or torch is being imported
        return pickle.dumps(value, 5, buffer_callback=buffer_callback)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=buffer_callback)
    pickler.dispatch_table = ChainMap[Any, Any]({torch.Tensor: _reduced}, copyreg.dispatch_table)
    pickler.dump(value)
    return file.getvalue()


def _reduced(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad or not tensor.numel():
        return tensor.__reduce_ex__(5)
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return rebuild, (pickle.PickleBuffer(data), dtype, tuple(tensor.shape))


def rebuild(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """The tensor over that memory."""
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
