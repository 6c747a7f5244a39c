"""Concurrent streams under chaos: workers that die, clients that leave in the middle, and clients that do not read."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = """
    import asyncio
    import os
    import time

    import penstock

    @penstock.model(max_active=16)
    class Parts:
        def load(self, device):
            self.evicted = 0

        def admit(self, item):
            return [item, 0]

        def step(self, states):
            time.sleep(0.002)
            if any(item == "die" and sent == 2 for item, sent in states):
                os._exit(1)
            for state in states:
                state[1] += 1
            return [penstock.Step(*self.part(*state)) for state in states]

        def part(self, item, sent):
            if item == "evicted":
                return str(self.evicted), True
            if item == "large":
                return b"x" * 65_536, False
            most = item if isinstance(item, int) else 10**9
            return f"{item}.{sent} ", sent >= most

        def evict(self, state):
            self.evicted += 1


    class AsyncParts:
        async def predict(self, items):
            for sent in range(1, max(items) + 1):
                await asyncio.sleep(0.002)
                yield [f"{item}.{sent} " if sent <= item else None for item in items]


    @penstock.model(concurrency=64)
    class TurnParts:
        def predict(self, items):
            for sent in range(1, max(items) + 1):
                time.sleep(0.0005)
                yield [f"{item}.{sent} " if sent <= item else None for item in items]
"""


class Streams:
    """Clients in a closed loop, each with answers of a random number of parts; `wrong` has what does not fit."""

    def __init__(self, server: Any, chaos: SimpleNamespace, model: str = "Parts") -> None:
        self.server, self.chaos = server, chaos
        self.path = f"/predictions/{model.lower()}"
        self.going = True
        self.whole = self.cut = self.refused = 0
        self.wrong: list[object] = []

    async def client(self) -> None:
        while self.going:
            async with self.chaos.Client(self.server) as client:
                while self.going and await self._one(client):
                    pass

    async def _one(self, client: Any) -> bool:
        """False if the connection ended."""
        parts = random.randint(3, 40)
        client.send(self.path, b"%d" % parts, content_type="application/json")
        text = b""
        try:
            async with asyncio.timeout(30):
                head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
                if " 200 " not in head:
                    size = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
                    body = await client.reader.readexactly(size)
                    if " 503 " in head and b"worker_died" in body:
                        self.refused += 1
                    else:
                        self.wrong.append((head, body))
                    return True
                while size := int(await client.reader.readuntil(b"\r\n"), 16):
                    text += (await client.reader.readexactly(size + 2))[:-2]
                await client.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._check(text, parts, whole=False)
            return False
        except TimeoutError:
            self.wrong.append("never answered")
            return False
        self._check(text, parts, whole=True)
        return True

    def _check(self, text: bytes, parts: int, whole: bool) -> None:
        expected = "".join(f"{parts}.{k} " for k in range(1, parts + 1)).encode()
        fits = text == expected if whole else expected.startswith(text) and text
        if not fits:
            self.wrong.append((parts, text))
        self.whole, self.cut = self.whole + whole, self.cut + (not whole)


@pytest.mark.parametrize("model", ["Parts", "AsyncParts", "TurnParts"])
async def test_workers_killed_under_streams_answer_each_caller_once(
    guarded: Callable[..., Any], chaos: SimpleNamespace, model: str
) -> None:
    server = guarded(SOURCE, model, "--instances", "2")
    streams = Streams(server, chaos, model)
    clients = [asyncio.create_task(streams.client()) for _ in range(48)]
    for _ in range(chaos.count(4, 40)):
        before = streams.whole
        await chaos.until(lambda before=before: streams.whole >= before + 60)
        await chaos.kill_one(server, 2)
    streams.going = False
    await asyncio.gather(*clients)
    assert streams.wrong == []
    assert streams.cut > 0, "streams that had begun are cut"
    assert streams.refused == 0, "requests without a part run again"
    await chaos.until(lambda: server.metric("penstock_requests_in_flight") == 0)


async def test_an_item_that_ends_its_worker_in_a_step_ends_only_streams_that_had_begun(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "Parts")
    streams = Streams(server, chaos)
    clients = [asyncio.create_task(streams.client()) for _ in range(8)]
    async with chaos.Client(server) as client:
        client.send("/predictions/parts", b'"die"', content_type="application/json")
        await chaos.until(lambda: server.metric("penstock_worker_events_total", state="died") == 1)
    before = streams.whole
    await chaos.until(lambda: streams.whole >= before + 30)
    streams.going = False
    await asyncio.gather(*clients)
    assert streams.wrong == []
    assert server.metric("penstock_worker_events_total", state="died") == 1


async def test_clients_that_leave_free_their_places_and_slow_ones_stop_nobody(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "Parts", "--set", "limits.write_timeout_s=2")
    async with chaos.Client(server) as slow:
        slow.send("/predictions/parts", b'"large"', content_type="application/json")  # and reads nothing
        before = chaos.anonymous_bytes(server)

        async def leave() -> None:
            async with chaos.Client(server) as client:
                client.send("/predictions/parts", b'"endless"', content_type="application/json")
                await client.reader.readuntil(b"endless.3 ")

        for _ in range(chaos.count(3, 30)):
            await asyncio.gather(*(leave() for _ in range(15)))  # with the slow one all places
        async with chaos.Client(server) as client:
            client.send("/predictions/parts", b"3", content_type="application/json")
            async with asyncio.timeout(30):
                await client.reader.readuntil(b"3.3 ")
        assert chaos.anonymous_bytes(server) - before < 64 * 2**20
        await chaos.until(lambda: server.metric("penstock_requests_in_flight") == 0)  # the slow one is cut off, too
    left = chaos.count(3, 30) * 15
    async with chaos.Client(server) as client:
        client.send("/predictions/parts", b'"evicted"', content_type="application/json")
        async with asyncio.timeout(30):
            await client.reader.readuntil(b"\r\n\r\n")
            size = int(await client.reader.readuntil(b"\r\n"), 16)
            assert int(await client.reader.readexactly(size)) == left + 2
    assert server.metric("penstock_worker_events_total", state="died") == 0
