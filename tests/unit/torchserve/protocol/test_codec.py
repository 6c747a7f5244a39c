import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadOutput, BadRequest, PenstockError
from penstock.torchserve.protocol.codec import HandlerResponse, InputsCodec, RawCodec, TorchServeCodec
from penstock.types import Item, ItemResult

CODEC = TorchServeCodec("m", "1")
RAW = RawCodec("m", "1")


def decoded(body, content_type="", headers=None, codec=CODEC):
    request, context = codec.decode(Item(body, "torchserve", content_type, request_id="id", headers=headers))
    assert context is None
    return request


def exactly(value, expected):
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (b"", "", bytearray()),
        (b"\x00\xff", "", bytearray(b"\x00\xff")),
        (memoryview(b"jpeg"), "image/jpeg", bytearray(b"jpeg")),
        (b'{"a": 1, "a": 2}', "application/json", {"a": 2}),
        (
            b"[1e400, NaN]",
            "application/json; charset=latin-1",
            [float("inf"), pytest.approx(float("nan"), nan_ok=True)],
        ),
        (b"123456789012345678901234567890", "application/json", 123456789012345678901234567890),
        (memoryview(b'"x"'), "Application/JSON", "x"),
        (b"{no json", "application/json", bytearray(b"{no json")),
        (b"\xff", "application/json", bytearray(b"\xff")),
        (b"", "application/json", bytearray()),
        (b"[" * 100_000, "application/json", bytearray(b"[" * 100_000)),
        (b"{}", "application/problem+json", bytearray(b"{}")),
        ("grün".encode(), "text/plain; charset=latin-1", "grün"),
        (b"", "text/csv", ""),
        (b"\xff", "text/plain", bytearray(b"\xff")),
    ],
)
def test_the_content_type_determines_the_body(body, content_type, expected):
    request = decoded(body, content_type)
    assert list(request.inputs) == ["body"]
    exactly(request.inputs["body"], expected)
    assert request.headers == {"body": {"content-type": content_type.partition(";")[0].lower()}}
    assert request.id == "id"
    raw = decoded(body, content_type, codec=RAW)
    exactly(raw.inputs["body"], bytearray(body))


def test_a_body_belongs_to_the_handler():
    body = b"same"
    decoded(body).inputs["body"][:] = b"else"
    assert body == b"same"


def form(*parts: tuple[str, str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    head = b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    return b"".join(head % (name.encode(), extra.encode(), body) for name, extra, body in parts) + end


MULTIPART = "multipart/form-data; boundary=B"


def test_a_form_has_one_key_per_field_and_the_last_value_wins():
    body = form(
        ("data", '; filename="a.jpg"\r\nContent-Type: image/jpeg', b"\xff\x00"),
        ("name", "", b"first"),
        ("name", "", "grün".encode()),
        ("typed", "\r\nContent-Type: application/json", b"[1]"),
        ("json", '; filename="a.json"\r\nContent-Type: application/json; charset=x', b"[1]"),
        ("text", '; filename="a.txt"\r\nContent-Type: text/plain', b"words"),
        ("file", '; filename="a"', b"{}"),
    )
    request = decoded(body, MULTIPART)
    inputs = {
        "data": bytearray(b"\xff\x00"),
        "name": bytearray("grün".encode()),
        "typed": bytearray(b"[1]"),
        "json": [1],
        "text": "words",
        "file": bytearray(b"{}"),
    }
    assert request.inputs == inputs
    for name, value in inputs.items():
        exactly(request.inputs[name], value)
    kinds = {name: header["content-type"] for name, header in request.headers.items()}
    assert kinds == {
        "data": "image/jpeg",
        "name": "",
        "typed": "",
        "json": "application/json",
        "text": "text/plain",
        "file": "application/octet-stream",
    }
    raw = decoded(body, MULTIPART, codec=RAW).inputs
    exactly(raw["json"], bytearray(b"[1]"))
    exactly(raw["text"], bytearray(b"words"))


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (form(("a", "", b"1")), "multipart/form-data", "has no boundary"),
        (form(("a", "", b"1"), end=b""), MULTIPART, "before its closing boundary"),
        (b"junk", MULTIPART, "malformed"),
        (form(*[("a", "", b"")] * 1001), MULTIPART, "more than 1000 parts"),
        (b"&".join([b"a=1"] * 1001), "application/x-www-form-urlencoded", "more than 1000 fields"),
    ],
)
def test_an_unreadable_form_is_a_bad_request(body, content_type, says):
    with pytest.raises(BadRequest, match=says):
        decoded(body, content_type)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (b"a=1&b=x+y%20z&a=2", {"a": b"2", "b": b"x y z"}),
        (b'{"x": 1}', {'{"x": 1}': b""}),
        (b"a=%ff&%ff=a&=&&c", {"a": b"\xff", "\ufffd": b"a", "": b"", "c": b""}),
        (b"", {}),
    ],
)
def test_urlencoded_fields_are_bytearrays(body, inputs):
    request = decoded(memoryview(body), "application/x-www-form-urlencoded")
    assert request.inputs == inputs
    assert all(type(value) is bytearray for value in request.inputs.values())


