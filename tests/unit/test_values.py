import math
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from penstock.errors import BadRequest, ConfigError
from penstock.types import TensorSpec
from penstock.values import SIZE_UNITS, TIME_UNITS, convert, expected, found, quantity, shorten, tensor_specs


@pytest.mark.parametrize(
    ("value", "type_", "expected"),
    [
        ("224", int, 224),
        (" 7 ", int, 7),
        (3.0, int, 3),
        ("1e2", float, 100.0),
        (5, float, 5.0),
        ("1", bool, True),
        ("TRUE", bool, True),
        (0, bool, False),
        ("off", bool, False),
        (224, str, "224"),
        ("text", str, "text"),
        ("123.675, 116.28,103.53", tuple[float, ...], (123.675, 116.28, 103.53)),
        ([1, "2"], tuple[int, ...], (1, 2)),
        (114, tuple[float, ...], (114.0,)),
        ("a,b", tuple[str, ...], ("a", "b")),
        ("", tuple[str, ...], ()),
        (" RGB ", Literal["rgb", "bgr"], "rgb"),
        (2, Literal[1, 2], 2),
        (None, int | None, None),
        ("4", int | None, 4),
        ("auto", int | Literal["auto"], "auto"),
        ([1], list, [1]),
        ({"a": 1}, dict[str, int], {"a": 1}),
        (object, Any, object),
    ],
)
def test_a_loose_text_becomes_the_value_of_its_type(value, type_, expected):
    read = convert(value, type_, "an op: key", loose=True)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("value", "type_", "expected"),
    [
        ("a", int, "a whole number"),
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        ("inf", int, "a whole number"),
        ("nan", int, "a whole number"),
        ([], int, "a whole number"),
        ("x", float, "a number"),
        (math.nan, Annotated[float, Meta(ge=0)], "a number from 0"),
        ("70000", Annotated[int, Meta(ge=1, le=65535)], "a whole number from 1 to 65535"),
        ("x", int | Path, "a whole number or a Path"),
        (None, float, "a number"),
        ("perhaps", bool, "true or false"),
        (2, bool, "true or false"),
        (None, str, "a string"),
        ("1,x", tuple[float, ...], "a list, each a number"),
        (None, tuple[int, ...], "a list, each a whole number"),
        ("hsv", Literal["rgb", "bgr"], '"bgr" or "rgb"'),
        ("x", int | Literal["auto"], 'a whole number or "auto"'),
        ("x", list, "a list"),
        ([], dict[str, int], "a table"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_says_found_and_expected(value, type_, expected):
    with pytest.raises(ConfigError) as caught:
        convert(value, type_, "an op: key", loose=True)
    assert caught.value.message == f"an op: key: found {found(value)}, expected {expected}"


def test_strict_conversion_takes_no_text_and_names_the_wrong_element() -> None:
    assert convert([1, 2], tuple[int, ...]) == (1, 2)
    with pytest.raises(ConfigError, match=r"^key\[1\]: found the string '2', expected a list, each a whole number$"):
        convert([1, "2"], tuple[int, ...], "key")
    with pytest.raises(BadRequest, match=r"^found inf, expected a number$"):
        convert(math.inf, float, error=BadRequest)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "true"),
        (1.5, "1.5"),
        (1 << 5000, "a huge number"),
        ("a", "the string 'a'"),
        ("a" * 61, "a string of 61 characters"),
        ([1, 2], "a list of 2"),
        ({}, "a table"),
        (None, "nothing"),
        (date(2026, 1, 2), "a date (2026-01-02)"),
        (range(10**70), f"a range (range(0, 1{'0' * 47}...)"),
    ],
)
def test_a_found_value_is_told_in_a_few_words(value: Any, words: str) -> None:
    assert found(value) == words


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number"),
        (Annotated[float, Meta(gt=0, le=5)], "a number above 0, up to 5"),
        (Annotated[int, Meta(ge=1, le=2**50)], "a whole number from 1 to 1125899906842624"),
        (Annotated[list[int], Meta(min_length=1)], "a list of 1 or more, each a whole number"),
        (list, "a list"),
        (Literal["b", "a"], '"a" or "b"'),
        (Literal[2, 1], "1 or 2"),
        (Annotated[int, Meta(title="a port")] | Literal["auto"], 'a port or "auto"'),
    ],
)
def test_the_values_of_a_type_are_told_in_words(kind: Any, words: str) -> None:
    assert expected(kind) == words


def test_a_shortened_text_has_at_most_so_many_characters() -> None:
    assert [shorten("abcdef", most) for most in (5, 6)] == ["ab...", "abcdef"]


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        ("40GiB", SIZE_UNITS, 40 * 2**30),
        (" 1.5 MB ", SIZE_UNITS, 1_500_000),
        ("1e3B", SIZE_UNITS, 1000),
        ("40", SIZE_UNITS, None),
        ("40 gib", SIZE_UNITS, None),
        ("GiB", SIZE_UNITS, None),
        ("-1GiB", SIZE_UNITS, None),
        ("1e999GiB", SIZE_UNITS, None),
        ("9" * 500 + "GiB", SIZE_UNITS, None),
        ("5ms", TIME_UNITS, 0.005),
        (".5s", TIME_UNITS, 0.5),
        ("5%", {"": 1.0, "%": 0.01}, 0.05),
        ("0.05", {"": 1.0, "%": 0.01}, 0.05),
    ],
)
def test_a_quantity_is_a_number_times_its_unit(text: str, units: dict[str, float], number: float | None) -> None:
    assert quantity(text, units) == number


def test_tensors_are_read_in_order_from_a_table_or_a_sequence() -> None:
    read = tensor_specs({"image": "FP32[-1,3,224,224]", "ids": " INT64 [ -1, -1 ] ", "flag": "BOOL[-1]"}, "inputs")
    assert read == (
        TensorSpec("image", "FP32", (-1, 3, 224, 224)),
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("flag", "BOOL", (-1,)),
    )
    assert tensor_specs(list(read), "inputs") == read
    assert tensor_specs({}, "inputs") == tensor_specs((), "inputs") == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"x": "FP33[-1]"},
            "inputs.x: found 'FP33[-1]', expected a datatype and a shape such as \"FP32[-1,3,224,224]\"",
        ),
        ({"x": ("FP32", [-1])}, "inputs.x: found ('FP32', [-1]), expected a datatype"),
        (["x"], 'inputs: found \'x\', expected a table such as {"x": "FP32[-1,64]"}, or a sequence'),
        (5, "inputs: found 5, expected a table"),
        ([TensorSpec("x", "FP32", (-1,))] * 2, "inputs: found 'x' twice"),
        (
            [TensorSpec("x", "F", (-1,))],
            "inputs: found TensorSpec(name='x', datatype='F', shape=(-1,), optional=False, pad=None),",
        ),
        ([TensorSpec("x", "FP32", (-1, 2.5))], "expected for instance TensorSpec('x', 'FP32', (-1, 64))"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_told_with_its_key_and_the_right_form(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tensor_specs(given, "inputs")
    assert told in caught.value.message
