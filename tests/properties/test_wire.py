"""Tensors on the wire: whatever goes in comes out, in every form; and whatever else comes is refused, at no cost."""

import itertools
import json
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.serving.protocols.oip_binary import OipBinaryCodec, OipNpyCodec, write_npy_head
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, decode_answer, encode_arrays, encode_request
from penstock.types import DTYPES, Item, ItemResult, ModelMetadata, TensorSpec

Array = np.ndarray[Any, Any]
NUMBERS = [d for d in DTYPES if d not in ("BYTES", "BF16")]


def binary(head: bytes, buffers: Any) -> Item:
    body = memoryview(b"".join([head, *buffers])).toreadonly()
    return Item(body, "oip_binary", headers=[(HEADER_LENGTH.encode(), b"%d" % len(head))])


def answer_of(result: ItemResult) -> Any:
    length = dict(result.headers or ()).get(HEADER_LENGTH)
    return decode_answer(result.body, None if length is None else int(length))


def same(found: Array, given: Array) -> bool:
    if given.dtype.kind == "f":  # bit by bit: which NaN it is must not change
        return found.dtype == given.dtype and found.shape == given.shape and found.tobytes() == given.tobytes()
    return found.dtype == given.dtype and np.array_equal(found, given)


@st.composite
def tensors(draw: st.DrawFn, rows: int | None = None, finite: bool = False) -> Array:
    """An array of any datatype, rows first; other axes may be 0."""
    rows = draw(st.integers(1, 5)) if rows is None else rows
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=3)))
    datatype = draw(st.sampled_from([*NUMBERS, "BYTES"]))
    if datatype == "BYTES":
        cells = draw(st.lists(st.text(max_size=5), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        array = np.empty(len(cells), object)
        array[:] = [cell.encode() for cell in cells]
        return array.reshape(shape)
    dtype = np.dtype(DTYPES[datatype])
    elements = {"allow_nan": False, "allow_infinity": False} if finite and dtype.kind == "f" else None
    return draw(npst.arrays(dtype, shape, elements=elements))


@st.composite
def named(draw: st.DrawFn, finite: bool = False) -> dict[str, Array]:
    rows = draw(st.integers(1, 5))
    return {name: draw(tensors(rows, finite)) for name in draw(st.sets(st.sampled_from("abc€"), min_size=1))}


@given(named())
def test_requests_and_answers_in_binary_hold_what_was_put_in(arrays: dict[str, Array]) -> None:
    codec = OipBinaryCodec("m", "1")
    item = binary(*encode_arrays(arrays, binary_outputs=True))
    found, context = codec.decode(item)
    assert list(found) == list(arrays)
    assert all(same(found[name], arrays[name]) for name in arrays)
    outputs = answer_of(codec.encode(found, item, context)).outputs
    assert all(same(outputs[name], arrays[name]) for name in arrays)
    first = next(iter(arrays.values()))
    rows, shape = OipBinaryCodec.peek(item, item.payload)
    assert rows == len(first)
    assert shape


@given(named(finite=True))
def test_requests_and_answers_in_json_hold_what_was_put_in(arrays: dict[str, Array]) -> None:
    item = binary(*encode_arrays(arrays))
    answer = OipBinaryCodec("m", "1").encode(arrays, item, None)
    outputs = answer_of(answer).outputs
    assert all(same(outputs[name], arrays[name]) for name in arrays)
    inputs = json.loads(answer.body)["outputs"]  # tensors look alike on both ways
    found, _ = OipJsonCodec("m", "1").decode(Item(json.dumps({"inputs": inputs}).encode()))
    assert all(same(found[name], arrays[name]) for name in arrays)


@given(st.integers(0, 2**16 - 1).filter(lambda n: (n & 0x7F80) != 0x7F80 or not n & 0x7F), st.booleans())
def test_every_bf16_number_comes_through(bits: int, split: bool) -> None:
    codec = OipBinaryCodec("m", "1", ModelMetadata("m", "1", outputs=(TensorSpec("x", "BF16", (-1,)),)))
    data = bits.to_bytes(2, "little") * 2
    item = binary(*encode_request([("x", "BF16", (2,), data)], binary_outputs=True))
    found, context = codec.decode(item)
    assert found["x"].dtype == np.float32
    assert codec.encode(found, item, context).body.endswith(data)


@given(st.data(), named(finite=True), st.booleans())
def test_the_joined_answers_to_the_parts_are_the_answer_to_the_whole(data, arrays, in_binary) -> None:
    codec = OipBinaryCodec("m", "1", ModelMetadata("m", "1", parameters={"revision": "r"}))
    item = binary(*encode_arrays(arrays, binary_outputs=in_binary, id="q"))
    rows = len(next(iter(arrays.values())))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=rows)) | {0, rows})
    found, context = codec.decode(item)
    whole = codec.encode(found, item, context)
    parts = []
    for item.start, item.stop in itertools.pairwise(cuts):
        found, context = codec.decode(item)
        parts.append(codec.encode(found, item, context))
    assert codec.join(parts) == whole


