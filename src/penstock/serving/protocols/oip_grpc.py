"""The codec of `inference.GRPCInferenceService`: an Open Inference request is a message instead of JSON.

Source: the Open Inference Protocol's gRPC API, and Triton's extensions of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Struct, structs

from penstock.core.columns import MOST_KEY_BYTES, PlanMemory, RequestPlan, TensorRequest, TensorRows
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.columns import OutputColumn, SharedStack
from penstock.serving.protocols.oip import (
    OipCodec,
    OipContext,
    is_steady,
    parameters_of,
    shared_output,
)
from penstock.serving.protocols.oip_messages import (
    TYPED,
    InferResponse,
    InputParameters,
    OipRequest,
    OipResponse,
    Tensor,
    TensorParameters,
    convert_request,
    response_of,
)
from penstock.serving.protocols.oip_tensors import check_form, from_bytes, length_of
from penstock.types import DTYPES, Item, ItemResult, Response, SequenceRequest


class ProtoSet:
    """The .proto files in the folders `protos` of packages.

    They live in a pool of their own, so that a program that loads the same files elsewhere keeps its own classes.
    """

    def __init__(self, *packages: str) -> None:
        self.pool = descriptor_pool.DescriptorPool()
        for package in packages:
            data = resources.files(package).joinpath("protos", "descriptors.binpb").read_bytes()
            for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
                self.pool.AddSerializedFile(file.SerializeToString())

    def message(self, name: str) -> Any:
        """The class of a message, by its full name."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def service(self, name: str) -> Any:
        """The descriptor of a service, by its full name."""
        return self.pool.FindServiceByName(name)


@cache
def open_inference() -> ProtoSet:
    """The Open Inference Protocol (package `inference`) and the standard health service."""
    return ProtoSet(__package__)


RAW: Final = "application/grpc+proto"
SHARED: Final = "shared_memory_region"
# parameters that the server process reads; the model has no use for them
FOR_THE_SERVER: Final = frozenset({"priority", "timeout", "triton_enable_empty_final_response"})
WHOLE_BYTES: Final = 64 * 1024  # below it a message is parsed whole; above it its tensors are left out
MAX_FIELDS: Final = 10_000  # on the top level of a message: the server process reads them one by one
_RAW_INPUTS, _RAW_OUTPUTS, _ID = 7, 6, 3  # numbers of fields
_NAME, _VERSION, _REQUEST_ID = (number << 3 | 2 for number in (1, 2, _ID))  # tags of the fields that begin a request
_INFER_RESPONSE: Final = 2  # number of the field in ModelStreamInferResponse
CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}  # datatype -> the field with its values; FP16 and BF16 have none
_CARRIERS: Final = {
    "bool_contents": "bool", "int_contents": "int32", "int64_contents": "int64", "uint_contents": "uint32",
    "uint64_contents": "uint64", "fp32_contents": "float32", "fp64_contents": "float64",
}  # fmt: skip

_KINDS: Final = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))

_protos = open_inference()
_Head: Final = _protos.message("penstock.InferHead")
_Request: Final = _protos.message("inference.ModelInferRequest")
_Response: Final = _protos.message("inference.ModelInferResponse")
_StreamResponse: Final = _protos.message("inference.ModelStreamInferResponse")


