"""Tensors that are filled up to a few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.journey import shape_of
from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import NodeModel, Visit
from penstock.pipeline.ops.base import BatchOp, Fields
from penstock.pipeline.padding import PadTo


class Shapes(BatchOp):
    """The shape of each tensor."""

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        return [each.shape for each in data]


@pytest.mark.parametrize(
    ("shape", "data_format", "padded"),
    [
        ((1, 3, 20, 40), "nchw", (1, 3, 32, 64)),
        ((1, 20, 40, 3), "nhwc", (1, 32, 64, 3)),
        ((1, 3, 32, 64), "nchw", (1, 3, 32, 64)),
        ((1, 3, 90, 1), "nchw", (1, 3, 90, 32)),
        ((1, 7), "", (1, 32)),
        ((1, 33, 5), "", (1, 64, 5)),
        ((3,), "", (3,)),
    ],
)
def test_sides_are_filled_up_to_the_next_size(
    shape: tuple[int, ...], data_format: str, padded: tuple[int, ...]
) -> None:
    data = np.ones(shape, np.uint8)
    result = PadTo((32, 64))(data, {"data_format": data_format})
    assert result.shape == padded
    assert result.dtype == np.uint8
    assert result.sum() == data.sum()
    assert (result[tuple(map(slice, shape))] == 1).all()


def test_what_is_no_tensor_stays() -> None:
    assert PadTo((4,))("text", {}) == "text"
    first, second = PadTo((4,))([np.ones((1, 3)), np.ones((1, 5))], {})
    assert (first.shape, second.shape) == ((1, 4), (1, 5))


@pytest.mark.parametrize("backend", ["{}", "S[Identity,{}]", "S[Identity,(or){}]"])
def test_a_model_is_given_what_was_filled_up(backend: str) -> None:
    tables = {"a": {"backend": backend.format(f"Python[{__name__}:Shapes]"), "pad_to": [4, 8]}}
    model = NodeModel(parse_graph(tables, name="t", folder="/").nodes["a"])
    model.load("cpu")
    ((fields, _),) = model.predict([Visit({"data": np.ones((1, 3))}, False)])
    if "(or)" in backend:
        assert fields["result"].shape == (1, 3)
    else:
        assert fields["result"] == (1, 4)


def test_what_is_filled_up_to_one_shape_may_share_a_batch() -> None:
    small, large = np.zeros((1, 3, 20, 30), np.uint8), np.zeros((1, 3, 32, 32), np.uint8)
    fill = partial(PadTo((32, 64)).shape, fields={})
    assert shape_of(small) != shape_of(large)
    assert shape_of(small, fill) == shape_of(large, fill) != shape_of(large.astype(np.float32), fill)
    assert shape_of([small, large], fill) == "|u1(3, 32, 32) |u1(3, 32, 32)"