@given(tensors().filter(lambda array: array.dtype != object), st.sampled_from("CF"))
def test_an_array_file_holds_what_was_put_in(array: Array, order: Any) -> None:
    item = Item(b"", headers=[(b"accept", b"application/x-npy")])
    codec = OipNpyCodec("m", "1")
    body = codec.encode(np.asarray(array, order=order), item, None).body
    found, _ = codec.decode(Item(body))
    assert same(found["input_0"], array)
    assert OipNpyCodec.peek(Item(body), body)[0] in (len(array), 1)


# ---- what others may send


class Canary:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def valid_requests(canary: bytes) -> list[tuple[Any, bytes, int]]:
    """(codec, body, length of the JSON), 0 where there is no such length."""
    index = np.arange(3)
    found = []
    for head, buffers in (
        encode_arrays({"frames": np.zeros((3, 2, 2, 3), np.uint8), "frame_index": index}),
        encode_request([("jpeg", "BYTES", (3,), [canary, b"", b"\xff" * 9]), ("n", "BF16", (3,), bytes(6))], id="q"),
        encode_arrays({"b": index > 1, "f": index.astype(np.float16), "s": np.array(["a", "b", "c"])}),
    ):
        found.append((OipBinaryCodec("m", "1"), b"".join([head, *buffers]), len(head)))
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4.5]]}
    found.append((OipJsonCodec("m", "1"), json.dumps({"inputs": [tensor]}).encode(), 0))
    found.append((OipNpyCodec("m", "1"), write_npy_head("FP32", (2, 3)) + bytes(24), 0))
    found.append((OipNpyCodec("m", "1"), b"\x93NUMPY\1\0\x46\0{'descr': '|O', 'fortran_order': False}" + canary, 0))
    return found


WORDS = [
    b"9" * 18, b"-1", b"[", b"]", b"{", b"null", b"0", b"1e999", b"true", b'"', b"\xff", b"\0", b"\x80\x05", b"BYTES",
    b"UINT64", b"FP64", b"BOOL", b"4294967296", b"18446744073709551615", b",", b":", b"'|O'", b"(", b")",
]  # fmt: skip


def damaged(body: bytes, rng: random.Random) -> bytes:
    found = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            found[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del found[at : at + rng.randrange(1, 20)]
        elif kind == 2:
            found[at:at] = rng.choice(WORDS)
        elif kind == 3:
            found[at : at + rng.randrange(8)] = rng.choice(WORDS)
        else:  # digits are where sizes are
            digits = [n for n, byte in enumerate(found) if 48 <= byte <= 57] or [0]
            place = rng.choice(digits)
            found[place : place + 1] = rng.choice(WORDS)
    return bytes(found)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_is_taken_or_refused_in_bounded_memory_and_never_loaded(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    canary = tmp_path / "canary"
    song = pickle.dumps(Canary(canary))
    bodies = valid_requests(song)
    taken = refused = 0
    for round in range(6000):
        codec, body, length = bodies[round % len(bodies)]
        if length and rng.random() < 0.5:  # the length is right for what was the JSON
            head = damaged(body[:length], rng)
            payload, length = head + body[length:], len(head)
        else:
            payload = rng.choice([damaged(body, rng), damaged(body, rng), rng.randbytes(rng.randrange(200)), song])
        headers = [(b"inference-header-content-length", b"%d" % length)] if length else None
        if round % 200 == 0:  # it makes all else slow
            tracemalloc.start()
        try:
            codec.decode(Item(payload, headers=headers))
            taken += 1
        except BadRequest:
            refused += 1
        if tracemalloc.is_tracing():
            assert tracemalloc.get_traced_memory()[1] < 2**20
            tracemalloc.stop()
        for codec_class in (OipBinaryCodec, OipNpyCodec):
            rows, _ = codec_class.peek(Item(payload, headers=headers), payload) or (1, "")
            assert rows <= max(1, len(payload))
    assert not canary.exists()
    assert taken > 50
    assert refused > 500


@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(-5, 400)))
@settings(max_examples=200)
def test_whatever_a_server_answers_is_an_answer_or_a_bad_output(body: bytes, length: int | None) -> None:
    with pytest.raises(BadOutput):
        decode_answer(body, length)


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_answer_is_an_answer_or_a_bad_output(seed: int) -> None:
    rng = random.Random(seed)
    codec = OipBinaryCodec("m", "1", ModelMetadata("m", "1", parameters={"revision": "r"}))
    item = binary(*encode_request([("x", "INT32", (3,), bytes(12))]))
    for in_binary in (False, True):
        _, context = codec.decode(item)
        context.binary = in_binary
        result = codec.encode({"caption": ["a", "bc", ""], "frame_index": np.arange(3)}, item, context)
        length = dict(result.headers or ()).get(HEADER_LENGTH)
        for _ in range(500):
            try:
                answer = decode_answer(damaged(result.body, rng), None if length is None else int(length))
            except BadOutput:
                continue
            assert all(isinstance(array, np.ndarray) for array in answer.outputs.values())
