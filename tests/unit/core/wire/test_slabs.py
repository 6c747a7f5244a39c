import os
from itertools import pairwise

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.wire import slabs
from penstock.core.wire.slabs import PAGE, SlabPool
from penstock.errors import PayloadTooLarge


@pytest.fixture
def pool():
    pool = SlabPool(16 * PAGE)
    yield pool
    pool.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6 * PAGE), st.integers(0, 20)), max_size=60))
def test_slabs_never_overlap_and_all_memory_is_freed(steps):
    pool = SlabPool(16 * PAGE)
    held = []
    for verb, size, pick in steps:
        if verb == 0:
            slab = pool.allocate(size)
            if slab is not None:
                held.append(slab)
        elif held and verb == 1:
            held.pop(pick % len(held)).release()
        elif held:
            slab = held[pick % len(held)]
            slab.shrink(min(size, slab.length))
        extents = sorted((s.offset, s.offset + max(s.length, 1)) for s in held)
        assert all(a_end <= b_start for (_, a_end), (b_start, _) in pairwise(extents))
        assert pool.in_use_bytes == sum(-(-max(s.length, 1) // PAGE) * PAGE for s in held)
    for slab in held:
        slab.release()
    assert pool.in_use_bytes == 0
    whole = pool.allocate(16 * PAGE)
    assert whole is not None
    whole.release()
    pool.close()


def test_a_full_pool_returns_none_and_wakes_each_waiter_once(pool):
    slab = pool.allocate(16 * PAGE)
    assert pool.allocate(1) is None
    woken = []
    pool.when_free(lambda: woken.append(pool.allocate(1) is not None))
    assert woken == []
    slab.release()
    slab.release()
    assert woken == [True]


def test_a_payload_larger_than_the_pool_is_refused(pool):
    with pytest.raises(PayloadTooLarge, match="raise limits"):
        pool.allocate(16 * PAGE + 1)


def test_a_pinned_slab_is_freed_by_its_last_unpin(pool):
    slab = pool.allocate(10)
    slab.pin()
    slab.pin()
    slab.release()
    slab.unpin()
    assert pool.in_use_bytes == PAGE
    slab.unpin()
    assert pool.in_use_bytes == 0


def test_unpinning_does_not_free_an_unreleased_slab(pool):
    slab = pool.allocate(10)
    slab.pin()
    slab.unpin()
    assert pool.in_use_bytes == PAGE
    slab.release()


def test_a_retired_slab_is_never_reused(pool):
    slab = pool.allocate(16 * PAGE)
    slab.retire()
    slab.release()
    assert pool.allocate(1) is None


def test_a_slab_cannot_grow(pool):
    slab = pool.allocate(10)
    with pytest.raises(ValueError, match="cannot shrink to 11"):
        slab.shrink(11)


def test_a_peer_can_read_the_pool_but_not_write(pool):
    slab = pool.allocate(5)
    slab.view[:] = b"hello"
    view, _ = slabs.lease(slabs.map_read_only(pool.fd, pool.capacity_bytes), slab.offset, 5)
    assert bytes(view) == b"hello"
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 0


@pytest.mark.parametrize(
    "look", [lambda view: view[1:3], lambda view: np.frombuffer(view, np.uint8)[2:], lambda view: view]
)
def test_a_lease_reports_whether_a_reader_remains(pool, look):
    view, alive = pool.allocate(100).lease()
    kept = look(view)
    del view
    assert alive() is not None
    del kept
    assert alive() is None


def test_a_lease_outside_of_the_pool_is_refused(pool):
    with pytest.raises(ValueError, match="outside the pool"):
        slabs.lease(pool.memory, 15 * PAGE, PAGE + 1)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is counted on Linux only")
def test_freed_memory_of_large_slabs_returns_to_the_system():
    size = 32 * 2**20
    pool = SlabPool(size)
    process = psutil.Process()
    before = process.memory_info().shared
    slab = pool.allocate(size)
    slab.view[:] = b"\1" * size
    assert process.memory_info().shared - before > size * 0.9
    slab.release()
    assert process.memory_info().shared - before < size * 0.1
    pool.close()


def test_without_memfd_an_unlinked_temporary_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = SlabPool(32 * 2**20)
    assert list(tmp_path.iterdir()) == []
    slab = pool.allocate(32 * 2**20)
    slab.view[:3] = b"abc"
    view, _ = slabs.lease(slabs.map_read_only(pool.fd, pool.capacity_bytes), 0, 3)
    assert bytes(view) == b"abc"
    slab.release()  # gives the pages back, or does not mind that the file system cannot
    pool.close()


def test_close_closes_the_descriptor_even_while_views_live():
    pool = SlabPool(PAGE)
    slab = pool.allocate(1)
    fd = pool.fd
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    slab.release()
    assert pool.fd == -1
