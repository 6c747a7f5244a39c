"""Tensors in columns, see `core/columns.py`: blocks from bytes and from JSON, and the parts of JSON bodies.

What is read here was read by the codec's own `decode` before, in a request that differs in values only; see `_reads`.
Anything else raises, and `decode` then reads the requests one by one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from penstock.core.columns import (
    MOST_KEY_BYTES,
    Block,
    Empty,
    PlanMemory,
    PlannedRequest,
    RequestPlan,
    TensorRequest,
    TensorRows,
)
from penstock.core.contracts import Codec
from penstock.core.wire.regions import read_region
from penstock.errors import BadOutput, PenstockError
from penstock.serving.protocols.oip_tensors import from_bytes, output_array, texts_of, to_bytes
from penstock.types import DATATYPES, DTYPES, SIZES, Item, ItemResult, TensorSpec

if TYPE_CHECKING:
    import numpy as np

MOST_LISTS: Final = 64  # a choice: of a JSON body; more are rows that cost less in one flat list
EXACT: Final = 2**53  # whole numbers below it are exact as float64, so that the order of conversions does not matter
GAP: Final = msgspec.Raw(b"\0")  # stands for a value in JSON, which holds no such byte
HALF_MOST: Final = 65504  # the largest number of FP16
_ID: Final = re.compile(rb'"id"\s*:\s*"([ !#-\[\]-~]*)"')  # without an escape
_DECODERS: Final[dict[str, Any]] = {
    "b": msgspec.json.Decoder(list[list[bool]]),
    "i": msgspec.json.Decoder(list[list[int]]),
    "u": msgspec.json.Decoder(list[list[int]]),
    "f": msgspec.json.Decoder(list[list[float]]),
}

Column = tuple[str, str, tuple[int, ...]]  # name, datatype, shape without axis 0


class RawStack(Struct, frozen=True, cache_hash=True):
    """Inputs as little-endian bytes. `sizes` of a plan: the offset and the bytes of each input."""

    columns: tuple[Column, ...]

    def block(self, requests: Sequence[PlannedRequest], rows: int, empty: Empty | None = None) -> Block:
        """One copy of all bytes for each input; none for a lone request without `empty`."""
        arrays = {}
        for k, (name, datatype, tail) in enumerate(self.columns):
            if empty is not None and datatype not in _CONVERTED:
                arrays[name] = _filled(empty((rows, *tail), DTYPES[datatype]), [r.parts[k] for r in requests])
                continue
            data = requests[0].parts[k]
            if len(requests) > 1:
                data = bytearray().join([r.parts[k] for r in requests])  # writable, as arrays are to a Python model
            array = from_bytes(name, datatype, (rows, *tail), memoryview(data))
            arrays[name] = array if empty is None else _placed(array, empty)
        return Block(arrays, rows) if empty is None else Block(arrays, rows, placed=True)


_CONVERTED: Final = ("BOOL", "BF16")  # their bytes are not the array's


def _filled(array: np.ndarray[Any, Any], parts: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The array with the bytes of all parts. Raises ValueError if they do not fit."""
    import numpy as np

    data, at = array.reshape(-1).view(np.uint8).data, 0
    for part in parts:
        data[at : at + len(part)] = part
        at += len(part)
    if at != len(data):
        raise ValueError
    return array


def _placed(array: np.ndarray[Any, Any], empty: Empty | None) -> np.ndarray[Any, Any]:
    """The values in an array of `empty`, if it is given."""
    if empty is None:
        return array
    found: np.ndarray[Any, Any] = empty(array.shape, array.dtype)
    found[...] = array
    return found


class SharedStack(Struct, frozen=True, cache_hash=True):
    """Inputs in shared memory. `parts` of a request: region, offset and size of each input."""

    columns: tuple[Column, ...]

    def block(self, requests: Sequence[PlannedRequest], rows: int, empty: Empty | None = None) -> Block:
        """One copy from the regions into each array."""
        import numpy as np

        arrays = {}
        for k, (name, datatype, tail) in enumerate(self.columns):
            array = arrays[name] = (empty or np.empty)((rows, *tail), DTYPES[datatype])
            data, at = array.reshape(-1).view(np.uint8).data, 0
            for request in requests:
                place: Any = request.parts[k]
                region, offset, size = place
                read_region(name, region, offset, size, data[at : at + size])
                at += size
        return Block(arrays, rows, placed=empty is not None)


