"""More instances are never worse, a looser SLO never costs more, and spare instances hold what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.bench.arrivals import parse_arrival, times
from penstock.perf.bench.slo import parse_slo
from penstock.perf.plan.costs import CostCurve
from penstock.perf.plan.planner import Planner, PlanOptions, tail
from penstock.perf.simulate.simulator import OpenLoop

REQUESTS = 1000
WORSE = 1.1  # a p99 of so few requests has noise: instances draw other run times
UNSURE = 1  # an instance more or less by the same noise


@st.composite
def machines(draw: st.DrawFn) -> tuple[CostCurve, OpenLoop]:
    """A machine, and arrivals that need 0.5 to 12 of its instances."""
    a, b = draw(st.sampled_from([(0.005, 0.0002), (0.02, 0.002), (0.0, 0.01), (0.05, 0.0005)]))
    curve = CostCurve(points=((1, a + b), (2, a + 2 * b)), source="")
    kind = draw(st.sampled_from(["poisson", "constant", "gamma:2"]))
    rate = draw(st.floats(0.5, 12)) * 16 / curve.seconds(16)
    rows = draw(st.sampled_from([(), (1, 3, 8)]))
    seed = draw(st.integers(0, 9))
    arrivals = times(parse_arrival(kind), rate / (sum(rows) / 3 if rows else 1), REQUESTS / rate, seed)
    return curve, OpenLoop(arrivals, [rows[n % 3] for n in range(len(arrivals))] if rows else ())


def planner(machine: tuple[CostCurve, OpenLoop], times_lone: float, **more: int) -> Planner:
    curve, load = machine
    slo = parse_slo(f"p95<={times_lone * curve.seconds(16) * 1e3:.4f}ms")
    return Planner(load, curve, PlanOptions(slo=slo, batches=(4, 16), most=40, price=1.0, **more))


@settings(max_examples=25, deadline=None)
@given(machines(), st.integers(1, 12), st.integers(1, 4))
def test_more_instances_never_have_a_longer_tail(
    machine: tuple[CostCurve, OpenLoop], instances: int, more: int
) -> None:
    found = planner(machine, 3)
    fewer, many = (tail(found.at(n, 16), found.options.slo) for n in (instances, instances + more))
    assert many <= fewer * WORSE


@settings(max_examples=8, deadline=None)
@given(machines(), st.floats(1.5, 4), st.floats(1, 2))
def test_a_looser_slo_never_costs_more_and_each_instance_is_needed(
    machine: tuple[CostCurve, OpenLoop], times_lone: float, looser: float
) -> None:
    one = planner(machine, times_lone)
    tight, loose = one.plan(), planner(machine, times_lone * looser).plan()
    if not tight.met:
        assert not tight.chosen.met
        return
    assert loose.met
    assert loose.instances <= tight.instances + UNSURE
    assert tight.chosen.met
    assert tight.price_hour == tight.instances
    assert tight.sustains >= tight.chosen.offered
    assert tight.needed == 1 or not one.at(tight.needed - 1, tight.batch).met or tight.needed == floor(one, tight.batch)


def floor(one: Planner, batch: int) -> int:
    """The fewest instances that a plan may have: they must not be full in the mean."""
    return one._floor(batch)


@settings(max_examples=8, deadline=None)
@given(machines(), st.integers(1, 3))
def test_the_slo_holds_while_the_spare_instances_are_down(machine: tuple[CostCurve, OpenLoop], failures: int) -> None:
    one = planner(machine, 3, failures=failures)
    plan = one.plan()
    assert plan.met
    assert plan.instances == plan.needed + failures
    assert plan.degraded is not None
    assert plan.degraded.instances == plan.instances - failures
    assert plan.degraded.met, "with the failures down"
    assert plan.chosen.met
    assert one.plan() == plan, "the same question has the same answer"
    assert planner(machine, 3).plan().instances == pytest.approx(plan.needed, abs=UNSURE)
