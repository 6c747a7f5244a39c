"""Items on their way to the worker processes of a node, and back.

A field that the ops leave as it is does not travel back: the pipeline has it. Large arrays are in shared memory in both
directions.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.core.wire.lending import LENT_BYTES, find
from penstock.core.wire.objects import picklable, read_error, write_error
from penstock.errors import PenstockError
from penstock.pipeline.ops.base import DATA, Fields

FIXED = (bytes, str, memoryview)  # types whose values ops cannot change, apart from small ones


class BatchStamp(Struct):
    """One batch of a node: `start_s` on the monotonic clock, and `run_s` seconds."""

    batch_id: int
    size: int
    start_s: float
    run_s: float = 0.0


class Visit:
    """One item at one node: `fields`, which the node does not change, and its `place` in the batch, from 0.

    `swap`: the `result` of the previous node is the `data` of this one. A visit that is pickled has no data that the
    swap replaces.
    """

    __slots__ = ("fields", "place", "swap")

    def __init__(self, fields: Fields, swap: bool) -> None:
        self.fields = fields
        self.swap = swap
        self.place = -1  # not in a batch yet

    def __reduce__(self) -> tuple[object, ...]:
        left_out = DATA if self.swap else None
        return Visit, (_sent({name: value for name, value in self.fields.items() if name != left_out}), self.swap)


class Returned:
    """What a node in a worker process found for a visit; it arrives as `Arrived`."""

    __slots__ = ("_found", "_own", "fields")

    def __init__(self, found: tuple[Any, ...], own: Mapping[int, tuple[str, Any]]) -> None:
        """`found`: fields and stamp of the node, then of each further node, or a final error. `own`: what `fixed` gave
        for the visit's fields before."""
        self._found, self._own = found, own
        self.fields = {k: v for part in found if isinstance(part, dict) for k, v in part.items()}

    def __reduce__(self) -> tuple[object, ...]:
        return Arrived, ([self._part(part, self._own) for part in self._found],)

    @staticmethod
    def _part(part: Any, own: Mapping[int, tuple[str, Any]]) -> Any:
        if isinstance(part, BatchStamp):
            return part.batch_id, part.size, part.start_s, part.run_s
        if isinstance(part, PenstockError):
            return write_error(part)
        kept = {k: own[id(v)][0] for k, v in part.items() if id(v) in own and own[id(v)][1] == _layout(v)}
        return _sent({name: value for name, value in part.items() if name not in kept}), kept


class Arrived:
    """What a worker process found for a visit."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def whole(self, given: Fields) -> tuple[Any, ...]:
        """Fields and stamp of the node, then of each further node, or a final error. `given`: of the visit."""
        return tuple(self._whole(part, given) for part in self._parts)

    @staticmethod
    def _whole(part: Any, given: Fields) -> Any:
        if isinstance(part, list):
            return read_error(PenstockError, part)
        if len(part) == 4:
            return BatchStamp(*part)
        fields, kept = part
        for name, source in kept.items():
            fields[name] = given[source]
        return fields


def _sent(fields: Fields) -> Fields:
    """The fields with memory that can be pickled."""
    return {name: picklable(value) for name, value in fields.items()}


def fixed(fields: Fields) -> dict[int, tuple[str, Any]]:
    """Name and layout, by id, of the values that the pipeline has too after ops have run."""
    return {id(value): (name, _layout(value)) for name, value in fields.items() if _is_fixed(value)}


def _layout(value: Any) -> Any:
    """What an op can change of an array whose memory it does not change."""
    return (value.shape, value.strides, value.dtype) if hasattr(value, "setflags") else None


def _is_fixed(value: Any) -> bool:
    """Whether no op can have changed a value that the pipeline has too."""
    if hasattr(value, "setflags"):
        borrowed = value.nbytes > LENT_BYTES and value.flags.c_contiguous and find(value) is not None
        return borrowed or not value.flags.writeable  # changes of what the pipeline has lent are changes of its own
    return type(value) in FIXED
