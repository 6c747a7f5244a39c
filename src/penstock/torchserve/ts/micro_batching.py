"""Micro-batching: parts of a batch run through a handler's three steps concurrently, each step in its own threads.

A handler sets `self.handle = MicroBatching(self)` in `__init__`.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

HANDLER_METHODS: Final = ("preprocess", "inference", "postprocess")


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
        self._pools: dict[str, tuple[int, ThreadPoolExecutor]] = {}
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
        """The responses of a batch. Raises the first failed micro-batch's error after all have finished."""
        size = self.micro_batch_size
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        results: list[Future[Any]] = [Future() for _ in parts]
        pools = [self._pool(step) for step in HANDLER_METHODS]

        def run(step: int, index: int, value: Any) -> None:
            self.thread_local_data.micro_batch_idx = index
            try:
                value = getattr(self.handler, HANDLER_METHODS[step])(value)
            except BaseException as e:  # `handle` raises it
                results[index].set_exception(e)
            else:
                if step + 1 < len(pools):
                    pools[step + 1].submit(run, step + 1, index, value)
                else:
                    results[index].set_result(value)

        for index, part in enumerate(parts):
            pools[0].submit(run, 0, index, part)
        wait(results)
        return [response for result in results for response in result.result()]

    def __call__(self, data: Any, context: Any) -> Any:
        """Does what the handler's `handle` does, in micro-batches."""
        return self.handler._timed_responses(data, context, self.handle)

    def get_micro_batch_idx(self) -> int | None:
        """The index of the micro-batch that the calling step processes; None outside a step."""
        return getattr(self.thread_local_data, "micro_batch_idx", None)

    def shutdown(self) -> None:
        """Stops the threads; the next batch starts new ones."""
        while self._pools:
            self._pools.popitem()[1][1].shutdown()

    def _pool(self, step: str) -> ThreadPoolExecutor:
        threads, pool = self._pools.get(step, (0, None))
        if pool is None or threads != self._parallelism[step]:
            if pool is not None:
                pool.shutdown()
            threads = self._parallelism[step]
            pool = ThreadPoolExecutor(threads, thread_name_prefix=f"penstock-{step}")
            self._pools[step] = threads, pool
        return pool