def test_query_fields_are_inputs_and_the_body_overrides_them():
    request = decoded(b"raw", headers=[(b":query", b"a=1&body=2&b=%20"), (b"X-Foo", b"z")])
    assert request.inputs == {"a": b"1", "body": b"raw", "b": b" "}
    assert all(type(value) is bytearray for value in request.inputs.values())
    assert list(request.headers) == ["a", "body", "b", "X-Foo"]


def test_headers_keep_their_spelling_and_the_last_value_wins():
    sent = [(b"X-Foo", b"1"), (b"x-bar", b"\xe9"), (b"X-Foo", b"2"), (b"explain", b"False"), (b"body", b"mine")]
    request = decoded(b"", headers=sent)
    assert request.headers == {"body": "mine", "X-Foo": "2", "x-bar": "é", "explain": "False"}


def test_grpc_inputs_are_bytearrays():
    body = msgspec.msgpack.encode({"data": b"{}", "body": b"", "ü": b"x"})
    request = decoded(body, codec=InputsCodec("m", "1"))
    assert request.inputs == {"data": b"{}", "body": b"", "ü": b"x"}
    assert all(type(value) is bytearray for value in request.inputs.values())
    assert set(request.headers) == {"data", "body", "ü"}
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1])):
        with pytest.raises(BadRequest):
            decoded(wrong, codec=InputsCodec("m", "1"))


def test_an_answer_has_the_handlers_values():
    answer = HandlerResponse(
        b"x", "text/csv", 404, "Gone", [("X-A", "1"), ("Content-Length", "7"), ("Connection", "no")]
    )
    expected = ItemResult(b"x", "text/csv", 404, [("X-A", "1")], reason="Gone")
    assert CODEC.encode(answer, Item(b""), None) == expected
    assert CODEC.encode(HandlerResponse(b"x"), Item(b""), None) == ItemResult(b"x", reason="")
    named = HandlerResponse(b"x", headers=[("X-A", "é€")])
    assert CODEC.encode(named, Item(b""), None).headers == [("X-A", "é?")]


@pytest.mark.parametrize(
    "answer",
    [
        HandlerResponse(b"", headers=[("X-A", "1\r\nSet-Cookie: a")]),
        HandlerResponse(b"", headers=[("X A", "1")]),
        HandlerResponse(b"", headers=[("", "1")]),
        HandlerResponse(b"", "text/plain\r\nX-A: 1"),
        HandlerResponse(b"", reason="Fine\n"),
    ],
)
def test_an_answer_cannot_break_the_framing(answer):
    with pytest.raises(BadOutput):
        CODEC.encode(answer, Item(b""), None)


TYPES = st.sampled_from(
    [
        "",
        "application/json",
        "text/plain",
        "application/x-www-form-urlencoded",
        MULTIPART,
        "multipart/form-data",
        "a/b;",
    ]
)
BODIES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=50).map(str.encode),
    st.lists(st.tuples(st.sampled_from("abü"), st.sampled_from(["", '; filename="x"', "\r\nA: b"]), st.binary())).map(
        lambda parts: form(*parts)
    ),
    st.recursive(st.none() | st.floats() | st.integers() | st.text(), lambda x: st.lists(x)).map(
        lambda value: json.dumps(value).encode()
    ),
)


@given(
    BODIES, TYPES | st.text(max_size=30), st.binary(max_size=30), st.sampled_from([CODEC, RAW, InputsCodec("m", "1")])
)
def test_requests_raise_only_penstock_errors(body, content_type, query, codec):
    try:
        request = decoded(memoryview(body), content_type, [(b":query", query), (query, query)], codec)
    except PenstockError:
        return
    for value in request.inputs.values():
        assert type(value) is not bytes
        if codec is not CODEC:
            assert type(value) is bytearray


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda x: st.lists(x)))
def test_json_is_decoded_by_pythons_json(value):
    body = json.dumps(value).encode()
    found = decoded(body, "application/json").inputs["body"]
    assert json.dumps(found) == json.dumps(json.loads(body))
