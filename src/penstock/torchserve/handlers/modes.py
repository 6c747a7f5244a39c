"""Handlers that do not run one batch at a time: the modes of TorchServe 0.12.0.

- `continuousBatching`: each call of `handle` is one step of all active requests. The handler keeps what it needs in
  `context.cache` under the request's id. Only the first step of a request has its inputs and headers; the later ones
  have the sequence's id. `context.stopping_criteria[i](result)` says whether a request is done: True after the last
  part, None after a response that is no stream. A handler that sets no criteria ends each request at once.
- `asyncCommunication`: `async def handle`, called with one request at a time; the calls overlap.
- `sequenceBatching`: the requests of a sequence reach one worker, in order and one at a time. The handler keeps the
  state, under the sequence's id. With `continuousBatching`, the next request joins as soon as a response is a stream.
"""

import inspect
import logging
from typing import Any

from penstock.core.worker.steps import Whole
from penstock.errors import ItemFailed, PenstockError
from penstock.torchserve.handlers.handler import HandlerModel
from penstock.torchserve.handlers.responses import STREAMED, SendParts, check_results, response_of
from penstock.torchserve.protocol.codec import HandlerRequest, HandlerResponse
from penstock.torchserve.sequence_headers import sequence_headers
from penstock.types import Step

log = logging.getLogger("penstock.torchserve")


class ContinuousHandlerModel(HandlerModel):
    """A step model: every step is one call of the handler."""

    def load(self, device: str) -> None:
        self._id_name = sequence_headers()[0].decode().lower()
        super().load(device)
        self.__penstock_send_parts_to__(self._collect)

    def _collect(self, parts: list[HandlerResponse | None]) -> None:
        """Keeps the parts that the handler sends during a step, to send them with the step's own part."""
        for early, part in zip(self._early, parts, strict=True):
            if part is not None:
                early.append(bytes(part.body))

    def admit(self, request: HandlerRequest) -> HandlerRequest:
        return request

    def step(self, requests: list[HandlerRequest]) -> list[Step | PenstockError]:
        """One call of the handler. Raises the errors of `predict`."""
        self._early: list[list[bytes]] = [[] for _ in requests]
        found: list[Any] = self.predict(requests)
        for i, request in enumerate(requests):
            request.inputs = {}
            request.headers = {k: v for k, v in request.headers.items() if k.lower() == self._id_name}
            result = found[i]
            if isinstance(result, HandlerResponse):  # without a criterion's True or False
                if self._early[i] or request.streamed:
                    found[i] = result = Step(result, True)
                else:
                    found[i] = Step(Whole(result), True)
            if isinstance(result, Step):
                request.streamed = True
                result.part.body = b"".join((*self._early[i], result.part.body))
        return found

    def evict(self, request: HandlerRequest) -> None:
        """Drops the handler's cached state of a request that has ended, whatever the reason."""
        cache = getattr(self._context, "cache", None)
        if isinstance(cache, dict):
            cache.pop(request.id, None)

    def _responses(self, returned: Any, context: Any, requests: list[HandlerRequest]) -> list[Any]:
        criteria = context.stopping_criteria
        if not criteria:
            return super()._responses(returned, context, requests)
        check_results(returned, len(requests))
        return [self._stepped(value, criteria, i, context) for i, value in enumerate(returned)]

    def _stepped(self, value: Any, criteria: Any, i: int, context: Any) -> Step | HandlerResponse | PenstockError:
        try:
            done = criteria[i](value)
        except Exception as e:
            log.warning("stopping_criteria_failed model=%s", self.setup.model_name, exc_info=e)
            return ItemFailed("Prediction failed", detail=f"the stopping criteria raised {type(e).__name__}")
        part = response_of(value, context.request_processor[i], self.setup.max_response_size, part=done is not None)
        if done is None:
            return part
        if done:
            part.headers = [(k, "false" if k == STREAMED else v) for k, v in part.headers]
        return Step(part, bool(done))


class AsyncHandlerModel(HandlerModel):
    """Calls an asynchronous handler with one request at a time, while other calls wait for something else."""

    def predict(self, requests: list[HandlerRequest]) -> Any:
        """A coroutine; see `HandlerModel.predict`."""
        return self._awaited(requests, self._send)  # the next call sets another `_send`

    async def _awaited(self, requests: list[HandlerRequest], send: SendParts | None) -> list[Any]:
        context = self._own_context(requests)
        with self._call(context, requests, send, list(range(len(requests))), len(requests)) as call:
            returned = self._handle([request.inputs for request in requests], context)
            call.returned = await returned if inspect.isawaitable(returned) else returned
        return call.responses
