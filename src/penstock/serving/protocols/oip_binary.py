"""The Open Inference codecs for binary tensors, NumPy's file format, and compressed responses.

NumPy's file format holds one tensor without a name. It can also hold pickled objects: their dtype is refused, and this
code has no pickle loader. Source: numpy.lib.format, versions 1.0 to 3.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from penstock.core.columns import PlannedRequest, TensorRows
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import ACCEPT_ENCODING, accepted_coding, compress, header_of
from penstock.serving.protocols.columns import Planning, RawStack, cut_id, output_column
from penstock.serving.protocols.oip import OipCodec, OipContext, OipJsonCodec, named_outputs
from penstock.serving.protocols.oip_heads import facts_of
from penstock.serving.protocols.oip_messages import (
    HEADER_BYTES,
    HEADER_LENGTH,
    NPY,
    OipRequest,
    Tensor,
    TensorParameters,
    header_length,
    sequence_of_json,
)
from penstock.serving.protocols.oip_tensors import check_form, from_bytes, length_of, output_array, to_bytes
from penstock.types import SIZES, Item, ItemResult, Response, SequenceRequest

if TYPE_CHECKING:
    import numpy as np

MAX_HEAD_BYTES: Final = 10_000  # the limit of NumPy's own reader
_MAGIC: Final = b"\x93NUMPY"
_DTYPES: Final = {
    "b1": "BOOL", "u1": "UINT8", "u2": "UINT16", "u4": "UINT32", "u8": "UINT64", "i1": "INT8", "i2": "INT16",
    "i4": "INT32", "i8": "INT64", "f2": "FP16", "f4": "FP32", "f8": "FP64",
}  # fmt: skip
_DESCRS: Final = {datatype: f"{'|' if name[1] == '1' else '<'}{name}" for name, datatype in _DTYPES.items()}
# a Python literal with three keys; a pattern reads it, because evaluation of a crafted literal can be expensive
_DICT: Final = re.compile(
    r"\{(?:'descr':\s*'([^']*)'|'fortran_order':\s*(True|False)|'shape':\s*\(([0-9,\s]*)\)|[,\s])*\}\s*"
)


class NpyHead(Struct):
    """The header of an array; the elements begin at byte `start`."""

    datatype: str
    shape: list[int]
    fortran: bool
    start: int


def read_npy_head(body: bytes | memoryview) -> NpyHead:
    """The header of an array. Raises BadRequest for an invalid header or an unsupported dtype."""
    begin = bytes(body[:12])
    wide = begin[6:7] in (b"\2", b"\3")
    start = 12 if wide else 10
    if not begin.startswith(_MAGIC) or begin[6:7] not in (b"\1", b"\2", b"\3") or len(begin) < start:
        raise BadRequest("the body is not an array in the format of numpy.save, version 1 to 3")
    size = int.from_bytes(begin[8:start], "little")
    if size > MAX_HEAD_BYTES or size > len(body) - start:
        raise BadRequest(f"the head of the array has {size} bytes, expected at most {MAX_HEAD_BYTES}, inside the body")
    found = _DICT.fullmatch(str(body[start : start + size], "latin-1"))
    if found is None or None in found.groups():
        raise BadRequest("the head of the array is invalid: expected descr, fortran_order and shape")
    descr, order, dims = found.groups()
    datatype = _DTYPES.get(descr.lstrip("<|"))
    if datatype is None:
        raise BadRequest(f"the array has the dtype '{descr[:40]}', expected one of {', '.join(_DESCRS.values())}")
    sizes = [n.strip() for n in dims.split(",") if n.strip()]
    if any(len(n) > 18 or not n.isdigit() for n in sizes):
        raise BadRequest(f"the shape of the array is ({dims[:80]}), expected whole numbers")
    shape = [int(n) for n in sizes]
    check_form("the array", datatype, shape, BadRequest)
    return NpyHead(datatype, shape, order == "True", start + size)


def read_npy(head: NpyHead, body: memoryview) -> np.ndarray[Any, Any]:
    """The array of a body with this header. Raises BadRequest if it has another length."""
    import numpy as np

    data = body[head.start :]
    if head.fortran:
        return np.ascontiguousarray(from_bytes("the array", head.datatype, head.shape[::-1], data).T)
    return from_bytes("the array", head.datatype, head.shape, data)


def write_npy_head(datatype: str, shape: Sequence[int]) -> bytes:
    """The header of an array in C order, version 1.0, padded so that the elements are aligned to 64 bytes."""
    dims = "".join(f"{n}, " for n in shape)
    text = f"{{'descr': '{_DESCRS[datatype]}', 'fortran_order': False, 'shape': ({dims}), }}".encode()
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return _MAGIC + b"\1\0" + len(text).to_bytes(2, "little") + text


class OipNpyCodec(OipCodec):
    """Codec of `/v2/models/{m}/infer` for one array: the model's first declared input, or "input_0"."""

    reads_headers = True

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, 1 if there are none or more than bytes; shape key); None for a malformed header."""
        try:
            head = read_npy_head(body)
        except BadRequest:
            return None
        rows = head.shape[0] if 1 <= head.shape[0] <= len(body) else 1
        return rows, f":{head.datatype}:{'x'.join(map(str, head.shape[1:]))}"

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], OipContext]:
        """Input name -> array `[rows, ...]`; only rows [start, stop) for a part of a split request."""
        body = memoryview(item.payload)
        head = read_npy_head(body)
        name = next(iter(self.inputs), "input_0")
        self._check(Tensor(name, head.shape, head.datatype))
        return self._rows({name: read_npy(head, body)}, item), OipContext()

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """An array if the client accepts it and the model has one output that is not BYTES; otherwise JSON."""
        pairs = item.headers or ()
        accepted = any(name.lower() == b"accept" and b"application/x-npy" in kind.lower() for name, kind in pairs)
        if not accepted or isinstance(value, Response):
            return super().encode(value, item, context)
        outputs = value.block.arrays if type(value) is TensorRows else named_outputs(value)
        if len(outputs) == 1:
            [(name, output)] = outputs.items()
            if type(value) is TensorRows:
                return self._encode_row_bytes(value, name, output) or self.encode(value.plain(), item, OipContext())
            datatype, array = output_array(name, output, self.outputs.get(name))
            if datatype in _DESCRS:
                body = b"".join([write_npy_head(datatype, array.shape), to_bytes(name, datatype, array)])
                return ItemResult(body=body, content_type=NPY)
        return super().encode(value, item, context)

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """(the header of the array, no id, the body and where its elements begin)."""
        body = item.payload
        start = 10 + int.from_bytes(body[8:10], "little")
        whole = bytes(body[:8]) == _MAGIC + b"\1\0" and start <= min(len(body), MAX_HEAD_BYTES)
        return (bytes(body[:start]), None, (body, start)) if whole else None

    def is_steady(self, item: Item, id: str | None) -> bool:
        """True: there are no parameters, and another order of the elements is another header."""
        return not read_npy_head(item.payload).fortran

    plan_of, encode_all = Planning.plan_of, Planning.encode_all  # no tensor is in shared memory

    def _encode_row_bytes(self, found: TensorRows, name: str, output: Any) -> ItemResult | None:
        """The array with a range of rows of a block; None if it is encoded alone."""
        forms = found.block.forms
        if OipNpyCodec not in forms:
            forms[OipNpyCodec] = output_column(name, output, self.outputs.get(name), found.block.rows, binary=True)
        column = forms[OipNpyCodec]
        if column is None or column.datatype not in _DESCRS:
            return None
        head = write_npy_head(column.datatype, [found.rows, *column.tail])
        return ItemResult(b"".join([head, column.section(found.start, found.rows)]), NPY)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """One array with the rows of all parts. Raises BadOutput if the parts differ."""
        if len(parts) == 1 or any(part.error is not None or part.content_type != NPY for part in parts):
            return super().join(parts)
        heads = [read_npy_head(part.body) for part in parts]
        first = heads[0]
        if any((h.datatype, h.shape[1:]) != (first.datatype, first.shape[1:]) for h in heads):
            raise BadOutput("the array differs between the parts of a split request")
        shape = [sum(h.shape[0] for h in heads), *first.shape[1:]]
        bodies = [memoryview(part.body)[h.start :] for part, h in zip(parts, heads, strict=True)]
        return ItemResult(body=b"".join([write_npy_head(first.datatype, shape), *bodies]), content_type=NPY)


def head_bytes(item: Item) -> int:
    """The value of the header `HEADER_LENGTH`; 0 for a raw request, whose body is the only input. Raises BadRequest."""
    return item.head_bytes or header_length(item.headers) or 0


class OipBinaryCodec(OipCodec):
    """Codec of `/v2/models/{m}/infer` for requests with the header `HEADER_LENGTH`."""

    divisible = True

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key) of a body; None for an invalid header."""
        try:
            length = head_bytes(item)
        except BadRequest:
            return None
        if length > len(body) or (found := facts_of(bytes(body[:length])).peeked) is None:
            return None
        return found if found[0] <= len(body) else (1, found[1])

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """The sequence that the JSON before the tensors names. Raises BadRequest."""
        length = head_bytes(item)
        return sequence_of_json(body[:length]) if 0 < length <= min(len(body), HEADER_BYTES) else None

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """(the JSON without its id and the spaces behind it, the id, the body and where its tensors begin)."""
        length, body = head_bytes(item), item.payload
        if not length:
            return b"%d" % len(body), None, (body, 0)  # no JSON of a request is a number
        found = cut_id(bytes(body[:length]).rstrip()) if length <= len(body) else None
        return None if found is None else (*found, (body, length))

    def recognize(self, items: Sequence[Item]) -> list[PlannedRequest | None]:
        """See `ColumnCodec`. A request with the JSON and the size of the last one is not looked up."""
        found: list[PlannedRequest | None] = []
        plan, head, size, places = None, b"", 0, [(0, 0)]
        for item in items:
            length, body = item.head_bytes, item.payload
            if (
                plan is not None
                and length == len(head)
                and len(body) == size
                and item.stop < 0
                and body[:length] == head
            ):
                found.append(PlannedRequest(plan, [body[i:k] for i, k in places], plan.rows))
                continue
            request, plan = self.request_of(item, self.cut(item)), None
            found.append(request)
            if request is None or request.id is not None or not length or item.stop >= 0:
                continue
            if type(request.plan.stack) is RawStack:
                plan, head, size = request.plan, bytes(body[:length]), len(body)
                places = [(length + at, length + at + count) for at, count in plan.sizes]
        return found

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """(JSON, bytes after it). Raises BadRequest for a shorter body, and for a raw request that names no tensor."""
        body = memoryview(item.payload)
        length = head_bytes(item)
        if not length:
            return self._raw(body)
        if length > len(body):
            raise BadRequest(f"header {HEADER_LENGTH} is {length}, but the body has {len(body)} bytes")
        return body[:length], body[length:]

    def _raw(self, body: memoryview) -> tuple[bytes, memoryview]:
        """(the JSON for a body that is the only input, its data), by Triton's rules: the request has one row, a single
        free axis follows from the size, and a text has no length before it. Raises BadRequest."""
        what = f"header {HEADER_LENGTH} is 0, so the body is the only input, but"
        if len(self.inputs) != 1:
            raise BadRequest(f"{what} the model declares {len(self.inputs)} inputs; send JSON before the tensors")
        (spec,) = self.inputs.values()
        shape = [*(spec.shape if self.unbatched else (1, *spec.shape[1:]))]
        if spec.datatype == "BYTES":
            if shape not in ([1], [1, 1]):
                raise BadRequest(f"{what} a text has the shape [1], and '{spec.name}' has {shape}")
            body = memoryview(length_of(body) + bytes(body))
        elif shape.count(-1) > 1:
            raise BadRequest(f"{what} several axes of '{spec.name}' are of any size: {shape}")
        elif -1 in shape:
            cell = math.prod(size for size in shape if size >= 0) * SIZES[spec.datatype]
            shape[shape.index(-1)] = len(body) // max(cell, 1)
        parameters = TensorParameters(binary_data_size=len(body))
        tensor = Tensor(spec.name, shape, spec.datatype, parameters=parameters)
        return msgspec.json.encode(OipRequest([tensor], parameters={"binary_data_output": True})), body


_SSE: Final = b"text/event-stream"


class CodedBody(OipCodec):
    """Goes before the codec of a format: compresses whole responses.

    A request that was split has a response without coding, because its parts are joined in the server process.
    """

    reads_headers = True
    encode_all = Planning.encode_all  # one by one: each has a coding of its own

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """As of the format, in the coding that the client demands."""
        result = super().encode(value, item, context)
        coding = accepted_coding(header_of(item.headers, ACCEPT_ENCODING))
        streams = isinstance(context, OipContext) and context.streams
        if not coding or item.stop >= 0 or streams or _SSE in header_of(item.headers, b"accept"):
            return result
        return compress(result, coding)

    def encode_part(self, value: Any, item: Item, context: OipContext, first: bool) -> ItemResult:
        """As of the format, without coding, as all that follows in the stream."""
        context.streams = True
        return super().encode_part(value, item, context, first)


class CodedJsonCodec(CodedBody, OipJsonCodec):
    """JSON."""


class CodedBinaryCodec(CodedBody, OipBinaryCodec):
    """Binary tensors. `HEADER_LENGTH` counts bytes without coding."""


class CodedNpyCodec(CodedBody, OipNpyCodec):
    """NumPy's file format."""
