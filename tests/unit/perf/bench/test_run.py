import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from penstock.client.endpoint import Endpoint, parse_url
from penstock.errors import ConfigError
from penstock.perf.bench import run as module
from penstock.perf.bench.load import http_request
from penstock.perf.bench.measurement import Load, Measurement, parse_slo
from penstock.perf.bench.run import TargetFailing, measure, memory_growth, settled, slowdown, warm_up
from penstock.perf.bench.target import Target
from support.numbered import NumberedServer, numbered

REQUESTS = [http_request(Endpoint("127.0.0.1", 1), "POST", "/predictions/m", {}, b"{}")]


def target(server: NumberedServer) -> Target:
    return Target(text="scripted", endpoint=parse_url(server.url), model="m", path="/predictions/m")


CLOSED = Load(mode="closed", concurrency=2, requests=50)


async def test_a_run_counts_only_requests_after_test_and_warm_up() -> None:
    async with numbered() as server:
        run = await measure(target(server), REQUESTS, CLOSED, slo=parse_slo("p50<=10s"), warm_s=0, label="a")
    assert (run.requests, run.answered, run.errors) == (50, 50, {})
    assert server.asked == 51
    assert run.throughput > 0
    assert run.slo[0].met
    assert run.label == "a"
    assert run.started.endswith("+00:00")


async def test_aborted_tls_connections_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with numbered() as server:
        await measure(target(server), REQUESTS, CLOSED, warm_s=0)
    for message in ("Fatal error on SSL protocol", "Task exception was never retrieved"):
        asyncio.get_running_loop().call_exception_handler({"message": message})
    assert [record.message for record in caplog.records] == ["Task exception was never retrieved"]


@pytest.mark.parametrize(
    ("load", "sent"),
    [
        (Load(mode="open", rate=200, seconds=0.2, arrival="constant", connections=4), 40),
        (Load(mode="open", rate=2000, requests=100, connections=4), 100),
    ],
)
async def test_an_open_loop_sends_what_was_planned(load: Load, sent: int) -> None:
    async with numbered() as server:
        run = await measure(target(server), REQUESTS, load, warm_s=0)
    assert run.requests == sent
    assert run.latency.p50_s is not None


async def test_a_trace_is_replayed_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "arrivals.jsonl"
    trace.write_text("".join(f'{{"t": {n * 0.002}}}\n' for n in range(30)))
    async with numbered() as server:
        load = Load(mode="open", arrival=f"trace:{trace}", connections=4)
        run = await measure(target(server), REQUESTS, load, warm_s=0)
        whole = structs.replace(load, seconds=60.0)
        longer = await measure(target(server), REQUESTS, whole, warm_s=0)
        beginning = await measure(target(server), REQUESTS, structs.replace(load, seconds=0.02), warm_s=0)
    assert run.requests == longer.requests == 30
    assert run.seconds == longer.seconds == pytest.approx(0.06), "it ends with the trace, whatever the duration"
    assert (beginning.requests, beginning.seconds) == (10, 0.02)


async def test_the_warm_up_sends_the_load_until_it_is_settled_and_counts_none_of_it() -> None:
    async with numbered() as server:
        run = await measure(target(server), REQUESTS, CLOSED, warm_s=0.1)
        assert run.requests == 50
        assert server.asked > 51
        before = server.asked
        load = Load(mode="open", rate=100, seconds=0.1, arrival="constant", connections=4)
        await measure(target(server), REQUESTS, load, warm_s=0.1)
        assert server.asked - before == 1 + 10 + 10
        before = server.asked
        seldom = Load(mode="open", rate=2, seconds=0.2, arrival="constant", connections=1)
        await measure(target(server), REQUESTS, seldom, warm_s=0.2)
    assert server.asked - before == 1 + 1 + 1, "for the given time, even with one request"


@pytest.mark.parametrize(("rate", "slice_s"), [(1000, 0.5), (5, 2.0), (0.1, 10.0)])
async def test_slices_of_the_warm_up_have_a_few_requests_or_last_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, rate: float, slice_s: float
) -> None:
    slices: list[float] = []

    async def warm_up(run: object, seconds: float | None, *, slice_s: float) -> None:
        slices.append(slice_s)

    monkeypatch.setattr(module, "warm_up", warm_up)
    async with numbered() as server:
        load = Load(mode="open", rate=rate, arrival="constant", requests=1, connections=1)
        await measure(target(server), REQUESTS, load, warm_s=None)
    assert slices == [slice_s]


