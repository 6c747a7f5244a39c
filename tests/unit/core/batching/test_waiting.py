"""Requests that are cut to fill a batch, seen through a Scheduler."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.batching.entry import Expire
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.fixed import Fixed

Make = Callable[..., Any]


def parts(b: Any) -> list[list[tuple[int, int, int]]]:
    """(request, first row, rows) of each entry of each batch that was sent."""
    return [[(e.id, e.start, e.rows) for e in d.entries] for d in b.sent]


def test_a_divisible_request_is_cut_to_fill_a_batch_and_ends_once_with_its_last_rows(bench: Make) -> None:
    b = bench(Adaptive(), max_batch_size=8)
    for id in (1, 2, 3):
        b.offer(id, rows=5, divisible=True)
    b.poll()
    assert parts(b) == [[(1, 0, 5), (2, 0, 3)]]
    assert (b.scheduler.queued, b.scheduler.queued_rows) == (2, 7)
    assert b.complete(1) == []
    b.poll()
    assert parts(b) == [[(2, 3, 2), (3, 0, 5)]]
    assert b.complete(2) == [2]
    assert b.scheduler.queued == 0


def test_a_part_is_cut_again(bench: Make) -> None:
    b = bench(Adaptive(), max_batch_size=8)
    b.offer(1, rows=6, divisible=True)
    b.offer(2, rows=12, divisible=True)  # larger than a batch: parts of 8 and 4
    sent = []
    for batch in (1, 2, 3):
        b.poll()
        sent += parts(b)
        ended = b.complete(batch)
    assert sent == [[(1, 0, 6), (2, 0, 2)], [(2, 2, 6), (2, 8, 2)], [(2, 10, 2)]]
    assert ended == [2]


@pytest.mark.parametrize(
    ("requests", "sent"),
    [
        ([(5, False), (5, False)], [(1, 0, 5)]),
        ([(7, True), (7, True)], [(1, 0, 7)]),  # an eighth of the batch stays empty: not worth another decoding
        ([(6, True), (6, True)], [(1, 0, 6), (2, 0, 2)]),
        ([(5, True), (6, False), (6, True)], [(1, 0, 5)]),  # a part overtakes nobody
        ([(5, True), (6, False), (3, True)], [(1, 0, 5), (3, 0, 3)]),
        ([(9, False), (3, False)], [(1, 0, 8)]),
    ],
)
def test_only_divisible_requests_are_split(bench: Make, requests: list[tuple[int, bool]], sent: list[Any]) -> None:
    b = bench(Adaptive(), max_batch_size=8)
    for k, (rows, divisible) in enumerate(requests):
        b.offer(k + 1, rows=rows, divisible=divisible)
    b.poll()
    assert parts(b) == [sent]


def test_a_policy_gets_whole_requests_by_default(bench: Make) -> None:
    b = bench(Fixed(0.0), max_batch_size=8)
    b.offer(1, rows=5, divisible=True)
    b.offer(2, rows=5, divisible=True)
    b.poll()
    assert parts(b) == [[(1, 0, 5)]]


def test_the_rest_of_a_cut_request_still_ends_in_time(bench: Make) -> None:
    b = bench(Adaptive(), max_batch_size=8)
    b.offer(1, rows=5, divisible=True)
    b.offer(2, rows=5, divisible=True, expires_s=b.now + 1)
    b.poll()
    assert parts(b) == [[(1, 0, 5), (2, 0, 3)]]
    assert b.scheduler.wake_at == b.now + 1
    b.poll(1.0)
    assert (b.told, b.scheduler.queued_rows) == ([], 0), "told when the part that runs is back"
    b.complete(1)
    b.poll()
    assert b.told == [Expire(2, "timeout")]


def test_a_part_that_died_with_its_worker_runs_again_before_the_rest(bench: Make) -> None:
    b = bench(Adaptive(), max_batch_size=8, slots=2)
    b.offer(1, rows=5, divisible=True)
    b.offer(2, rows=5, divisible=True)
    b.poll()
    b.complete(1, "died")
    b.scheduler.slot_down(0, b.now)
    rest = parts(b)[1:]
    b.poll()
    assert rest == [[(2, 3, 2)]]
    assert parts(b) == []  # the other slot works
    b.complete(2)
    b.poll()
    assert parts(b) == [[(1, 0, 5)]]
    b.complete(3)
    b.poll()
    assert parts(b) == [[(2, 0, 3)]]
    assert b.complete(4) == [2]
