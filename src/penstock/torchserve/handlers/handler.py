"""Runs a TorchServe handler in a worker: its data, its Context and its errors are TorchServe 0.12's.

These modes do not run one batch at a time:

- `continuousBatching`: each call of `handle` is one step of all active requests. The handler keeps what it needs in
  `context.cache` under the request's id. Only the first step of a request has its inputs and headers; the later ones
  have the sequence's id. `context.stopping_criteria[i](result)` says whether a request is done: True after the last
  part, None after a response that is no stream. A handler that sets no criteria ends each request at once.
- `asyncCommunication`: `async def handle`, called with one request at a time; the calls overlap.
- `sequenceBatching`: the requests of a sequence reach one worker, in order and one at a time. The handler keeps the
  state, under the sequence's id. With `continuousBatching`, the next request joins as soon as a response is a stream.
"""

import copy
import inspect
import logging
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from msgspec import Struct, convert, field

from penstock.core.worker.steps import Whole
from penstock.errors import BadOutput, ItemFailed, LoadOutOfMemory, OutOfMemory, PenstockError
from penstock.plugins import load_object
from penstock.torchserve import sequence_headers
from penstock.torchserve.handlers import entry
from penstock.torchserve.handlers.responses import (
    STREAMED,
    PartialResponses,
    SendParts,
    batch_responses,
    check_results,
    error_response,
    response_of,
    valid_status,
)
from penstock.torchserve.protocol.codec import HandlerRequest, HandlerResponse
from penstock.types import Step

log = logging.getLogger("penstock.torchserve")

SERVER_VERSION: Final = "0.12.0"  # of TorchServe, as handlers see it
SEPARATE_CALLS: Final = ("explain", "describe")  # a request whose header of this name is "True" is not a prediction


class HandlerSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parts of an unpacked archive and of the configuration that a worker needs."""

    model_name: str
    model_dir: str
    handler: str  # from the manifest: "file.py:function", or the name of a built-in
    model_version: str = "1.0"
    manifest: dict[str, Any] | None = None
    model_yaml_config: dict[str, Any] = field(default_factory=dict)
    model_metrics: dict[str, Any] | None = None  # from metrics.yaml; None: TorchServe's default
    envelope: str | None = None
    batch_size: int = 1
    limit_max_image_pixels: bool = True
    hidden_env: list[str] = field(default_factory=list)  # regular expressions for whole names
    max_response_size: int = 6_553_500  # bytes; 0: no limit
    overlap: bool = False
    retry_split: bool = False
    ranks: int = 1  # processes of a group, see group.py


class HandlerCall(Struct):
    """One call of a handler: what it returned, and the responses to its requests."""

    started_s: float
    returned: Any = None
    responses: list[Any] = []


class HandlerModel:
    """A worker's target that calls `handle` once per batch, and separately for explanations and descriptions."""

    def __init__(self, _target: None = None, *, setup: dict[str, Any]) -> None:
        self.setup = convert(setup, HandlerSetup)
        self._context: Any = None
        self._handle: entry.Handle
        self._processor: Callable[[dict[str, Any]], Any]
        self._send: SendParts | None = None
        self._steps: HandlerSteps | None = None
        self.__penstock_sequences__ = True  # it finds the sequences in the headers
        self.collate: Callable[[list[HandlerRequest]], list[HandlerRequest]] | None = None

    def load(self, device: str) -> None:
        """Finds and initializes the handler. Raises LoadOutOfMemory, and the handler's errors."""
        setup = self.setup
        entry.prepare_process(setup.model_dir, setup.hidden_env)
        if not logging.getLogger().handlers:  # show the handler's log lines like its printed lines
            logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
        entry.make_ts_importable()
        try:
            initialize, self._handle = entry.find_entry(setup.handler)
            if setup.envelope:
                self._handle = entry.in_envelope(setup.envelope, self._handle)
            self._context = self._make_context(device)
            initialize(self._context)
            if setup.overlap:
                self._overlap()
        except Exception as e:
            log.exception("handler_not_loaded model=%s handler=%s", setup.model_name, setup.handler)
            if isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and "CUDA" in str(e)):
                text = f"loading '{setup.model_name}' ran out of memory: {type(e).__name__}"
                raise LoadOutOfMemory(text, detail=traceback.format_exc()) from e
            raise

    def _overlap(self) -> None:
        self._steps = None if self.setup.envelope else find_steps(self._handle, self._context)
        if self._steps is None:
            text = "handler_not_overlapped model=%s: overlap needs a class that inherits BaseHandler's own `handle`"
            log.warning(text, self.setup.model_name)
            return
        self._handle = self._steps.handle
        self.collate = self._collate

    def _make_context(self, device: str) -> Any:
        setup = self.setup
        make_context: Any = load_object(f"{entry.LIBRARY}.context:Context")
        self._processor = load_object(f"{entry.LIBRARY}.context:RequestProcessor")  # type: ignore[assignment]
        make_metrics: Any = load_object(f"{entry.LIBRARY}.metric_cache:MetricsCache")
        declared = {} if setup.model_metrics is None else {"declared": setup.model_metrics}
        metrics = make_metrics(setup.model_name, **declared)
        metrics.initialize_cache()
        metrics.request_ids = {0: str(uuid.uuid4())}  # of the load, for the metrics that `initialize` records
        kind, _, index = device.partition(":")
        context = make_context(
            setup.model_name,
            setup.model_dir,
            setup.manifest,
            setup.batch_size,
            int(index or 0) if kind not in ("cpu", "mps") else None,
            SERVER_VERSION,
            setup.limit_max_image_pixels,
            metrics,
            setup.model_yaml_config,
        )
        context.cl_socket = PartialResponses(setup.max_response_size)
        return context

    def __penstock_send_parts_to__(self, send: SendParts) -> None:
        """Sets the receiver of the next call's partial responses."""
        self._send = send

    def predict(self, requests: list[HandlerRequest]) -> list[HandlerResponse | PenstockError]:
        """The responses, aligned. Raises an error of the whole batch: ItemFailed, BadOutput, OutOfMemory."""
        groups = _groups(requests)
        if len(groups) == 1:
            return self._run(requests, groups[0], len(requests))
        responses: list[Any] = [None] * len(requests)
        for places in groups:
            found: list[Any]
            try:
                found = self._run([requests[i] for i in places], places, len(requests))
            except PenstockError as e:
                found = [e] * len(places)
            for i, value in zip(places, found, strict=True):
                responses[i] = value
        return responses

    def _collate(self, requests: list[HandlerRequest]) -> list[HandlerRequest]:
        """Preprocesses the batch in the receiving thread, unless it has explanations or descriptions."""
        assert self._steps is not None
        if any(request.headers.get(name) == "True" for request in requests for name in SEPARATE_CALLS):
            return requests
        return self._steps.preprocess(requests, self._own_context(requests))

    def _run(self, requests: list[HandlerRequest], places: list[int], count: int) -> list[Any]:
        """One call of the handler, for the requests at `places` of a batch of `count`."""
        if isinstance(requests, PreprocessedBatch) and self._steps is not None:
            with self._call(requests.context, requests, self._send, places, count) as call:
                call.returned = self._steps.finish(requests)
                call.started_s -= requests.seconds
            return call.responses
        self._assign(self._context, requests)
        with self._call(self._context, requests, self._send, places, count) as call:
            call.returned = self._handle([request.inputs for request in requests], self._context)
        return call.responses

    @contextmanager
    def _call(
        self, context: Any, requests: list[HandlerRequest], send: SendParts | None, places: list[int], count: int
    ) -> Iterator[HandlerCall]:
        """A call of the handler. The block sets `returned`, or raises an error for all callers; then come `responses`.

        Parts that the handler sends after it has returned are dropped. Raises the errors of `predict`.
        """
        call, parts = HandlerCall(time.perf_counter()), context.cl_socket
        parts.begin(send, [request.id for request in requests], places, count)
        try:
            yield call
            parts.end()
            call.responses = self._responses(call.returned, context, requests)
            context.metrics.add_time("PredictionTime", round((time.perf_counter() - call.started_s) * 1000, 2))
        except Exception as e:
            call.responses = self._failed(e, len(requests))
        finally:
            parts.end()

    def _responses(self, returned: Any, context: Any, requests: list[HandlerRequest]) -> list[Any]:
        """Converts what the handler returned. Raises BadOutput."""
        return batch_responses(returned, context, len(requests), self.setup.max_response_size)

    def _own_context(self, requests: list[HandlerRequest]) -> Any:
        """A copy of the context for these requests alone."""
        context = copy.copy(self._context)
        context.metrics = copy.copy(context.metrics)
        context.cl_socket = PartialResponses(self.setup.max_response_size)
        self._assign(context, requests)
        return context

    def _assign(self, context: Any, requests: list[HandlerRequest]) -> None:
        """Attaches a batch to the context."""
        context.request_ids = context.metrics.request_ids = {i: request.id for i, request in enumerate(requests)}
        context.request_processor = [self._processor(request.headers) for request in requests]

    def _failed(self, error: Exception, count: int) -> list[Any]:
        """The responses that a PredictionException asks for. Raises the error that callers get for any other."""
        name = self.setup.model_name
        if isinstance(error, BadOutput):
            log.warning("handler_output_refused model=%s: %s (%s)", name, error.message, error.detail)
            raise error
        log.warning("handler_failed model=%s: its callers get an error", name, exc_info=error)
        text = "".join(traceback.format_exception(error))
        if any(cls.__name__ == "PredictionException" for cls in type(error).__mro__):
            if self.setup.retry_split and count > 1:  # re-running in halves finds the guilty request
                raise ItemFailed("Prediction failed", detail=text) from None
            status = valid_status(getattr(error, "error_code", None), 500)
            response = error_response(status, str(getattr(error, "message", error)))
            return [copy.copy(response) for _ in range(count)]
        if isinstance(error, MemoryError) or "CUDA" in str(error):
            raise OutOfMemory("Out of resources", detail=text) from None
        raise ItemFailed("Prediction failed", detail=text) from None


