import re
from collections.abc import Callable

import pytest
from msgspec import structs

from penstock.perf.bench.measurement import (
    Gpu,
    Latency,
    Load,
    Measurement,
    ObjectiveResult,
    ServerStats,
    Slo,
    parse_slo,
)
from penstock.perf.bench.report import in_a_line
from penstock.perf.bench.results import Origin
from penstock.perf.bench.session import BenchSession, LoadPlan, run_plan

# ---- the loads of a plan


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


# ---- text on a terminal

RUN = Measurement(
    load=Load(mode="closed", concurrency=8),
    requests=1000,
    answered=998,
    errors={"503": 2},
    throughput=1234.56,
    latency=Latency(mean_s=0.006, p50_s=0.005, p90_s=0.008, p99_s=0.0123, max_s=0.5),
    server=ServerStats(
        queue_s=0.001,
        run_s=0.004,
        batches={"1": 3, "2": 0, "8": 120},
        mean_batch=7.84,
        cpu=1.5,
        memory_bytes=300 * 2**20,
        gpus=[Gpu(name="NVIDIA H200", utilization=0.8, memory_bytes=2**30)],
    ),
    slo=[ObjectiveResult(text="p99<=10ms", value=0.0123, met=False)],
    first_error="status 503: busy",
    caveats=["a closed loop cannot see stalls"],
)
BROKEN = Measurement(
    load=Load(mode="closed", concurrency=64),
    throughput=9.0,
    invalid=["the generator was late"],
    caveats=["a closed loop cannot see stalls"],
)


def test_a_load_is_labelled_by_its_parameters() -> None:
    loads = [Load(mode="closed", concurrency=1), Load(mode="open", rate=0.5, arrival="gamma:2")]
    loads.append(Load(mode="open", arrival="trace:a.jsonl"))
    assert [load.label for load in loads] == ["1 client", "0.5/s gamma:2", "trace:a.jsonl"]


def printed(capsys: pytest.CaptureFixture[str], *runs: Measurement) -> str:
    session = BenchSession(plan=LoadPlan(mode="closed"), slo=Slo(), origin=Origin(command="bench"), runs=[*runs])
    session.print()
    return capsys.readouterr().out


def test_the_loads_are_printed_as_tables_and_then_what_is_known_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, RUN, BROKEN)
    heading, first, second = (re.split("  +", line) for line in text.splitlines()[:3])
    assert dict(zip(heading, first, strict=True)) == {
        "load": "8 clients", "SLO": "missed", "throughput/s": "1,235", "goodput/s": "n/a", "mean": "6 ms",
        "p50": "5 ms", "p90": "8 ms", "p99 (95 %)": "12.3 ms", "p99.9": "n/a", "max": "500 ms", "runs": "1",
        "requests": "1,000", "errors": "2",
    }  # fmt: skip
    assert second == ["64 clients", "INVALID", "0 (+1 invalid)"], "an invalid run has no figures"
    server = dict(zip(*(re.split("  +", line) for line in lines_below(text, "In the server")[:2]), strict=True))
    assert server == {
        "load": "8 clients", "queue": "1 ms", "preprocess": "n/a", "run": "4 ms", "postprocess": "n/a",
        "mean batch": "7.84", "CPU cores": "1.5", "memory": "300 MiB", "GPU": "80 %, 1 GiB",
        "batches by rows": "<=1:3 <=8:120",
    }  # fmt: skip
    assert lines_below(text, "Invalid runs") == ["- 64 clients: the generator was late"]
    assert lines_below(text, "Caveats") == ["- 8 clients: a closed loop cannot see stalls"]
    assert lines_below(text, "Errors")[-2:] == ["First error:", "status 503: busy"]


def lines_below(text: str, heading: str) -> list[str]:
    return text.partition(f"\n{heading}\n")[2].partition("\n\n")[0].splitlines()


def test_columns_that_nothing_is_known_of_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, Measurement(load=RUN.load, server=ServerStats()))
    assert not {"SLO", "GPU", "batches by rows"} & set(re.split(r"  +|\n", text))


def test_a_finished_run_is_printed_in_one_line() -> None:
    assert in_a_line(RUN) == "1,234.6/s, p50 5 ms, p99 12.3 ms, 0.20 % errors"
    assert in_a_line(BROKEN) == "INVALID: the generator was late"


def test_many_errors_miss_an_slo_that_does_not_limit_them() -> None:
    kept = ObjectiveResult(text="p99<=10ms", value=0.009, met=True)
    few = Measurement(load=Load(mode="closed", concurrency=1), requests=100, errors={"503": 1}, slo=[kept])
    many = structs.replace(few, load=Load(mode="closed", concurrency=8), errors={"503": 50})
    borne = structs.replace(many, slo=[kept, ObjectiveResult(text="error<=60%", value=0.5, met=True)])
    assert (few.met, many.met, borne.met) == (True, False, True)
