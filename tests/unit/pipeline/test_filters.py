"""Conditions: values, comparisons, predicates, and errors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, ItemFailed
from penstock.pipeline.filters import Condition, check_condition, exclusive

FIELDS: dict[str, Any] = {
    "n": 3,
    "score": 0.5,
    "label": "cat",
    "boxes": [1, 2],
    "empty": [],
    "box": {"score": 0.4, "at": {"x": 7}},
    "page": SimpleNamespace(width=640),
    "image": np.zeros((2, 3)),
    "none_found": np.zeros((0, 4)),
    "class": 5,
    "nothing": None,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("label", True),
        ("empty", False),
        ("image", True),
        ("none_found", False),
        ("unknown", False),
        ("present(label)", True),
        ("present(unknown)", False),
        ("present(nothing)", True),
        ("present(box.at.x)", True),
        ("present(box.at.y)", False),
        ("label == 'cat'", True),
        ('label == "cat" and n != 3', False),
        ("unknown == 'cat'", False),
        ("unknown == none", True),
        ("label != None", True),
        ("score >= 0.5", True),
        ("score < -1", False),
        ("0 < score < 1", True),
        ("box.score >= 0.4", True),
        ("box.at.x == 7", True),
        ("page.width == 640", True),
        ("len(boxes) == 2", True),
        ("len(boxes) == len(empty)", False),
        ("n in [1, 2, 3]", True),
        ("label not in ['dog', \"cow\"]", True),
        ("2 in boxes", True),
        ("not empty or unknown > 3", True),
        ("not (label == 'cat' and n == 3)", False),
        ("class == 5", True),
        ("label == 'class' or class == 6", False),
        ("true and not false", True),
        ("label ==\n 'cat'", True),
    ],
)
def test_an_expression_holds_or_not(text: str, holds: bool) -> None:
    assert Condition(text)(FIELDS) is holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found '', which is no condition"),
        ("score >", "found 'score >', which is no condition"),
        ("score = 3", "which is no condition"),
        ("open('x')", r"found 'open\('x'\)' at character 1 of .*, expected fields, numbers"),
        ("n + 1 > 2", r"found 'n \+ 1' at character 1"),
        ("label.__class__", "found 'label.__class__'"),
        ("[x for x in boxes]", "found '\\[x for x in boxes\\]'"),
        ("boxes[0] == 1", r"found 'boxes\[0\]'"),
        ("n is 3", "found 'n is 3'"),
        ("b'x' == n", "found 'b'x''"),
        ("not " * 80 + "n", "more than 50 levels"),
        ("(" * 900 + "n" + ")" * 900, "which is no condition"),
        ("n == 1 or " * 400 + "n", "found 4001 characters, expected at most 2000"),
        ("no.such.module:func", "no.such.module"),
        ("penstock.types:nothing", "nothing"),
        ("penstock.pipeline.filters:LONGEST", "expected a function of an item's fields that returns a bool"),
    ],
)
def test_a_bad_condition_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_condition(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unknown > 3", r"the condition 'unknown > 3' raised TypeError"),
        ("len(n) > 3", "raised TypeError"),
        ("image == 0", "a comparison of an array, which has many results"),
        ("label in unknown", "raised TypeError"),
    ],
)
def test_a_condition_that_cannot_be_evaluated_fails_the_item(text: str, message: str) -> None:
    with pytest.raises(ItemFailed, match=message):
        Condition(text)(FIELDS)


def keeps(fields: dict[str, Any]) -> Any:
    fields["added"] = True
    return fields["answer"]()


@pytest.mark.parametrize("answer", [True, False])
def test_a_predicate_receives_a_copy_of_the_fields(answer: bool) -> None:
    fields = {"answer": lambda: answer}
    assert Condition(f"{__name__}:keeps")(fields) is answer
    assert "added" not in fields


def test_a_predicate_that_raises_or_returns_no_bool_fails_the_item() -> None:
    predicate = Condition(f"{__name__}:keeps")
    with pytest.raises(ItemFailed, match="keeps' returned a int, expected a bool"):
        predicate({"answer": lambda: 1})
    with pytest.raises(ItemFailed, match=r"keeps' raised KeyError"):
        predicate({})


@pytest.mark.parametrize(
    ("one", "other", "never"),
    [
        ("x", "not x", True),
        ("x == 1", "x == 2", True),
        ("kind == 'a' and y", "kind == 'b'", True),
        ("x > 0.5", "x <= 0.5", True),
        ("x > 0.5", "x < 0.5", True),
        ("x in [1]", "x not in [1]", True),
        ("x > 0.5", "x <= 0.6", False),
        ("x", "y", False),
        ("x == y", "x == z", False),
        ("app:one", "app:two", False),
    ],
)
def test_conditions_that_exclude_each_other_are_known(one: str, other: str, never: bool) -> None:
    assert exclusive(one, other) is exclusive(other, one) is never
