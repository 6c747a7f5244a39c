"""Checks of graphs, and the errors of those that cannot run."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.pipeline.check import check, edges_of, fields_of
from penstock.pipeline.graph import Graph, Node, NodeStep
from penstock.pipeline.load import parse_graph
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp

DIAMOND = """
[decode]
backend = "DecodeMat"
next = "small,large"
[small]
ops = ["ResizeMat", "Mat2Tensor"]
resize_h = 4
resize_w = 4
next = "net"
[large]
ops = [{op = "Result2Key", key = "image"}, "ResizeMat"]
resize_h = 8
resize_w = 8
[net]
backend = "Identity"
inputs = {data = "small", color = "small.color", large = "large"}
"""


def read(text: str) -> Graph:
    return parse_graph(tomllib.loads(text), name="g", folder="/")


def told(graph: Graph) -> str:
    with pytest.raises(ConfigError) as caught:
        check(graph)
    return caught.value.message


def test_edges_have_the_fields_that_ops_declare() -> None:
    graph = read(DIAMOND)
    check(graph)
    edges = {(producer, consumer): fields for producer, consumer, fields in edges_of(graph)}
    assert edges["decode", "small"] == {"color": "any", "data": "mat"}
    assert edges["small", "net"] == {"data": "tensor", "color": "any"}
    assert edges["large", "net"] == {"large": "mat"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            DIAMOND.replace("small.color", "small.colour"),
            "g: [net] inputs: [small] has no field 'colour' for 'color'; it has data, color, data_format, result",
        ),
        (
            DIAMOND.replace('["ResizeMat", "Mat2Tensor"]', '["Mat2Tensor", "ResizeMat"]'),
            "ResizeMat takes 'mat' as data, but",
        ),
        ('[a]\nbackend="DecodeMat"\nnext="b"\n[b]\nbackend="SoftmaxCpu"', "but gets 'mat': Mat2T"),
        (
            '[a]\nops=["Mat2Tensor", "ResizeMat"]\nresize_h=1\nresize_w=1',
            "but gets 'tensor': Tensor2Mat converts one",
        ),
        ('[a]\nops=["DecodeMat", "Identity", "SoftmaxCpu"]', "SoftmaxCpu takes 'tensor' as data, but gets 'mat'"),
        ('[a]\nnext="b"\n[b]\nfilter="filter_score"', "[b] filter 'filter_score' is unknown"),
        ('[a]\nops=["Identity", {op="Identity", filter="chance"}]', "[a] filter 'chance' of op 'Identity' is unknown"),
    ],
)
def test_unsupported_graphs_are_rejected(text: str, message: str) -> None:
    assert message in told(read(text))


@pytest.mark.parametrize("name", ["swap", "or", "Run", "run"])
def test_supported_filters_are_accepted(name: str) -> None:
    graph = read(f'[a]\nnext="b"\n[b]\nfilter="{name}"')
    check(graph)
    assert graph.nodes["b"].filter in ("swap", "or", "run")


def test_a_field_that_callers_send_may_be_mapped() -> None:
    text = '[a]\nnext="b"\n[b]\ninputs={data="a", box="a.box"}'
    assert "[a] has no field 'box' for 'box'" in told(read(text))
    check(read('[pipeline]\ninputs = ["data", "box"]\n' + text))


def test_a_field_of_an_op_that_may_write_any_field_is_accepted() -> None:
    check(read('[a]\nbackend="Copy[data2:other]"\nnext="b"\n[b]\ninputs={data="a", x="a.other"}'))


def test_all_unknown_filters_are_reported_together() -> None:
    text = told(read('[a]\nfilter="x"\nnext="b"\n[b]\nfilter="y"'))
    assert text.index("[a] filter 'x' is unknown") < text.index("[b] filter 'y' is unknown")


ROUTES = """
[a]
next = "b,c"
[b]
when = "kind == 1"
else = "skip_branch"
next = "d"
[c]
next = "e"
when = "kind == 2"
else = "skip_branch"
[e]
next = "d"
[d]
inputs = {data = "b.result", x = "e.result"}
"""


def test_a_join_that_waits_for_branches_that_exclude_each_other_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"g: \[d\]: waits for \[b\] and \[e\], but no item reaches both"):
        read(ROUTES)
    for inputs in (
        '{data = ["b.result", "e.result"]}',
        '{data = "b.result", x = {from = "e.result", default = 1}}',
        '{data = "b.result", x = "e.result"}\nrequire = "any"',
    ):
        check(read(ROUTES.replace('{data = "b.result", x = "e.result"}', inputs)))
    check(read(ROUTES.replace("kind == 2", "other == 2")))


def test_outputs_that_conditions_select_may_give_the_same_field() -> None:
    routes = ROUTES.partition("[e]")[0].replace('next = "d"\n', "").replace('next = "e"\n', "")
    check(read(routes))
    assert "is an output with the field 'result', and so is [b]" in told(
        read(routes.replace('when = "kind == 2"\nelse = "skip_branch"', ""))
    )


def test_a_node_that_an_item_may_skip_gives_the_kind_of_its_data_too() -> None:
    text = '[a]\nbackend="DecodeMat"\nnext="b"\n[b]\nbackend="Mat2Tensor"\nnext="c"\n{}\n[c]\nbackend="SoftmaxCpu"'
    for keys in ('when="color"', 'on_error="skip"'):
        assert edges_of(read(text.format(keys)))[1][2]["data"] == "any"
    assert edges_of(read(text.format("")))[1][2]["data"] == "tensor"


def test_graphs_built_in_code_are_checked_in_the_same_way() -> None:
    graph = read('[a]\nnext="b"\n[b]')
    node = graph.nodes["b"]
    wrong = {
        "[b] next: there is no node 'c'": replace(node, next=("c",)),
        "the nodes a -> b -> a are in a cycle": replace(node, next=("a",)),
        "unknown op 'DecodMat'": replace(node, steps=(NodeStep("DecodMat"),)),
        "[b]: ResizeMat has no parameter 'height'": replace(node, steps=(NodeStep("ResizeMat", {"height": 3}),)),
        "[b]: ResizeMat: resize_h = 0, expected 1": replace(
            node, steps=(NodeStep("ResizeMat", {"resize_h": 0, "resize_w": 4}),)
        ),
        "[b] ops: found no step": replace(node, steps=()),
    }
    for message, changed in wrong.items():
        assert message in told(replace(graph, nodes={**graph.nodes, "b": changed}))
    assert "entry: there is no node 'c'" in told(replace(graph, entry="c"))
    assert "entry: there is no node 'c'" in told(Graph("g", {"a": Node("a", (NodeStep("Identity"),))}, "c"))


def test_a_step_with_the_filter_run_reuses_the_original_data() -> None:
    graph = parse_graph({"a": {"ops": ["DecodeMat", {"op": "DecodeTensor", "filter": "run"}]}}, name="t", folder=".")
    check(graph)
    assert fields_of(graph)["a"]["result"] == "tensor"


TWO_ENDS = """
[a]
backend = "Identity"
next = "b,c"
[b]
backend = "SoftmaxArgMax"
[c]
backend = "SoftmaxArgMax"
"""


def test_two_outputs_that_give_the_same_field_are_an_error() -> None:
    assert "[c]: is an output with the field 'result', and so is [b]" in told(read(TWO_ENDS))
    assert "the field 'score'" in told(read(TWO_ENDS + '[pipeline]\noutputs = ["score"]\n'))
    text = TWO_ENDS.replace('[c]\nbackend = "SoftmaxArgMax"', '[c]\nbackend = "CvtColorTensor"\ncolor = "rgb"')
    check(read(text + '[pipeline]\noutputs = ["score", "color"]\n'))
    roots = '[a]\nbackend = "Identity"\n[b]\nbackend = "Identity"\n'
    check(parse_graph(tomllib.loads(roots), name="g", folder="/", compat=True))  # an item reaches only one of them


# ---- fields at each node of a graph with fan-outs


BOXES = """
[boxes]
ops = ["DecodeMat", "Boxes"]
next = "read"
[read]
each = "box"
body = "crop"
gather = ["text", "box"]
next = "end"
[crop]
ops = ["Text"]
[end]
"""
CALL = BOXES.replace('each = "box"\n', "").replace('gather = ["text", "box"]\n', "")


class Boxes(ItemOp):
    takes, gives, writes = "mat", "mat", ("box",)

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        return data


class Text(Boxes):
    writes = ("text",)


@pytest.fixture(autouse=True)
def _known() -> None:
    catalog.register("Boxes", Boxes)
    catalog.register("Text", Text)


def test_children_have_the_fields_of_their_item_and_the_item_has_the_gathered_ones() -> None:
    graph = read(BOXES)
    fields = fields_of(graph)
    assert fields["crop"] == {"data": "mat", "color": "any", "box": "any", "text": "any", "result": "mat"}
    assert fields["read"] == fields["crop"]
    assert ("read", "crop", {"data": "mat", "color": "any", "box": "any"}) in edges_of(graph)


def test_a_call_of_a_sub_graph_leaves_its_fields_also_if_two_nodes_share_it() -> None:
    assert fields_of(read(CALL))["end"] == fields_of(read(BOXES))["end"]
    twice = CALL.replace('next = "end"\n', 'next = "more"\n[more]\nbody = "crop"\nnext = "end"\n')
    assert fields_of(read(twice))["crop"]["text"] == "any"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BOXES.replace('each = "box"', 'each = "boxes"'),
            "g: [read] each: there is no field 'boxes'; there are data, color, box, result",
        ),
        (
            BOXES.replace('"text", "box"', '"text", "score"'),
            "g: [read] gather: the body, which begins at [crop], leaves the field 'score' out; it",
        ),
        (BOXES.replace('["Text"]', '["SoftmaxCpu"]'), "[crop] SoftmaxCpu takes 'tensor' as data, but gets 'mat'"),
    ],
)
def test_a_fan_out_that_could_never_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        fields_of(read(text))
    assert message in str(e.value)
