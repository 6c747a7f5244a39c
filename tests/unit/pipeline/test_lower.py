"""Expressions with filters, lowered to steps and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import NodeModel, Visit
from penstock.pipeline.ops.base import BatchOp, Fields


def double(data: Any) -> Any:
    return data * 2


def only_even(data: Any) -> Any:
    """No result for odd numbers."""
    return data if data % 2 == 0 else None


class Hundreds(BatchOp):
    """Adds 100 to each."""

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        return [each + 100 for each in data]


def results(backend: str, *data: int) -> list[Any]:
    """What comes out of a node for each of the data; None without a result."""
    for name in ("double", "only_even", "Hundreds"):
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
    ],
)
def test_steps_behind_a_filter_run_where_it_lets_them(backend: str, expected: list[int | None]) -> None:
    assert results(backend, 2, 3, 4) == expected
