"""Thrift's binary protocol for one service: incremental reading of calls, and responses.

    struct InferenceParams { 1: required string uuid, 2: required binary data }
    struct InferenceResult { 1: required string label, 2: required double score }
    service InferenceService { void ping(), InferenceResult infer_batch(1: InferenceParams params) }

Every length is checked against the received bytes and against a limit before it is used. The readers of Thrift's
libraries trust lengths: thriftpy2's accelerated one returns memory beyond a message that declares a larger length. A
walk over an incomplete message finds how many bytes the next walk needs.
Source: "Thrift Binary protocol encoding" of Apache Thrift, doc/specs/thrift-binary-protocol.md.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import numpy as np

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest, PayloadTooLarge
from penstock.types import Item, ItemResult

CALL, REPLY, EXCEPTION = 1, 2, 3
UNKNOWN_METHOD, INVALID_MESSAGE_TYPE, INTERNAL_ERROR, PROTOCOL_ERROR = 1, 2, 6, 7

HEAD_BYTES: Final = 64 * 1024  # largest part of a message besides its data
_VERSION: Final = 0x8001
_MOST_STEPS: Final = 64  # fields, elements and nesting levels of one message; the service needs 5
_STOP, _STRING, _STRUCT, _MAP, _SET, _LIST = 0, 11, 12, 13, 14, 15
_SIZES: Final = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8, 16: 16}  # bytes of the types with a fixed size

_i16 = Struct(">h")
_i32 = Struct(">i")
_head = Struct(">HxBi")  # version, kind of message, length of the method's name
_result = Struct(">bhi")
_score = Struct(">bhdb")


class ThriftCall:
    """An arriving message. `method`, `seqid`, `uuid` and `data` are set as soon as they are read.

    `data` is the range of the data: the offset of its first byte, and the one after its last.
    """

    __slots__ = ("data", "end", "kind", "method", "need", "seqid", "uuid")

    def __init__(self) -> None:
        self.method = b""
        self.kind = self.seqid = 0
        self.uuid: bytes | None = None
        self.data: tuple[int, int] | None = None
        self.need = 4  # bytes that the next walk needs to make progress
        self.end = 0

    def read(self, message: bytes | bytearray, start: int, most: int) -> bool:
        """Walks over the message that begins at `start`. False: it is incomplete, and `need` is set.

        `most` limits the bytes of its data. Raises BadRequest, PayloadTooLarge.
        """
        walk = _Walk(message, start, most)
        try:
            self._head(walk)
            while kind := walk.byte():
                if walk.i16() == 1 and kind == _STRUCT:
                    self._params(walk)
                else:
                    walk.skip(kind)
        except _Short as short:
            self.need = short.need
            return False
        self.end = walk.at
        return True

    def _head(self, walk: _Walk) -> None:
        first = walk.i32()
        if first < 0:
            version, self.kind = (first >> 16) & 0xFFFF, first & 0xFF
            if version != _VERSION:
                raise BadRequest(f"found version {version:#06x} of a protocol, expected Thrift's binary one (0x8001)")
            self.method = walk.string(walk.i32())
        else:  # a client that writes no version
            self.method = walk.string(first)
            self.kind = walk.byte()
        self.seqid = walk.i32()

    def _params(self, walk: _Walk) -> None:
        while kind := walk.byte():
            field = walk.i16()
            if kind != _STRING or field not in (1, 2):
                walk.skip(kind)
            elif field == 1:
                self.uuid = walk.string(walk.i32())
            else:
                size = walk.size()
                if size > walk.most:
                    raise PayloadTooLarge(f"the data has {size} bytes, at most {walk.most} are accepted")
                self.data = (walk.at, walk.take(size))


class _Short(Exception):
    """The message is incomplete: the walk needs `need` bytes."""

    def __init__(self, need: int) -> None:
        self.need = need


class _Walk:
    """A position in a message. Raises `_Short` at its end, and BadRequest for invalid content."""

    def __init__(self, message: bytes | bytearray, start: int, most: int) -> None:
        self._message = message
        self.at = start
        self.most = most
        self._end = len(message)
        self._last = start + most + HEAD_BYTES
        self._steps = 0

    def take(self, size: int) -> int:
        """Advances by `size` bytes, and returns the new position."""
        at = self.at + size
        if at > self._last:
            raise PayloadTooLarge(f"the message has more than {self._last} bytes")
        if at > self._end:
            raise _Short(at)
        self.at = at
        return at

    def byte(self) -> int:
        return self._message[self.take(1) - 1]

    def i16(self) -> int:
        return int(_i16.unpack_from(self._message, self.take(2) - 2)[0])

    def i32(self) -> int:
        return int(_i32.unpack_from(self._message, self.take(4) - 4)[0])

    def size(self) -> int:
        """A length, or a count of elements."""
        found = self.i32()
        if found < 0:
            raise BadRequest(f"found a length of {found}, expected 0 or more")
        return found

    def string(self, size: int) -> bytes:
        """A short string: a name or an id."""
        if not 0 <= size <= 4096:
            raise BadRequest(f"found a name of {size} bytes, expected 0 to 4096")
        end = self.take(size)
        return bytes(self._message[end - size : end])

    def skip(self, kind: int) -> None:
        """Skips an unknown value, for instance of a later version of the service."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise BadRequest("found a message with more fields than any call of the service has")
        if (size := _SIZES.get(kind)) is not None:
            self.take(size)
        elif kind == _STRING:
            self.take(self.size())
        elif kind == _STRUCT:
            while (inner := self.byte()) != _STOP:
                self.i16()
                self.skip(inner)
        elif kind in (_MAP, _SET, _LIST):
            kinds = [self.byte() for _ in range(2 if kind == _MAP else 1)]
            self._elements(kinds, self.size())
        else:
            raise BadRequest(f"found a value of type {kind}, which Thrift's binary protocol does not have")

    def _elements(self, kinds: list[int], count: int) -> None:
        if all(kind in _SIZES for kind in kinds):
            self.take(count * sum(_SIZES[kind] for kind in kinds))
            return
        for _ in range(count):
            for kind in kinds:
                self.skip(kind)


