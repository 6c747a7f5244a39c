"""Slots that come and go while others work."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.config.schema import ModelConfig
from penstock.core.transports.local import ThreadTransport
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import WorkerDied
from penstock.plugins import resolve
from penstock.types import Batch, BatchPart, Item
from support.transports import WAIT_S, TransportHarness

TARGET = "support.scripted:ScriptedModel"


class Bench:
    """A started transport, what its listener heard, and the final parts by batch."""

    def __init__(self, name: str, slots: int) -> None:
        self.spec = WorkerSpec("m", "1", ModelConfig(target=TARGET), TARGET, instances=slots)
        self.transport: Any = resolve("transport", name)(
            self.spec, slots=slots, devices=("cpu",), pool=None, reply_bytes=2**20
        )
        self.up: set[int] = set()
        self.downs: list[int] = []
        self.ended: dict[int, BatchPart] = {}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Bench:
        await self.transport.start(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.transport.close(0.0)

    def slot_up(self, slot: int, ready: Any) -> None:
        self.up.add(slot)
        self._changed.set()

    def slot_used(self, slot: int, requests: int) -> None:
        pass

    def slot_down(self, slot: int, error: Any, retry_in_s: Any) -> None:
        self.downs.append(slot)
        self._changed.set()

    def send(self, id: int, slot: int, item: Any) -> None:
        def on_part(part: BatchPart) -> None:
            assert id not in self.ended
            self.ended[id] = part
            self._changed.set()

        self.transport.send(Batch(id, slot, [Item(item)]), on_part)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.mark.parametrize("name", ["thread", "process"])
async def test_a_removed_slot_answers_its_batches_and_its_number_is_reused(name: str) -> None:
    async with Bench(name, 1) as b:
        b.transport.add_slot(1, "cpu")
        await b.until(lambda: b.up == {0, 1})
        b.send(1, 0, ("sleep", 0.2))
        b.send(2, 0, "ahead")
        leaving = asyncio.ensure_future(b.transport.remove_slot(0, 10.0))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="slot 0 still has a worker"):
            b.transport.add_slot(0, "cpu")
        await leaving
        assert [b.ended[n].results[0].body for n in (1, 2)] == [0.2, "ahead"]
        b.transport.add_slot(0, "cpu")
        b.up.clear()
        await b.until(lambda: b.up >= {0})
        b.send(3, 0, "again")
        await b.until(lambda: 3 in b.ended)
        assert b.ended[3].results[0].body == "again"
        assert not b.downs


@pytest.mark.parametrize("name", ["thread", "process"])
async def test_a_slot_that_does_not_stop_in_time_is_killed_and_its_batches_are_reported(name: str) -> None:
    async with Bench(name, 2) as b:
        await b.until(lambda: b.up == {0, 1})
        b.send(1, 1, ("sleep", 3.0))
        b.send(2, 1, "behind")
        await b.transport.remove_slot(1, 0.05)
        assert [type(b.ended[n].error) for n in (1, 2)] == [WorkerDied, WorkerDied]
        assert [b.ended[n].started for n in (1, 2)] == [True, False]
        b.send(3, 0, "fine")
        await b.until(lambda: 3 in b.ended)
        assert b.ended[3].error is None


@pytest.mark.parametrize("name", ["thread", "process"])
async def test_a_slot_that_still_loads_can_be_removed(name: str) -> None:
    async with Bench(name, 1) as b:
        b.transport.add_slot(1, "cpu")
        await b.transport.remove_slot(1, 5.0)
        await b.until(lambda: 0 in b.up)
        b.transport.add_slot(1, "cpu")  # its number is free again


@pytest.mark.parametrize("name", ["thread", "process"])
async def test_closing_while_a_slot_leaves_ends_both(name: str) -> None:
    async with Bench(name, 2) as b:
        await b.until(lambda: b.up == {0, 1})
        b.send(1, 1, ("sleep", 0.1))
        leaving = asyncio.ensure_future(b.transport.remove_slot(1, 10.0))
        await asyncio.sleep(0)
        await b.transport.close(10.0)
        await leaving
        assert b.ended[1].error is None


async def test_a_thread_that_was_given_up_ends_when_its_call_returns() -> None:
    async with TransportHarness(lambda spec, pool: ThreadTransport(spec), run_timeout_s=0.05) as harness:
        await harness.up()
        (given_up,) = [thread for thread in threading.enumerate() if thread.name == "penstock-scripted-0"]
        await harness.final(harness.post([Item(("sleep", 0.2))]))
        given_up.join(WAIT_S / 6)
        assert not given_up.is_alive()
