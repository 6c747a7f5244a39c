"""What a change of a running model brings: the scheduler that serves, simulated with the learned cost at its load."""

# Two questions, two loads. What do more requests bring? Callers that keep as many rows in flight as now (closed loop).
# What becomes of the latency? Requests that come as often as now, whatever the answers (open loop, Poisson). Both
# assume that processors, or the memory of the device, are free for another instance. A simulation has a bounded number
# of requests, so that a page or the doctor waits for less than a second.

from __future__ import annotations

import random
from itertools import accumulate
from typing import Final

from penstock.config.schema import BatchingConfig
from penstock.core.engine.rules import policy_of
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, Simulation, SimulationSettings, primed, simulate
from penstock.serving.observe.causes import Effect, Outlook, Scenario, Setup

REQUESTS: Final = 2000  # of an open loop: 20 of them are slower than the p99
MOST: Final = 20_000  # requests of a closed loop, some 0.2 s
ROUNDS: Final = 200  # batches of each instance in a closed loop: a choice
KEEPS_UP: Final = 0.97  # of full batches; above, the queue of a simulation grows until it ends
PAUSE_S: Final = 0.0003  # between an answer and the caller's next request
HANDOVER_S: Final = 0.0002


class _ClosedLoop(Simulation):
    """Each answer is followed by the caller's next request."""

    def answered(self, entry: object, place: int, now: float) -> None:
        super().answered(entry, place, now)  # type: ignore[arg-type]
        self.at(now + PAUSE_S, self._again)

    def _again(self, now: float) -> None:
        self.arrive(now)


def effect(scenario: Scenario) -> Effect:
    """The effect of a change. Takes up to a second of a core."""
    now, then = (_rate(setup, scenario) for setup in (scenario.now, scenario.then))
    return Effect(then / now if now else 1.0, _outlook(scenario.now, scenario), _outlook(scenario.then, scenario))


def _parts(setup: Setup) -> tuple[ServiceTime, SimulationSettings]:
    keys = SimulationSettings(
        slots=setup.instances, depth=2, max_batch_size=setup.max_batch_size, handover_s=HANDOVER_S
    )
    return ServiceTime(setup.fixed_s, setup.row_s), keys


def _rate(setup: Setup, scenario: Scenario) -> float:
    """Rows a second while the callers keep as many in flight as now."""
    service, keys = _parts(setup)
    policy = policy_of(BatchingConfig(max_batch_size=setup.max_batch_size))
    most = 4 * max(each.instances * each.max_batch_size for each in (scenario.now, scenario.then))
    callers = max(1, min(scenario.in_flight, most, MOST // 4))  # more would only wait longer
    simulation = _ClosedLoop(service, primed(service, policy, keys), keys)
    rows = min(setup.max_batch_size, max(1, callers // setup.instances))
    horizon_s = min(ROUNDS * service.t(rows), MOST / service.capacity(setup.instances, rows))
    end = simulation.run(OpenLoop([horizon_s / 1000 * i / callers for i in range(callers)]), horizon_s)
    return simulation.result(end).throughput


def _outlook(setup: Setup, scenario: Scenario) -> Outlook:
    service, keys = _parts(setup)
    capacity = service.capacity(setup.instances, setup.max_batch_size)
    if not 0 < scenario.rate < KEEPS_UP * capacity:
        return Outlook(capacity, None, 1.0 if scenario.rate else 0.0)
    rng, policy = random.Random(1), policy_of(BatchingConfig(max_batch_size=setup.max_batch_size))
    arrivals = list(accumulate(rng.expovariate(scenario.rate) for _ in range(REQUESTS)))
    found = simulate(service, policy, OpenLoop(arrivals), keys)
    latencies = found.latencies_s
    return Outlook(capacity, latencies[int(0.99 * len(latencies))] if latencies else None, found.busy)
