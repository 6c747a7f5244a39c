"""BaseStreamer: the calls that all streamers share, calls larger than a queue, and the errors that callers receive."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, Self

from penstock import tracing
from penstock.core.arrays import nbytes_of
from penstock.core.batching.entry import INF
from penstock.core.contracts import Ticket
from penstock.core.portal.loop_thread import no_answer
from penstock.core.portal.portal import Portal
from penstock.core.portal.waiters import Convert, Future
from penstock.core.wire.objects import OwnException, RemoteException
from penstock.errors import DeadlineExceeded, PenstockError, QueueFull
from penstock.plugins import loaded_class
from penstock.types import Item, ItemResult, Sink

CHUNKS_IN_FLIGHT = 2  # the workers run the second chunk while the client receives the results of the first


class BaseStreamer:
    """One model, called from threads, greenlets and coroutines. `worker_timeout` in seconds bounds `predict`."""

    def __init__(self, portal: Portal, model: str, worker_timeout: float | None) -> None:
        self._portal = portal
        self._model = model
        self._worker_timeout = worker_timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy_workers()

    def predict(
        self, batch: Iterable[Any], *, priority: int = 0, deadline: float | None = None, return_exceptions: bool = False
    ) -> list[Any]:
        """The results of the items of `batch`, in order. The items share batches with items of other calls.

        `deadline`: seconds from now after which the result is useless. `priority` 0, 1, 2 ...: a higher class may wait
        longer than a lower one. Raises the error of the first failed item; with `return_exceptions`, errors replace the
        results of failed items. Raises DeadlineExceeded, a TimeoutError, after `worker_timeout`; QueueFull at once.
        """
        items = _to_list(batch)
        try:
            values = self._portal.predict(
                self._model,
                items,
                budget_s=deadline,
                priority=_checked_priority(priority),
                timeout_s=_shorter(self._worker_timeout, deadline),
                return_exceptions=True,
            )
        except Exception as e:
            raise_for_caller(self._explain_timeout(e))
        return _for_caller(values) if return_exceptions else _raise_first(values)

    def submit(self, batch: Iterable[Any], *, priority: int = 0, deadline: float | None = None) -> Future:
        """A future of what `predict` returns or raises; it can be awaited too. Only `deadline` bounds its wait."""
        return self._submit(batch, priority, deadline, _convert)

    async def apredict(
        self, batch: Iterable[Any], *, priority: int = 0, deadline: float | None = None, return_exceptions: bool = False
    ) -> list[Any]:
        """`predict` for coroutines. Cancelling the call removes its queued items from the queue."""
        future = self._submit(batch, priority, deadline, _convert_errors_too if return_exceptions else _convert)
        timeout_s = _shorter(self._worker_timeout, deadline)
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                values: list[Any] = await future
        except TimeoutError:
            if not timeout.expired():
                raise
            raise_for_caller(self._explain_timeout(no_answer(timeout_s)))
        return values

    def _submit(self, batch: Iterable[Any], priority: int, deadline: float | None, convert: Convert) -> Future:
        items = list(batch if type(batch) is list else _to_list(batch))
        if not items:
            future = Future(None, convert)
            future(ItemResult([]))
            return future
        if priority:
            _checked_priority(priority)
        item = Item(items, rows=len(items), many=True, budget_s=deadline, priority=priority, source=tracing.caller())
        return self._portal.submit_item_as(self._model, item, convert)

    def statistics(self) -> dict[str, object]:
        """The learned batch costs and the request counters of the model."""
        return self._portal.statistics(self._model)

    def destroy_workers(self) -> None:
        """Answers accepted requests, for at most `worker_timeout`, and ends the workers. Idempotent."""
        self._portal.close(30.0 if self._worker_timeout is None else self._worker_timeout)

    def _wait_for_worker_ready(self, timeout: float | None = None) -> None:
        """Waits until the workers are ready. Raises the model's own error; DeadlineExceeded after `timeout`, which
        defaults to `worker_timeout`."""
        timeout_s = self._worker_timeout if timeout is None else timeout
        try:
            self._portal.call(lambda backend: backend.ready(), timeout_s=timeout_s)
        except Exception as e:
            raise_for_caller(self._explain_timeout(e))

    def _loading(self) -> bool:
        """Whether the model is still loading. Known only to a streamer with its own workers."""
        return False

    def _explain_timeout(self, error: Exception) -> Exception:
        if isinstance(error, DeadlineExceeded) and self._loading():
            return DeadlineExceeded(f"{error.message}: the model is still being loaded", detail=error.detail)
        return error


def _to_list(batch: Iterable[Any]) -> list[Any]:
    if type(batch) is list:
        return batch
    if isinstance(batch, (str, bytes, bytearray, memoryview, Mapping)):
        raise TypeError(f"expected a list of items, found one {type(batch).__name__}: write predict([x])")
    return list(batch)


def _checked_priority(priority: int) -> int:
    if priority < 0:
        raise ValueError(f"priority: expected 0 or more, found {priority}")
    return priority


def _shorter(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


def _raise_first(values: list[Any]) -> list[Any]:
    for value in values:
        if isinstance(value, Exception):
            raise_for_caller(value)
    return values


def _for_caller(values: list[Any]) -> list[Any]:
    return [error_for_caller(value) if isinstance(value, Exception) else value for value in values]


def _convert(result: ItemResult) -> list[Any]:
    if result.error is not None:
        raise_for_caller(result.error)
    return _raise_first(result.body)


def _convert_errors_too(result: ItemResult) -> list[Any]:
    if result.error is not None:
        raise_for_caller(result.error)
    return _for_caller(result.body)


# ---- calls larger than the queue

Submit = Callable[[Item, Sink], Ticket]


class ChunkingBackend:
    """Base of the backends of streamers, with a queue of `max_queue` items. It sends larger calls in chunks."""

    max_queue: int
    max_queue_bytes: float = INF  # also bounds the queue

    async def ready(self) -> None:
        """Waits until the backend can answer requests. Raises the error that prevents it."""
        raise NotImplementedError

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        rows, most = item.rows, self.max_queue_bytes
        if rows > self.max_queue:
            rows = self.max_queue // 2
        if most < INF and rows > 1 and (nbytes := nbytes_of(item.payload)) > most:
            rows = min(rows, int(item.rows * most / 2 / nbytes))
        if rows < item.rows:
            return ChunkedCall(self.submit_within_bounds, item, sink, max(1, rows))
        return self.submit_within_bounds(item, sink)

    def submit_within_bounds(self, item: Item, sink: Sink) -> Ticket:
        """Submits a call of at most `max_queue` items."""
        raise NotImplementedError


class ChunkedCall:
    """Ticket of a call with more items than the queue may hold. It sends the items in chunks.

    The sink receives one response: all values in order, or the first error of a whole chunk. When other callers fill
    the queue, the call waits for a chunk in flight, and fails only if it has none.
    """

    def __init__(self, submit: Submit, item: Item, sink: Sink, chunk_rows: int) -> None:
        """Raises what `submit` raises for the first chunk."""
        self._submit = submit
        self._values: list[Any] = item.payload
        self._sink = sink
        self._chunk_rows = chunk_rows
        self._deadline_s = None if item.budget_s is None else time.monotonic() + item.budget_s
        self._priority, self._source = item.priority, item.source
        self._next = 0  # index of the first unsent item
        self._in_flight: dict[int, Ticket] = {}  # by index of the chunk's first item
        self._results: dict[int, list[Any]] = {}
        self._finished = False
        self._send()

    def cancel(self) -> None:
        self._finished = True
        tickets, self._in_flight = self._in_flight, {}
        for ticket in tickets.values():
            ticket.cancel()

    def _send(self) -> None:
        while self._next < len(self._values) and len(self._in_flight) < CHUNKS_IN_FLIGHT:
            start = self._next
            values = self._values[start : start + self._chunk_rows]
            budget_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
            item = Item(values, rows=len(values), many=True, budget_s=budget_s, priority=self._priority)
            item.source = self._source
            try:
                self._in_flight[start] = self._submit(item, partial(self._receive, start))
            except QueueFull:
                if not self._in_flight:
                    raise
                return
            self._next = start + len(values)

    def _receive(self, start: int, result: ItemResult) -> None:
        if self._finished or not result.final:
            return
        del self._in_flight[start]
        if result.error is None:
            self._results[start] = result.body
            try:
                self._send()
            except PenstockError as e:
                result = ItemResult(error=e)
        if result.error is not None:
            self.cancel()
            self._sink(result)
        elif not self._in_flight:
            self._finished = True
            self._sink(ItemResult([value for _, values in sorted(self._results.items()) for value in values]))


# ---- errors for callers


class WorkerTraceback(Exception):
    """The cause of an error raised in a worker. Its text is the worker's traceback."""

    def __str__(self) -> str:
        return f"in the worker\n{self.args[0]}"


