import io
import json
import threading

import pytest

import penstock.metrics
from penstock.errors import ItemFailed, LoadOutOfMemory
from penstock.torchserve.protocol.codec import HandlerRequest
from penstock.torchserve.ts.metric_cache import MetricsCache


def asked(*inputs, **headers):
    """A batch of one request for each dict of inputs."""
    named = {"explain": "False", **headers}
    return [HandlerRequest(f"id-{i}", found, dict(named)) for i, found in enumerate(inputs)]


ECHO = """
seen = []

def handle(data, context):
    seen.append((data, context))
    if data is None:
        return None
    return [row["body"] for row in data]
"""


def test_a_module_level_handler_is_called_once_to_initialize_then_for_each_batch(make_handler):
    model = make_handler(ECHO)
    assert [bytes(a.body) for a in model.predict(asked({"body": "a"}, {"body": bytearray(b"b")}))] == [b"a", b"b"]
    import my_handler

    assert [data is None for data, _ in my_handler.seen] == [True, False]
    contexts = {id(context) for _, context in my_handler.seen}
    assert len(contexts) == 1, "one Context a worker, for every batch"


def test_metrics_recorded_in_initialize_belong_to_the_model(make_handler):
    penstock.metrics.drain()
    make_handler("""
def handle(data, context):
    if data is None:
        context.metrics.add_counter("Loads", 1)
        context.metrics.add_error("Odd", 1)
""")
    loads, odd = penstock.metrics.drain()
    assert loads.labels == {"ModelName": "m", "Level": "Model"}
    assert len(loads.request_id) == 36
    assert odd.labels == {"Level": "Error"}


def test_an_answer_that_is_too_large_fails_alone(make_handler):
    model = make_handler(ECHO, max_response_size=10)
    large, small = model.predict(asked({"body": "x" * 11}, {"body": "x" * 10}))
    assert (large.status, json.loads(large.body)["type"]) == (500, "InternalServerException")
    assert (small.status, small.body) == (200, b"x" * 10)


def test_the_handler_sets_status_headers_and_content_type(make_handler):
    model = make_handler(
        """
        def handle(data, context):
            if data is None:
                context.set_response_status(500)
                return
            context.set_response_status(404, "Not here", 1)
            context.set_response_content_type(0, "text/csv")
            context.set_response_header(1, "X-Left", "3")
            return ["a", "b"]
        """
    )
    for _ in range(2):  # what one batch sets is not left to the next
        first, second = model.predict(asked({}, {}))
        assert (first.status, first.content_type, first.headers) == (200, "text/csv", [])
        assert (second.status, second.reason, second.headers) == (404, "Not here", [("X-Left", "3")])
        assert second.content_type == ""


def test_a_context_has_torchserves_attributes(make_handler, tmp_path):
    model = make_handler(
        """
        contexts = []
        def handle(data, context):
            contexts.append(context)
            context.calls = getattr(context, 'calls', 0) + 1
            return data and ['']
        """,
        manifest={"model": {"modelName": "m"}},
        model_yaml_config={"handler": {"x": 1}},
        batch_size=4,
        limit_max_image_pixels=False,
    )
    import my_handler

    (context,) = my_handler.contexts
    assert context.request_processor is None
    assert context.get_request_id() is None
    assert (context.model_name, context.manifest) == ("m", {"model": {"modelName": "m"}})
    assert context.model_yaml_config == {"handler": {"x": 1}}
    assert context.system_properties == {
        "model_dir": str(tmp_path / "model"),
        "gpu_id": None,
        "batch_size": 4,
        "server_name": "MMS",
        "server_version": "0.12.0",
        "limit_max_image_pixels": False,
    }
    model.predict(asked({"body": 1}, **{"X-Foo": "1", "body": {"content-type": "image/png"}}))
    assert context.request_ids == {0: "id-0"}
    assert context.get_request_id() == "id-0"
    assert context.get_request_header(0, "x-foo") == context.get_request_header(0, "X-Foo") == "1"
    assert context.get_all_request_header(0)["body"] == {"content-type": "image/png"}
    assert context.calls == 2, "what a handler attaches stays"
    assert context.get_response_status(0) == (200, None)


def test_explanations_and_descriptions_are_calls_of_their_own(make_handler):
    model = make_handler(
        """
        def handle(data, context):
            if data is None:
                return
            if context.get_request_header(0, "explain") == "True":
                raise ValueError
            if context.get_request_header(0, "describe") == "True":
                return ["about"]
            return [len(data)] * len(data)
        """
    )
    batch = [*asked({}, {}), *asked({}, {}, describe="True"), *asked({}, explain="True")]
    batch[1], batch[2] = batch[2], batch[1]
    first, about, second, another, failed = model.predict(batch)
    assert [first.body, about.body, second.body, another.body] == [b"2", b"about", b"2", b"about"]
    assert type(failed) is ItemFailed


