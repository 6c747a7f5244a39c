import json
import math
from base64 import b64encode
from datetime import UTC, date, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.client.endpoint import ConnectionLost, ResponseTooLarge
from penstock.client.response import MAX_PAUSE_S, HttpResponse, UnexpectedResponse, error_of, retry_after_s
from penstock.client.transport import PartReader, decode_value, encode_value, raw_inputs
from penstock.errors import (
    BadRequest,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    Quarantined,
    QueueFull,
    SequenceLost,
)
from penstock.serving.http.responses import error_result, stream_part, stream_start, stream_type
from penstock.serving.protocols.native import NativeCodec
from penstock.serving.protocols.oip_routes import error_body as oip_error_body
from penstock.serving.protocols.route import error_body
from penstock.types import DATATYPES, Item, ItemResult

CODEC = NativeCodec("m", "1")
plain = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
values = plain | st.binary()


@given(values)
def test_the_server_reads_what_the_client_sends_and_the_client_what_the_server_answers(value):
    kind, body = encode_value(value)
    received, _ = CODEC.decode(Item(bytes(body), content_type=kind))
    assert received == value
    answer = CODEC.encode(value, Item(b""), None)
    assert decode_value({"content-type": answer.content_type}, bytes(answer.body)) == value


def test_arrays_dates_and_models_are_json():
    class Point(msgspec.Struct):
        x: int

    class Pydantic:
        def model_dump(self, mode: str) -> dict[str, str]:
            return {"mode": mode}

    assert encode_value({"a": np.arange(3), "b": np.float32(0.5)}) == ("application/json", b'{"a":[0,1,2],"b":0.5}')
    assert encode_value([Point(1), date(2026, 1, 2)])[1] == b'[{"x":1},"2026-01-02"]'
    assert encode_value(Pydantic())[1] == b'{"mode":"json"}'
    assert encode_value(b"\xff\xd8", "image/jpeg") == ("image/jpeg", b"\xff\xd8")


@pytest.mark.parametrize("value", [math.nan, [np.array([np.inf])], object(), 2**70 * 1.0j, "\ud83d", {"a": "\ud83d"}])
def test_a_value_that_json_cannot_hold_is_refused(value: Any):
    with pytest.raises(BadRequest, match="the value is or holds"):
        encode_value(value)


def test_a_body_without_a_type_is_guessed_and_a_wrong_one_reported():
    assert decode_value({}, b'{"a": 1}') == {"a": 1}
    assert decode_value({}, b"tabby cat") == "tabby cat"
    assert decode_value({}, b"\xff\xd8") == b"\xff\xd8"
    assert decode_value({"content-type": "application/json"}, b"") is None
    for kind, body in (("application/json", b"<html>"), ("text/plain", b"\xff"), ("text/plain; charset=x", b"a")):
        with pytest.raises(UnexpectedResponse):
            decode_value({"content-type": kind}, body)


# ---- streams


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@given(st.lists(plain, max_size=5), st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_json_parts_survive_any_framing(parts, cuts, sse):
    results = [CODEC.encode(part, Item(b""), None) for part in parts if not isinstance(part, str)]
    data = b"".join(stream_part(result, sse) for result in results)
    headers = {"content-type": stream_type("application/json", sse), "x-part-type": "application/json"}
    reader = PartReader(headers, 2**20)
    found = [part for piece in cut(data, cuts) for part in reader.feed(piece)] + reader.end()
    assert found == [part for part in parts if not isinstance(part, str)]


texts = st.text(st.characters(exclude_characters="\r", codec="utf-8"), min_size=1)


@given(st.lists(texts, max_size=5), st.lists(st.integers(0, 200), max_size=9), st.booleans())
def test_text_parts_survive_any_framing(parts, cuts, sse):
    data = b"".join(stream_part(CODEC.encode(part, Item(b""), None), sse) for part in parts)
    kind = "text/plain; charset=utf-8"
    reader = PartReader({"content-type": stream_type(kind, sse), "x-part-type": kind}, 2**20)
    found = [part for piece in cut(data, cuts) for part in reader.feed(piece)] + reader.end()
    assert found == parts if sse else "".join(found) == "".join(parts)


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r", codec="utf-8"), min_size=1) | st.binary(min_size=1), max_size=5
    ),
    st.lists(st.integers(0, 200), max_size=9),
)
@example([b"RIFF\x00\r\n\xff", b"\n", b"\xf0\x9f"], [])
@example(["text", b"\xff", "3"], [])
@example([b"text", "\u00e9"], [])
def test_parts_of_text_and_bytes_survive_as_events(parts, cuts):
    results = [CODEC.encode(part, Item(b""), None) for part in parts]
    data = b"".join(stream_part(result, True) for result in results)
    assert data.decode() == data.decode().replace("\r", "")
    headers = dict(stream_start(results[0], True).headers) if results else {}
    if parts and isinstance(parts[0], bytes):
        assert headers == {"x-part-type": "application/octet-stream;base64"}
    reader = PartReader({"content-type": "text/event-stream", **headers}, 2**20)
    found = [part for piece in cut(data, cuts) for part in reader.feed(piece)] + reader.end()
    for part, kept in zip(found, parts, strict=True):
        assert part == kept or (isinstance(kept, str) and isinstance(parts[0], bytes) and json.loads(kept) == part)


