"""Bodies in gzip or deflate, unpacked within every bound before they are queued."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, PayloadTooLarge, QueueFull
from penstock.serving.http.intake import BIG_BYTES, FREE_BYTES, MOST_RATIO, Budget, Unpacking
from penstock.serving.http.responses import ListenerFull
from support.backend import FakeBackend, FakeBuffer


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


NUMBERS = b",".join([b"%d" % n for n in range(500_000)])
FORMS = {"gzip": gzip.compress, "deflate": zlib.compress, "deflate, raw": raw_deflate}


def unpack(packed: bytes, form: str = "gzip", most: int = 2**24, backend: FakeBackend | None = None) -> bytes:
    """The body, unpacked from plain memory and from a Buffer; all memory is given back."""
    backend = backend or FakeBackend()
    found = []
    for payload in (packed, backend.allocate(max(1, len(packed)))):
        if isinstance(payload, FakeBuffer):
            payload.view[: len(packed)] = packed
            payload.shrink(len(packed))
        try:
            body: Any = asyncio.run(Unpacking(backend).unpack(payload, form.partition(",")[0], most))
        finally:
            assert backend.used_bytes == 0 or not isinstance(payload, FakeBuffer) or payload.nbytes == 0
        found.append(bytes(getattr(body, "view", body)))
        if not isinstance(body, bytes):
            body.release()
    assert found[0] == found[1]
    assert backend.used_bytes == 0
    return found[0]


async def test_packed_bodies_that_wait_for_their_turn_count_in_the_budget(wait_until):
    backend, budget = FakeBackend(), Budget(100_000)
    unpacking = Unpacking(backend, budget)
    packed = gzip.compress(random.Random(1).randbytes(70_000))
    await unpacking._turns.acquire()
    await unpacking._turns.acquire()
    waiting = asyncio.ensure_future(unpacking.unpack(packed, "gzip", 2**20))
    await wait_until(lambda: budget._parts == len(packed))
    with pytest.raises(ListenerFull):
        await unpacking.unpack(packed, "gzip", 2**20)
    assert await unpacking.unpack(gzip.compress(b"small"), "gzip", 2**20) == b"small"
    waiting.cancel()
    await wait_until(lambda: waiting.done())
    assert budget._parts == 0


@pytest.mark.parametrize("form", FORMS)
@given(st.binary(max_size=300))
def test_a_small_body_arrives_as_it_was(form, body):
    assert unpack(FORMS[form](body), form, len(body)) == body


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 262_145, 3_000_000])
def test_a_large_body_arrives_as_it_was(form, size):
    for body in (NUMBERS[:size], random.Random(size).randbytes(size)):
        assert unpack(FORMS[form](body), form, size) == body


@pytest.mark.parametrize("form", FORMS)
def test_a_bomb_is_refused_without_its_memory(form):
    bomb = FORMS[form](bytes(100 * 2**20))
    packed = len(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge, match=f"more than {MOST_RATIO} times its size"):
            unpack(bomb, form, 2**27, FakeBackend(pool_bytes=2**28))
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_RATIO * packed
        with pytest.raises(PayloadTooLarge, match=r"larger than 1000000 bytes \(limits.max_body_bytes"):
            unpack(bomb, form, 1_000_000)
    finally:
        tracemalloc.stop()
    assert unpack(FORMS[form](bytes(FREE_BYTES)), form) == bytes(FREE_BYTES)


def test_what_is_unpacked_counts_in_the_pool_to_the_byte():
    packed = gzip.compress(NUMBERS[:400_000])
    for free, fits in ((400_000, True), (399_999, False)):
        backend = FakeBackend(pool_bytes=500_000)
        used = backend.allocate(500_000 - free)
        assert used is not None
        unpacking = Unpacking(backend).unpack(packed, "gzip", 500_000)
        if fits:
            assert len(asyncio.run(unpacking).view) == 400_000  # type: ignore[union-attr]
        else:
            with pytest.raises(QueueFull):
                asyncio.run(unpacking)
            assert backend.used_bytes == used.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_stream_is_refused_at_every_byte(form):
    packed = FORMS[form](b"some text, some more text")
    for size in range(len(packed)):
        with pytest.raises(BadRequest, match=f"{form.partition(',')[0]} stream"):
            unpack(packed[:size], form)


def test_a_damaged_stream_and_bytes_after_it_are_refused():
    packed = gzip.compress(b"some text")
    with pytest.raises(BadRequest, match=r"not a valid gzip stream: .*incorrect data check"):
        unpack(packed[:-8] + bytes(8))
    with pytest.raises(BadRequest, match="not a valid deflate stream"):
        unpack(b"plain text", "deflate")
    for more in (1, 300_000):
        with pytest.raises(BadRequest, match=rf"{more} bytes follow the gzip stream; send exactly one"):
            unpack(packed + bytes(more))


async def test_a_large_body_of_empty_blocks_leaves_the_loop_its_turns():
    blocks = b"\x78\x9c" + b"\x00\x00\x00\xff\xff" * (BIG_BYTES // 5)  # much to read, nothing to write
    unpacking = Unpacking(FakeBackend())
    body = asyncio.ensure_future(unpacking.unpack(blocks, "deflate", 2**20))
    await asyncio.sleep(0)
    assert not body.done()
    with pytest.raises(BadRequest, match="truncated"):
        await body
    assert await unpacking.unpack(blocks + zlib.compress(b"")[2:], "deflate", 2**20) == b""


async def test_answers_keep_their_order_and_the_loop_its_turns(listen):
    body = json.dumps(list(range(300_000))).encode()
    packed = gzip.compress(body)
    async with listen() as listener:
        client, other = await listener.connect(), await listener.connect()
        for _ in range(3):
            client.post("/predictions/echo", packed, "Content-Encoding: gzip")
            client.post("/predictions/echo", b"plain")
        turns = 0
        answers = asyncio.create_task(client.answer())
        while not answers.done():
            other.get("/ping")
            turns += (await other.answer()).status == 200
        assert turns > 3
        found = [(await answers).body, *[(await client.answer()).body for _ in range(5)]]
        assert found == [body, b"plain"] * 3
        assert listener.backend.used_bytes == 0
        packed = [call.item for call in listener.backend.calls if isinstance(call.item.payload, FakeBuffer)]
        assert [item.headers for item in packed] == [[(b"Host", b"test")]] * 3


async def test_a_client_that_leaves_while_its_body_is_unpacked_is_not_run(asking, wait_until):
    packed = gzip.compress(NUMBERS)
    async with asking() as (listener, client):
        for _ in range(5):
            client.post("/predictions/echo", packed, "Content-Encoding: gzip")
        await wait_until(lambda: listener.server.listener.tasks)
        client.writer.transport.abort()
        await wait_until(lambda: not listener.server.connections and not listener.server.listener.tasks)
        assert len(listener.backend.calls) < 5
        await wait_until(lambda: listener.backend.used_bytes == 0)


async def test_a_deadline_that_passes_while_a_body_is_unpacked_counts(asking, monkeypatch):
    async def slowly(self: Unpacking, payload: bytes, *rest: Any) -> bytes:
        await asyncio.sleep(0.02)
        return payload

    monkeypatch.setattr(Unpacking, "unpack", slowly)
    async with asking() as (_, client):
        assert (
            await client.ask("/predictions/echo", b"1", "Content-Encoding: gzip", "x-deadline-ms: 10")
        ).status == 504