async def test_a_target_that_fails_slowly_gets_few_test_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKS_S", 0.0)
    async with numbered(lambda number: (503, b"loading")) as server:
        with pytest.raises(TargetFailing, match="loading"):
            await measure(target(server), REQUESTS, CLOSED)
    assert server.asked == 1


async def test_a_first_response_that_fails_by_chance_stops_nothing() -> None:
    async with numbered(lambda number: (503 if number == 0 else 200, b"busy")) as server:
        run = await measure(target(server), REQUESTS, CLOSED, warm_s=0)
    assert run.answered == 50


async def test_the_check_of_a_protocol_rejects_bad_responses() -> None:
    async with numbered() as server:
        with pytest.raises(TargetFailing, match="200 OK: ok"):
            await measure(target(server), REQUESTS, CLOSED, check=lambda number, status, body: body == b"no")


async def test_a_run_that_will_be_invalid_is_stopped_after_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.2)
    monkeypatch.setattr(module, "PROBED", 0.0)

    def slow(number: int, status: int, body: bytes) -> bool:
        time.sleep(0.01)  # on the generator's loop, which is therefore late
        return True

    async with numbered() as server:
        load = Load(mode="open", rate=150.0, seconds=10.0, connections=4)
        run = await measure(target(server), REQUESTS, load, warm_s=0.0, timeout_s=0.1, check=slow)
        assert "the generator was late" in run.invalid[0]
        assert run.invalid[-1].startswith("the run was stopped after ")
        assert run.invalid[-1].endswith("of 10 s, because it would be INVALID")
        assert run.seconds < 5
        await asyncio.sleep(0.1)  # lets the server notice the connections that the generator dropped


@pytest.mark.parametrize("busy", [False, True])
async def test_the_beginning_of_a_closed_loop_ends_it_only_if_the_generator_is_at_its_limit(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.1)
    monkeypatch.setattr(module, "is_hopeless", lambda load, samples, cpu, late_s: cpu > 0 and busy)
    async with numbered() as server:
        load = Load(mode="closed", concurrency=2, seconds=0.5)
        run = await measure(target(server), REQUESTS, load, warm_s=0.0)
        assert (run.seconds < 0.5) == busy
        assert any("stopped" in text for text in run.invalid) == busy


async def test_a_cancelled_run_reports_a_partial_measurement() -> None:
    partial: list[Measurement] = []
    twentieth = asyncio.Event()
    async with numbered(lambda number: (200, b"no" if number < 20 else twentieth.set() or b"ok")) as server:
        load = Load(mode="closed", concurrency=2, seconds=60)
        task = asyncio.ensure_future(measure(target(server), REQUESTS, load, warm_s=0, on_partial=partial.append))
        await twentieth.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (run,) = partial
    assert 0 < run.answered < 10_000
    assert run.seconds < 30
    assert any("interrupted" in text for text in run.caveats)


async def test_a_model_that_slows_down_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TREND_S", 0.0)
    monkeypatch.setattr(module, "slowdown", lambda latencies_s: f"slower from {len(latencies_s)} latencies")
    async with numbered(lambda number: (503 if number == 30 else 200, b"ok")) as server:
        load = Load(mode="closed", concurrency=3, requests=60)
        run = await measure(target(server), REQUESTS, load, warm_s=0)
    assert "slower from 53 latencies" in run.caveats, "good responses, after the clients' start"


async def test_a_server_that_leaks_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    class LeakingServer:
        def __init__(self, target: Target) -> None:
            self.memory = [(n / 2, (500 + 10 * n) * 2**20) for n in range(30)]

        async def start(self) -> None: ...

        async def stop(self) -> None: ...

    monkeypatch.setattr(module, "ServerProbe", LeakingServer)
    monkeypatch.setattr(module, "TREND_S", 0.0)
    async with numbered() as server:
        run = await measure(target(server), REQUESTS, CLOSED, warm_s=0)
    assert any("its memory grows steadily" in text for text in run.caveats)


