from __future__ import annotations

import random

import pytest

from penstock.perf.bench.warm import leaking, settled, slower, warm_up

MIB = 2**20


class Slices:
    """Runs of load in virtual time, with the speeds that are given (the last one for ever)."""

    def __init__(self, *speeds: float, each_s: float | None = None) -> None:
        self.now, self.ran, self._speeds, self._each_s = 0.0, [], list(speeds), each_s

    ran: list[float]

    async def run(self, seconds: float) -> float:
        self.ran.append(seconds)
        self.now += self._each_s or seconds
        return self._speeds[min(len(self.ran), len(self._speeds)) - 1]

    def clock(self) -> float:
        return self.now


async def test_warming_up_ends_when_the_load_gets_no_faster() -> None:
    slices = Slices(10, 50, 100, 101, 100)
    await warm_up(slices.run, clock=slices.clock)
    assert slices.ran == [0.5] * 4


async def test_warming_up_ends_after_ten_seconds_at_the_latest() -> None:
    slices = Slices(*(1.2**i for i in range(100)))
    await warm_up(slices.run, clock=slices.clock)
    assert sum(slices.ran) == 10
    slow = Slices(*(1.2**i for i in range(100)), each_s=4.0)
    await warm_up(slow.run, clock=slow.clock)
    assert len(slow.ran) == 3


async def test_warming_up_takes_as_long_as_it_is_told() -> None:
    slices = Slices(1)
    await warm_up(slices.run, 3.0, clock=slices.clock)
    assert slices.ran == [3.0]
    await warm_up(slices.run, 0.0, clock=slices.clock)
    assert slices.ran == [3.0]


async def test_a_slow_load_is_looked_at_in_longer_slices() -> None:
    slices = Slices(1)
    await warm_up(slices.run, slice_s=4.0, clock=slices.clock)
    assert slices.ran == [4.0] * 3


def test_a_load_that_becomes_slower_is_warm() -> None:
    assert settled([100, 90, 80])
    assert not settled([100, 100])
    assert not settled([100, 100, 120])


def steady(count: int, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [0.01 * draw.lognormvariate(0, 0.4) for _ in range(count)]


def test_latencies_that_grow_are_flagged_with_how_much() -> None:
    grown = [latency * (1 + i / 900) for i, latency in enumerate(steady(900))]
    text = slower(grown)
    assert "it got slower" in text
    assert "first third" in text


def test_steady_latencies_are_not_flagged() -> None:
    assert [seed for seed in range(200) if slower(steady(300, seed))] == []


@pytest.mark.parametrize("at", [0.0, 0.4, 0.93])
def test_a_stall_is_no_trend(at: float) -> None:
    latencies = steady(900)
    begin = int(900 * at)
    latencies[begin : begin + 60] = [2.0] * 60
    assert slower(latencies) == ""


def test_of_few_answers_no_trend_is_told() -> None:
    assert slower([0.01 * i for i in range(80)]) == ""


def memory(*megabytes: float) -> list[tuple[float, int]]:
    return [(i * 0.5, int(value * MIB)) for i, value in enumerate(megabytes)]


def test_a_leak_is_flagged_with_its_pace() -> None:
    text = leaking(memory(*(500 + 10 * i for i in range(30))))
    assert text == "its memory grows steadily: by 200 MiB in 10 s (70.3 GiB an hour), to 745 MiB"


@pytest.mark.parametrize(
    "megabytes",
    [
        [500.0] * 30,
        [500 + 0.1 * i for i in range(30)],  # 3 MiB: less than an allocator's own
        [5000 + 2 * i for i in range(30)],  # 1 % of it
        [500.0] * 5 + [700.0] * 25,  # a buffer that is made once
        [500 + 200 * (1 - 0.7**i) for i in range(30)],  # a cache that fills
        [500 + 100 * (i % 2) for i in range(30)],
        [1000 - 10 * i for i in range(30)],
        [500 + 100 * i for i in range(8)],  # too short to tell
    ],
)
def test_memory_that_is_no_leak_is_not_flagged(megabytes: list[float]) -> None:
    assert leaking(memory(*megabytes)) == ""
