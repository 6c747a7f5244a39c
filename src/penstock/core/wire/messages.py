"""The messages between a process and its own child: msgpack heads, with large payloads beside them.

A frame is `u32 head length | u32 number of buffers | u64 length of each buffer | head | buffers`, little-endian.

Payloads up to 64 KiB are part of the head; larger ones are in shared memory, or follow the head if there is no room.
Python objects (codec "object") are pickled with protocol 5, and their large buffers are treated alike; this happens
only between a process and its own child. Errors cross as data, so that neither side imports the other's classes.
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.msgpack import Ext

from penstock.core.codecs import traits_of
from penstock.core.wire.lending import Borrowed, find
from penstock.core.wire.objects import dumps, read_error, write_error
from penstock.core.wire.slabs import Slab, SlabPool
from penstock.errors import BadOutput, BadRequest, PenstockError
from penstock.request import whole_headers
from penstock.types import BatchPart, Item, ItemResult, MetricDelta, Ready
from penstock.values import prepare

# ---- frames

Buffer = bytes | bytearray | memoryview

MAX_BUFFERS = 65536
MAX_BYTES = 2**32  # of a frame
_PREFIX = struct.Struct("<II")


class FrameError(Exception):
    """The peer sent an invalid frame: the connection is unusable."""


class Frame(Struct):
    """One received message. The buffers belong to the receiver and are writable."""

    head: bytes
    buffers: list[bytearray]


def frame_of(head: bytes, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """The pieces of one frame, in order; large buffers are not copied. Buffers must be one-dimensional bytes."""
    if not buffers:
        return [_PREFIX.pack(len(head), 0) + head]
    lengths = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return [b"".join((_PREFIX.pack(len(head), len(buffers)), lengths, head)), *buffers]


class FrameDecoder:
    """Decodes the frames in a stream of bytes that may be split anywhere. Unusable after a FrameError.

    `max_bytes` bounds one frame. Memory grows with what arrives, not with what a broken peer announces.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._reset()

    def _reset(self) -> None:
        self._sizes: list[int] = []  # sizes of the parts after the current one
        self._done: list[bytearray] = []  # completed parts: head, then buffers
        self._part, self._size = bytearray(), _PREFIX.size
        self._stage = 0  # 0 prefix, 1 table of lengths, 2 head and buffers

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes, oldest first. `data` may be reused afterwards."""
        frames: list[Frame] = []
        view = memoryview(data)
        at = 0
        while at < len(view):
            if self._stage == 0 and not self._part:
                at = self._whole(view, at, frames)
                if at >= len(view):
                    break
            rest = self._size - len(self._part)
            self._part += view[at : at + rest]
            at += rest
            while len(self._part) == self._size:
                frame = self._next_part()
                if frame is not None:
                    frames.append(frame)
                    break
        return frames

    def _whole(self, view: memoryview, at: int, frames: list[Frame]) -> int:
        """Decodes complete frames without buffers from `at` on: the common case, without the state machine."""
        end = len(view)
        while end - at >= _PREFIX.size:
            head_bytes, count = _PREFIX.unpack_from(view, at)
            start = at + _PREFIX.size
            if count or end - start < head_bytes:
                break
            if head_bytes > self.max_bytes:
                self._check(head_bytes)
            frames.append(Frame(bytes(view[start : start + head_bytes]), []))
            at = start + head_bytes
        return at

    def _next_part(self) -> Frame | None:
        """Called with a full part: prepares the next part or returns the completed frame."""
        if self._stage == 0:
            head_bytes, count = _PREFIX.unpack(self._part)
            if count > MAX_BUFFERS:
                raise FrameError(f"frame announces {count} buffers, expected at most {MAX_BUFFERS}")
            self._check(head_bytes + 8 * count)
            self._sizes = [head_bytes]
            self._stage, self._part, self._size = 1, bytearray(), 8 * count
            return None
        if self._stage == 1:
            self._sizes += struct.unpack(f"<{len(self._part) // 8}Q", self._part)
            self._check(sum(self._sizes))
            self._stage = 2
        else:
            self._done.append(self._part)
        if self._sizes:
            self._part, self._size = bytearray(), self._sizes.pop(0)
            return None
        frame = Frame(bytes(self._done[0]), self._done[1:])
        self._reset()
        return frame

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            raise FrameError(f"frame announces {size} bytes, expected at most {self.max_bytes}")


# ---- messages

LARGE_BYTES = 64 * 2**10
_SLAB, _BUFFER, _PICKLE, _PICKLE_PARTS, _ERROR, _BORROWED = 1, 2, 3, 4, 5, 6
# The start of a reply region holds the id of the batch that the worker predicts; 0 means the first one without an
# answer. The parent can still read it after the worker died.
PREDICTED = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
_INDEX = struct.Struct("<I")
_BORROW = struct.Struct("<qiQQQ")  # number, descriptor and serial of the region, offset, length


class RunBatch(Struct, array_like=True, tag="run"):
    """To the worker: a batch. `free`: offsets of the reply region that the parent has read."""

    id: int
    items: list[Item]
    free: list[int]


class FreeReplies(Struct, array_like=True, tag="free"):
    """To the worker: offsets of the reply region that the parent has read."""

    free: list[int]


class AbandonBatch(Struct, array_like=True, tag="abandon"):
    """To the worker: the batch is abandoned; if it streams, it may end."""

    id: int


class StopWorker(Struct, array_like=True, tag="stop"):
    """To the worker: unload and end after the batches sent before."""


class WorkerUp(Struct, array_like=True, tag="up"):
    """From the worker: the model is loaded."""

    ready: Ready


class WorkerFailed(Struct, array_like=True, tag="failed"):
    """From the worker: the model could not be loaded; the worker ends."""

    error: PenstockError


class PartMessage(Struct, array_like=True, tag="part"):
    """From the worker: one part of a batch.

    `held`: offsets of request slabs that the model still refers to; `let_go`: offsets that it no longer does.
    """

    part: BatchPart
    held: list[int]
    let_go: list[int]


class WorkerNews(Struct, array_like=True, tag="news"):
    """From a worker with concurrent batches: metrics and freed slabs. `let_go` as in PartMessage."""

    let_go: list[int]
    metrics: list[MetricDelta]


ToWorker = RunBatch | FreeReplies | AbandonBatch | StopWorker
FromWorker = WorkerUp | WorkerFailed | PartMessage | WorkerNews
prepare(ToWorker, FromWorker)


class Pickled:
    """A pickled Python object, loaded later so that a bad one fails alone."""

    __slots__ = ("_buffers", "_data")

    def __init__(self, data: Any, buffers: list[Any]) -> None:
        self._data = data
        self._buffers = buffers

    def __len__(self) -> int:
        """Its bytes, which tell its length as well as any part of the server can."""
        return len(self._data) + sum(map(len, self._buffers))

    def load(self) -> Any:
        return pickle.loads(self._data, buffers=self._buffers)  # from our own child or parent


class Unsent:
    """Replaces one item of a `many` that could not be sent."""

    def __init__(self, error: PenstockError) -> None:
        self.error = error


class MessageWriter:
    """The payloads of a message being written, with their slabs and buffers."""

    __slots__ = ("_large_bytes", "_lends", "_pool", "buffers", "given", "slabs")

    def __init__(self, pool: SlabPool | None, large_bytes: int = LARGE_BYTES, *, lends: bool = False) -> None:
        """Payloads above `large_bytes` are put into the pool. `lends`: objects in memory that the receiver can map are
        not copied; see `lending.py`."""
        self._pool, self._large_bytes, self._lends = pool, large_bytes, lends
        self.buffers: list[Buffer] = []
        self.slabs: list[Slab] = []  # created for this message: its sender frees them
        self.given: list[Slab] = []  # payloads of its items

    def put(self, data: Buffer) -> Any:
        """The form of `data` in the head."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if size <= self._large_bytes:
            return bytes(data) if isinstance(data, memoryview) else data
        slab = self._pool.allocate(size) if self._pool is not None and size <= self._pool.capacity_bytes else None
        if slab is not None:
            slab.view[:] = memoryview(data).cast("B")
            self.slabs.append(slab)
            return place(slab)
        self.buffers.append(self.keep(data))
        return Ext(_BUFFER, _INDEX.pack(len(self.buffers) - 1))

    def keep(self, data: Buffer) -> Buffer:
        """`data` in memory that does not change before it is sent."""
        return bytes(data) if isinstance(data, memoryview) else data

    def put_object(self, value: object) -> Ext:
        """The form of a Python object in the head. Raises the errors of pickle."""
        large: list[memoryview] = []
        return self.put_pickled(dumps(value, partial(in_band, large, most=self._large_bytes)), large)

    def put_pickled(self, data: Buffer, large: Sequence[Buffer]) -> Ext:
        """The form of a pickled object with its large buffers in the head."""
        if not large and len(data) <= self._large_bytes:
            return Ext(_PICKLE, bytes(data))
        return Ext(_PICKLE_PARTS, _encoder.encode([self.put(data), [self._put_memory(raw) for raw in large]]))

    def _put_memory(self, raw: Buffer) -> Any:
        found = find(raw) if self._lends else None
        if found is None or found[0].fd is None:
            return self.put(raw)
        self.given.append(borrowed := Borrowed(*found, memoryview(raw)))
        return Ext(_BORROWED, _BORROW.pack(*borrowed.place))

    def put_error(self, error: PenstockError) -> Ext:
        """The form of an error in place of a payload."""
        return Ext(_ERROR, _encoder.encode(error))

    def _put_all(self, values: list[Any], refuse: Callable[[Any, Exception], object]) -> Ext:
        """Like `put_object` for a list; `refuse` replaces each value that cannot be pickled."""
        try:
            return self.put_object(values)
        except Exception:
            sendable: list[object] = []
            for value in values:
                try:
                    dumps(value, lambda _: False)
                    sendable.append(value)
                except Exception as e:
                    sendable.append(refuse(value, e))
            return self.put_object(sendable)

    def items(self, items: list[Item], with_headers: bool, whole: bool = False) -> list[Item]:
        """The items in the form of the head; an item that cannot be pickled becomes an error in the worker. `whole`:
        with all that their requests have, see `penstock.request`."""
        packed = []
        for item in items:
            payload = item.payload
            start, stop = item.start, item.stop
            if item.codec == "object":
                if item.many and stop >= 0:
                    payload, start, stop = payload[start:stop], 0, -1  # the other rows are in other batches
                try:
                    payload = self._put_all(payload, unsent) if item.many else self.put_object(payload)
                except Exception as e:
                    payload = self.put_error(unsent(payload, e).error)
            elif type(payload) is Slab:
                self.given.append(payload)
                payload = place(payload)
            elif len(payload) > LARGE_BYTES:
                payload = self.put(payload)
            headers = item.headers if with_headers or traits_of(item.codec).reads_headers else None
            if whole:
                headers = whole_headers(item)
            if payload is not item.payload or headers is not item.headers or item.source is not None:
                item = Item(
                    payload, item.codec, item.content_type, item.rows, item.many, item.request_id, headers, start,
                    stop, item.budget_s, sequence=item.sequence, ended=item.ended, head_bytes=item.head_bytes,
                    trace=item.trace,
                )  # fmt: skip
            packed.append(item)
        return packed

    def results(self, items: list[Item], results: list[ItemResult | None]) -> list[ItemResult | None]:
        """The results of these items in the form of the head; modifies `results`."""
        for i, result in enumerate(results):
            if result is None or result.error is not None:
                continue
            if items[i].codec == "object":
                try:
                    many = items[i].many
                    result.body = self._put_all(result.body, _unsendable) if many else self.put_object(result.body)
                except Exception as e:
                    results[i] = ItemResult(error=_unsendable(result.body, e))
            elif type(result.body) is not bytes or len(result.body) > LARGE_BYTES:
                result.body = self.put(result.body)
        return results


