"""Calls of the Thrift service as its libraries write them: complete, in pieces and broken."""

import io
import struct
from typing import Any

import numpy as np
import pytest
import thriftpy2
from hypothesis import given, settings
from hypothesis import strategies as st
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TMemoryBuffer
from thriftpy2.transport.memory import TCyMemoryBuffer

from penstock.errors import BadOutput, BadRequest, PayloadTooLarge
from penstock.torchpipe import thrift_protocol as thrift
from penstock.types import Item

IDL = """
struct InferenceParams { 1: required string uuid, 2: required binary data, 3: optional list<map<string, i32>> later,
                         4: optional set<double> numbers, 5: optional InferenceParams inner }
struct InferenceResult { 1: required string label, 2: required double score }
service InferenceService { void ping(), InferenceResult infer_batch(1: InferenceParams params, 2: string also) }
"""
SERVICE = thriftpy2.load_fp(io.StringIO(IDL), "later_thrift")
MOST = 2**20


def written(method: str, args: Any, seqid: int = 7, strict: bool = True) -> bytes:
    buffer = TMemoryBuffer()
    protocol = TBinaryProtocol(buffer, strict_write=strict)
    protocol.write_message_begin(method, thrift.CALL, seqid)
    args.write(protocol)
    protocol.write_message_end()
    return bytes(buffer.getvalue())


def infer(data: bytes, uuid: str = "a", strict: bool = True, **more: Any) -> bytes:
    service = SERVICE.InferenceService
    params = SERVICE.InferenceParams(uuid=uuid, data=data, **more)
    return written("infer_batch", service.infer_batch_args(params=params, also="x"), strict=strict)


def answered(message: bytes, result: Any) -> Any:
    """An answer as a client of thriftpy2 reads it: the result or the exception."""
    protocol = TCyBinaryProtocol(TCyMemoryBuffer(message))
    name, kind, seqid = protocol.read_message_begin()
    assert (name, seqid) == ("infer_batch", 7)
    if kind == thrift.EXCEPTION:
        result = TApplicationException()
    result.read(protocol)
    return result


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_written_by_the_library_is_read_at_any_offset(strict: bool) -> None:
    inner = SERVICE.InferenceParams(uuid="i", data=b"other")
    message = infer(b"\xff\xd8 jpeg", "id-1", strict, later=[{"a": 1}, {}], numbers={1.5}, inner=inner)
    call = thrift.ThriftCall()
    assert call.read(b"##" + message + b"next", 2, MOST)
    assert (call.method, call.kind if strict else 1, call.seqid, call.uuid) == (b"infer_batch", 1, 7, b"id-1")
    assert call.data is not None
    assert (b"##" + message)[slice(*call.data)] == b"\xff\xd8 jpeg"
    assert call.end == 2 + len(message)


