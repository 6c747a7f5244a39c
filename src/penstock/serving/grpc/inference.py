"""The Open Inference service of the native server.

Metadata keys with the names of HTTP headers have their meaning: `authorization`, `x-request-id`, `x-priority`, and
those that `batching.rows` and `batching.bucket` name. A call's deadline is the deadline of its request.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from google.protobuf import json_format
from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend, Ticket
from penstock.errors import BadRequest, PenstockError, RegionExists
from penstock.serving.grpc.call import GrpcCall
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService, HealthService, ReflectionService
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.serving.grpc.messages import Code, GrpcError, ResponseParts, code_of
from penstock.serving.http.responses import NotImplementedHere, log_failure, status_of
from penstock.serving.http.server import parse_priority, parse_request_id
from penstock.serving.protocols.bodies import ERROR_CODE, free
from penstock.serving.protocols.oip_protobuf import field_of, open_inference, read_head
from penstock.serving.protocols.oip_routes import CALLS
from penstock.serving.protocols.route import Read
from penstock.serving.triton.calls import GUARDS, TritonExtensions, grpc_functions
from penstock.types import Item, ItemResult

NAME: Final = "inference.GRPCInferenceService"
RAW_CALLS: Final = frozenset({"ModelStreamInfer"})
DIRECT_CALLS: Final = frozenset({"ModelInfer"})
CODEC: Final = "oip_grpc"
FINAL: Final = "triton_final_response"
_INFER_RESPONSE: Final = 2  # number of the field in ModelStreamInferResponse

_message = open_inference().message
_Infer: Final = _message("inference.ModelInferResponse")
_StreamInfer: Final = _message("inference.ModelStreamInferResponse")


def _final(value: bool) -> bytes:
    """The parameter that states whether a request has further responses."""
    response = _Infer()
    response.parameters[FINAL].bool_param = value
    data: bytes = response.SerializeToString()
    return data


_FINAL: Final = {value: _final(value) for value in (False, True)}


def failure(error: PenstockError) -> GrpcError:
    """The status of an error, by the table of HTTP, whose 400 stands for ALREADY_EXISTS too, as in Triton."""
    code = Code.ALREADY_EXISTS if isinstance(error, RegionExists) else code_of(status_of(error, open_inference=True))
    return GrpcError(code, error.message, error.retry_after_s, error.code)


class _Request(Struct):
    """One inference request, ready for the backend."""

    model: str
    version: str | None
    id: str
    item: Item
    empty_final: bool  # the client wants a last response without outputs

    def response(self) -> Any:
        """A response without outputs."""
        return _Infer(model_name=self.model, model_version=self.version or "", id=self.id)

    def log(self, error: PenstockError) -> None:
        """Logs a failure of the server, as HTTP does."""
        if (status := status_of(error)) >= 500:
            log_failure((self.model, self.version), self.item.request_id, status, error, self.item.trace)


class OpenInferenceService:
    """Serves the calls of the Open Inference Protocol and Triton's ModelStreamInfer, under the names of the calls.

    A stream may have `max_in_flight` requests in progress, and ends after `idle_s` without any message.
    """

    def __init__(self, backend: Backend, max_in_flight: int, idle_s: float) -> None:
        self._backend = backend
        self.max_in_flight = max_in_flight
        self.idle_s = idle_s
        self._streams: set[_InferStream] = set()

    def drain(self) -> None:
        """Ends each stream as soon as it has answered what it received: an idle client would keep the server alive."""
        for stream in self._streams:
            stream.drain()

    def ModelInfer(self, payload: Any, call: GrpcCall) -> None:
        """One response. A model that streams needs ModelStreamInfer."""
        request = self.read(payload, call)

        def sink(result: ItemResult) -> None:
            error = result.error
            if error is None and not (result.final and result.body):  # without a part its body is empty
                error = NotImplementedHere(f"model '{request.model}' streams its response: call ModelStreamInfer")
            if error is None:
                call.reply(result.body)
                return
            if result.final:
                call.on_cancel = None  # nothing is left to cancel
            request.log(error)
            call.fail(failure(error))

        try:
            ticket = self._backend.submit(request.model, request.version, request.item, sink)
        except PenstockError as error:
            request.log(error)
            raise
        if call.closed:
            ticket.cancel()
        else:
            call.on_cancel = ticket.cancel

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], call: GrpcCall) -> AsyncGenerator[bytes, None]:
        """The responses to each request, any number if the model streams, as they become ready. Requests overlap."""
        stream = _InferStream(self, self._backend, call)
        receiver = asyncio.ensure_future(stream.receive(requests))
        self._streams.add(stream)
        try:
            async for message in stream.answers():
                yield message
        finally:
            self._streams.remove(stream)
            receiver.cancel()
            stream.close()

    def read(self, payload: Any, call: GrpcCall) -> _Request:
        """Takes a message, `bytes` or a Buffer. Raises BadRequest for a malformed one."""
        try:
            head = read_head(payload if isinstance(payload, bytes) else payload.view)
            call_head = call.head
            if call_head.terms is None:
                values = dict(call_head.metadata)
                call_head.terms = parse_request_id(values.get(b"x-request-id", b"")), values.get(b"x-priority")
            id, given = call_head.terms
            priority = head.parameters.get("priority") or 0
            if type(priority) is not int or priority < 0:
                raise BadRequest(f"parameter 'priority' is {priority!r:.40}, expected a whole number from 0")
            if priority == 0:
                priority = 1 if given is None else parse_priority(given) + 1
            empty_final = bool(head.parameters.get("triton_enable_empty_final_response"))
            item = Item(payload, CODEC, request_id=id, headers=call_head.metadata, priority=priority - 1)
            item.budget_s, item.source = call.time_remaining(), call
            call.asked = head.model_name, head.model_version or None
            if timeout_us := head.parameters.get("timeout"):
                item.wait_s = _wait_s(timeout_us)
            return _Request(head.model_name, head.model_version or None, head.id, item, empty_final)
        except PenstockError:
            free(payload)
            raise


def _descriptions(backend: Backend) -> SimpleNamespace:
    """The functions of the calls whose response HTTP gives too, under their names."""

    def function(name: str, read: Read) -> Callable[[Any, Any], Awaitable[Any]]:
        response = _message(f"inference.{name}Response")

        async def answer(request: Any, context: Any) -> Any:
            found = read(backend, getattr(request, "name", ""), getattr(request, "version", "") or None)
            return json_format.ParseDict(msgspec.to_builtins(found), response(), ignore_unknown_fields=True)

        return answer

    return SimpleNamespace(**{name: function(name, read) for name, read in CALLS.items()})


def _wait_s(timeout_us: Any) -> float:
    """The longest wait in the queue: the parameter `timeout`, which is in microseconds."""
    if type(timeout_us) is not int or timeout_us < 0:
        raise BadRequest(f"parameter 'timeout' is {timeout_us!r:.40}, expected microseconds as a whole number")
    return timeout_us / 1e6


class _InferStream:
    """The requests of one ModelStreamInfer call and their responses. A request that fails leaves the others alone."""

    def __init__(self, service: OpenInferenceService, backend: Backend, call: GrpcCall) -> None:
        self._service = service
        self._backend = backend
        self._call = call
        self._parts = ResponseParts(call.owner.listener.budget)
        self._running: dict[object, Ticket | None] = {}
        self._room: asyncio.Future[None] | None = None
        self._received_all = False
        self._error: Exception | None = None
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._active_s = loop.time()
        self._timer = loop.call_later(service.idle_s, self._check_idle)

    async def receive(self, requests: AsyncIterator[Any]) -> None:
        """Starts each request, and takes the next as soon as there is room for it."""
        try:
            async for payload in requests:
                self._active_s = self._now()
                self._begin(payload)
                while len(self._running) >= self._service.max_in_flight:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if self._error is not None:
                    return
            self._received_all = True
            self._parts.wake()
        except Exception as error:
            self._end_with(error)

    async def answers(self) -> AsyncGenerator[bytes, None]:
        """The messages to the client. Raises GrpcError for a stream that was idle for too long, and QueueFull."""
        while self._running or self._parts or not self._received_all:
            if self._error is not None and not self._parts and not self._running:
                raise self._error
            part = await self._parts.next()
            if part is not None:
                self._active_s = self._now()
                yield part.body

    def drain(self) -> None:
        """Ends the stream after the responses to the requests that it has received."""
        self._end_with(GrpcError(Code.UNAVAILABLE, "the server is shutting down"))

    def close(self) -> None:
        """Cancels what is in progress."""
        self._timer.cancel()
        self._parts.close()
        for ticket in self._running.values():
            if ticket is not None:
                ticket.cancel()
        self._running.clear()

    def _begin(self, payload: Any) -> None:
        key = object()
        request: _Request | None = None

        def sink(result: ItemResult) -> None:
            assert request is not None
            if result.final:
                self._end(key)
            self._put(request, result)

        self._running[key] = None
        try:
            request = self._service.read(payload, self._call)
            ticket = self._backend.submit(request.model, request.version, request.item, sink)
            if key in self._running:
                self._running[key] = ticket
        except PenstockError as error:
            self._end(key)
            self._put(request, ItemResult(error=error))

    def _end(self, key: object) -> None:
        self._running.pop(key, None)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _put(self, request: _Request | None, result: ItemResult) -> None:
        """Queues the message for one result."""
        if result.error is not None:
            message = _StreamInfer(error_message=result.error.message)
            if request is not None:
                request.log(result.error)
                message.infer_response.MergeFrom(request.response())
            message.infer_response.parameters[ERROR_CODE].string_param = result.error.code
            message.infer_response.parameters[FINAL].bool_param = result.final
            body = message.SerializeToString()
        elif len(result.body):
            body = b"".join(field_of(_INFER_RESPONSE, result.body, _FINAL[result.final]))
        elif request is not None and request.empty_final:
            body = b"".join(field_of(_INFER_RESPONSE, request.response().SerializeToString(), _FINAL[True]))
        else:
            self._parts.wake()
            return
        self._parts.put(ItemResult(body=body, final=result.final))

    def _check_idle(self) -> None:
        left_s = self._active_s + self._service.idle_s - self._now()
        if self._running:
            left_s = self._service.idle_s
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check_idle)
            return
        text = f"the stream had no message for {self._service.idle_s:g} s (limits.grpc_idle_timeout_s)"
        self._end_with(GrpcError(Code.DEADLINE_EXCEEDED, text))

    def _end_with(self, error: Exception) -> None:
        self._error = error
        self._parts.wake()


GUARD: Final = "inference"

Authorize = Callable[[str, bytes | None], None]


def make_grpc_listener(
    backend: Backend,
    triton: TritonExtensions,
    limits: LimitsConfig,
    check: Authorize,
    tls: ssl.SSLContext | None = None,
) -> GrpcListener:
    """A listener that is not started. `check` receives a guard ("inference" or "management") and the value of the
    metadata key `authorization`; it raises Unauthorized or Forbidden."""
    protos = open_inference()
    service = OpenInferenceService(backend, limits.max_pipelined, limits.grpc_idle_timeout_s)
    health = HealthService(protos, [NAME], backend.ready)
    services = [
        GrpcService(
            NAME,
            [service, _descriptions(backend), grpc_functions(triton)],
            GUARD,
            GUARDS,
            raw=RAW_CALLS,
            direct=DIRECT_CALLS,
        ),
        GrpcService(HealthService.NAME, [health]),
        GrpcService(ReflectionService.NAME, [ReflectionService(protos, [NAME, HealthService.NAME])], GUARD),
    ]
    dispatcher = CallDispatcher(protos, services, check, failure)
    return GrpcListener(backend, dispatcher, GrpcLimits(limits), tls, service.drain)
