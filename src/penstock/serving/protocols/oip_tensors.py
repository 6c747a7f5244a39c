"""Tensors of the Open Inference Protocol: conversion between arrays, JSON and bytes, and their JSON schemas.

Bytes are little-endian and in C order. NumPy has no BF16, so a BF16 tensor is an array of float32; it has no JSON form.
A 4-byte length precedes each element of a BYTES tensor.
"""

from __future__ import annotations

import json
import math
import re
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
from penstock.types import DATATYPES, DTYPES, SIZES, ModelMetadata, TensorSpec

if TYPE_CHECKING:
    import numpy as np

MAX_DIMS: Final = 32  # the limit of NumPy 1
MAX_EMPTY: Final = 2**20  # product of the other axes of an empty tensor, which its data does not bound
_NO_JSON: Final = "BF16 has no form in JSON; send or request it in binary (parameters binary_data_size, binary_data)"
_LENGTH: Final = struct.Struct("<I")
_NOT_FINITE: Final = re.compile("NaN|-?Infinity")

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
    if datatype == "BOOL" and (cells := np.frombuffer(data, np.uint8)).max() > 1:
        return np.not_equal(cells, 0).reshape(shape)  # NumPy allows no other bytes in an array of bool
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

    array = value
    if type(value) is not np.ndarray or not value.ndim:
        try:
            array = np.atleast_1d(np.asarray(value))
        except (ValueError, TypeError, RuntimeError) as exc:
            raise BadOutput(f"output '{name}' of type {type(value).__name__} is not an array: {exc}") from None
    kind = array.dtype.kind
    if kind in "US":
        array = array.astype(object)
    datatype = _datatype(array.dtype)
    if datatype == "BF16" or (declared == "BF16" and kind == "f"):
        with np.errstate(over="ignore"):
            return "BF16", array.astype(np.float32)
    if datatype is None:
        raise BadOutput(f"output '{name}' is an array of {array.dtype}, which the Open Inference Protocol lacks")
    return datatype, array


@cache
def _datatype(dtype: np.dtype[Any]) -> str | None:
    """The datatype of a NumPy dtype, whose name takes NumPy a microsecond or more."""
    return "BF16" if dtype.name == "bfloat16" else DATATYPES.get(dtype.name)


