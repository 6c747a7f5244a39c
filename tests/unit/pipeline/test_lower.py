"""Expressions with filters, lowered to steps and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.load import parse_graph
from penstock.pipeline.lower import Expression, parse
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
    """The result of a node for each data value; None without a result."""
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
def test_steps_after_a_filter_run_if_it_admits_them(backend: str, expected: list[int | None]) -> None:
    assert results(backend, 2, 3, 4) == expected


def shape(found: Expression) -> str:
    """The expression as text again, without spaces."""
    guard = f"({found.filter})" if found.filter else ""
    params = "(" + ",".join(f"{k}={v}" for k, v in found.params.items()) + ")" if found.params else ""
    args = f"[{','.join(map(shape, found.args))}]" if found.args else ""
    return f"{guard}{found.name}{params}{args}"


@pytest.mark.parametrize(
    "text",
    [
        "DecodeMat",
        "SyncTensor[TensorrtTensor]",
        "Sequential[ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]",
        "S[S[DecodeTensor,ResizeTensor],(or)S[DecodeMat,ResizeMat]]",
        "ResizeMat(resize_h=224,resize_w=224)",
        "Torch(device_id=1)[S[A,B]]",
        "Python[pkg.mod:Class]",
        "Python[app/post.py:Boxes]",
        "Copy[a:b,c:d]",
        "(swap)Result2Key(key=x)[A]",
    ],
)
def test_an_expression_is_read_as_it_is_written(text: str) -> None:
    assert shape(parse(text)) == text
    assert shape(parse(text.replace(",", " , ").replace("[", "\n[\t"))) == text


def test_a_value_may_hold_commas() -> None:
    assert parse("Onnx(mean=1,2,3,std=4)").params == {"mean": "1,2,3", "std": "4"}


def test_positions_count_the_spaces_that_were_written() -> None:
    assert parse("S[ A ,  B]").args[1].position == 9


@pytest.mark.parametrize(
    ("text", "character", "expected"),
    [
        ("", 1, "found the end, expected a name"),
        ("   ", 4, "found the end, expected a name"),
        ("S[A,B", 6, "found the end, expected ',' or ']'"),
        ("S[A,,B]", 5, "found ',', expected a name"),
        ("S[]", 3, "found ']', expected a name"),
        ("A]", 2, "found ']', expected the end"),
        ("A B*", 4, "found '*', expected the end"),
        ("(or", 4, "found the end, expected ')' after the filter"),
        ("()A", 2, "found ')', expected the name of a filter"),
        ("A(k=v", 6, "found the end, expected ')' after the parameters"),
        ("A(k)", 3, "expected a parameter such as resize_h=224"),
        ("A(=1)", 3, "expected a parameter such as resize_h=224"),
        ("A(k=1,k=2)", 7, "expected 'k' once"),
        ("A|B", 2, "found '|', expected the end"),
    ],
)
def test_an_error_names_the_character(text: str, character: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert f"at character {character} of" in caught.value.message
    assert expected in caught.value.message


def test_nesting_of_brackets_is_limited() -> None:
    with pytest.raises(ConfigError, match="at most 20 deep"):
        parse("S[" * 10_000 + "A" + "]" * 10_000)