class MessageReader:
    """Reads messages. `resolve(offset, length, writable)` returns the shared memory at that place.

    `writable`: it becomes the memory of a Python object, which is writable like any other. `borrow(number, descriptor,
    serial, offset, length)` returns memory that the sender has lent.
    """

    def __init__(
        self,
        kind: Any,
        resolve: Callable[[int, int, bool], Any],
        borrow: Callable[[int, int, int, int, int], Any] | None = None,
    ) -> None:
        self._resolve, self._borrow = resolve, borrow
        self._buffers: list[bytearray] = []
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=self._ext, dec_hook=read_error)

    def read(self, frame: Frame) -> Any:
        """The message in `frame`. Raises msgspec.DecodeError or ValueError if the peer is broken."""
        self._buffers = frame.buffers
        return self._decoder.decode(frame.head)

    def _ext(self, code: int, data: memoryview) -> Any:
        if code == _PICKLE:
            return Pickled(bytes(data), [])
        if code == _SLAB:
            offset, length = _PLACE.unpack(data)
            return self._resolve(offset, length, False)
        if code == _BUFFER:
            return bytes(self._buffers[_INDEX.unpack(data)[0]])
        if code == _PICKLE_PARTS:
            return Pickled(*msgspec.msgpack.decode(data, ext_hook=self._memory_of_object))
        if code == _ERROR:
            return read_error(PenstockError, msgspec.msgpack.decode(data))
        raise ValueError(f"unknown extension {code}")

    def _memory_of_object(self, code: int, data: memoryview) -> Any:
        if code == _SLAB:
            offset, length = _PLACE.unpack(data)
            return self._resolve(offset, length, True)
        if code == _BORROWED and self._borrow is not None:
            return self._borrow(*_BORROW.unpack(data))
        return self._buffers[_INDEX.unpack(data)[0]]


