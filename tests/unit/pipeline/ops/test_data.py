from __future__ import annotations

import time

import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.data import (
    Add,
    AddInt,
    Copy,
    Identity,
    Keep,
    KeyA2KeyB,
    Move,
    Raise,
    Remove,
    Result2Key,
    Result2Other,
    Sleep,
)


@pytest.mark.parametrize(
    ("op", "given", "left"),
    [
        (Identity(), {"a": 1}, {"a": 1}),
        (Result2Key("kept"), {"a": 1}, {"a": 1, "kept": "data"}),
        (Result2Key(), {}, {"key": "data"}),
        (Result2Other(), {}, {"other": "data"}),
        (Result2Other("third"), {}, {"third": "data"}),
        (KeyA2KeyB("a", "b"), {"a": 1, "b": 2}, {"a": 1, "b": 1}),
        (KeyA2KeyB("data", "b"), {"data": "data"}, {"data": "data", "b": "data"}),
        (Copy("a:b,c:d"), {"a": 1, "c": 2}, {"a": 1, "b": 1, "c": 2, "d": 2}),
        (Copy("a:b, b:c"), {"a": 1}, {"a": 1, "b": 1, "c": 1}),
        (Move("a:b,c:d"), {"a": 1, "c": 2}, {"b": 1, "d": 2}),
        (Move("a:a"), {"a": 1}, {"a": 1}),
        (Add("a:1,b:text"), {"a": 3}, {"a": "1", "b": "text"}),
        (AddInt("a:1,b:-2"), {}, {"a": 1, "b": -2}),
        (Remove(("a", "b")), {"a": 1, "c": 2}, {"c": 2}),
        (
            Keep(("a",)),
            {"a": 1, "b": 2, "data": 3, "node_name": "n", "result": 4},
            {"a": 1, "data": 3, "node_name": "n", "result": 4},
        ),
        (Keep(), {"a": 1}, {}),
    ],
)
def test_fields_are_written_moved_and_dropped_and_the_data_is_passed_on(op, given, left):
    assert op("data", given) == "data"
    assert given == left


def test_a_field_may_become_the_result():
    assert KeyA2KeyB("a", "result")("data", {"a": 7}) == 7


@pytest.mark.parametrize("op", [KeyA2KeyB("a", "b"), Copy("a:b"), Move("a:b")])
def test_a_missing_field_is_reported_with_the_existing_ones(op):
    with pytest.raises(BadRequest, match=f"{type(op).__name__} found no field 'a', only: c, data"):
        op("data", {"data": "data", "c": 1})


@pytest.mark.parametrize("text", ["", "a", "a:", ":b", "a:b:c", "a:b,", "a:b,,c:d"])
@pytest.mark.parametrize("cls", [Copy, Move, Add, AddInt])
def test_invalid_pairs_are_an_error(cls, text):
    with pytest.raises(ConfigError, match=rf"{cls.__name__} found '{text}' in its brackets, expected pairs"):
        cls(text)


def test_values_that_are_not_whole_numbers_are_an_error():
    with pytest.raises(ConfigError, match=r"AddInt found 'a:1\.5' in its brackets, expected whole numbers"):
        AddInt("a:1.5")


@pytest.mark.parametrize(
    "make", [lambda: Copy("a:data"), lambda: Move("data:a"), lambda: Add("data:1"), lambda: Remove(("data",))]
)
def test_ops_of_fields_cannot_change_the_data(make):
    with pytest.raises(ConfigError, match="the field data cannot be changed"):
        make()


@pytest.mark.parametrize(("key_a", "key_b"), [("result", "b"), ("a", "data")])
def test_a_missing_result_is_not_read(key_a, key_b):
    with pytest.raises(ConfigError, match="key_a may not be result, nor key_b data"):
        KeyA2KeyB(key_a, key_b)


def test_a_sleep_is_in_milliseconds(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert Sleep()("data", {}) == "data"
    assert Sleep(2.5)("data", {}) == "data"
    assert slept == [0.01, 0.0025]
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="expected 0 milliseconds or more"):
            Sleep(wrong)


def test_errors_of_a_single_call_raise():
    with pytest.raises(RuntimeError, match="always raises"):
        Raise()("data", {})
