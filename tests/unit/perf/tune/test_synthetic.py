"""Synthetic machines behave as their parameters say, so a search can be compared with the truth."""

from __future__ import annotations

import pytest

from penstock.errors import LoadFailed
from penstock.perf.bench.measurement import parse_slo
from penstock.perf.tune.space import parse_settings
from support.synthetic import SyntheticMachine, SyntheticSystem, drawn

SLO = parse_slo("p99<=50ms")
EXACT = SyntheticMachine(a=0.004, b=0.001, jitter=0.0, tail=0.0)
ONE = parse_settings("batch=8,instances=1")


def test_instances_slow_each_other_down_by_the_scalability_law() -> None:
    machine = SyntheticMachine(a=0.004, b=0.001, sigma=0.1, kappa=0.01, factors={"fp16": (1.0, 0.5)})
    assert machine.service(ONE).t(8) == pytest.approx(0.012)
    four = machine.service(ONE.put(instances=4))
    assert four.t(8) == pytest.approx(0.012 * (1 + 0.3 + 0.12))
    assert machine.service(ONE.put(precision="fp16")).t(8) == pytest.approx(0.004 + 0.5 * 0.008)


def test_saturation_is_the_capacity_of_full_batches() -> None:
    bench = SyntheticSystem(EXACT, SLO)
    assert bench.saturate(ONE, 2.0, 1).throughput == pytest.approx(8 / 0.012, rel=0.05)
    assert bench.spent_s == pytest.approx(2.0 / 0.85)


def test_a_measurement_records_its_load_and_cost() -> None:
    bench = SyntheticSystem(EXACT, SLO)
    found = bench.measure(ONE, 300, 2.0, 1)
    assert found.rate == 300
    assert found.throughput == pytest.approx(300, rel=0.15)
    assert found.run.latency.p99_s is not None
    assert found.run.latency.p99_high_s is not None
    assert 0.005 < (found.run.latency.p50_s or 0) < found.run.latency.p99_s <= found.run.latency.p99_high_s < 0.05
    assert found.cost_s == pytest.approx(2.0 / 0.85)
    assert found == bench.measure(ONE, 300, 2.0, 1), "same seed, same arrivals"
    assert found != bench.measure(ONE, 300, 2.0, 2)
    assert bench.measure(ONE, 20, 2.0, 1).run.latency.p99_s is None, "too few samples"


def test_the_curve_describes_one_instance_alone() -> None:
    machine = SyntheticMachine(a=0.004, b=0.001, sigma=0.5, memory_bytes=100, row_bytes=1, limit_bytes=200)
    curve = SyntheticSystem(machine, SLO).curve(parse_settings("precision=fp32"))
    assert curve is not None
    assert curve.seconds(4) == pytest.approx(0.008)
    assert (curve.memory_bytes, curve.limit_bytes) == (132, 200)
    assert SyntheticSystem(machine, SLO, has_curve=False).curve(ONE) is None


def test_settings_that_exceed_memory_do_not_load() -> None:
    bench = SyntheticSystem(SyntheticMachine(a=0.004, b=0.001, memory_bytes=100, row_bytes=1, limit_bytes=200), SLO)
    bench.prepare(ONE)
    with pytest.raises(LoadFailed, match="needs 216 bytes, the machine has 200"):
        bench.prepare(ONE.put(instances=2))


def test_the_true_rate_is_the_largest_that_keeps_the_slo() -> None:
    bench = SyntheticSystem(EXACT, SLO)
    rate = bench.true_rate(ONE, 400, 2_000)
    assert bench.true_p99_s(ONE, rate, 2_000) <= 0.05 < bench.true_p99_s(ONE, rate * 1.02, 2_000)
    assert rate == pytest.approx(bench.true_rate(ONE, 1_000, 2_000), rel=0.02)
    assert rate < 8 / 0.012
    assert SyntheticSystem(EXACT, parse_slo("p99<=1ms")).true_rate(ONE, 400, 2_000) == 0.0


def test_a_random_machine_depends_on_its_seed_alone() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    for seed in range(20):
        machine, slo = drawn(seed)
        assert slo.latency_s is not None
        assert slo.latency_s > machine.a + machine.b
