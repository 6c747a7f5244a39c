"""Micro-batching: parts of a batch run through a handler's three steps concurrently, each step in its own threads.

A handler sets `self.handle = MicroBatching(self)` in `__init__`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any, Final

HANDLER_METHODS: Final = ("preprocess", "inference", "postprocess")


class _MicroBatch:
    """Some items of a batch: the last step's result or exception."""

    def __init__(self, place: int, value: Any, done: queue.SimpleQueue[_MicroBatch]) -> None:
        self.place = place
        self.value = value
        self.error: BaseException | None = None
        self.done = done


class MicroBatching:
    """Replaces a BaseHandler's `handle`. `parallelism` is {step: threads}, by default 1 each.

    It and `micro_batch_size`, in items, may change between batches.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_local_data = threading.local()
        self.thread_groups: dict[str, list[threading.Thread]] = {step: [] for step in HANDLER_METHODS}
        self._queues: dict[str, queue.SimpleQueue[_MicroBatch | None]] = {
            step: queue.SimpleQueue() for step in HANDLER_METHODS
        }
        self._parallelism = dict.fromkeys(HANDLER_METHODS, 1)
        self.parallelism = parallelism or {}

    @property
    def parallelism(self) -> dict[str, int]:
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        """Sets the number of threads of the given steps. Raises ValueError."""
        for step, threads in parallelism.items():
            if step not in HANDLER_METHODS or threads < 1:
                raise ValueError(f"parallelism: found {step}: {threads}, expected 1 or more of {HANDLER_METHODS}")
        self._parallelism.update(parallelism)

    def handle(self, data: Any) -> list[Any]:
        """The answers of a batch. Raises the first failed micro-batch's error after all have finished."""
        for step in HANDLER_METHODS:
            self._set_threads(step, self._parallelism[step])
        done: queue.SimpleQueue[_MicroBatch] = queue.SimpleQueue()
        size = self.micro_batch_size
        parts = [_MicroBatch(place, data[i : i + size], done) for place, i in enumerate(range(0, len(data), size))]
        for part in parts:
            self._queues[HANDLER_METHODS[0]].put(part)
        for _ in parts:
            done.get()
        for part in parts:
            if part.error is not None:
                raise part.error
        return [answer for part in parts for answer in part.value]

    def __call__(self, data: Any, context: Any) -> Any:
        """Does what the handler's `handle` does, in micro-batches."""
        return self.handler._timed_answers(data, context, self.handle)

    def get_micro_batch_idx(self) -> int | None:
        """The index of the micro-batch that the calling step processes; None outside a step."""
        return getattr(self.thread_local_data, "micro_batch_idx", None)

    def shutdown(self) -> None:
        """Stops the threads; the next batch starts new ones."""
        for step in HANDLER_METHODS:
            self._set_threads(step, 0)

    def _set_threads(self, step: str, wanted: int) -> None:
        threads = self.thread_groups[step]
        if len(threads) > wanted:
            for _ in threads:
                self._queues[step].put(None)
            while threads:
                threads.pop().join()
        while len(threads) < wanted:
            thread = threading.Thread(target=self._run, args=(step,), daemon=True, name=f"penstock-{step}")
            thread.start()
            threads.append(thread)

    def _run(self, step: str) -> None:
        """The loop of one thread of a step."""
        last = step == HANDLER_METHODS[-1]
        after = None if last else self._queues[HANDLER_METHODS[HANDLER_METHODS.index(step) + 1]]
        while (part := self._queues[step].get()) is not None:
            if part.error is None:
                self.thread_local_data.micro_batch_idx = part.place
                try:
                    part.value = getattr(self.handler, step)(part.value)
                except BaseException as e:  # `handle` raises it; this thread continues
                    part.error = e
            if after is None:
                part.done.put(part)
            else:
                after.put(part)
            del part
