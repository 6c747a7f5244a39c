"""Simulates a step model: the scheduler that serves and the worker's own states, driven on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from penstock.config.schema import BatchingConfig
from penstock.core.batching.entry import Dispatch, Entry, Outcome
from penstock.core.batching.scheduler import Scheduler
from penstock.core.engine.rules import policy_of
from penstock.core.worker.steps import ActiveSteps, StepLimits, StepOutcome
from penstock.perf.simulate.simulator import (
    UNBOUNDED,
    WARM,
    OpenLoop,
    ServiceTime,
    Simulation,
    SimulationSettings,
)
from penstock.types import Step


class StepLoad(OpenLoop, frozen=True):
    """Requests at fixed times; `steps` has the number of steps of each, every one of which gives a part."""

    steps: Sequence[int] = ()


class StepResult(Struct, frozen=True, kw_only=True):
    """The steady part of a simulation: sorted latencies and times to the first part, parts per second, the mean number
    of active items in a step, and the share of the slots' time in which they step."""

    latencies_s: Sequence[float]
    first_parts_s: Sequence[float]
    parts_per_s: float
    mean_active: float
    busy: float


def simulate_steps(service: ServiceTime, max_active: int, load: StepLoad, settings: SimulationSettings) -> StepResult:
    """The result of continuous batching: a step of n active items takes `service` of n rows."""
    scheduler = Scheduler(
        policy_of(BatchingConfig(policy="none")),
        max_batch_size=1,
        max_queue=UNBOUNDED,
        max_queue_bytes=UNBOUNDED,
        horizon_s=settings.slo_s or 30.0,
    )
    simulation = StepSimulation(service, scheduler, settings, max_active, load.steps)
    simulation.run(load)
    return simulation.step_result(simulation.last_arrival_s)


class StepSimulation(Simulation):
    """One simulation. A request is handed over to its worker for half of `handover_s`, and joins its next step."""

    def __init__(
        self,
        service: ServiceTime,
        scheduler: Scheduler,
        settings: SimulationSettings,
        max_active: int,
        steps: Sequence[int],
    ) -> None:
        super().__init__(service, scheduler, settings)
        self.steps = steps
        self.models = [CountedSteps() for _ in range(settings.slots)]
        self.workers = [ActiveSteps(model, StepLimits(max_active, UNBOUNDED)) for model in self.models]
        self.stepping: dict[int, list[StepOutcome] | None] = {}  # slot -> outcomes of the running step; None: it begins
        self.sent: dict[int, tuple[int, Entry]] = {}  # batch -> its slot and request
        self.first: dict[int, tuple[float, float]] = {}  # request -> (arrival, first part)
        self.parts: list[float] = []  # times of all parts
        for slot in range(settings.slots):
            scheduler.slot_up(slot, 0.0, max_active)

    def start(self, batch: Dispatch, ready: float) -> float:
        """The time at which the worker has the request."""
        self.sent[batch.batch_id] = (batch.slot, batch.entries[0])
        return ready

    def answer(self, batch: int, entries: list[Entry], now: float) -> None:
        """A request has reached its worker."""
        slot = self.sent[batch][0]
        self.workers[slot].add(batch, self.steps[entries[0].id - 1])
        if slot not in self.stepping:
            self._begin(slot, now)

    def client_event(self, number: int, now: float) -> None:
        """A step begins or ends on the slot `number`."""
        outcomes = self.stepping.pop(number)
        if outcomes is None:
            found = self.workers[number].advance(now)
            active = self.models[number].active
            seconds = self.service.draw(active, self.rng)
            self.batches.append((now, active, seconds))
            self.stepping[number] = found
            self.schedule(now + seconds, number)
            return
        for key, part, done in outcomes:
            self._part(key, part, done, now)
        if not self.workers[number].idle:
            self._begin(number, now)

    def _begin(self, slot: int, now: float) -> None:
        self.stepping[slot] = None
        self.schedule(now, slot)

    def _part(self, batch: int, part: object, done: bool, now: float) -> None:
        assert not isinstance(part, BaseException)
        entry = self.sent[batch][1]
        self.parts.append(now)
        self.first.setdefault(entry.id, (entry.arrival_s, now))
        if done:
            del self.sent[batch]
            self.scheduler.complete(batch, Outcome(), now)
            self.answered(entry, 0, now)

    def step_result(self, end: float) -> StepResult:
        """The figures of the steady part until `end`."""
        begin = WARM * end
        span = (end - begin) or float("inf")
        steps = [(active, seconds) for t, active, seconds in self.batches if begin <= t <= end]
        return StepResult(
            latencies_s=sorted(t - arrival for arrival, t in self.done if begin <= arrival <= end),
            first_parts_s=sorted(t - arrival for arrival, t in self.first.values() if begin <= arrival <= end),
            parts_per_s=sum(begin <= t <= end for t in self.parts) / span,
            mean_active=sum(active for active, _ in steps) / max(1, len(steps)),
            busy=min(1.0, sum(seconds for _, seconds in steps) / span / self.settings.slots),
        )


class CountedSteps:
    """A step model without work: an item is the number of its steps."""

    def __init__(self) -> None:
        self.active = 0  # states of the last step

    def admit(self, item: int) -> list[int]:
        return [item]

    def step(self, states: list[list[int]]) -> list[Step]:
        self.active = len(states)
        for state in states:
            state[0] -= 1
        return [Step(True, done=state[0] <= 0) for state in states]
