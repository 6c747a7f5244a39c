"""Continuous batching: the states that a step model advances together. Pure: no thread, no clock, no I/O.

An item becomes a state by `admit`. Every call of `step` advances all active states by one, until each is done. An item
that fails does so alone: a step that raises is repeated in halves until the guilty state is alone.
"""

import logging
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from penstock.errors import ENDS, BadOutput, BadRequest, DeadlineExceeded, ItemFailed, LoadFailed, out_of_memory
from penstock.types import Step

log = logging.getLogger("penstock.worker")

INF = float("inf")
RETRY_STEPS = 1000  # steps after which a limit that was learned from an out-of-memory error doubles


class StepModel(Protocol):
    """A model that advances many states together. `cost(item)` and `evict(state)` are optional; see `StepLimits`."""

    def admit(self, item: Any) -> Any:
        """The state of an item. What it raises fails this item alone."""

    def step(self, states: list[Any]) -> Sequence[Step]:
        """Advances every state by one: a `Step` for each, in the same order; an exception in its place fails the state.

        If it raises, it is called again with halves of the states: it must not have changed any by then.
        """


class StepLimits(Struct, frozen=True):
    """Bounds of a step model.

    Active items have at most `max_active` *places* in total; an item has `cost(item)` of them, by default one. An item
    has at most `max_steps` steps. With `split`, a step that raises is repeated in halves, with `split_memory` one that
    runs out of memory.
    """

    max_active: int
    max_steps: int
    split: bool = True
    split_memory: bool = True


class Whole(Struct):
    """The only part of an item, sent with its end: a response that is not a stream."""

    value: Any


class StepOutcome(NamedTuple):
    """The outcome of one step for the item `key`: a part or None, or the exception that ended it."""

    key: Any
    part: Any
    done: bool


class _Active(Struct, eq=False):
    """An item that waits or is active. `value` is released once it is admitted."""

    key: Any
    value: Any
    deadline_s: float
    cost: int = 1
    steps: int = 0
    state: Any = None


