"""Tensors of the Open Inference Protocol: conversion between arrays, JSON and bytes.

Bytes are little-endian and in C order. NumPy has no BF16, so a BF16 tensor is an array of float32; it has no JSON form.
A 4-byte length precedes each element of a BYTES tensor.
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

from penstock.core.arrays import as_array, has_text, objects
from penstock.errors import BadOutput, BadRequest, PenstockError
from penstock.serving.protocols.bodies import decode_json
from penstock.types import DATATYPES, DTYPES, SIZES

if TYPE_CHECKING:
    import numpy as np

MAX_DIMS: Final = 32
MAX_EMPTY: Final = 2**20  # product of the other axes of an empty tensor, which its data does not bound
_NO_JSON: Final = "BF16 has no form in JSON; send or request it in binary (parameters binary_data_size, binary_data)"
_LENGTH: Final = struct.Struct("<I")

Error = type[PenstockError]


# ---- input; `what` names the tensor in messages, `error` is the class to raise


def check_form(what: str, datatype: str, shape: Sequence[int], error: Error) -> None:
    """Raises `error` for an unknown datatype or an invalid shape."""
    if datatype not in DTYPES:
        known = ", ".join(DTYPES)
        raise error(f"{what}: unknown datatype '{datatype[:40]}', expected one of {known}")
    shown = list(shape[:8])
    if not 1 <= len(shape) <= MAX_DIMS:
        raise error(f"{what}: shape {shown} has {len(shape)} axes, expected 1 to {MAX_DIMS}, rows first")
    if min(shape) < 0:
        raise error(f"{what}: shape {shown} has a negative axis")


def _check_empty(what: str, shape: Sequence[int], error: Error) -> None:
    """Raises `error` for a huge shape with an axis of 0; the number of elements bounds all other shapes."""
    if 0 in shape and math.prod(max(n, 1) for n in shape) > MAX_EMPTY:
        raise error(f"{what}: shape {list(shape[:8])} is too large")


def from_json(
    what: str, datatype: str, shape: Sequence[int], data: Raw, error: Error = BadRequest
) -> np.ndarray[Any, Any]:
    """The tensor as an array. The caller has checked shape and datatype; the data may be flat or nested."""
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
    """The tensor as a read-only view of `data`; a copy for BF16, BYTES and unaligned data.

    The caller has checked datatype and shape. Nothing is allocated before the size of the data has been checked.
    """
    import numpy as np

    count = math.prod(shape)
    if datatype == "BYTES":
        return _read_cells(what, shape, count, data, error)
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
    if not array.flags.aligned:  # native code may rely on it
        array = array.copy()
        array.flags.writeable = False
    return array.reshape(shape)


@cache
def _little(datatype: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype(DTYPES[datatype]).newbyteorder("<")


def _read_cells(what: str, shape: Sequence[int], count: int, data: memoryview, error: Error) -> np.ndarray[Any, Any]:
    size = len(data)
    if count * _LENGTH.size > size:
        raise error(f"{what}: {count} elements of BYTES need at least {count * _LENGTH.size} bytes, found {size}")
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
        raise error(f"{what}: {size - at} bytes follow the last of {count} elements of BYTES")
    return objects(cells, shape)


# ---- output; all raise BadOutput


def output_array(name: str, value: Any, declared: str | None) -> tuple[str, np.ndarray[Any, Any]]:
    """(datatype, array with at least one axis) of an output. `declared` is its datatype in the metadata."""
    import numpy as np

    try:
        array = np.atleast_1d(np.asarray(value))
    except (ValueError, TypeError, RuntimeError) as exc:
        raise BadOutput(f"output '{name}' of type {type(value).__name__} is not an array: {exc}") from None
    kind = array.dtype.kind
    if kind in "US":
        array = array.astype(object)
    if array.dtype.name == "bfloat16" or (declared == "BF16" and kind == "f"):
        with np.errstate(over="ignore"):
            return "BF16", array.astype(np.float32)
    datatype = DATATYPES.get(array.dtype.name)
    if datatype is None:
        raise BadOutput(f"output '{name}' is an array of {array.dtype}, which the Open Inference Protocol lacks")
    return datatype, array


def top_classes(name: str, datatype: str, array: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """BYTES `[rows, at most count]`: `value:index` of the largest values of each row, from the largest on.

    Of equal values the first comes first; NaN comes last. Raises BadRequest for BOOL and BYTES.
    """
    import numpy as np

    if datatype in ("BOOL", "BYTES"):
        raise BadRequest(f"output '{name}': classification needs numbers, found {datatype}")
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    keys = np.where(np.isnan(rows), -np.inf, rows) if rows.dtype.kind == "f" else rows
    order = rows.shape[1] - 1 - np.argsort(keys[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    form = "{:f}:{}" if rows.dtype.kind == "f" else "{}:{}"
    best = np.take_along_axis(rows, order, axis=1)
    pairs = zip(best.ravel().tolist(), order.ravel().tolist(), strict=True)
    return objects([form.format(value, index).encode() for value, index in pairs], order.shape)


def to_json(name: str, datatype: str, array: np.ndarray[Any, Any]) -> Raw:
    """The elements as one flat list. Raises BadRequest for BF16, which clients can request only in binary."""
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
        return cell.encode()
    raise BadOutput(f"output '{name}' holds a {type(cell).__name__}; object arrays may hold str or bytes only")


def to_bytes(name: str, datatype: str, array: np.ndarray[Any, Any]) -> bytes | memoryview:
    """The elements in binary; a view of the array if it already has this layout."""
    import numpy as np

    if datatype == "BYTES":
        cells = [_cell(name, cell) for cell in array.ravel().tolist()]
        return b"".join([part for cell in cells for part in (length_of(cell), cell)])
    if datatype == "BF16":
        array = _to_bfloat16(array)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _to_bfloat16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper halves of float32, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(array).view(np.uint32)
    halves = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(array)
    halves[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40  # a carry could turn NaN into infinity
    return halves


def length_of(cell: bytes | memoryview) -> bytes:
    """The length prefix of an element of BYTES."""
    return _LENGTH.pack(len(cell))
