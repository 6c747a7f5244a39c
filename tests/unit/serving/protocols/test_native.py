"""The native codec: content types in, results out."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadOutput, BadRequest, ItemFailed
from penstock.serving.protocols.native import NativeCodec
from penstock.serving.protocols.route import error_body
from penstock.types import Item, ItemResult, Response

CODEC = NativeCodec("m", "1")


def decode(body, content_type, **more):
    return CODEC.decode(Item(body, "native", content_type, **more))[0]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
def test_json_becomes_an_object(kind):
    assert decode(b'{"a": [1, null]}', kind) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"a": [1, 2', "byte 11"),
        (b'{"a": x}', "byte 6"),
        (b"[1] 2", "byte 4|byte 5"),
        (b"", "byte 0"),
        (b'{"a": "\xff"}', "byte 7"),
        (b'{"a":"\\ud83d"}', r"holds half a surrogate pair \(byte 6\)"),
        (b'["\\\\\\ud83dabc"]', r"holds half a surrogate pair \(byte 4\)"),
        (b'{"\\uD83D\\n": 1}', r"holds half a surrogate pair \(byte 2\)"),
        (b'["\\ude00"]', r"holds half a surrogate pair \(byte 2\)"),
        (b'["\\ud83d\\u0041"]', r"holds half a surrogate pair \(byte 2\)"),
        (b'["\\\\ud83d", 1', "ends at byte 13"),
        (b'["\\ud83d', "ends at byte 8"),
        (b'["\\ud83d\\ud', "ends at byte 11"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_json_is_refused_with_the_byte_offset(body, where):
    with pytest.raises(BadRequest, match=where):
        decode(body, "application/json")


def test_text_is_decoded_by_its_charset():
    assert decode("é".encode("latin-1"), 'text/plain; charset="latin-1"') == "é"
    assert decode(memoryview("é".encode()), "text/csv") == "é"
    with pytest.raises(BadRequest, match="offset 1"):
        decode(b"a\xff", "text/plain")
    with pytest.raises(BadRequest, match="unknown charset"):
        decode(b"a", "text/plain; charset=klingon")


def test_urlencoded_forms_become_dicts_and_repeated_names_lists():
    kind = "application/x-www-form-urlencoded"
    assert decode(b"a=1&b=%C3%A9+x&a=2&c=", kind) == {"a": ["1", "2"], "b": "é x", "c": ""}
    with pytest.raises(BadRequest, match="urlencoded"):
        decode(b"&".join(b"a=1" for _ in range(2000)), kind)


def part(headers: str, body: bytes) -> bytes:
    return b"--XX\r\n" + headers.encode() + b"\r\n\r\n" + body + b"\r\n"


def test_multipart_fields_are_text_and_files_bytes():
    body = (
        part('Content-Disposition: form-data; name="a"', "é".encode())
        + part('Content-Disposition: form-data; name="f"; filename="x.txt"\r\nContent-Type: text/plain', b"1")
        + part('content-disposition: form-data; name="f"; filename="y.png"', b"\r\n\x00--X")
        + part('Content-Disposition: form-data; name="j"\r\nContent-Type: application/json', b"{}")
        + b"--XX--\r\n"
    )
    found = decode(memoryview(body), "multipart/form-data; boundary=XX")
    assert found == {"a": "é", "f": [b"1", b"\r\n\x00--X"], "j": b"{}"}


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (b"--XX\r\n", "multipart/form-data", "no boundary"),
        (b"junk", "multipart/form-data; boundary=XX", "malformed"),
        (part('Content-Disposition: form-data; name="a"', b"1"), "multipart/form-data; boundary=XX", "ends at byte"),
        (part("X: y", b"1") + b"--XX--\r\n", "multipart/form-data; boundary=XX", "no name"),
        (b"--XX\r\n", "multipart/form-data; boundary=" + "X" * 5000, "malformed"),
    ],
)
def test_broken_multipart_is_refused(body, kind, why):
    with pytest.raises(BadRequest, match=why):
        decode(body, kind)


def test_a_form_of_very_many_parts_is_refused():
    body = part('Content-Disposition: form-data; name="a"', b"") * 1001 + b"--XX--\r\n"
    with pytest.raises(BadRequest, match="more than 1000 parts"):
        decode(body, "multipart/form-data; boundary=XX")


@pytest.mark.parametrize("payload", [b"\x00", memoryview(b"\x00")])
def test_other_types_are_handed_on_as_they_are(payload):
    assert decode(payload, "image/png") is payload


def test_only_json_lists_are_split_into_rows():
    assert decode(b"[0,1,2,3]", "application/json", start=1, stop=3) == [1, 2]
    with pytest.raises(BadRequest, match="only a JSON list can be split"):
        decode(b"abc", "image/png", rows=100, start=0, stop=64)


@pytest.mark.parametrize(
    ("value", "body", "kind"),
    [
        (b"x", b"x", "application/octet-stream"),
        (bytearray(b"x"), b"x", "application/octet-stream"),
        ("é", "é".encode(), "text/plain; charset=utf-8"),
        ({"a": 1}, b'{"a":1}', "application/json"),
        ([None, "null"], b'[null,"null"]', "application/json"),
        (np.array([[1, 2]]), b"[[1,2]]", "application/json"),
        (
            {"a": np.float32(0.5), "b": [np.arange(2), np.bool_(True)]},
            b'{"a":0.5,"b":[[0,1],true]}',
            "application/json",
        ),
        (
            {"a": np.array([[b"x", "y"], ["\xe9".encode(), b"\xff"]], object), "b": np.array([b"z"])},
            '{"a":[["x","y"],["\xe9",{"b64":"/w=="}]],"b":["z"]}'.encode(),
            "application/json",
        ),
        (Response(b"x", "image/png"), b"x", "image/png"),
        (Response("é"), "é".encode(), "text/plain; charset=utf-8"),
    ],
)
def test_results_are_encoded_by_their_type(value, body, kind):
    result = CODEC.encode(value, Item(b""), None)
    assert (result.body, result.content_type) == (body, kind)


def test_a_response_chooses_status_and_headers():
    result = CODEC.encode(Response("x", status=201, headers={"X-A": "b"}), Item(b""), None)
    assert (result.status, result.headers) == (201, [("X-A", "b")])


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "returned None"),
        (float("nan"), "NaN"),
        ({"a": [1.0, float("-inf")]}, "NaN or infinity"),
        ([np.array([1.0, np.nan])], "NaN"),
        (np.float64("nan"), "NaN"),
        (object(), "type object"),
        ({"a": 1j}, "type complex"),
        ({(1, 2): object()}, "type object|JSON cannot hold"),
        (CYCLE, "contains itself"),
        (Response("x", headers={"A\r\nB": "c"}), "invalid header"),
        (Response("x", headers={"A": "c\r\nSet-Cookie: 1"}), "invalid header"),
        (Response("x", headers={"Content-Length": "1"}), "sets itself"),
        (Response("x", "text/plain\r\nX: 1"), "invalid content type"),
    ],
)
def test_an_invalid_result_is_a_bad_output_with_a_reason(value, why):
    with pytest.raises(BadOutput, match=why):
        CODEC.encode(value, Item(b""), None)


def test_parts_are_joined_in_row_order():
    def parts(*values):
        return [CODEC.encode(value, Item(b""), None) for value in values]

    assert CODEC.join(parts([1, 2], [], [3])).body == b"[1,2,3]"
    assert CODEC.join(parts(b"ab", b"c")).body == b"abc"
    with pytest.raises(BadOutput, match="only if they are lists"):
        CODEC.join(parts({"a": 1}, {"a": 2}))
    with pytest.raises(BadOutput, match="different content types"):
        CODEC.join(parts([1], "a"))
    failed = ItemResult(error=ItemFailed("no"))
    assert CODEC.join([*parts([1]), failed]) is failed


def test_error_bodies_never_hold_the_detail():
    assert error_body(ItemFailed("it raised", detail="/secret")) == (
        b'{"error":{"code":"item_failed","message":"it raised"}}'
    )
