"""The states of sequences in a worker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.worker import sequences
from penstock.core.worker.sequences import SequenceStates
from penstock.errors import LoadFailed
from penstock.types import SequenceRequest


def total(items: list[int], sequences: list[SequenceRequest]) -> list[int]:
    for item, sequence in zip(items, sequences, strict=True):
        sequence.state = (sequence.state or 0) + item
    return [s.state for s in sequences]


def made(predict: Any = total, **keys: Any) -> SequenceStates:
    return SequenceStates(predict, BatchingConfig(**({"max_sequences": 2} | keys)))


def asked(states: SequenceStates, *requests: SequenceRequest, keep: bool = True) -> Any:
    units = states.units([1] * len(requests), list(requests))
    found = states.predict(units)
    if keep:
        states.keep(units)
    return found


def test_a_state_lasts_from_start_to_end() -> None:
    states, a, b = made(), SequenceRequest("a"), SequenceRequest("b", start=True)
    assert asked(states, SequenceRequest("a", start=True), b) == [1, 1]
    assert asked(states, a) == [2]
    assert asked(states, SequenceRequest("a", end=True)) == [3]
    assert asked(states, a) == [1], "the state is gone"
    assert asked(states, b) == [1], "a start begins anew"


def test_a_call_that_failed_leaves_the_state_as_it_was() -> None:
    states = made()
    asked(states, SequenceRequest("a", start=True))
    asked(states, SequenceRequest("a"), keep=False)
    assert asked(states, SequenceRequest("a")) == [2]


def test_states_of_ended_sequences_make_room_and_leave_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    states = made(sequence_idle_s=5.0)
    for name in "abc":
        asked(states, SequenceRequest(name, start=True))
    assert asked(states, SequenceRequest("a"), keep=False) == [1], "only two have room"
    later = sequences.time.monotonic() + 7
    monkeypatch.setattr(sequences.time, "monotonic", lambda: later)
    asked(states, SequenceRequest("d", start=True))
    assert asked(states, SequenceRequest("c"), keep=False) == [1]


def test_an_item_without_a_sequence_has_one_of_its_own() -> None:
    states = made()
    units = states.units([1], [None])
    assert (units[0].sequence.start, units[0].sequence.end) == (True, True)
    assert states.predict(units) == [1]


def test_predict_must_take_two_arguments() -> None:
    with pytest.raises(LoadFailed, match=r"needs predict\(items, sequences\)"):
        made(lambda items: items)
