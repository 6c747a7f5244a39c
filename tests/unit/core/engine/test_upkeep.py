"""Workers that are due to be replaced, and memory that grows without end, in virtual time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema import ModelConfig
from penstock.core.engine.upkeep import (
    MIN_GROWTH_BYTES,
    MIN_RISE_BYTES,
    MIN_RISES,
    RETRY_S,
    WINDOW_S,
    MemoryGrowth,
    Upkeep,
)

MIB = 2**20


def readings(growth: MemoryGrowth, *values: int) -> list[int]:
    return [growth.add(value, 1.0 + i) for i, value in enumerate(values)]


def test_steady_growth_is_found_after_some_windows() -> None:
    """One MiB a second, under the noise of batches that allocate and free up to 40 MiB."""
    found = readings(MemoryGrowth(), *(400 * MIB + i * MIB + (i % 5) * 10 * MIB for i in range(400)))
    first = next(i for i, grown in enumerate(found) if grown)
    assert MIN_RISES * WINDOW_S <= first <= (MIN_RISES + 2) * WINDOW_S
    assert found[first] >= MIN_GROWTH_BYTES
    slow = readings(MemoryGrowth(), *(400 * MIB + i * MIB // 10 for i in range(3600)))
    assert any(slow)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=400), st.integers(0, MIN_RISES - 2))
def test_noise_above_a_level_and_a_cache_that_fills_are_no_growth(noise: list[int], fills: int) -> None:
    values = []
    for i, above in enumerate(noise):
        level = 200 * MIB + min(i // int(2 * WINDOW_S), fills) * 100 * MIB
        values.append(level + (above * MIB if i % 2 else 0))
    assert not any(readings(MemoryGrowth(), *values))


def test_freed_memory_starts_anew() -> None:
    saw = (i % 80 for i in range(2000))
    assert not any(readings(MemoryGrowth(), *(200 * MIB + i * MIN_RISE_BYTES for i in saw)))


class Bench:
    """An Upkeep of worker processes with pids from 1000, and what it does with them."""

    label = "model=m version=1"

    def __init__(self, **keys: Any) -> None:
        self.now_s, self.bytes = 100.0, 100 * MIB
        self.pids: dict[int, int | None] = {0: 1000, 1: 1001}
        self.answered: dict[tuple[int, int | None], int] = {}  # requests of each worker
        self.replaced: list[tuple[int, str]] = []
        self.noted: list[tuple[int, str]] = []
        config = ModelConfig(target="a:b", **keys)
        self.upkeep = Upkeep(config, self, lambda _: self.bytes, lambda: self.now_s)  # type: ignore[arg-type]

    def pid(self, slot: int) -> int | None:
        return self.pids[slot]

    def replace(self, slot: int, why: str) -> None:
        self.replaced.append((slot, why))

    def note(self, slot: int, state: str) -> None:
        self.noted.append((slot, state))

    def batch(self, slot: int = 0, requests: int = 1, seconds: float = 1.0) -> None:
        self.now_s += seconds
        key = slot, self.pids[slot]
        self.answered[key] = self.answered.get(key, 0) + requests
        self.upkeep.check(slot, self.answered[key])


def test_each_worker_is_replaced_after_its_own_requests() -> None:
    bench = Bench(max_requests=10)
    for _ in range(3):
        bench.batch(0, 3)
        bench.batch(1, 2)
    assert not bench.replaced
    bench.batch(0, 1)
    assert bench.replaced == [(0, "requests=10 max_requests=10")]
    bench.pids[0] = 1002  # the new worker has answered nothing
    bench.batch(0, 9)
    assert len(bench.replaced) == 1


def test_a_replacement_that_failed_is_tried_again_later() -> None:
    bench = Bench(max_requests=1)
    bench.batch()
    bench.batch(seconds=RETRY_S / 2)
    assert len(bench.replaced) == 1
    bench.batch(seconds=RETRY_S)
    assert len(bench.replaced) == 2


def test_a_worker_above_its_memory_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_memory_bytes=200 * MIB)
    bench.batch()
    bench.bytes = 201 * MIB
    bench.batch(seconds=0.1)
    assert not bench.replaced, "it is read once a second"
    bench.batch()
    assert bench.replaced == [(0, f"resident_bytes={201 * MIB} max_memory_bytes={200 * MIB}")]
    bench.pids[0] = 1002  # a model that needs more from the beginning would be replaced for ever
    for _ in range(100):
        bench.batch()
    assert len(bench.replaced) == 1
    assert caplog.text.count("memory_above_limit") == 1


def test_a_leak_is_reported_once_for_each_worker(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for pid in (1000, 1002):
        bench.pids[0], bench.bytes = pid, 100 * MIB
        for _ in range(300):
            bench.bytes += MIB
            bench.batch()
    assert bench.noted == [(0, "leaking")] * 2
    assert caplog.text.count("memory_grows model=m version=1 slot=0") == 2
    bench.pids[0] = None
    bench.batch()


def test_memory_that_doubles_within_seconds_is_reported_at_once_and_each_time(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for _ in range(60):  # 14 GiB in a minute
        bench.bytes += 240 * MIB
        bench.batch()
    lines = [record.getMessage() for record in caplog.records if "event=memory_doubled" in record.getMessage()]
    found = [int(line.partition("resident_bytes=")[2].partition(" ")[0]) // MIB for line in lines]
    assert found == [820, 1780, 3700, 7540]
    assert bench.noted == [(0, "leaking")]  # a cache would have doubled once
    assert lines[0].startswith("event=memory_doubled model=m version=1 slot=0 pid=1000 ")
    assert " seconds=2: " in lines[0]
    caplog.clear()
    small = Bench()
    for i in range(100):
        small.bytes = (100 + 300 * (i % 2)) * MIB
        small.batch()
    assert not caplog.records
    assert not small.noted
