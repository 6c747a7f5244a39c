"""`limits.max_transit_bytes`: what clients occupy counts, too much is refused, and all of it is given back."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from hpack import Encoder

from penstock.errors import QueueFull
from penstock.serving.grpc.messages import ResponseParts
from penstock.serving.http import listener as listener_module
from penstock.serving.http.intake import Budget
from penstock.serving.http2 import frames as h2
from penstock.serving.http2.frames import frame
from penstock.types import ItemResult
from support.grpc_site import INFER, STREAM, request, site

REFUSED = "the clients of this port occupy"
CLOSED = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})  # a client that accepts no answer
SOON = {"header_timeout_s": 0.2, "write_timeout_s": 30.0}  # a sweep of the clock each 0.05 s
PARTS = {
    "a part of a message": (INFER, struct.pack(">BI", 0, 60_000) + bytes(50_000)),
    "a part of a stream's message": (STREAM, struct.pack(">BI", 0, 60_000) + bytes(50_000)),
    "a whole message before the end": (INFER, struct.pack(">BI", 0, 50_000) + bytes(50_000)),
}


@pytest.mark.parametrize("name", PARTS)
async def test_messages_under_way_count_over_all_connections(name, wait_until):
    path, part = PARTS[name]
    async with site(max_transit_bytes=220_000) as found:
        senders = [await found.connect() for _ in range(5)]
        for client in senders[:4]:
            client.call(1, path)
            client.send(frame(h2.DATA, 0, 1, part))
        await wait_until(lambda: found.budget._parts >= 200_000)
        senders[4].call(1, path)
        senders[4].send(frame(h2.DATA, 0, 1, part))
        status, text, _ = await senders[4].reply(1)
        assert (status, text[: len(REFUSED)]) == ("8", REFUSED)
        assert "limits.max_transit_bytes" in text
        assert (await senders[4].ask(3))[0] == "0"  # what comes whole costs nothing
        senders[0].send(frame(h2.RST_STREAM, 0, 1, bytes(4)))
        await wait_until(lambda: found.budget._parts < 200_000)
        senders[4].call(5, path)
        senders[4].send(frame(h2.DATA, 0, 5, part))
        await wait_until(lambda: found.budget._parts >= 200_000)


async def test_metadata_counts_as_it_is_decoded():
    encoder = Encoder()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", INFER), ("content-type", "application/grpc")]
    sent = 0
    async with site(max_transit_bytes=400_000) as found:
        client = await found.connect()
        for id in range(1, 41, 2):
            block = encoder.encode([*fields, *[("x-bin", "A" * 3000)] * 15, ("x-id", str(id), True)])
            sent += len(block)
            client.send(frame(h2.HEADERS, h2.END_HEADERS, id, block))
        assert sent < 5000
        refused = [await client.reply(id) for id in range(27, 41, 2)]
        assert {answer[0] for answer in refused} == {"8"}
        assert found.budget._parts >= 10 * 15 * 2250


async def test_open_calls_and_unread_answers_count_and_the_client_that_holds_them_is_refused(wait_until):
    async with site(max_transit_bytes=200_000, **SOON) as found:
        slow, other = await found.connect(CLOSED), await found.connect()
        await slow.infer(1, request(300_000))
        await wait_until(lambda: found.budget.full)
        assert (await slow.ask(3))[0] == "8"
        for id in (1, 3):
            assert (await other.ask(id))[0] == "0"
        slow.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 2**20}), h2.window_update(0, 2**20))
        assert (await slow.reply(1))[0] == "0"
        await wait_until(lambda: not found.budget.full)
    async with site(max_transit_bytes=200_000, **SOON) as found:
        client, other = await found.connect(), await found.connect()
        for id in range(1, 201, 2):
            client.call(id, STREAM)
        await wait_until(lambda: found.budget.full)
        client.call(201, STREAM)
        assert (await client.reply(201))[0] == "8"
        assert (await other.ask(1))[0] == "0"


async def test_the_time_until_a_slow_client_has_a_response_counts_for_its_model(wait_until):
    async with site(**SOON) as found:
        slow, other = await found.connect(CLOSED), await found.connect()
        await other.ask(1)
        await slow.infer(1, request(300_000))
        written = found.listener.listener.counts.write_s
        await wait_until(lambda: sum(written.values()) >= 3 * found.listener.listener.clock.sweep_s)
        assert set(written) == {("echo", None)}
        slow.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 2**20}), h2.window_update(0, 2**20))
        assert (await slow.reply(1))[0] == "0"


async def test_a_full_budget_drops_who_reads_nothing(monkeypatch, wait_until):
    monkeypatch.setattr(listener_module, "STUCK_S", 0.2)
    async with site(max_transit_bytes=100_000, **SOON) as found:
        slow = await found.connect(CLOSED)
        await slow.infer(1, request(300_000))
        assert await slow.ended() is None
        await wait_until(lambda: not found.budget.full)


async def test_open_header_blocks_and_reads_that_wait_for_their_turn_count(wait_until):
    async with site(max_transit_bytes=50_000, **{**SOON, "header_timeout_s": 5.0, "write_timeout_s": 0.2}) as found:
        client = await found.connect()
        client.send(frame(h2.HEADERS, 0, 1, bytes(16_000)), *[frame(h2.CONTINUATION, 0, 1, bytes(16_000))] * 3)
        await wait_until(lambda: found.budget.full)


async def test_parts_of_an_answer_count_until_they_are_sent_or_forgotten():
    budget = Budget(1000)
    parts = ResponseParts(budget)
    for _ in range(3):
        parts.put(ItemResult(body=bytes(300), final=False))
    assert len((await parts.next()).body) == 300
    assert budget._parts == 600
    for _ in range(2):
        parts.put(ItemResult(body=bytes(300), final=False))
    assert budget.full
    parts.put(ItemResult(body=bytes(300), final=False))
    assert budget._parts == 0
    with pytest.raises(QueueFull):
        await parts.next()


async def test_a_stream_whose_client_leaves_gives_back_its_parts(wait_until):
    def stream(call: Any) -> None:
        for _ in range(20):
            call.reply(bytes(10_000), final=False)

    async with site({"echo": stream}) as found:
        client = await found.connect(CLOSED)
        client.call(1, STREAM)
        await client.message(1, request(10), end=False)
        await wait_until(lambda: found.budget._parts >= 100_000)
        client.writer.close()
        await wait_until(lambda: found.budget._parts == 0)
        await asyncio.sleep(0)
