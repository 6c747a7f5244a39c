"""Workers killed while their number changes: models that come and leave under load, and autoscaled ones."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = """
    import time

    class Work:
        def load(self, device):
            time.sleep(0.1)

        def predict(self, items):
            time.sleep(0.02)
            return items
"""
AUTOSCALED = {"max": 3, "target_wait_s": 0.05, "idle_s": 0.5}


async def kills(chaos: SimpleNamespace, server: Any, number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(random.uniform(0.05, 0.4))
        for victim in random.sample(found := chaos.workers(server), min(1, len(found))):
            victim.kill()  # while it loads, works or leaves


def check(crowd: Any) -> None:
    """Everyone got one answer of their own, or was told that there is none."""
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) <= {200, 503}
    assert crowd.statuses.total() == len(crowd.asked)


async def test_workers_killed_while_their_number_follows_the_load_cost_no_caller(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    keys = {"batching.max_batch_size": 1, **{f"autoscale.{key}": value for key, value in AUTOSCALED.items()}}
    flags = [word for key, value in keys.items() for word in ("--set", f"models.work.{key}={json.dumps(value)}")]
    server = guarded(SOURCE, "Work", *flags)
    for _ in range(chaos.count(2, 20)):  # it grows, and gets smaller again
        async with chaos.Crowd(server, "work", 8) as crowd:
            await kills(chaos, server, 4)
            served = crowd.statuses[200]
            await chaos.until(lambda crowd=crowd, served=served: crowd.statuses[200] > served)
        check(crowd)
        await asyncio.sleep(0.8)


async def test_workers_killed_while_models_come_and_leave_cost_no_caller(
    guarded: Callable[..., Any], chaos: SimpleNamespace, tmp_path: Path
) -> None:
    lines = ["[devices]", 'cpu = "200MB"']
    for name in "abc":
        lines += [f"[models.{name}]", 'target = "app.py:Work"']
        lines += [f"[models.{name}.residency]", "memory_bytes = 100_000_000"]
    (tmp_path / "penstock.toml").write_text("\n".join(lines))
    server = guarded(SOURCE, "penstock.toml")
    crowds = [chaos.Crowd(server, name, 3) for name in "abc"]
    async with crowds[0], crowds[1], crowds[2]:
        await kills(chaos, server, chaos.count(10, 100))
        for crowd in crowds:  # a load that was killed is tried again later
            before = crowd.statuses[200]
            await chaos.until(lambda crowd=crowd, before=before: crowd.statuses[200] > before)
    for crowd in crowds:
        check(crowd)
    assert server.metric("penstock_evictions_total") >= 1
    assert server.metric("penstock_device_resident_bytes", device="cpu") <= 200_000_000
