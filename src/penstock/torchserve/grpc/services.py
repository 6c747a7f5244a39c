"""Services of functions: which function answers a call, whose token opens it, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from msgspec import Struct

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.torchserve.grpc import messages
from penstock.torchserve.grpc.errors import Code, Refusal, refused
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.protocol.api import Administration, ApiError, Group

log = logging.getLogger("penstock.frontends")

DISABLED: Final = Refusal(Code.PERMISSION_DENIED, "Model API disabled\norg.pytorch.serve.archive.model.ModelException")

Failure = Callable[[Exception], Refusal]


class Service(Struct, frozen=True):
    """The service of this full name and the object whose methods, named as its calls, answer them."""

    name: str
    functions: object
    guard: Group | None = None  # whose token opens it
    disabled: frozenset[str] = frozenset()  # calls that are refused to all who have the token


class _Call(Struct, frozen=True):
    handler: Any
    guard: Group | None
    disabled: bool


class Services(grpc.GenericRpcHandler):  # type: ignore[misc]
    """What a server asks for each call, before it reads anything of it but its path and metadata."""

    def __init__(self, services: Sequence[Service], backend: Backend, administration: Administration) -> None:
        self._backend = backend
        self._administration = administration
        self._calls: dict[str, _Call] = {}
        for service in services:
            for method in messages.service(service.name).methods:
                path = f"{service.name}/{method.name}"
                function = getattr(service.functions, method.name, None)
                handler = _refusing(_unserved(path)) if function is None else self._handler(method, function)
                self._calls[f"/{path}"] = _Call(handler, service.guard, method.name in service.disabled)

    def service(self, details: Any) -> Any:
        """The handler of a call, None if there is no such call. Without the token it is one that refuses."""
        call = self._calls.get(details.method)
        if call is None:
            return None
        if call.guard is not None:
            try:
                self._administration.check_token(call.guard, _authorization(details.invocation_metadata))
            except ApiError as error:
                return _refusing(Refusal(Code.PERMISSION_DENIED, error.message))
        return _refusing(DISABLED) if call.disabled else call.handler

    def _handler(self, method: Any, function: Any) -> Any:
        read = _reader(messages.message(method.input_type.full_name))
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._streaming(function), read, _write)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(function), read, _write)
        return grpc.unary_unary_rpc_method_handler(self._unary(function), read, _write)

    def _unary(self, function: Callable[[Any], Awaitable[Any]]) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            try:
                if isinstance(request, Refusal):
                    raise request
                return await function(request)
            except Exception as error:
                failure = self._failure(error)
            await context.abort(failure.code, failure.details)

        return serve

    def _streaming(self, function: Any) -> Any:
        async def serve(request: Any, context: Any) -> None:
            try:
                if isinstance(request, Refusal):
                    raise request
                async with aclosing(function(request)) as answers:
                    async for answer in answers:
                        await context.write(answer)
                return
            except Exception as error:
                failure = self._failure(error)
            await context.abort(failure.code, failure.details)

        return serve

    def _failure(self, error: Exception) -> Refusal:
        if isinstance(error, Refusal):
            return error
        if isinstance(error, PenstockError):
            return refused(api_error(error, self._backend))
        log.error("event=bug where=grpc consequence=answered_internal", exc_info=error)
        return Refusal(Code.INTERNAL, "internal error")


def _unserved(path: str) -> Refusal:
    return Refusal(Code.UNIMPLEMENTED, f"Method {path} is unimplemented")


def _refusing(refusal: Refusal) -> Any:
    """A handler that ends any kind of call before it has read a message."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(refusal.code, refusal.details)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _reader(cls: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return cls.FromString(data)
        except DecodeError:
            return Refusal(Code.INVALID_ARGUMENT, f"the request is no {cls.DESCRIPTOR.full_name}")

    return read


def _write(response: Any) -> bytes:
    data: bytes = response.SerializeToString()
    return data


def _authorization(metadata: Any) -> bytes | None:
    for name, value in metadata or ():
        if name == "authorization":
            return value.encode("utf-8", "replace") if isinstance(value, str) else value
    return None