@pytest.mark.parametrize("name", ["explain", "describe"])
def test_a_form_field_named_like_a_control_header_is_a_prediction(make_handler, name):
    model = make_handler("def handle(data, context): return data and [len(data)] * len(data)")
    batch = [*asked({}), HandlerRequest("id-1", {name: bytearray(b"1")}, {name: {"content-type": ""}})]
    assert [answer.body for answer in model.predict(batch)] == [b"2", b"2"]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [("MemoryError()", LoadOutOfMemory), ("RuntimeError('CUDA')", LoadOutOfMemory), ("ValueError('CUDA')", ValueError)],
)
def test_running_out_of_memory_while_loading_is_a_distinct_error(make_handler, raised, kind):
    with pytest.raises(kind):
        make_handler(f"def handle(data, context):\n    raise {raised}")


def test_an_envelope_wraps_the_handler(make_handler):
    model = make_handler("def handle(data, context):\n    return data and [str(d) for d in data]", envelope="body")
    (answer,) = model.predict(asked({"body": {"a": 1}}))
    assert answer.body == b"{'a': 1}"


def test_a_tensor_is_sent_in_torchs_file_format(make_handler):
    torch = pytest.importorskip("torch")
    model = make_handler("import torch\ndef handle(data, context):\n    return data and [torch.arange(3)]")
    (answer,) = model.predict(asked({}))
    assert torch.load(io.BytesIO(answer.body), weights_only=True).tolist() == [0, 1, 2]


# ---- overlap


OVERLAPPED = """
import threading
from ts.torch_handler.base_handler import BaseHandler

threads, handlers = [], []

class Handler(BaseHandler):
    def initialize(self, context):
        handlers.append(self)

    def preprocess(self, data):
        threads.append(threading.current_thread().name)
        if data[0]["body"] == "bad":
            raise ValueError("no")
        return [row["body"] + self.context.get_request_id() for row in data]

    def inference(self, data):
        threads.append(threading.current_thread().name)
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


def test_each_batch_has_its_own_context(make_handler):
    model = make_handler(OVERLAPPED, overlap=True)
    prepare = model.collate
    first, second = in_thread(prepare, batch("1", "a")), in_thread(prepare, batch("2", "b"))
    assert [answer.body for answer in model.predict(first)] == [b"a11"]
    assert [answer.body for answer in model.predict(second)] == [b"b22"]
    import my_handler

    assert my_handler.threads == ["reader", "reader", "MainThread", "MainThread"]


def test_before_the_first_batch_the_context_is_the_one_of_load(make_handler):
    make_handler(OVERLAPPED, overlap=True)
    import my_handler

    assert in_thread(lambda: my_handler.handlers[0].context.model_name) == "m"


def test_a_part_of_a_preprocessed_batch_runs_all_steps_again(make_handler):
    model = make_handler(OVERLAPPED, overlap=True)
    prepared = model.collate([*batch("1", "bad"), *batch("2", "b")])
    assert [answer.body for answer in model.predict(prepared[1:])] == [b"b22"]


def test_explanations_are_not_preprocessed_ahead(make_handler):
    model = make_handler(OVERLAPPED, overlap=True)
    requests = batch("1", "a", explain="True")
    assert model.collate(requests) is requests


@pytest.mark.parametrize(
    ("source", "setup"),
    [
        ("def handle(data, context): return data", {}),
        (OVERLAPPED + "    def handle(self, data, context): return data", {}),
        (OVERLAPPED + "    def __init__(self): self.handle = lambda d, c: d", {}),
        ("class Handler:\n    def initialize(self, context): pass\n    def handle(self, data, context): pass", {}),
        (OVERLAPPED, {"envelope": "body"}),
    ],
)
def test_only_base_handlers_own_handle_is_overlapped(make_handler, caplog, source, setup):
    model = make_handler(source, overlap=True, **setup)
    assert model.collate is None
    assert "handler_not_overlapped" in caplog.text


def test_the_time_of_all_steps_is_recorded(make_handler, monkeypatch):
    model = make_handler(OVERLAPPED, overlap=True)
    told = []
    monkeypatch.setattr(MetricsCache, "add_time", lambda self, name, ms, *more: told.append((name, self.request_ids)))
    model.predict(in_thread(model.collate, batch("1", "a")))
    assert told == [("HandlerTime", {0: "1"}), ("PredictionTime", {0: "1"})]
