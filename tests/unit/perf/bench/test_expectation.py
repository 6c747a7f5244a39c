import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.expectation import Expectation, difference


@pytest.mark.parametrize(
    ("expected", "found", "size", "where"),
    [
        (1.0, 1.004, 0.004, ""),
        (1000.0, 1004.0, 0.004, ""),
        (0.0, 0.004, 0.004, ""),
        (3, 3.0, 0.0, ""),
        ([1, 2, 3], [1, 2, 3.5], 0.5 / 3, "[2]: found 3.5, expected 3"),
        ({"a": {"b": [[0.0, 1.0], [0.0, 1.0]]}}, {"a": {"b": [[0.0, 1.0], [0.25, 1.0]]}}, 0.25, "a.b[1][0]"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.25]], 0.125, "[1][1]"),
        ({"label": "cat", "p": 0.5}, {"label": "cat", "p": 0.625}, 0.125, "p: found 0.625"),
        ({"label": "cat"}, {"label": "dog"}, math.inf, "label: found 'dog', expected 'cat'"),
        ([1, 2], [1, 2, 3], math.inf, "found 3 elements, expected 2"),
        ({"a": 1}, {"b": 1}, math.inf, "only one of the two has 'a'"),
        ({"a": 1}, ["a"], math.inf, "found ['a'], expected {'a': 1}"),
        (True, 1, math.inf, "found 1, expected True"),
        (1, "1", math.inf, "found '1', expected 1"),
        ([], [], 0.0, ""),
        (None, None, 0.0, ""),
        (b"\x00", b"\x00", 0.0, ""),
        (b"\x00", b"\x01", math.inf, "found"),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0, ""),
        ([1.0], [math.nan], math.inf, "[0]: found nan"),
        ([math.inf], [1.0], math.inf, "[0]"),
        ([1e308], [-1e308], math.inf, "[0]"),
        (281, 282, 1.0, "found 282, expected 281"),
        ([7, 281], [7, 282], 1.0, "[1]: found 282, expected 281"),
        ([[281, 0.5], [7, 0.5]], [[282, 0.5], [7, 0.5]], 1.0, "[0][0]: found 282, expected 281"),
        (281, 282.0, 1 / 281, ""),
        ([281.0], [282], 1 / 281, ""),
        (2**60, 2**60 + 1, 1.0, ""),
        ([0, 2**64], [0, -(2**64)], 2.0**65, "[1]"),
        (10**400, 1, 2.0**1000, ""),
        (1.0, 10**400, math.inf, ""),
        ([True, 2], [1, 2], math.inf, "[0]: found 1, expected True"),
        ([[], []], [[], []], 0.0, ""),
        ([[], [1.0]], [[], [1.25]], 0.25, "[1][0]"),
    ],
)
def test_a_difference_is_the_largest_of_all_values_with_its_place(
    expected: Any, found: Any, size: float, where: str
) -> None:
    found_size, place = difference(expected, found)
    assert found_size == pytest.approx(size)
    assert where in place


@pytest.mark.parametrize(
    ("text", "good", "bad", "why"),
    [
        ("label=cat", [b'{"label":"cat"}'], b'{"label":"dog"}', "label: found 'dog', expected 'cat'"),
        ("n=3", [b'{"n":3}', b'{"n":3.001}'], b'{"n":4}', "n: found 4, expected 3"),
        ("outputs[0].data=[1,2.0]", [b'{"outputs":[{"data":[1,2]}]}'], b'{"outputs":[]}', "no 'outputs[0].data'"),
        ("[1]=true", [b"[0,true]"], b"[0,1]", "[1]: found 1, expected True"),
        ("a.b=null", [b'{"a":{"b":null}}'], b"no JSON", "the response has no 'a.b': no JSON"),
        ("all.json", [b'{"p": 0.5}', b'{"p":0.501}'], b'{"p":0.6}', "p: found 0.6, expected 0.5"),
        ("all.txt", [b"yes"], b"no", "the response: found b'no', expected b'yes'"),
    ],
)
def test_a_response_is_checked_by_a_file_or_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, good: list[bytes], bad: bytes, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all.json").write_text('{"p":0.5}')
    Path("all.txt").write_text("yes")
    check = Expectation(text, 2)
    assert all(check(number, 200, body) for number in (0, 1) for body in good)
    assert check(0, 503, b"full")  # an error of its own
    assert not check.first
    assert not check(1, 200, bad)
    assert check.first.startswith("to request 2, ")
    assert why in check.first
    assert check(1, 200, good[0])


def test_each_request_may_have_a_line(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text('{"n":1}\n\n{"n":2}\n')
    check = Expectation(str(file), 2)
    assert check(0, 200, b'{"n":1}')
    assert check(1, 200, b'{"n":2}')
    assert not check(1, 200, b'{"n":1}')
    with pytest.raises(ConfigError, match="found 2 lines, expected 1, or one for each of 3 requests"):
        Expectation(str(file), 3)


@pytest.mark.parametrize("text", ["label", "=3", "a..b=3", "a[x]=3", "gone.json"])
def test_neither_a_file_nor_a_value_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file, nor PATH=VALUE such as label=cat or scores\[0\]=0.9"):
        Expectation(text, 1)


def test_a_file_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        Expectation(str(tmp_path / "e.json"), 1)
