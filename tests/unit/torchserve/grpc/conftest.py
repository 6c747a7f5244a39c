"""A gRPC listener with fakes behind it, and a client that calls it by the names of its calls."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from penstock.config.schema import LimitsConfig
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.torchserve import grpc as services
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.grpc import make_grpc_listener
from support.backend import FakeBackend
from support.torchserve import FakeAdministration, KnownBackend

LIMIT_S = 10.0
BOTH = frozenset({"inference", "management"})
SERVICES = (
    f"{services.INFERENCE}.InferenceAPIsService",
    f"{services.MANAGEMENT}.ManagementAPIsService",
    f"{services.OPEN_INFERENCE}.GRPCInferenceService",
    f"{services.HEALTH}.Health",
)
METHODS = {method.name: method for name in SERVICES for method in services.service_descriptor(name).methods}


class GrpcSite:
    """A running listener: `await site(call, metadata=..., **fields)` returns the answer, or a list for a stream."""

    def __init__(
        self, administration: FakeAdministration, backend: FakeBackend, server: GrpcListener, port: int
    ) -> None:
        self.administration = administration
        self.backend = backend
        self.server = server
        self.port = port
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    def begin(
        self, name: str, /, metadata: Any = None, raw: bytes | None = None, requests: Any = None, **fields: Any
    ) -> Any:
        """The call, which can be cancelled, awaited or iterated. `raw` replaces the request, `requests` all of them."""
        method = METHODS[name]
        request = services.message_class(method.input_type.full_name)(**fields)
        make = getattr(self.channel, ("stream" if method.client_streaming else "unary") + "_"
                       + ("stream" if method.server_streaming else "unary"))  # fmt: skip
        call = make(
            f"/{method.containing_service.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString() if raw is None else raw,
            response_deserializer=services.message_class(method.output_type.full_name).FromString,
        )
        if method.client_streaming:  # without `requests` nothing is sent: at a refused call that is the client's error
            return call(requests, metadata=metadata, timeout=LIMIT_S)
        return call(request, metadata=metadata, timeout=LIMIT_S)

    async def __call__(self, name: str, /, metadata: Any = None, raw: bytes | None = None, **fields: Any) -> Any:
        call = self.begin(name, metadata, raw, **fields)
        return [answer async for answer in call] if METHODS[name].server_streaming else await call

    async def refusal(self, name: str, /, metadata: Any = None, raw: bytes | None = None, **fields: Any) -> Any:
        """(status, text) of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self(name, metadata, raw, **fields)
        return raised.value.code().name, raised.value.details()


@pytest.fixture
def administration() -> FakeAdministration:
    return FakeAdministration()


@pytest.fixture
def grpc_site(administration: FakeAdministration) -> Callable[..., Any]:
    """`async with grpc_site(models, ...) as ask`: both groups on one port, with all options on."""

    @asynccontextmanager
    async def run(
        models: Any = None, max_request_bytes: int = 2**20, groups: Any = BOTH, **keys: Any
    ) -> AsyncIterator[GrpcSite]:
        backend = KnownBackend(models)
        keys = {"enable_model_api": True, "ts_open_inference_protocol": True} | keys
        config = ListenerConfig(groups, Properties(**keys))
        limits = GrpcLimits(LimitsConfig(max_body_bytes=max_request_bytes, max_connections=100))
        server = make_grpc_listener(backend, administration, config, limits)
        site = GrpcSite(administration, backend, server, await server.start("127.0.0.1", 0, "a_key"))
        try:
            yield site
        finally:
            await site.channel.close()
            await server.close(1.0)

    return run


@pytest.fixture
def grpc_calls() -> list[str]:
    """The names of all calls."""
    return list(METHODS)
