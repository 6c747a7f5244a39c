"""SequenceStates: the states of the sequences in progress on one instance."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from penstock.errors import LoadFailed, SequenceLost
from penstock.types import SequenceRequest


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
        """The call for these units succeeded."""
        for sequence in (unit.sequence for unit in units):
            if sequence.end:
                self._states.pop(sequence.id, None)
            else:
                self._states[sequence.id] = sequence.state