@pytest.mark.parametrize(
    ("kind", "body", "base64"),
    [
        ("", b"a", False),
        ("", b"\xff", True),
        ("text/csv; charset=latin-1", b"\xe9", True),
        ("Application/XML", b"<a/>", False),
        ("audio/wav", b"RIFF", True),
        ("application/x-protobuf", b"\x08\x01", True),
    ],
)
def test_a_part_that_is_no_text_is_an_event_in_base64_with_its_own_type(kind, body, base64):
    result = ItemResult(body, kind)
    event = b"event: base64\ndata: %b\n\n" % b64encode(body) if base64 else b"data: %b\n\n" % body
    assert stream_part(result, True) == event
    if kind:
        assert stream_start(result, True).headers == [("x-part-type", f"{kind};base64" if base64 else kind)]
    assert stream_part(result, False) == body


def test_events_of_other_servers_comments_and_errors():
    reader = PartReader({"content-type": "text/event-stream"}, 100)
    assert reader.feed(b': hello\r\nid: 7\r\ndata: {"a":\r\ndata: 1}\r\n\r\ndata:word\n\n\n') == [{"a": 1}, "word"]
    with pytest.raises(SequenceLost, match="gone"):
        reader.feed(b'event: error\ndata: {"error":{"code":"sequence_lost","message":"gone"}}\n\n')
    with pytest.raises(ItemFailed, match="broken"):
        reader.feed(b"event: error\ndata: broken\n\n")


def test_a_line_may_be_the_error_of_a_stream_that_breaks_off():
    reader = PartReader({"content-type": "application/x-ndjson"}, 100)
    line = b'{"error":{"code":"item_failed","message":"oh"}}\n'
    assert reader.feed(b"1\n" + line) == [1]
    error = reader.error()
    assert (type(error), error.message) == (ItemFailed, "oh")
    assert reader.feed(b"2\n") == [{"error": {"code": "item_failed", "message": "oh"}}, 2]  # it was a part
    assert reader.error() is None
    assert reader.feed(line) == []
    assert reader.end() == [{"error": {"code": "item_failed", "message": "oh"}}]


def test_a_part_without_an_end_is_bounded():
    for kind in ("text/event-stream", "application/x-ndjson"):
        reader = PartReader({"content-type": kind}, 100)
        reader.feed(b"x" * 90)
        with pytest.raises(ResponseTooLarge):
            reader.feed(b"x" * 11)
    reader = PartReader({"content-type": "text/event-stream"}, 100)
    reader.feed(b"data: 0123456789\n" * 10)
    with pytest.raises(ResponseTooLarge):
        reader.feed(b"data: 0\n")
    with pytest.raises(UnexpectedResponse, match="base64"):
        PartReader({"content-type": "text/event-stream"}, 100).feed(b"event: base64\ndata: a\n\n")


# ---- errors


def answered(result: ItemResult) -> HttpResponse:
    return HttpResponse(result.status, dict(result.headers or []), bytes(result.body))


