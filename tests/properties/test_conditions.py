"""Any expression has the value that Python's own eval gives it."""

import string
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ItemFailed
from penstock.pipeline.filters import Condition, check_condition

NAMES = "abcde"
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, -0.5, float("nan")]),
    st.text("xy'\" \\and", max_size=4), st.lists(st.one_of(st.integers(-3, 3), st.text("xy", max_size=1)), max_size=3),
)  # fmt: skip
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES)


def literal(value: Any) -> str:
    return "e" if value != value else repr(value)


def wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    comparison = st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"])
    return st.one_of(
        st.builds("{} {} {}".format, inner, comparison, inner),
        st.builds("{} {} {} {} {}".format, inner, comparison, inner, comparison, inner),
        st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("not {}".format, inner),
        st.builds("({})".format, inner),
        st.builds("len({})".format, inner),
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
    )


LEAVES = st.one_of(st.sampled_from(NAMES), VALUES.map(literal))


@given(st.recursive(LEAVES, wider, max_leaves=8), FIELDS)
def test_an_expression_has_the_value_of_pythons_eval(text: str, fields: dict[str, Any]) -> None:
    try:
        expected: Any = bool(eval(text, {"__builtins__": {"len": len}}, dict.fromkeys(NAMES) | fields))
    except SyntaxError:
        assume(False)
    except Exception as e:
        expected = type(e).__name__
    if isinstance(expected, str):
        with pytest.raises(ItemFailed, match=f"raised {expected}"):
            Condition(text)(fields)
    else:
        assert Condition(text)(fields) is expected


@given(st.text(string.printable, max_size=30))
def test_any_text_is_a_condition_or_a_clear_error(text: str) -> None:
    with suppress(ConfigError):
        check_condition(text)