class ActiveSteps:
    """The items of one step model: those that wait for a place, in the order of arrival, and the active ones."""

    def __init__(self, model: StepModel, limits: StepLimits) -> None:
        self._model, self._limits = model, limits
        self._evict = getattr(model, "evict", None)
        self._cost = getattr(model, "cost", None)
        self._waiting: deque[_Active] = deque()
        self._active: dict[Any, _Active] = {}
        self._places = 0  # of the active items
        self._fits = limits.max_active  # states of one call, and places; less after an out-of-memory error
        self._grow_in = 0  # steps until more are tried again
        self._earliest_s = INF  # no deadline is before this
        self.stepped = 0  # items that the last step advanced

    @property
    def active(self) -> int:
        """The number of active items."""
        return len(self._active)

    @property
    def idle(self) -> bool:
        """Whether no item waits or is active."""
        return not self._active and not self._waiting

    def open_keys(self) -> list[Any]:
        """The items that wait or are active."""
        return [*self._active, *(item.key for item in self._waiting)]

    def add(self, key: Any, value: Any, deadline_s: float = INF) -> None:
        """Queues an item, which ends with one outcome that is done, or with `cancel`."""
        self._waiting.append(_Active(key, value, deadline_s))
        self._earliest_s = min(self._earliest_s, deadline_s)

    def cancel(self, key: Any) -> None:
        """Ends an item without an outcome; does nothing if it has ended."""
        item = self._active.get(key)
        if item is not None:
            self._end(item)
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.key != key)

    def advance(self, now: float) -> list[StepOutcome]:
        """Admits the items that have a place, advances every active state by one step, and returns what that gave.

        Raises only exceptions in `ENDS`.
        """
        outcomes = self._expired(now)
        self._admit(outcomes)
        items = list(self._active.values())
        self.stepped, steps = len(items), list[Any]()
        while len(steps) < len(items):
            steps += self._step(items[len(steps) : len(steps) + self._fits])
        for item, step in zip(items, steps, strict=True):
            item.steps += 1
            part, done = (step.part, step.done) if isinstance(step, Step) else (_error_in(step), True)
            done = done or isinstance(part, Exception)
            if not done and item.steps >= self._limits.max_steps:
                if part is not None:
                    outcomes.append(StepOutcome(item.key, part, False))
                part = ItemFailed(f"the answer needs more steps than max_steps={self._limits.max_steps}")
                done = True
            if done:
                self._end(item)
            if done or part is not None:
                outcomes.append(StepOutcome(item.key, part, done))
        self._retry()
        return outcomes

    def _expired(self, now: float) -> list[StepOutcome]:
        """Ends items whose deadline has passed."""
        outcomes: list[StepOutcome] = []
        if now < self._earliest_s:
            return outcomes
        for item in [*self._active.values(), *self._waiting]:
            if item.deadline_s <= now:
                self.cancel(item.key)
                outcomes.append(StepOutcome(item.key, DeadlineExceeded("the deadline passed during the run"), True))
        left = [*self._active.values(), *self._waiting]
        self._earliest_s = min((item.deadline_s for item in left), default=INF)
        return outcomes

    def _admit(self, outcomes: list[StepOutcome]) -> None:
        """Gives places to waiting items. An item that needs more than are free blocks later items."""
        while self._waiting and self._places < self._fits:
            item = self._waiting[0]
            try:
                item.cost = 1 if self._cost is None else self._cost_of(item.value)
                if self._places and self._places + item.cost > self._fits:
                    return
                item.state = self._model.admit(item.value)
            except ENDS:
                raise
            except BaseException as e:
                outcomes.append(StepOutcome(item.key, e, True))
            else:
                self._active[item.key] = item
                self._places += item.cost
            self._waiting.popleft()
            item.value = None

    def _cost_of(self, value: Any) -> int:
        assert self._cost is not None
        cost, most = self._cost(value), self._limits.max_active
        if not isinstance(cost, int) or cost < 1:
            raise BadOutput(f"cost(item) of the model returned {cost!r}, expected an int of at least 1")
        if cost > most:
            raise BadRequest(f"the request needs {cost} places, more than max_active={most}: send a smaller one")
        return cost

    def _step(self, items: list[_Active]) -> list[Any]:
        """A Step, an exception, or an object of a wrong type for each of the items."""
        try:
            found = self._model.step([item.state for item in items])
        except ENDS:
            raise
        except BaseException as e:
            error = e
        else:
            return _aligned(found, len(items))
        limits, memory = self._limits, out_of_memory(error)
        if memory:
            self._fits, self._grow_in = max(1, min(self._fits, len(items) // 2)), RETRY_STEPS
        if len(items) == 1 or not (limits.split_memory if memory else limits.split):
            return [error] * len(items)
        traceback.clear_frames(error.__traceback__)  # they hold the memory of the failed call
        middle = (len(items) + 1) // 2
        return [*self._step(items[:middle]), *self._step(items[middle:])]

    def _retry(self) -> None:
        """Tries more states after `RETRY_STEPS` steps without an out-of-memory error."""
        if self._grow_in:
            self._grow_in -= 1
            if not self._grow_in:
                self._fits = min(2 * self._fits, self._limits.max_active)
                self._grow_in = RETRY_STEPS if self._fits < self._limits.max_active else 0

    def _end(self, item: _Active) -> None:
        del self._active[item.key]
        self._places -= item.cost
        state, item.state = item.state, None
        if self._evict is not None:
            try:
                self._evict(state)
            except ENDS:
                raise
            except BaseException:
                log.exception("evict_failed: the model may keep the memory of an item that has ended")


def limits_of(model: Any, *, max_active: int | None, max_steps: int, split: bool, idempotent: bool) -> StepLimits:
    """The limits of a model. `max_active` None: its attribute of that name, or 32. Raises LoadFailed."""
    found = getattr(model, "max_active", 32) if max_active is None else max_active
    if not isinstance(found, int) or found < 1:
        raise LoadFailed(f"'max_active' of the model must be an int of at least 1, found {found!r}")
    return StepLimits(found, max_steps, split and idempotent, idempotent)


def _aligned(found: Any, expected: int) -> list[Any]:
    """The results, one for each state. If they do not fit, no state can be stepped again: each may have advanced."""
    if not isinstance(found, (list, tuple)):
        text = f"step returned a {type(found).__name__}, expected a list of {expected} penstock.Step"
    elif len(found) != expected:
        text = f"step returned {len(found)} results for {expected} states, expected one for each state"
    else:
        return list(found)
    return [BadOutput(text)] * expected


def _error_in(found: Any) -> BaseException:
    """The error of a state for which step returned something other than a Step."""
    if isinstance(found, BaseException):
        return found
    return BadOutput(f"step returned a {type(found).__name__} for a state, expected a penstock.Step or an exception")
