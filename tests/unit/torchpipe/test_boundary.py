from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.torchpipe.boundary import is_rows, to_array, to_tensor


def test_a_tensor_and_its_array_share_their_memory() -> None:
    tensor = torch.zeros(1, 2)
    array = to_array(tensor)
    array[0, 0] = 1
    assert tensor[0, 0] == 1
    back = to_tensor(array)
    back[0, 1] = 2
    assert tensor[0, 1] == 2


def test_gradients_and_bfloat16_are_dropped() -> None:
    assert to_array(torch.ones(1, requires_grad=True)).tolist() == [1]
    assert to_array(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32


def test_lists_of_tensors_are_converted_and_others_are_unchanged() -> None:
    assert [a.tolist() for a in to_array([torch.ones(1), torch.zeros(1)])] == [[1], [0]]
    assert [t.tolist() for t in to_tensor([np.ones(1), np.zeros(1)])] == [[1], [0]]
    for value in ([1, "a"], [], "text", None, {"a": 1}):
        assert to_array(value) is value
        assert to_tensor(value) is value


def test_read_only_and_reversed_arrays_are_copied() -> None:
    fixed = np.ones((1, 2))
    fixed.flags.writeable = False
    copied = to_tensor(fixed)
    copied += 1
    assert fixed.tolist() == [[1, 1]]
    assert to_tensor(np.arange(3)[::-1]).tolist() == [2, 1, 0]


def test_arrays_that_no_tensor_can_hold_stay_arrays() -> None:
    words = np.array(["a", "b"])
    assert to_tensor(words) is words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros((1, 3, 4, 4)), True),
        (np.zeros((1, 1000)), True),
        ([np.zeros((1, 2)), np.zeros((1, 3))], True),
        (np.zeros((4, 4, 3)), False),
        (np.zeros(4), False),
        ([], False),
        (3, False),
    ],
)
def test_rows_are_distinguished_from_images_by_their_first_axis(value: object, expected: bool) -> None:
    assert is_rows(value) is expected
