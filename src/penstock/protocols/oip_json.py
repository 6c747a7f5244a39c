"""Open Inference Protocol v2 in JSON: requests <-> named arrays `[rows, ...]`, and its small answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from penstock.errors import BadOutput, BadRequest, PenstockError
from penstock.protocols.bodies import decode_json
from penstock.protocols.native import JSON, encode_response
from penstock.types import Item, ItemResult, ModelMetadata, Response, TensorSpec

if TYPE_CHECKING:
    import numpy as np

PEEK_BYTES: Final = 64 * 1024
MAX_DIMS: Final = 32
DTYPES: Final = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "object",
}
DATATYPES: Final = {dtype: datatype for datatype, dtype in DTYPES.items()}
_KINDS: Final = {"b": "b", "u": "iu", "i": "iu", "f": "iuf", "O": "US"}  # of the array that JSON gave, by kind wanted


class _Input(Struct):
    name: str
    shape: list[int]
    datatype: str
    data: Raw


class _Output(Struct):
    name: str


class _Request(Struct):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[_Output] | None = None


class _Tensor(Struct):
    name: str
    shape: list[int]
    datatype: str
    data: Raw


class _Answer(Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_Tensor]
    id: str | None = None


class _PeekInput(Struct):
    shape: list[int]
    name: str = ""
    datatype: str = ""


class _Peek(Struct):
    inputs: list[_PeekInput]


_peek = msgspec.json.Decoder(_Peek)


class Context(Struct):
    """What `encode` must know of the request: its id, and the names of the outputs that it wants (None: all)."""

    id: str | None
    outputs: list[str] | None


def _peek_inputs(body: bytes | memoryview) -> list[_PeekInput]:
    if len(body) > PEEK_BYTES:
        return []
    try:
        return _peek.decode(body).inputs
    except (msgspec.DecodeError, ValueError, RecursionError):  # the worker tells what is wrong with it
        return []


def peek_rows(body: bytes | memoryview, content_length: int | None = None) -> int:
    """Axis 0 of the first input; 1 for a malformed body, for one over 64 KiB and for more rows than it has bytes."""
    if content_length is not None and content_length > PEEK_BYTES:
        return 1
    inputs = _peek_inputs(body)
    rows = inputs[0].shape[0] if inputs and inputs[0].shape else 1
    return rows if 1 <= rows <= len(body) else 1


def peek_shape(body: bytes | memoryview) -> str:
    """A bucket key: names, datatypes and shapes without axis 0, such as "x:FP32:3x224x224"; "" where peek_rows is 1."""
    keys = (f"{i.name}:{i.datatype}:{'x'.join(map(str, i.shape[1:]))}" for i in _peek_inputs(body))
    return ";".join(sorted(keys))


def error_body(error: PenstockError) -> bytes:
    """`{"error": "..."}`; the detail of an error stays inside."""
    return msgspec.json.encode({"error": error.message})


def server_body(version: str) -> bytes:
    """Answer of `GET /v2`."""
    return msgspec.json.encode({"name": "penstock", "version": version, "extensions": []})


def metadata_body(metadata: ModelMetadata, versions: Sequence[str]) -> bytes:
    """Answer of `GET /v2/models/{m}`."""
    return msgspec.json.encode(
        {
            "name": metadata.name,
            "versions": list(versions),
            "platform": metadata.platform,
            "inputs": metadata.inputs,
            "outputs": metadata.outputs,
        }
    )


def _shape_of(tensor: _Input) -> list[int]:
    """The checked shape. Raises BadRequest."""
    name, shape = tensor.name[:100], tensor.shape
    if not 1 <= len(shape) <= MAX_DIMS:
        raise BadRequest(
            f"input '{name}': shape {shape[:4]} has {len(shape)} axes, expected 1 to {MAX_DIMS}, rows first"
        )
    if shape[0] < 1:
        raise BadRequest(f"input '{name}': shape {shape} has {shape[0]} rows, expected at least 1")
    if min(shape) < 0:
        raise BadRequest(f"input '{name}': shape {shape} has a negative axis")
    return shape


def _array(tensor: _Input) -> np.ndarray[Any, Any]:
    """The tensor as an array of its shape and datatype; the data may be flat or nested. Raises BadRequest."""
    name = tensor.name[:100]
    shape = _shape_of(tensor)
    if tensor.datatype not in DTYPES:
        known = ", ".join(DTYPES)
        raise BadRequest(f"input '{name}': unknown datatype '{tensor.datatype[:40]}', expected one of {known}")
    data = decode_json(bytes(tensor.data))
    if not isinstance(data, list):
        raise BadRequest(f"input '{name}': data must be an array, found {type(data).__name__}")
    found = array_of(name, data, tensor.datatype)
    if found.size != (wanted := math.prod(shape)):
        raise BadRequest(f"input '{name}': shape {shape} needs {wanted} elements, found {found.size}")
    return found.reshape(shape)


def array_of(name: str, data: Any, datatype: str) -> np.ndarray[Any, Any]:
    """Nested lists of an input `name` as an array of `datatype`. Raises BadRequest."""
    import numpy as np

    dtype = np.dtype(DTYPES[datatype])
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError):
        raise BadRequest(f"input '{name}': data is a ragged array, or holds a number that is too large") from None
    if found.size == 0:
        return np.empty(found.shape, dtype)
    if found.dtype.kind not in _KINDS[dtype.kind]:
        raise BadRequest(f"input '{name}': {datatype} data holds {_found(found)}")
    return _cast(found, dtype, name, datatype)


def _found(array: np.ndarray[Any, Any]) -> str:
    kinds = {"b": "booleans", "i": "integers", "u": "integers", "f": "fractions", "U": "strings"}
    return kinds.get(array.dtype.kind, "null or mixed values")


def _cast(found: np.ndarray[Any, Any], dtype: np.dtype[Any], name: str, datatype: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if dtype.kind in "ui":
        limits = np.iinfo(dtype)
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            raise BadRequest(f"input '{name}': data holds a number that {datatype} cannot")
    if dtype.kind == "O":
        cells = [text.encode("utf-8", "surrogatepass") for text in found.ravel().tolist()]
        array = np.empty(found.shape, object)
        array.ravel()[:] = cells
        return array
    with np.errstate(over="ignore"):
        array = found.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise BadRequest(f"input '{name}': data holds a number that {datatype} cannot")
    return array


def _tensor(name: str, value: Any) -> _Tensor:
    """An output as it is written. Raises BadOutput."""
    import numpy as np

    try:
        array = np.atleast_1d(np.asarray(value))
    except (ValueError, TypeError, RuntimeError) as exc:
        raise BadOutput(f"output '{name}' of type {type(value).__name__} is no array: {exc}") from None
    kind = array.dtype.kind
    if kind in "US":
        array = array.astype(object)
    datatype = DATATYPES.get(array.dtype.name)
    if datatype is None:
        raise BadOutput(
            f"output '{name}' is an array of {array.dtype}, which the Open Inference Protocol has no name for"
        )
    if kind == "f" and not np.isfinite(array).all():
        raise BadOutput(f"output '{name}' holds NaN or infinity, which JSON cannot hold")
    cells = array.ravel().tolist()
    if datatype == "BYTES":
        cells = [_text(name, cell) for cell in cells]
    return _Tensor(name, list(array.shape), datatype, Raw(msgspec.json.encode(cells)))


def _text(name: str, cell: Any) -> str:
    if isinstance(cell, str):
        return cell
    if not isinstance(cell, bytes):
        raise BadOutput(f"output '{name}' holds a {type(cell).__name__}; object arrays may hold str or bytes only")
    try:
        return cell.decode()
    except UnicodeDecodeError:
        raise BadOutput(f"output '{name}' holds bytes that are not UTF-8, which JSON cannot hold") from None


class OipJsonCodec:
    """Codec of `/v2/models/{m}/infer`. With `inputs`, requests are checked against the model's own declaration."""

    def __init__(self, model: str, version: str, inputs: tuple[TensorSpec, ...] = ()) -> None:
        self.model = model
        self.version = version
        self.inputs = {spec.name: spec for spec in inputs}

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], Context]:
        """Input name -> array `[rows, ...]`; only rows [start, stop) for a part of a split request."""
        request: _Request = decode_json(item.payload, _Request)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for tensor in request.inputs:
            if tensor.name in arrays:
                raise BadRequest(f"input '{tensor.name[:100]}' is given twice")
            self._check(tensor)
            arrays[tensor.name] = _array(tensor)
        self._check_set(arrays)
        if item.stop >= 0:
            arrays = {name: array[item.start : item.stop] for name, array in arrays.items()}
        names = [output.name for output in request.outputs] if request.outputs else None
        return arrays, Context(request.id, names)

    def _check(self, tensor: _Input) -> None:
        if not self.inputs:
            return
        spec = self.inputs.get(tensor.name)
        if spec is None:
            raise BadRequest(f"unknown input '{tensor.name[:100]}'; the model has {', '.join(self.inputs)}")
        if tensor.datatype != spec.datatype:
            raise BadRequest(f"input '{spec.name}': datatype must be {spec.datatype}, found '{tensor.datatype[:40]}'")
        shape = tensor.shape
        fits = len(shape) == len(spec.shape) and all(
            w in (-1, f) for w, f in zip(spec.shape[1:], shape[1:], strict=True)
        )
        if not fits:  # axis 0 is rows: any number of them
            wanted = [-1, *spec.shape[1:]]
            raise BadRequest(f"input '{spec.name}': shape must be {wanted} (-1 is any size), found {shape[:MAX_DIMS]}")

    def _check_set(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if not arrays:
            raise BadRequest("inputs is empty, expected at least one tensor")
        missing = [name for name in self.inputs if name not in arrays]
        if missing:
            raise BadRequest(f"input '{missing[0]}' is missing; the model needs {', '.join(self.inputs)}")
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"'{name[:100]}' {n}" for name, n in list(rows.items())[:4])
            raise BadRequest(f"inputs must all have the same number of rows (axis 0), found {told}")

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """A dict of name to array, or one array ("output_0"), as a response. BadRequest for an output it has not."""
        if isinstance(value, Response):
            return encode_response(value)
        if value is None:
            raise BadOutput("the model returned None for this item; return an array or a dict of name to array")
        outputs = value if isinstance(value, dict) else {"output_0": value}
        names = list(outputs) if context is None or context.outputs is None else context.outputs
        unknown = [name for name in names if name not in outputs]
        if unknown:
            known = ", ".join(map(str, outputs))
            raise BadRequest(f"unknown output '{unknown[0][:100]}' was asked for; the model returned {known}")
        tensors = [_tensor(str(name), outputs[name]) for name in names]
        answer = _Answer(self.model, self.version, tensors, None if context is None else context.id)
        return ItemResult(body=msgspec.json.encode(answer), content_type=JSON)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The rows of all parts in one answer, put end to end along axis 0. Raises BadOutput when they do not fit."""
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
        answers = [msgspec.json.decode(part.body, type=_Answer) for part in parts]
        first = answers[0]
        for position, tensor in enumerate(first.outputs):
            same = [answer.outputs[position] for answer in answers if position < len(answer.outputs)]
            key = (tensor.name, tensor.datatype, tensor.shape[1:])
            if len(same) != len(answers) or any((t.name, t.datatype, t.shape[1:]) != key for t in same):
                raise BadOutput(f"output '{tensor.name}' differs between the parts of a split request")
            tensor.shape = [sum(t.shape[0] for t in same), *tensor.shape[1:]]
            flat = b",".join(inner for t in same if (inner := bytes(t.data)[1:-1]))
            tensor.data = Raw(b"[" + flat + b"]")
        return ItemResult(body=msgspec.json.encode(first), content_type=JSON)