class InferHead(Struct):
    """What the server process needs of a request."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Any]
    inputs: Sequence[Any]  # messages with name, datatype and shape


def read_head(body: bytes | memoryview) -> InferHead:
    """All but the contents of the tensors. Raises BadRequest for a message that is not valid."""
    known = known_head(body)
    if known is not None:
        return structs.replace(known[0].head, id=known[2])
    return read_message(bytes(body) if len(body) <= WHOLE_BYTES else _split(body, _RAW_INPUTS)[0])


class KnownHead(Struct):
    """A request up to its raw tensors, without its id. `sections`: offset and size of each tensor from the first field
    of raw tensors on; `marks`: the bytes before it, which are its number and its size."""

    head: InferHead
    peeked: tuple[int, str] | None
    size: int
    sections: list[tuple[int, int]]
    marks: list[tuple[int, bytes]]


_known, _sizes = PlanMemory(), PlanMemory()


def known_head(body: bytes | memoryview) -> tuple[KnownHead, bytes, str, int] | None:
    """(the head of a request with raw tensors, its bytes, the id, where the raw tensors begin), which clients repeat
    with other ids. None for an irregular message."""
    try:
        start = _skip(body, _skip(body, 0, _NAME), _VERSION)
        end = _skip(body, start, _REQUEST_ID)
        size = _sizes.get(len(body) - end)
        key = b"" if size is None else bytes(body[:start]) + bytes(body[end : end + size])
        known = _known.get(key)
        if known is None:
            known = _head_from(body, start, end)
            key = bytes(body[:start]) + bytes(body[end : end + known.size])
            if len(key) <= MOST_KEY_BYTES:
                _known.keep(key, known)
                _sizes.keep(len(body) - end, known.size)
        at = end + known.size
        if any(body[at + offset : at + offset + len(mark)] != mark for offset, mark in known.marks):
            return None
        return known, key, str(body[start + 2 : end], "utf-8"), at
    except (IndexError, BadRequest, UnicodeDecodeError):
        return None


def _skip(body: bytes | memoryview, at: int, tag: int) -> int:
    """The end of a short field at this position, if it has this tag. Raises IndexError."""
    if body[at] != tag:
        return at
    if body[at + 1] > 0x7F:
        raise IndexError
    return at + 2 + body[at + 1]


def _head_from(body: bytes | memoryview, start: int, end: int) -> KnownHead:
    """What is to be remembered of a message with its id in a range. Raises IndexError, BadRequest."""
    data = memoryview(body)
    fields = [(number, end + begin, end + value, end + stop) for number, begin, value, stop in _fields(data[end:])]
    raw = [field for field in fields if field[0] == _RAW_INPUTS]
    shared = not raw and SHARED.encode() in bytes(data)
    if not (raw or shared) or raw != fields[len(fields) - len(raw) :] or any(number < 4 for number, *_ in fields):
        raise IndexError
    at = raw[0][1] if raw else len(data)
    head = read_message(bytes(data[:start]) + bytes(data[end:at]))
    sections = [(value - at, stop - value) for _, _, value, stop in raw]
    marks = [(begin - at, bytes(data[begin:value])) for _, begin, value, _ in raw]
    return KnownHead(head, peek_inputs(head.inputs), at - end, sections, marks)


def read_message(data: bytes) -> InferHead:
    """The head in a message. Raises BadRequest."""
    found = _parse(_Head, data)
    return InferHead(found.model_name, found.model_version, found.id, plain(found.parameters), found.inputs)


def peek_inputs(inputs: Sequence[Any]) -> tuple[int, str] | None:
    """(rows of the first input, shape key) of inputs; names, datatypes and shapes without axis 0 are the key."""
    if not inputs:
        return None
    rows = inputs[0].shape[0] if inputs[0].shape else 1
    return rows, ";".join(sorted(f"{i.name}:{i.datatype}:{'x'.join(map(str, i.shape[1:]))}" for i in inputs))


def plain(parameters: Any) -> dict[str, Any]:
    """The values of a map of InferParameter. Raises BadRequest for one without a value."""
    values = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise BadRequest(f"parameter '{name[:100]}' has no value")
        values[name] = getattr(parameter, kind)
    return values


def _parse(kind: Any, data: bytes | memoryview) -> Any:
    try:
        return kind.FromString(bytes(data))
    except DecodeError:
        raise BadRequest("the message is not a valid inference.ModelInferRequest") from None


# ---- the wire format: https://protobuf.dev/programming-guides/encoding


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(value, position after it). Raises IndexError at the end of the data."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """(number, start of the field, start of its value, end) of each field, 0 as the number of one without a length.

    Raises IndexError for malformed data, and for more than MAX_FIELDS fields.
    """
    at, size = 0, len(data)
    for _ in range(MAX_FIELDS):
        if at == size:
            return
        start = at
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 2:
            length, at = _varint(data, at)
            value, at = at, at + length
        elif wire in (1, 5):
            value, at = at, at + (8 if wire == 1 else 4)
        elif wire == 0:
            value, (_, at) = at, _varint(data, at)
        else:
            raise IndexError  # a group, which proto3 does not have
        if at > size:
            raise IndexError
        yield tag >> 3 if wire == 2 else 0, start, value, at
    raise IndexError


def _split(body: bytes | memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """(the message without the fields of this number, their values as views of it). Raises BadRequest."""
    data = memoryview(body)
    parts, found, begin = [], [], 0
    try:
        for each, start, value, end in _fields(data):
            if each == number:
                parts.append(data[begin:start])
                found.append(data[value:end])
                begin = end
    except IndexError:
        raise BadRequest("the message is not a valid inference.ModelInferRequest") from None
    return b"".join([*parts, data[begin:]]), found


def _size(length: int) -> bytes:
    """A length as a varint."""
    out = bytearray()
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def field_of(number: int, *parts: bytes | memoryview) -> list[bytes | memoryview]:
    """The pieces of a field whose value is the concatenation of `parts`."""
    return [bytes([number << 3 | 2]) + _size(sum(map(len, parts))), *parts]


# ---- the codec


class _GrpcRequest(OipRequest):
    """A request that came as a message. `typed`: its inputs are typed contents."""

    typed: bool = False


class _OpenGrpcRequest(_GrpcRequest):
    """A request to a model that takes parameters of its own."""

    parameters: dict[str, Any] | None = None  # type: ignore[assignment]


class OipGrpcCodec(OipCodec):
    """Codec of ModelInfer and ModelStreamInfer. Outputs are raw, or typed contents if the inputs were.

    FP16 and BF16 have no typed contents, so a response with one of them is raw.
    """

    divisible = True

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key) of a message, see `peek_inputs`; 1 row if there are none, or more than bytes."""
        known = known_head(body)
        try:
            found = peek_inputs(read_head(body).inputs) if known is None else known[0].peeked
        except BadRequest:
            return None
        return found if found is None or 1 <= found[0] <= len(body) else (1, found[1])

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """The sequence that the parameters name. Raises BadRequest."""
        found = read_head(body).parameters
        id = found.get("sequence_id")
        if not id:
            return None
        return SequenceRequest(str(id), bool(found.get("sequence_start")), bool(found.get("sequence_end")))

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """(the message without its id and its raw tensors, the id, the message and where its raw tensors begin)."""
        known = known_head(item.payload)
        return None if known is None else (known[1], known[2] or None, (item.payload, known[3]))

    def is_steady(self, item: Item, id: str | None) -> bool:
        """Whether its parameters belong to no single request."""
        return is_steady(self.read(item)[0])

    def plan_of(self, request: TensorRequest, values: Any, item: Item) -> RequestPlan | None:
        """The plan of a request with raw tensors, or all tensors in shared memory."""
        plan, known = super().plan_of(request, values, item), known_head(values[0])
        if plan is None or known is None or type(plan.stack) is SharedStack:
            return plan
        if [size for _, size in known[0].sections] != [size for _, size in plan.sizes]:
            return None
        plan.sizes = known[0].sections
        return plan

    def response_head(self, columns: list[OutputColumn], rows: int, context: OipContext, has_id: bool) -> list[bytes]:
        """The message before the id of a response, after it, and the bytes before each raw output."""
        message = _Response(model_name=self.model, model_version=self.version)
        before = message.SerializeToString()
        set_parameters(message.parameters, self.parameters or {})
        for column in columns:
            output = message.outputs.add(name=column.name, datatype=column.datatype, shape=[rows, *column.tail])
            if column.shared is not None:
                set_parameters(output.parameters, msgspec.to_builtins(parameters_of(column, rows)))
        sizes = [0 if column.shared is not None else rows * column.row_bytes for column in columns]
        marks = [bytes([_RAW_OUTPUTS << 3 | 2]) + _size(size) for size in sizes]
        return [before, message.SerializeToString()[len(before) :], *marks]

    def respond(
        self, head: list[bytes], columns: list[OutputColumn], found: TensorRows, id: str | None, item: Item
    ) -> ItemResult:
        """The response with these rows of the columns. Raises BadRequest for a place in shared memory."""
        pieces: list[bytes | memoryview] = [head[0], *(() if id is None else field_of(_ID, id.encode())), head[1]]
        for mark, column in zip(head[2:], columns, strict=True):
            section = column.section(found.start, found.rows)
            if column.shared is None:
                pieces += [mark, section]
            else:
                shared_output(column.name, section, column.shared, item)
                pieces.append(mark)
        body = b"".join(pieces)
        return ItemResult(body, RAW)

    def read(self, item: Item) -> tuple[OipRequest, Sequence[memoryview | None]]:
        """The request, and the little-endian bytes of each input. Raises BadRequest."""
        head, raw = _split(item.payload, _RAW_INPUTS)
        message = _parse(_Request, head)
        kind = _OpenGrpcRequest if self.takes_parameters else _GrpcRequest
        request = convert_request(_values_of(message), kind)
        if raw and request.typed:
            raise BadRequest("found contents of an input and raw_input_contents; send one of them")
        given = [tensor for tensor in message.inputs if SHARED not in tensor.parameters]
        if raw and len(raw) != len(given):
            raise BadRequest(f"found {len(raw)} raw_input_contents for {len(given)} inputs; send one for each")
        data = iter(raw or [memoryview(_bytes_of(tensor)) for tensor in given])
        sections = [None if SHARED in tensor.parameters else next(data) for tensor in message.inputs]
        for tensor, section in zip(request.inputs, sections, strict=True):
            if section is not None:
                tensor.parameters = tensor.parameters or InputParameters()
                tensor.parameters.binary_data_size = len(section)
        return request, sections

    def context_of(self, request: OipRequest) -> OipContext:
        context = super().context_of(request)
        for output in context.outputs or ():
            output.binary = True
        context.binary, context.typed = True, isinstance(request, _GrpcRequest) and request.typed
        return context

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The response for a dict of arrays, or one array ("output_0"). Raises BadRequest for an unknown output."""
        if isinstance(value, Response):
            raise BadOutput("the model returned a Response, which has a form in HTTP only; return arrays for gRPC")
        return super().encode(value, item, context or OipContext(binary=True))

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """A part of a stream: a whole response."""
        return self.encode(value, item, context)

    def write(self, answer: OipResponse, sections: Sequence[bytes | memoryview], typed: bool) -> ItemResult:
        """The response as a message. See `OipContext` for `typed`."""
        message = _Response(model_name=answer.model_name, model_version=answer.model_version, id=answer.id or "")
        set_parameters(message.parameters, answer.parameters or {})
        typed = typed and all(tensor.datatype in CONTENTS for tensor in answer.outputs)
        rest = (section for section in sections if len(section))
        raw: list[bytes | memoryview] = []
        for tensor in answer.outputs:
            output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            parameters = {} if tensor.parameters is None else msgspec.to_builtins(tensor.parameters)
            data = _take(rest, parameters.pop("binary_data_size", None) or 0)
            set_parameters(output.parameters, parameters)
            if typed:
                getattr(output.contents, CONTENTS[tensor.datatype]).extend(_values(tensor, b"".join(data)))
            else:
                raw += field_of(_RAW_OUTPUTS, *data)
        body = b"".join([message.SerializeToString(), *raw])
        return ItemResult(body=body, content_type=TYPED if typed else RAW)

    def read_part(self, part: ItemResult) -> tuple[OipResponse, list[memoryview | None]]:
        """The response and the sections that `write` encoded."""
        head, raw = _split(part.body, _RAW_OUTPUTS)
        message = _Response.FromString(head)
        sections = raw or [memoryview(_bytes_of(output)) for output in message.outputs]
        outputs = [
            Tensor(each.name, list(each.shape), each.datatype, parameters=TensorParameters(binary_data_size=len(data)))
            for each, data in zip(message.outputs, sections, strict=True)
        ]
        parameters = plain(message.parameters) or None
        answer = OipResponse(message.model_name, message.model_version, outputs, message.id or None, parameters)
        return answer, list(sections)


def _take(sections: Iterator[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    """The next sections, `size` bytes in all: a joined response has one for each part of a split request."""
    found = []
    while size > 0:
        found.append(next(sections))
        size -= len(found[-1])
    return found


def set_parameters(found: Any, values: dict[str, Any]) -> None:
    """Fills a map of InferParameter. A value of another type than bool, int, float and str is written as JSON."""
    for name, value in values.items():
        kind = next((kind for type, kind in _KINDS if isinstance(value, type)), None)
        if kind is None:
            kind, value = "string_param", msgspec.json.encode(value).decode()
        setattr(found[name], kind, value)


def _values_of(message: Any) -> dict[str, Any]:
    """The fields of a request as in JSON, without the data. Parameters for the server are left out."""
    parameters = {name: value for name, value in plain(message.parameters).items() if name not in FOR_THE_SERVER}
    return {
        "inputs": [
            {"name": t.name, "shape": list(t.shape), "datatype": t.datatype, "parameters": plain(t.parameters)}
            for t in message.inputs
        ],
        "id": message.id or None,
        "outputs": [{"name": o.name, "parameters": plain(o.parameters)} for o in message.outputs] or None,
        "parameters": parameters,
        "typed": any(tensor.HasField("contents") for tensor in message.inputs),
    }


def _bytes_of(tensor: Any) -> bytes:
    """The typed contents of an input or an output as little-endian bytes. Raises BadRequest."""
    import numpy as np

    what = f"tensor '{tensor.name[:100]}'"
    check_form(what, tensor.datatype, tensor.shape, BadRequest)
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        raise BadRequest(f"{what}: {tensor.datatype} has no typed contents; send raw_input_contents")
    other = next((f.name for f, _ in tensor.contents.ListFields() if f.name != field), None)
    if other is not None:
        raise BadRequest(f"{what}: {tensor.datatype} belongs in {field}, found {other}")
    values = getattr(tensor.contents, field)
    if len(values) != (wanted := math.prod(tensor.shape)):
        raise BadRequest(f"{what}: shape {list(tensor.shape)[:8]} needs {wanted} elements, found {len(values)}")
    if tensor.datatype == "BYTES":
        return b"".join([part for cell in values for part in (length_of(cell), cell)])
    array = np.fromiter(values, _CARRIERS[field], len(values))
    dtype = np.dtype(DTYPES[tensor.datatype])
    if dtype.kind in "iu" and len(array) and not np.can_cast(array.dtype, dtype):
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise BadRequest(f"{what}: a value is not in the range of {tensor.datatype}")
    return array.astype(dtype.newbyteorder("<")).tobytes()


def _values(tensor: Tensor, data: bytes) -> list[Any]:
    """The elements of an output."""
    array = from_bytes("output", tensor.datatype, tensor.shape, memoryview(data), BadOutput)
    return array.ravel().tolist()


# ---- clients


def encode_infer(
    name: tuple[str, str, str],
    inputs: Sequence[tuple[str, str, tuple[int, ...], bytes | bytearray | memoryview]],
    outputs: Sequence[str] | None,
    parameters: dict[str, Any],
) -> bytes:
    """A ModelInferRequest with raw tensors. `name`: model, version and request id; `inputs` as of `encode_request`."""
    message = _Request(model_name=name[0], model_version=name[1], id=name[2])
    set_parameters(message.parameters, parameters)
    raw: list[bytes | memoryview] = []
    for input_name, datatype, shape, data in inputs:
        message.inputs.add(name=input_name, datatype=datatype, shape=shape)
        raw += field_of(_RAW_INPUTS, memoryview(data))
    for output in outputs or ():
        message.outputs.add(name=output)
    return b"".join([message.SerializeToString(), *raw])


def decode_infer(body: bytes | memoryview) -> InferResponse:
    """The response in a ModelInferResponse. Arrays are views of the body. Raises BadOutput."""
    try:
        answer, sections = OipGrpcCodec("", "").read_part(ItemResult(body=body))
    except (BadRequest, DecodeError, ValueError):
        raise BadOutput("the response is not a valid inference.ModelInferResponse") from None
    return response_of(answer, sections)


def decode_stream_infer(body: bytes) -> tuple[str, InferResponse]:
    """(error text, response) in a ModelStreamInferResponse. Raises BadOutput."""
    try:
        head, found = _split(body, _INFER_RESPONSE)
        text = _StreamResponse.FromString(head).error_message
    except (BadRequest, DecodeError):
        raise BadOutput("the response is not a valid inference.ModelStreamInferResponse") from None
    return text, decode_infer(found[-1] if found else b"")
