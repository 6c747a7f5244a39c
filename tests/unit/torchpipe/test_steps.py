"""Expressions with filters, lowered to steps and run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.convert import to_toml
from penstock.pipeline.dialect import parse, text_of
from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import NodeModel, Visit
from penstock.pipeline.ops.base import BatchOp, Fields


def double(data: Any) -> Any:
    return data * 2


def only_even(data: Any) -> Any:
    """No result for odd numbers."""
    return data if data % 2 == 0 else None


def nothing(data: Any) -> None:
    """No result."""


class Hundreds(BatchOp):
    """Adds 100 to each."""

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        return [each + 100 for each in data]


def results(backend: str, *data: int) -> list[Any]:
    """The result of a node for each data value; None without a result."""
    for name in ("double", "only_even", "nothing", "Hundreds"):
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
        ("S[double,(or)S[double,double],nothing,(or)S[double,double]]", [16, 24, 32]),
        ("S[HasKey(key=data)[double,Hundreds]]", [4, 6, 8]),
        ("S[only_even,HasKey(key=x)[double],double]", [4, None, 8]),
        ("S[HasKey(key=x)[double,S[Hundreds,double]],double]", [408, 412, 416]),
        ("S[HasKey(key=x)[double,Hundreds],HasKey(key=data)[S[double,double]]]", [408, 412, 416]),
        ("CompareLongKey(key=data,compare_target=3)[Identity,Hundreds]", [102, 3, 104]),
        ("S[double,(break)double,double]", [4, 6, 8]),
        ("S[double,(skip)S[double,Hundreds],double]", [8, 12, 16]),
        ("S[double,(result2other)Hundreds,KeyA2KeyB(key_a=other,key_b=result)]", [4, 6, 8]),
    ],
)
def test_steps_after_a_filter_run_if_it_admits_them(backend: str, expected: list[int | None]) -> None:
    assert results(backend, 2, 3, 4) == expected


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("HasKey", "HasKey takes one or two ops in brackets"),
        ("HasKey[A,B,C]", "HasKey takes one or two ops in brackets"),
        ("HasKey(name=x)[Identity]", "filter HasKey: found name, expected key"),
        ("CompareLongKey(key=x)[Identity]", "filter CompareLongKey: found key, expected compare_target and key"),
        ("CompareLongKey(compare_target=x)[Identity]", "compare_target: found the string 'x', expected a whole number"),
        ("S[Identity,(or)S[Identity,HasKey[Identity]]]", "cannot contain other filters"),
    ],
)
def test_wrong_conditions_of_steps_are_refused(backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_graph({"a": {"backend": backend}}, name="t", folder="/")


def test_conditions_of_steps_stay_in_a_converted_file() -> None:
    text = "S[Identity,HasKey(key=x)[S[FloatMat,Any2Mat],S[FloatMat]],CompareLongKey(compare_target=1)[FloatMat]]"
    graph = parse_graph({"a": {"backend": text}}, name="t", folder="/")
    again = parse_graph(tomllib.loads(to_toml(graph)), name="t", folder="/")
    assert again == graph
    assert [step.filter for step in graph.nodes["a"].steps][2:5] == ["HasKey(key=x)", "then", "else"]


@pytest.mark.parametrize(("value", "message"), [(None, "found no field 'x'"), ("3", "found a str as 'x'")])
def test_a_comparison_of_no_number_fails_its_item_alone(value: Any, message: str) -> None:
    backend = {"backend": f"CompareLongKey[Python[{__name__}:double]]", "compare_target": "3", "key": "x"}
    model = NodeModel(parse_graph({"a": backend}, name="t", folder="/").nodes["a"])
    model.load("cpu")
    wrong = {"data": 1} if value is None else {"data": 1, "x": value}
    failed, (fields, _) = model.predict([Visit(wrong, False), Visit({"data": 2, "x": 3}, False)])
    assert message in str(failed)
    assert fields["result"] == 4


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
    assert text_of(parse(text)) == text
    assert text_of(parse(text.replace(",", " , ").replace("[", "\n[\t"))) == text


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
