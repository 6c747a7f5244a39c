"""The calls of one process to a shared batcher: SharedClient, the backend of a streamer, and `connect`.

A call stays here until it is answered. When the batcher dies, the client joins the next one, or starts it, and sends
the calls again; with `idempotent = False` their callers get WorkerDied.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from penstock import tracing
from penstock.backoff import Backoff
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core import os_threads
from penstock.core.batching.lengths import length_of
from penstock.core.contracts import Ticket
from penstock.core.engine.engine import result_of
from penstock.core.portal.portal import Portal
from penstock.core.transports.slot import FIRST_RETRY_S, LAST_RETRY_S, within
from penstock.core.wire.messages import PartMessage, Pickled
from penstock.core.worker.spec import Wrapped
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    ModelNotReady,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
    WorkerDied,
    describe,
)
from penstock.streamer.base import BaseStreamer
from penstock.streamer.shared.link import BatcherLink, Joined, SharedCall, join
from penstock.streamer.shared.protocol import Offer, Sealed, offer_of, opened, seal_item, socket_path
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.streamer")

MAX_DEATHS: Final = 2  # of batchers, while a call waits; the next one is the call's own
MAX_CALL_BYTES: Final = 2**30  # far below the largest frame
MAX_WAITING: Final = 65_536  # items, before the batcher states its own bound
LATE_S: Final = 0.05  # after a deadline: the batcher knows better why there is no response


class SharedClient:
    """The backend of a streamer whose model runs in a shared batcher. Everything runs on the portal's loop.

    `offer` starts a batcher if none runs; without one, the client only connects. After a failure, calls of the next
    0.1 s, 0.2 s ... 30 s fail with it; then a call tries again.
    """

    def __init__(self, shared: str, offer: Offer | None) -> None:
        self._shared, self._offer = shared, offer
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._calls: dict[int, SharedCall] = {}  # without a response
        self._rows = self._bytes = 0  # in unanswered calls
        self._link: BatcherLink | None = None
        self._joining = False
        self._failure: PenstockError | None = None
        self._backoff, self._retry_at_s = Backoff(FIRST_RETRY_S, LAST_RETRY_S), 0.0  # until a batcher answers
        self._emptied: asyncio.Event | None = None  # made by close()
        self._closed = False
        self._bounds: tuple[int, float] | None = None  # of unanswered rows and bytes, from the batcher
        if offer is not None:
            self._join()

    # ---- calls

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """See Submitter. A value that cannot be pickled fails alone. Raises PayloadTooLarge for a call above 1 GiB."""
        self._check(item.budget_s)
        values, length = item.payload if item.many else [item.payload], 0
        with suppress(Exception):  # of a user's class; only the batcher knows whether items need one
            length = max(map(length_of, values), default=0)
        sealed = [seal_item(value) for value in values]
        nbytes = sum(each.nbytes for each in sealed if isinstance(each, Sealed))
        if nbytes > MAX_CALL_BYTES:
            raise PayloadTooLarge(f"a call of {nbytes} bytes, expected at most {MAX_CALL_BYTES}: make several calls")
        if not item.many:
            sink = partial(_only, sink)
        if tracing.tracer is not None:
            sink = tracing.traced(f"call {model}", tracing.CLIENT, item, sink)
        trace = item.trace
        sent = Item(sealed, rows=len(sealed), many=True, priority=item.priority, length=length, trace=trace)
        call = SharedCall(self._abandon, sink, sent, nbytes)
        if item.budget_s is not None:
            call.expires_s = self._loop.time() + item.budget_s
            call.timer = self._loop.call_later(item.budget_s + LATE_S, self._expire, call)
        return self._put(call)

    def _check(self, budget_s: float | None) -> None:
        if self._closed:
            raise ModelNotReady("the streamer is closed")
        if budget_s is not None and budget_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        if self._failure is not None and time.monotonic() < self._retry_at_s:
            raise self._failure.with_traceback(None)
        rows, nbytes = self._bounds or self._own_bounds()
        if self._rows >= rows or self._bytes >= nbytes:
            found = f"{self._rows} of {rows} items, {self._bytes} of {nbytes:g} bytes"
            raise QueueFull(f"too much of this process is unanswered ({found}): try again later")

    def _own_bounds(self) -> tuple[int, float]:
        """Before there is a batcher, calls wait here."""
        offer = self._offer
        if offer is None or offer.config.batching.max_queue is None:
            return MAX_WAITING, MAX_CALL_BYTES
        return offer.config.batching.max_queue, offer.limits.max_queue_bytes

    def _put(self, call: SharedCall) -> SharedCall:
        call.id = next(self._ids)
        self._calls[call.id] = call
        self._rows += call.rows
        self._bytes += call.nbytes
        if self._link is None:
            self._join()
        else:
            self._send(call)
        return call

    def _send(self, call: SharedCall) -> None:
        assert self._link is not None
        try:
            self._link.send(call)
            call.sent = True
        except Exception as e:
            log.exception("call_not_sent: its caller gets an error")
            error = PenstockError(f"the call cannot be sent to the batcher: {type(e).__name__}", detail=repr(e))
            self._end(call.id, ItemResult(error=error))

    def _abandon(self, call: SharedCall) -> None:
        """The caller left: the call is not run if it still waits."""
        if call.sent and self._link is not None:
            self._link.abandon(call.id)  # its response frees the memory
        else:
            self._end(call.id, ItemResult())

    def _expire(self, call: SharedCall) -> None:
        sink = call.sink
        if sink is not None:
            call.cancel()
            sink(ItemResult(error=DeadlineExceeded("the deadline passed before the batcher answered")))

    def _end(self, call_id: int, result: ItemResult) -> None:
        """Answers a call. Every call ends here, once."""
        call = self._calls.pop(call_id)
        self._rows -= call.rows
        self._bytes -= call.nbytes
        call.settle(result)
        if not self._calls:
            if self._link is not None:
                self._link.return_memory()
            if self._emptied is not None:
                self._emptied.set()

    def _answered(self, message: PartMessage) -> None:
        self._backoff.reset()
        (result,) = message.part.results
        assert result is not None
        body = result.body
        if type(body) is list:
            result.body = [opened(value) for value in body]
        elif type(body) is Pickled:  # the response to a question
            result.body = opened(body)
        self._end(message.part.batch_id, result)

    # ---- the batcher

    def _join(self, delay_s: float = 0.0) -> None:
        if not self._joining:
            self._joining, self._failure = True, None
            self._loop.call_later(delay_s, self._begin_join)

    def _begin_join(self) -> None:
        if self._closed and not self._calls:
            self._joining = False
            return
        try:
            os_threads.start_thread(self._join_in_thread, name="penstock-join")
        except RuntimeError as e:  # the system has no thread left
            self._on_joined(ModelNotReady(f"no thread can be started to join the shared batcher: {e}"))

    def _join_in_thread(self) -> None:
        """Blocks for as long as a batcher takes to start, or to end before."""
        found: Joined | PenstockError
        try:
            found = join(self._shared, self._offer)
        except PenstockError as e:
            found = e.with_traceback(None)
        except Exception as e:
            found = ModelNotReady(f"the shared batcher cannot be started: {describe(e)}", detail=repr(e))
        try:
            self._loop.call_soon_threadsafe(self._on_joined, found)
        except RuntimeError:  # the loop was closed meanwhile
            if isinstance(found, Joined):
                found.close()

    def _on_joined(self, found: Joined | PenstockError) -> None:
        self._joining = False
        if isinstance(found, PenstockError):
            self._fail(found)
        elif self._closed and not self._calls:
            found.close()
        else:
            welcome = found.welcome
            self._bounds = welcome.max_rows, welcome.max_bytes
            self._link = BatcherLink(found, self._answered, self._on_lost)
            for call in list(self._calls.values()):
                self._send(call)

    def _fail(self, error: PenstockError) -> None:
        """Fails all callers with the error, and later callers until the next attempt is due."""
        self._failure = error
        self._retry_at_s = time.monotonic() + self._backoff.next_s()
        for call_id in list(self._calls):
            self._end(call_id, ItemResult(error=error))

    def _on_lost(self) -> None:
        """The batcher died, or ended after a signal."""
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        idempotent = link.welcome.idempotent
        for call_id, call in list(self._calls.items()):
            call.sent, call.deaths = False, call.deaths + 1
            call.slabs = []  # their memory went with the connection
            if call.sink is None:
                self._end(call_id, ItemResult())
            elif not idempotent or call.deaths > MAX_DEATHS:
                self._end(call_id, ItemResult(error=WorkerDied("the shared batcher that ran this call died")))
        if self._calls:  # a batcher that answered nothing is not started again at once
            self._join(0.0 if link.answered else self._backoff.next_s())

    # ---- the rest of a PortalBackend

    @property
    def loading(self) -> bool:
        """Whether the batcher, or its model, is still loading."""
        return self._link is None or self._link.loading

    async def ask(self, what: str) -> Any:
        """The batcher's response to a question, see CallMessage. Raises its errors, and what `submit` raises."""

        def put(sink: Sink) -> Ticket:
            self._check(None)
            call = SharedCall(self._abandon, sink, None)
            call.asks = what
            return self._put(call)

        return await result_of(put)

    async def ready(self) -> None:
        """Waits until the workers of the batcher have loaded the model. Raises the model's own error."""
        await self.ask("ready")

    def statistics(self, model: str) -> dict[str, object]:
        """The counters of this process; `shared_statistics` asks the batcher."""
        return {"unanswered": len(self._calls), "unanswered_bytes": self._bytes}

    async def close(self, drain_s: float) -> None:
        """Waits for accepted calls, and leaves the batcher, which continues for others."""
        self._closed = True
        if self._calls:
            self._emptied = asyncio.Event()
            await within(self._emptied, drain_s)
        for call_id in list(self._calls):
            self._end(call_id, ItemResult(error=ModelNotReady("the streamer was destroyed")))
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def forget(self) -> None:
        if self._link is not None:
            self._link.forget()


