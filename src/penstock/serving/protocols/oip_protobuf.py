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
_INPUTS, _CONTENTS, _BITS = 5, 5, (6, 7)  # of these contents, those of FP32 and FP64 are their bytes
_MOST_TYPED: Final = 16  # inputs and their fields that are looked at: models have fewer
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


def _fields(data: memoryview, at: int = 0, most: int = MAX_FIELDS) -> Iterator[tuple[int, int, int, int]]:
    """(number, start of the field, start of its value, end) of each field from a position on, 0 as the number of one
    without a length.

    Raises IndexError for malformed data, and for more than `most` fields.
    """
    size = len(data)
    for _ in range(most):
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
    """A request without its id and the values of its tensors. `sections`: where these begin, counted from the end of
    the id, and their sizes."""

    head: InferHead
    peeked: tuple[int, str] | None
    sections: list[tuple[int, int]]


_known, _sections = PlanMemory(), PlanMemory()


def known_head(body: bytes | memoryview) -> tuple[KnownHead, bytes, str, int] | None:
    """(the head of a request whose tensors are bytes, all of the request but its id and these bytes, the id, its end),
    which clients repeat with other values. None for an irregular message."""
    try:
        start = _skip(body, _skip(body, 0, _NAME), _VERSION)
        end = _skip(body, start, _REQUEST_ID)
        sections = _sections.get(len(body) - end)
        known = None
        if sections is not None:
            known = _known.get(key := _without(body, start, end, sections))
        if known is None or known.sections != sections:
            known = _head_from(body, start, end)
            key = _without(body, start, end, known.sections)
            if len(key) <= MOST_KEY_BYTES:
                _known.keep(key, known)
                _sections.keep(len(body) - end, known.sections)
        return known, key, str(body[start + 2 : end], "utf-8"), end
    except (IndexError, ValueError, BadRequest):
        return None


def _without(body: bytes | memoryview, start: int, end: int, sections: Sequence[tuple[int, int]]) -> bytes:
    """The message without its id, from `start` to `end`, and these sections."""
    parts, at = [body[:start]], end
    for offset, size in sections:
        parts.append(body[at : end + offset])
        at = end + offset + size
    return b"".join([*parts, body[at:]])


def _skip(body: bytes | memoryview, at: int, tag: int) -> int:
    """The end of a short field at this position, if it has this tag. Raises IndexError."""
    if body[at] != tag:
        return at
    if body[at + 1] > 0x7F:
        raise IndexError
    return at + 2 + body[at + 1]


def _head_from(body: bytes | memoryview, start: int, end: int) -> KnownHead:
    """What is to be remembered of a message with its id in a range. Raises IndexError, ValueError, BadRequest."""
    data = memoryview(body)
    fields = list(_fields(data, end))
    raw = [field for field in fields if field[0] == RAW_INPUTS]
    if raw != fields[len(fields) - len(raw) :] or any(number < 4 for number, *_ in fields):
        raise IndexError
    places = [(value, stop) for _, _, value, stop in raw]
    if not raw and SHARED.encode() not in (whole := bytes(data)):
        tensors = [(value, stop) for number, _, value, stop in fields if number == _INPUTS]
        if len(tensors) > _MOST_TYPED or not (b"FP32" in whole or b"FP64" in whole):  # integers end here soon
            raise IndexError
        places = [_packed(data, *tensor) for tensor in tensors]
    at = raw[0][1] if raw else len(data)
    head = read_message(bytes(data[:start]) + bytes(data[end:at]))
    return KnownHead(head, peek_inputs(head.inputs), [(value - end, stop - value) for value, stop in places])


def _packed(data: memoryview, start: int, stop: int) -> tuple[int, int]:
    """Where the typed contents of an input in a range are, if they are the bytes of FP32 or FP64. Raises IndexError,
    ValueError."""
    number, _, start, stop = list(_fields(data[:stop], start, _MOST_TYPED))[-1]
    ((kind, _, start, stop),) = _fields(data[:stop], start, 2)
    if number != _CONTENTS or kind not in _BITS:
        raise IndexError
    return start, stop


def read_message(data: bytes) -> InferHead:
    """The head in a message. Raises BadRequest."""
    found = parse(_Head, data)
    found.DiscardUnknownFields()  # typed contents
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
