"""Sequences in the scheduler: places, bounds, refusals, and what a death ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.batching.entry import Fail
from penstock.core.batching.sequences import SequenceLimits
from penstock.errors import (
    BadRequest,
    Conflict,
    ModelNotReady,
    PenstockError,
    QueueFull,
    SequenceLost,
    SequenceNotFound,
)
from penstock.types import SequenceRequest


@pytest.fixture
def two(bench: Callable[..., Any]) -> Any:
    return bench(slots=2, sequences=SequenceLimits(max_sequences=2, idle_s=10.0, backlog=1))


def offer(bench: Any, id: int, name: str, start: bool = False, end: bool = False, **fields: Any) -> None:
    bench.offer(id, sequence=SequenceRequest(name, start, end), **fields)


def refused(kind: type[PenstockError], text: str, bench: Any, *given: Any, **fields: Any) -> None:
    queued = bench.scheduler.queued
    with pytest.raises(kind, match=text):
        offer(bench, 99, *given, **fields)
    assert bench.scheduler.queued == queued


def test_sequences_begin_where_there_are_fewest_and_share_batches_there(two: Any) -> None:
    for id, name in enumerate("abcd", 1):
        offer(two, id, name, start=True)
    assert two.poll() == [[1, 3], [2, 4]]
    assert [d.slot for d in two.sent] == [0, 1]
    for batch in (1, 2):
        two.complete(batch)
    offer(two, 5, "d")
    offer(two, 6, "b")
    assert two.poll() == [[5, 6]], "both are on slot 1"
    assert two.scheduler.explain()["sequences"] == 4


def test_requests_that_do_not_fit_their_sequence_are_refused(two: Any) -> None:
    refused(SequenceNotFound, "'a' is not in progress", two, "a")
    refused(SequenceNotFound, "x-sequence-start", two, "a", end=True)
    offer(two, 1, "a", start=True)
    refused(Conflict, "'a' is in progress", two, "a", start=True)
    refused(BadRequest, r"at most max_batch_size rows \(4\), found 5", two, "a", rows=5)
    offer(two, 2, "a", end=True)
    refused(Conflict, "'a' ends with an earlier request", two, "a")
    for id, name in enumerate("bcd", 3):
        offer(two, id, name, start=True)
    refused(QueueFull, "4 sequences are in progress, 2 on each", two, "e", start=True)
    offer(two, 6, "b")
    refused(QueueFull, "1 requests of sequence 'b' wait", two, "b")
    with pytest.raises(BadRequest, match="x-sequence-id"):
        two.offer(98)


def test_no_instance_is_up_for_a_new_sequence(bench: Callable[..., Any]) -> None:
    refused(ModelNotReady, "no instance", bench(slots=0, sequences=SequenceLimits(1, 1.0, 1)), "a", start=True)


def test_an_idle_sequence_ends_and_one_that_is_busy_does_not(two: Any) -> None:
    offer(two, 1, "a", start=True)
    offer(two, 2, "b", start=True)
    two.poll()
    two.complete(1)
    two.poll(after_s=11.0)
    refused(SequenceNotFound, "no request for 10 s", two, "a")
    offer(two, 3, "b")
    two.complete(2)
    assert two.poll() == [[3]]


def test_a_start_that_expires_ends_what_waits_behind_it(two: Any) -> None:
    offer(two, 1, "a", start=True)
    offer(two, 2, "b", start=True)
    offer(two, 3, "c", start=True)
    two.poll()
    offer(two, 4, "d", start=True, deadline_s=two.now + 1)
    offer(two, 5, "d")
    assert two.poll(after_s=2.0) == []
    assert [e.id for e in two.told] == [4, 5]
    refused(SequenceNotFound, "'d'", two, "d")


def test_a_death_ends_the_sequences_of_its_slot_and_names_the_cause(two: Any) -> None:
    offer(two, 1, "a", start=True)
    offer(two, 2, "b", start=True)
    two.poll()
    offer(two, 3, "a")
    offer(two, 4, "c", start=True)
    two.complete(1, "died")
    two.scheduler.slot_down(0, two.now)
    two.poll()
    assert two.told == [Fail(1, "worker_died"), Fail(3, "sequence_lost"), Fail(4, "sequence_lost")]
    refused(SequenceLost, "'a' is gone", two, "a")
    offer(two, 5, "b")
    two.complete(2)
    assert two.poll() == [[5]]
    offer(two, 6, "a", start=True)  # on the slot that is left
    two.complete(3)
    assert [d.slot for d in two.sent if two.poll()] == [1]


def test_lost_ids_are_forgotten_after_the_idle_time(two: Any) -> None:
    offer(two, 1, "a", start=True)
    two.poll()
    two.complete(1)
    two.scheduler.slot_retired(0, two.now)
    two.poll(after_s=11.0)
    refused(SequenceNotFound, "'a'", two, "a")


def test_the_next_request_joins_a_streamed_answer_which_keeps_the_sequence(bench: Callable[..., Any]) -> None:
    two = bench(sequences=SequenceLimits(max_sequences=1, idle_s=10.0, backlog=1), slots=0, max_batch_size=1)
    two.scheduler.slot_up(0, two.now, 4)
    offer(two, 1, "a", start=True)
    assert two.poll() == [[1]]
    (first,) = two.sent[0].entries
    offer(two, 2, "a")
    assert two.poll() == [], "the answer has not begun"
    two.scheduler.streams(first)
    two.scheduler.streams(first)
    assert two.poll() == [[2]]
    two.complete(2)
    two.poll(after_s=11.0)
    refused(QueueFull, "1 sequences are in progress", two, "b", start=True)
    two.scheduler.sequences.end("a")
    two.scheduler.sequences.end("unknown")
    refused(Conflict, "ends with an earlier request", two, "a")
    two.complete(1)
    refused(SequenceNotFound, "'a'", two, "a")
    offer(two, 3, "b", start=True)
    assert two.poll() == [[3]]


def test_a_sequence_ends_with_its_time_once_nothing_of_it_runs(bench: Callable[..., Any]) -> None:
    one = bench(sequences=SequenceLimits(max_sequences=1, idle_s=10.0, backlog=1, timeout_s=5.0))
    offer(one, 1, "a", start=True)
    one.poll()
    one.complete(1)
    offer(one, 2, "a")
    one.poll(after_s=4.9)
    one.poll(after_s=0.2)
    refused(Conflict, "ends with an earlier request", one, "a")
    one.complete(2)
    refused(SequenceNotFound, "took too long", one, "a")
    offer(one, 3, "a", start=True)
    assert one.poll() == [[3]]
