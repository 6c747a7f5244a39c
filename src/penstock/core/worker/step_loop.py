"""The loop of a step model in a worker: it takes items between two steps, and sends parts while the next step runs."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, Queue, SimpleQueue
from typing import Any

from penstock import metrics
from penstock.config.schema import BatchingConfig
from penstock.core.worker.steps import INF, ActiveSteps, StepModel, StepOutcome, Whole, limits_of
from penstock.types import Step

log = logging.getLogger("penstock.worker")

REPORT_S = 0.1  # between two reports of the metrics
SIGNS_PER_LIMIT = 4  # signs of life of an item without parts in `run_timeout_s`

Answer = Callable[[list[tuple[int, Any]]], None]


class StepLoop:
    """Runs the steps of one model.

    In a worker process, `submit` is called by the thread that receives, `run` by the thread that loaded the model, and
    a thread of its own sends. Other transports call `predict`, which runs a batch to its end.
    """

    def __init__(self, model: StepModel, batching: BatchingConfig) -> None:
        """Raises LoadFailed."""
        self._model = model
        self.limits = limits_of(
            model,
            max_active=batching.max_active,
            max_steps=batching.max_steps,
            split=batching.retry_split,
            idempotent=batching.idempotent,
        )
        self._steps = ActiveSteps(model, self.limits)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls: Queue[Callable[[], None]] = Queue()  # of the sender
        self._sign_s = batching.run_timeout_s / SIGNS_PER_LIMIT
        self._signed_s = self._reported_s = 0.0
        self._seconds: list[float] = []  # of the steps since the last report
        self._items = 0  # that advanced in them

    # ---- continuous

    def submit(self, values: list[Any], budgets_s: list[float | None], answer: Answer) -> Callable[[], None]:
        """Queues items and returns a function that cancels them; see `PythonModel.submit`."""
        now = time.monotonic()
        ends = [INF if budget_s is None else now + budget_s for budget_s in budgets_s]

        def add() -> None:
            for place, value in enumerate(values):
                self._steps.add((answer, place), value, ends[place])
            values.clear()  # a state alone keeps what it needs

        def cancel() -> None:
            for place in range(len(ends)):
                self._steps.cancel((answer, place))

        self._inbox.put(add)
        return lambda: self._inbox.put(cancel)

    def soon(self, call: Callable[[], None]) -> None:
        """Makes the sender's thread call a function."""
        self._calls.put(call)

    def run(self) -> None:
        """Steps while an item is active, until `stop`. Raises only what ends a worker."""
        threading.Thread(target=self._send, name="penstock-sender", daemon=True).start()
        while self._receive():
            outcomes = self._advance()
            self._calls.join()  # the parts of the step before are sent: no more than these are kept
            self._calls.put(partial(_deliver, outcomes))

    def stop(self) -> None:
        """Makes `run` return, between two steps."""
        self._inbox.put(None)

    def _receive(self) -> bool:
        """Handles what has arrived; waits for it while no item is active. False after `stop`."""
        while True:
            idle = self._steps.idle
            if idle:
                self._report()
            try:
                call = self._inbox.get(idle)
            except Empty:
                return True
            if idle:
                self._signed_s = self._reported_s = time.monotonic()
            if call is None:
                return False
            call()

    def _advance(self) -> list[StepOutcome]:
        """Runs one step. Work after it delays the next one, so the sender does as much of it as possible."""
        started = time.monotonic()
        outcomes = self._steps.advance(started)
        ended = time.monotonic()
        self._seconds.append(ended - started)
        self._items += self._steps.stepped
        if ended > self._reported_s + REPORT_S:
            self._report()
        if ended > self._signed_s + self._sign_s:
            self._signed_s = ended
            outcomes += [StepOutcome(key, None, False) for key in self._steps.open_keys()]
        return outcomes

    def _send(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            except Exception:
                log.exception("parts_not_sent: their callers get no more of them")
            self._calls.task_done()

    def _report(self) -> None:
        if self._seconds:
            metrics.timings("step", self._seconds)
            metrics.counter("step_items", self._items)
            self._seconds, self._items, self._reported_s = [], 0, time.monotonic()

    # ---- batch by batch

    def predict(self, values: list[Any]) -> Iterator[list[Any]]:
        """Steps these items until all are done; yields the parts of each step."""
        steps = ActiveSteps(self._model, self.limits)
        for place, value in enumerate(values):
            steps.add(place, value)
        try:
            while not steps.idle:
                parts = [None] * len(values)
                for place, part, _ in steps.advance(0.0):
                    if parts[place] is not None:  # the part before a failure
                        yield parts
                        parts = [None] * len(values)
                    parts[place] = part.value if type(part) is Whole else part
                yield parts
        finally:
            for key in steps.open_keys():
                steps.cancel(key)


def _deliver(outcomes: list[StepOutcome]) -> None:
    """Passes each submission its outcomes of a step."""
    found: dict[Answer, list[tuple[int, Any]]] = {}
    for (answer, place), part, done in outcomes:
        if type(part) is Whole:
            part = part.value
        elif not isinstance(part, BaseException):
            part = Step(part, done)
        found.setdefault(answer, []).append((place, part))
    for answer, pairs in found.items():
        answer(pairs)
