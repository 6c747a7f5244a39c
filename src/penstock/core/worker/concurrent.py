"""One batch of a model that works on many side by side: it answers in parts, in any order, from its own threads."""

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
    """Hands a batch to the model and makes parts of what that answers: of each item once, however often it does.

    `done` is called with the places of items that are complete, in the thread that answered. Whoever is told makes a
    `part` of them, one at a time; the one with the last of the batch is final.
    """

    def __init__(
        self, runner: BatchRunner, batch_id: int, decoded: Decoded, done: Callable[[ConcurrentBatch, list[int]], None]
    ) -> None:
        self._runner = runner
        self._run = BatchRun(runner, batch_id, decoded, lambda part: None)
        self._done = done
        self._since_s = time.perf_counter()
        self._lock = threading.Lock()
        self._units: list[list[int]] = [[] for _ in decoded.items]  # of each item
        for u, i in enumerate(decoded.owners):
            self._units[i].append(u)
        self._asked: list[int] = []  # the unit at each place of what the model was given
        self._open: set[int] = set()  # units that it has not answered
        self._missing = [0] * len(decoded.items)  # how many, of each item
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
        run.d.values = []  # the model has them: only it keeps what they look at
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
        """Nobody waits for it any more: the model may end its work, and need not answer."""
        end, self._end = self._end, None
        try:
            if end is not None:
                end()
        except Exception as e:
            self._runner.error_of(e, "ending the work on a batch raised")
        self._fail(Cancelled("nobody waits for this answer any more"))

    def _answer(self, answers: list[tuple[int, Any]]) -> None:
        """Called by the model: values or exceptions of the places of what it was given. From any thread."""
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
        """The answers of these items, which are complete. Each place is asked for once."""
        self._left -= len(places)
        part = BatchPart(self._run.batch_id, [self._result(i) for i in places], final=not self._left, at=places)
        if part.final:
            part.run_s, part.prepare_s = time.perf_counter() - self._since_s, self._run.d.seconds
            self._run.outcomes = self._run.d.contexts = []  # the model may keep what leads here
            self._end = None
        return part

    def _result(self, i: int) -> ItemResult:
        try:
            return self._made(i)
        except BaseException as e:  # in a thread of the model, where nobody would hear of it
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
