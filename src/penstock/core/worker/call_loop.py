"""Batches of one model side by side, on one event loop of its worker."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from penstock.config.schema import BatchingConfig
from penstock.core.worker.predict import aligned
from penstock.errors import ENDS, RunTimeout, out_of_memory
from penstock.types import Step

# choices
AUTO_CONCURRENCY = 256  # rows in progress on an instance whose `predict` is async
CANCEL_SHARE = 0.95  # of `run_timeout_s`: then a silent batch is cancelled; at its end the worker is replaced
END_S = 1.0  # for cancelled batches to clean up, before `unload`

Answer = Callable[[list[tuple[int, Any]]], None]


class CallLoop:
    """Runs the batches of a model concurrently: coroutines and async generators overlap, generators advance in turn.

    `submit` is called by the thread that receives, `run` by the thread that loaded the model. A plain `predict` runs
    in between, and the others wait for it.
    """

    def __init__(
        self,
        predict: Callable[[list[Any]], Any],
        batching: BatchingConfig,
        send_parts_to: Callable[[Callable[[list[Any]], None]], None] | None = None,
    ) -> None:
        """`send_parts_to` receives the sink for partial results before each call of `predict`."""
        self._send_parts_to = send_parts_to
        self.loop = asyncio.new_event_loop()
        self._predict = predict
        self.silence_s = CANCEL_SHARE * batching.run_timeout_s  # the longest time without a part or a response
        self._idempotent, self._retry_split = batching.idempotent, batching.retry_split
        self.alone = False  # each value is a call of its own

    def submit(self, values: list[Any], budgets_s: list[float | None], answer: Answer) -> Callable[[], None]:
        """Begins a batch and returns a function that cancels it; see `PythonModel.submit`."""
        call = _RunningBatch(self, answer)
        self.loop.call_soon_threadsafe(call.begin, values)
        return lambda: self.soon(call.cancel)

    def soon(self, call: Callable[[], None]) -> None:
        """Makes the loop call a function."""
        self.loop.call_soon_threadsafe(call)

    def run(self) -> None:
        """Runs the loop until `stop`. Raises only what ends a worker."""
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))

    def stop(self) -> None:
        """Makes `run` return."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def repeats(self, error: BaseException) -> bool:
        """Whether a batch that raised runs again in halves."""
        return self._idempotent and (self._retry_split or out_of_memory(error))

    async def attempt(self, call: _RunningBatch, places: list[int], values: list[Any]) -> None:
        """Predicts these values; after an error in halves, if no part was sent and the configuration allows it."""
        if self.alone and len(places) > 1:
            for place, value in zip(places, values, strict=True):
                await self.attempt(call, [place], [value])
            return
        streamed = call.parts
        try:
            if self._send_parts_to is not None:
                self._send_parts_to(lambda parts: call.deliver(zip(places, parts, strict=True)))
            found = self._predict(values)
            if inspect.isawaitable(found):
                found = await found
            if hasattr(found, "__next__"):
                found = _in_turn(found)
            if not hasattr(found, "__anext__"):
                call.answer(list(zip(places, aligned(found, len(places)), strict=True)))
                return
            async with aclosing(found) as steps:
                async for step in steps:
                    call.deliver(zip(places, aligned(step, len(places), "yielded"), strict=True))
            call.answer([(place, Step(done=True)) for place in places])
            return
        except (*ENDS, asyncio.CancelledError):
            raise
        except BaseException as e:
            error = e
        if len(places) > 1 and call.parts == streamed and self.repeats(error):
            traceback.clear_frames(error.__traceback__)  # they hold the memory of the failed call
            del error
            middle = (len(places) + 1) // 2
            await self.attempt(call, places[:middle], values[:middle])
            await self.attempt(call, places[middle:], values[middle:])
        else:
            call.answer([(place, error) for place in places])


class _RunningBatch:
    """One batch in progress. All methods run on the loop."""

    def __init__(self, owner: CallLoop, answer: Answer) -> None:
        self._owner = owner
        self.answer = answer
        self.parts = 0
        self._heard_s = 0.0
        self._late = self._left = False

    def begin(self, values: list[Any]) -> None:
        self._heard_s = self._owner.loop.time()
        self._places = list(range(len(values)))
        self._task = self._owner.loop.create_task(self._run(values))
        self._timer = self._owner.loop.call_later(self._owner.silence_s, self._look)

    def cancel(self) -> None:
        """The callers have left."""
        self._left = True
        self._task.cancel()

    def deliver(self, parts: Any) -> None:
        """Sends the parts of one step; those that are None are no parts."""
        self._heard_s = self._owner.loop.time()
        found = [(p, v if isinstance(v, Exception) else Step(v)) for p, v in parts if v is not None]
        if found:
            self.parts += 1
            self.answer(found)

    async def _run(self, values: list[Any]) -> None:
        try:
            await self._owner.attempt(self, self._places, values)
        except asyncio.CancelledError:
            if self._left:
                return
            late = f"the batch had neither a result nor a part for {self._owner.silence_s:g} s"
            inside = RuntimeError("the model's coroutine was cancelled from inside")
            error = RunTimeout(late) if self._late else inside
            self.answer([(place, error) for place in self._places])
        finally:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = self._heard_s + self._owner.silence_s - self._owner.loop.time()
        if left_s > 0:
            self._timer = self._owner.loop.call_later(left_s, self._look)
        else:
            self._late = True
            self._task.cancel()


async def _in_turn(steps: Iterator[Any]) -> AsyncIterator[Any]:
    """The steps of a generator; the other batches run between them."""
    try:
        for step in steps:
            yield step
            await asyncio.sleep(0)
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()
