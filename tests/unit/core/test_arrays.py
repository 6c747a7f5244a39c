"""Tensors as arrays."""

from typing import Any

import numpy as np
import pytest

from penstock.core.arrays import plain_array

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn", "float64"])
def test_a_tensor_of_any_type_is_an_array(dtype: str) -> None:
    """NumPy has neither bfloat16 nor floats of 8 bits."""
    tensor: Any = torch.tensor([[1, 0]], dtype=getattr(torch, dtype))
    found = plain_array(tensor)
    assert found.dtype == (dtype if hasattr(np, dtype) else "float32")
    assert found.tolist() == [[1, 0]]


def test_a_tensor_with_a_gradient_is_an_array_and_other_values_stay() -> None:
    assert plain_array(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert plain_array(value := [1]) is value
