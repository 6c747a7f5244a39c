"""The number of instances of an engine's model without load: its schedule, and its spare ones."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config.schema import AutoscaleConfig, BatchingConfig, ModelConfig
from penstock.core.engine import autoscaling
from penstock.core.engine.engine import Engine
from support.waiting import until

SEVEN = 7 * 3600.0


class Echo:
    def predict(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


def config(**autoscale: Any) -> ModelConfig:
    return ModelConfig(
        target="",
        transport="thread",
        batching=BatchingConfig(max_batch_size=1),
        autoscale=AutoscaleConfig(max=4, idle_s=0.2, **autoscale),
    )


async def test_instances_start_for_the_time_that_the_schedule_names(monkeypatch: pytest.MonkeyPatch) -> None:
    began, zones = time.monotonic(), set()

    def day_s(timezone: str | None) -> float:
        zones.add(timezone)
        return SEVEN - 1.5 + time.monotonic() - began

    monkeypatch.setattr(autoscaling, "day_s", day_s)
    async with Engine() as engine:
        await engine.load("m", config(schedule={"06:00": 0, "07:00": 3}, timezone="Asia/Tokyo"), target=Echo())
        handle = engine.handle("m", None)
        await until(lambda: handle.instances.up == 3)
        assert zones == {"Asia/Tokyo"}
        assert await engine.infer("m", 1) == 1
        await until(lambda: handle.scaler is not None and not handle.scaler._ticking)
        assert handle.instances.count == 3


async def test_spare_instances_stay_and_nothing_polls() -> None:
    async with Engine() as engine:
        await engine.load("m", config(spare=2), target=Echo())
        handle = engine.handle("m", None)
        for k in range(20):
            assert await engine.infer("m", k) == k
        await until(lambda: handle.instances.count > 1)
        await until(lambda: handle.scaler is not None and not handle.scaler._ticking)
        assert handle.instances.count == 2


def test_the_time_of_day_is_one_of_the_zone() -> None:
    apart = (autoscaling.day_s("Asia/Tokyo") - autoscaling.day_s("UTC")) % 86400
    assert apart == pytest.approx(9 * 3600, abs=5)
    assert 0 <= autoscaling.day_s(None) < 86400
