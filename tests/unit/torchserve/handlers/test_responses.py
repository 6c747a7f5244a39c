import copy
import json
import math
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadOutput
from penstock.torchserve.handlers.responses import PartialResponses, error_response, response_of, valid_status
from penstock.torchserve.ts.context import RequestProcessor
from penstock.torchserve.ts.util import create_predict_response

KEYS = st.text() | st.integers() | st.none() | st.booleans() | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
)


@given(VALUES)
def test_json_equals_pythons(value):
    if not isinstance(value, str):
        assert response_of(value, RequestProcessor({}), 0).body == json.dumps(value, indent=2).encode()


@pytest.mark.parametrize("value", [{1: math.nan}, ["\ud800"], {"ü": "\ud83d"}, [[], {}], (1,), math.inf, 2**200])
def test_unusual_json_equals_pythons(value):
    assert response_of(value, RequestProcessor({}), 0).body == json.dumps(value, indent=2).encode()


def test_headers_of_any_type_become_text():
    processor = RequestProcessor({})
    processor.add_response_property("X-Count", 3)  # type: ignore[arg-type]
    processor.add_response_property("Content-Type", "text/csv")
    found = response_of("x", processor, 0)
    assert (found.headers, found.content_type) == ([("X-Count", "3")], "text/csv")


@pytest.mark.parametrize(
    ("code", "status"), [(None, 200), (200, 200), (599, 599), (100, 500), (0, 500), ("404", 500), (2**40, 500)]
)
def test_a_status_that_http_cannot_carry_is_500(code, status):
    assert valid_status(code, 200) == status


def test_an_error_answer_has_torchserves_format():
    found = error_response(507, 'too "much"')
    assert found.body == b'{\n  "code": 507,\n  "type": "InternalServerException",\n  "message": "too \\"much\\""\n}\n'
    assert (found.status, found.content_type) == (507, "application/json")


# ---- partial answers


@pytest.fixture
def running():
    """The parts of a batch of two, places 2 and 0 of three, and what was sent of them."""
    parts, sent = PartialResponses(100), []
    parts.begin(sent.append, ["x", "y"], [2, 0], 3)
    return parts, sent


def response(*values, ids=(0, 1)):
    context = SimpleNamespace(request_processor=[RequestProcessor({}), RequestProcessor({})])
    context.request_processor[0].report_status(206, "Partly")
    return create_predict_response(list(values), ids, "Intermediate", 200, context, True)


def test_parts_are_aligned_with_their_requests(running):
    parts, sent = running
    parts.sendall(response("a", {"b": 1}))
    ((second, nothing, first),) = sent
    assert nothing is None
    assert (first.body, first.status, first.reason, first.headers) == (
        b"a",
        206,
        "Partly",
        [("ts_stream_next", "true")],
    )
    assert second.body == b'{\n  "b": 1\n}'


def test_some_requests_may_get_no_part(running):
    parts, sent = running
    parts.sendall(response("a", "b", ids=[1]))
    assert [part and part.body for part in sent[0]] == [b"b", None, None]


def test_parts_after_the_end_are_dropped(running):
    parts, sent = running
    parts.end()
    parts.sendall(response("a", "b"))
    assert sent == []
    PartialResponses(0).sendall(response("a", "b"))  # or before any batch


def test_a_thread_of_an_earlier_batch_reaches_no_caller_of_this_one(running):
    parts, sent = running
    parts.sendall(response("a", "b", ids={0: "x", 1: "of before"}))
    assert [part and part.body for part in sent.pop()] == [None, None, b"a"]
    parts.sendall(response("a", "b", "c", ids={2: "of before"}))
    name, frame = b"of before", struct.pack("!i", 200) + packed(b"")
    frame += packed(name) + packed(b"") + struct.pack("!i", 200) + packed(b"") + struct.pack("!i", 0) + packed(b"a")
    parts.sendall(frame + struct.pack("!i", -1))
    assert sent == []


def test_a_part_that_cannot_be_sent_is_the_handlers_error(running):
    parts, _ = running
    with pytest.raises(BadOutput, match="Unsupported model output"):
        parts.sendall(response(object(), "b"))


def packed(text: bytes) -> bytes:
    return struct.pack("!i", len(text)) + text


def test_an_installed_ts_sends_bytes(running):
    parts, sent = running
    head = packed(b"X-A") + packed(b"1") + packed(b"content-type") + packed(b"text/csv")
    one = packed(b"y") + packed(b"text/csv") + struct.pack("!i", 201) + packed(b"Made") + struct.pack("!i", 2) + head
    frame = struct.pack("!i", 200) + packed(b"Prediction success") + one + packed(b"\xff\x00") + struct.pack("!i", -1)
    parts.sendall(bytearray(frame))
    ((found, *rest),) = sent
    assert (found.body, found.content_type, found.status, found.reason) == (b"\xff\x00", "text/csv", 201, "Made")
    assert found.headers == [("X-A", "1")]
    assert rest == [None, None]


def test_a_copied_context_belongs_to_the_same_batch(running):
    parts, _ = running
    assert copy.deepcopy(SimpleNamespace(cl_socket=parts)).cl_socket is parts
