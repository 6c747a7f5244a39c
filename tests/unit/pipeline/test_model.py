"""A pipeline as the model of a worker: blocking batches and concurrent requests."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from penstock.cli.server import banner
from penstock.config.schema import ModelConfig
from penstock.core.engine.engine import Engine
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import BadOutput, BadRequest, ConfigError, DeadlineExceeded, LoadFailed
from penstock.pipeline.graph import Graph, Node, NodeStep
from penstock.pipeline.model import (
    PipelineModel,
    on_worker_device,
    outputs_of,
    server_timing,
)
from penstock.pipeline.ops.python import op
from penstock.pipeline.requests import PipelineRequest, response_of
from penstock.pipeline.requests import request_of as ask
from penstock.pipeline.traversal import Hop, ItemOutcome
from penstock.types import Item, ModelMetadata, ModelStatus, TensorSpec

TWO_NODES = """
[pipeline]
trace = {trace}
inputs = ["data", "node_name"]
[first]
backend = "Words"
word = "1"
next = "second"
[second]
backend = "Picky"
"""


class Answers:
    """The answers to one `__penstock_submit__` by place. A second answer for a place fails."""

    def __init__(self, count: int) -> None:
        self.values: dict[int, Any] = {}
        self._count = count
        self._all = threading.Event()

    def __call__(self, pairs: list[tuple[int, Any]]) -> None:
        for place, value in pairs:
            assert place not in self.values
            self.values[place] = value
        if len(self.values) == self._count:
            self._all.set()

    def wait(self) -> list[Any]:
        assert self._all.wait(20), self.values
        return [self.values[place] for place in range(self._count)]


@pytest.fixture
def load(tmp_path: Path, known: None) -> Iterator[Callable[..., PipelineModel]]:
    models: list[PipelineModel] = []

    def make(text: str, **options: Any) -> PipelineModel:
        (tmp_path / "net.toml").write_text(text)
        model = PipelineModel(str(tmp_path / "net.toml"), **options)
        model.load("cpu")
        models.append(model)
        return model

    yield make
    for model in models:
        model.unload()


def test_a_batch_has_an_answer_or_an_error_for_each_request(load: Callable[..., PipelineModel]) -> None:
    model = load(TWO_NODES.format(trace="false"))
    one, bad, none, second = model.predict(["a", "x", {"x": 1}, {"data": "b", "node_name": "second"}])
    assert (one, second) == ("a1", "b")
    assert isinstance(bad, Exception)
    assert isinstance(none, BadRequest)


def test_concurrent_requests_are_answered_as_they_end(doors: Any, load: Callable[..., PipelineModel]) -> None:
    model = load('[door]\nbackend = "Door"\ngate = "g"\n')
    slow, wrong = Answers(1), Answers(2)
    model.__penstock_submit__(["a"], [None], slow)
    model.__penstock_submit__([{"x": 1}, "late"], [None, 0.0], wrong)
    refused, late = wrong.wait()
    assert isinstance(refused, BadRequest)
    assert isinstance(late, DeadlineExceeded)
    assert not slow.values
    doors.open_all()
    assert slow.wait() == ["a"]
    assert model.__penstock_concurrency__ > 1


def test_answers_of_one_turn_can_leave_together(load: Callable[..., PipelineModel]) -> None:
    model = load('[all]\nbackend = "BatchWords"\nword = "!"\nmax_batch = 8\n')
    answers, left = Answers(64), list[int]()

    def answer(pairs: list[tuple[int, Any]]) -> None:
        if not left or left[-1] >= 0:
            left.append(-1)
            model.__penstock_soon__(lambda: left.__setitem__(-1, len(answers.values)))
        answers(pairs)

    model.__penstock_submit__([str(i) for i in range(64)], [None] * 64, answer)
    assert answers.wait() == [f"{i}!" for i in range(64)]
    model.unload()
    assert left[-1] == 64
    assert len(left) < 40


def test_answers_of_other_threads_leave_immediately(load: Callable[..., PipelineModel]) -> None:
    called: list[int] = []
    load(TWO_NODES.format(trace="false")).__penstock_soon__(lambda: called.append(1))
    assert called == [1]


def test_rows_of_concurrent_requests_are_joined_into_one_answer_each(load: Callable[..., PipelineModel]) -> None:
    import numpy as np

    model = load(TWO_NODES.format(trace="false"))
    arrays = {"data": np.array(["a", "b"], object)}
    answers = Answers(1)
    model.__penstock_submit__([arrays], [None], answers)
    (answer,) = answers.wait()
    assert answer["result"].tolist() == ["a1", "b1"]
    assert model.predict([arrays])[0]["result"].tolist() == ["a1", "b1"]


@pytest.mark.parametrize("trace", ["false", "true"])
def test_no_rows_are_answered_by_empty_outputs(load: Callable[..., PipelineModel], trace: str) -> None:
    model, none, answers = load(TWO_NODES.format(trace=trace)), {"data": np.empty(0, object)}, Answers(2)
    model.__penstock_submit__([none, "b"], [None, None], answers)
    found, other = answers.wait()
    assert (found["result"].shape, getattr(other, "value", other)) == ((0,), "b1")
    model.outputs = (TensorSpec("logits", "INT64", (-1, -1, 5)),)
    (found,) = model.predict([none])
    assert (found["logits"].dtype, found["logits"].shape) == (np.int64, (0, 0, 5))


def test_a_cancelled_request_is_not_answered(doors: Any, load: Callable[..., PipelineModel]) -> None:
    model = load('[door]\nbackend = "Door"\ngate = "g"\n')
    left, stayed = Answers(2), Answers(1)
    model.__penstock_submit__(["a", "b"], [None, None], left)()
    model.__penstock_submit__(["c"], [None], stayed)
    doors.open_all()
    assert stayed.wait() == ["c"]
    assert not left.values


def test_headers_reach_every_protocol_but_not_local_callers(tmp_path: Path, known: None) -> None:
    (tmp_path / "net.toml").write_text(TWO_NODES.format(trace="true"))
    config = ModelConfig(target=str(tmp_path / "net.toml"))
    runner, ready = open_model(WorkerSpec("net", "1", config, config.target), "cpu")
    try:
        parts: list[Any] = []
        items = [Item(b"a", "native", "text/plain"), Item("b"), Item(["c", "d"], rows=2, many=True)]
        runner.run(0, runner.decode(items), parts.append)
        native, plain, many = parts[-1].results
    finally:
        runner.close()
    assert native.body == b"a1"
    assert [name for name, _ in native.headers] == ["server-timing"]
    assert (plain.body, many.body) == ("b1", ["c1", "d1"])
    assert ready.options["max_batch_size"] == 32
    assert ready.metadata.platform == "penstock_pipeline"


def test_a_worker_behind_a_broker_serves_a_pipeline(tmp_path: Path, known: None) -> None:
    (tmp_path / "net.toml").write_text(TWO_NODES.format(trace="false"))
    config = ModelConfig(target=str(tmp_path / "net.toml"))
    wrapped = Wrapped(config.target, "penstock.streamer.model:served")
    runner, _ = open_model(WorkerSpec("net", "1", config, wrapped), "cpu")
    assert runner.model.predict(["a"]) == ["a1"]
    runner.close()


def test_options_are_those_of_pipelines(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text('[a]\nbackend = "Identity"\n')
    config = ModelConfig(target=str(tmp_path / "net.toml"), options={"compact": True})
    with pytest.raises(LoadFailed, match="no option 'compact'; did you mean 'compat'"):
        open_model(WorkerSpec("net", "1", config, config.target), "cpu")


def test_a_non_idempotent_node_makes_its_pipeline_non_idempotent(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(
        '[a]\nbackend = "Identity"\nnext = "b"\nrun_timeout_s = 5\n[b]\nbackend = "Identity"\nidempotent = false\n'
    )
    config = ModelConfig(target=str(tmp_path / "net.toml"))
    runner, ready = open_model(WorkerSpec("net", "1", config, config.target), "cpu")
    runner.close()
    assert ready.options["idempotent"] is False
    assert ready.options["run_timeout_s"] == 5 + 60 + 60


def test_the_banner_shows_the_largest_batch_of_the_models(load: Callable[..., PipelineModel], known: None) -> None:
    model = load('[a]\nbackend = "Identity"\nnext = "b"\n[b]\nbackend = "BatchWords"\nmax_batch = 5\n')
    assert model.parameters["max_batch_size"] == 5
    status = ModelStatus("m", "1", "READY", 1, 1, 32, ("cpu",), model_batch_size=5)
    assert re.search(r"m +1 +1 +5 +cpu +READY", banner({}, [status], ""))


def test_the_banner_shows_the_devices_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: None
) -> None:
    monkeypatch.setattr("penstock.pipeline.node.visible_gpus", lambda: 1)
    nodes = '[a]\nbackend = "Identity"\nnext = "b"\n[b]\nbackend = "Identity"\ndevice = "cuda"\n'
    (tmp_path / "net.toml").write_text(nodes)

    async def read() -> ModelStatus:
        engine = Engine()
        await engine.load("net", ModelConfig(target=str(tmp_path / "net.toml"), transport="thread"))
        [status] = engine.statuses()
        await engine.close(0.0)
        return status

    status = asyncio.run(read())
    assert status.devices == ("cpu",)
    assert re.search(r"net +1 +1 +\d+ +cpu,cuda:0 +READY", banner({}, [status], ""))


def test_a_pipeline_that_decodes_declares_an_input_of_bytes(load: Callable[..., PipelineModel]) -> None:
    assert load('[a]\nbackend = "DecodeMat"\n').inputs == (TensorSpec("data", "BYTES", (-1,)),)
    assert load('[a]\nbackend = "Words"\n').inputs == ()
    assert load('[pipeline]\ninputs = ["data", "box"]\n[a]\nbackend = "DecodeMat"\n').inputs == (), "box may be any"
    assert load(f'[a]\nbackend = "Python[{__file__}:Reads]"\n').inputs == (TensorSpec("data", "BYTES", (-1,)),)


@op(takes="bytes")
class Reads:
    def __call__(self, data: Any) -> Any:
        return data


def graph(**nodes: Node) -> Graph:
    return Graph("net", nodes, next(iter(nodes)))


def node(name: str, op: str = "Identity", device: str = "cpu", **params: Any) -> Node:
    return Node(name, (NodeStep(op, params),), device=device)


def test_models_are_placed_on_the_gpu_of_their_worker() -> None:
    given = graph(a=node("a"), b=node("b", "OnnxTensor", "auto"), c=node("c", "OnnxTensor"))
    found = on_worker_device(given, "cuda:0")
    assert {name: n.device for name, n in found.nodes.items()} == {"a": "cpu", "b": "cuda:0", "c": "cpu"}
    assert on_worker_device(given, "cpu") is given
    elsewhere = graph(a=node("a", "OnnxTensor", "cuda:1"))
    assert on_worker_device(elsewhere, "cpu") is elsewhere
    with pytest.raises(ConfigError, match=r"node 'a': device cuda:1, but this worker sees only its own GPU"):
        on_worker_device(elsewhere, "cuda:0")


def test_the_outputs_of_a_last_model_have_the_names_of_the_answer() -> None:
    given = graph(a=structs.replace(node("a"), next=("b",)), b=node("b", "OnnxTensor"))
    one, two = TensorSpec("logits", "FP32", (4, 1000)), TensorSpec("boxes", "INT64", (-1, -1, 4))

    def told(given: Graph, *specs: TensorSpec) -> tuple[TensorSpec, ...]:
        return outputs_of(given, {"a": ModelMetadata("a", "1"), "b": ModelMetadata("b", "1", outputs=specs)})

    assert told(given, one) == (TensorSpec("result", "FP32", (-1, 1000)),)
    assert [spec.name for spec in told(given, one, two)] == ["result_0", "result_1"]
    assert told(given) == ()
    assert told(structs.replace(given, gives=("result", "label")), one) == ()
    after = structs.replace(given.nodes["b"], steps=(*given.nodes["b"].steps, NodeStep("Identity")))
    assert told(structs.replace(given, nodes={**given.nodes, "b": after}), one) == ()


TAKES = ("data", "node_name", "other", "box")
GRAPH = Graph("net", {"a": Node("a", (NodeStep("Identity"),))}, "a", takes=TAKES)
ONE, ROWS = PipelineRequest([{}]), PipelineRequest([{}, {}], rows=True)


def question_of(value: Any, kind: str) -> PipelineRequest:
    return ask(value, GRAPH, kind)


def outcome(**fields: Any) -> ItemOutcome:
    return ItemOutcome(fields, node="last")


@pytest.mark.parametrize("value", [b"\xff\xd8", memoryview(b"x"), "text", 3, None, [1, 2], [{"data": 1}]])
def test_a_value_is_the_data_of_one_item(value: Any) -> None:
    assert question_of(value, "bytes") == PipelineRequest([{"data": value}])


def test_an_object_is_the_fields_of_one_item_and_names_where_it_begins() -> None:
    question = question_of({"data": "x", "node_name": "b", "other": [1]}, "any")
    assert question == PipelineRequest([{"data": "x", "other": [1]}], "b")
    array = np.zeros(3)
    mixed = question_of({"data": array, "other": 1}, "any")
    assert (len(mixed.fields), mixed.rows) == (1, False), "arrays beside other values are fields of one item"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "found no 'data' among the fields of the request"),
        ({"other": 2}, "found no 'data' among the fields of the request"),
        (
            {"data": 1, "result": 2},
            "found the field 'result', which the pipeline does not take; it takes data, node_name",
        ),
        ({"data": 1, "node_name": 3}, "node_name: found a int, expected the name of a node"),
        ({"input_1": np.zeros((2, 2))}, "found the field 'input_1'"),
        (
            {"data": np.zeros((0, 3)), "box": np.zeros((1, 4))},
            "found data [0, 3], box [1, 4]; expected arrays with equal numbers of rows (axis 0)",
        ),
        ({"input_0": np.zeros(())}, "found data []; expected"),
        ({"data": np.zeros((2, 3)), "box": np.zeros((1, 4))}, "found data [2, 3], box [1, 4]; expected"),
    ],
)
def test_a_request_without_data_is_refused(value: Any, told: str) -> None:
    with pytest.raises(BadRequest) as info:
        question_of(value, "any")
    assert told in info.value.message


def test_a_caller_may_send_only_the_inputs_of_the_pipeline() -> None:
    closed = Graph("net", GRAPH.nodes, "a")
    assert ask({"data": 1}, closed, "any") == PipelineRequest([{"data": 1}])
    for value in ({"data": 1, "node_name": "a"}, {"data": 1, "_box": 2}, {"data": np.zeros(1), "other": np.zeros(1)}):
        with pytest.raises(BadRequest, match=r"which the pipeline does not take; it takes data$"):
            ask(value, closed, "any")


def test_rows_of_a_request_are_bounded() -> None:
    assert len(question_of({"data": np.zeros((4096, 1))}, "tensor").fields) == 4096
    with pytest.raises(BadRequest, match="found 4097 rows, expected at most 4096 in one request"):
        question_of({"data": np.zeros((4097, 1))}, "tensor")


def test_rows_of_tensors_are_items_of_their_own() -> None:
    images = np.array([b"a", b"bc"], object)
    question = question_of({"data": images, "box": np.arange(8).reshape(2, 4)}, "bytes")
    assert question.rows
    assert [fields["data"] for fields in question.fields] == [b"a", b"bc"]
    assert [fields["box"].tolist() for fields in question.fields] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    tensors = question_of({"data": np.zeros((2, 3, 8, 8), np.float32)}, "tensor")
    assert [fields["data"].shape for fields in tensors.fields] == [(1, 3, 8, 8)] * 2
    assert len(question_of({"input_0": np.zeros((2, 3))}, "tensor").fields) == 2, "an array alone has no name"
    mats = question_of({"data": np.zeros((2, 5, 4, 3), np.uint8)}, "mat")
    assert [fields["data"].shape for fields in mats.fields] == [(5, 4, 3)] * 2


def test_one_output_is_itself_and_several_are_an_object() -> None:
    array = np.zeros((1, 3))
    assert response_of(ONE, [outcome(result=array)], ("result",)) is array
    assert response_of(ONE, [outcome(result=0, label="cat")], ("label", "result")) == {"label": "cat", "result": 0}
    assert response_of(ONE, [outcome(result=0)], ("label", "result")) == {"label": None, "result": 0}


def test_the_error_of_an_item_is_that_of_its_request() -> None:
    bad = ItemOutcome({}, BadRequest("wrong"))
    for question, outcomes in ((ONE, [bad]), (ROWS, [outcome(result=1), bad])):
        with pytest.raises(BadRequest, match="wrong"):
            response_of(question, outcomes, ("result",))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([np.array([[1.0, 2]]), np.array([[3.0, 4]])], [[1, 2], [3, 4]]),
        ([np.array([1.0, 2]), np.array([3.0, 4])], [[1, 2], [3, 4]]),
        ([1, 2], [1, 2]),
        (["cat", "dog"], ["cat", "dog"]),
        ([b"a", b"bc"], [b"a", b"bc"]),
    ],
)
def test_rows_are_joined_along_the_first_axis(values: list[Any], wanted: Any) -> None:
    answer = response_of(ROWS, [outcome(result=value) for value in values], ("result",))
    assert answer.keys() == {"result"}
    assert answer["result"].tolist() == wanted


def test_several_tensors_of_a_model_are_outputs_with_names_of_their_own() -> None:
    rows = [outcome(result=[np.array([[i]]), np.array([[i, i]])]) for i in (1, 2)]
    answer = response_of(ROWS, rows, ("result",))
    assert {name: array.tolist() for name, array in answer.items()} == {
        "result_0": [[1], [2]],
        "result_1": [[1, 1], [2, 2]],
    }
    named = response_of(ROWS, [outcome(result={"score": 0.5}), outcome(result={"score": 1.0})], ("result",))
    assert named["score"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([np.zeros((2, 3)), np.zeros((4, 3))], "rows of different shapes"),
        ([{"a": 1}, {"b": 1}], "has different parts in different rows"),
        ([{"a": 1}, 2], "has different parts in different rows"),
    ],
)
def test_rows_that_form_no_array_are_an_error(values: list[Any], told: str) -> None:
    with pytest.raises(BadOutput, match=told):
        response_of(ROWS, [outcome(result=value) for value in values], ("result",))


def test_tensors_of_torch_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1, 2, requires_grad=True)
    assert response_of(ONE, [outcome(result=tensor)], ("result",)).tolist() == [[1, 1]]


def test_the_path_of_an_item_is_a_server_timing_header() -> None:
    hops = [Hop("decode", 12, 4, 0.0003, 0.00193), Hop('a "b",c', 1, 1, 0.0, 0.5)]
    assert server_timing(hops) == (
        'decode;dur=1.930;desc="batch 12 of 4, waited 0.300 ms", '
        'a__b__c;dur=500.000;desc="batch 1 of 1, waited 0.000 ms"'
    )
