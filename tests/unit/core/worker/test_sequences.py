"""The states of sequences in a worker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.worker.predict import SequenceStates
from penstock.errors import SequenceLost
from penstock.types import SequenceRequest


def total(items: list[int], sequences: list[SequenceRequest]) -> list[int]:
    for item, sequence in zip(items, sequences, strict=True):
        sequence.state = (sequence.state or 0) + item
    return [s.state for s in sequences]


def asked(states: SequenceStates, *requests: SequenceRequest, keep: bool = True) -> Any:
    for request in requests:
        states.check(request)
    units = states.units([1] * len(requests), list(requests))
    found = states.predict(units)
    if keep:
        states.keep(units)
    return found


def test_a_state_lasts_from_start_to_end() -> None:
    states, a, b = SequenceStates(total), SequenceRequest("a"), SequenceRequest("b", start=True)
    assert asked(states, SequenceRequest("a", start=True), b) == [1, 1]
    assert asked(states, a) == [2]
    assert asked(states, SequenceRequest("a", end=True)) == [3]
    with pytest.raises(SequenceLost, match="no state of sequence 'a'"):
        asked(states, a)
    assert asked(states, SequenceRequest("a", start=None)) == [1], "it begins unless it is in progress"
    assert asked(states, b) == [1], "a start begins anew"


def test_a_state_stays_until_its_sequence_is_said_to_have_ended() -> None:
    states = SequenceStates(total)
    for name in "abc":
        asked(states, SequenceRequest(name, start=True))
    states.drop(["a", "unknown"])
    assert len(states) == 2
    with pytest.raises(SequenceLost):
        asked(states, SequenceRequest("a"))
    assert asked(states, SequenceRequest("b"), SequenceRequest("c")) == [2, 2]


def test_an_item_without_a_sequence_has_one_of_its_own() -> None:
    states = SequenceStates(total)
    units = states.units([1], [None])
    assert (units[0].sequence.start, units[0].sequence.end) == (True, True)
    assert states.predict(units) == [1]
