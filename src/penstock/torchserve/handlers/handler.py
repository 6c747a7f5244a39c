"""A model behind a TorchServe handler: its data, its Context, its errors, as TorchServe 0.12 has them."""

from __future__ import annotations

import copy
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct, convert, field

from penstock.core.import_alias import make_importable
from penstock.errors import BadOutput, ItemFailed, LoadOutOfMemory, OutOfMemory, PenstockError
from penstock.plugins import load_object
from penstock.torchserve.handlers.answers import batch_answers, refusal, status_of
from penstock.torchserve.handlers.entry import Handle, find_entry, in_envelope, prepare_process
from penstock.torchserve.handlers.overlap import Prepared, Steps, steps_of
from penstock.torchserve.handlers.parts import Parts, SendParts
from penstock.torchserve.protocol.codec import HandlerAnswer, HandlerRequest

log = logging.getLogger("penstock.models")

SERVER_VERSION: Final = "0.12.0"  # of TorchServe, as handlers see it
APART: Final = ("explain", "describe")  # a request with one of these headers "True" is no prediction


class HandlerSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker must know of an unpacked archive and of the configuration, to run its handler."""

    model_name: str
    model_dir: str
    handler: str  # of the manifest: "file.py:function", or the name of a built-in
    model_version: str = "1.0"
    manifest: dict[str, Any] | None = None
    model_yaml_config: dict[str, Any] = field(default_factory=dict)
    model_metrics: dict[str, Any] | None = None  # of metrics.yaml; None: TorchServe's own
    envelope: str | None = None
    batch_size: int = 1
    limit_max_image_pixels: bool = True
    hidden_env: list[str] = field(default_factory=list)  # regular expressions of whole names
    max_response_size: int = 6_553_500  # bytes; 0: any
    overlap: bool = False
    retry_split: bool = False


class HandlerModel:
    """The target of a worker. Calls `handle` once a batch; requests for explanations or descriptions apart."""

    def __init__(self, _target: None = None, *, setup: dict[str, Any]) -> None:
        self.setup = convert(setup, HandlerSetup)
        self._context: Any = None
        self._handle: Handle
        self._processor: Callable[[dict[str, Any]], Any]
        self._send: SendParts | None = None
        self._steps: Steps | None = None
        self.__penstock_prepare__: Callable[[list[HandlerRequest]], list[HandlerRequest]] | None = None

    def load(self, device: str) -> None:
        """Finds the handler and initialises it. Raises LoadOutOfMemory, and what the handler raises."""
        setup = self.setup
        prepare_process(setup.model_dir, setup.hidden_env)
        if not logging.getLogger().handlers:  # what handlers log is seen as what they print
            logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
        make_importable()
        try:
            initialize, self._handle = find_entry(setup.handler)
            if setup.envelope:
                self._handle = in_envelope(setup.envelope, self._handle)
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
        self._steps = None if self.setup.envelope else steps_of(self._handle, self._context)
        if self._steps is None:
            text = "handler_not_overlapped model=%s: only a class whose `handle` is BaseHandler's own can be"
            log.warning(text, self.setup.model_name)
            return
        self._handle = self._steps.whole
        self.__penstock_prepare__ = self._prepare

    def _make_context(self, device: str) -> Any:
        setup = self.setup
        make: Any = load_object("penstock.torchserve.ts.context:Context")
        self._processor = load_object("penstock.torchserve.ts.context:RequestProcessor")  # type: ignore[assignment]
        make_metrics: Any = load_object("penstock.torchserve.ts.metrics.metric_cache:MetricsCache")
        declared = {} if setup.model_metrics is None else {"declared": setup.model_metrics}
        metrics = make_metrics(setup.model_name, **declared)
        metrics.initialize_cache()
        kind, _, index = device.partition(":")
        context = make(
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
        context.cl_socket = Parts(setup.max_response_size)
        return context

    def __penstock_send_parts_to__(self, send: SendParts) -> None:
        """Hears before each call where the parts go that the handler sends meanwhile."""
        self._send = send

    def predict(self, requests: list[HandlerRequest]) -> list[HandlerAnswer | PenstockError]:
        """The answers, aligned. Raises what befalls the whole batch: ItemFailed, BadOutput, OutOfMemory."""
        groups = _groups(requests)
        if len(groups) == 1:
            return self._run(requests, groups[0], len(requests))
        answers: list[Any] = [None] * len(requests)
        for places in groups:
            found: list[Any]
            try:
                found = self._run([requests[i] for i in places], places, len(requests))
            except PenstockError as e:
                found = [e] * len(places)
            for i, value in zip(places, found, strict=True):
                answers[i] = value
        return answers

    def _prepare(self, requests: list[HandlerRequest]) -> list[HandlerRequest]:
        """In the thread that receives: the batch after its `preprocess`, or as it is where that is not to be."""
        assert self._steps is not None
        if any(request.headers.get(name) == "True" for request in requests for name in APART):
            return requests
        context = copy.copy(self._context)
        context.metrics = copy.copy(context.metrics)
        context.cl_socket = Parts(self.setup.max_response_size)
        self._enter(context, requests)
        return self._steps.prepare(requests, context)

    def _run(self, requests: list[HandlerRequest], places: list[int], count: int) -> list[Any]:
        """One call of the handler, for those at `places` of a batch of `count`."""
        prepared = requests if isinstance(requests, Prepared) else None
        context = self._context if prepared is None else prepared.context
        if prepared is None:
            self._enter(context, requests)
        parts: Parts = context.cl_socket
        parts.begin(self._send, [request.id for request in requests], places, count)
        started = time.perf_counter()
        try:
            if prepared is not None and self._steps is not None:
                returned = self._steps.finish(prepared)
                started -= prepared.seconds
            else:
                returned = self._handle([request.inputs for request in requests], context)
            parts.end()
            answers = batch_answers(returned, context, len(requests), self.setup.max_response_size)
            context.metrics.add_time("PredictionTime", round((time.perf_counter() - started) * 1000, 2))
        except Exception as e:
            return self._failed(e, len(requests))
        finally:
            parts.end()
        return answers

    def _enter(self, context: Any, requests: list[HandlerRequest]) -> None:
        """Makes a context that of this batch."""
        context.request_ids = context.metrics.request_ids = {i: request.id for i, request in enumerate(requests)}
        context.request_processor = [self._processor(request.headers) for request in requests]

    def _failed(self, error: Exception, count: int) -> list[Any]:
        """The answers where a handler says itself what they are; else raises what its callers are told."""
        name = self.setup.model_name
        if isinstance(error, BadOutput):
            log.warning("handler_output_refused model=%s: %s (%s)", name, error.message, error.detail)
            raise error
        log.warning("handler_failed model=%s: its callers get an error", name, exc_info=error)
        text = "".join(traceback.format_exception(error))
        if any(cls.__name__ == "PredictionException" for cls in type(error).__mro__):
            if self.setup.retry_split and count > 1:  # its halves say whose it is
                raise ItemFailed("Prediction failed", detail=text) from None
            said = refusal(status_of(getattr(error, "error_code", None), 500), str(getattr(error, "message", error)))
            return [copy.copy(said) for _ in range(count)]
        if isinstance(error, MemoryError) or "CUDA" in str(error):
            raise OutOfMemory("Out of resources", detail=text) from None
        raise ItemFailed("Prediction failed", detail=text) from None


def _groups(requests: list[HandlerRequest]) -> list[list[int]]:
    """The places of the requests that share a call: those whose headers of APART are "True" alike.

    A description is asked for alone: a handler answers that call with one, however many requests it has.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(requests):
        explain, describe = (request.headers.get(name) == "True" for name in APART)
        groups.setdefault((explain, i if describe else None), []).append(i)
    return list(groups.values())
