"""The way of a gRPC call to its function: token, message, and the status of an error."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from msgspec import Struct, field

from penstock.errors import PenstockError
from penstock.serving.grpc.calls import Code, GrpcError
from penstock.serving.protocols.bodies import ERROR_CODE
from penstock.serving.protocols.protobuf import ProtoSet

log = logging.getLogger("penstock.frontends")

PUSHBACK: Final = "grpc-retry-pushback-ms"  # tells a client when to try again (gRFC A6)
HEALTH: Final = "grpc.health.v1"
SERVING: Final = 1
NOT_SERVING: Final = 2


class GrpcService(Struct, frozen=True):
    """A service by its full name, and the objects whose methods serve its calls, under the names of the calls.

    A method takes the request, or the requests of a client's stream, and the call's context. `raw` names the calls
    whose methods take and return serialized messages.
    """

    name: str
    functions: Sequence[object]
    guard: str = ""  # the group whose token opens it; empty: open to all
    guards: Mapping[str, str] = field(default_factory=dict)  # calls with another guard
    refused: Mapping[str, GrpcError] = field(default_factory=dict)  # calls that fail even with the token
    raw: frozenset[str] = frozenset()


class _Call(Struct, frozen=True):
    handler: Any
    guard: str


class CallDispatcher(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of each call before the server reads anything but its path and metadata.

    `authorize` receives a guard and the value of the metadata key `authorization`; it raises GrpcError. `failure` gives
    the status of an error.
    """

    def __init__(
        self,
        protos: ProtoSet,
        services: Sequence[GrpcService],
        authorize: Callable[[str, bytes | None], None],
        failure: Callable[[PenstockError], GrpcError],
    ) -> None:
        self._protos = protos
        self._authorize = authorize
        self._failure = failure
        self._calls: dict[str, _Call] = {}
        for service in services:
            for method in protos.service(service.name).methods:
                guard = service.guards.get(method.name, service.guard)
                self._calls[f"/{service.name}/{method.name}"] = _Call(self._handler(service, method), guard)

    def add(self, path: str, handler: Any, guard: str) -> None:
        """Serves the calls of `path`, such as "/pkg.Service/Call", with a handler that was made elsewhere."""
        self._calls[path] = _Call(handler, guard)

    def service(self, details: Any) -> Any:
        """The handler of a call; None for an unknown call. Without the token, a handler that fails."""
        call = self._calls.get(details.method)
        if call is None:
            return None
        if call.guard:
            try:
                self._authorize(call.guard, _authorization(details.invocation_metadata))
            except GrpcError as error:
                return _failing(error)
        return call.handler

    def _handler(self, service: GrpcService, method: Any) -> Any:
        if method.name in service.refused:
            return _failing(service.refused[method.name])
        function = next((f for each in service.functions if (f := getattr(each, method.name, None))), None)
        if function is None:
            path = f"{service.name}/{method.name}"
            return _failing(GrpcError(Code.UNIMPLEMENTED, f"Method {path} is unimplemented"))

        async def stream(request: Any, context: Any) -> None:
            async with aclosing(function(request, context)) as answers:
                async for answer in answers:
                    await context.write(answer)

        raw = method.name in service.raw
        read = None if raw else _reader(self._protos.message(method.input_type.full_name))
        write = None if raw else _write
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._serving(stream), read, write)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._serving(stream), read, write)
        return grpc.unary_unary_rpc_method_handler(self._serving(function), read, write)

    def _serving(self, run: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """A function of request and context that ends the call with the status of an error."""

        async def serve(request: Any, context: Any) -> Any:
            try:
                if isinstance(request, GrpcError):
                    raise request
                return await run(request, context)
            except GrpcError as error:
                failure = error
            except PenstockError as error:
                failure = self._failure(error)
            except Exception as error:
                log.error("event=bug where=grpc consequence=answered_internal", exc_info=error)
                failure = GrpcError(Code.INTERNAL, "internal error")
            trailing = [(ERROR_CODE, failure.error_code)] if failure.error_code else []
            if failure.retry_after_s is not None:
                trailing.append((PUSHBACK, str(round(failure.retry_after_s * 1000))))
            await context.abort(failure.code, failure.details, tuple(trailing))

        return serve


def _failing(error: GrpcError) -> Any:
    """A handler that ends any kind of call before it reads a message."""

    async def fail(requests: Any, context: Any) -> None:
        await context.abort(error.code, error.details)

    return grpc.stream_stream_rpc_method_handler(fail)


def _reader(cls: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return cls.FromString(data)
        except DecodeError:
            return GrpcError(Code.INVALID_ARGUMENT, f"the request is not a valid {cls.DESCRIPTOR.full_name}")

    return read


def _write(response: Any) -> bytes:
    data: bytes = response.SerializeToString()
    return data


def _authorization(metadata: Any) -> bytes | None:
    for name, value in metadata or ():
        if name == "authorization":
            return value.encode("utf-8", "replace") if isinstance(value, str) else value
    return None


class HealthService:
    """The standard health service, without a token. Watch is not served, which clients take for healthy."""

    NAME: Final = f"{HEALTH}.Health"

    def __init__(self, protos: ProtoSet, services: Sequence[str], healthy: Callable[[], bool]) -> None:
        self._answer = protos.message(f"{HEALTH}.HealthCheckResponse")
        self._known = frozenset(("", *services))
        self._healthy = healthy

    async def Check(self, request: Any, context: Any) -> Any:
        """Whether the server can answer; the same for each of its services."""
        if request.service not in self._known:
            raise GrpcError(Code.NOT_FOUND, f"there is no service {request.service[:200]!r}")
        return self._answer(status=SERVING if self._healthy() else NOT_SERVING)
