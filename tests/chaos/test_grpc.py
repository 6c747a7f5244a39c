"""gRPC clients that cancel, flood, leave, or have their workers killed."""

import asyncio
import contextlib
import gzip
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from penstock.serving.protocols.oip_protobuf import open_inference

PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
SERVICE = "/inference.GRPCInferenceService/"
SOURCE = """
    import asyncio
    import random

    import numpy as np

    async def waits(items):
        await asyncio.sleep(60)

    def echo(items):
        return items

    def large(items):
        return [{"n": np.zeros([1, 60_000], np.uint8)} for _ in items]

    class Parts:
        async def predict(self, items):
            for n in range(20):
                await asyncio.sleep(random.uniform(0, 0.02))
                yield [{"n": np.array([n])} for _ in items]
"""
_message = open_inference().message
Request, Response = _message("inference.ModelInferRequest"), _message("inference.ModelInferResponse")
StreamResponse = _message("inference.ModelStreamInferResponse")
LIVE = b"\x08\x01"


def request(model: str, id: str = "", size: int = 4) -> bytes:
    found = Request(model_name=model, id=id)
    found.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    found.raw_input_contents.append(bytes(size))
    data: bytes = found.SerializeToString()
    return data


def channel(server: Any) -> Any:
    return grpc.aio.insecure_channel(server.urls["grpc"].removeprefix("grpc://"))


