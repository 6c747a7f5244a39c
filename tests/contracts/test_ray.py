"""The Ray transport keeps the contract of transports."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.transports.slot import SlotTransport
from penstock.plugins import resolve
from support.concurrent_batches import TARGET
from support.stepped import STEP_CHECKS
from support.transports import TRANSPORT_CHECKS, TransportHarness

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def make(spec: Any, pool: Any) -> SlotTransport:
    transport: SlotTransport = resolve("transport", "ray")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=0)
    return transport


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_ray_transport(check: Any) -> None:
    await check(make)


@pytest.mark.parametrize("check", STEP_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_a_step_model_on_ray(check: Any) -> None:
    await check(make)


async def test_the_ray_transport_runs_a_concurrent_model_one_batch_at_a_time() -> None:
    async with TransportHarness(make, TARGET) as harness:
        assert await harness.values(1, ("open", "a"), 3) == [1, "opened", 3]
        assert harness.ready is not None
        assert harness.ready.concurrency == 1
