"""Parameters of requests for a `predict(items, parameters)`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from penstock.types import Item


class ParameterUnit(Struct):
    """An argument of `predict` with the parameters of its request."""

    value: Any
    parameters: dict[str, Any]


class WithParameters(functools.partial[Any]):
    """A `predict` that receives units and hands the parameters to the user's function by name.

    It is a partial, so that the checks of signatures and coroutines see that function.
    """

    def __call__(self, units: Sequence[ParameterUnit], /, *others: Any) -> Any:
        return self.func([u.value for u in units], *others, parameters=[u.parameters for u in units])


def takes_parameters(predict: Callable[..., Any]) -> bool:
    """Whether a function has an argument named `parameters`."""
    try:
        return "parameters" in inspect.signature(predict).parameters
    except (TypeError, ValueError):  # without a signature
        return False


def units_of(values: Sequence[Any], items: Sequence[Item]) -> list[Any]:
    """The arguments of one call, each with its own copy of the parameters of its item."""
    return [ParameterUnit(value, dict(item.parameters or {})) for value, item in zip(values, items, strict=True)]