def error_for_caller(error: Exception) -> Exception:
    """What one caller gets for `error`: a copy of the model's own exception with its causes, or else of `error` with
    the text of that exception. The last cause is the worker's traceback, or `error` if there is none.

    The text stays in this process, so it needs no redaction, unlike errors sent over HTTP.
    """
    if not isinstance(error, PenstockError):
        return error
    cause = WorkerTraceback(error.detail.rstrip()) if "Traceback (most recent" in error.detail else None
    copy = None if error.original is None else _restored(error.original, cause or error)
    if copy is None:
        copy = type(error)(_message(error), retry_after_s=error.retry_after_s, detail=error.detail)
        copy.__cause__ = cause
    return copy


def raise_for_caller(error: Exception) -> NoReturn:
    """Raises `error_for_caller(error)`."""
    copy = error_for_caller(error)
    raise copy from copy.__cause__


def _message(error: PenstockError) -> str:
    message, last = error.message, _last_line(error.detail)
    kind = message.rpartition(" ")[2]
    if last.partition(":")[0].rpartition(".")[2] == kind:  # "the model raised ValueError"
        return message.removesuffix(kind) + last
    return f"{message}: {last}" if last and last not in message and message not in last else message


def _last_line(detail: str) -> str:
    """The text after the last frame of a traceback, such as `ValueError: too long`; any other text unchanged."""
    lines = detail.rstrip().split("\n")
    last_frame = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :])