class JsonStack(Struct, frozen=True, cache_hash=True):
    """Inputs as lists of JSON numbers. `sizes` of a plan: of each input, the number and the length of its lists."""

    columns: tuple[Column, ...]

    def block(self, requests: Sequence[PlannedRequest], rows: int, empty: Empty | None = None) -> Block:
        """The numbers of all requests, read at once."""
        arrays = {}
        for k, (name, datatype, tail) in enumerate(self.columns):
            lengths = [size[1] for r in requests for size in (r.plan.sizes[k],) * r.plan.sizes[k][0]]
            numbers = _numbers(datatype, [r.parts[k] for r in requests], lengths)
            arrays[name] = _placed(numbers.reshape(rows, *tail), empty)
        return Block(arrays, rows, placed=empty is not None)


def _numbers(datatype: str, texts: Sequence[Any], lengths: list[int]) -> np.ndarray[Any, Any]:
    """The numbers of JSON lists of these lengths, as `arrays.as_array` converts them. Raises for any that it refuses,
    and for some more."""
    import numpy as np

    dtype = np.dtype(DTYPES[datatype])
    lists = _DECODERS[dtype.kind].decode(b"[[" + b"],[".join(texts) + b"]]")
    if list(map(len, lists)) != lengths:
        raise ValueError
    wide = {"b": "?", "f": "d"}.get(dtype.kind, "q")
    found: np.ndarray[Any, Any] = np.empty(sum(lengths), wide)
    struct.pack_into(
        f"{len(found)}{wide}", found.data, 0, *chain.from_iterable(lists)
    )  # a third of the time of numpy's own
    if not found.size:
        raise ValueError
    if dtype.kind == "f":
        if not max(found.max(), -found.min()) < (HALF_MOST if datatype == "FP16" else EXACT):
            raise ValueError
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if found.min() < limits.min or found.max() > limits.max:
            raise ValueError
    return found.astype(dtype, copy=False)


# ---- what identifies a plan


def cut_id(head: bytes) -> tuple[bytes, str | None] | None:
    """(JSON without the text of its id, the id); None if the id cannot be cut."""
    if b'"id"' not in head:
        return head, None
    found = _ID.search(head)
    if found is None:
        return None
    start, end = found.span(1)
    return head[:start] + head[end:], head[start:end].decode("ascii")


def has_cut_id(head: bytes, id: str | None, id_in: Callable[[bytes], str | None]) -> bool:
    """Whether the id that `cut_id` found is the request's own: `id_in` reads that. An equal text could be elsewhere."""
    found = _ID.search(head) if b'"id"' in head else None
    if found is None:
        return id is None
    start = found.start(1)
    return id_in(head[:start] + b"-" + head[start:]) == f"-{id}"


def cut_lists(body: bytes) -> tuple[bytes, list[bytes]] | None:
    """(JSON without the innermost lists of numbers, except shapes; what was inside each list). None if there is none,
    or too many.

    Of two bodies with the same rest, the lists are in the same places: they hold no brackets, and each is read alone.
    """
    outside: list[bytes] = []
    inside: list[bytes] = []
    begin = at = 0
    while (end := body.find(b"]", at)) >= 0:
        start = body.rfind(b"[", at, end)
        at = end + 1
        if start < 0 or body[start + 1 : start + 2] in (b"{", b'"') or body.endswith(b'"shape":', begin, start):
            continue
        if body.endswith(b'"shape": ', begin, start):
            continue
        if len(inside) == MOST_LISTS:
            return None
        outside.append(body[begin:start])
        inside.append(body[start + 1 : end])
        begin = at
    if not inside:
        return None
    outside.append(body[begin:])
    return b"[]".join(outside), inside


# ---- learning


def columns_of(request: TensorRequest, inputs: Mapping[str, TensorSpec]) -> tuple[Column, ...] | None:
    """The columns of a checked request to a model with these inputs; None if one of its arrays holds objects."""
    found = []
    for name, array in request.arrays.items():
        bf16 = name in inputs and inputs[name].datatype == "BF16"  # whose arrays are float32
        found.append((name, "BF16" if bf16 else DATATYPES.get(array.dtype.name, "BYTES"), array.shape[1:]))
    return None if any(datatype == "BYTES" for _, datatype, _ in found) else tuple(found)


def list_sizes(columns: Sequence[Column], rows: int, inside: Sequence[bytes]) -> list[tuple[int, int]] | None:
    """How many lists each column has, and their length: one flat list, or one for each innermost axis. None if the
    lists of the body do not fit."""
    flat = [(1, rows * math.prod(tail)) for _, _, tail in columns]
    if len(inside) == len(columns) and [text.count(b",") + 1 for text in inside] == [n for _, n in flat]:
        return flat
    deep = [(rows * math.prod(tail[:-1]), tail[-1]) if tail else (1, rows) for _, _, tail in columns]
    return deep if sum(count for count, _ in deep) == len(inside) else None


