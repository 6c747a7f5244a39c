"""Pipelines built in Python."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest

from penstock import Pipeline
from penstock.errors import ConfigError
from penstock.pipeline.graph import Each, NodeInput, NodeStep
from penstock.pipeline.load import load_graph, parse_graph
from penstock.pipeline.steps import (
    ArgMax,
    Convert,
    Decode,
    Letterbox,
    NodeField,
    Onnx,
    Resize,
    Softmax,
    TorchScript,
    ToTensor,
    Use,
)


class Scale:
    """A user's step."""

    takes = "tensor"
    gives = "tensor"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, data: Any) -> Any:
        return data * self.factor


def shape_of(data: Any, fields: dict[str, Any]) -> Any:
    fields["shape"] = np.shape(data)
    return data


def classify(folder: Path) -> Pipeline:
    p = Pipeline("classify", folder=folder)
    image = p.node("decode", Decode("rgb"), instances=6)
    prep = p.node("prep", Resize(224, 224) >> ToTensor())(image)
    net = p.node("net", Onnx("net.onnx", mean=(1, 2, 3), std=[4, 5, 6]) >> Softmax(), max_batch=8, wait_ms=3)(prep)
    p.output(net)
    return p


def test_a_pipeline_is_the_graph_of_its_nodes(tmp_path: Path) -> None:
    p = classify(tmp_path)
    p.check()
    graph = p.graph
    assert (graph.name, graph.entry, graph.outputs) == ("classify", "decode", ("net",))
    assert graph.nodes["decode"].steps == (NodeStep("DecodeMat"), NodeStep("CvtColorMat", {"color": "rgb"}, "swap"))
    assert graph.nodes["decode"].instances == 6
    assert graph.nodes["net"].wait_s == 0.003
    assert graph.nodes["net"].steps[0].params == {
        "model": str(tmp_path / "net.onnx"),
        "mean": (1.0, 2.0, 3.0),
        "std": (4.0, 5.0, 6.0),
        "max_batch": 8,
    }


def test_its_toml_is_the_same_pipeline(tmp_path: Path) -> None:
    p = classify(tmp_path)
    (tmp_path / "p.toml").write_text(p.to_toml())
    assert load_graph(tmp_path / "p.toml") == p.graph
    again = Pipeline.from_toml(tmp_path / "p.toml")
    assert again.graph == p.graph
    assert again.to_toml() == p.to_toml()
    assert 'model = "../net.onnx"' not in p.to_toml(tmp_path / "sub")


