import base64
import copy
import json
import threading

import numpy as np
import pytest

import penstock.torchserve.ts.context as library
from penstock.torchserve.handlers.entry import own_classes
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


# ---- envelopes


class Model:
    """A handler that keeps what it saw and answers as it is told."""

    def __init__(self, answer):
        self.answer = answer
        self.seen = None

    def handle(self, data, context):
        self.seen = data
        return self.answer(data)


def wrapped(name, answer):
    (envelope,) = own_classes(library, f"{name}_envelope")
    model = Model(answer)
    return model, envelope(model.handle)


@pytest.mark.parametrize("name", ["body", "json", "kserve", "kservev2"])
def test_the_initializing_call_passes_through(name, make_context):
    model, envelope = wrapped(name, lambda data: None)
    assert envelope.handle(None, make_context()) is None
    assert model.seen is None


def test_body_passes_only_the_bodies(make_context):
    model, envelope = wrapped("body", lambda data: [len(d) for d in data])
    assert envelope.handle([{"body": b"ab"}, {"data": b"c", "body": b"xyz"}], make_context()) == [2, 1]
    assert model.seen == [b"ab", b"c"]


def test_json_batches_the_instances_of_all_requests(make_context):
    model, envelope = wrapped("json", lambda data: [n * 2 for n in data])
    answers = envelope.handle(
        [{"body": {"instances": [1, 2]}}, {"body": {"instances": []}}, {"instances": [3]}], make_context()
    )
    assert [json.loads(a) for a in answers] == [{"predictions": [2, 4]}, {"predictions": []}, {"predictions": [6]}]
    assert model.seen == [1, 2, 3]


def test_json_decodes_base64_as_an_instance_and_as_a_column(make_context):
    b64 = {"b64": base64.b64encode(b"png").decode()}
    model, envelope = wrapped("json", lambda data: [0 for _ in data])
    envelope.handle(
        [{"body": {"instances": [b64, {"image": b64, "size": 3, "pair": {"b64": "", "x": 1}}]}}], make_context()
    )
    assert model.seen == [b"png", {"image": b"png", "size": 3, "pair": {"b64": "", "x": 1}}]


@pytest.mark.parametrize("body", [{"instances": [[1], [2]]}, bytearray(b'{"instances": [[1], [2]]}')])
def test_kserve_passes_the_instances_of_a_request(make_context, body):
    model, envelope = wrapped("kserve", lambda data: [sum(d) for d in data])
    assert envelope.handle([{"body": body}], make_context()) == [{"predictions": [1, 2]}]
    assert model.seen == [[1], [2]]


def test_kserve_answers_each_request_of_a_batch(make_context):
    _, envelope = wrapped("kserve", lambda data: [sum(d) for d in data])
    bodies = [{"instances": [[1], [2]]}, {"instances": [[3]]}]
    answers = envelope.handle([{"body": body} for body in bodies], make_context(None, {}, {}))
    assert answers == [{"predictions": [1, 2]}, {"predictions": [3]}]


def test_kservev2_answers_each_request_of_a_batch_with_its_id(make_context):
    _, envelope = wrapped("kservev2", lambda data: [t["data"] for t in data])
    answers = envelope.handle([{"body": v2(id="a")}, {"body": v2()}], make_context(None, {}, {}))
    assert [each["id"] for each in answers] == ["a", "id-1"]
    assert [each["outputs"][0]["data"] for each in answers] == [[1, 2, 3, 4]] * 2


def test_kserve_names_explanations(make_context):
    _, envelope = wrapped("kserve", lambda data: [[0.5]])
    context = make_context(None, {"explain": "True"})
    assert envelope.handle([{"body": {"instances": [1]}}], context) == [{"explanations": [[0.5]]}]


def v2(**more):
    tensor = {"name": "x", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, 4]}
    return {"inputs": [tensor, {"name": "s", "shape": [1], "datatype": "BYTES", "data": ["text"]}], **more}


def test_kservev2_nests_the_data_and_names_the_outputs(make_context):
    model, envelope = wrapped("kservev2", lambda data: [[0, 1], "label"])
    (answer,) = envelope.handle([{"body": v2(id="mine")}], make_context())
    assert [t["data"] for t in model.seen] == [[[1, 2], [3, 4]], "text"]
    assert json.loads(json.dumps(answer)) == {
        "id": "mine",
        "model_name": "net",
        "model_version": "1.0",
        "outputs": [
            {"name": "x", "datatype": "INT64", "data": [0, 1], "shape": [2]},
            {"name": "s", "datatype": "BYTES", "data": ["label"], "shape": [1]},
        ],
    }


def test_kservev2_falls_back_to_the_requests_own_id_also_after_a_failure(make_context):
    answers = iter([ValueError, None])

    def answer(data):
        if error := next(answers):
            raise error
        return [np.float32([0.5])]

    _, envelope = wrapped("kservev2", answer)
    context = make_context()
    with pytest.raises(ValueError):  # noqa: PT011 - the handler's own
        envelope.handle([{"body": v2(id="first")}], context)
    (found,) = envelope.handle([{"body": json.dumps(v2(id=" ")).encode()}], context)
    assert found["id"] == "id-0"
    assert found["outputs"] == [{"name": "x", "datatype": "FP32", "data": [0.5], "shape": [1]}]
    assert not hasattr(context, "input_names")
