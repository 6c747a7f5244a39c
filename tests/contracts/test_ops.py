"""Every op of the catalog passes the conformance check, and the check detects ops that break the contract."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.errors import BadRequest, ItemFailed
from penstock.pipeline.graph import Node, NodeStep
from penstock.pipeline.handover import Visit
from penstock.pipeline.node import NodeModel
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp, make_op
from penstock.pipeline.ops.decode import picture
from penstock.testing.ops import check_op
from penstock.torchpipe.ops import ALIASES, OPS

MAT = picture(40, 60, 1)
GRAY = MAT[:, :, 0]
FLOATS = MAT.astype(np.float32)
TENSOR = np.ascontiguousarray(MAT.transpose(2, 0, 1))[None]
LOGITS = np.array([[0.5, 3.0, -1.0]], np.float32)
BOX = [5, 3, 35, 23]
CORNERS = [[2, 3], [40, 5], [38, 30], [1, 28]]


def encoded(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(MAT).save(out, kind)
    return out.getvalue()


SIZE = {"resize_h": "24", "resize_w": 32}
FRAME = {"max_h": 32, "max_w": "32", "pad_value": "114, 114, 114"}
IMAGES = [{"data": encoded("JPEG")}, {"data": encoded("PNG")}, {"data": memoryview(encoded("JPEG"))}]
MATS = [{"data": MAT}, {"data": GRAY}, {"data": FLOATS}, {"data": MAT[::-1, 3:]}]
TENSORS = [{"data": TENSOR}, {"data": TENSOR.astype(np.float32)}, {"data": MAT}]
ANY = [{"data": 1, "box": [1, 2]}, {"data": MAT, "box": None, "other": 3}]
NAMES = {*catalog.BUILTIN, *OPS} - ALIASES.keys()
MODELS = {name for name in NAMES if catalog.is_model(name)}

CASES = {
    "Add": (ANY, {"pairs": "stage:first"}),
    "AddInt": (ANY, {"pairs": "resize_h:224"}),
    "AlignMat": (MATS[:3], {"resize_h": 32, "max_w": "320"}),
    "Any2Mat": ([{"data": [MAT, GRAY]}, {"data": []}], {}),
    "ArgMax": ([{"data": LOGITS}, {"data": LOGITS[0]}], {}),
    "ArgMaxTensor": ([{"data": LOGITS}, {"data": TENSOR}], {}),
    "BatchFixHLimitW": (MATS[:3], {"resize_h": 32, "max_w": 320, "align": 16}),
    "BorrowReplay": ([{"data": [], "borrow_type": "borrow_all", "id": 1}], {"max_batch_size": 4}),
    "Copy": (ANY, {"pairs": "box:first_box"}),
    "CpuTensor": ([{"data": TENSOR}, {"data": [LOGITS, TENSOR]}], {}),
    "CropMat": ([{"data": MAT, "_box": BOX}, {"data": GRAY, "_box": np.array(BOX)}], {}),
    "CropResizeMat": ([{"data": MAT, "_box": [0.1, 0.2, 0.5, 0.9]}], {**SIZE, "enlarge_ratio": "0.1"}),
    "CropTensor": ([{"data": TENSOR, "_box": BOX}, {"data": MAT, "_box": (*BOX, 0.9)}], {}),
    "CvtColorMat": ([*MATS, {"data": MAT, "color": "rgb"}], {"color": "RGB"}),
    "CvtColorTensor": ([{**t, "color": "bgr"} for t in TENSORS], {"color": "rgb"}),
    "DecodeMat": (IMAGES, {}),
    "DecodeTensor": (IMAGES, {"color": "bgr"}),
    "DynamicFixHResizePadMat": ([{**m, "resize_h": 32, "max_w": 20} for m in MATS], {"pad_value": 3}),
    "DynamicResizeMat": ([{**m, "resize_h": 8, "resize_w": "9"} for m in MATS], {}),
    "FixHResizePadMat": (MATS, {"resize_h": 20, "max_w": 64}),
    "FixRatioResizeMat": (MATS, {"max_h": 30, "max_w": 30}),
    "FloatMat": ([*MATS, {"data": MAT}], {}),
    "FloatNCHWTensor": (TENSORS, {}),
    "FloatTensor": (TENSORS, {}),
    "GpuTensor": (TENSORS, {}),
    "Identity": (ANY, {}),
    "Keep": (ANY, {"keep": "box"}),
    "KeyA2KeyB": (ANY, {"key_a": "box", "key_b": "other"}),
    "Mat2CpuTensor": (MATS, {}),
    "Mat2GpuTensor": (MATS, {}),
    "Mat2Tensor": ([*MATS, {"data": [MAT, GRAY]}], {"device": "gpu"}),
    "Move": (ANY, {"pairs": "box:moved"}),
    "NCHWTensor": (TENSORS, {}),
    "PerspectiveTransformMat": ([{**m, "_box": CORNERS} for m in MATS], {}),
    "PerspectiveTransformMats": ([{"data": MAT, "_box": [CORNERS, CORNERS]}, {"data": MAT, "_box": []}], {}),
    "PillowResizeMat": ([MATS[0], MATS[1], MATS[3]], SIZE),
    "PillowResizeTensor": ([TENSORS[0], TENSORS[2]], SIZE),
    "CopySplit": (ANY, {"split_size": 2}),
    "Python": (ANY, {"target": "json:dumps"}),
    "Remove": (ANY, {"keys": "box,other"}),
    "ResizeCenterPadMat": (MATS, FRAME),
    "ResizeMat": (MATS, SIZE),
    "ResizePadMat": (MATS, FRAME),
    "ResizePadTensor": (TENSORS, FRAME),
    "ResizeTensor": (TENSORS, SIZE),
    "Result2Key": (ANY, {"key": "kept"}),
    "Result2Other": (ANY, {}),
    "SaveMat": (MATS, {}),
    "Sleep": (ANY, {"time": 0}),
    "SoftmaxArgMax": ([{"data": LOGITS}], {}),
    "SoftmaxArgMaxTensor": ([{"data": LOGITS}], {}),
    "SoftmaxCpu": ([{"data": LOGITS}, {"data": [LOGITS, TENSOR]}], {}),
    "SoftmaxMax": ([{"data": LOGITS}], {}),
    "Tensor2Mat": ([{"data": TENSOR}, {"data": FLOATS}], {}),
    "Tensor2Vector": (TENSORS, {}),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_op(name: str, tmp_path: Path) -> None:
    items, params = CASES[name]
    if name == "SaveMat":
        params = {"save_dir": str(tmp_path)}
    if name == "Python":
        items = [{"data": [1, 2]}, {"data": "text"}]
    check_op(catalog.class_of(name, params.get("target")), items, params=without_target(params))


def without_target(params):
    return {key: value for key, value in params.items() if key != "target"}


def test_every_op_of_the_catalog_is_checked() -> None:
    raising = {"C10Exception", "RuntimeError"}
    of_a_module = {"PyTensor"}  # it needs one of the user's
    assert NAMES - MODELS - raising - of_a_module == set(CASES)


class Op(ItemOp):
    """Returns its input."""

    def __call__(self, data, fields):
        return data


def broken(**attributes) -> type[ItemOp]:
    return type("Broken", (Op,), {"__doc__": "It does not keep the contract.", **attributes})


def writing(self, data, fields):
    fields["color"] = "rgb"
    return data


def changing(self, data, fields):
    data += 1
    return data


class Counting(Op):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data, fields):
        self.calls += 1
        return self.calls


class Short(BatchOp):
    """Drops one result."""

    def __call__(self, data, fields):
        return data[1:]


class Told(Op):
    """Has an undocumented parameter."""

    def __init__(self, size: int = 1) -> None:
        pass


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (broken(__doc__=None), "has no docstring"),
        (broken(gives="tensors"), "kinds are"),
        (broken(takes="bytes"), "takes 'bytes'"),
        (broken(gives="bytes"), "gives 'bytes', but gave"),
        (broken(reads=("box",)), "reads"),
        (broken(writes=("color",)), "declares that it writes"),
        (broken(__call__=writing), "wrote color, which it does not declare"),
        (broken(__call__=changing), "changed its input"),
        (Counting, "alone gave 1, with others"),
        (Short, "returned 0 results for 1 items"),
        (Told, "for size"),
    ],
)
def test_an_op_that_breaks_the_contract_fails_the_check(cls, found) -> None:
    with pytest.raises(AssertionError, match=found):
        check_op(cls, [{"data": np.zeros((2, 2), np.uint8)}])


@pytest.mark.parametrize("name", [name for name in CASES if catalog.find(name).takes == "tensor"])
def test_a_tensor_without_rows_gives_no_rows_of_the_same_kind(name: str) -> None:
    items, params = CASES[name]
    op = make_op(catalog.find(name), params)
    given = next(item for item in items if isinstance(item["data"], np.ndarray) and len(item["data"]) == 1)
    some, none = (op(data, {**given}) for data in (given["data"], given["data"][:0]))
    assert len(none) == 0
    if isinstance(some, np.ndarray) and some.ndim == given["data"].ndim:
        assert (none.dtype, none.shape) == (some.dtype, (0, *some.shape[1:]))


@pytest.mark.parametrize("name", [name for name in CASES if catalog.find(name).takes == "mat"])
def test_no_images_give_no_images_of_the_same_size(name: str, tmp_path: Path) -> None:
    items, params = CASES[name]
    cls = catalog.find(name)
    op = make_op(cls, {"save_dir": str(tmp_path)} if name == "SaveMat" else params)
    given = next(item for item in items if isinstance(item["data"], np.ndarray) and item["data"].ndim == 3)
    some, none = ({**given}, {**given, "data": np.empty((0, *MAT.shape), MAT.dtype)})
    if isinstance(op, BatchOp):
        result, expected = op([none["data"], some["data"]], [none, some])
    else:
        expected = op(some["data"], some)
        saved = {*tmp_path.iterdir()}
        result = op(none["data"], none)
        assert saved == {*tmp_path.iterdir()}
    assert len(result) == 0
    assert none.keys() == some.keys()
    if isinstance(expected, np.ndarray):
        rows = expected.shape[1:] if cls.gives == "tensor" else expected.shape
        assert (result.dtype, result.shape) == (expected.dtype, (0, *rows))
    low = np.empty((0, 4, 3), np.uint8)
    with pytest.raises(BadRequest, match="expected"):  # an image of height 0
        _raised(op([low], [{}])[0]) if isinstance(op, BatchOp) else op(low, {**given})


def _raised(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("name", sorted(CASES))
def test_bad_data_and_bad_fields_fail_one_item_and_never_stop_its_node(name: str, tmp_path: Path) -> None:
    params = {"save_dir": str(tmp_path)} if name == "SaveMat" else CASES[name][1]
    model = NodeModel(Node("bad", (NodeStep(name, params),)))
    model.load("cpu")
    for data in (None, 3, "text", [], np.array(3), np.zeros((2, 0)), np.array(["x"]), object()):
        (answer,) = model.predict([Visit({"data": data, "_box": data, "color": data}, False)])
        fine = isinstance(answer, tuple | BadRequest) or (name == "Python" and isinstance(answer, ItemFailed))
        assert fine, f"{data!r}: {answer!r}"
    model.unload()
