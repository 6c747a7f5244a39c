import pickle
import re
from typing import Any

import pytest

from penstock.core.wire.objects import dumps

torch = pytest.importorskip("torch")


def crossed(value: Any) -> tuple[Any, list[Any]]:
    """(the value as it arrives, the buffers that went beside it)."""
    buffers: list[Any] = []
    data = dumps(value, lambda b: buffers.append(b.raw()))
    return pickle.loads(data, buffers=[bytearray(b) for b in buffers]), buffers


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"])
def test_the_memory_of_a_tensor_is_sent_out_of_band(dtype: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    found, buffers = crossed({"a": [tensor]})
    assert torch.equal(found["a"][0], tensor)
    assert found["a"][0].dtype == tensor.dtype
    assert [b.nbytes for b in buffers] == [6 * tensor.element_size()]
    found["a"][0].zero_()  # it is writable


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(5.0),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.ones(2, 2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["empty", "scalar", "transposed", "strided", "grad", "sparse", "conjugate", "parameter"],
)
def test_tensors_of_every_kind_arrive(tensor: Any) -> None:
    found, _ = crossed([tensor])
    assert type(found[0]) is type(tensor)
    assert found[0].requires_grad == tensor.requires_grad
    assert torch.equal(found[0].to_dense(), tensor.to_dense())


def test_other_values_are_pickled_as_ever() -> None:
    value = [1, "a", {"b": b"c"}, re.compile("d")]
    assert crossed(value) == (value, [])
    with pytest.raises(TypeError, match="generator"):
        dumps((x for x in ()), lambda _: None)
