"""SequenceStates: the states of the sequences in progress on one instance."""

import inspect
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from penstock.config.schema import BatchingConfig
from penstock.errors import LoadFailed
from penstock.types import SequenceRequest

_SLACK_S = 1.0  # the server decides when a sequence ends; its state is kept a little longer


class SequenceUnit(Struct):
    """An argument of `predict` with its sequence."""

    value: Any
    sequence: SequenceRequest


class SequenceStates:
    """Calls `predict(items, sequences)`. A state that `predict` stores is kept once its call has succeeded.

    The scheduler admits at most `max_sequences` sequences, so the states used least recently belong to ended ones.
    """

    def __init__(self, predict: Callable[..., Any], batching: BatchingConfig) -> None:
        """Raises LoadFailed if `predict` does not take two arguments."""
        try:
            inspect.signature(predict).bind([], [])
        except TypeError:
            raise LoadFailed("max_sequences needs predict(items, sequences), or 0 for independent requests") from None
        except ValueError:  # without a signature
            pass
        self._predict = predict
        self._most, self._keep_s = batching.max_sequences, batching.sequence_idle_s + _SLACK_S
        self._states: dict[str, tuple[Any, float]] = {}  # id -> state and time of last use, in the order of use

    def units(self, values: list[Any], sequences: list[SequenceRequest | None]) -> list[SequenceUnit]:
        """The arguments of one call. An item without a sequence, such as one of the warm-up, gets one of its own."""
        units = []
        for value, asked in zip(values, sequences, strict=True):
            sequence = (
                SequenceRequest("", True, True) if asked is None else SequenceRequest(asked.id, asked.start, asked.end)
            )
            if not sequence.start:
                sequence.state = self._states.get(sequence.id, (None, 0.0))[0]
            units.append(SequenceUnit(value, sequence))
        return units

    def predict(self, units: list[SequenceUnit]) -> Any:
        return self._predict([u.value for u in units], [u.sequence for u in units])

    def keep(self, units: list[SequenceUnit]) -> None:
        """The call for these units succeeded."""
        now, states = time.monotonic(), self._states
        for unit in units:
            sequence = unit.sequence
            states.pop(sequence.id, None)
            if not sequence.end:
                states[sequence.id] = sequence.state, now
        for id, (_, used_s) in list(states.items()):
            if len(states) <= self._most and used_s + self._keep_s > now:
                break
            del states[id]
