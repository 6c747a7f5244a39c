from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest

from penstock.errors import ConfigError, LoadFailed
from penstock.pipeline.ops.base import REQUIRED, ItemOp, OpParameter, check_params, make_op, parameters_of, takes_any

if TYPE_CHECKING:
    import decimal as absent


class Base(ItemOp):
    """An op.

    - `size`: how large
      it is.
    """

    def __init__(self, size: int, color: Literal["rgb", "bgr"] = "rgb", mean: tuple[float, ...] = ()) -> None:
        if size < 0:
            raise ValueError("a size is 0 or more")
        if size == 13:
            raise LoadFailed("13")
        self.values = (size, color, mean)


class Child(Base):
    """Another.

    - `color`: which.
    """


class Open(ItemOp):
    """Takes any parameters."""

    def __init__(self, target: str, **params: Any) -> None:
        self.values = (target, params)


class Bare(ItemOp):
    """Has no parameters."""


def test_the_keys_of_an_op_are_the_parameters_of_its_init():
    found = parameters_of(Base)
    assert list(found) == ["size", "color", "mean"]
    assert found["size"] == OpParameter("size", int, REQUIRED, "how large it is.")
    assert found["size"].required
    assert not found["mean"].required
    assert parameters_of(Bare) == {}


def test_documentation_of_a_key_is_inherited():
    found = parameters_of(Child)
    assert [found[name].doc for name in ("size", "color", "mean")] == ["how large it is.", "which.", ""]


def test_an_op_with_keywords_takes_any_key():
    assert takes_any(Open)
    assert not takes_any(Base)
    assert not takes_any(Bare)
    assert make_op(Open, {"target": "a", "other": "1"}).values == ("a", {"other": "1"})


def test_an_unknown_key_is_reported_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Base has no parameter 'siz'; did you mean 'size'\? \(it has: size, color"):
        check_params(Base, {"siz": 1})
    with pytest.raises(ConfigError, match=r"Bare has no parameter 'size' \(it has: none\)"):
        check_params(Bare, {"size": 1})


def test_values_that_an_op_rejects_are_configuration_errors():
    with pytest.raises(ConfigError, match="Base: a size is 0 or more"):
        make_op(Base, {"size": "-1"})
    with pytest.raises(LoadFailed, match="13"):
        make_op(Base, {"size": 13})


def test_an_op_is_made_with_converted_values():
    op = make_op(Base, {"size": "3", "mean": "1,2"})
    assert op.values == (3, "rgb", (1.0, 2.0))


class ForCheckers(ItemOp):
    """Uses a type that only type checkers import."""

    def __init__(self, price: absent.Decimal | None = None, other: Absent = None, size: int = 1) -> None:  # noqa: F821
        self.size = size


def test_a_type_that_only_type_checkers_import_is_any():
    parameters = parameters_of(ForCheckers)
    assert [p.type for p in parameters.values()] == [Any, Any, int]
    assert make_op(ForCheckers, {"size": "3"}).size == 3
