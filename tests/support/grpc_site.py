"""A gRPC listener, and a client of it that may break every rule: raw frames over a socket."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hpack import Decoder
from hyperframe.frame import Frame

from penstock.config.schema import LimitsConfig
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService
from penstock.serving.grpc.inference import DIRECT_CALLS, NAME, RAW_CALLS, OpenInferenceService, failure
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.serving.http2 import frames as h2
from penstock.serving.http2.frames import frame
from penstock.serving.http2.streams import RECEIVE_WINDOW
from penstock.serving.protocols.oip_protobuf import open_inference
from support.backend import FakeBackend

LIMIT_S = 10.0
LIVE, INFER, STREAM = (f"/{NAME}/{name}" for name in ("ServerLive", "ModelInfer", "ModelStreamInfer"))


# a client that accepts everything
OPEN = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 2**30}) + h2.window_update(0, 2**30)


class RawClient:
    """Sends frames; `reply(stream)` waits for headers, data and trailers of one response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = Decoder()
        self.frames: list[Any] = []

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    def call(self, id: int, path: str = LIVE, *more: tuple[str, str], flags: int = h2.END_HEADERS) -> None:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")]
        self.send(frame(h2.HEADERS, flags, id, h2.encode_headers([*fields, *more])))

    async def message(self, id: int, data: bytes, *, flag: int = 0, end: bool = True, size: int = 2**14) -> None:
        """Sends a message as the server's window allows."""
        whole, window = struct.pack(">BI", flag, len(data)) + data, RECEIVE_WINDOW
        for at in range(0, len(whole), size):
            part = whole[at : at + size]
            while window < len(part):
                found = await self.until(lambda each: each.type == h2.WINDOW_UPDATE and each.stream_id == id)
                window += found.window_increment
            window -= len(part)
            self.send(frame(h2.DATA, h2.END_STREAM if end and at + size >= len(whole) else 0, id, part))

    async def infer(self, id: int, data: bytes, headers: Sequence[tuple[str, str]] = (), **options: Any) -> None:
        """Sends a call of ModelInfer with its message."""
        self.call(id, INFER, *headers)
        await self.message(id, data, **options)

    async def ask(self, id: int) -> tuple[str, str, bytes]:
        """The response to a small call."""
        await self.infer(id, request(10))
        return await self.reply(id)

    async def next(self) -> Any:
        """The next frame; None at the end of the connection."""
        async with asyncio.timeout(LIMIT_S):
            try:
                head = await self.reader.readexactly(9)
                found, size = Frame.parse_frame_header(memoryview(head))
                found.parse_body(memoryview(await self.reader.readexactly(size)))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return None
        if found.type == h2.HEADERS:
            found.fields = dict(self.decoder.decode(found.data))
        if found.type == h2.SETTINGS and not found.flags:
            self.send(frame(h2.SETTINGS, h2.ACK, 0))
        self.frames.append(found)
        return found

    async def until(self, right: Callable[[Any], bool]) -> Any:
        """The first frame that is right."""
        while not right(found := await self.next()):
            assert found is not None, self.frames
        return found

    async def reply(self, id: int) -> tuple[str, str, bytes]:
        """(status, text, message) of a call."""
        data = b""
        while True:
            found = await self.until(lambda each: each.stream_id == id)
            if found.type == h2.RST_STREAM:
                return f"reset {found.error_code}", "", data
            if found.type == h2.DATA:
                data += found.data
            elif found.type == h2.HEADERS and "END_STREAM" in found.flags:
                status = found.fields.get("grpc-status", found.fields.get(":status", ""))
                return status, found.fields.get("grpc-message", ""), data[5:]

    async def ended(self) -> Any:
        """The last GOAWAY frame; None if there was none."""
        while await self.next() is not None:
            pass
        return next((each for each in reversed(self.frames) if each.type == h2.GOAWAY), None)


class Site:
    """A listener, its backend, and clients."""

    def __init__(self, backend: FakeBackend, listener: GrpcListener, port: int) -> None:
        self.backend, self.listener, self.port = backend, listener, port
        self.clients: list[RawClient] = []
        self.budget = listener._server.listener.budget

    async def connect(self, first: bytes = OPEN) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        client.send(first)
        self.clients.append(client)
        return client


@asynccontextmanager
async def site(models: Any = None, pool_bytes: int = 2**26, backend: Any = None, **limits: Any) -> AsyncIterator[Site]:
    backend = backend or FakeBackend(models, pool_bytes)
    config = LimitsConfig(**limits)
    service = OpenInferenceService(backend, 64, 60.0)
    services = [GrpcService(NAME, [service], raw=RAW_CALLS, direct=DIRECT_CALLS)]
    dispatcher = CallDispatcher(open_inference(), services, lambda guard, token: None, failure)
    listener = GrpcListener(backend, dispatcher, GrpcLimits(config), drain=service.drain)
    found = Site(backend, listener, await listener.start("127.0.0.1", 0, "a_key"))
    try:
        yield found
    finally:
        for client in found.clients:
            client.writer.close()
        await listener.close(1.0)
    budget = found.budget
    budget.sweep(0)
    assert budget._parts == 0, "bytes that were counted and never given back"


def request(size: int, model: str = "echo", seed: int | None = None) -> bytes:
    """A request with one tensor: of zeros, or of random bytes, which cannot be packed."""
    message = open_inference().message("inference.ModelInferRequest")(model_name=model)
    message.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    message.raw_input_contents.append(bytes(size) if seed is None else random.Random(seed).randbytes(size))
    data: bytes = message.SerializeToString()
    return data