def top_classes(
    name: str, datatype: str, array: np.ndarray[Any, Any], count: int, labels: Sequence[str] = ()
) -> np.ndarray[Any, Any]:
    """BYTES `[rows, at most count]`: `value:index` of the largest values of each row, from the largest on, or
    `value:index:label` if the class has a label that is not empty.

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
    cells = []
    for value, index in zip(best.ravel().tolist(), order.ravel().tolist(), strict=True):
        label = labels[index] if index < len(labels) else ""
        cells.append((form.format(value, index) + (label and f":{label}")).encode())
    return objects(cells, order.shape)


def to_json(name: str, datatype: str, array: np.ndarray[Any, Any], strict: bool = False, part: bool = False) -> Raw:
    """The elements as one flat list, with NaN, Infinity and -Infinity as Triton writes them: in a `part` of a response,
    which is read as JSON again, as texts; never if it is `strict`.

    Raises BadRequest for BF16, which clients can request only in binary.
    """
    import numpy as np

    if datatype == "BF16":
        raise BadRequest(f"output '{name}': {_NO_JSON}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        if strict:
            raise BadOutput(f"output '{name}' holds NaN or infinity, which JSON cannot hold (strict_json)")
        text = json.dumps(array.ravel().tolist(), separators=(",", ":"))
        return Raw((_NOT_FINITE.sub(r'"\g<0>"', text) if part else text).encode())
    return Raw(msgspec.json.encode(texts_of(name, array) if datatype == "BYTES" else array.ravel().tolist()))


def texts_of(name: str, array: np.ndarray[Any, Any]) -> list[str]:
    """The elements of a tensor of BYTES."""
    return [_text(name, cell) for cell in array.ravel().tolist()]


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


# ---- JSON schemas for what a model declares

_CELLS: Final = {"BOOL": "boolean", "BYTES": "string", "FP16": "number", "FP32": "number", "FP64": "number"}
_BYTES: Final = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b64": {"type": "string"}}}]}
_FLAG: Final = {"type": "boolean"}
_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_BINARY: Final = {"binary_data_size": _COUNT}


def nested(spec: TensorSpec, axis: int = 0, unbatched: bool = False) -> dict[str, Any]:
    """A tensor as nested lists, from this axis on. Axis 0 is the rows, of any number, unless it is `unbatched`."""
    schema: dict[str, Any] = _BYTES if spec.datatype == "BYTES" else {"type": _CELLS.get(spec.datatype, "integer")}
    for k in range(len(spec.shape) - 1, axis - 1, -1):
        schema = {"type": "array", "items": schema}
        if (k > 0 or unbatched) and (size := spec.shape[k]) >= 0:
            schema |= {"minItems": size, "maxItems": size}
    return schema


def request_content(model: ModelMetadata) -> dict[str, Any]:
    """A request in JSON; the binary forms have no schema."""
    outputs = {"name": _name(model.outputs), "parameters": _parameters(binary_data=_FLAG, classification=_COUNT)}
    parameters = _parameters(
        binary_data_output=_FLAG,
        timeout=_COUNT,
        priority=_COUNT,
        sequence_id={"type": ["integer", "string"]},
        sequence_start=_FLAG,
        sequence_end=_FLAG,
    )
    parameters["additionalProperties"] = model.takes_parameters or not model.strict_parameters
    needed = sum(not spec.optional for spec in model.inputs)
    request = {
        "inputs": _tensors(model.inputs, needed if model.inputs else 1, model.unbatched),
        "id": _TEXT,
        "outputs": {"type": "array", "items": _object(outputs, "name")},
        "parameters": parameters,
    }
    return {"application/json": _object(request, "inputs"), "application/octet-stream": {}, "application/x-npy": {}}


def flat_schema(specs: Sequence[TensorSpec], *texts: str) -> dict[str, Any]:
    """The object of the generate extension, with these tensors and texts."""
    cells = {spec.name: {"type": [_CELLS.get(spec.datatype, "integer"), "array"]} for spec in specs}
    return _object({**cells, **dict.fromkeys(texts, _TEXT)}, *(s.name for s in specs if not s.optional), *texts)


def response_content(model: ModelMetadata) -> dict[str, Any]:
    """A response in JSON; the binary form has no schema."""
    response = {"model_name": _TEXT, "model_version": _TEXT, "id": _TEXT}
    response["outputs"] = _tensors(model.outputs, 0, model.unbatched)
    schema = _object(response, "model_name", "model_version", "outputs")
    return {"application/json": schema, "application/octet-stream": {}}


def _tensors(specs: Sequence[TensorSpec], least: int, unbatched: bool) -> dict[str, Any]:
    """A list of the declared tensors, or of any."""
    any_of = [_tensor(spec, unbatched) for spec in specs]
    items = any_of[0] if len(any_of) == 1 else {"anyOf": any_of} if any_of else _tensor(None)
    return {"type": "array", "items": items, "minItems": least, **({"maxItems": len(any_of)} if any_of else {})}


def _tensor(spec: TensorSpec | None, unbatched: bool = False) -> dict[str, Any]:
    name: dict[str, Any] = _TEXT
    datatype: dict[str, Any] = {"enum": list(DTYPES)}
    shape: dict[str, Any] = {"items": {"type": "integer", "minimum": 0}, "minItems": 1}
    data: dict[str, Any] = {}
    if spec is not None:
        name, datatype = {"const": spec.name}, {"enum": [spec.datatype]}
        sizes = [{"const": n} if n >= 0 and (k or unbatched) else shape["items"] for k, n in enumerate(spec.shape)]
        shape = {"prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)}
        data = {"items": {"type": [_CELLS.get(spec.datatype, "integer"), "array"]}}  # flat, or nested
    properties = {
        "name": name,
        "datatype": datatype,
        "shape": {"type": "array", **shape},
        "data": {"type": "array", **data},
        "parameters": _parameters(**_BINARY),
    }
    return _object(properties, "name", "datatype", "shape")


def _name(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {"enum": [spec.name for spec in specs]} if specs else _TEXT


def _parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}
