from __future__ import annotations

import threading

import pytest

from penstock.errors import ItemFailed
from penstock.torchserve.protocol.codec import HandlerRequest

SOURCE = """
import threading
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.threads = []

    def preprocess(self, data):
        self.threads.append(threading.current_thread().name)
        if data[0]["body"] == "bad":
            raise ValueError("no")
        return [row["body"] + self.context.get_request_id() for row in data]

    def inference(self, data):
        self.threads.append(threading.current_thread().name)
        return data

    def postprocess(self, data):
        return [row + self.context.get_request_id() for row in data]
"""


def batch(name: str, body: str, **headers: str) -> list[HandlerRequest]:
    return [HandlerRequest(name, {"body": body}, {"explain": "False", **headers})]


def in_thread(call, *arguments):
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*arguments)), name="reader")
    thread.start()
    thread.join()
    return found[0]


def test_each_batch_has_a_context_of_its_own(make_handler):
    model = make_handler(SOURCE, overlap=True)
    prepare = model.__penstock_prepare__
    first, second = in_thread(prepare, batch("1", "a")), in_thread(prepare, batch("2", "b"))
    assert [answer.body for answer in model.predict(first)] == [b"a11"]
    assert [answer.body for answer in model.predict(second)] == [b"b22"]
    assert model._steps._service.threads == ["reader", "reader", "MainThread", "MainThread"]


def test_before_the_first_batch_the_context_is_that_of_load(make_handler):
    model = make_handler(SOURCE, overlap=True)
    assert in_thread(lambda: model._steps._service.context.model_name) == "m"


def test_what_preprocess_raises_is_the_batchs_error(make_handler):
    model = make_handler(SOURCE, overlap=True)
    prepared = in_thread(model.__penstock_prepare__, batch("1", "bad"))
    with pytest.raises(ItemFailed, match="Prediction failed"):
        model.predict(prepared)


def test_a_part_of_a_prepared_batch_runs_from_its_beginning(make_handler):
    model = make_handler(SOURCE, overlap=True)
    prepared = model.__penstock_prepare__([*batch("1", "bad"), *batch("2", "b")])
    assert [answer.body for answer in model.predict(prepared[1:])] == [b"b22"]


def test_explanations_are_not_prepared(make_handler):
    model = make_handler(SOURCE, overlap=True)
    requests = batch("1", "a", explain="True")
    assert model.__penstock_prepare__(requests) is requests


@pytest.mark.parametrize(
    ("source", "setup"),
    [
        ("def handle(data, context): return data", {}),
        (SOURCE + "    def handle(self, data, context): return data", {}),
        (SOURCE.replace("self.threads = []", "pass") + "    def __init__(self): self.handle = lambda d, c: d", {}),
        ("class Handler:\n    def initialize(self, context): pass\n    def handle(self, data, context): pass", {}),
        (SOURCE, {"envelope": "body"}),
    ],
)
def test_only_base_handlers_own_handle_is_taken_apart(make_handler, caplog, source, setup):
    model = make_handler(source, overlap=True, **setup)
    assert model.__penstock_prepare__ is None
    assert "handler_not_overlapped" in caplog.text


def test_the_time_of_all_steps_is_told(make_handler, monkeypatch):
    model = make_handler(SOURCE, overlap=True)
    told = []
    monkeypatch.setattr(
        type(model._context.metrics), "add_time", lambda self, name, ms, *more: told.append((name, self.request_ids))
    )
    model.predict(in_thread(model.__penstock_prepare__, batch("1", "a")))
    assert told == [("HandlerTime", {0: "1"}), ("PredictionTime", {0: "1"})]