def _reads(plan: RequestPlan, parts: Sequence[Any], request: TensorRequest) -> bool:
    """Whether the plan reads these parts exactly as the request that was decoded alone."""
    try:
        block = plan.stack.block([PlannedRequest(plan, parts, plan.rows)], plan.rows)
    except Exception:
        return False
    found, expected = list(block.arrays.items()), list(request.arrays.items())
    return len(found) == len(expected) and all(
        (name, a.dtype, a.shape, a.tobytes()) == (other, b.dtype, b.shape, b.tobytes())
        for (name, a), (other, b) in zip(found, expected, strict=True)
    )


class Planning(Codec):
    """Base of the codecs that recognize requests, see `ColumnCodec`. By default the values are bytes."""

    plans: PlanMemory
    inputs: Mapping[str, TensorSpec] = {}  # that the model declares
    takes_parameters = False  # of its own, from each request: their plans are not remembered

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """(what identifies the plan of a request, its id, its values); None for an irregular one."""
        return None

    def is_steady(self, item: Item, id: str | None) -> bool:
        """Whether another request with the same plan can differ in nothing but its values and its id."""
        return True

    def plan_context(self, context: Any) -> tuple[Any, bytes]:
        """The context of every request with the plan, and its key."""
        return context, b""

    def plan_of(self, request: TensorRequest, values: Any, item: Item) -> RequestPlan | None:
        """The plan of a request; None for values that are not in columns."""
        columns = columns_of(request, self.inputs)
        if columns is None:
            return None
        sizes, at = [], 0  # one input after the other
        for _, datatype, tail in columns:
            sizes.append((at, request.rows * math.prod(tail) * SIZES[datatype]))
            at += sizes[-1][1]
        return RequestPlan(RawStack(columns), request.rows, request.single, request.named, sizes, at)

    def parts_of(self, plan: RequestPlan, values: Any, item: Item) -> tuple[Sequence[Any], int] | None:
        """(the data of each input, the number of rows); None if the values do not fit."""
        data, at = values
        if len(data) - at != plan.size:
            return None
        rows, start, stop = plan.rows, item.start, item.stop
        if stop < 0:
            return [data[at + o : at + o + n] for o, n in plan.sizes], rows
        if stop > rows:
            return None
        return [data[at + o + start * n // rows : at + o + stop * n // rows] for o, n in plan.sizes], stop - start

    def recognize(self, items: Sequence[Item]) -> list[PlannedRequest | None]:
        """See `ColumnCodec`."""
        return [self.request_of(item, self.cut(item)) for item in items]

    def request_of(self, item: Item, found: tuple[bytes, str | None, Any] | None) -> PlannedRequest | None:
        """The request if its plan is known; `found`: what `cut` found."""
        if found is None or (plan := self.plans.get(found[0])) is None:
            return None
        parts = self.parts_of(plan, found[2], item)
        return None if parts is None else PlannedRequest(plan, parts[0], parts[1], found[1])

    def encode_all(
        self, values: Sequence[Any], items: Sequence[Item], requests: Sequence[PlannedRequest]
    ) -> list[ItemResult]:
        """See `ColumnCodec`."""
        return list(map(self.encode, values, items, requests))

    def learn(self, item: Item, value: Any, context: Any, check: Callable[[Any], TensorRequest]) -> None:
        """See `ColumnCodec`."""
        found = self.cut(item) if item.stop < 0 and not self.takes_parameters else None
        if found is None or len(found[0]) > MOST_KEY_BYTES or found[0] in self.plans:
            return
        try:
            request = check(value)
            if not self.is_steady(item, found[1]):
                return
        except PenstockError:
            return
        plan = self.plan_of(request, found[2], item) if request.rows and request.arrays else None
        parts = None if plan is None else self.parts_of(plan, found[2], item)
        if plan is None or parts is None or not _reads(plan, parts[0], request):
            return
        # one object for equal plans, so that their requests share a block
        plan.stack = next((p.stack for p in self.plans.values() if p.stack == plan.stack), plan.stack)
        plan.context, plan.key = self.plan_context(context)
        self.plans.keep(found[0], plan)


class JsonLists(Planning):
    """Goes before the codec of a JSON format: the values are lists of numbers."""

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """(the body without its lists and its id, the id, the texts of the lists)."""
        found = cut_lists(bytes(item.payload)) if item.stop < 0 else None
        head = None if found is None else cut_id(found[0])
        return None if found is None or head is None else (*head, found[1])

    def plan_of(self, request: TensorRequest, values: Any, item: Item) -> RequestPlan | None:
        """The plan of a request; None for texts, and lists that do not fit."""
        columns = columns_of(request, {})
        sizes = None if columns is None else list_sizes(columns, request.rows, values)
        if columns is None or sizes is None:
            return None
        return RequestPlan(JsonStack(columns), request.rows, request.single, request.named, sizes)

    def recognize(self, items: Sequence[Item]) -> list[PlannedRequest | None]:
        """See `ColumnCodec`. Of a body with the text of the last one around its only list, just that list is cut."""
        found: list[PlannedRequest | None] = []
        last, kind, before, after = None, "", b"", b""
        for item in items:
            body = item.payload
            if last is not None and item.stop < 0 and item.content_type == kind and type(body) is bytes:
                text = body[len(before) : len(body) - len(after)]
                if body.startswith(before) and body.endswith(after) and b"[" not in text:
                    found.append(PlannedRequest(last.plan, (text,), last.rows))
                    continue
            cut = self.cut(item)
            last = self.request_of(item, cut)
            found.append(last)
            if last is not None and cut is not None:
                before, _, after = cut[0].partition(b"[]")
                before, after, kind = before + b"[", b"]" + after, item.content_type
                if len(last.parts) != 1 or before + last.parts[0] + after != body:  # or its id was cut
                    last = None
        return found

    def parts_of(self, plan: RequestPlan, values: Any, item: Item) -> tuple[Sequence[Any], int] | None:
        """(the text of each input: its lists, joined; the number of rows)."""
        if len(plan.sizes) == len(values):
            return values, plan.rows
        parts, at = [], 0
        for count, _ in plan.sizes:
            parts.append(b"],[".join(values[at : at + count]))
            at += count
        return parts, plan.rows


# ---- responses


class OutputColumn(Struct):
    """An output of a whole block: its bytes and the bytes of a row, or the cells of each row as JSON, unbracketed."""

    name: str
    datatype: str
    tail: tuple[int, ...]
    data: memoryview = memoryview(b"")
    row_bytes: int = 0
    texts: list[bytes] = []
    shared: Any = None  # where the client wants it

    def section(self, start: int, rows: int) -> memoryview:
        """The bytes of some rows."""
        return self.data[start * self.row_bytes : (start + rows) * self.row_bytes]


Respond = Callable[[TensorRows, str | None, Item], ItemResult]
"""Makes a response with a range of rows of a block and an id."""


class OutputForm(Struct):
    """What a codec makes of a block: its columns, None if it is encoded row by row, and the functions that make
    responses of each shape."""

    columns: list[OutputColumn] | None
    respond: dict[Any, Respond] = {}


def output_column(name: str, value: Any, declared: str | None, rows: int, binary: bool) -> OutputColumn | None:
    """An output of a block; None for one that is encoded row by row: texts in binary, and what JSON cannot hold."""
    try:
        datatype, array = output_array(name, value, declared)
    except BadOutput:
        return None
    tail = array.shape[1:]
    if not array.size or (datatype == "BYTES" and binary):
        return None
    if datatype == "BYTES":
        try:
            lines = [msgspec.json.encode(texts_of(name, row))[1:-1] for row in array.reshape(rows, -1)]
        except (BadOutput, UnicodeEncodeError):
            return None
        return OutputColumn(name, datatype, tail, texts=lines)
    if binary:
        data = memoryview(to_bytes(name, datatype, array))
        return OutputColumn(name, datatype, tail, data, len(data) // rows)
    text = msgspec.json.encode(array.reshape(rows, -1).tolist())
    if datatype == "BF16" or b"null" in text:  # of NaN and infinity
        return None
    return OutputColumn(name, datatype, tail, texts=text[2:-2].split(b"],["))


def nested_json(columns: Sequence[OutputColumn], found: TensorRows) -> bytes:
    """A range of rows of a block as nested lists; an object of them if the result is named."""
    named, values = found.named or len(columns) > 1, []
    for column in columns:
        rows = column.texts[found.start : found.start + found.rows]
        text = b"[" + b"],[".join(rows) + b"]" if column.tail else b",".join(rows)
        text = text if found.single else b"[" + text + b"]"
        values.append(msgspec.json.encode(column.name) + b":" + text if named else text)
    return b"{" + b",".join(values) + b"}" if named else values[0]