async def test_a_load_without_requests_is_refused() -> None:
    async with numbered() as server:
        with pytest.raises(ConfigError, match=r"no request arrives at 0\.01/s poisson within 0\.001 s"):
            await measure(target(server), REQUESTS, Load(mode="open", rate=0.01, seconds=0.001))


MIB = 2**20


class Slices:
    """Runs in virtual time with the given speeds, repeating the last one."""

    def __init__(self, *speeds: float, each_s: float | None = None) -> None:
        self.now, self.ran, self._speeds, self._each_s = 0.0, [], list(speeds), each_s

    ran: list[float]

    async def run(self, seconds: float) -> float:
        self.ran.append(seconds)
        self.now += self._each_s or seconds
        return self._speeds[min(len(self.ran), len(self._speeds)) - 1]

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("speeds", "given", "ran"),
    [
        ((10, 50, 100, 101, 100), {}, [0.5] * 4),  # no faster than before
        ([1.2**i for i in range(100)], {}, [0.5] * 20),  # ten seconds at the latest
        ([1.2**i for i in range(100)], {"each_s": 4.0}, [0.5] * 3),
        ((1,), {"seconds": 3.0}, [3.0]),
        ((1,), {"seconds": 0.0}, []),
        ((1,), {"slice_s": 4.0}, [4.0] * 3),  # of a slow load
    ],
)
async def test_warming_up_ends_when_the_load_gets_no_faster(
    speeds: Sequence[float], given: dict[str, float], ran: list[float]
) -> None:
    slices = Slices(*speeds, each_s=given.pop("each_s", None))
    await warm_up(slices.run, given.pop("seconds", None), clock=slices.clock, **given)
    assert slices.ran == ran


@pytest.mark.parametrize(("speeds", "warm"), [([100, 90, 80], True), ([100, 100], False), ([100, 100, 120], False)])
def test_a_load_that_becomes_slower_is_warm(speeds: list[float], warm: bool) -> None:
    assert settled(speeds) is warm


def steady(count: int, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [0.01 * draw.lognormvariate(0, 0.4) for _ in range(count)]


def stalled(at: float) -> list[float]:
    latencies, begin = steady(900), int(900 * at)
    latencies[begin : begin + 60] = [2.0] * 60
    return latencies


def test_latencies_that_grow_are_flagged_with_how_much() -> None:
    text = slowdown([latency * (1 + i / 900) for i, latency in enumerate(steady(900))])
    assert "it got slower" in text
    assert "first third" in text


@pytest.mark.parametrize(
    "runs",
    [
        [steady(300, seed) for seed in range(200)],
        [stalled(0.0), stalled(0.4), stalled(0.93)],
        [[0.01 * i for i in range(80)]],  # too few
    ],
)
def test_steady_latencies_and_stalls_are_no_trend(runs: list[list[float]]) -> None:
    assert [run for run in runs if slowdown(run)] == []


def memory(*megabytes: float) -> list[tuple[float, int]]:
    return [(i * 0.5, int(value * MIB)) for i, value in enumerate(megabytes)]


def test_a_leak_is_flagged_with_its_pace() -> None:
    text = memory_growth(memory(*(500 + 10 * i for i in range(30))))
    assert text == "its memory grows steadily: by 200 MiB in 10 s (70.3 GiB an hour), to 745 MiB"


@pytest.mark.parametrize(
    "megabytes",
    [
        [500.0] * 30,
        [500 + 0.1 * i for i in range(30)],  # 3 MiB: normal for an allocator
        [5000 + 2 * i for i in range(30)],  # 1 % of it
        [500.0] * 5 + [700.0] * 25,  # a buffer allocated once
        [500 + 200 * (1 - 0.7**i) for i in range(30)],  # a cache that fills up
        [500 + 100 * (i % 2) for i in range(30)],
        [1000 - 10 * i for i in range(30)],
        [500 + 100 * i for i in range(8)],  # too short for a trend
    ],
)
def test_memory_that_does_not_leak_is_not_flagged(megabytes: list[float]) -> None:
    assert memory_growth(memory(*megabytes)) == ""