def is_framed(first: bytes | bytearray) -> bool:
    """Whether the first 6 bytes of a connection begin a frame: a length, then the message's version or a name's length.

    The length of a name is below 2 ** 16. Without frames, a version or a name comes first.
    """
    return first[0] < 0x80 and (first[4:6] == b"\x80\x01" or first[4:6] == b"\0\0")


def reply(call: ThriftCall, result: bytes | None) -> bytes:
    """The response to a call: the codec's `result`, or None for a method without a result."""
    body = b"\0" if result is None else b"\x0c\0\0%b\0" % result
    return _message(call, REPLY, body)


def exception(call: ThriftCall, kind: int, text: str) -> bytes:
    """A TApplicationException. `kind` is one of the constants above."""
    message = text.encode("utf-8", "replace")
    body = b"\x0b\0\x01%b%b\x08\0\x02%b\0" % (_i32.pack(len(message)), message, _i32.pack(kind))
    return _message(call, EXCEPTION, body)


def _message(call: ThriftCall, kind: int, body: bytes) -> bytes:
    head = _head.pack(_VERSION, kind, len(call.method))
    return b"%b%b%b%b" % (head, call.method, _i32.pack(call.seqid), body)


def pack_result(label: str, score: float) -> bytes:
    text = label.encode("utf-8", "replace")
    return _result.pack(_STRING, 1, len(text)) + text + _score.pack(4, 2, score, _STOP)


class ThriftCodec(Codec):
    """Codec of `infer_batch`: from the unchanged data to the label and score of the model's result."""

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version

    def decode(self, item: Item) -> tuple[Any, None]:
        """The data of the call."""
        return item.payload, None

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """An InferenceResult.

        A dict with `label` and `score` gives these. Logits `[classes]` or `[1, classes]`, alone or as `result` of a
        dict, give the index and the softmax probability of the largest.
        """
        if isinstance(value, dict):
            if "label" in value and "score" in value:
                return ItemResult(body=pack_result(_text(value["label"]), _number(value["score"])))
            value = value.get("result")
        label, score = best_of(value)
        return ItemResult(body=pack_result(str(label), score))

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The only response, because a call has one row and is never split."""
        return parts[0]


def best_of(scores: Any) -> tuple[int, float]:
    """Class and softmax probability of the largest logit. Raises BadOutput if the value does not contain logits."""
    try:
        found = np.asarray(scores, dtype=np.float32)
    except (TypeError, ValueError):
        found = np.empty(0, np.float32)
    if not found.ndim or not found.size or found.size != found.shape[-1]:
        shape = getattr(scores, "shape", None)
        raise BadOutput(
            f"found {type(scores).__name__}{'' if shape is None else f' {list(shape)}'}, expected scores of classes"
            " [1, classes], or a dict with label and score"
        )
    found = found.reshape(-1)
    best = int(found.argmax())
    if not np.isfinite(found[best]):  # argmax prefers NaN
        raise BadOutput(f"found the score {found[best]} for class {best}, expected a number")
    return best, float(1.0 / np.exp(found - found[best]).sum())


def _text(label: Any) -> str:
    if isinstance(label, bytes):
        return label.decode("utf-8", "replace")
    return str(label.item() if getattr(label, "size", 0) == 1 else label)


def _number(score: Any) -> float:
    try:
        return float(score.item() if getattr(score, "size", 0) == 1 else score)
    except (TypeError, ValueError):
        raise BadOutput(f"found a score that is {type(score).__name__}, expected a number") from None
