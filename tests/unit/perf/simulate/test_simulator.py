"""The simulator drives the real Scheduler and reproduces stored figures of an independent simulator within 3 %."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy, View
from penstock.core.batching.policies.fixed import Fixed
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime
from support.simulator import BulkLoad, ClosedLoop, FrontEnd, SimulationResult, SimulationSettings, poisson, simulate

ACC = ServiceTime(0.005, 0.0002)
CPU = ServiceTime(0.0005, 0.004)


def greedy() -> BatchPolicy:
    return Fixed(0.0)


def mean(f: Callable[[int], float]) -> float:
    """The mean over the three seeds of the stored figures."""
    return sum(f(i) for i in range(3)) / 3


def mmpp(rate: float, n: int, rng: random.Random) -> Iterator[float]:
    """Times of n bursty arrivals with mean `rate`: a quarter of the time has three times the rate."""
    high, share, period_s = 3.0, 0.25, 0.8
    low = (1 - share * high) / (1 - share)
    t, burst, k = 0.0, False, 0
    end = rng.expovariate(1 / (period_s * (1 - share)))
    while k < n:
        gap = rng.expovariate(rate * (high if burst else low))
        if t + gap > end:
            t, burst = end, not burst
            end = t + rng.expovariate(1 / (period_s * (share if burst else 1 - share)))
            continue
        t += gap
        k += 1
        yield t


@pytest.mark.parametrize(
    ("service", "slots", "load", "policy", "expected_ms"),
    [
        (ACC, 1, 0.3, greedy, 9.8833),
        (ACC, 1, 0.3, Adaptive, 9.8833),
        (ACC, 2, 0.3, greedy, 9.4291),
        (ACC, 2, 0.3, Adaptive, 8.4247),
        (ACC, 4, 0.3, greedy, 8.8950),
        (ACC, 4, 0.3, Adaptive, 7.7278),
        (ACC, 4, 0.9, Adaptive, 18.8037),
        (CPU, 1, 0.9, Adaptive, 34.7498),
    ],
)
def test_open_loop_latency_agrees_with_the_reference(
    service: ServiceTime, slots: int, load: float, policy: Callable[[], BatchPolicy], expected_ms: float
) -> None:
    rate = load * service.capacity(slots, 64)

    def once(i: int) -> float:
        arrivals = poisson(rate, 6000, random.Random(3 + i))
        settings = SimulationSettings(slots=slots, seed=1 + i)
        return simulate(service, policy(), OpenLoop(arrivals), settings).mean_s * 1e3

    assert mean(once) == pytest.approx(expected_ms, rel=0.03)


class Unshared(Adaptive):
    """The adaptive policy of the reference, which does not share the clients of a closed loop between slots."""

    def _share(self, view: View) -> int:
        return view.max_rows


@pytest.mark.parametrize(
    ("slots", "clients", "policy", "expected"),
    [
        (1, 8, greedy, 688.85),
        (1, 8, Adaptive, 990.83),
        (1, 64, Adaptive, 3156.96),
        (4, 16, greedy, 1900.12),
        (4, 16, Unshared, 2227.01),
        (4, 64, Unshared, 6505.48),
    ],
)
def test_closed_loop_throughput_agrees_with_the_reference(
    slots: int, clients: int, policy: Callable[[], BatchPolicy], expected: float
) -> None:
    def once(i: int) -> float:
        return simulate(ACC, policy(), ClosedLoop(clients, 1.5), SimulationSettings(slots=slots, seed=1 + i)).throughput

    assert mean(once) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("service", "slots", "slo_s", "load", "policy", "deadlines", "expected", "dropped"),
    [
        (ACC, 1, 0.025, 0.9, greedy, False, 2438.64, 0.0),
        (ACC, 1, 0.025, 0.9, Adaptive, True, 2941.66, 0.0828),
        (ACC, 1, 0.025, 1.2, Adaptive, True, 3150.58, 0.2628),
        (ACC, 4, 0.025, 1.2, Adaptive, True, 13765.43, 0.1950),
        (CPU, 1, 0.050, 2.0, Adaptive, True, 246.02, 0.5078),
    ],
)
def test_goodput_under_overload_agrees_with_the_reference(
    service: ServiceTime,
    slots: int,
    slo_s: float,
    load: float,
    policy: Callable[[], BatchPolicy],
    deadlines: bool,
    expected: float,
    dropped: float,
) -> None:
    n = 12000 if service is ACC else 4000
    results = [
        simulate(
            service,
            policy(),
            OpenLoop(poisson(load * service.capacity(slots, 64), n, random.Random(3 + i))),
            SimulationSettings(slots=slots, slo_s=slo_s, deadlines=deadlines, seed=1 + i),
        )
        for i in range(3)
    ]
    assert mean(lambda i: results[i].goodput) == pytest.approx(expected, rel=0.03)
    assert mean(lambda i: results[i].dropped) == pytest.approx(dropped, abs=0.01)


def test_bursts_agree_with_the_reference() -> None:
    def once(i: int) -> float:
        arrivals = mmpp(0.3 * ACC.capacity(4, 64), 24000, random.Random(3 + i))
        return simulate(ACC, Adaptive(), OpenLoop(arrivals), SimulationSettings(slots=4, seed=1 + i)).mean_s * 1e3

    assert mean(once) == pytest.approx(13.9696, rel=0.03)


def test_without_a_profile_the_model_is_learned_from_the_load() -> None:
    learned = simulate(ACC, Adaptive(), ClosedLoop(32, 3.0), SimulationSettings(profile=False))
    primed = simulate(ACC, Adaptive(), ClosedLoop(32, 3.0))
    assert learned.throughput == pytest.approx(primed.throughput, rel=0.05)


def test_the_same_arguments_give_the_same_result() -> None:
    runs = [
        simulate(ACC, Adaptive(), ClosedLoop(20, 0.5), SimulationSettings(slots=2, seed=seed)) for seed in (4, 4, 5)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_every_arrival_of_an_open_loop_is_counted_and_the_busy_share_follows_from_the_load() -> None:
    arrivals = OpenLoop([0.01 * k for k in range(1, 101)])
    r = simulate(ServiceTime(0.0, 0.001, 0.0, 0.0), greedy(), arrivals)
    assert r.requests == 100
    assert (r.mean_s, r.p50_s, r.p99_s) == pytest.approx((0.001,) * 3)
    assert r.busy == pytest.approx(0.1, abs=0.01)
    assert (r.mean_batch, r.dropped) == (1.0, 0.0)


SHARED = ServiceTime(0.004, 0.0002)
"""A small model on cores that a web server shares, as in the Flask rows of `benchmarks/streamer.py`."""


def shared(clients: int, horizon_s: float = 4.0) -> ClosedLoop:
    """Clients behind that web server, which slows down while a batch runs."""
    return ClosedLoop(clients, horizon_s, front_end=FrontEnd(0.00092, 0.7))


def test_waiting_pays_where_the_web_server_shares_the_cores_with_the_model() -> None:
    at_once, long, longer = (simulate(SHARED, Fixed(wait_s), shared(128)) for wait_s in (0.0, 0.02, 0.1))
    assert at_once.throughput < 0.80 * long.throughput < 0.80 * longer.throughput
    assert at_once.mean_batch < 5 < 15 < long.mean_batch < longer.mean_batch
    for result in (at_once, longer):  # Little's law: the latency includes the front end
        assert result.throughput * result.mean_s == pytest.approx(127, rel=0.02)


def test_the_front_end_serves_one_request_at_a_time_and_slows_down_while_a_batch_runs() -> None:
    free = simulate(ServiceTime(0.0, 1e-6), greedy(), shared(64))
    assert free.throughput == pytest.approx(1 / 0.00092, rel=0.02)
    always = simulate(SHARED, greedy(), shared(64))
    assert always.busy > 0.98
    assert always.throughput == pytest.approx(0.7 / 0.00092, rel=0.02)


def test_clients_come_and_go_at_the_time_of_the_change() -> None:
    def load(before: int, after: int) -> SimulationResult:
        return simulate(ACC, greedy(), ClosedLoop(before, 4.0, changed=after, change_s=2.0))

    few, many = simulate(ACC, greedy(), ClosedLoop(4, 4.0)), simulate(ACC, greedy(), ClosedLoop(64, 4.0))
    for changed in (load(4, 64), load(64, 4)):
        assert 1.5 * few.throughput < changed.throughput < 0.8 * many.throughput


@pytest.mark.parametrize(("clients", "share"), [(16, 0.40), (64, 0.83), (256, 0.96)])
def test_sending_ahead_fills_the_gap_and_does_not_split_a_closed_loop(clients: int, share: float) -> None:
    r = simulate(ACC, Adaptive(), ClosedLoop(clients, 3.0), SimulationSettings(depth=2, handover_s=0.0005))
    assert r.throughput >= share * ACC.capacity(1, 64)


@pytest.mark.parametrize(
    ("service", "slots", "rows", "least"),
    [
        (ServiceTime(0.020, 0.001, 0.05, 0.0), 1, 64, 0.95),
        (ServiceTime(0.020, 0.001, 0.05, 0.0), 2, 32, 0.96),
        (ServiceTime(0.250, 0.0016, 0.02, 0.0), 1, 64, 0.92),  # nearly every batch has a lone request in it
        (ServiceTime(0.250, 0.0016, 0.02, 0.0), 4, 64, 0.95),
        (ServiceTime(0.002, 0.001, 0.05, 0.0), 1, 20, 0.95),
    ],
)
def test_a_lone_request_during_a_bulk_job_waits_less_than_two_batch_times(
    service: ServiceTime, slots: int, rows: int, least: float
) -> None:
    def run(priority: int) -> SimulationResult:
        settings = SimulationSettings(
            slots=slots,
            depth=8,
            handover_s=0.001,
            prepare_s=0.00002,
            bulk=BulkLoad(in_flight=slots * -(-192 // rows), rows=rows, priority=priority),
            priority=(0.0, 10.0),
        )
        return simulate(service, Adaptive(), OpenLoop(poisson(5.0, 800, random.Random(1))), settings)

    ranked, equal = run(1), run(0)
    batch_s, capacity = service.t(64), service.capacity(slots, 64)
    assert ranked.p99_s < 2 * batch_s < equal.p99_s
    assert ranked.bulk_throughput + 5 >= least * capacity


def test_divisible_requests_fill_batches_that_whole_ones_leave_partly_empty() -> None:
    def throughput(divisible: bool) -> float:
        bulk = BulkLoad(in_flight=5, rows=20, divisible=divisible)
        return simulate(
            ACC, Adaptive(), OpenLoop([20.0]), SimulationSettings(max_batch_size=32, bulk=bulk)
        ).bulk_throughput

    assert throughput(True) >= 1.15 * throughput(False)


@pytest.mark.parametrize(
    ("kind", "slots", "load", "holds"),
    [
        ("stagger", 4, OpenLoop([k / (0.3 * ACC.capacity(4, 64)) for k in range(2000)]), True),
        ("stagger", 1, OpenLoop([k / (0.3 * ACC.capacity(1, 64)) for k in range(2000)]), False),
        ("regroup", 1, ClosedLoop(8, 1.0), True),
        ("regroup", 1, ClosedLoop(1, 1.0), False),
    ],
)
def test_adaptive_staggers_several_slots_and_regroups_several_clients(
    kind: str, slots: int, load: OpenLoop | ClosedLoop, holds: bool
) -> None:
    policy = Adaptive()
    result = simulate(ACC, policy, load, SimulationSettings(slots=slots))
    found: Any = policy.explain()["holds_by_kind"]
    assert (found[kind] > 0) == holds
    if isinstance(load, ClosedLoop):
        assert result.mean_batch > 0.85 * load.clients


@pytest.mark.parametrize(("slots", "clients", "gain"), [(2, 64, 1.1), (4, 64, 1.15), (3, 33, 1.0), (2, 200, 0.98)])
def test_slots_that_share_the_clients_of_a_closed_loop_evenly_are_faster(slots: int, clients: int, gain: float) -> None:
    settings = SimulationSettings(slots=slots)
    shared, unshared = (
        simulate(ServiceTime(0.02, 0.0001), policy(), ClosedLoop(clients, 3.0), settings).throughput
        for policy in (Adaptive, Unshared)
    )
    assert shared >= gain * unshared
