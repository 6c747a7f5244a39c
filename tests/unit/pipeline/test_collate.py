"""Batches of a model: calls, one array of many, mean and std."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.worker.tensor_model import Input
from penstock.errors import ConfigError
from penstock.pipeline.collate import Collator, PadTo, calls, chunks, normalizations, shape_of
from penstock.pipeline.handover import Visit
from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import NodeModel
from penstock.pipeline.ops.base import BatchOp, Fields
from penstock.runtimes.pixels import Normalization

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, (1,)), (2, (1, 1)), (3, (4,)), (4, (4,)), (5, (4, 1)), (7, (8,)), (9, (8, 1)), (12, (8, 4)), (16, (8, 8))],
)
def test_rows_are_run_in_the_cheapest_of_the_sizes(rows, expected):
    assert calls(rows, (1, 4, 8)) == expected


@given(st.integers(1, 12), st.sets(st.integers(1, 12), min_size=1, max_size=4))
def test_the_chosen_calls_are_the_cheapest(rows, sizes):
    found = calls(rows, tuple(sorted(sizes)))
    cheapest = min(
        sum(combination) + len(combination)
        for count in range(1, rows + 1)
        for combination in itertools.combinations_with_replacement(sorted(sizes), count)
        if sum(combination) >= rows
    )
    assert sum(found) >= rows
    assert set(found) <= sizes
    assert sum(found) + len(found) == cheapest


def test_an_item_with_very_many_rows_is_split_quickly():
    assert calls(1_000_003, (1, 4, 8)) == (8,) * 125_000 + (4,)


def test_without_sizes_the_last_call_is_as_small_as_it_may_be():
    assert chunks(9, 1, 4) == (4, 4, 1)
    assert chunks(9, 3, 4) == (4, 4, 3)
    assert chunks(8, 3, 4) == (4, 4)
    assert chunks(3, 1, 2**31 - 1) == (3,)


def test_a_batch_has_the_arrays_and_then_zeros():
    made = Collator().batch([np.ones((1, 2)), np.full((2, 2), 5, np.uint8)], 4, FLOAT)
    assert made.dtype == FLOAT
    assert made.tolist() == [[1, 1], [5, 5], [5, 5], [0, 0]]


def test_memory_is_reused_and_grows():
    collator = Collator()
    small = collator.batch([np.ones((1, 2))], 1, FLOAT)
    large = collator.batch([np.ones((1, 2))] * 3, 3, FLOAT)
    again = collator.batch([np.full((1, 3), 7.0)], 1, FLOAT)
    assert not np.may_share_memory(small, large)
    assert np.may_share_memory(large, again)
    assert again.tolist() == [[7, 7, 7]]


def test_one_array_that_fits_is_not_copied():
    array = np.ones((2, 3), np.float32)
    assert np.may_share_memory(Collator().batch([array], 2, FLOAT), array)
    assert Collator().batch([array[:, ::2]], 2, FLOAT).flags.c_contiguous


def test_one_array_with_too_few_rows_is_padded():
    assert Collator().batch([np.ones((1, 2), np.float32)], 3, FLOAT).tolist() == [[1, 1], [0, 0], [0, 0]]


def test_normalizing_does_not_change_the_input():
    array = np.full((1, 2), 3, np.float32)
    one = Normalization(np.float32([[1.0]]), np.float32([[2.0]]))
    assert Collator().batch([array], 1, FLOAT, one).tolist() == [[4, 4]]
    assert array.tolist() == [[3, 3]]


def test_texts_are_put_together_as_they_are():
    made = Collator().batch([np.array(["a"], object), np.array(["b", "c"])], 3, np.dtype(object))
    assert made.tolist() == ["a", "b", "c"]


IMAGES = Input("x", "FP32", (-1, 3, 8, 8))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (IMAGES, (1, 3, 1, 1)),
        (Input("x", "FP32", (-1, -1, -1, -1)), (1, 3, 1, 1)),
        (Input("x"), (1, 3, 1, 1)),
        (Input("x", "FP16", (-1, 8, 8, 3)), (1, 1, 1, 3)),
    ],
)
def test_mean_and_std_lie_along_the_channels(spec, shape):
    made = normalizations([spec, Input("size", "INT64", (-1, 2))], (1.0, 2.0, 3.0), (2.0, 4.0, 8.0))
    assert made.keys() == {"x"}
    assert (made["x"].mean.shape, made["x"].scale.shape) == (shape, shape)
    assert made["x"].mean.ravel().tolist() == [1, 2, 3]
    assert made["x"].scale.ravel().tolist() == [0.5, 0.25, 0.125]


def test_one_number_is_for_all_channels_and_either_may_be_left_out():
    made = normalizations([IMAGES], (), (4.0,))["x"]
    assert (made.mean.ravel().tolist(), made.scale.ravel().tolist()) == ([0], [0.25])
    assert normalizations([IMAGES], (), ()) == {}


def test_a_wrong_number_of_means_and_a_model_without_images_are_rejected():
    with pytest.raises(
        ConfigError, match=r"mean: found 2 values, expected one, or one for each .* 'x' \[-1, 3, 8, 8\]"
    ):
        normalizations([IMAGES], (1.0, 2.0), ())
    with pytest.raises(ConfigError, match="std: found 4 values"):
        normalizations([IMAGES], (), (1.0, 2.0, 3.0, 4.0))
    with pytest.raises(ConfigError, match=r"the model takes none: its inputs are 'ids' INT64 \[-1, 7\]"):
        normalizations([Input("ids", "INT64", (-1, 7))], (1.0,), ())


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
def test_sides_are_padded_to_the_next_size(shape: tuple[int, ...], data_format: str, padded: tuple[int, ...]) -> None:
    data = np.ones(shape, np.uint8)
    result = PadTo((32, 64))(data, {"data_format": data_format})
    assert result.shape == padded
    assert result.dtype == np.uint8
    assert result.sum() == data.sum()
    assert (result[tuple(map(slice, shape))] == 1).all()


def test_values_other_than_tensors_stay_unchanged() -> None:
    assert PadTo((4,))("text", {}) == "text"
    first, second = PadTo((4,))([np.ones((1, 3)), np.ones((1, 5))], {})
    assert (first.shape, second.shape) == ((1, 4), (1, 5))


@pytest.mark.parametrize("guard", [None, "swap", "or"])
def test_a_model_receives_padded_arrays(guard: str | None) -> None:
    op = f"Python[{__name__}:Shapes]"
    ops = [op] if guard is None else ["Identity", {"op": op, "filter": guard}]
    model = NodeModel(parse_graph({"a": {"ops": ops, "pad_to": [4, 8]}}, name="t", folder="/").nodes["a"])
    model.load("cpu")
    ((fields, _),) = model.predict([Visit({"data": np.ones((1, 3))}, False)])
    if guard == "or":
        assert fields["result"].shape == (1, 3)
    else:
        assert fields["result"] == (1, 4)


def test_items_padded_to_one_shape_may_share_a_batch() -> None:
    small, large = np.zeros((1, 3, 20, 30), np.uint8), np.zeros((1, 3, 32, 32), np.uint8)
    fill = partial(PadTo((32, 64)).shape, fields={})
    assert shape_of(small) != shape_of(large)
    assert shape_of(small, fill) == shape_of(large, fill) != shape_of(large.astype(np.float32), fill)
    assert shape_of([small, large], fill) == "|u1(3, 32, 32) |u1(3, 32, 32)"
