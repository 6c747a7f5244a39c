"""Tensors of the Open Inference Protocol: arrays <-> what stands for them in JSON, and in bytes behind it.

Bytes are little-endian and in C order. BF16, which numpy has no word for, is an array of float32, and has no form in
JSON. An element of BYTES follows its length, 4 bytes.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from penstock.core.tensors import as_array, has_text, objects
from penstock.errors import BadOutput, BadRequest, PenstockError
from penstock.serving.protocols.bodies import decode_json
from penstock.types import DATATYPES, DTYPES, SIZES

if TYPE_CHECKING:
    import numpy as np

MAX_DIMS: Final = 32
MAX_EMPTY: Final = 2**20  # of a shape with an axis of 0, taken as 1: no bytes stand for its other axes, but answers may
_NO_JSON: Final = "BF16 has no form in JSON; send or ask for it in binary (parameters binary_data_size, binary_data)"
_LENGTH: Final = struct.Struct("<I")

Error = type[PenstockError]


# ---- what comes in; `what` names the tensor in messages, `error` is what is raised


def check_form(what: str, datatype: str, shape: Sequence[int], least_rows: int, error: Error) -> None:
    """Raises `error` for an unknown datatype, and for a shape that no array of ours has."""
    if datatype not in DTYPES:
        known = ", ".join(DTYPES)
        raise error(f"{what}: unknown datatype '{datatype[:40]}', expected one of {known}")
    shown = list(shape[:8])
    if not 1 <= len(shape) <= MAX_DIMS:
        raise error(f"{what}: shape {shown} has {len(shape)} axes, expected 1 to {MAX_DIMS}, rows first")
    if shape[0] < least_rows:
        raise error(f"{what}: shape {shown} has {shape[0]} rows, expected at least {least_rows}")
    if min(shape) < 0:
        raise error(f"{what}: shape {shown} has a negative axis")


def _check_empty(what: str, shape: Sequence[int], error: Error) -> None:
    """After the elements were counted: only a shape with an axis of 0 can still be too large."""
    if 0 in shape and math.prod(max(n, 1) for n in shape) > MAX_EMPTY:
        raise error(f"{what}: shape {list(shape[:8])} is too large")


def from_json(
    what: str, datatype: str, shape: Sequence[int], data: Raw, error: Error = BadRequest
) -> np.ndarray[Any, Any]:
    """The tensor as an array of its shape and datatype, which were checked; the data may be flat or nested."""
    if datatype == "BF16":
        raise error(f"{what}: {_NO_JSON}")
    raw = bytes(data)
    try:
        values = decode_json(raw)
    except BadRequest as exc:
        raise error(exc.message) from None
    if not isinstance(values, list):
        raise error(f"{what}: data must be an array, found {type(values).__name__}")
    found = as_array(what, values, datatype, error, b'"' in raw and has_text(values))
    if found.size != (wanted := math.prod(shape)):
        raise error(f"{what}: shape {list(shape[:8])} needs {wanted} elements, found {found.size}")
    _check_empty(what, shape, error)
    return found.reshape(shape)


def from_bytes(
    what: str, datatype: str, shape: Sequence[int], data: memoryview, error: Error = BadRequest
) -> np.ndarray[Any, Any]:
    """The tensor over that memory, read-only. A copy only of BF16, of BYTES, and of what lies at an odd address.

    Datatype and shape were checked. Nothing is allocated before the size of the data was found to be right.
    """
    import numpy as np

    count = math.prod(shape)
    if datatype == "BYTES":
        return _texts(what, shape, count, data, error)
    if count * SIZES[datatype] != len(data):
        wanted = f"{what}: shape {list(shape[:8])} of {datatype} needs {count * SIZES[datatype]} bytes"
        raise error(f"{wanted}, found {len(data)} (binary_data_size)")
    _check_empty(what, shape, error)
    if not count:
        return np.empty(shape, DTYPES[datatype])
    if datatype == "BF16":
        halves = np.frombuffer(data, "<u2").astype(np.uint32)
        return np.left_shift(halves, 16, out=halves).view(np.float32).reshape(shape)
    if datatype == "BOOL" and np.frombuffer(data, np.uint8).max() > 1:
        raise error(f"{what}: BOOL data holds a byte other than 0 and 1")
    array = np.frombuffer(data, _little(datatype))
    if not array.flags.aligned:  # native code may count on it
        array = array.copy()
        array.flags.writeable = False
    return array.reshape(shape)


@cache
def _little(datatype: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype(DTYPES[datatype]).newbyteorder("<")


def _texts(what: str, shape: Sequence[int], count: int, data: memoryview, error: Error) -> np.ndarray[Any, Any]:
    size = len(data)
    if count * _LENGTH.size > size:
        raise error(f"{what}: {count} elements of BYTES take {count * _LENGTH.size} bytes or more, found {size}")
    _check_empty(what, shape, error)
    cells = []
    at = 0
    for n in range(count):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, at)[0] if begin <= size else size + 1
        if end > size:
            raise error(f"{what}: element {n} of BYTES ends beyond the {size} bytes of the tensor")
        cells.append(bytes(data[begin:end]))
        at = end
    if at != size:
        raise error(f"{what}: {size - at} bytes are left behind the last of {count} elements of BYTES")
    return objects(cells, shape)


# ---- what goes out; all raise BadOutput


def output_array(name: str, value: Any, declared: str | None) -> tuple[str, np.ndarray[Any, Any]]:
    """Datatype and array of an output, at least one axis; `declared` is its datatype in the metadata, if any."""
    import numpy as np

    try:
        array = np.atleast_1d(np.asarray(value))
    except (ValueError, TypeError, RuntimeError) as exc:
        raise BadOutput(f"output '{name}' of type {type(value).__name__} is no array: {exc}") from None
    kind = array.dtype.kind
    if kind in "US":
        array = array.astype(object)
    if array.dtype.name == "bfloat16" or (declared == "BF16" and kind == "f"):
        with np.errstate(over="ignore"):
            return "BF16", array.astype(np.float32)
    datatype = DATATYPES.get(array.dtype.name)
    if datatype is None:
        raise BadOutput(
            f"output '{name}' is an array of {array.dtype}, which the Open Inference Protocol has no name for"
        )
    return datatype, array


def to_json(name: str, datatype: str, array: np.ndarray[Any, Any]) -> Raw:
    """The elements in one flat list. Raises BadRequest for BF16: whoever asks for it can read it in binary only."""
    import numpy as np

    if datatype == "BF16":
        raise BadRequest(f"output '{name}': {_NO_JSON}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadOutput(f"output '{name}' holds NaN or infinity, which JSON cannot hold")
    cells = array.ravel().tolist()
    if datatype == "BYTES":
        cells = [_text(name, cell) for cell in cells]
    return Raw(msgspec.json.encode(cells))


def _text(name: str, cell: Any) -> str:
    if isinstance(cell, str):
        return cell
    try:
        return _cell(name, cell).decode()
    except UnicodeDecodeError:
        raise BadOutput(f"output '{name}' holds bytes that are not UTF-8, which JSON cannot hold") from None


def _cell(name: str, cell: Any) -> bytes:
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, str):
        return cell.encode("utf-8", "surrogatepass")
    raise BadOutput(f"output '{name}' holds a {type(cell).__name__}; object arrays may hold str or bytes only")


def to_bytes(name: str, datatype: str, array: np.ndarray[Any, Any]) -> bytes | memoryview:
    """The elements as they stand behind the JSON; a view of the array where it is so already."""
    import numpy as np

    if datatype == "BYTES":
        cells = [_cell(name, cell) for cell in array.ravel().tolist()]
        return b"".join([part for cell in cells for part in (_LENGTH.pack(len(cell)), cell)])
    if datatype == "BF16":
        array = _rounded(array)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _rounded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper halves of float32, rounded to the nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(array).view(np.uint32)
    halves = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(array)
    halves[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40  # a carry would make infinity of some
    return halves


def length_of(cell: bytes | memoryview) -> bytes:
    """What precedes an element of BYTES."""
    return _LENGTH.pack(len(cell))
