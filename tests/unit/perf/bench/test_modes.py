from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.perf.bench.measurement import Latency, Load, Measurement, Slo, parse_slo
from penstock.perf.bench.session import LoadPlan, run_plan


class Fake:
    """A server as a function from load to measurement; records the loads."""

    def __init__(self, answer: Callable[[Load], Measurement]) -> None:
        self.answer = answer
        self.loads: list[Load] = []

    async def measure(self, load: Load, repeat: int) -> Measurement:
        self.loads.append(load)
        return self.answer(load)

    async def run(self, plan: LoadPlan, slo: str = "") -> list[str]:
        return [text async for text in run_plan(plan, parse_slo(slo) if slo else Slo(), self.measure)]


def measured(
    load: Load, throughput: float, p99_s: float | None = 0.01, errors: int = 0, invalid: str = ""
) -> Measurement:
    return Measurement(
        load=load,
        requests=1000,
        answered=1000 - errors,
        errors={"503": errors} if errors else {},
        throughput=throughput,
        latency=Latency(p50_s=p99_s and p99_s / 2, p99_s=p99_s, p999_s=p99_s),
        invalid=[invalid] if invalid else [],
    )


def queue(ceiling: float, service_s: float = 0.01) -> Callable[[Load], Measurement]:
    """A server whose p99 grows without bound near its maximum rate; a single client gets a response in service_s."""

    def answer(load: Load) -> Measurement:
        if load.mode == "closed":
            return measured(load, min(ceiling, load.concurrency / service_s))
        busy = load.rate / ceiling
        return measured(load, min(load.rate, ceiling), service_s / (1 - busy) if busy < 1 else 60.0)

    return answer


async def test_each_concurrency_is_run_in_each_repeat_one_repeat_after_the_other() -> None:
    fake = Fake(queue(1000))
    assert await fake.run(LoadPlan(mode="closed", concurrency=(1, 8), repeat=2, seconds=3)) == []
    assert [load.concurrency for load in fake.loads] == [1, 8, 1, 8]
    assert {load.seconds for load in fake.loads} == {3}


@pytest.mark.parametrize(
    ("plan", "loads"),
    [
        (LoadPlan(mode="closed", concurrency=(1,), requests=50), [(0, 50, 0, 0)]),
        (
            LoadPlan(mode="open", rates=(10, 20), repeat=2, seed=7),
            [(10, 0, 10, 7), (20, 0, 10, 7), (10, 0, 10, 8), (20, 0, 10, 8)],
        ),
        (LoadPlan(mode="open", arrival="trace:a.jsonl"), [(0, 0, 10, 0)]),
    ],
)  # fmt: skip
async def test_a_plan_gives_each_load_its_rate_length_and_arrivals(
    plan: LoadPlan, loads: list[tuple[float, int, float, int]]
) -> None:
    fake = Fake(queue(1000))
    await fake.run(plan)
    assert [(load.rate, load.requests, load.seconds, load.seed) for load in fake.loads] == loads
    assert {load.arrival for load in fake.loads} <= {plan.arrival, "poisson"}


async def test_a_ramp_finds_the_highest_rate_that_holds() -> None:
    fake = Fake(queue(1000))  # p99 is 100 ms at 900/s
    (text,) = await fake.run(LoadPlan(mode="ramp", rates=(100,)), "p99<=100ms")
    good = max(load.rate for load in fake.loads if load.rate <= 900)
    assert 900 / 1.06 < good <= 900
    assert text.startswith(f"knee: {good:g}/s hold p99<=100ms; ")
    assert "p99 is" in text
    assert len(fake.loads) <= 12


async def test_a_ramp_without_a_rate_starts_at_half_of_one_clients_throughput() -> None:
    fake = Fake(queue(1000))
    await fake.run(LoadPlan(mode="ramp"), "p99<=100ms")
    assert (fake.loads[0].mode, fake.loads[0].concurrency) == ("closed", 1)
    assert fake.loads[1].rate == 50


async def test_a_ramp_without_an_slo_breaks_at_five_times_the_first_p99() -> None:
    fake = Fake(queue(1000))
    (text,) = await fake.run(LoadPlan(mode="ramp", rates=(100,)))
    good = float(text.split(":")[1].split("/s")[0])
    assert 820 / 1.06 < good <= 820  # 10 ms / (1 - 0.1) * 5 = 55.6 ms, at 820/s
    assert "hold p99<=55.56ms" in text


