from __future__ import annotations

from penstock.compat.ts.context import RequestProcessor


def test_headers_are_found_in_any_case_and_keep_their_spelling(make_context):
    context = make_context(None, {"X-Foo": "a"}, {"x-foo": "b", "X-FOO": "c"})
    assert context.get_request_header(0, "X-Foo") == context.get_request_header(0, "x-foo") == "a"
    assert [context.get_request_header(1, name) for name in ("x-foo", "X-FOO", "X-foo", "none")] == [
        "b",
        "c",
        "c",
        None,
    ]
    assert list(context.get_all_request_header(1)) == ["x-foo", "X-FOO"]


def test_an_answers_status_type_and_headers_are_those_of_its_request(make_context):
    context = make_context(None, {}, {})
    context.set_response_status(404, "no face", idx=1)
    context.set_response_content_type(1, "image/png")
    context.set_response_header(1, "x-a", "b")
    assert context.get_response_status(1) == (404, "no face")
    assert context.get_response_status(0)[0] == 200
    assert context.get_response_content_type(1) == "image/png"
    assert context.get_response_headers(1) == {"content-type": "image/png", "x-a": "b"}
    context.set_all_response_status(500, "all")
    assert [context.get_response_status(i) for i in range(2)] == [(500, "all")] * 2


def test_a_request_has_an_id_and_a_sequence(make_context):
    context = make_context(None, {"ts_request_sequence_id": "s1"})
    assert context.get_request_id() == "id-0"
    assert context.get_request_id(9) is None
    assert context.get_sequence_id(0) == "s1"


def test_the_processors_of_the_requests_have_two_names(make_context):
    context = make_context()
    processors = [RequestProcessor({"a": "b"})]
    context._request_processor = processors
    assert context.request_processor is context._request_processor is processors


def test_handlers_may_attach_what_they_like(make_context):
    context = make_context()
    context.cache = {"a": 1}
    assert context.cache == {"a": 1}