@pytest.mark.parametrize("body", [error_body, oip_error_body])
@pytest.mark.parametrize("kind", [BadRequest, ModelNotFound, Quarantined, QueueFull, SequenceLost, ItemFailed])
def test_an_error_keeps_its_class_in_every_protocol(kind, body):
    error = error_of(answered(error_result(kind("what is wrong", retry_after_s=7.0), body)), "http://h")
    assert (type(error), error.message) == (kind, "what is wrong")
    assert error.retry_after_s == (7.0 if kind is QueueFull else None)


FOREIGN = [
    (404, b'{"code": 404, "type": "ModelNotFoundException", "message": "Model not found: x"}', ModelNotFound),
    (503, b'{"code": 503, "type": "ServiceUnavailableException", "message": "no worker"}', ModelNotReady),
    (503, b'{"code": 503, "type": "InternalServerException", "message": "Prediction failed"}', ItemFailed),
    (400, b'{"error": "unexpected datatype"}', BadRequest),
    (500, b'{"error": "failed"}', ItemFailed),
    (502, b"<html>bad gateway</html>", ConnectionLost),
    (404, b'{"error": {"code": "not_found", "message": "no route"}}', NotSupported),
    (302, b"", UnexpectedResponse),
    (418, b'{"error": []}', BadRequest),
    (599, b"\xff\x00", ItemFailed),
]


@pytest.mark.parametrize(("status", "body", "kind"), FOREIGN)
def test_errors_of_other_servers_have_the_class_of_their_status(status, body, kind):
    error = error_of(HttpResponse(status, {"retry-after": "nonsense"}, body), "http://h")
    assert (type(error), error.status, error.retry_after_s) == (kind, status, None)


def test_retry_after_is_read_in_both_forms_and_bounded():
    assert retry_after_s("2") == 2.0
    assert retry_after_s(" 0.5 ") == 0.5
    assert retry_after_s("-3") == 0.0
    assert retry_after_s("1e9") == MAX_PAUSE_S
    soon = retry_after_s(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True))
    assert soon is not None
    assert 50 < soon <= 60
    assert retry_after_s(format_datetime(datetime.now(UTC) - timedelta(days=9), usegmt=True)) == 0.0
    for nonsense in ("", "soon", "nan", "Tue, 99 Foo 2026", "inf"):
        assert retry_after_s(nonsense) is None


@given(st.text())
def test_any_retry_after_is_seconds_or_none(value: str):
    found = retry_after_s(value)
    assert found is None or 0.0 <= found <= MAX_PAUSE_S


# ---- tensors


def test_every_datatype_has_its_raw_bytes():
    for dtype, datatype in DATATYPES.items():
        array = np.array([[b"a"], [b"bc"]], object) if dtype == "object" else np.array([[1], [0]], dtype)
        (found,) = raw_inputs({"x": array})
        assert found[:3] == ("x", datatype, (2, 1))
        if dtype != "object":
            assert bytes(found[3]) == array.tobytes()


def test_contiguous_arrays_and_tensors_are_not_copied():
    torch = pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32)
    tensor = torch.arange(6, dtype=torch.bfloat16)
    shared = [np.frombuffer(raw_inputs({"x": value})[0][3], np.uint8) for value in (array, tensor)]
    assert np.shares_memory(shared[0], array)
    assert shared[1].ctypes.data == tensor.data_ptr()
    assert raw_inputs({"x": tensor.reshape(2, 3)})[0][:3] == ("x", "BF16", (2, 3))
    assert bytes(raw_inputs({"x": tensor.float().requires_grad_()})[0][3]) == array.tobytes()
    assert raw_inputs({"x": torch.ones(3, 2).T})[0][2] == (2, 3)


@pytest.mark.parametrize("value", [np.ones(2, np.complex64), [[1], [2, 3]], object()])
def test_what_is_no_tensor_is_refused_by_name(value):
    with pytest.raises(BadRequest, match="input 'x'"):
        raw_inputs({"x": value})


def test_inputs_must_be_named():
    for inputs in ({}, [1, 2], np.ones(3)):
        with pytest.raises(BadRequest, match="expected a dict"):
            raw_inputs(inputs)  # type: ignore[arg-type]
