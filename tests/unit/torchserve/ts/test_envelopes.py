from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from penstock.torchserve.handlers.entry import own_classes
from penstock.torchserve.ts import envelopes


class Model:
    """A handler that keeps what it saw and answers as it is told."""

    def __init__(self, answer):
        self.answer = answer
        self.seen = None

    def handle(self, data, context):
        self.seen = data
        return self.answer(data)


def wrapped(name, answer):
    (envelope,) = own_classes(envelopes, f"{name}_envelope")
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