def _restored(original: OwnException | RemoteException, root: Exception) -> Exception | None:
    """A new exception like `original`, so that no two callers raise the same object, with `root` as its last cause.
    None if its class is not available here."""
    try:
        cause: Any = root
        for parts in reversed(original.chain() or [_plain_parts(original.plain())]):
            copy = _rebuilt(*parts) if isinstance(parts, tuple) else parts
            copy.__cause__, cause = cause, copy
        return cause if isinstance(cause, Exception) else None
    except Exception:
        return original.error if isinstance(original, OwnException) else None


def _plain_parts(original: RemoteException) -> tuple[type, tuple[Any, ...], None]:
    """Raises TypeError unless the class is an exception that is loaded here and whose own code need not run."""
    found = loaded_class(original.module, original.name)
    refused = (PenstockError, StopIteration, StopAsyncIteration)  # sent by code; not to be raised in a coroutine
    if found is None or not issubclass(found, Exception) or issubclass(found, refused):
        raise TypeError(f"no exception {original.module}:{original.name}")
    if isinstance(found.__new__, FunctionType):
        raise TypeError("the class would run its own code")
    return found, tuple(original.args), None


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any] | None) -> Exception:
    """The exception as it was. Its own `__init__`, which may take other arguments, is not called again."""
    error = kind.__new__(kind, *args)
    if isinstance(kind.__init__, FunctionType):
        error.args = args
    else:
        kind.__init__(error, *args)
    error.__dict__.update(state or {})
    return error
