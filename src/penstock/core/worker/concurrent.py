"""One batch of a model that runs many concurrently: the model answers in any order, from its own threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.core.worker.batch import ENDS, BatchRun, Decoded, bare
from penstock.core.worker.loop import BatchRunner
from penstock.errors import Cancelled, PenstockError
from penstock.types import BatchPart, ItemResult


class ConcurrentBatch:
    """Passes a batch to the model and turns its answers into parts. Each item counts once, even if answered twice.

    `done` is called with the places of completed items, in the thread that answered. It calls `part` for them, one call
    at a time; the part with the last item is final.
    """

    def __init__(
        self, runner: BatchRunner, batch_id: int, decoded: Decoded, done: Callable[[ConcurrentBatch, list[int]], None]
    ) -> None:
        self._runner = runner
        self._run = BatchRun(runner, batch_id, decoded, lambda part: None)
        self._done = done
        self._since_s = time.perf_counter()
        self._lock = threading.Lock()
        self._units: list[list[int]] = [[] for _ in decoded.items]  # units per item
        for u, i in enumerate(decoded.owners):
            self._units[i].append(u)
        self._asked: list[int] = []  # the unit at each place of the model's arguments
        self._open: set[int] = set()  # unanswered units
        self._missing = [0] * len(decoded.items)  # unanswered units per item
        self._left = len(decoded.items)
        self._end: Any = None

    def start(self) -> None:
        """Called once. Raises only what ends a worker."""
        run = self._run
        run.preprocess()
        self._asked = list(run.live)
        self._open = set(run.live)
        for u in run.live:
            self._missing[run.d.owners[u]] += 1
        never = [i for i, missing in enumerate(self._missing) if not missing]
        if never:
            self._done(self, never)
        if not self._asked:
            return
        items, owners = run.d.items, run.d.owners
        values, budgets = [run.d.values[u] for u in self._asked], [items[owners[u]].budget_s for u in self._asked]
        run.d.values = []  # only the model keeps the memory that the values refer to
        try:
            assert self._runner.model.submit is not None
            end = self._runner.model.submit(values, budgets, self._answer)
        except ENDS:
            raise
        except BaseException as e:
            self._fail(self._runner.error_of(e))
            return
        with self._lock:
            if self._open:
                self._end = end

    def cancel(self) -> None:
        """Abandons the batch: the model may stop working on it and need not answer."""
        end, self._end = self._end, None
        try:
            if end is not None:
                end()
        except Exception as e:
            self._runner.error_of(e, "cancelling a batch raised")
        self._fail(Cancelled("the caller no longer waits for this answer"))

    def _answer(self, answers: list[tuple[int, Any]]) -> None:
        """Called by the model, from any thread: (place, value or exception) pairs."""
        asked = self._asked
        self._take([(asked[place], value) for place, value in answers])

    def _fail(self, error: PenstockError) -> None:
        self._take([(u, error) for u in self._asked])

    def _take(self, outcomes: list[tuple[int, Any]]) -> None:
        with self._lock:
            done = []
            for unit, outcome in outcomes:
                if unit in self._open:
                    self._open.discard(unit)
                    self._run.outcomes[unit] = outcome
                    i = self._run.d.owners[unit]
                    self._missing[i] -= 1
                    if not self._missing[i]:
                        done.append(i)
        if done:
            self._done(self, done)

    def part(self, places: list[int]) -> BatchPart:
        """The answers of these completed items; each place is requested once."""
        self._left -= len(places)
        part = BatchPart(self._run.batch_id, [self._result(i) for i in places], final=not self._left, at=places)
        if part.final:
            part.run_s, part.prepare_s = time.perf_counter() - self._since_s, self._run.d.seconds
            self._run.outcomes = self._run.d.contexts = []  # the model may keep a reference to this object
            self._end = None
        return part

    def _result(self, i: int) -> ItemResult:
        try:
            return self._made(i)
        except BaseException as e:  # the model's own thread would hide the error
            return ItemResult(error=self._runner.error_of(e, "postprocess raised"))

    def _made(self, i: int) -> ItemResult:
        run = self._run
        error = run.d.errors.get(i)
        if error is not None:
            return ItemResult(error=error)
        outcomes = [run.finished(run.outcomes[u]) for u in self._units[i]]
        if run.d.items[i].many:
            return ItemResult([bare(outcome) for outcome in outcomes])
        outcome = outcomes[0]
        return ItemResult(error=outcome) if isinstance(outcome, PenstockError) else run.encoded(i, outcome)
