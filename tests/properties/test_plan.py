"""More instances are never worse, a looser SLO never costs more, and spare instances hold what they promise."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from penstock.perf.bench.measurement import parse_slo
from penstock.perf.bench.workload import parse_arrival, times
from penstock.perf.simulate.costs import CostCurve
from penstock.perf.simulate.planner import Planner, PlanOptions, tail
from penstock.perf.simulate.simulator import OpenLoop

REQUESTS = 1000
BATCHES = 40  # full batches, one after the other: a shorter simulation is mostly beginning and end
WORSE = 1.1  # a p99 of so few requests has noise: instances draw other run times
UNSURE = 1  # an instance more or less by the same noise


class Machine(Struct, frozen=True):
    """Batches of n rows take a + b*n seconds; the arrivals need `share` instances with full batches of 16."""

    cost: tuple[float, float]
    kind: str
    share: float
    rows: tuple[int, ...]
    seed: int

    @property
    def curve(self) -> CostCurve:
        a, b = self.cost
        return CostCurve(points=((1, a + b), (2, a + 2 * b)), source="")

    @property
    def load(self) -> OpenLoop:
        mean = sum(self.rows) / len(self.rows) if self.rows else 1
        rate = self.share * 16 / self.curve.seconds(16) / mean
        seconds = max(REQUESTS / rate, BATCHES * self.curve.seconds(16))
        arrivals = times(parse_arrival(self.kind), rate, seconds, self.seed)
        return OpenLoop(arrivals, [self.rows[n % 3] for n in range(len(arrivals))] if self.rows else ())

    def planner(self, times_full: float, **more: int) -> Planner:
        """A planner for an SLO of so many times a full batch."""
        slo = parse_slo(f"p95<={times_full * self.curve.seconds(16) * 1e3:.4f}ms")
        return Planner(self.load, self.curve, PlanOptions(slo=slo, batches=(4, 16), price=1.0, **{"most": 40, **more}))


machines = st.builds(
    Machine,
    cost=st.sampled_from([(0.005, 0.0002), (0.02, 0.002), (0.0, 0.01), (0.05, 0.0005)]),
    kind=st.sampled_from(["poisson", "constant", "gamma:2"]),
    share=st.floats(0.5, 8),
    rows=st.sampled_from([(), (1, 3, 8)]),
    seed=st.integers(0, 9),
)


def test_no_plan_has_more_instances_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Planner, "_better", lambda self, best, batch: (998, batch))
    monkeypatch.setattr(Planner, "judged", lambda self, n, batch: asked.append(n) or SimpleNamespace(met=False))
    monkeypatch.setattr(Planner, "_nearest", lambda self: (1000, 4))
    monkeypatch.setattr(Planner, "_finish", lambda self, found, met: found)
    planner = Machine((0.005, 0.0002), "constant", 1.0, (), 0).planner(3, most=1000)
    planner.plan()
    assert asked == [998, 1000]


@settings(max_examples=25, deadline=None)
@given(machines, st.integers(1, 12), st.integers(1, 4))
@example(Machine((0.005, 0.0002), "gamma:2", 1.75, (1, 3, 8), 3), 2, 1)  # many requests arrive just before the end
def test_more_instances_never_have_a_longer_tail(machine: Machine, instances: int, more: int) -> None:
    found = machine.planner(3)
    fewer, many = (tail(found.at(n, 16), found.options.slo) for n in (instances, instances + more))
    hold_s = 2 * machine.cost[0] / instances  # the longest that the policy waits to spread the starts of instances
    assert many <= fewer * WORSE + hold_s


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(machines, st.floats(1.5, 4), st.floats(1, 2))
def test_a_looser_slo_never_costs_more_and_each_instance_is_needed(
    machine: Machine, times_lone: float, looser: float
) -> None:
    one = machine.planner(times_lone)
    tight, loose = one.plan(), machine.planner(times_lone * looser).plan()
    if not tight.met:
        assert not tight.chosen.met
        return
    assert loose.met
    assert loose.instances <= tight.instances + UNSURE
    assert tight.chosen.met
    assert tight.cost.hour == tight.instances
    assert tight.limit is not None
    assert tight.limit.rate >= tight.chosen.offered
    assert tight.needed == 1 or not one.at(tight.needed - 1, tight.batch).met or tight.needed == one.floor(tight.batch)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(machines, st.integers(1, 3))
def test_the_slo_holds_while_the_spare_instances_are_down(machine: Machine, failures: int) -> None:
    one = machine.planner(3, failures=failures)
    plan = one.plan()
    assert plan.met
    assert plan.instances == plan.needed + failures
    assert plan.degraded is not None
    assert plan.degraded.instances == plan.instances - failures
    assert plan.degraded.met, "with the failures down"
    assert plan.chosen.met
    assert one.plan() == plan, "the same question has the same answer"
    assert machine.planner(3).plan().instances == pytest.approx(plan.needed, abs=UNSURE)
