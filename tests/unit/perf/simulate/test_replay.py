import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.perf.bench.measurement import Slo, parse_slo
from penstock.perf.bench.workload import parse_arrival, times
from penstock.perf.simulate.replay import (
    ReplayResult,
    best,
    combinations,
    parse_cost,
    parse_duration,
    parse_policies,
    replay,
)
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime

EXACT = ServiceTime(0.005, 0.0002, jitter=0.0, tail=0.0)


def results(
    rate: float = 500.0,
    policies: str = "adaptive",
    batches: Sequence[int] = (64,),
    instances: Sequence[int] = (1,),
    **more: Any,
) -> list[ReplayResult]:
    arrivals = more.pop("arrivals", None) or times(parse_arrival("poisson"), rate, 1000 / rate, 1)
    given: dict[str, Any] = {"load": OpenLoop(arrivals, more.pop("rows", ())), "service": EXACT, "slo": Slo()}
    given |= more
    return [
        replay(policy=policy, batch=batch, instances=count, **given)
        for policy, batch, count in combinations(parse_policies(policies), batches, instances)
    ]


def test_durations_and_costs_are_read() -> None:
    assert [parse_duration(text) for text in ("5ms", "200us", "1.5s")] == pytest.approx([0.005, 0.0002, 1.5])
    assert parse_cost("5ms, 0.2ms") == pytest.approx((0.005, 0.0002))
    assert parse_cost("0ms,4ms") == pytest.approx((0.0, 0.004))


def test_policies_are_read_with_their_delays() -> None:
    found = parse_policies("adaptive, fixed:5ms,fixed,none,adaptive:0ms,fixed:5ms")
    assert [policy.text for policy in found] == ["adaptive", "fixed:5ms", "fixed", "none", "adaptive:0ms"]
    assert found[1].make().explain() == {"policy": "fixed", "max_hold_s": 0.005}
    assert found[1].make() is not found[1].make(), "a policy learns"


def test_padding_to_sizes_costs_what_the_padded_batches_take() -> None:
    (plain,), (padded,) = results(batches=[8]), results(batches=[8], sizes=(1, 8))
    assert plain.sizes == ()
    assert padded.sizes == (1, 8)
    assert padded.busy > plain.busy
    assert results(batches=[6], sizes="auto")[0].sizes == (1, 2, 4, 6)


def test_each_combination_runs_once_and_the_policy_none_ignores_the_batch_size() -> None:
    found = results(policies="adaptive,none", batches=[8, 64], instances=[1, 2])
    each = [("adaptive", 8), ("adaptive", 64), ("none", 1)]
    assert [(o.instances, o.policy, o.batch) for o in found] == [(n, *setting) for n in (1, 2) for setting in each]


def test_batching_keeps_up_with_a_rate_that_single_requests_cannot() -> None:
    batched, single = results(policies="adaptive,none", slo=parse_slo("p99<=50ms"))
    assert batched.offered == single.offered == pytest.approx(500, rel=0.15)
    assert batched.keeps_up
    assert batched.met is True
    assert batched.throughput == pytest.approx(batched.offered, rel=0.05)
    assert batched.goodput == pytest.approx(batched.offered, rel=0.05)
    assert not single.keeps_up
    assert single.met is False
    assert single.throughput == pytest.approx(1 / 0.0052, rel=0.02)
    assert single.capacity == pytest.approx(1 / 0.0052)
    assert single.busy == pytest.approx(1, abs=0.01)


def test_a_lone_request_takes_a_batch_of_one_plus_the_handover() -> None:
    arrivals = [n * 0.1 for n in range(200)]
    found = results(arrivals=arrivals, handover_s=0.002)[0]
    assert found.latency.p50_s == pytest.approx(0.005 + 0.0002 + 0.002)
    assert found.mean_batch == 1


def test_throughput_counts_requests_and_a_request_larger_than_a_batch_is_answered_whole() -> None:
    arrivals = [n * 0.2 for n in range(200)]
    found = results(arrivals=arrivals, rows=[32] * 100 + [160] * 100)[0]
    assert found.latency.max_s == pytest.approx(3 * 0.005 + 0.0002 * 160), "three batches, one after the other"
    assert found.latency.mean_s is not None
    assert found.throughput == pytest.approx(5, rel=0.05), "of requests, not of rows"
    mixed = results(rate=100.0, rows=random.Random(1).choices([1, 7, 200], k=1500), instances=[8])[0]
    assert mixed.keeps_up


def test_the_same_seed_gives_the_same_result() -> None:
    jittery = ServiceTime(0.005, 0.0002)
    once, again, other = (results(service=jittery, seed=seed) for seed in (1, 1, 2))
    assert once == again != other


def test_the_best_meets_the_slo_with_the_fewest_instances() -> None:
    slo = parse_slo("p99<=25ms")
    found = results(rate=2000.0, batches=[1, 64], instances=[1, 2, 3], slo=slo)
    first = best(found)
    assert first is not None
    assert first.met
    assert first.instances == 1
    assert best(results(rate=2000.0, batches=[1], slo=slo)) is None


def test_an_slo_without_a_p99_needs_no_p99() -> None:
    found = results(arrivals=[n * 0.1 for n in range(40)], instances=[2, 1], slo=parse_slo("p50<=50ms"))
    assert [one.latency.p99_s for one in found] == [None, None]
    assert best(found) is found[1]


def test_without_an_slo_the_best_keeps_up_with_the_lowest_p99() -> None:
    found = results(rate=2000.0, batches=[1, 64], instances=[1, 4])
    first = best(found)
    assert first is not None
    assert first.instances == 4
    assert first.latency.p99_s == min(o.latency.p99_s for o in found if o.keeps_up and o.latency.p99_s is not None)


def test_too_few_requests_give_no_verdict() -> None:
    found = results(arrivals=[0.0, 0.1], slo=parse_slo("p99<=1s"))
    assert found[0].met is None
    assert best(found) is None
    assert best(results(arrivals=[0.0, 0.1, 0.2])) is None
    assert results(arrivals=[0.0])[0].offered == 0
