"""TorchPipe's keys that select engines, add ops around a model, or divide instances among nodes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.compat import ENGINES
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph

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
