"""gRPC services: their messages, the dispatch of calls to functions, the token checks and the errors.

The messages come from the descriptors that `make protos` writes. They live in their own pool, so that a program that
loads the same protos elsewhere keeps its own classes.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from importlib import resources
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Struct

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.grpc.calls import Code, GrpcError, log_5xx, management_error
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.protocol.api import ApiError, Group

log = logging.getLogger("penstock.frontends")

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
OPEN_INFERENCE: Final = "org.pytorch.serve.grpc.openinference"
HEALTH: Final = "grpc.health.v1"
DISABLED: Final = GrpcError(
    Code.PERMISSION_DENIED, "Model API disabled\norg.pytorch.serve.archive.model.ModelException"
)


def _read_descriptors() -> Any:
    data = resources.files(__package__).joinpath("protos", "descriptors.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL: Final = _read_descriptors()


def message_class(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def service_descriptor(name: str) -> Any:
    return POOL.FindServiceByName(name)


class GrpcService(Struct, frozen=True):
    """A service by its full name, and the object whose methods serve its calls, under the names of the calls."""

    name: str
    functions: object
    guard: Group | None = None  # the group whose token opens it
    disabled: frozenset[str] = frozenset()  # calls that fail even with the token


class _Call(Struct, frozen=True):
    handler: Any
    guard: Group | None
    disabled: bool


class CallDispatcher(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of each call before the server reads anything but its path and metadata."""

    def __init__(self, services: Sequence[GrpcService], backend: Backend, administration: Administrator) -> None:
        self._backend = backend
        self._administration = administration
        self._calls: dict[str, _Call] = {}
        for service in services:
            for method in service_descriptor(service.name).methods:
                path = f"{service.name}/{method.name}"
                function = getattr(service.functions, method.name, None)
                if function is None:
                    handler = _failing(GrpcError(Code.UNIMPLEMENTED, f"Method {path} is unimplemented"))
                else:
                    handler = self._handler(method, function)
                self._calls[f"/{path}"] = _Call(handler, service.guard, method.name in service.disabled)

    def service(self, details: Any) -> Any:
        """The handler of a call; None for an unknown call. Without the token, a handler that fails."""
        call = self._calls.get(details.method)
        if call is None:
            return None
        if call.guard is not None:
            try:
                self._administration.check_token(call.guard, _authorization(details.invocation_metadata))
            except ApiError as error:
                return _failing(GrpcError(Code.PERMISSION_DENIED, error.message))
        return _failing(DISABLED) if call.disabled else call.handler

    def _handler(self, method: Any, function: Any) -> Any:
        async def stream(request: Any, context: Any) -> None:
            async with aclosing(function(request)) as answers:
                async for answer in answers:
                    await context.write(answer)

        read = _reader(message_class(method.input_type.full_name))
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._serving(stream), read, _write)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._serving(stream), read, _write)
        unary = self._serving(lambda request, context: function(request))
        return grpc.unary_unary_rpc_method_handler(unary, read, _write)

    def _serving(self, run: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """A function of request and context that ends the call with the status of an error."""

        async def serve(request: Any, context: Any) -> Any:
            try:
                if isinstance(request, GrpcError):
                    raise request
                return await run(request, context)
            except Exception as error:
                failure = self._failure(error)
            await context.abort(failure.code, failure.details)

        return serve

    def _failure(self, error: Exception) -> GrpcError:
        if isinstance(error, GrpcError):
            return error
        if isinstance(error, PenstockError):
            found = api_error(error, self._backend)
            log_5xx("", None, "", found.status, error)
            return management_error(found)
        log.error("event=bug where=grpc consequence=answered_internal", exc_info=error)
        return GrpcError(Code.INTERNAL, "internal error")


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
