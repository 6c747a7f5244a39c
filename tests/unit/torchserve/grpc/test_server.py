from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from penstock.config.schema import LimitsConfig
from penstock.serving.grpc.listener import GrpcLimits
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.grpc.server import make_grpc_listener
from support.backend import FakeBackend

LIMITS = GrpcLimits(LimitsConfig(max_body_bytes=1000, max_connections=10))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
INFERENCE = ListenerConfig(frozenset({"inference"}), Properties())


async def ping(channel, timeout_s=10.0):
    try:
        call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping")
        return await call(b"", timeout=timeout_s, wait_for_ready=True)
    finally:
        await channel.close()


async def test_a_unix_socket_is_removed_at_the_end(administration, tmp_path):
    path = tmp_path / "s"
    server = make_grpc_listener(FakeBackend(), administration, INFERENCE, LIMITS)
    await server.start(f"unix:{path}", 0, "grpc_inference_address")
    try:
        assert b"Healthy" in await ping(grpc.aio.insecure_channel(f"unix:{path}"))
    finally:
        await server.close(1.0)
    assert not path.exists()


async def test_old_connections_are_closed(administration):
    limits = GrpcLimits(LIMITS.limits, max_age_ms=100, max_age_grace_ms=100)
    server = make_grpc_listener(FakeBackend({"m": lambda call: None}), administration, INFERENCE, limits)
    port = await server.start("127.0.0.1", 0, "a_key")
    try:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"\x0a\x01m", timeout=10.0)
        assert raised.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED
        await channel.close()
    finally:
        await server.close(1.0)


@pytest.mark.parametrize(
    ("limit", "sent", "word"),
    [("header_timeout_s", b"", b"timeout"), ("idle_timeout_s", PREFACE, b"connection idle")],
)
async def test_a_silent_connection_is_closed(administration, limit, sent, word):
    limits = GrpcLimits(LimitsConfig(**{limit: 0.1}))
    server = make_grpc_listener(FakeBackend(), administration, INFERENCE, limits)
    port = await server.start("127.0.0.1", 0, "a_key")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert word in await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        await writer.wait_closed()
    finally:
        await server.close(1.0)


async def test_reflection_lists_the_services(grpc_site):
    async with grpc_site(ts_open_inference_protocol=False) as ask:

        def names():
            with grpc.insecure_channel(f"127.0.0.1:{ask.port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                found = database.FindFileContainingSymbol("org.pytorch.serve.grpc.inference.PredictionsRequest")
                return set(database.get_services()), found.name

        services, file = await asyncio.to_thread(names)
        assert file == "inference.proto"
        assert services == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "org.pytorch.serve.grpc.inference.InferenceAPIsService",
            "org.pytorch.serve.grpc.management.ManagementAPIsService",
        }
