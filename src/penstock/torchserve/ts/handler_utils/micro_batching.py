"""A batch in pieces that pass through the three steps of a handler at the same time, each step with its threads.

A handler uses it as `self.handle = MicroBatching(self)` in `__init__`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any, Final

HANDLER_METHODS: Final = ("preprocess", "inference", "postprocess")


class _Piece:
    """Some items of a batch, or what a step made of them, or what it raised."""

    def __init__(self, place: int, value: Any, done: queue.SimpleQueue[_Piece]) -> None:
        self.place = place
        self.value = value
        self.error: BaseException | None = None
        self.done = done


class MicroBatching:
    """`micro_batch_size` items make a piece; `parallelism` is {step: threads}, 1 where none is named.

    Both may be set at any time between two batches. The handler is a BaseHandler.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_local_data = threading.local()
        self.thread_groups: dict[str, list[threading.Thread]] = {step: [] for step in HANDLER_METHODS}
        self._queues: dict[str, queue.SimpleQueue[_Piece | None]] = {
            step: queue.SimpleQueue() for step in HANDLER_METHODS
        }
        self._parallelism = dict.fromkeys(HANDLER_METHODS, 1)
        self.parallelism = parallelism or {}

    @property
    def parallelism(self) -> dict[str, int]:
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        """Sets the threads of the steps that are named. Raises ValueError."""
        for step, threads in parallelism.items():
            if step not in HANDLER_METHODS or threads < 1:
                raise ValueError(f"parallelism: found {step}: {threads}, expected 1 or more of {HANDLER_METHODS}")
        self._parallelism.update(parallelism)

    def handle(self, data: Any) -> list[Any]:
        """The answers of a batch. Raises what the first piece that failed raised, when all have come through."""
        for step in HANDLER_METHODS:
            self._set_threads(step, self._parallelism[step])
        done: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        size = self.micro_batch_size
        pieces = [_Piece(place, data[i : i + size], done) for place, i in enumerate(range(0, len(data), size))]
        for piece in pieces:
            self._queues[HANDLER_METHODS[0]].put(piece)
        for _ in pieces:
            done.get()
        for piece in pieces:
            if piece.error is not None:
                raise piece.error
        return [answer for piece in pieces for answer in piece.value]

    def __call__(self, data: Any, context: Any) -> Any:
        """What `handle` of a handler does, with a batch in pieces."""
        return self.handler._timed_answers(data, context, self.handle)

    def get_micro_batch_idx(self) -> int | None:
        """The place of the piece that the calling step works on; None outside of a step."""
        return getattr(self.thread_local_data, "micro_batch_idx", None)

    def shutdown(self) -> None:
        """Ends the threads; the next batch starts them anew."""
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
        """One thread of a step."""
        last = step == HANDLER_METHODS[-1]
        after = None if last else self._queues[HANDLER_METHODS[HANDLER_METHODS.index(step) + 1]]
        while (piece := self._queues[step].get()) is not None:
            if piece.error is None:
                self.thread_local_data.micro_batch_idx = piece.place
                try:
                    piece.value = getattr(self.handler, step)(piece.value)
                except BaseException as e:  # it is the batch's, and this thread goes on
                    piece.error = e
            if after is None:
                piece.done.put(piece)
            else:
                after.put(piece)
            del piece