def _only(sink: Sink, result: ItemResult) -> None:
    """Passes on the only element of a response to a list of one item."""
    if result.error is None:
        (value,) = result.body
        failed = isinstance(value, PenstockError)
        result = ItemResult(error=value) if failed else ItemResult(value)
    sink(result)


class SharedStreamer(BaseStreamer):
    """A model that other processes share, see `connect`."""

    def __init__(self, shared: str, worker_timeout: float | None) -> None:
        super().__init__(
            Portal(make=partial(SharedClient, shared, None), lazy=True, word="streamer", own_workers=False),
            "shared",
            worker_timeout,
        )

    def statistics(self) -> dict[str, object]:
        """The learned batch costs and the request counters of the model, and the number of processes that share it."""
        return shared_statistics(self._portal)


def shared_backend(
    shared: str, linger_s: float, config: ModelConfig, target: Wrapped, limits: LimitsConfig
) -> Callable[[], SharedClient]:
    """Makes the backend of a streamer that shares its model. Raises ConfigError, LoadFailed."""
    socket_path(shared)
    return partial(SharedClient, shared, offer_of(config, target, limits, linger_s))


def shared_statistics(portal: Portal) -> dict[str, object]:
    """The batcher's statistics of its model and its clients."""
    found: dict[str, object] = portal.call(lambda client: client.ask("statistics"))
    return found


def connect(address: str, *, worker_timeout: float | None = 20) -> SharedStreamer:
    """A streamer for the batcher that a `Streamer(..., shared="name")` of another process has started.

    `address` is "unix:name" or "unix:/path/to/socket". It connects with its first call, which raises ModelNotReady if
    no batcher runs. Raises ConfigError for any other address.
    """
    kind, _, shared = address.partition(":")
    if kind != "unix":
        raise ConfigError(f"found the address {address!r}, expected unix:NAME or unix:/path/to/socket")
    socket_path(shared)
    return SharedStreamer(shared, worker_timeout)
