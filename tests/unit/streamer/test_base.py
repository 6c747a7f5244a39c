from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import ItemFailed, PenstockError, QueueFull
from penstock.streamer.base import CHUNKS_IN_FLIGHT, ChunkedCall
from penstock.types import Item, ItemResult, Sink


class Queue:
    """Keeps submitted requests until the test answers them."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Item, Sink]] = {}  # by first value
        self.budgets: list[float | None] = []
        self.cancelled: list[int] = []
        self.refuse: PenstockError | None = None

    def submit(self, item: Item, sink: Sink) -> Any:
        if self.refuse is not None:
            raise self.refuse
        assert item.many
        assert item.rows == len(item.payload)
        first = item.payload[0]
        self.waiting[first] = (item, sink)
        self.budgets.append(item.budget_s)
        queue = self

        class Ticket:
            def cancel(self) -> None:
                queue.cancelled.append(first)
                del queue.waiting[first]

        return Ticket()

    def answer(self, first: int, error: PenstockError | None = None) -> None:
        item, sink = self.waiting.pop(first)
        sink(ItemResult(item.payload, error=error))


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def call(queue: Queue) -> Callable[..., tuple[ChunkedCall, list[ItemResult]]]:
    def make(count: int = 10, rows: int = 4, **keys: Any) -> tuple[ChunkedCall, list[ItemResult]]:
        answers: list[ItemResult] = []
        item = Item(list(range(count)), rows=count, many=True, **keys)
        return ChunkedCall(queue.submit, item, answers.append, rows), answers

    return make


def test_two_chunks_are_in_flight_and_the_caller_gets_one_ordered_answer(queue: Queue, call: Any) -> None:
    _, answers = call()
    assert sorted(queue.waiting) == [0, 4]
    assert len(queue.waiting) == CHUNKS_IN_FLIGHT
    queue.answer(4)
    assert sorted(queue.waiting) == [0, 8]
    queue.answer(8)
    assert not answers
    queue.answer(0)
    assert [a.body for a in answers] == [list(range(10))]


def test_a_full_queue_refuses_the_call_only_when_no_chunk_is_in_flight(queue: Queue, call: Any) -> None:
    queue.refuse = QueueFull("full")
    with pytest.raises(QueueFull):
        call()
    queue.refuse = None
    _, answers = call()
    queue.refuse = QueueFull("full")
    queue.answer(0)
    assert not answers
    queue.answer(4)
    assert [type(a.error) for a in answers] == [QueueFull]


def test_a_refused_chunk_is_sent_after_another_chunk_is_answered(queue: Queue, call: Any) -> None:
    _, answers = call()
    queue.refuse = QueueFull("full")
    queue.answer(0)
    queue.refuse = None
    queue.answer(4)
    queue.answer(8)
    assert answers[0].body == list(range(10))


def test_a_failed_chunk_fails_the_call_and_cancels_the_others(queue: Queue, call: Any) -> None:
    _, answers = call()
    late = queue.waiting[4][1]
    queue.answer(0, ItemFailed("no"))
    assert [type(a.error) for a in answers] == [ItemFailed]
    assert queue.cancelled == [4]
    late(ItemResult([]))  # already on its way
    assert len(answers) == 1


def test_a_cancelled_call_cancels_its_chunks_and_sends_no_more(queue: Queue, call: Any) -> None:
    chunked, answers = call()
    chunked.cancel()
    assert sorted(queue.cancelled) == [0, 4]
    assert not answers


def test_every_chunk_has_the_priority_of_its_call(queue: Queue, call: Any) -> None:
    call(priority=2)
    queue.answer(0)
    assert [item.priority for item, _ in queue.waiting.values()] == [2, 2]


def test_later_chunks_get_the_remaining_budget(queue: Queue, call: Any) -> None:
    call(budget_s=5.0)
    queue.answer(0)
    first, _, last = queue.budgets
    assert first is not None
    assert last is not None
    assert 0 < last <= first <= 5
