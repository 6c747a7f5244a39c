"""Pickles with out-of-band torch tensors, for messages between a process and its own child.

torch's own pickles copy the memory of a tensor several times. This module imports torch only to rebuild a tensor.
"""

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from typing import Any


def dumps(value: object, buffer_callback: Callable[[pickle.PickleBuffer], object]) -> bytes:
    """`pickle.dumps(value, 5)`; `buffer_callback` also receives the memory of plain CPU tensors."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):  # torch is absent or still being imported
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
    """A tensor that shares the memory of `data`."""
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