def head_of(message: Struct) -> bytes:
    """The head of one message."""
    return _encoder.encode(message)


def write(message: Struct, buffers: list[Buffer] | None = None) -> list[Buffer]:
    """The pieces of the frame of one message."""
    head = _encoder.encode(message)
    return frame_of(head, buffers) if buffers else [_PREFIX.pack(len(head), 0) + head]


def sendable(part: BatchPart, why: Exception) -> None:
    """Replaces each result that cannot be written by an error, so that the others do not fail."""
    part.metrics = None
    for i, result in enumerate(part.results):
        try:
            _encoder.encode(result)
        except Exception:
            part.results[i] = ItemResult(error=BadOutput("the model's answer cannot be sent", detail=repr(why)))


def in_band(large: list[memoryview], buffer: pickle.PickleBuffer, most: int = LARGE_BYTES) -> bool:
    """Whether pickle copies this memory into its result; otherwise adds it to `large`."""
    raw = buffer.raw()
    if raw.nbytes > most:
        large.append(raw)
        return False
    return True


def place(slab: Slab) -> Ext:
    """The form of a slab in the head."""
    return Ext(_SLAB, _PLACE.pack(slab.offset, slab.length))


def unsent(value: object, why: Exception) -> Unsent:
    """In place of an item that cannot be pickled."""
    text = f"{_field(value) or f'the item is a {type(value).__name__}'} that cannot be pickled for the worker"
    return Unsent(BadRequest(text, detail=repr(why)))


def _unsendable(value: object, why: Exception) -> BadOutput:
    text = f"{_field(value) or f'the model returned a {type(value).__name__}'} that cannot be pickled"
    return BadOutput(text, detail=repr(why))


def _field(value: object) -> str:
    """The first field that cannot be pickled, of an item of a pipeline; "" for other values."""
    fields = getattr(value, "fields", None)
    for name, field in fields.items() if isinstance(fields, dict) else ():
        try:
            dumps(field, lambda _: False)
        except Exception:
            return f"field '{name}' is a {type(field).__name__}"
    return ""


_encoder = msgspec.msgpack.Encoder(enc_hook=write_error)
