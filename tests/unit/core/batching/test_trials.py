"""The trials of a longer hold, under simulated loads: where they gain, what they cost, and when they stop."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import SlotBatch, View
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.policies.trials import HoldTrials
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime
from support.simulator import ClosedLoop, FrontEnd, SimulationSettings, ThinkTime, poisson, simulate

ACC = ServiceTime(0.005, 0.0002)
SHARED = ServiceTime(0.004, 0.0002)
HARM = 0.03
FIRST_HARM = 0.2  # in the first 90 windows, with a cap of 0.1 s

Load = OpenLoop | ClosedLoop


class Untried(Adaptive):
    """The adaptive policy without trials."""

    def on_complete(self, batch: SlotBatch, seconds: float, view: View, now: float) -> None:
        super().on_complete(batch, seconds, view, now)
        self._trials = HoldTrials()


def shared(clients: int, horizon_s: float = 4.0, **change: Any) -> ClosedLoop:
    """Clients behind a web server that shares the cores with the model."""
    return ClosedLoop(clients, horizon_s, front_end=FrontEnd(0.00092, 0.7), **change)


def arrivals(share: float, slots: int, seed: int, service: ServiceTime = ACC, rows: int = 64) -> OpenLoop:
    return OpenLoop(poisson(share * service.capacity(slots, rows), 6000, random.Random(2 + seed)))


def explained(policy: Adaptive) -> Any:
    return policy.explain()


# ---- where they gain


@pytest.mark.parametrize(
    ("policy", "gain", "hold_s"),
    [(Adaptive(), 1.18, (0.005, 2 * SHARED.t(64) * 1.1)), (Adaptive(0.1), 1.25, (0.015, 0.1))],
    ids=["no cap", "cap of 0.1 s"],
)
def test_fuller_batches_where_the_web_server_shares_the_cores_with_the_model(
    policy: Adaptive, gain: float, hold_s: tuple[float, float]
) -> None:
    tried, untried = (simulate(SHARED, p, shared(128)) for p in (policy, Untried()))
    best = simulate(SHARED, Fixed(0.1), shared(128))
    assert tried.throughput > gain * untried.throughput
    assert tried.throughput > 0.7 * gain * best.throughput  # with the time to find out
    assert tried.mean_s < 0.85 * untried.mean_s
    assert tried.p99_s < untried.p99_s
    assert tried.mean_batch > 2 * untried.mean_batch
    found = explained(policy)
    assert hold_s[0] <= found["longer_hold_s"] <= hold_s[1]
    assert 0.15 < found["longer_hold_gain"] < 0.5
    assert found["trials"] > found["trials_failed"] > 0
    assert found["holds_by_kind"]["trial"] > 100


def test_a_model_that_costs_nearly_nothing_is_held_where_each_batch_costs_the_web_server() -> None:
    service = ServiceTime(0.0005, 0.0)
    tried, untried = (simulate(service, p, shared(128)) for p in (Adaptive(0.1), Untried()))
    assert untried.mean_batch < 1.1
    assert tried.throughput > 1.07 * untried.throughput


@pytest.mark.parametrize("clients", [16, 32, 64])
def test_all_clients_of_a_closed_loop_share_one_batch(clients: int) -> None:
    settings = SimulationSettings(depth=2, handover_s=0.0005)
    policy = Adaptive()
    tried, untried = (simulate(ACC, p, ClosedLoop(clients, 8.0), settings) for p in (policy, Untried()))
    assert explained(policy)["longer_hold_s"] > 0
    assert tried.mean_batch > 0.98 * clients
    assert tried.p99_s < 0.7 * untried.p99_s  # nobody waits for two batches
    assert tried.mean_s < 1.01 * untried.mean_s


# ---- what they cost

SLOW, SLOWER = ThinkTime(0.0003, 0.005), ThinkTime(0.0003, 0.02)
SCENARIOS: dict[str, tuple[ServiceTime, int, Callable[[int], Load]]] = {
    "open 0.1": (ACC, 1, lambda seed: arrivals(0.1, 1, seed)),
    "open 0.3": (ACC, 1, lambda seed: arrivals(0.3, 1, seed)),
    "open 0.7": (ACC, 1, lambda seed: arrivals(0.7, 1, seed)),
    "open 0.9": (ACC, 1, lambda seed: arrivals(0.9, 1, seed)),
    "open 0.5, 2 slots": (ACC, 2, lambda seed: arrivals(0.5, 2, seed)),
    "open 0.7, 4 slots": (ACC, 4, lambda seed: arrivals(0.7, 4, seed)),
    "large set-up": (
        ServiceTime(0.03, 0.00005),
        1,
        lambda seed: arrivals(0.6, 1, seed, ServiceTime(0.03, 0.00005)),
    ),
    "closed": (ACC, 1, lambda seed: ClosedLoop(64, 1.5)),
    "closed, 2 slots": (ACC, 2, lambda seed: ClosedLoop(32, 3.0)),
    "closed, 4 slots": (ACC, 4, lambda seed: ClosedLoop(256, 1.5)),
    "slow clients": (ACC, 1, lambda seed: ClosedLoop(64, 3.0, SLOW)),
    "slower clients": (ACC, 1, lambda seed: ClosedLoop(16, 3.0, SLOWER)),
}


def harm(name: str, make: Callable[[], Adaptive]) -> float:
    """How much longer the mean latency of a scenario is with trials, as a share."""
    service, slots, load = SCENARIOS[name]

    def mean_s(make: Callable[[], Adaptive]) -> float:
        each = (SimulationSettings(slots=slots, seed=i) for i in (1, 2, 3))
        return sum(simulate(service, make(), load(one.seed), one).mean_s for one in each) / 3

    return mean_s(make) / mean_s(Untried) - 1


@pytest.mark.parametrize("name", [pytest.param("open 0.1", marks=pytest.mark.slow), *list(SCENARIOS)[1:]])
def test_the_mean_latency_is_at_most_3_percent_longer_where_nothing_can_be_gained(name: str) -> None:
    assert harm(name, Adaptive) <= HARM
    assert harm(name, lambda: Adaptive(0.1)) <= FIRST_HARM


def test_a_trial_that_costs_is_aborted_and_repeated_rarely() -> None:
    counts = []
    for horizon_s in (2.0, 4.0, 8.0, 16.0):
        policy = Adaptive()
        simulate(ACC, policy, ClosedLoop(64, horizon_s, SLOWER))
        found = explained(policy)
        assert found["longer_hold_s"] == 0 == found["longer_hold_gain"]
        assert found["trials_failed"] >= found["trials"] - 1
        counts.append(found["trials"])
    assert 1 <= counts[0] < counts[-1] <= 10  # in more than 450 windows


# ---- when there are none


@pytest.mark.parametrize(
    ("service", "load", "policy"),
    [
        (ACC, arrivals(0.02, 1, 1), Adaptive()),
        (ACC, ClosedLoop(1, 4.0), Adaptive()),
        (ACC, ClosedLoop(256, 2.0), Adaptive()),  # the batches are full
        (ServiceTime(0.0005, 0.004), ClosedLoop(32, 4.0), Adaptive()),  # they cost the same
        (SHARED, shared(128), Adaptive(0.0)),
    ],
)
def test_no_trial_at_light_load_with_nothing_to_gain_or_if_holds_are_forbidden(
    service: ServiceTime, load: Load, policy: Adaptive
) -> None:
    simulate(service, policy, load)
    found = explained(policy)
    assert found["trials"] == found["holds_by_kind"]["trial"] == 0


def test_a_cap_of_holds_limits_the_trials() -> None:
    policy = Adaptive(0.003)
    simulate(SHARED, policy, shared(128))
    assert 0 < explained(policy)["longer_hold_s"] <= 0.003


def test_a_hold_that_would_endanger_a_deadline_is_not_begun() -> None:
    policy = Adaptive()
    slo = SimulationSettings(slo_s=0.15, deadlines=True)
    result = simulate(SHARED, policy, shared(64), slo)
    assert explained(policy)["longer_hold_s"] > 0
    assert result.dropped < 0.01
    tight = Adaptive()
    result = simulate(SHARED, tight, shared(64), SimulationSettings(slo_s=0.008, deadlines=True))
    assert result.p99_s < 0.2
    assert explained(tight)["longer_hold_s"] == 0


# ---- when the load changes


@pytest.mark.parametrize(("before", "after"), [(128, 2), (128, 8), (8, 128), (2, 128)])
def test_the_hold_follows_a_change_of_the_load(before: int, after: int) -> None:
    changed = simulate(SHARED, Adaptive(), shared(before, 16.0, changed=after, change_s=2.4)).throughput
    always, untried = (simulate(SHARED, p, shared(after, 16.0)).throughput for p in (Adaptive(), Untried()))
    assert changed > 0.94 * always  # with the time to find out
    assert changed > untried * (1.15 if after == 128 else 0.97)


def test_a_client_that_remains_alone_waits_for_the_others_once() -> None:
    policy = Adaptive()
    service = ServiceTime(SHARED.a, SHARED.b, tail=0.0)
    result = simulate(service, policy, shared(128, 12.0, changed=1, change_s=1.4))  # the first 1.8 s are not counted
    assert explained(policy)["trials"] > explained(policy)["trials_failed"]
    assert result.latencies_s[-2] < 2 * SHARED.t(1)
    assert len(result.latencies_s) > 1500


def test_the_reason_of_a_batch_names_the_hold() -> None:
    reasons: set[str] = set()
    policy = Adaptive()
    select = policy.select

    def noted(view: View, now: float) -> Any:
        choice = select(view, now)
        reasons.add(getattr(choice, "reason", ""))
        return choice

    policy.select = noted  # type: ignore[method-assign]
    simulate(SHARED, policy, shared(128))
    assert {"all that waits", "trial of a hold", "longer hold"} <= reasons


def test_the_same_events_give_the_same_trials() -> None:
    runs = []
    for _ in range(2):
        policy = Adaptive()
        runs.append((simulate(SHARED, policy, shared(64, 3.0)), explained(policy)))
    assert runs[0] == runs[1]