@given(data=st.binary(max_size=300), cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_an_incomplete_call_states_the_bytes_it_needs_and_never_too_many(data: bytes, cut: float) -> None:
    message = infer(data, numbers={2.0})
    part = message[: int(cut * len(message))]
    call = thrift.ThriftCall()
    assert not call.read(part, 0, MOST)
    assert len(part) < call.need <= len(message)


def test_the_needed_bytes_include_the_whole_data() -> None:
    message = infer(b"x" * 50_000)
    call = thrift.ThriftCall()
    walks = 0
    while not call.read(message[: call.need], 0, MOST):
        walks += 1
    assert walks <= 20  # one for each thing in it, none for its 50,000 bytes
    head = thrift.ThriftCall()
    assert not head.read(message[:60], 0, MOST)
    assert head.need > 50_000


@given(message=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_call_or_refused_or_waited_for(message: bytes) -> None:
    check(message)


@given(at=st.integers(0, 70), value=st.integers(0, 255), second=st.integers(0, 70), other=st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_call_with_changed_bytes_is_read_or_rejected_or_incomplete(
    at: int, value: int, second: int, other: int
) -> None:
    message = bytearray(infer(b"data", numbers={1.0}))
    message[at % len(message)] = value
    message[second % len(message)] = other
    check(bytes(message))


def check(message: bytes) -> None:
    call = thrift.ThriftCall()
    try:
        whole = call.read(message, 0, MOST)
    except BadRequest:
        return
    if whole:
        assert 0 < call.end <= len(message)
        assert call.data is None or 0 <= call.data[0] <= call.data[1] < call.end
    else:
        assert len(message) < call.need <= MOST + thrift.HEAD_BYTES


def strung(size: int) -> bytes:
    """A call whose data declares a number of bytes."""
    return infer(b"")[: infer(b"").index(b"\x0b\x00\x02") + 3] + struct.pack(">i", size)


def test_data_that_is_too_long_is_rejected_before_it_arrives() -> None:
    with pytest.raises(PayloadTooLarge, match=r"the data has 2000000 bytes, at most 1048576 are accepted"):
        thrift.ThriftCall().read(strung(2_000_000), 0, MOST)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (strung(-5), "found a length of -5"),
        (b"\x82\x21\x01\x00" + bytes(20), "found version 0x8221"),
        (b"\x80\x01\x00\x01" + struct.pack(">i", -1), "a name of -1 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "a name of 1195725856 bytes"),
        (infer(b"")[:23] + b"\x07\x00\x09", "of type 7"),
    ],
)
def test_invalid_messages_are_rejected_with_a_description(message: bytes, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        thrift.ThriftCall().read(message, 0, MOST)


@pytest.mark.parametrize(
    "field",
    [
        b"\x0f\x00\x09\x0c" + struct.pack(">i", 2**31 - 1) + b"\x00" * 1000,  # empty structs
        (b"\x0c\x00\x09") * 200,  # structs in structs
        b"\x02\x00\x09\x01" * 200,  # many fields
        (b"\x0f\x00\x09" + b"\x0f\x00\x00\x00\x01" * 200),  # lists in lists
    ],
)
def test_a_message_with_too_many_fields_is_rejected(field: bytes) -> None:
    with pytest.raises(BadRequest, match="more fields than any call"):
        thrift.ThriftCall().read(infer(b"")[:23] + field, 0, MOST)


def test_an_oversized_list_of_numbers_is_rejected_before_it_arrives() -> None:
    field = b"\x0f\x00\x09\x0a" + struct.pack(">i", 2**31 - 1)
    with pytest.raises(PayloadTooLarge):
        thrift.ThriftCall().read(infer(b"")[:23] + field, 0, MOST)


def test_frames_are_distinguished_from_messages() -> None:
    for message in (infer(b"x"), infer(b"x", strict=False)):
        assert not thrift.is_framed(message)
        assert thrift.is_framed(struct.pack(">i", len(message)) + message)


def read_call() -> thrift.ThriftCall:
    call = thrift.ThriftCall()
    assert call.read(infer(b"x"), 0, MOST)
    return call


def test_a_result_is_read_by_the_library() -> None:
    message = thrift.reply(read_call(), thrift.pack_result("é 3", 0.25))
    result = answered(message, SERVICE.InferenceService.infer_batch_result())
    assert (result.success.label, result.success.score) == ("é 3", 0.25)


def test_an_exception_is_read_by_the_library() -> None:
    error = answered(thrift.exception(read_call(), thrift.PROTOCOL_ERROR, "bad_request: é"), None)
    assert (error.type, error.message) == (TApplicationException.PROTOCOL_ERROR, "bad_request: é")


def encoded(value: Any) -> tuple[str, float]:
    codec = thrift.ThriftCodec("m", "1")
    body = codec.encode(value, Item(b""), None).body
    result = SERVICE.InferenceResult()
    result.read(TCyBinaryProtocol(TCyMemoryBuffer(body)))
    return result.label, result.score


SCORES = np.array([[0.5, 3.0, -1.0]], np.float32)


@pytest.mark.parametrize("value", [SCORES, SCORES[0], SCORES.tolist(), SCORES.astype(np.float16), {"result": SCORES}])
def test_scores_become_the_best_class_and_its_softmax(value: Any) -> None:
    label, score = encoded(value)
    wanted = np.exp(SCORES) / np.exp(SCORES).sum()
    assert label == "1"
    assert score == pytest.approx(float(wanted.max()), rel=1e-6)


def test_large_scores_do_not_overflow() -> None:
    assert encoded(np.array([1e30, -1e30, 0], np.float32)) == ("0", 1.0)


def test_a_label_and_a_score_are_returned_unchanged() -> None:
    assert encoded({"label": "cat", "score": 0.5, "result": SCORES}) == ("cat", 0.5)
    assert encoded({"label": np.array([7]), "score": np.float32(0.25)}) == ("7", 0.25)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros((2, 3)), r"ndarray \[2, 3\]"),
        (np.zeros((1, 0)), r"ndarray \[1, 0\]"),
        ("cat", "str"),
        (None, "NoneType"),
        (1.5, "float"),
        ({"label": "cat"}, "NoneType"),
        ([[1], [2, 3]], "list"),
    ],
)
def test_invalid_scores_are_rejected_with_a_description(value: Any, found: str) -> None:
    with pytest.raises(BadOutput, match=f"found {found}, expected scores of classes"):
        encoded(value)


@pytest.mark.parametrize(("value", "found"), [([1.0, float("nan")], "nan"), ([float("inf"), 0.0], "inf")])
def test_scores_that_have_no_softmax_are_refused(value: list[float], found: str) -> None:
    with pytest.raises(BadOutput, match=f"found the score {found} for class"):
        encoded(np.array(value, np.float32))


def test_a_non_numeric_score_is_rejected() -> None:
    with pytest.raises(BadOutput, match="found a score that is str"):
        encoded({"label": "cat", "score": "high"})
