"""Requests that wait for the first worker: each leaves once, and gives back what it holds."""

import asyncio
from collections.abc import Iterator

import pytest

from penstock.core.engine.admission import AdmissionQueue
from penstock.core.engine.calls import Call
from penstock.core.wire.slabs import SlabPool
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, QueueTimeout
from penstock.types import Item, ItemResult, Sink


class Later:
    """The clock of the running loop, which a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        self.seconds = 0.0
        monkeypatch.setattr(loop, "time", lambda: now() + self.seconds)


@pytest.fixture
async def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    return Later(monkeypatch)


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    pool = SlabPool(2**20)
    yield pool
    pool.close()


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Engine:
    """Takes requests, or refuses them with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[Item] = []
        self.cancelled: list[Item] = []
        self.error = error

    def submit(self, item: Item, sink: Sink) -> Call:
        if self.error is not None:
            raise self.error
        self.taken.append(item)
        call = Call(item, sink, None, lambda call: self.cancelled.append(call.item))  # type: ignore[arg-type]
        self.last = call
        return call


def large(pool: SlabPool) -> Item:
    slab = pool.allocate(100_000)
    assert slab is not None
    return Item(slab, "raw")


async def test_a_request_is_forwarded_with_the_time_that_is_left(later: Later) -> None:
    queue, engine, results = AdmissionQueue(), Engine(), []
    first = queue.add(Item(1, budget_s=10.0, wait_s=20.0, priority=2), results.append, timeout_s=60.0)
    queue.add(Item(2), results.append, timeout_s=60.0)
    first.label = "2.0"
    later.seconds = 4.0
    queue.forward(engine.submit)
    assert [item.payload for item in engine.taken] == [1, 2]
    assert engine.taken[0].budget_s == pytest.approx(6.0, abs=1.0)
    assert engine.taken[0].wait_s == pytest.approx(16.0, abs=1.0)
    assert (engine.taken[0].priority, engine.taken[1].budget_s) == (2, None)
    assert (len(queue), results) == (0, [])
    later.seconds = 1000.0  # its own timers are over: the engine has others
    await turns()
    assert not results
    first.cancel()
    assert engine.cancelled == [engine.taken[0]]


@pytest.mark.parametrize(
    ("budget_s", "wait_s", "timeout_s", "kind"),
    [
        (5.0, 60.0, 60.0, DeadlineExceeded),
        (60.0, None, 5.0, QueueTimeout),
        (5.0, None, None, DeadlineExceeded),
        (None, None, 5.0, QueueTimeout),
        (60.0, 5.0, 60.0, QueueTimeout),
        (None, 5.0, None, QueueTimeout),
    ],
)
async def test_the_earlier_of_deadline_and_timeout_ends_a_request(
    later: Later,
    pool: SlabPool,
    budget_s: float | None,
    wait_s: float | None,
    timeout_s: float | None,
    kind: type[PenstockError],
) -> None:
    reasons: list[str] = []
    queue, results = AdmissionQueue(reasons.append), []
    item = large(pool)
    item.budget_s, item.wait_s = budget_s, wait_s
    queue.add(item, results.append, nbytes=100_000, timeout_s=timeout_s)
    later.seconds = 4.0
    await turns()
    assert not results
    later.seconds = 6.0
    await turns()
    assert [type(result.error) for result in results] == [kind]
    assert reasons == ["timeout" if kind is QueueTimeout else "expired"]
    assert (len(queue), queue.rows, queue.nbytes, pool.in_use_bytes) == (0, 0, 0, 0)


async def test_a_request_that_leaves_gives_back_its_memory_and_its_place(pool: SlabPool) -> None:
    reasons: list[str] = []
    queue, engine, results = AdmissionQueue(reasons.append), Engine(), []
    request = queue.add(large(pool), results.append, nbytes=100_000)
    queue.add(Item([1, 2, 3], rows=3, many=True), results.append, nbytes=24)
    assert (len(queue), queue.rows, queue.nbytes) == (2, 4, 100_024)
    request.cancel()
    request.cancel()
    assert (len(queue), queue.rows, queue.nbytes, pool.in_use_bytes) == (1, 3, 24, 0)
    queue.forward(engine.submit)
    assert (len(queue), queue.rows, queue.nbytes) == (0, 0, 0)
    assert (len(engine.taken), results, reasons) == (1, [], ["cancelled"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [(QueueFull("full"), QueueFull), (ValueError("a bug"), PenstockError)],
    ids=["refused", "bug"],
)
async def test_a_refusal_is_the_response_to_its_request_alone(
    pool: SlabPool, error: Exception, expected: type[PenstockError]
) -> None:
    queue, results = AdmissionQueue(), []
    for item in (large(pool), large(pool)):
        queue.add(item, results.append)
    queue.forward(Engine(error).submit)
    assert [type(result.error) for result in results] == [expected] * 2
    assert pool.in_use_bytes == 0


async def test_an_error_ends_all_requests_in_the_words_of_their_api(pool: SlabPool) -> None:
    reasons: list[str] = []
    queue, results = AdmissionQueue(reasons.append), list[ItemResult]()
    queue.add(large(pool), results.append, explain=lambda error: QueueFull(f"explained: {error.message}"))
    queue.add(Item(1), results.append)
    queue.fail(ModelNotReady("stopped"))
    assert [str(result.error) for result in results] == ["explained: stopped", "stopped"]
    assert (len(queue), len(reasons), pool.in_use_bytes) == (0, 2, 0)