def test_a_pipeline_from_toml_may_be_extended(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(classify(tmp_path).to_toml())
    p = Pipeline.from_toml(tmp_path / "p.toml")
    p.node("best", ArgMax())(p["net"])
    assert p.graph.outputs == ("best",)
    with pytest.raises(ConfigError, match="there is no node 'nett'; did you mean 'net'"):
        p["nett"]


def test_fields_of_several_nodes_meet_in_one(tmp_path: Path) -> None:
    p = Pipeline("meet", folder=tmp_path, inputs=("data", "box"), trace=True, in_flight=9, entry="decode")
    image = p.node("decode", Decode())
    small = p.node("small", Letterbox(8) >> Convert("gray"))(image)
    both = p.node("both", Use("Identity"))(data=image, small=small.result, box=image.box)
    one = p.node("one", Use("Identity"))(both.small)
    p.output(one, one.small)
    graph = p.graph
    assert graph.nodes["both"].inputs == (
        NodeInput("decode", "result", "data"),
        NodeInput("small", "result", "small"),
        NodeInput("decode", "box", "box"),
    )
    assert graph.nodes["one"].inputs == (NodeInput("both", "small", "data"),)
    assert (graph.gives, graph.takes, graph.trace, graph.in_flight) == (("small",), ("data", "box"), True, 9)
    assert graph.nodes["decode"].next == ("small", "both")


def test_a_users_class_and_function_are_steps(tmp_path: Path) -> None:
    p = Pipeline("own", folder=tmp_path)
    p.node("a", Resize(2, 2) >> ToTensor() >> Use(Scale, factor=2) >> shape_of)
    steps = p.graph.nodes["a"].steps
    assert steps[2].params == {"target": f"{__name__}:Scale", "factor": 2.0}
    assert steps[3].params == {"target": f"{__name__}:shape_of"}
    p.node("b", Scale >> ToTensor())(p["a"])
    assert [s.op for s in p.graph.nodes["b"].steps] == ["Python", "Mat2Tensor"]


def test_a_class_of_the_main_program_is_written_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.Scale = type("Scale", (Scale,), {"__module__": "__main__"})  # type: ignore[attr-defined]
    main.__file__ = str(tmp_path / "program.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    (tmp_path / "program.py").write_text("class Scale:\n    def __call__(self, data):\n        return data\n")
    p = Pipeline("own", folder=tmp_path)
    p.node("a", main.Scale)
    assert p.graph.nodes["a"].steps[0].params["target"] == "__main__:Scale"
    assert 'target = "program.py:Scale"' in p.to_toml()
    del main.__file__
    with pytest.raises(ConfigError, match="is not defined in a file"):
        p.to_toml()


def test_a_built_pipeline_runs(tmp_path: Path) -> None:
    p = Pipeline("small", folder=tmp_path)
    image = p.node("decode", Decode())
    p.node("prep", Resize(2, 3) >> ToTensor("nhwc"))(image)
    _, png = cv2.imencode(".png", np.full((5, 5, 3), 7, np.uint8))
    with p.local() as running:
        outcome = running.infer({"data": png.tobytes()})
    assert outcome.fields["result"].tolist() == np.full((1, 2, 3, 3), 7).tolist()


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda p, a: p.node("a", Decode()), "there is already a node 'a'"),
        (lambda p, a: p.node("metrics", Decode()), "'metrics' cannot be a node's name: TOML files use that table"),
        (lambda p, a: p.node("b", Decode())(Pipeline("q").node("c", Decode())), "<node c>, which belongs to another"),
        (lambda p, a: a(), "[a] follows nothing"),
        (
            lambda p, a: p.node("b", Decode())(a, image=a.result),
            "takes either all fields of <node a> or the named ones",
        ),
        (lambda p, a: p.each(a, lambda box: None), "found a NodeRef (<node a>), expected a field such as boxes.box"),
        (lambda p, a: p.each(a.boxes, lambda box: None), "[each_boxes] the body begins at no node, expected one"),
        (
            lambda p, a: p.each(a.boxes, lambda box: (p.node("b", ToTensor()), p.node("c", ToTensor()))),
            "[each_boxes] the body begins at b, c, expected one node that the others follow",
        ),
        (lambda p, a: p.node("b", lambda data: data), "cannot be found by its name"),
        (lambda p, a: p.node("b", Scale()), "write Use(Scale, ...) with its parameters"),
        (lambda p, a: p.node("b", 3), "found 3, expected a class or a function"),
        (
            lambda p, a: (p.output(a), p.node("b", ToTensor())(a), p.graph),
            "[a] is an output, but other nodes follow it",
        ),
        (
            lambda p, a: (p.node("b", ToTensor())(a), p.node("c", ToTensor())(a), p.output(p["b"]), p.graph),
            "[c] is the last, but not an output",
        ),
        (lambda p, a: (p.node("b", Resize(0, 0) >> Decode())(a), p.check()), "ResizeMat"),
        (lambda p, a: (p.node("b", ToTensor() >> Decode())(a), p.check()), "DecodeMat takes 'bytes' as data"),
        (lambda p, a: (p.node("b", TorchScript("m.pt", std=[1]), max_batch=0)(a), p.graph), "max_batch: found 0"),
        (lambda p, a: (p.node("b", Use("DecodMat")), p.graph), "unknown op 'DecodMat'; did you mean 'DecodeMat'?"),
    ],
)
def test_invalid_pipelines_are_rejected(tmp_path: Path, build: Any, told: str) -> None:
    p = Pipeline("wrong", folder=tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(p, p.node("a", Decode()))
    assert told in caught.value.message


def routed() -> Pipeline:
    """Bytes go through one of two nodes, or again through the first."""
    p = Pipeline("routed")
    start = p.node("start", Use("Identity"))
    low = p.node("low", Use("AddInt", pairs="n:1"), when="data < '5'", otherwise="skip_branch")(start)
    high = p.node("high", Use("AddInt", pairs="n:2"), when="not data < '5'", otherwise="skip_branch")(start)
    again = p.alias(low, "2", when="data == '7'", otherwise="skip_branch")(high)
    p.node("end", Use("Identity"))(data=(low, high), n=low.n.default(0), last=again.n.default(9))
    return p


def test_conditions_defaults_and_aliases_are_built_and_written(tmp_path: Path) -> None:
    p = routed()
    p.check()
    (tmp_path / "p.toml").write_text(p.to_toml())
    again = Pipeline.from_toml(tmp_path / "p.toml")
    assert again.to_toml() == p.to_toml()
    assert again["low.2"].n == NodeField("low.2", "n")
    with p.local() as local:
        outcomes = local.infer_many([{"data": text} for text in "178"])
    assert [(o.error, o.fields["n"], o.fields["last"]) for o in outcomes] == [(None, 1, 9), (None, 0, 1), (None, 0, 9)]


def test_a_fan_out_is_built_from_its_first_node_or_from_a_function() -> None:
    p = Pipeline("p")
    image = p.node("image", "Identity")
    boxes = p.node("boxes", "Identity")(image)
    crop = p.node("crop", "Identity")
    p.node("text", "Identity")(crop)
    first = p.each(boxes.box, crop, gather=["result", "box"], max_fanout=9, on_item_error="drop", max_batch=2)
    inner = lambda box: p.each(p.node("b", "Identity")(data=image.result, box=box).result, crop, "in")  # noqa: E731
    p.output(p.each(first.box, inner, "again").result)
    graph = p.graph
    assert graph.nodes["each_box"].each == Each("crop", "box", ("result", "box"), 9, "drop")
    assert (graph.nodes["again"].each, graph.nodes["in"].each) == (
        Each("b", "box", ("result",)),
        Each("crop", "result", ("result",)),
    )
    assert (graph.outputs, graph.bodies["b"], graph.bodies["crop"]) == (("again",), {"b", "in"}, {"crop", "text"})
    assert parse_graph(tomllib.loads(p.to_toml()), name="p", folder=graph.folder) == graph
