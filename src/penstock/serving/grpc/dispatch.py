"""The way of a gRPC call to its function, and the standard services for health and reflection.

Source of reflection: https://github.com/grpc/grpc/blob/master/doc/server-reflection.md
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from msgspec import Struct, field

from penstock.errors import PenstockError
from penstock.serving.grpc.call import GrpcCall
from penstock.serving.grpc.messages import CallHead, Code, Compressed, GrpcError, Method
from penstock.serving.http.listener import Listener
from penstock.serving.protocols.bodies import data_of, free
from penstock.serving.protocols.oip_protobuf import ProtoSet

log = logging.getLogger("penstock.serving")

HEALTH: Final = "grpc.health.v1"
SERVING: Final = 1
NOT_SERVING: Final = 2


class GrpcService(Struct, frozen=True):
    """A service by its full name, and the objects whose methods serve its calls, under the names of the calls.

    A method takes the request, or the requests of a client's stream, and the call. `raw` names the calls whose methods
    take a serialized message, as `bytes` or a Buffer that they release, and return one. A method of `direct` is no
    coroutine, takes such a message, and answers with `GrpcCall.reply` or `fail`, at once or later.
    """

    name: str
    functions: Sequence[object]
    guard: str = ""  # the group whose token opens it; empty: open to all
    guards: Mapping[str, str] = field(default_factory=dict)  # calls with another guard
    refused: Mapping[str, GrpcError] = field(default_factory=dict)  # calls that fail even with the token
    raw: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()


class CallDispatcher:
    """Finds the method of each call when its headers arrive, and runs it when its message has arrived.

    `authorize` receives a guard and the value of the metadata key `authorization`; it raises GrpcError, or a
    PenstockError, whose status `failure` gives.
    """

    def __init__(
        self,
        protos: ProtoSet,
        services: Sequence[GrpcService],
        authorize: Callable[[str, bytes | None], None],
        failure: Callable[[PenstockError], GrpcError],
    ) -> None:
        self._authorize = authorize
        self._failure = failure
        self._methods = {
            f"/{service.name}/{method.name}": _method(protos, service, method)
            for service in services
            for method in protos.service(service.name).methods
        }

    def find(self, path: str) -> Method | None:
        return self._methods.get(path)

    def check(self, head: CallHead) -> None:
        """Raises GrpcError for a call that is not served, before its message is read."""
        method = head.method
        if method is None:
            raise GrpcError(Code.UNIMPLEMENTED, f"there is no method {head.path[:200]}")
        if method.guard:
            try:
                self._authorize(method.guard, head.authorization)
            except PenstockError as error:
                raise self._failure(error) from None
        if method.refused is not None:
            raise method.refused

    def start(self, call: GrpcCall, listener: Listener) -> None:
        """Runs the method of a call: its message has arrived, or it is a stream of messages."""
        method = call.head.method
        assert method is not None
        if method.direct and not isinstance(call.messages[0], Compressed):
            try:
                method.function(call.pop(), call)
            except Exception as error:
                call.fail(self._status(error))
        else:
            call.on_cancel = listener.run(self._serve(method, call)).cancel

    async def _serve(self, method: Method, call: GrpcCall) -> None:
        try:
            request = _requests(call, method) if method.client_streaming else method.read(await call.take())
            if isinstance(request, GrpcError):
                raise request
            if method.direct:
                method.function(request, call)
            elif method.server_streaming:
                async with aclosing(method.function(request, call)) as answers:
                    async for answer in answers:
                        await call.write(method.write(answer))
                call.finish()
            else:
                call.reply(method.write(await method.function(request, call)))
        except Exception as error:
            call.on_cancel = None  # which would cancel this task
            call.fail(self._status(error))

    def _status(self, error: Exception) -> GrpcError:
        if isinstance(error, GrpcError):
            return error
        if isinstance(error, PenstockError):
            return self._failure(error)
        log.error("event=bug where=grpc consequence=answered_internal", exc_info=error)
        return GrpcError(Code.INTERNAL, "internal error")


async def _requests(call: GrpcCall, method: Method) -> AsyncIterator[Any]:
    async for message in call:
        yield method.read(message)


def _method(protos: ProtoSet, service: GrpcService, method: Any) -> Method:
    function = next((f for each in service.functions if (f := getattr(each, method.name, None))), None)
    refused = service.refused.get(method.name)
    if function is None and refused is None:
        refused = GrpcError(Code.UNIMPLEMENTED, f"Method {service.name}/{method.name} is unimplemented")
    raw = method.name in service.raw | service.direct
    return Method(
        function,
        service.guards.get(method.name, service.guard),
        refused,
        _same if raw else _reader(protos.message(method.input_type.full_name)),
        _same if raw else _write,
        method.client_streaming,
        method.server_streaming,
        method.name in service.direct,
    )


def _same(message: Any) -> Any:
    return message


def _reader(cls: Any) -> Callable[[Any], Any]:
    """Parses a message, or returns the GrpcError of one that is not valid."""

    def read(payload: Any) -> Any:
        try:
            return cls.FromString(bytes(data_of(payload)))
        except DecodeError:
            return GrpcError(Code.INVALID_ARGUMENT, f"the request is not a valid {cls.DESCRIPTOR.full_name}")
        finally:
            free(payload)

    return read


def _write(response: Any) -> bytes:
    data: bytes = response.SerializeToString()
    return data


class HealthService:
    """The standard health service, without a token. Watch is not served, which clients take for healthy."""

    NAME: Final = f"{HEALTH}.Health"

    def __init__(self, protos: ProtoSet, services: Sequence[str], healthy: Callable[[], bool]) -> None:
        self._answer = protos.message(f"{HEALTH}.HealthCheckResponse")
        self._known = frozenset(("", *services))
        self._healthy = healthy

    async def Check(self, request: Any, context: Any) -> Any:
        """Whether the server is ready; all its services share one state."""
        if request.service not in self._known:
            raise GrpcError(Code.NOT_FOUND, f"there is no service {request.service[:200]!r}")
        return self._answer(status=SERVING if self._healthy() else NOT_SERVING)


_PACKAGE: Final = "grpc.reflection.v1alpha"


class ReflectionService:
    """Describes the services `names`, and itself."""

    NAME: Final = f"{_PACKAGE}.ServerReflection"

    def __init__(self, protos: ProtoSet, names: Sequence[str]) -> None:
        self._pool = protos.pool
        self._names = sorted([*names, self.NAME])
        self._response = protos.message(f"{_PACKAGE}.ServerReflectionResponse")

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        """One response to each request; what does not exist is a response too."""
        async for request in requests:
            if isinstance(request, GrpcError):
                raise request
            response = self._response(original_request=request)
            try:
                self._answer(request, response)
            except KeyError:
                response.error_response.error_code = Code.NOT_FOUND
                response.error_response.error_message = "not found"
            yield response

    def _answer(self, request: Any, response: Any) -> None:
        """Fills the response to one request. Raises KeyError."""
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in self._names:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                self._add(self._pool.FindFileByName(request.file_by_filename), response)
            case "file_containing_symbol":
                self._add(self._pool.FindFileContainingSymbol(request.file_containing_symbol), response)
            case "file_containing_extension":  # only proto2 has extensions
                self._pool.FindMessageTypeByName(request.file_containing_extension.containing_type)
                raise KeyError
            case "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                self._pool.FindMessageTypeByName(name)
                response.all_extension_numbers_response.base_type_name = name
            case _:
                response.error_response.error_code = Code.INVALID_ARGUMENT
                response.error_response.error_message = "the request asks for nothing"

    def _add(self, file: Any, response: Any) -> None:
        """Adds a file and all that it imports."""
        found: dict[str, Any] = {}
        pending = [file]
        while pending:
            each = pending.pop()
            if each.name not in found:
                found[each.name] = each
                pending += each.dependencies
        for each in found.values():
            proto = descriptor_pb2.FileDescriptorProto()
            each.CopyToProto(proto)
            response.file_descriptor_response.file_descriptor_proto.append(proto.SerializeToString())
