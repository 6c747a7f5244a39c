"""AdmissionQueue: the requests that wait for the first worker of their model, each with its ticket."""

import asyncio
import logging
from collections.abc import Callable

from penstock.core.batching.entry import INF
from penstock.core.engine.calls import Call, reason_of, release
from penstock.errors import DeadlineExceeded, PenstockError, QueueTimeout
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")


class WaitingRequest:
    """The ticket of a request in an AdmissionQueue; once forwarded, of the resulting call. `label`: see Call."""

    __slots__ = ("_began_s", "_call", "_explain", "_item", "_queue", "_sink", "label", "nbytes", "rows", "timer")

    def __init__(
        self,
        queue: "AdmissionQueue",
        item: Item,
        sink: Sink,
        nbytes: int,
        timeout_s: float | None,
        explain: Callable[[PenstockError], PenstockError] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.label, self.rows, self.nbytes = "", item.rows, nbytes
        self._queue, self._item, self._sink, self._explain = queue, item, sink, explain
        self._call: Call | WaitingRequest | None = None  # once it is forwarded
        self._began_s = loop.time()
        wait_s, budget_s = min(s for s in (item.wait_s, timeout_s, INF) if s is not None), item.budget_s
        kind, last_s = (QueueTimeout, wait_s) if budget_s is None or wait_s < budget_s else (DeadlineExceeded, budget_s)
        late = kind("the request waited too long for its model to load")
        self.timer = loop.call_later(last_s, self.fail, late) if last_s < INF else None

    def cancel(self) -> None:
        """Abandons the request."""
        if self._call is not None:
            self._call.cancel()
        elif self._queue.remove(self, "cancelled"):
            release(self._item)

    def forward(self, submit: "Submit") -> None:
        """Submits the request with the time that is left to it. A refusal becomes its response."""
        if not self._queue.remove(self):
            return
        waited_s = asyncio.get_running_loop().time() - self._began_s
        if self._item.budget_s is not None:
            self._item.budget_s -= waited_s
        if self._item.wait_s is not None:
            self._item.wait_s -= waited_s
        try:
            self._call = submit(self._item, self._sink)
            self._call.label = self.label
        except Exception as e:
            release(self._item)
            if not isinstance(e, PenstockError):  # the others that wait need their responses
                log.exception("submit_failed")
                e = PenstockError("internal error")
            self._refuse(e)

    def fail(self, error: PenstockError) -> None:
        """Ends the request with an error, unless it has left the queue."""
        if self._queue.remove(self, reason_of(error)):
            release(self._item)
            self._refuse(error)

    def _refuse(self, error: PenstockError) -> None:
        error = error if self._explain is None else self._explain(error)
        self._sink(ItemResult(error=error.with_traceback(None)))  # its frames hold the item


Submit = Callable[[Item, Sink], Call | WaitingRequest]


class AdmissionQueue:
    """The requests that wait for the first worker of a model, in order of arrival. Its owner bounds them.

    Each leaves once: forwarded, failed or cancelled. `on_end` receives the reason of each that reached no model.
    """

    def __init__(self, on_end: Callable[[str], None] = lambda reason: None) -> None:
        self.rows = self.nbytes = 0
        self._requests: dict[WaitingRequest, None] = {}
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        item: Item,
        sink: Sink,
        *,
        nbytes: int = 0,
        timeout_s: float | None = None,
        explain: Callable[[PenstockError], PenstockError] | None = None,
    ) -> WaitingRequest:
        """The ticket of a new request, which waits for at most `timeout_s` and its deadline. `explain` translates an
        error for the caller's API."""
        request = WaitingRequest(self, item, sink, nbytes, timeout_s, explain)
        self._requests[request] = None
        self.rows += request.rows
        self.nbytes += nbytes
        return request

    def remove(self, request: WaitingRequest, reason: str = "") -> bool:
        """True once for each request. `reason`: why it ends here; "" if it is forwarded."""
        if request not in self._requests:
            return False
        del self._requests[request]
        self.rows -= request.rows
        self.nbytes -= request.nbytes
        if request.timer is not None:
            request.timer.cancel()
        if reason:
            self._on_end(reason)
        return True

    def forward(self, submit: Submit) -> None:
        """Submits all requests."""
        for request in list(self._requests):
            request.forward(submit)

    def fail(self, error: PenstockError) -> None:
        """Ends all requests with this error."""
        for request in list(self._requests):
            request.fail(error)
