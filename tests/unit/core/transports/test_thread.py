from __future__ import annotations

import threading

from penstock.core.transports.local import ThreadTransport
from penstock.types import Item
from support.transports import WAIT_S, TransportHarness


async def test_a_thread_that_was_given_up_ends_when_its_call_returns() -> None:
    async with TransportHarness(lambda spec, pool: ThreadTransport(spec), run_timeout_s=0.05) as harness:
        await harness.up()
        (given_up,) = [thread for thread in threading.enumerate() if thread.name == "penstock-scripted-0"]
        await harness.final(harness.post([Item(("sleep", 0.2))]))
        given_up.join(WAIT_S / 6)
        assert not given_up.is_alive()
