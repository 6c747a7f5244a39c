"""Python objects and exceptions between processes: errors as data, and pickles with out-of-band torch tensors.

A model's exception crosses as its class name and plain arguments. Only within a pickled object, between a process and
its own child, does it also cross as a pickle, with attributes and causes; the receiver decides whether to load it.
torch's own pickles copy the memory of a tensor several times. This module imports torch only to rebuild a tensor.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from penstock.errors import PenstockError, from_code, plain

MAX_PICKLE_BYTES, MAX_CAUSES = 64 * 2**10, 8
MAX_ARGUMENTS, MAX_ARGUMENT_LENGTH = 8, 1000


class RemoteException(Struct, array_like=True, frozen=True):
    """An exception that another process raised: its class, and its arguments as numbers and text."""

    module: str
    name: str
    args: list[str | int | float | bool | None]

    def plain(self) -> RemoteException:
        """The exception without a pickle."""
        return RemoteException(self.module, self.name, self.args)

    def chain(self) -> list[Any]:
        """The exception and its causes, each as (class, arguments, attributes) or as itself; empty if unknown."""
        return []


class PickledException(RemoteException, array_like=True, frozen=True):
    """A RemoteException from our own worker. `pickled` is its chain; empty if that cannot be pickled or is large."""

    pickled: bytes

    def chain(self) -> list[Any]:
        return pickle.loads(self.pickled) if self.pickled else []


class OwnException:
    """An exception that a model in this process raised. In another process it becomes a PickledException."""

    def __init__(self, error: Exception) -> None:
        """Drops the frames, which keep payloads alive, of the exception and its causes."""
        self.error = error
        for cause in _causes(error):
            cause.__traceback__ = cause.__context__ = None

    def plain(self) -> RemoteException:
        kind = type(self.error)
        args = [_argument(value) for value in self.error.args[:MAX_ARGUMENTS]]
        return RemoteException(kind.__module__, kind.__qualname__, args)

    def chain(self) -> list[Any]:
        return [_parts(cause) for cause in _causes(self.error)]

    def __reduce__(self) -> tuple[object, ...]:
        found = self.plain()
        return (PickledException, (found.module, found.name, found.args, self._pickled()))

    def _pickled(self) -> bytes:
        try:
            chain = self.chain()
        except Exception:
            return b""
        while chain:
            file = _Bounded()
            try:
                pickle.Pickler(file, 5).dump(chain)
                return file.getvalue()
            except Exception:
                chain.pop()
        return b""


def _causes(error: BaseException) -> list[BaseException]:
    """The exception and its causes."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < MAX_CAUSES:  # an exception may be its own cause
        causes.append(cause)
        cause = cause.__cause__
    return causes


def _parts(error: BaseException) -> Any:
    own = isinstance(error, PenstockError)  # the constructor of a user's subclass may take other arguments
    reduced: Any = BaseException.__reduce__(error) if own else error.__reduce_ex__(5)
    made, args, *state = reduced
    return (made, args, state[0] if state else None) if made is type(error) else error


def _argument(value: object) -> str | int | float | bool | None:
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 2**63):
        return value  # type: ignore[return-value]
    try:
        return plain(value)[:MAX_ARGUMENT_LENGTH]
    except Exception:
        return "(its text cannot be shown)"


class _Bounded(io.BytesIO):
    def write(self, piece: Any) -> int:
        if self.tell() + memoryview(piece).nbytes > MAX_PICKLE_BYTES:
            raise ValueError("the exception is too large")
        return super().write(piece)


def write_error(value: object) -> object:
    """The form of a PenstockError in a message. Raises NotImplementedError for any other object."""
    if isinstance(value, PenstockError):
        retry_after_s = None if value.retry_after_s is None else float(value.retry_after_s)
        original = None if value.original is None else value.original.plain()
        return [value.code, plain(value.message), retry_after_s, plain(value.detail), original]
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def read_error(kind: type, value: Any) -> PenstockError:
    """The error that `write_error` wrote."""
    code, message, retry_after_s, detail, original = value
    error = from_code(code, message, detail)
    error.retry_after_s = retry_after_s
    error.original = None if original is None else RemoteException(*original)
    return error


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


def picklable(value: Any) -> Any:
    """The value, or the memory of a memoryview: it is unpickled as bytes, or if it is large as a memoryview."""
    return pickle.PickleBuffer(value) if type(value) is memoryview else value


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
