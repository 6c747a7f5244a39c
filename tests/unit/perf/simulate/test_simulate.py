"""The simulator drives the real Scheduler, and reproduces stored figures of an independent simulator within 3 %."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed
from penstock.perf.simulate.simulate import Bulk, Service, SimResult, best_closed, mmpp, poisson, simulate

ACC = Service(0.005, 0.0002)
CPU = Service(0.0005, 0.004)


def greedy() -> BatchPolicy:
    return Fixed(0.0)


def mean(f: Callable[[int], float]) -> float:
    """Over the three seeds that the stored figures were made with."""
    return sum(f(i) for i in range(3)) / 3


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
    service: Service, slots: int, load: float, policy: Callable[[], BatchPolicy], expected_ms: float
) -> None:
    rate = load * service.capacity(slots, 64)

    def once(i: int) -> float:
        arrivals = poisson(rate, 6000, random.Random(3 + i))
        return simulate(service, policy(), slots=slots, arrivals=arrivals, seed=1 + i).mean_s * 1e3

    assert mean(once) == pytest.approx(expected_ms, rel=0.03)


@pytest.mark.parametrize(
    ("slots", "clients", "policy", "expected"),
    [
        (1, 8, greedy, 688.85),
        (1, 8, Adaptive, 990.83),
        (1, 64, Adaptive, 3156.96),
        (4, 16, greedy, 1900.12),
        (4, 16, Adaptive, 2227.01),
        (4, 64, Adaptive, 6505.48),
    ],
)
def test_closed_loop_throughput_agrees_with_the_reference(
    slots: int, clients: int, policy: Callable[[], BatchPolicy], expected: float
) -> None:
    def once(i: int) -> float:
        return simulate(ACC, policy(), slots=slots, clients=clients, horizon_s=1.5, seed=1 + i).throughput

    assert mean(once) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("service", "slots", "slo_s", "load", "policy", "told", "expected", "dropped"),
    [
        (ACC, 1, 0.025, 0.9, greedy, False, 2438.64, 0.0),
        (ACC, 1, 0.025, 0.9, Adaptive, True, 2941.66, 0.0828),
        (ACC, 1, 0.025, 1.2, Adaptive, True, 3150.58, 0.2628),
        (ACC, 4, 0.025, 1.2, Adaptive, True, 13765.43, 0.1950),
        (CPU, 1, 0.050, 2.0, Adaptive, True, 246.02, 0.5078),
    ],
)
def test_goodput_under_overload_agrees_with_the_reference(
    service: Service,
    slots: int,
    slo_s: float,
    load: float,
    policy: Callable[[], BatchPolicy],
    told: bool,
    expected: float,
    dropped: float,
) -> None:
    n = 12000 if service is ACC else 4000
    results = [
        simulate(
            service,
            policy(),
            slots=slots,
            arrivals=poisson(load * service.capacity(slots, 64), n, random.Random(3 + i)),
            slo_s=slo_s,
            deadlines=told,
            seed=1 + i,
        )
        for i in range(3)
    ]
    assert mean(lambda i: results[i].goodput) == pytest.approx(expected, rel=0.03)
    assert mean(lambda i: results[i].dropped) == pytest.approx(dropped, abs=0.01)


def test_bursts_agree_with_the_reference() -> None:
    def once(i: int) -> float:
        arrivals = mmpp(0.3 * ACC.capacity(4, 64), 24000, random.Random(3 + i))
        return simulate(ACC, Adaptive(), slots=4, arrivals=arrivals, seed=1 + i).mean_s * 1e3

    assert mean(once) == pytest.approx(13.9696, rel=0.03)


def test_without_a_profile_the_model_is_learned_from_the_load() -> None:
    lone = simulate(ACC, Adaptive(), clients=32, horizon_s=3.0, profile=False)
    primed = simulate(ACC, Adaptive(), clients=32, horizon_s=3.0)
    assert lone.throughput == pytest.approx(primed.throughput, rel=0.05)


def test_the_same_arguments_give_the_same_result() -> None:
    runs = [simulate(ACC, Adaptive(), slots=2, clients=20, horizon_s=0.5, seed=4) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != simulate(ACC, Adaptive(), slots=2, clients=20, horizon_s=0.5, seed=5)


def test_every_arrival_of_an_open_loop_is_counted_and_the_busy_share_follows_from_the_load() -> None:
    r = simulate(Service(0.0, 0.001, 0.0, 0.0), greedy(), arrivals=[0.01 * k for k in range(1, 101)])
    assert r.requests == 100
    assert (r.mean_s, r.p50_s, r.p99_s) == pytest.approx((0.001,) * 3)
    assert r.busy == pytest.approx(0.1, abs=0.01)
    assert (r.mean_batch, r.dropped) == (1.0, 0.0)


def test_the_best_closed_schedule_is_one_full_group_when_clients_fit_a_batch() -> None:
    assert best_closed(Service(0.01, 0.0), 1, 64, clients=10, think_s=0.0) == pytest.approx(10 / 0.01)


@pytest.mark.parametrize("kwargs", [{}, {"clients": 3}, {"clients": 3, "horizon_s": 1.0, "arrivals": [1.0]}])
def test_an_unclear_load_is_refused(kwargs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either arrivals, or clients"):
        simulate(ACC, greedy(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("clients", "share"), [(16, 0.40), (64, 0.83), (256, 0.96)])
def test_sending_ahead_fills_the_gap_and_does_not_split_a_closed_loop(clients: int, share: float) -> None:
    r = simulate(ACC, Adaptive(), depth=2, handover_s=0.0005, clients=clients, horizon_s=3.0)
    assert r.throughput >= share * ACC.capacity(1, 64)


@pytest.mark.parametrize(
    ("service", "slots", "rows", "least"),
    [
        (Service(0.020, 0.001, 0.05, 0.0), 1, 64, 0.95),
        (Service(0.020, 0.001, 0.05, 0.0), 2, 32, 0.96),
        (Service(0.250, 0.0016, 0.02, 0.0), 1, 64, 0.92),  # nearly every batch has a lone request in it
        (Service(0.250, 0.0016, 0.02, 0.0), 4, 64, 0.95),
        (Service(0.002, 0.001, 0.05, 0.0), 1, 20, 0.95),
    ],
)
def test_a_lone_request_beside_a_bulk_job_waits_less_than_two_batch_times(
    service: Service, slots: int, rows: int, least: float
) -> None:
    def run(priority: int) -> SimResult:
        return simulate(
            service,
            Adaptive(),
            slots=slots,
            depth=8,
            handover_s=0.001,
            prepare_s=0.00002,
            arrivals=poisson(5.0, 800, random.Random(1)),
            bulk=Bulk(in_flight=slots * -(-192 // rows), rows=rows, priority=priority),
            priority=(0.0, 10.0),
        )

    ranked, equal = run(1), run(0)
    batch_s, capacity = service.t(64), service.capacity(slots, 64)
    assert ranked.p99_s < 2 * batch_s < equal.p99_s
    assert ranked.bulk_throughput + 5 >= least * capacity


def test_requests_that_are_cut_fill_batches_that_whole_ones_leave_empty() -> None:
    def throughput(divisible: bool) -> float:
        bulk = Bulk(in_flight=5, rows=20, divisible=divisible)
        return simulate(ACC, Adaptive(), max_batch_size=32, arrivals=[20.0], bulk=bulk).bulk_throughput

    assert throughput(True) >= 1.15 * throughput(False)
