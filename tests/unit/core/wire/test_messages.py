import numpy as np
import pytest

from penstock.core.wire import messages as frames
from penstock.core.wire.messages import (
    FromWorker,
    MessageReader,
    MessageWriter,
    PartMessage,
    Pickled,
    RunBatch,
    StopWorker,
    ToWorker,
    Unsent,
    WorkerFailed,
    write,
)
from penstock.core.wire.slabs import SlabPool
from penstock.errors import BadOutput, BadRequest, TargetNotFound
from penstock.types import BatchPart, Item, ItemResult

LARGE = 100_000


@pytest.fixture
def pool():
    pool = SlabPool(2**20)
    yield pool
    pool.close()


def across(message, outbox, kind, pool=None):
    """The message as the other side reads it."""

    def resolve(offset, length, writable):
        data = pool.memory[offset : offset + length]
        return bytearray(data) if writable else data

    (frame,) = frames.FrameDecoder().feed(b"".join(map(bytes, write(message, outbox.buffers))))
    return MessageReader(kind, resolve).read(frame)


def items_across(items, pool=None, with_headers=False):
    outbox = MessageWriter(pool)
    read = across(RunBatch(7, outbox.items(items, with_headers), [1, 2]), outbox, ToWorker, pool)
    assert (read.id, read.free) == (7, [1, 2])
    return read.items, outbox


def test_small_items_cross_as_they_are():
    items = [Item(b"abc", "native", "text/plain", request_id="r"), Item(b"", "oip_json", rows=3, start=1, stop=4)]
    assert items_across(items)[0] == items


def test_headers_cross_only_when_they_are_wanted():
    items = [Item(b"abc", "native", headers=[(b"X-A", b"1")])]
    assert items_across(items)[0][0].headers is None
    assert items_across(items, with_headers=True)[0][0].headers == [(b"X-A", b"1")]
    items[0].codec = "oip_npy"
    assert items_across(items)[0][0].headers == [(b"X-A", b"1")]
    assert items[0].headers == [(b"X-A", b"1")]


@pytest.mark.parametrize("make", [bytes, bytearray, lambda b: memoryview(b)])
def test_large_payloads_go_through_the_pool(pool, make):
    (item,), outbox = items_across([Item(make(b"x" * LARGE), "native")], pool)
    assert item.payload == b"x" * LARGE
    assert len(outbox.slabs) == 1
    assert not outbox.buffers


def test_large_payloads_stand_behind_the_head_without_room():
    (item,), outbox = items_across([Item(b"x" * LARGE, "native")])
    assert item.payload == b"x" * LARGE
    assert len(outbox.buffers) == 1


def test_a_slab_crosses_as_its_place(pool):
    slab = pool.allocate(LARGE)
    slab.view[:] = b"s" * LARGE
    (item,), outbox = items_across([Item(slab, "native")], pool)
    assert item.payload == b"s" * LARGE
    assert not outbox.slabs
    (head,) = write(RunBatch(1, MessageWriter(pool).items([Item(slab, "native")], False), []))
    assert len(head) < 1000


@pytest.mark.parametrize("in_pool", [True, False])
def test_objects_cross_with_their_types(pool, in_pool):
    value = {"t": (1, 2), "a": np.arange(LARGE), "s": {1}}
    (item,), _ = items_across([Item(value)], pool if in_pool else None)
    assert type(item.payload) is Pickled
    found = item.payload.load()
    assert found["t"] == (1, 2)
    assert (found["a"] == value["a"]).all()
    found["a"][0] = 5  # writable, as an array is that was made here


def test_an_item_that_cannot_be_pickled_is_its_own_error():
    (bad, good), _ = items_across([Item(lambda: 0), Item(1)])
    assert type(bad.payload) is BadRequest
    assert "cannot be pickled" in bad.payload.message
    assert good.payload.load() == 1


def test_among_many_only_the_one_that_cannot_be_pickled_is_an_error(pool):
    (item,), outbox = items_across([Item([1, lambda: 0, bytes(LARGE)], many=True, rows=3)], pool)
    fine, bad, large = item.payload.load()
    assert (fine, large) == (1, bytes(LARGE))
    assert type(bad) is Unsent
    assert "function that cannot be pickled" in bad.error.message
    assert len(outbox.slabs) == 1


def test_a_part_of_many_crosses_without_the_rows_of_other_parts():
    payload = [lambda: 0, 1, 2, lambda: 0]
    (item,), _ = items_across([Item(payload, many=True, rows=2, start=1, stop=3)])
    assert (item.payload.load(), item.start, item.stop) == ([1, 2], 0, -1)


def test_errors_cross_whatever_their_text_is():
    outbox = MessageWriter(None)
    error = BadRequest("half \ud800", detail="\udfff", retry_after_s=np.float32(1))
    read = across(WorkerFailed(error), outbox, FromWorker)
    assert (read.error.message, read.error.detail, read.error.retry_after_s) == ("half \\ud800", "\\udfff", 1.0)


def test_results_cross_with_errors_as_data():
    items = [Item(b"", "native")] * 3 + [Item(None)] * 2
    results = [
        ItemResult(b"a", "text/plain", 201, [("x", "y")]),
        None,
        ItemResult(error=BadRequest("no", retry_after_s=2.0, detail="trace")),
        ItemResult([1, (2,)], final=False),
        ItemResult(lambda: 0),
    ]
    outbox = MessageWriter(None)
    part = BatchPart(3, outbox.results(items, results), run_s=0.5, oom=(4, 2))
    read = across(PartMessage(part, [5], [6]), outbox, FromWorker)
    assert (read.held, read.let_go, read.part.batch_id, read.part.oom) == ([5], [6], 3, (4, 2))
    first, none, error, listed, bad = read.part.results
    assert first == results[0]
    assert none is None
    assert type(error.error) is BadRequest
    assert (error.error.message, error.error.retry_after_s, error.error.detail) == ("no", 2.0, "trace")
    assert listed.body.load() == [1, (2,)]
    assert not listed.final
    assert type(bad.error) is BadOutput


def test_error_classes_survive_and_a_stop_is_a_stop():
    read = across(WorkerFailed(TargetNotFound("gone", detail="d")), MessageWriter(None), FromWorker)
    assert type(read.error) is TargetNotFound
    assert type(across(StopWorker(), MessageWriter(None), ToWorker)) is StopWorker
