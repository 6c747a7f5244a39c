"""Simulates a model whose instances follow its load: the serving scheduler and autoscaler in virtual time."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from penstock.config.schema import BatchingConfig
from penstock.core.batching.autoscale import AutoscaleLimits, Autoscaler, LoadReading
from penstock.core.batching.entry import INF
from penstock.core.batching.scheduler import Scheduler
from penstock.core.engine.rules import policy_of
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, Simulation, SimulationSettings, primed

_TICK: Final = -1  # events of a slot's start are below it
_STEP_S: Final = 0.5  # of a clairvoyant's plan


class ScalingPolicy(Protocol):
    """Decides how many instances there should be, as `Autoscaler` does."""

    def decide(self, reading: LoadReading, now: float) -> int: ...
    def started(self, seconds: float) -> None: ...


class ScalingResult(Struct, frozen=True, kw_only=True):
    """A simulation's sorted latencies, the seconds of all instances with their starts, and each (time, number)."""

    latencies_s: Sequence[float]
    worker_s: float
    numbers: Sequence[tuple[float, int]]

    def late(self, slo_s: float) -> float:
        """The share of requests that took longer than `slo_s`."""
        latencies = self.latencies_s
        return 1 - bisect_left(latencies, slo_s) / len(latencies) if latencies else 0.0


def simulate_scaling(
    service: ServiceTime,
    load: OpenLoop,
    settings: SimulationSettings,
    limits: AutoscaleLimits,
    *,
    start_s: float,
    policy: ScalingPolicy | None = None,
) -> ScalingResult:
    """The result of scaling by `policy`, an Autoscaler by default. An instance is up `start_s` after the decision."""
    scheduler = primed(service, policy_of(BatchingConfig()), settings)
    return ScalingSimulation(service, scheduler, settings, limits, policy or Autoscaler(limits), start_s).scale(load)


class ScalingSimulation(Simulation):
    """One simulation. `settings.slots` instances are up at its beginning."""

    def __init__(
        self,
        service: ServiceTime,
        scheduler: Scheduler,
        settings: SimulationSettings,
        limits: AutoscaleLimits,
        policy: ScalingPolicy,
        start_s: float,
    ) -> None:
        super().__init__(service, scheduler, settings)
        self.limits, self.policy, self.start_s = limits, policy, start_s
        self.present = dict.fromkeys(range(settings.slots), 0.0)  # slot -> decision to start it
        self.slots = itertools.count(settings.slots)
        self.worker_s = 0.0  # of instances that ended
        self.numbers = [(0.0, settings.slots)]

    def scale(self, load: OpenLoop) -> ScalingResult:
        """Handles the load and counts what the instances cost until its last answer."""
        self.schedule(0.0, _TICK)
        end = self.run(load)
        worker_s = self.worker_s + sum(end - since for since in self.present.values())
        latencies = sorted(answer - arrival for arrival, answer in self.done)
        return ScalingResult(latencies_s=latencies, worker_s=worker_s, numbers=self.numbers)

    def over(self, arrival: float) -> bool:
        return arrival == INF and not self.arrived

    def client_event(self, number: int, now: float) -> None:
        if number == _TICK:
            self._decide(now)
            self.schedule(now + self.limits.tick_s, _TICK)
        elif (slot := _TICK - 1 - number) in self.present:
            self.scheduler.slot_up(slot, now)
            self.policy.started(now - self.present[slot])

    def _decide(self, now: float) -> None:
        scheduler, present, rows = self.scheduler, self.present, self.settings.max_batch_size
        reading = LoadReading(
            self.requests, scheduler.queued_rows, scheduler.running_rows, len(present), scheduler.up,
            rows, scheduler.seconds(rows),
        )  # fmt: skip
        number = self.policy.decide(reading, now)
        if number == len(present):
            return
        for _ in range(number - len(present)):
            slot = next(self.slots)
            present[slot] = now
            self.schedule(now + self.start_s, _TICK - 1 - slot)
        for slot in sorted(present)[number:]:  # the youngest; one that has not started costs nothing more
            self.worker_s += max(now, self.free_s.get(slot, now)) - present.pop(slot)
            scheduler.slot_retired(slot, now)
        self.numbers.append((now, number))


class Clairvoyant:
    """A scaling policy that knows the arrivals: enough instances at every time, each started just in time."""

    def __init__(self, arrivals: Sequence[float], capacity: float, limits: AutoscaleLimits, start_s: float) -> None:
        """`capacity`: rows per second of one instance."""
        self.start_s, slack = start_s, limits.slo_s or limits.wait_s
        count = math.ceil((arrivals[-1] if arrivals else 0.0) / _STEP_S) + 1
        self.plan = [limits.fewest] * count
        for k in range(count):  # requests of a step may be answered until the SLO has passed
            rows = bisect_left(arrivals, (k + 1) * _STEP_S) - bisect_left(arrivals, k * _STEP_S)
            need = min(limits.most, math.ceil(rows / ((_STEP_S + slack / 2) * capacity)))
            mean = bisect_left(arrivals, (k + 4) * _STEP_S) - bisect_left(arrivals, (k - 3) * _STEP_S)
            need = max(need, min(limits.most, math.ceil(mean / (7 * _STEP_S * capacity))))
            self.plan[k] = max(need, limits.fewest)

    def decide(self, reading: LoadReading, now: float) -> int:
        """The plan's number when an instance that starts now is up; those that are needed until then stay."""
        first, last = int(now / _STEP_S), int((now + self.start_s) / _STEP_S) + 1
        return max(self.plan[first : last + 1], default=reading.present)

    def started(self, seconds: float) -> None: ...


def least_worker_s(arrivals: Sequence[float], capacity: float, limits: AutoscaleLimits) -> float:
    """A lower bound of the seconds of all instances that answer `arrivals` within the SLO, of whatever policy.

    `limits.fewest` instances are always paid. What they cannot answer in time at `capacity` rows/s each, others must,
    at best at the same rate and without an idle moment.
    """
    slack = limits.slo_s or limits.wait_s
    base, steps = limits.fewest * capacity * _STEP_S, math.ceil(slack / _STEP_S) + 1
    extra, queue = 0.0, [0.0] * steps  # rows by the step of their deadline
    count = math.ceil((arrivals[-1] if arrivals else 0.0) / _STEP_S) + 1
    for k in range(count):
        extra += queue.pop(0)
        queue.append(float(bisect_left(arrivals, (k + 1) * _STEP_S) - bisect_left(arrivals, k * _STEP_S)))
        room = base
        for place, rows in enumerate(queue):
            done = min(rows, room)
            queue[place], room = rows - done, room - done
    end = arrivals[-1] if arrivals else 0.0
    return limits.fewest * end + (extra + sum(queue)) / capacity
