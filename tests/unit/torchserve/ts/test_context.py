from __future__ import annotations

import copy
import threading

import pytest

from penstock.torchserve.ts.context import Context, RequestProcessor, ThreadsContext


def fresh(**more):
    return Context("m", "/models/m", {"model": {}}, 2, 1, "0.12.0", **more)


def with_requests(*headers):
    context = fresh()
    context.request_ids = {i: f"id-{i}" for i in range(len(headers))}
    context.request_processor = [RequestProcessor(h) for h in headers]
    return context


def test_the_worker_is_described_before_the_first_batch():
    context = fresh(limit_max_image_pixels=False, metrics="metrics", model_yaml_config={"a": 1})
    assert context.system_properties["gpu_id"] == 1
    assert context.system_properties["limit_max_image_pixels"] is False
    assert (context.metrics, context.model_yaml_config) == ("metrics", {"a": 1})
    assert context.request_ids is context.request_processor is context.stopping_criteria is None
    assert context.get_request_id() is None
    context.set_response_status(500)  # no request is there: nobody is told
    assert fresh().model_yaml_config == {}
    context._request_processor = processors = [RequestProcessor({"a": "b"})]  # its old name
    assert context.request_processor is context._request_processor is processors


def test_the_names_of_sequence_headers_can_be_configured(monkeypatch):
    context = fresh()
    names = (context.header_key_sequence_id, context.header_key_sequence_start, context.header_key_sequence_end)
    assert names == ("ts_request_sequence_id", "ts_request_sequence_start", "ts_request_sequence_end")
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "x-seq")
    context = fresh()
    context.request_processor = [RequestProcessor({"X-Seq": "7"})]
    assert context.get_sequence_id(0) == "7"


def test_header_lookup_ignores_case_and_keeps_the_spelling():
    context = with_requests({"X-Foo": "1", "x-foo": "2", "Data": {"content-type": "a/b"}})
    assert [context.get_request_header(0, key) for key in ("X-Foo", "x-foo", "X-FOO", "x-bar")] == ["1", "2", "2", None]
    headers = context.get_all_request_header(0)
    assert list(headers) == ["X-Foo", "x-foo", "Data"]
    assert headers["DATA"] == headers.get("data") == {"content-type": "a/b"}
    assert "dATA" in headers
    assert "no" not in headers
    assert 1 not in headers
    with pytest.raises(KeyError):
        headers["no"]
    assert headers.get("no", "default") == "default"
    assert headers == {"X-Foo": "1", "x-foo": "2", "Data": {"content-type": "a/b"}}
    headers["mine"] = "3"
    assert context.get_request_header(0, "Mine") == "3", "one map a request"


def test_each_request_has_its_own_answer():
    context = with_requests({}, {})
    context.set_response_status(404, "Gone", 1)
    context.set_response_content_type(0, "text/csv")
    context.set_response_header(0, "X-A", "1")
    assert [context.get_response_status(i) for i in range(2)] == [(200, None), (404, "Gone")]
    assert [context.get_response_content_type(i) for i in range(2)] == ["text/csv", None]
    assert context.get_response_headers(0) == {"content-type": "text/csv", "X-A": "1"}
    assert context.request_processor[0].get_response_header("X-A") == "1"
    context.set_all_response_status(503, "Busy")
    assert [context.get_response_status(i) for i in range(2)] == [(503, "Busy")] * 2
    assert [context.get_request_id(i) for i in range(3)] == ["id-0", "id-1", None]


def test_contexts_are_equal_if_their_attributes_are():
    assert fresh() == fresh()
    assert fresh() != fresh(metrics=1)
    assert fresh() != 1


def test_each_thread_sees_the_context_of_its_own_batch():
    mine, other = with_requests({"a": "mine"}), with_requests({"a": "other"})
    proxy = ThreadsContext(other)
    assert proxy.get_request_header(0, "a") == "other"  # until the first batch
    proxy.become(mine)
    found = []

    def elsewhere() -> None:
        found.append(proxy.get_request_header(0, "a"))  # the one that was last told
        proxy.become(other)
        proxy.cache = 1
        found.append(proxy.get_request_header(0, "a"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["mine", "other"]
    assert proxy.get_request_header(0, "a") == "mine"
    assert not hasattr(proxy, "cache")
    assert other.cache == 1
    assert isinstance(proxy, Context)
    copied = copy.deepcopy(proxy)
    assert type(copied) is Context
    assert copied.model_name == "m"
