"""Which lengths share a batch, by the learned cost; how many tokens it may have; and what both bring under load."""

import math
from random import Random

import pytest

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import Dispatch, Entry, Outcome
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.lengths import CLASSES, LengthClasses, RowCost
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.scheduler import Scheduler
from penstock.errors import BadRequest
from penstock.perf.simulate.simulator import ServiceTime
from support.simulator import ClosedLoop, SimulationResult, SimulationSettings, simulate


def scheduler(a: float, b: float = 1e-5, most: int = 8, **more: object) -> Scheduler:
    """A greedy one that has learned a + b * tokens."""
    found = Scheduler(
        Fixed(0.0),
        max_batch_size=most,
        max_queue=1000,
        max_queue_bytes=2**30,
        lengths=True,
        **more,  # type: ignore[arg-type]
    )
    found.prime([(n, a + b * n) for n in (10, 100, 1000) for _ in range(5)])
    found.slot_up(0, 0.0)
    return found


def offer(found: Scheduler, *lengths: int, rows: int = 1, **more: float) -> None:
    start = found.arrived_rows
    for k, length in enumerate(lengths):
        found.offer(Entry(start + k + 1, rows, length=length, arrival_s=k * 1e-6, **more), 0.0)  # type: ignore[arg-type]


def batches(found: Scheduler, now: float = 0.001) -> list[list[int]]:
    """The lengths of every batch until the queue is empty."""
    sent = []
    while found.queued:
        (batch,) = found.poll(now)
        assert type(batch) is Dispatch
        sent.append(sorted(e.length for e in batch.entries))
        found.complete(batch.batch_id, Outcome(), now + 0.01)
        now += 0.02
    return sent


def test_classes_share_a_batch_if_padding_costs_less_than_a_batch() -> None:
    lengths = (100, 20, 22, 200, 90)
    found = scheduler(a=0.0)
    offer(found, *lengths)
    assert batches(found) == [[100], [20], [22], [200], [90]]
    found = scheduler(a=1e-3)  # 100 tokens
    offer(found, *lengths)
    assert batches(found) == [[90, 100], [20, 22], [200]]
    found = scheduler(a=1.0)
    offer(found, *lengths)
    assert batches(found) == [[20, 22, 90, 100, 200]]


def test_before_the_cost_is_known_all_classes_share_a_batch() -> None:
    found = Scheduler(Fixed(0.0), max_batch_size=8, max_queue=99, max_queue_bytes=99, lengths=True)
    found.slot_up(0, 0.0)
    offer(found, 5, 500)
    assert batches(found) == [[5, 500]]


def test_a_full_class_runs_alone_and_the_oldest_request_is_always_next() -> None:
    found = scheduler(a=1.0)
    offer(found, 300, *[10] * 20)
    sent = batches(found)
    assert 300 in sent[0]
    found = scheduler(a=1e-3)
    offer(found, *[10] * 9, 300, *[10] * 9)
    assert batches(found) == [[10] * 8, [10] * 8, [300], [10, 10]]


def test_a_batch_has_at_most_max_tokens() -> None:
    found = scheduler(a=1.0, max_tokens=100)
    offer(found, 40, 10, 50, 10, 12)
    for lengths in batches(found):
        assert len(lengths) * max(lengths) <= 100
    offer(found, 30, rows=7)
    assert [len(lengths) for lengths in batches(found)] == [1, 1, 1]
    with pytest.raises(BadRequest, match=r"has a length of 101, more than batching.max_tokens \(100\)"):
        offer(found, 101)
    offer(found, 100)
    assert batches(found) == [[100]]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"max_tokens must be at least 1, found {wrong}"):
            LengthClasses(wrong)


def test_sizes_and_max_tokens_hold_together() -> None:
    classes = LengthClasses(100, Ladder((1, 4, 8)))
    assert [classes.most(length, 8) for length in (10, 20, 25, 26, 100)] == [8, 4, 4, 1, 1]
    cost = Cost()
    cost.a, cost.b = 2.0, 0.5
    assert RowCost(cost, 10, Ladder((1, 4, 8))).t(3) == 2.0 + 0.5 * 40
    assert RowCost(cost, 10, None).t(3) == 2.0 + 0.5 * 30


def test_out_of_memory_lowers_the_tokens_of_a_batch_and_not_its_rows() -> None:
    found = scheduler(a=1.0)
    offer(found, *[100] * 8)
    (batch,) = found.poll(0.001)
    assert type(batch) is Dispatch
    offer(found, *[100] * 6)
    found.complete(batch.batch_id, Outcome(oom=(800, 400)), 0.01)
    assert found.explain()["max_tokens"] == 600
    assert [len(lengths) for lengths in batches(found, 0.02)] == [5, 1]  # of the class up to 104
    offer(found, *[10] * 8)
    assert [len(lengths) for lengths in batches(found, 1.0)] == [8]


def test_other_lengths_make_no_request_late() -> None:
    found = Scheduler(Adaptive(0.0), max_batch_size=8, max_queue=99, max_queue_bytes=99, lengths=True)
    found.prime([(n, 0.1 + 1e-3 * n) for n in (10, 100, 1000) for _ in range(5)])
    found.slot_up(0, 0.0)
    offer(found, 10, deadline_s=0.2)
    offer(found, 300)
    assert batches(found) == [[10], [300]]


def test_the_explanation_counts_the_tokens_of_padding() -> None:
    found = scheduler(a=1.0)
    offer(found, 10, 30)
    batches(found)
    explained = found.explain()
    assert (explained["sent_tokens"], explained["padded_tokens"], explained["sent_rows"]) == (40, 20, 2)
    assert found.seconds(2) == pytest.approx(1.0, rel=0.2)


LENGTHS = [n for k in range(4000) if 8 <= (n := int(Random(k).lognormvariate(math.log(40), 0.8))) <= 256]


def load(clients: int, a: float, b: float, horizon_s: float = 12.0, **more: int) -> SimulationResult:
    settings = SimulationSettings(lengths=True, **more)  # type: ignore[arg-type]
    return simulate(ServiceTime(a, b), Adaptive(), ClosedLoop(clients, horizon_s, lengths=LENGTHS), settings)


def test_a_short_queue_makes_full_batches_and_a_long_one_little_padding() -> None:
    launches = load(32, 5e-3, 0.4e-6, 4.0)  # of a small model on a GPU: nearly all of a batch is set-up
    assert launches.mean_batch > 25
    for clients, rows in ((128, 9), (512, 30)):
        found = load(clients, 1e-3, 40e-6)  # all of it are tokens
        assert found.padding < 0.08
        assert found.mean_batch > rows
        ideal = 1 / (40e-6 * sum(LENGTHS) / len(LENGTHS))  # without padding and set-up
        assert found.throughput > 0.87 * ideal


@pytest.mark.parametrize("more", [{"slots": 3}, {"depth": 2}, {"max_tokens": 1000}])
def test_no_length_starves(more: dict[str, int]) -> None:
    found = load(64, 2e-3, 5e-6, 6.0, **more)
    assert found.p99_s < 5 * found.mean_s


def test_classes_grow_from_the_first() -> None:
    assert CLASSES.sizes[:4] == (8, 9, 11, 13)
    assert CLASSES.up(2**31 - 1) == 2**31 - 1
