import pickle
import sys
from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from penstock.errors import BadOutput, BadRequest
from penstock.streamer.redis.codec import MAX_DEPTH, BrokerCodec, MalformedMessage, PicklingCodec, decode, encode
from penstock.types import Item

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXT | st.integers(0, 99), inner),
    max_leaves=20,
)


@given(VALUES)
def test_a_value_survives_the_round_trip(value):
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value)  # a tuple is no list, True no 1


@settings(deadline=None)  # the first message that names a tensor loads torch
@given(st.binary(max_size=200))
def test_foreign_bytes_decode_or_raise_malformed_message(data):
    try:
        decode(data)
    except MalformedMessage:
        pass


@settings(deadline=None)
@given(VALUES, st.data())
def test_a_damaged_message_decodes_or_raises_malformed_message(value, data):
    raw = bytearray(encode([value, np.arange(3), (1, 2)]))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(raw))
    except MalformedMessage:
        pass


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(7, np.int8),
        np.zeros((0, 4), np.uint16),
        np.arange(6).reshape(2, 3).T,
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["a", "bcd"]),
        np.array([b"xy"]),
        np.arange(4, dtype=">i4"),
        np.array(["2026-01-02"], "datetime64[D]"),
        np.ones(3, np.float16),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_an_array_keeps_dtype_shape_and_values_and_is_writable(array):
    back = decode(encode({"x": array}))["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_a_numpy_scalar_stays_a_numpy_scalar():
    back = decode(encode(np.float32(1.5)))
    assert back == 1.5
    assert type(back) is np.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64", "complex64"])
def test_a_tensor_keeps_dtype_shape_and_values(dtype):
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(2, 3), torch.zeros(()), torch.empty(0, 4), torch.arange(6.0).reshape(2, 3).T):
        tensor = tensor.to(getattr(torch, dtype))
        back = decode(encode([tensor]))[0]
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_a_tensor_on_another_device_is_refused_with_a_hint():
    torch = pytest.importorskip("torch")
    with pytest.raises(BadRequest, match=r"give tensor\.cpu\(\)"):
        encode(torch.empty(2, device="meta"))


def test_a_tensor_without_torch_is_malformed_with_the_reason(monkeypatch):
    torch = pytest.importorskip("torch")
    data = encode(torch.ones(1))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MalformedMessage, match="torch is not installed"):
        decode(data)


class Unknown:
    def __eq__(self, other):
        return type(other) is Unknown


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Unknown(), "Unknown"),
        ([{"deep": Unknown()}], "Unknown"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, [("a", int)]), "dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        ({(1, 2): 3}, "tuple as key"),
        ({np.str_("a"): 3}, "str_ as key"),
        (2**70, "OverflowError"),
        ("\ud800", "UnicodeEncodeError"),
        (lambda: 0, "function"),
        (memoryview(b"x"), "memoryview"),
        (type("Text", (str,), {})("x"), "Text"),
        (defaultdict(int), "defaultdict"),
    ],
)
def test_an_unsupported_type_is_refused_and_named(value, named):
    with pytest.raises(BadRequest, match=named):
        encode(value)


@pytest.mark.parametrize("value", [Unknown(), {(1, 2): [Unknown()]}, [2**70], {"a": defaultdict(int, a=1)}])
def test_a_pickle_is_written_and_read_only_where_it_is_allowed(value):
    with pytest.raises(BadRequest, match="cannot be sent over the broker"):
        encode(value)
    data = encode(value, allow_pickle=True)
    assert decode(data, allow_pickle=True) == value
    with pytest.raises(MalformedMessage, match="a pickle: only allow_pickle accepts it"):
        decode(data)
    with pytest.raises(MalformedMessage, match="a pickle"):
        BrokerCodec("m", "1").decode(Item(data))
    codec = PicklingCodec("m", "1")
    assert codec.decode(Item(codec.encode(value, Item(b""), None).body))[0] == value
    with pytest.raises(BadRequest, match=r"function.* pickling it raised"):
        encode(lambda: 0, allow_pickle=True)


def test_nesting_is_bounded():
    value: list = []
    for _ in range(MAX_DEPTH):
        value = [value]
    with pytest.raises(BadRequest, match="nested deeper"):
        encode([value])


class Bomb:
    def __reduce__(self):
        return (sys.exit, (1,))


def _array(dtype, shape, raw):
    head = msgspec.msgpack.encode((dtype, shape))
    return msgspec.msgpack.encode(Ext(2, len(head).to_bytes(2, "little") + head + raw))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps(Bomb()),
        pickle.dumps({"task_id": 1}, 0),
        b"\x91" * 5000,
        msgspec.msgpack.encode(1) + b"\x00",
        msgspec.msgpack.encode(Ext(99, b"")),
        _array("|O", (1,), b"\0" * 8),
        _array("<f4", (2,), b"\0" * 4),
        _array("<f4", (-1, -1), b"\0" * 4),
        _array("<f4", (2**40, 2**40), b""),
        _array("<U0", (2**62,), b""),
        _array("<f4,<f4", (1,), b"\0" * 8),
        _array("<f4", (1,) * 40, b"\0" * 4),
        msgspec.msgpack.encode(Ext(2, b"\xff")),
        msgspec.msgpack.encode(Ext(1, b"\x01")),
    ],
    ids=range(15),
)
def test_bytes_that_encode_cannot_produce_are_malformed(data):
    with pytest.raises(MalformedMessage, match="the message cannot be read"):
        decode(data)


def test_the_codec_reads_shared_memory_and_returns_a_copy():
    shared = bytearray(encode({"x": np.arange(3), "y": b"abc"}))
    codec = BrokerCodec("m", "1")
    value, _ = codec.decode(Item(memoryview(shared).toreadonly()))
    shared[:] = bytes(len(shared))
    assert value["x"].tolist() == [0, 1, 2]
    assert value["y"] == b"abc"
    result = codec.encode(value["x"], Item(b""), None)
    assert decode(codec.join([result]).body).tolist() == [0, 1, 2]


def test_an_unsupported_result_is_a_bad_output():
    with pytest.raises(BadOutput, match=r"the model's answer cannot be sent: a .*Unknown"):
        BrokerCodec("m", "1").encode(Unknown(), Item(b""), None)