def _groups(requests: list[HandlerRequest]) -> list[list[int]]:
    """The places of the requests that share a call: those with equal SEPARATE_CALLS headers.

    Each description is a call of its own, because a handler returns one description whatever the batch size.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(requests):
        explain, describe = (request.headers.get(name) == "True" for name in SEPARATE_CALLS)
        groups.setdefault((explain, i if describe else None), []).append(i)
    return list(groups.values())


class PreprocessedBatch(list[HandlerRequest]):
    """A batch after `preprocess`, which returned `data` or raised `error`."""

    context: Any
    data: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class HandlerSteps:
    """A handler's three steps with `overlap = true`: the next batch is preprocessed during this one's inference.

    `preprocess` runs in the thread that receives batches. Each batch has its own copy of the Context.
    """

    def __init__(self, service: Any, context: Any) -> None:
        self._service = service
        proxy: Any = load_object(f"{entry.LIBRARY}.context:ThreadsContext")
        self._proxy = service.context = proxy(context)

    def preprocess(self, requests: list[HandlerRequest], context: Any) -> PreprocessedBatch:
        """Runs the first step and keeps its result or its exception."""
        prepared = PreprocessedBatch(requests)
        prepared.context = context
        started = time.perf_counter()
        self._proxy.become(context)
        try:
            prepared.data = self._service.preprocess([request.inputs for request in requests])
        except Exception as e:
            prepared.error = e
        prepared.seconds = time.perf_counter() - started
        return prepared

    def finish(self, prepared: PreprocessedBatch) -> Any:
        """Runs the other two steps. Raises the errors of all three."""
        if prepared.error is not None:
            raise prepared.error
        started = time.perf_counter()
        context = prepared.context
        self._proxy.become(context)
        data, prepared.data = prepared.data, None
        returned = self._service.postprocess(self._service.inference(data))
        took_s = prepared.seconds + time.perf_counter() - started
        context.metrics.add_time("HandlerTime", round(took_s * 1000, 2), None, "ms")
        return returned

    def handle(self, data: Any, context: Any) -> Any:
        """Runs all steps of a batch that was not preprocessed."""
        self._proxy.become(context)
        return self._service.handle(data, self._proxy)


def find_steps(handle: Any, context: Any) -> HandlerSteps | None:
    """The three steps behind a handler's `handle`; None unless `handle` is BaseHandler's own."""
    service = getattr(handle, "__self__", None)
    if service is None or os.environ.get("ENABLE_TORCH_PROFILER"):
        return None
    modules = ("ts.torch_handler.base_handler", f"{entry.LIBRARY}.base_handler")
    of_base = [c for c in type(service).__mro__ if c.__name__ == "BaseHandler" and c.__module__ in modules]
    if not of_base or handle.__func__ is not vars(of_base[0])["handle"]:
        return None
    return HandlerSteps(service, context)


# ---- modes


class ContinuousHandlerModel(HandlerModel):
    """A step model: every step is one call of the handler."""

    def _overlap(self) -> None:
        """Nothing overlaps: a step begins when the last one has ended."""

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
