"""TorchPipe's keys that select engines, add ops around a model, or divide instances among nodes."""

import tomllib
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.describe import to_toml
from penstock.pipeline.graph import Each, Graph
from penstock.pipeline.handover import Visit
from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import NodeModel
from penstock.pipeline.notation import parse, text_of
from penstock.pipeline.ops.base import BatchOp, Fields
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


# ---- expressions as steps


def double(data: Any) -> Any:
    return data * 2


def only_even(data: Any) -> Any:
    """No result for odd numbers."""
    return data if data % 2 == 0 else None


def nothing(data: Any) -> None:
    """No result."""


class Hundreds(BatchOp):
    """Adds 100 to each."""

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        return [each + 100 for each in data]


def results(backend: str, *data: int) -> list[Any]:
    """The result of a node for each data value; None without a result."""
    for name in ("double", "only_even", "nothing", "Hundreds"):
        backend = backend.replace(name, f"Python[{__name__}:{name}]")
    node = parse_graph({"a": {"backend": backend}}, name="t", folder="/").nodes["a"]
    model = NodeModel(node)
    model.load("cpu")
    found = [fields for fields, _ in model.predict([Visit({"data": each}, False) for each in data])]
    model.unload()
    return [fields.get("result") for fields in found]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("S[only_even,double]", [4, None, 8]),
        ("S[only_even,(or)double]", [2, 6, 4]),
        ("S[only_even,(or)S[double,double,double]]", [2, 24, 4]),
        ("S[only_even,(or)S[double,double],double]", [4, 24, 8]),
        ("S[only_even,(or)S[double,Hundreds],double]", [4, 212, 8]),
        ("S[only_even,(or)S[Hundreds,double]]", [2, 206, 4]),
        ("S[only_even,(or)S[Hundreds,Hundreds],double]", [4, 406, 8]),
        ("Hundreds", [102, 103, 104]),
        ("S[double,(or)S[double,double],nothing,(or)S[double,double]]", [16, 24, 32]),
        ("S[HasKey(key=data)[double,Hundreds]]", [4, 6, 8]),
        ("S[only_even,HasKey(key=x)[double],double]", [4, None, 8]),
        ("S[HasKey(key=x)[double,S[Hundreds,double]],double]", [408, 412, 416]),
        ("S[HasKey(key=x)[double,Hundreds],HasKey(key=data)[S[double,double]]]", [408, 412, 416]),
        ("CompareLongKey(key=data,compare_target=3)[Identity,Hundreds]", [102, 3, 104]),
        ("S[double,(break)double,double]", [4, 6, 8]),
        ("S[double,(skip)S[double,Hundreds],double]", [8, 12, 16]),
        ("S[double,(result2other)Hundreds,KeyA2KeyB(key_a=other,key_b=result)]", [4, 6, 8]),
    ],
)
def test_steps_after_a_filter_run_if_it_admits_them(backend: str, expected: list[int | None]) -> None:
    assert results(backend, 2, 3, 4) == expected


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("HasKey", "HasKey takes one or two ops in brackets"),
        ("HasKey[A,B,C]", "HasKey takes one or two ops in brackets"),
        ("HasKey(name=x)[Identity]", "filter HasKey: found name, expected key"),
        ("CompareLongKey(key=x)[Identity]", "filter CompareLongKey: found key, expected compare_target and key"),
        ("CompareLongKey(compare_target=x)[Identity]", "compare_target: found the string 'x', expected a whole number"),
        ("S[Identity,(or)S[Identity,HasKey[Identity]]]", "cannot contain other filters"),
    ],
)
def test_wrong_conditions_of_steps_are_refused(backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_graph({"a": {"backend": backend}}, name="t", folder="/")


def test_conditions_of_steps_stay_in_a_converted_file() -> None:
    text = "S[Identity,HasKey(key=x)[S[FloatMat,Any2Mat],S[FloatMat]],CompareLongKey(compare_target=1)[FloatMat]]"
    graph = parse_graph({"a": {"backend": text}}, name="t", folder="/")
    again = parse_graph(tomllib.loads(to_toml(graph)), name="t", folder="/")
    assert again == graph
    assert [step.filter for step in graph.nodes["a"].steps][2:5] == ["HasKey(key=x)", "then", "else"]


@pytest.mark.parametrize(("value", "message"), [(None, "found no field 'x'"), ("3", "found a str as 'x'")])
def test_a_comparison_of_no_number_fails_its_item_alone(value: Any, message: str) -> None:
    backend = {"backend": f"CompareLongKey[Python[{__name__}:double]]", "compare_target": "3", "key": "x"}
    model = NodeModel(parse_graph({"a": backend}, name="t", folder="/").nodes["a"])
    model.load("cpu")
    wrong = {"data": 1} if value is None else {"data": 1, "x": value}
    failed, (fields, _) = model.predict([Visit(wrong, False), Visit({"data": 2, "x": 3}, False)])
    assert message in str(failed)
    assert fields["result"] == 4


@pytest.mark.parametrize(
    "text",
    [
        "DecodeMat",
        "SyncTensor[TensorrtTensor]",
        "Sequential[ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]",
        "S[S[DecodeTensor,ResizeTensor],(or)S[DecodeMat,ResizeMat]]",
        "ResizeMat(resize_h=224,resize_w=224)",
        "Torch(device_id=1)[S[A,B]]",
        "Python[pkg.mod:Class]",
        "Python[app/post.py:Boxes]",
        "Copy[a:b,c:d]",
        "(swap)Result2Key(key=x)[A]",
    ],
)
def test_an_expression_is_read_as_it_is_written(text: str) -> None:
    assert text_of(parse(text)) == text
    assert text_of(parse(text.replace(",", " , ").replace("[", "\n[\t"))) == text


def test_a_value_may_hold_commas() -> None:
    assert parse("Onnx(mean=1,2,3,std=4)").params == {"mean": "1,2,3", "std": "4"}


def test_positions_count_the_spaces_that_were_written() -> None:
    assert parse("S[ A ,  B]").args[1].position == 9


@pytest.mark.parametrize(
    ("text", "character", "expected"),
    [
        ("", 1, "found the end, expected a name"),
        ("   ", 4, "found the end, expected a name"),
        ("S[A,B", 6, "found the end, expected ',' or ']'"),
        ("S[A,,B]", 5, "found ',', expected a name"),
        ("S[]", 3, "found ']', expected a name"),
        ("A]", 2, "found ']', expected the end"),
        ("A B*", 4, "found '*', expected the end"),
        ("(or", 4, "found the end, expected ')' after the filter"),
        ("()A", 2, "found ')', expected the name of a filter"),
        ("A(k=v", 6, "found the end, expected ')' after the parameters"),
        ("A(k)", 3, "expected a parameter such as resize_h=224"),
        ("A(=1)", 3, "expected a parameter such as resize_h=224"),
        ("A(k=1,k=2)", 7, "expected 'k' once"),
        ("A|B", 2, "found '|', expected the end"),
    ],
)
def test_an_error_names_the_character(text: str, character: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert f"at character {character} of" in caught.value.message
    assert expected in caught.value.message


def test_nesting_of_brackets_is_limited() -> None:
    with pytest.raises(ConfigError, match="at most 20 deep"):
        parse("S[" * 10_000 + "A" + "]" * 10_000)