async def test_a_ramp_whose_first_rate_is_too_high_goes_down() -> None:
    fake = Fake(queue(1000))
    (text,) = await fake.run(LoadPlan(mode="ramp", rates=(5000,)), "p99<=100ms")
    assert text.startswith("knee: ")
    assert 900 / 1.06 < float(text.split(":")[1].split("/s")[0].replace(",", "")) <= 900


async def test_ramp_steps_last_until_the_percentile_has_enough_samples() -> None:
    fake = Fake(queue(1000))
    await fake.run(LoadPlan(mode="ramp", rates=(10, 10), seconds=1), "p99<=100ms")
    await fake.run(LoadPlan(mode="ramp", rates=(10, 10), seconds=1), "p99.9<=100ms")
    assert [load.seconds for load in fake.loads] == [12, 120]


STEPS = {1: 100.0, 2: 101.0, 4: 190.0, 8: 191.0, 16: 192.0}  # one step without a gain is not the end
RAMP, SATURATE = LoadPlan(mode="ramp", rates=(100,)), LoadPlan(mode="saturate")


@pytest.mark.parametrize(
    ("plan", "answer", "loads", "text"),
    [
        (
            LoadPlan(mode="ramp", rates=(64,)), lambda load: measured(load, 1.0, errors=500),
            [64, 32, 16, 8, 4, 2, 1], "no knee: 1/s is already too much: 50.0% errors",
        ),
        (
            LoadPlan(mode="ramp", rates=(100, 200)), queue(1000),
            [100, 150, 200], "knee: 200/s hold p99<=100ms; no higher rate was requested",
        ),
        (
            RAMP, lambda load: measured(load, load.rate, invalid="late" if load.rate > 200 else ""),
            [100, 150, 225, 225],
            "where it breaks is not known: 150/s hold p99<=100ms; more cannot be measured, see INVALID",
        ),
        (
            RAMP, lambda load: measured(load, load.rate, None),
            [100], "no knee: 1,000 good responses at 100/s are too few to judge p99<=100ms",
        ),
        (SATURATE, queue(400), [1, 2, 4, 8, 16], "saturates at 4 clients: 400/s; more clients gain less than 3 %"),
        (
            SATURATE, lambda load: measured(load, STEPS[load.concurrency]),
            [1, 2, 4, 8, 16], "saturates at 4 clients: 190/s; more clients gain less than 3 %",
        ),
        (
            SATURATE, lambda load: measured(load, 100.0 * load.concurrency, errors=500 if load.concurrency > 4 else 0),
            [1, 2, 4, 8], "saturates at 4 clients: 400/s; more clients get errors",
        ),
        (
            LoadPlan(mode="saturate", concurrency=(8,)), lambda load: measured(load, 1.0, errors=500),
            [8], "no throughput: already 8 clients get more than 1% errors",
        ),
        (
            SATURATE,
            lambda load: measured(load, 100.0 * load.concurrency, invalid="cpu" if load.concurrency > 2 else ""),
            [1, 2, 4, 4], "where it saturates is not known: 2 clients get 200/s; more cannot be measured, see INVALID",
        ),
    ],
)  # fmt: skip
async def test_a_search_ends_with_what_it_found(
    plan: LoadPlan, answer: Callable[[Load], Measurement], loads: list[float], text: str
) -> None:
    fake = Fake(answer)
    assert await fake.run(plan, "p99<=100ms" if plan.mode == "ramp" else "") == [text]
    assert [load.rate or load.concurrency for load in fake.loads] == loads


async def test_a_step_that_was_disturbed_is_run_once_more() -> None:
    disturbed = {150.0, 4}

    def answer(load: Load) -> Measurement:
        key = load.rate or load.concurrency
        invalid = "late" if key in disturbed else ""
        disturbed.discard(key)
        return measured(load, min(400.0, load.rate or 100.0 * load.concurrency), invalid=invalid)

    fake = Fake(answer)
    assert "knee: 200/s" in (await fake.run(LoadPlan(mode="ramp", rates=(100, 200)), "p99<=100ms"))[0]
    assert [load.rate for load in fake.loads] == [100, 150, 150, 200]
    fake = Fake(answer)
    assert "saturates at 4 clients" in (await fake.run(LoadPlan(mode="saturate")))[0]
    assert [load.concurrency for load in fake.loads] == [1, 2, 4, 4, 8, 16]
