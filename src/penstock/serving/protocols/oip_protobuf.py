"""Messages of the Open Inference Protocol: their classes, their wire format, and heads that clients repeat.

Clients repeat all of a request but its id and its tensors, so what was read of a head is remembered under its bytes.
Source: https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Struct, structs

from penstock.core.columns import MOST_KEY_BYTES, PlanMemory
from penstock.errors import BadRequest


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


SHARED: Final = "shared_memory_region"
WHOLE_BYTES: Final = 64 * 1024  # below it a message is parsed whole; above it its tensors are left out
MAX_FIELDS: Final = 10_000  # on the top level of a message: the server process reads them one by one
RAW_INPUTS, RAW_OUTPUTS, ID = 7, 6, 3  # numbers of fields
_NAME, _VERSION, _REQUEST_ID = (number << 3 | 2 for number in (1, 2, ID))  # tags of the fields that begin a request
_KINDS: Final = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))
_Head: Final = open_inference().message("penstock.InferHead")


# ---- the wire format


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


def split_field(body: bytes | memoryview, number: int) -> tuple[bytes, list[memoryview]]:
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


def varint_of(length: int) -> bytes:
    """A length as a varint."""
    out = bytearray()
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def field_of(number: int, *parts: bytes | memoryview) -> list[bytes | memoryview]:
    """The pieces of a field whose value is the concatenation of `parts`."""
    return [bytes([number << 3 | 2]) + varint_of(sum(map(len, parts))), *parts]


# ---- parameters


def plain(parameters: Any) -> dict[str, Any]:
    """The values of a map of InferParameter. Raises BadRequest for one without a value."""
    values = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise BadRequest(f"parameter '{name[:100]}' has no value")
        values[name] = getattr(parameter, kind)
    return values


def set_parameters(found: Any, values: dict[str, Any]) -> None:
    """Fills a map of InferParameter. A value of another type than bool, int, float and str is written as JSON."""
    for name, value in values.items():
        kind = next((kind for type, kind in _KINDS if isinstance(value, type)), None)
        if kind is None:
            kind, value = "string_param", msgspec.json.encode(value).decode()
        setattr(found[name], kind, value)


# ---- heads of requests


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
    return read_message(bytes(body) if len(body) <= WHOLE_BYTES else split_field(body, RAW_INPUTS)[0])


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
    raw = [field for field in fields if field[0] == RAW_INPUTS]
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
    found = parse(_Head, data)
    return InferHead(found.model_name, found.model_version, found.id, plain(found.parameters), found.inputs)


def peek_inputs(inputs: Sequence[Any]) -> tuple[int, str] | None:
    """(rows of the first input, shape key) of inputs; names, datatypes and shapes without axis 0 are the key."""
    if not inputs:
        return None
    rows = inputs[0].shape[0] if inputs[0].shape else 1
    return rows, ";".join(sorted(f"{i.name}:{i.datatype}:{'x'.join(map(str, i.shape[1:]))}" for i in inputs))


def parse(kind: Any, data: bytes | memoryview) -> Any:
    try:
        return kind.FromString(bytes(data))
    except DecodeError:
        raise BadRequest("the message is not a valid inference.ModelInferRequest") from None
