"""Graphs of the kinds that TorchPipe publishes, run: fallbacks, joins, outputs of several kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from penstock.torchpipe import parse_toml, pipe, register_backend

PIXELS = np.random.default_rng(1).integers(0, 255, (12, 20, 3), np.uint8)
PNG = cv2.imencode(".png", PIXELS)[1].tobytes()
SMALL = {"resize_h": 6, "resize_w": "10", "color": "rgb"}
EXPECTED = cv2.cvtColor(cv2.resize(PIXELS, (10, 6)), cv2.COLOR_BGR2RGB).transpose(2, 0, 1)[None]


class Refuses:
    """An op without results, like a decoder that cannot read these bytes."""

    def forward(self, items: list[dict[str, Any]]) -> None: ...


@pytest.mark.parametrize("first", ["Refuses", "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"])
@pytest.mark.parametrize("nodes", [False, True])
def test_another_decoder_reads_what_the_first_did_not(make_pipe: Callable[..., pipe], first: str, nodes: bool) -> None:
    register_backend(Refuses)
    second = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]"
    if nodes:
        tables = {
            "first": {"backend": first, "filter": "run", "next": "second", **SMALL},
            "second": {"backend": second, "filter": "or", "next": "net", **SMALL},
            "net": {"backend": "SyncTensor[FloatTensor]"},
        }
    else:
        tables = {
            "both": {"backend": f"S[{first},(or){second}]", "next": "net", **SMALL},
            "net": {"backend": "SyncTensor[FloatTensor]"},
        }
    item: dict[str, Any] = {"data": PNG}
    make_pipe(tables)(item)
    assert isinstance(item["result"], torch.Tensor)
    assert np.array_equal(item["result"].numpy(), EXPECTED)


def test_branches_meet_by_their_map(make_pipe: Callable[..., pipe]) -> None:
    register_backend(lambda data: data * 10, "Tens")
    joined = make_pipe(
        {
            "global": {"instance_num": "2", "Interpreter::backend": "PipelineV3"},
            "decode": {"backend": "Identity", "next": "prep,crop"},
            "prep": {"backend": "Tens", "next": "det"},
            "det": {"backend": "Identity", "next": "crop"},
            "crop": {
                "backend": "Identity",
                "map": "decode[TASK_RESULT_KEY:TASK_DATA_KEY] ,det[ TASK_RESULT_KEY :TASK_BOX_KEY]",
                "next": "topython",
            },
            "topython": {},
        }
    )
    items: list[dict[str, Any]] = [{"data": i} for i in range(20)]
    joined(items)
    assert [(item["result"], item["_box"]) for item in items] == [(i, 10 * i) for i in range(20)]


def test_a_map_may_name_an_earlier_node(make_pipe: Callable[..., pipe]) -> None:
    back = make_pipe(
        {
            "in": {"next": "resize"},
            "resize": {"backend": "SyncTensor[ResizeTensor]", "resize_h": "6", "resize_w": "10", "next": "final"},
            "final": {"map": "in[result:data]"},
        }
    )
    item: dict[str, Any] = {"data": torch.zeros(1, 3, 8, 8)}
    back(item)
    assert item["result"].shape == (1, 3, 8, 8)


def test_scores_and_classes_are_fields_of_the_dict(make_pipe: Callable[..., pipe]) -> None:
    scores = make_pipe({"a": {"backend": "Identity", "next": "b"}, "b": {"backend": "S[SoftmaxArgMaxTensor]"}})
    item: dict[str, Any] = {"data": torch.tensor([[0.0, 9.0, 0.0]])}
    scores(item)
    assert item["result"] == 1
    assert item["score"] == pytest.approx(1, abs=1e-3)


def test_the_field_color_determines_the_order_of_pixels(make_pipe: Callable[..., pipe]) -> None:
    to_rgb = make_pipe({"backend": "cvtColorMat", "color": "rgb"})
    for color, same in (("rgb", True), ("bgr", False)):
        item: dict[str, Any] = {"data": PIXELS, "color": color}
        to_rgb(item)
        assert np.array_equal(item["result"], PIXELS if same else PIXELS[:, :, ::-1])
        assert item["color"] == "rgb"


def test_rows_are_borrowed_for_another_items_batch(make_pipe: Callable[..., pipe]) -> None:
    pool = make_pipe({"backend": "BorrowReplay", "max_batch_size": 123})

    def call(data: list[Any], kind: str, owner: int) -> Any:
        item: dict[str, Any] = {"data": data, "borrow_type": kind, "id": owner}
        pool(item)
        return item.get("result")

    first, center = torch.randn(3, 2), torch.randn(119, 2)
    assert call([first], "borrow_or_insert", 1) is None
    assert call([center], "borrow_or_insert", 2) is None
    one, other = call([torch.zeros(2, 2)], "borrow_or_insert", 3)
    assert torch.equal(one[0], first)
    assert torch.equal(other[0], center[:118])
    with pytest.raises(RuntimeError, match="no replay of the rows of item 2"):
        call([], "get_replay", 2)
    call([[first * 2], [center[:118] * 2]], "set_replay", 3)
    assert torch.equal(call([], "get_replay", 2)[0][0], center[:118] * 2)
    assert torch.equal(call([], "borrow_all", 4)[0][0], center[118:])
    call([], "reset", 0)
    assert call([], "borrow_all", 4) == []
    with pytest.raises(RuntimeError, match="expected tensors with 1 to 122 rows"):
        call([torch.zeros(123, 2)], "borrow_or_insert", 5)
    with pytest.raises(RuntimeError, match="found borrow_type 'lend'"):
        call([], "lend", 5)


def test_an_item_names_the_branch_that_runs(make_pipe: Callable[..., pipe]) -> None:
    nodes = {"a": {"next": "b"}, "b": {"backend": "Add[b:ran]", "filter": "Target", "target": "big"}}
    chosen = make_pipe(nodes)
    for item, runs in (({"data": 1}, True), ({"data": 1, "target": "big"}, True), ({"data": 1, "target": "c"}, False)):
        chosen(item)
        assert ("b" in item, item["result"]) == (runs, 1)


@pytest.mark.parametrize("backend", ["S[Identity,(half_chance)Add[ran:yes]]", "Identity"])
def test_half_of_the_items_skip_an_op_or_a_node(make_pipe: Callable[..., pipe], backend: str) -> None:
    nodes = {"a": {"backend": backend, "next": "b"}, "b": {"backend": "Add[ran:yes]"}}
    if backend == "Identity":
        nodes["b"]["filter"] = "half_chance"
    else:
        nodes = {"a": {"backend": backend}}
    items: list[dict[str, Any]] = [{"data": i} for i in range(60)]
    make_pipe(nodes)(items)
    assert 0 < sum("ran" in item for item in items) < 60  # wrong once in 10^18 runs
    assert [item["result"] for item in items] == list(range(60))


def test_a_filter_keeps_the_result_of_an_op_for_later_nodes(make_pipe: Callable[..., pipe]) -> None:
    nodes = {
        "decode": {"backend": "S[DecodeMat,(result2other)cvtColorMat,ResizeMat]", **SMALL, "next": "end"},
        "end": {"map": "decode[other:data,result:small]"},
    }
    item: dict[str, Any] = {"data": PNG}
    make_pipe(nodes)(item)
    assert np.array_equal(item["result"], PIXELS)
    assert item["small"].shape == (6, 10, 3)


@pytest.mark.parametrize(("items", "expected"), [({"restart": 1}, {"end"}), ({}, {"kept"})])
def test_a_key_chooses_between_two_ops(make_pipe: Callable[..., pipe], items: Any, expected: set[str]) -> None:
    item: dict[str, Any] = {"data": 1, **items}
    make_pipe({"backend": "S[Identity,HasKey[AddInt[end:1],AddInt[kept:1]]]", "key": "restart"})(item)
    assert {"end", "kept"} & item.keys() == expected
    assert item["result"] == 1


def test_copies_of_the_data_go_through_another_graph(make_pipe: Callable[..., pipe]) -> None:
    nodes = {
        "copies": {"backend": "CopySplit", "split_size": 3, "next": "each"},
        "each": {"backend": "MapReduce", "jump": "one", "split": "data", "merge": "result"},
        "one": {"backend": "Result2Key"},
    }
    item: dict[str, Any] = {"data": 5, "node_name": "copies"}
    make_pipe(nodes)(item)
    assert item["result"] == [5, 5, 5]


def test_models_of_fixed_rows_serve_any_number_of_items(make_pipe: Callable[..., pipe], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    for rows in (1, 4):
        x, y, z, w = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [rows, 3, 2]) for name in "xyzw")
        steps = [onnx.helper.make_node("Identity", ["x"], ["z"]), onnx.helper.make_node("Add", ["x", "y"], ["w"])]
        graph = onnx.helper.make_graph(steps, "g", [x, y], [z, w])
        opset = onnx.helper.make_opsetid("", 17)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / f"{rows}.onnx")
    keys = {"instance_num": 2, "batching_timeout": "5", "min": "1&4", "max": "1&4"}
    files = f"{tmp_path}/1.onnx&{tmp_path}/4.onnx"
    model = make_pipe({"model": files, "backend": "SyncTensor[TensorrtTensor]", **keys})
    items = [{"data": [torch.full((1, 3, 2), i, dtype=torch.uint8)] * 2} for i in range(7)]
    model(items)
    for i, item in enumerate(items):
        same, added = item["result"]
        assert torch.equal(same, torch.full((1, 3, 2), float(i)))
        assert torch.equal(added, 2 * same)


DIAMONDS = {
    "r1": {"next": "a1,b1"},
    "a1": {"map": "[result:data,result:first]", "next": "a2,a3"},
    "a2": {"backend": "Tens", "next": "a4"},
    "a3": {"backend": "Tens", "next": "a4"},
    "a4": {"map": "[result:data,result:both]", "next": "r2"},
    "b1": {"backend": "Tens", "next": "b2"},
    "b2": {"backend": "Tens", "next": "r2"},
    "r2": {"map": "a4[result:data],b2[result:other]"},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (10, 100)),
        ({"a2": {"filter": "Skip"}}, (1, 100)),
        ({"a3": {"filter": "Skip"}}, (10, 100)),
        ({"a4": {"filter": "Skip"}, "b2": {"filter": "Skip"}}, (10, 10)),
        ({"b1": {"filter": "SerialSkip", "backend": "C10Exception"}, "b2": {"backend": "C10Exception"}}, (10, 1)),
        ({"a1": {"filter": "SubGraphSkip"}, "a4": {"backend": "C10Exception"}}, (1, 100)),
        ({"a1": {"filter": "SubGraphSkip"}, "r2": {"map": "a4[first:data],b2[result:other]"}}, (1, 100)),
        ({"r2": {"filter": "Break", "backend": "C10Exception"}}, (10, 100)),
    ],
)
def test_filters_skip_what_comes_next(make_pipe: Callable[..., pipe], changes: Any, expected: tuple[int, int]) -> None:
    register_backend(lambda data: data * 10, "Tens")
    item: dict[str, Any] = {"data": 1}
    make_pipe({name: keys | changes.get(name, {}) for name, keys in DIAMONDS.items()})(item)
    assert (item["result"], item["other"]) == expected


def test_a_skipped_sub_graph_may_have_several_ends(make_pipe: Callable[..., pipe]) -> None:
    register_backend(lambda data: data * 10, "Tens")
    nodes = {
        "in": {"next": "first,aside"},
        "first": {"backend": "Tens", "filter": "SubGraphSkip", "next": "x,y"},
        "x": {"backend": "Tens", "next": "z"},
        "y": {"backend": "Tens", "next": "z,end"},
        "z": {"map": "x[result:data],y[result:y]", "next": "end"},
        "aside": {"backend": "Tens", "next": "end"},
        "end": {"map": "aside[result:data],y[result:y],z[result:z]"},
    }
    item: dict[str, Any] = {"data": 1}
    make_pipe(nodes)(item)
    assert (item["result"], item["y"], item["z"]) == (10, 1, 1)


def test_a_map_without_a_node_takes_the_first_by_name(
    make_pipe: Callable[..., pipe], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    nodes: dict[str, Any] = {
        "det": {"next": "rec,crop"},
        "rec": {"next": "final"},
        "crop": {"backend": "CopySplit", "split_size": 5, "next": "reduce"},
        "reduce": {"backend": "MapReduce", "jump": "rec.2", "map": "[result:data]", "next": "combine"},
        "combine": {"next": "final"},
        "final": {"map": "[result:data]"},
    }
    file = tmp_path / "graph.toml"
    lines = [
        f"[{name}]\n" + "".join(f'{key} = "{value}"\n' for key, value in keys.items()) for name, keys in nodes.items()
    ]
    file.write_text("\n".join(lines) + "[rec.2]\n")
    config = parse_toml(file)
    config["rec.2"]["backend"] = "C10Exception"  # an alias has the backend of its node
    item: dict[str, Any] = {"data": 1, "node_name": "det"}
    make_pipe(config)(item)
    assert item["result"] == [1] * 5
    assert "[final] map: result: taken from 'combine', the first by name of combine, rec" in caplog.text
