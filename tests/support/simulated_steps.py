"""Continuous batching in virtual time: the scheduler that serves, and the worker's states of a step model."""

from collections.abc import Sequence

from msgspec import Struct, structs

from penstock.config.schema import BatchingConfig
from penstock.core.batching.entry import INF, Dispatch, Entry, Outcome
from penstock.core.engine.rules import policy_of
from penstock.core.worker.steps import ActiveSteps, StepLimits, StepOutcome
from penstock.perf.simulate.simulator import (
    UNBOUNDED,
    WARM,
    OpenLoop,
    ServiceTime,
    Simulation,
    SimulationSettings,
    unbounded,
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
    simulation = StepSimulation(service, settings, max_active, load.steps)
    simulation.run(load)
    return simulation.step_result(simulation.last_arrival_s)


class StepSimulation(Simulation):
    """One simulation. A request is handed over to its worker for half of `handover_s`, and joins its next step."""

    def __init__(
        self, service: ServiceTime, settings: SimulationSettings, max_active: int, steps: Sequence[int]
    ) -> None:
        alone = structs.replace(settings, max_batch_size=1, depth=1)
        super().__init__(service, unbounded(policy_of(BatchingConfig(policy="none")), alone), settings)
        self.steps = steps
        self.models = [_CountedSteps() for _ in range(settings.slots)]
        self.workers = [ActiveSteps(model, StepLimits(max_active, UNBOUNDED)) for model in self.models]
        self.stepping = set[int]()  # slots
        self.sent: dict[int, tuple[int, Entry]] = {}  # batch -> its slot and request
        self.first: dict[int, tuple[float, float]] = {}  # request -> (arrival, first part)
        self.parts: list[float] = []  # times of all parts
        for slot in range(settings.slots):
            self.scheduler.slot_up(slot, 0.0, max_active)

    def start(self, batch: Dispatch, ready: float) -> float:
        """The time at which the worker has the request."""
        self.sent[batch.batch_id] = (batch.slot, batch.entries[0])
        return ready

    def answer(self, batch: int, entries: list[Entry], now: float) -> None:
        """A request has reached its worker."""
        slot = self.sent[batch][0]
        self.workers[slot].add(batch, self.steps[entries[0].id - 1])
        if slot not in self.stepping:
            self.stepping.add(slot)
            self.at(now, self._step, slot)

    def _step(self, slot: int, now: float) -> None:
        outcomes = self.workers[slot].advance(now)
        active = self.models[slot].active
        seconds = self.service.draw(active, self.rng)
        self.batches.append((now, active, seconds))
        self.at(now + seconds, self._stepped, slot, outcomes)

    def _stepped(self, slot: int, outcomes: list[StepOutcome], now: float) -> None:
        for batch, part, done in outcomes:
            assert not isinstance(part, BaseException)
            entry = self.sent[batch][1]
            self.parts.append(now)
            self.first.setdefault(entry.id, (entry.arrival_s, now))
            if done:
                del self.sent[batch]
                self.scheduler.complete(batch, Outcome(), now)
                self.answered(entry, 0, now)
        if self.workers[slot].idle:
            self.stepping.remove(slot)
        else:
            self.at(now, self._step, slot)

    def step_result(self, end: float) -> StepResult:
        """The figures of the steady part until `end`."""
        found, begin = self.result(end), WARM * end
        return StepResult(
            latencies_s=found.latencies_s,
            first_parts_s=sorted(t - arrival for arrival, t in self.first.values() if begin <= arrival <= end),
            parts_per_s=sum(begin <= t <= end for t in self.parts) / ((end - begin) or INF),
            mean_active=found.mean_batch,
            busy=found.busy,
        )


class _CountedSteps:
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
