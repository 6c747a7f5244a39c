"""TorchPipe's keys that select engines, add ops around a model, or divide instances among nodes."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.convert import to_toml
from penstock.pipeline.graph import Each, Graph
from penstock.pipeline.load import parse_graph
from penstock.torchpipe.expressions import ENGINES

NET = {"backend": "TensorrtTensor", "model": "/m.onnx"}
MAIN = "List[InstancesRegister[BackgroundThread[Reflect[backend]]], Register[IoCV0[SharedInstancesState,"
MAIN += "InstanceDispatcher,Batching;DI_v0[Batching, InstanceDispatcher]]]]"


def graph(tables: dict[str, Any]) -> Graph:
    return parse_graph(tables, name="t", folder="/", compat=True)


def ops(**keys: Any) -> list[str]:
    """The ops of a node with these keys."""
    return [step.op for step in graph({"a": keys}).nodes["a"].steps]


def refused(tables: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as found:
        graph(tables)
    return found.value.message


@pytest.mark.parametrize("engine", ENGINES)
def test_every_schedule_is_the_only_one(engine: str) -> None:
    keys = {"Interpreter::backend": "PipelineV3", "PipelineV3::backend": engine, "scheduler": engine}
    assert ops(backend="S[DecodeMat,ResizeMat(resize_h=2,resize_w=3)]", **keys) == ["DecodeMat", "ResizeMat"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"Interpreter::backend": "C10Exception"}, ["C10Exception"]),
        ({"Interpreter::backend": "PipelineV3[ Schedule[Identity] ]"}, ["Identity"]),
        ({"Interpreter::backend": "Range[S[OnnxTensor,SyncTensor]]", "model": "/m.onnx", "max": 9}, ["OnnxTensor"]),
        ({"Schedule::backend": "S[DecodeMat]"}, ["DecodeMat"]),
        ({"backend": "Sequential", "Sequential::backend": "DecodeMat,FloatMat"}, ["DecodeMat", "FloatMat"]),
        ({"backend": "SequentialV0[DecodeMat,Parallel[FloatMat],EventLoop]"}, ["DecodeMat", "FloatMat"]),
    ],
)  # fmt: skip
def test_an_engine_may_contain_the_backend(keys: dict[str, Any], expected: list[str]) -> None:
    assert ops(**keys) == expected


def test_a_backend_inside_and_beside_an_engine_is_refused() -> None:
    message = refused({"a": {"backend": "Identity", "Interpreter::backend": "DecodeMat"}})
    assert "[a] Interpreter::backend: found the string 'DecodeMat', but the node also has a backend" in message


@pytest.mark.parametrize("key", ["node_entrypoint", "entrypoint"])
def test_the_present_branchs_usual_scheduler_is_the_only_one(key: str) -> None:
    assert ops(backend="Identity", **{key: MAIN}) == ["Identity"]
    assert ops(backend="Identity", **{key: "Register[Forward[node.{node_name}]]"}) == ["Identity"]
    message = refused({"a": {key: "Register[Random(0.5)[node.b,node.c]]"}})
    assert f"[a] {key}: found Random, node.b, node.c, expected only parts of the usual scheduler" in message


@pytest.mark.parametrize("key", ["postprocessor", "post_processor"])
def test_a_postprocessor_is_an_op_after_the_model(key: str) -> None:
    assert ops(**NET, **{key: "SoftmaxMax"}) == ["TensorrtTensor", "SoftmaxMax"]
    assert ops(**NET, preprocessor="FloatTensor") == ["FloatTensor", "TensorrtTensor"]
    for name in ("split", "cpu", "SingleConcatPreprocess"):
        assert ops(**NET, **{key: name}) == ["TensorrtTensor"]
    assert f"{key}: needs 'backend' in the same table" in refused({"a": {key: "SoftmaxMax"}})


def test_batch_process_is_an_op_between_model_and_postprocessor() -> None:
    keys = {"batch_process": "CpuTensor", "postprocessor": "SoftmaxCpu"}
    assert ops(**NET, **keys) == ["TensorrtTensor", "CpuTensor", "SoftmaxCpu"]


@pytest.mark.parametrize("key", ["precision::fp32", "precision::output::fp32", "force_layer_norm_pattern_fp32"])
def test_a_layer_in_fp32_needs_the_whole_node_in_fp32(key: str, caplog: pytest.LogCaptureFixture) -> None:
    def precision(**keys: Any) -> Any:
        return graph({"a": NET | keys}).nodes["a"].steps[0].params["precision"]

    assert precision(**{"precision": "fp16", key: "1"}) == "fp32"
    assert "[a] precision: is fp32, because some layers need it" in caplog.text
    assert precision(**{"precision": "fp16", key: "0"}) == "fp16"


def test_keys_that_name_what_happens_anyway_are_accepted() -> None:
    keys = {"model_type": ".onnx", "cal_request_size_method": "CalTorchBatchSize", "contiguous_batching": "0"}
    assert ops(**NET, **keys, **{"Interpreter::env": "Logger"}) == ["TensorrtTensor"]


def test_groups_of_a_node_are_files_and_sizes_of_one_model() -> None:
    keys = {"max": "1&4", "min": "1&4", "instance_num": "1&2", "batching_timeout": "5 & 2.5", "mean": "1&1"}
    expression = "SyncTensor[TensorrtTensor]&SyncTensor[ TensorrtTensor]"
    made = graph({"a": {"backend": expression, "model": "1.onnx & 4.onnx", "model::cache": "1.trt&4.trt", **keys}})
    node = made.nodes["a"]
    assert (node.instances, node.min_batch, node.max_batch, node.sizes, node.wait_s) == (2, 1, 4, (1, 4), 0.005)
    assert node.steps[0].params["model"] == ["/1.onnx", "/4.onnx"]
    assert node.steps[0].params["model_cache"] == ["/1.trt", "/4.trt"]
    assert parse_graph(tomllib.loads(to_toml(made)), name="t", folder="/").nodes == made.nodes


def test_a_key_may_have_a_value_for_each_op_of_a_sequence() -> None:
    text = "SyncTensor[S[ResizeMat,S[ResizeMat,FloatMat],CvtColorMat]]"
    keys = {"resize_h": "1|2|", "resize_w": 3, "color": "any|thing|rgb"}
    steps = graph({"a": {"backend": text, **keys}}).nodes["a"].steps
    params = [step.params for step in steps]
    assert params == [{"resize_h": 1, "resize_w": 3}, {"resize_h": 2, "resize_w": 3}, {}, {"color": "rgb"}]
    assert "resize_h: found the string '1|2'" in refused(
        {"a": {"backend": text, "resize_h": "1|2", "resize_w": 3, "color": "rgb"}}
    )


def test_a_sequence_is_divided_after_each_call() -> None:
    nodes = graph(
        {
            "in": {"next": "main"},
            "main": {
                "backend": "SyncTensor[S[CopySplit,Jump,MapReduce,FloatMat,SyncTensor]]",
                "jump": "|one|two||",
                "split": "data",
                "split_size": 2,
                "map": "in[result:data]",
                "next": "end",
            },
            "end": {"map": "main[result:data],in[result:first]"},
            "one": {},
            "two": {},
        }
    ).nodes
    main, second, third = nodes["main"], nodes["main-2"], nodes["main-3"]
    assert [[step.op for step in node.steps] for node in (main, second, third)] == [
        ["CopySplit"], ["Identity"], ["FloatMat"]
    ]  # fmt: skip
    assert [node.next for node in (main, second, third)] == [("main-2",), ("main-3",), ("end",)]
    assert (main.each, second.each, third.each) == (Each("one"), Each("two", "data", ("result",)), None)
    assert [i.producer for i in nodes["end"].inputs] == ["main-3", "in"]
    assert (len(main.inputs), second.inputs) == (1, ())


def test_a_node_borrows_a_group_of_anothers_instances() -> None:
    donor = {**NET, "instance_num": 3, "instances_grp": "1;0,2", "max": "6,6;4,4;8,8", "min": "1,1", "next": "c"}
    nodes = graph(
        {
            "a": donor,
            "b": {"model": "not_there", "backend": "Torch[X]", "borrow_from": "a", "active_instances_grp": 1},
            "c": {},
        }
    ).nodes  # fmt: skip
    a, b = nodes["a"], nodes["b"]
    assert (a.instances, a.max_batch, a.sizes) == (1, 4, ())
    assert (b.instances, b.max_batch, b.sizes, b.next) == (2, 8, (6, 8), ())
    assert b.steps[0].params["model"] == a.steps[0].params["model"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"borrow_from": "z"}, "[b] borrow_from: found the string 'z', expected a node with instances: a"),
        ({"borrow_from": []}, "[b] borrow_from: found a list of 0, expected a node with instances: a"),
        ({"borrow_from": "b"}, "expected a node with instances: a"),
        ({"borrow_from": "a", "active_instances_grp": 2}, "[b] active_instances_grp: found 2, expected a group from 0"),
        ({"instances_grp": "0;0"}, "expected each instance once"),
        ({"instances_grp": "0,1"}, "expected instances from 0 to 0"),
    ],
)  # fmt: skip
def test_wrong_groups_are_refused(keys: dict[str, Any], told: str) -> None:
    donor = {**NET, "instance_num": 2, "instances_grp": "0;1"}
    assert told in refused({"a": donor, "b": keys})
