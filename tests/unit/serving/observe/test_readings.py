from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.contracts import ListenerSnapshot, ModelSnapshot, ServerSnapshot
from penstock.serving.observe.causes import findings
from penstock.serving.observe.readings import DEATHS_S, LOOKED_S, Machine, Readings, Work
from penstock.types import ModelStatus

KEY = ("m", "1")


def server(unsent: int = 0, up: int = 1, **changed: Any) -> ServerSnapshot:
    model = ModelSnapshot(ModelStatus("m", "1", "READY", up, up, 8, ("cpu",)), pids={0: 7}, **changed)
    return ServerSnapshot([model], 5, 10, listeners={"http": ListenerSnapshot(unsent, {})})


def test_a_reading_has_rates_and_means_of_the_last_seconds() -> None:
    readings = Readings()
    assert readings.read() == []
    threads = {7: {70: (0.0, 0.0), 71: (1.0, 1.0)}}
    begin = Machine(idle_s=5.0, threads=threads)
    rows = {"sent_rows": 0, "padded_rows": 0, "ceiling": None, "a_s": 0.01, "b_s": 0.001}
    readings.add(10.0, server(9, busy_s=1.0, in_flight=4, scheduler=rows), {KEY: Work(100, 90)}, begin)
    readings.add(11.0, server(6, busy_s=1.2), {KEY: Work(105, 95)}, Machine(4, 5.5, threads, (1.0, 0.0)))
    rows |= {"sent_rows": 30, "padded_rows": 10}
    done = Work(140, 120, refused=4, batches=10, rows=60.0, run_s=1.0, prepare_s=0.5, preprocess_s=0.2)
    threads = {7: {70: (0.5, 0.5), 71: (2.0, 1.5)}}
    snapshot = server(8, busy_s=2.8, in_flight=8, arrived_rows=80, arrived_bytes=4000, scheduler=rows)
    readings.add(12.0, snapshot, {KEY: done}, Machine(4, 6.5, threads, (1.6, 0.2)))
    (found,) = readings.read()
    assert (found.requests, found.answers, found.refused, found.batches) == (20, 15, 2, 5)
    assert (found.rows, found.in_flight_rows, found.body_bytes) == (6, 2 * 4, 100)
    times = (found.busy, found.working, found.run_s, found.decode_s, found.preprocess_s, found.fixed_s)
    assert times == pytest.approx((0.9, 0.5, 0.1, 0.03, 0.02, 0.01))
    assert (found.padded, found.cpu, found.runnable) == (0.25, 0.75, 1.25)
    assert (found.server.cores, found.server.idle, found.server.runnable) == (4, 0.75, 1.25)
    assert (found.server.loop_busy, found.server.loop_cpu) == pytest.approx((0.9, 0.8))
    assert (found.server.unsent_bytes, found.server.pool) == (6, 0.5)


def test_the_cost_of_small_batches_is_remembered_while_all_are_full() -> None:
    readings = Readings()
    points = [(4.0, 0.022, 30.0), (2.0, 0.021, 1.0)]
    for second in range(2):
        readings.add(second, server(scheduler={"a_s": 0.0, "b_s": 0.0055, "fitted": False, "points": points}), {})
    assert (readings.read()[0].fixed_s, readings.read()[0].row_s) == pytest.approx((0.02, 0.0005))
    readings.add(2, server(scheduler={"a_s": 0.0, "b_s": 0.0055, "fitted": False, "points": points[:1]}), {})
    assert (readings.read()[0].fixed_s, readings.read()[0].row_s) == (0.0, 0.0055)


def test_a_death_is_news_for_a_minute_and_a_leak_until_the_worker_is_replaced() -> None:
    readings = Readings()
    readings.add(0.0, server(), {KEY: Work(died=5)})
    for second in range(1, 100):
        readings.add(float(second), server(), {KEY: Work(died=7, leaking=int(second < 50))})
        causes = [found.cause for found in findings(readings.read())]
        assert causes == ["crashing worker"] * (second < DEATHS_S + 1) + ["leaking worker"] * (second < 50)


counters = st.lists(st.integers(0, 1000), min_size=3, max_size=3)


@given(st.lists(counters, min_size=2, max_size=30), st.booleans())
def test_any_counters_also_ones_that_begin_anew_give_readings(values: list[list[int]], looked: bool) -> None:
    readings = Readings()
    for second, (requests, batches, busy) in enumerate(values):
        machine = Machine(idle_s=busy, loop=(busy / 9, 0.0)) if looked and second % 3 else None
        work = {KEY: Work(requests, requests, batches=batches, rows=batches, run_s=busy)}
        readings.add(second / 2, server(busy_s=busy), work, machine)
    (found,) = readings.read()
    first = values[-min(len(values), LOOKED_S + 1)]
    seconds = (min(len(values), LOOKED_S + 1) - 1) / 2
    assert found.requests == pytest.approx(max(0, values[-1][0] - first[0]) / seconds)
    assert min(found.busy, found.working, found.rows, found.server.idle) >= 0
    findings([found])


def test_a_model_that_was_loaded_just_now_has_no_reading() -> None:
    readings = Readings()
    readings.add(0.0, ServerSnapshot(), {})
    readings.add(1.0, server(), {KEY: Work(5)})
    assert readings.read() == []
    readings.add(2.0, server(), {KEY: Work(5)})
    assert readings.read() == []
