"""What `predict` of a model receives beside the items, and what it returns: sequences, parameters, results."""

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from penstock.core.worker.item_types import hints_of
from penstock.errors import BadOutput, LoadFailed, SequenceLost, WrongRowCount, describe
from penstock.request import Request, request_of
from penstock.types import Item, SequenceRequest

_OF_BATCH = {"parameters": "parameters", "requests": "request"}
_OF_ITEM = {"request": "request"}


class SequenceUnit(Struct):
    """An argument of `predict` with its sequence."""

    value: Any
    sequence: SequenceRequest


class SequenceStates:
    """Calls `predict(items, sequences)`. A state that `predict` stores is kept once its call has succeeded.

    A state is dropped when its sequence ends, which the scheduler alone decides: with the last request, or for a reason
    that the next batch states. It admits at most `max_sequences` sequences, so there are never more states.
    """

    def __init__(self, predict: Callable[..., Any]) -> None:
        """Raises LoadFailed if `predict` does not take two arguments."""
        try:
            inspect.signature(predict).bind([], [])
        except TypeError:
            raise LoadFailed("max_sequences needs predict(items, sequences), or 0 for independent requests") from None
        except ValueError:  # without a signature
            pass
        self._predict = predict
        self._states: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._states)

    def drop(self, ended: Iterable[str]) -> None:
        """Drops the states of these sequences."""
        for id in ended:
            self._states.pop(id, None)

    def check(self, asked: SequenceRequest | None) -> None:
        """Raises SequenceLost for a request that must find a state and does not."""
        if asked is not None and asked.start is False and asked.id not in self._states:
            raise SequenceLost(f"the instance has no state of sequence '{asked.id[:100]}': begin it again")

    def units(self, values: list[Any], sequences: list[SequenceRequest | None]) -> list[SequenceUnit]:
        """The arguments of one call. An item without a sequence, such as one of the warm-up, gets one of its own."""
        units = []
        for value, asked in zip(values, sequences, strict=True):
            sequence = (
                SequenceRequest("", True, True) if asked is None else SequenceRequest(asked.id, asked.start, asked.end)
            )
            if not sequence.start:
                sequence.state = self._states.get(sequence.id)
            units.append(SequenceUnit(value, sequence))
        return units

    def predict(self, units: list[SequenceUnit]) -> Any:
        return self._predict([u.value for u in units], [u.sequence for u in units])

    def keep(self, units: list[SequenceUnit]) -> None:
        """Keeps the states after a successful call for these units."""
        for sequence in (unit.sequence for unit in units):
            if sequence.end:
                self._states.pop(sequence.id, None)
            else:
                self._states[sequence.id] = sequence.state


Asked = dict[str, str]
"""What the arguments of a function ask of the request of each item, "parameters" or "request", by their names."""


class Unit(Struct):
    """An argument of `predict` with what it asks of the request."""

    value: Any
    asked: dict[str, Any]


class WithAsked(functools.partial[Any]):
    """A `predict` that receives units and hands what it asks to the user's function by name.

    It is a partial, so that the checks of signatures and coroutines see that function.
    """

    def __call__(self, units: Sequence[Unit], /, *others: Any) -> Any:
        asked = {name: [unit.asked[name] for unit in units] for name in self.keywords}
        return self.func([unit.value for unit in units], *others, **asked)


class AdmitsUnits:
    """A step model that receives units. All but `admit` and `cost` is the user's model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        if hasattr(model, "cost"):
            self.cost = lambda unit: model.cost(unit.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def admit(self, unit: Unit) -> Any:
        """The state of an item."""
        return self._model.admit(unit.value, **unit.asked)


def asked_by(function: Any, batch: bool = True) -> Asked:
    """What a function asks by the arguments after the first: `parameters` and `requests`, of a batch, or `request`, of
    one item; also any that is annotated with `Request`."""
    try:
        names = list(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):  # without a signature
        return {}
    found = {name: kind for name, kind in (_OF_BATCH if batch else _OF_ITEM).items() if name in names}
    for name, kind in hints_of(function).items():
        if name in names and (kind is Request or Request in typing.get_args(kind)):
            found[name] = "request"
    return found


def asked_of(item: Item, asked: Asked) -> dict[str, Any]:
    """What these arguments receive for an item: its own copy of the parameters, its request."""
    return {n: request_of(item) if kind == "request" else dict(item.parameters or {}) for n, kind in asked.items()}


def copied(value: Any) -> Any:
    """A deep copy of an item; the item itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # of the user's class
        return value


def aligned(found: Any, expected: int, did: str = "returned", padded: str = "") -> list[Any]:
    """The results as a list, one per item. Raises BadOutput; WrongRowCount if it has another length. `did`: what
    predict did with them; `padded`: why there are more items than were sent."""
    array = hasattr(found, "__array__") and getattr(found, "ndim", 0) > 0
    if not isinstance(found, (list, tuple)) and (
        not array or hasattr(found, "columns")
    ):  # a table would give its columns
        whole = "" if did == "returned" else "; a generator yields all parts of a step together, or return list(...)"
        raise BadOutput(
            f"predict {did} a {type(found).__name__}, expected a list, a tuple or an array of {expected} results{whole}"
        )
    try:
        results = list(found)
    except Exception as e:
        raise BadOutput(f"predict {did} a {type(found).__name__} that cannot be read: {describe(e)}") from None
    if len(results) != expected:
        raise WrongRowCount(
            f"predict {did} {len(results)} results for {expected} items, expected one for each item{padded}"
        )
    return results