async def test_cancelled_calls_leave_nothing_behind(guarded: Callable[..., Any], chaos: SimpleNamespace) -> None:
    server = guarded(SOURCE, "waits", "echo", ports=PORTS)

    async def cancel(count: int, size: int) -> None:
        async with channel(server) as found:
            infer = found.unary_unary(SERVICE + "ModelInfer")
            for _ in range(count // 50):
                calls = [infer(request("waits", size=size)) for _ in range(50)]
                await asyncio.sleep(0.01)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
            await chaos.until(lambda: server.metric("penstock_requests_in_flight", model="waits") == 0)

    for _ in range(2):  # until the allocator has what such a crowd needs
        await cancel(1000, 4)
        await cancel(200, 200_000)
    memory, descriptors = chaos.anonymous_bytes(server), chaos.descriptors(server)
    await cancel(chaos.count(1000, 10_000), 4)
    await cancel(chaos.count(200, 2000), 200_000)
    assert chaos.anonymous_bytes(server) - memory < 32 * 2**20  # the allocator keeps 10 to 20 MiB of a crowd
    assert chaos.descriptors(server) - descriptors < 5
    assert server.metric("penstock_slab_pool_used_bytes") == 0


async def test_each_stream_under_killed_workers_ends_exactly_once(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "Parts", "--instances", "2", ports=PORTS)
    ended: dict[str, str] = {}

    async def one(stream: int) -> None:
        ids = [f"{stream}-{n}" for n in range(chaos.count(10, 60))]
        async with channel(server) as found:
            call = found.stream_stream(SERVICE + "ModelStreamInfer", response_deserializer=StreamResponse.FromString)
            parts: dict[str, int] = {}
            async for answer in call(iter([request("parts", id) for id in ids])):
                id = answer.infer_response.id
                assert id not in ended, "an answer after the end"
                if answer.error_message:
                    assert "worker" in answer.error_message
                    ended[id] = "failed"
                    continue
                parts[id] = parts.get(id, 0) + 1
                if parts[id] == 20:
                    ended[id] = "whole"
        assert set(ids) <= ended.keys()

    streams = [asyncio.ensure_future(one(n)) for n in range(8)]
    for _ in range(chaos.count(2, 10)):
        await asyncio.sleep(0.2)
        await chaos.kill_one(server, 2)
    await asyncio.gather(*streams)
    assert "whole" in ended.values()


async def test_a_silent_stream_ends_and_a_busy_one_does_not(guarded: Callable[..., Any]) -> None:
    server = guarded(SOURCE, "Parts", "--set", "limits.grpc_idle_timeout_s=0.4", ports=PORTS)
    async with channel(server) as found:
        call = found.stream_stream(SERVICE + "ModelStreamInfer")()
        for _ in range(5):
            await call.write(request("parts"))
            for _ in range(20):
                await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert raised.value.details() == "the stream had no message for 0.4 s (limits.grpc_idle_timeout_s)"


# ---- raw HTTP/2


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """A literal header of HPACK that is not indexed."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


HEAD = b"".join(
    header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", SERVICE.encode() + b"ServerLive"),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
NO_METHOD = HEAD.replace(b"ServerLive", b"ServerGone")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)


def odd(n: int) -> range:
    """The streams of a client that has opened n."""
    return range(2 * n + 1, 2 * n + 201, 2)


FLOODS = {
    "reset": lambda n: b"".join(frame(1, 4, k, HEAD) + frame(3, 0, k, bytes(4)) for k in odd(n)),
    "settings": lambda n: frame(4, 0, 0, struct.pack(">HI", 4, 65535)) * 100,
    "ping": lambda n: frame(6, 0, 0, bytes(8)) * 100,
    "empty data": lambda n: frame(0, 0, 1) * 100,
    "continuation": lambda n: b"" if n else frame(1, 0, 1, HEAD) + frame(9, 0, 1, header(b"x-a", bytes(100))) * 20_000,
    "garbage": lambda n: b"\xff" * 4096,
    "rejected calls": lambda n: b"".join(frame(1, 5, k, NO_METHOD) for k in odd(n)),
    "pings and windows": lambda n: (frame(6, 0, 0, bytes(8)) + frame(8, 0, 0, struct.pack(">I", 1))) * 100,
}  # fmt: skip


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_leaves_the_server_to_the_others(
    guarded: Callable[..., Any], chaos: SimpleNamespace, flood: str
) -> None:
    server = guarded(SOURCE, "echo", ports=PORTS)
    host, port = server.urls["grpc"].removeprefix("grpc://").split(":")
    going = True

    async def attack() -> None:
        while going:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                drain = asyncio.ensure_future(reader.read(2**30))
                drain.add_done_callback(lambda task: task.cancelled() or task.exception())
                writer.write(PREFACE)
                for n in range(0, 10**6, 100):
                    if not going or reader.at_eof():
                        break
                    writer.write(FLOODS[flood](n))
                    with contextlib.suppress(TimeoutError):  # the server may read no more
                        await asyncio.wait_for(writer.drain(), 0.5)
                    await asyncio.sleep(0)
                drain.cancel()
                writer.transport.abort()
            await asyncio.sleep(0.01)

    async def served(infer: Callable[..., Any], count: int) -> None:
        for n in range(count):
            assert Response.FromString(await infer(request("echo", str(n)), timeout=20)).id == str(n)

    async with channel(server) as found:
        infer = found.unary_unary(SERVICE + "ModelInfer")
        await served(infer, 10)
        before = chaos.anonymous_bytes(server)
        attacks = [asyncio.ensure_future(attack()) for _ in range(2)]
        try:
            await served(infer, chaos.count(100, 1000))
            assert chaos.anonymous_bytes(server) - before < 256 * 2**20
        finally:
            going = False
            await asyncio.gather(*attacks)
        await served(infer, 10)


def call(id: int, *more: bytes, message: bytes = b"", flag: int = 0, length: int = 0, end: int = 1) -> bytes:
    """A call of ModelInfer with further fields of HPACK, and its message or, with `length`, a part of one."""
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", INFER), (b"content-type", b"application/grpc"))
    block = b"".join([*(header(*each) for each in fields), *more])
    begin = struct.pack(">BI", flag, length or len(message)) + message
    return frame(1, 4, id, block) + (frame(0, end, id, begin) if message else b"")


INFER = SERVICE.encode() + b"ModelInfer"
STREAMS = range(1, 801, 2)
GZIP = header(b"grpc-encoding", b"gzip")
BOMB = gzip.compress(bytes(60_000_000))
LARGE = request("large")
NO_WINDOW = frame(4, 0, 0, struct.pack(">HI", 4, 0))
FIRST_OF_TABLE = b"\x40\x05x-bin\x7f\xd9\x1c" + b"A" * 3800  # a literal that the table keeps, and then byte \xbe
# what a connection sends: calls that occupy memory of the server for as long as they can
HOARDS = {
    "parts of messages": PREFACE + b"".join(call(n, message=bytes(50_000), length=60_000, end=0) for n in STREAMS),
    "metadata": PREFACE
    + call(1, FIRST_OF_TABLE)
    + b"".join(call(n, b"\xbe" * 15, header(b"x-n", b"%d" % n)) for n in STREAMS[1:150]),
    "packed messages": PREFACE + b"".join(call(n, GZIP, message=BOMB, flag=1) for n in STREAMS[:8]),
    "answers": PREFACE + NO_WINDOW + b"".join(call(n, message=LARGE) for n in STREAMS[:100]),
}  # fmt: skip


@pytest.mark.parametrize("hoard", HOARDS)
async def test_what_clients_occupy_is_bounded_and_others_are_served(
    guarded: Callable[..., Any], chaos: SimpleNamespace, hoard: str
) -> None:
    sets = "--set", "limits.max_transit_bytes=33554432", "--set", "models.large.batching.max_queue=100000"
    server = guarded(SOURCE, "echo", "large", *sets, ports=PORTS)
    host, port = server.urls["grpc"].removeprefix("grpc://").split(":")
    async with channel(server) as found, contextlib.AsyncExitStack() as senders:
        infer = found.unary_unary(SERVICE + "ModelInfer")
        await infer(request("echo"))
        before, most = chaos.anonymous_bytes(server), 0
        for n in range(chaos.count(30, 100)):
            reader, writer = await asyncio.open_connection(host, int(port), limit=2**12)
            senders.callback(writer.close)
            if hoard == "answers":
                writer.transport.pause_reading()
            else:
                drain = asyncio.ensure_future(reader.read(2**30))
                senders.callback(drain.cancel)
            writer.write(HOARDS[hoard])
            await asyncio.sleep(0.1)
            assert Response.FromString(await infer(request("echo", str(n)), timeout=30)).id == str(n)
            most = max(most, chaos.anonymous_bytes(server) - before)
        assert most < 128 * 2**20


async def test_a_message_that_unpacks_beyond_the_bound_is_refused(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "echo", "--set", "limits.max_body_bytes=1000000", ports=PORTS)
    async with channel(server) as found:
        infer = found.unary_unary(SERVICE + "ModelInfer")
        await infer(request("echo"))
        before = chaos.anonymous_bytes(server)
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await infer(bytes(200 * 2**20), compression=grpc.Compression.Gzip, timeout=30)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(gzip.compress(bytes(2**20))) < 2000
        assert chaos.anonymous_bytes(server) - before < 64 * 2**20
        assert await infer(request("echo"))


async def test_a_message_of_a_million_fields_does_not_hold_up_the_server(guarded: Callable[..., Any]) -> None:
    server = guarded(SOURCE, "echo", ports=PORTS)
    async with channel(server) as found:
        infer = found.unary_unary(SERVICE + "ModelInfer")
        call = infer(b"\x08\x01" * 10**6)
        assert await found.unary_unary(SERVICE + "ServerLive")(b"", timeout=2) == LIVE
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
