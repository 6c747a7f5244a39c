"""Sequences in the scheduler: places, bounds, refusals, and what a death ends."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.batching.entry import Expire, Fail
from penstock.core.batching.sequences import SequenceLimits
from penstock.errors import (
    BadRequest,
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
    refused(BadRequest, "has one row, found 2", two, "a", rows=2)
    refused(BadRequest, "has one row, found 2", two, "b", start=True, rows=2)
    offer(two, 2, "a", end=True)
    refused(SequenceNotFound, "'a' is not in progress", two, "a")
    offer(two, 3, "b", start=True)
    offer(two, 4, "b")
    refused(QueueFull, "1 requests of sequence 'b' wait", two, "b")
    refused(QueueFull, "1 requests of sequence 'b' wait", two, "b", start=True)
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


def test_a_start_begins_a_running_sequence_anew_behind_what_has_arrived(bench: Callable[..., Any]) -> None:
    one = bench(sequences=SequenceLimits(max_sequences=1, idle_s=10.0, backlog=9))
    offer(one, 1, "a", start=True)
    assert one.poll() == [[1]]
    offer(one, 2, "a", end=True)
    offer(one, 3, "a", start=True)  # over one that ends with a request that waits
    offer(one, 4, "a", start=True)  # over one that waits itself
    offer(one, 5, "a")
    order = [batch for batch in range(1, 5) for _ in one.complete(batch) or [0] for batch in one.poll()]
    assert order == [[2], [3], [4], [5]]
    assert one.sent[0].ended == (), "the place was never free"
    one.complete(5)
    offer(one, 6, "a", end=True)
    assert one.poll() == [[6]]


def test_a_start_over_a_running_sequence_takes_its_followers_along(bench: Callable[..., Any]) -> None:
    one = bench(sequences=SequenceLimits(max_sequences=1, idle_s=10.0, backlog=9))
    offer(one, 1, "a", start=True)
    one.poll()
    offer(one, 2, "a", start=True, expires_s=one.now + 1)
    offer(one, 3, "a")
    offer(one, 4, "a", start=True)
    assert one.poll(after_s=1.0) == []
    assert one.told == [Expire(2, "timeout"), Fail(3, "sequence_lost")]
    one.complete(1)
    assert one.poll() == [[4]]
    offer(one, 5, "a", start=True)
    offer(one, 6, "a")
    one.scheduler.cancel(5, one.now)
    one.poll()
    assert one.told == [Fail(6, "sequence_lost")]
    refused(SequenceNotFound, "'a'", one, "a")  # its client wanted the old one no longer
    one.complete(2)
    offer(one, 7, "b", start=True)
    assert one.poll() == [[7]]
    assert one.sent[0].ended == ("a",)


def test_a_start_without_a_place_waits_for_the_end_of_another_sequence(two: Any) -> None:
    for id, name in enumerate("abcd", 1):
        offer(two, id, name, start=True)
    assert two.poll() == [[1, 3], [2, 4]]
    offer(two, 5, "e", start=True)
    offer(two, 6, "e")
    offer(two, 7, "f", start=True)
    offer(two, 8, "b", end=True)
    refused(QueueFull, "1 requests of sequence 'e' wait", two, "e")
    assert two.poll() == []
    assert two.scheduler.explain()["sequences"] == 4
    assert two.scheduler.queued == 4
    two.complete(2)
    assert two.poll() == [[8]], "it has a place"
    two.complete(3)
    assert two.poll() == [[5]], "in the order of arrival"
    assert two.sent[0].slot == 1
    assert two.sent[0].ended == ("b",)
    two.complete(4)
    assert two.poll() == [[6]]


def test_a_start_waits_for_a_place_until_a_sequence_was_idle_for_too_long(two: Any) -> None:
    for id, name in enumerate("abcd", 1):
        offer(two, id, name, start=True)
    two.poll()
    two.complete(2, after_s=1.0)
    two.poll(after_s=1.0)
    offer(two, 5, "e", start=True)
    two.poll()
    assert two.scheduler.wake_at == two.now + 9.0
    assert two.poll(after_s=8.999) == []
    assert two.poll(after_s=0.001) == [[5]]
    assert two.scheduler.wake_at is None


def test_a_start_that_waits_for_a_place_keeps_to_the_bounds_of_the_queue(bench: Callable[..., Any]) -> None:
    one = bench(sequences=SequenceLimits(max_sequences=1, idle_s=10.0, backlog=9), max_queue=6)
    offer(one, 1, "a", start=True)
    one.poll()
    offer(one, 2, "b", start=True, expires_s=one.now + 1)
    offer(one, 3, "b")
    offer(one, 4, "c", start=True)
    refused(QueueFull, "1 on each instance, and 2 wait for a place", one, "d", start=True)
    refused(QueueFull, "1 on each instance, and 2 wait for a place", one, "c")
    offer(one, 6, "a")
    offer(one, 7, "a", end=True)  # the other half is for those that make room
    assert one.poll(after_s=1.0) == []
    assert one.told == [Expire(2, "timeout"), Fail(3, "sequence_lost")]
    assert one.scheduler.cancel(4, one.now)
    offer(one, 5, "d", start=True)
    order = [batch for done in (1, 2, 3) for _ in one.complete(done) or [0] for batch in one.poll()]
    assert order == [[6], [7], [5]]
    assert one.scheduler.queued == 0
    with pytest.raises(QueueFull, match="1 on each instance, and 0 wait"):  # as TorchServe's requests begin sequences
        one.offer(8, sequence=SequenceRequest("e", None))


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
    limits = SequenceLimits(max_sequences=1, idle_s=10.0, backlog=1)
    two = bench(sequences=limits, slots=0, max_batch_size=1)
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
    offer(two, 3, "b", start=True)
    assert two.poll() == [], "it keeps its place"
    two.scheduler.sequences.end("a")
    two.scheduler.sequences.end("unknown")
    refused(SequenceNotFound, "'a'", two, "a")
    two.complete(1)
    assert two.poll() == [[3]]


def test_a_sequence_ends_with_its_time_once_nothing_of_it_runs(bench: Callable[..., Any]) -> None:
    one = bench(sequences=SequenceLimits(max_sequences=1, idle_s=10.0, backlog=1, timeout_s=5.0))
    offer(one, 1, "a", start=True)
    one.poll()
    one.complete(1)
    offer(one, 2, "a")
    one.poll(after_s=4.9)
    one.poll(after_s=0.2)
    refused(SequenceNotFound, "took too long", one, "a")
    one.complete(2)
    refused(SequenceNotFound, "took too long", one, "a")
    offer(one, 3, "a", start=True)
    assert one.poll() == [[3]]
