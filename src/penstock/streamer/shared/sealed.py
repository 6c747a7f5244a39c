"""Values on their way through a shared batcher, which passes them on as bytes and never loads them.

They are pickled: both ends belong to one user, the directory of the socket is closed to all others, and each end has
checked the user of the other (`start.py`). So these pickles cross no trust boundary: a process that can send one can
already read and change the memory of the process that loads it. The batcher imports neither the application nor NumPy
nor PyTorch.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

from penstock.core.wire.messages import LARGE_BYTES, MessageWriter, Pickled, Unsent, in_band, unsent
from penstock.core.wire.objects import dumps
from penstock.errors import BadOutput, BadRequest, PenstockError, describe
from penstock.streamer.model import StreamerModel


class Sealed(Pickled):
    """A pickled value. Within another pickle, its large parts stay out of band."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return len(self._data) + sum(memoryview(part).nbytes for part in self._buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data = pickle.PickleBuffer(self._data) if len(self._data) > LARGE_BYTES else self._data
        return Sealed, (data, [pickle.PickleBuffer(part) for part in self._buffers])


def seal(value: object) -> Sealed:
    """The value, pickled. Its large arrays are not copied. Raises the errors of pickle."""
    large: list[memoryview] = []
    return Sealed(dumps(value, partial(in_band, large)), large)


def seal_item(value: object) -> Sealed | Unsent:
    """An item for the worker; an error in its place if it cannot be pickled."""
    try:
        return seal(value)
    except Exception as e:
        return unsent(value, e)


def opened(result: Pickled) -> Any:
    """The value of one result, or its error; also an error if it cannot be loaded here."""
    try:
        return result.load()
    except Exception as e:
        return BadOutput(f"the result cannot be unpickled in this process: {type(e).__name__}", detail=repr(e))


def put_values(outbox: MessageWriter, values: list[Any]) -> list[Any]:
    """The form of sealed values, and of errors in their place, in a message."""
    return [
        outbox.put_error(value.error) if type(value) is Unsent else outbox.put_pickled(value._data, value._buffers)
        for value in values
    ]


def sealed_values(values: list[Pickled | PenstockError]) -> list[Sealed | Unsent]:
    """The values of a received message, sealed as they came."""
    return [Unsent(v) if isinstance(v, PenstockError) else Sealed(v._data, v._buffers) for v in values]


class SealedModel(StreamerModel):
    """A streamer's model in a worker of a shared batcher: opens the items, and seals the results."""

    def preprocess(self, item: Sealed) -> Any:
        """Raises BadRequest."""
        try:
            return item.load()
        except Exception as e:
            raise BadRequest(f"the item cannot be unpickled in the worker: {describe(e)}", detail=repr(e)) from e

    def postprocess(self, result: Any) -> Sealed:
        """Raises BadOutput."""
        try:
            return seal(result)
        except Exception as e:
            text = f"the model returned a {type(result).__name__} that cannot be pickled"
            raise BadOutput(text, detail=repr(e)) from e
