"""The Thrift listener with thriftpy2's writer and reader, on both event loops: calls, errors, limits, timeouts."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import pytest
import thriftpy2
from hypothesis import given, settings
from hypothesis import strategies as st
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TMemoryBuffer, TTransportException

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError, ItemFailed, PenstockError, QueueFull
from penstock.serving.http.auth import make_ssl_context
from penstock.torchpipe import thrift_protocol as thrift
from penstock.torchpipe.thrift import ThriftServer
from penstock.types import ItemResult
from support.backend import Call, FakeBackend

IDL = """
struct InferenceParams { 1: required string uuid, 2: required binary data }
struct InferenceResult { 1: required string label, 2: required double score }
service InferenceService { void ping(), InferenceResult infer_batch(1: InferenceParams params), void stop() }
"""
SERVICE: Any = thriftpy2.load_fp(StringIO(IDL), "published_thrift").InferenceService
PARAMS: Any = thriftpy2.load_fp(StringIO(IDL), "published_thrift").InferenceParams
LIMIT_S = 10.0


def answer(call: Call) -> None:
    """The length of the data as the label."""
    call.reply(thrift.pack_result(str(len(call.body())), 0.5))


def message(method: str, args: Any = None, kind: int = thrift.CALL, seqid: int = 1, strict: bool = True) -> bytes:
    buffer = TMemoryBuffer()
    protocol = TBinaryProtocol(buffer, strict_write=strict)
    protocol.write_message_begin(method, kind, seqid)
    (args or getattr(SERVICE, f"{method}_args")()).write(protocol)
    return bytes(buffer.getvalue())


def infer(data: bytes | None, uuid: str | None = "id-1", **more: Any) -> bytes:
    return message("infer_batch", SERVICE.infer_batch_args(params=PARAMS(uuid=uuid, data=data)), **more)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, framed: bool) -> None:
        self.reader = reader
        self.writer = writer
        self.framed = framed

    def send(self, data: bytes) -> None:
        self.writer.write(struct.pack(">i", len(data)) + data if self.framed else data)

    async def _take(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), LIMIT_S)

    async def answer(self, method: str = "infer_batch", seqid: int = 1) -> Any:
        """The result of a call, or its TApplicationException."""
        if self.framed:
            (size,) = struct.unpack(">i", await self._take(4))
        version, length = struct.unpack(">ii", await self._take(8))
        name, found = (await self._take(length)).decode(), struct.unpack(">i", await self._take(4))[0]
        assert (name, found) == (method, seqid)
        body = b""
        while True:  # the fields say where it ends; a byte more each time is slow, and simple
            body += await self._take(1)
            try:
                read = TApplicationException() if version & 255 == thrift.EXCEPTION else result_of(method)
                TBinaryProtocol(TMemoryBuffer(body)).read_struct(read)
            except (TTransportException, struct.error):
                continue
            break
        if self.framed:
            assert size == 8 + length + 4 + len(body)
        return read if isinstance(read, TApplicationException) else getattr(read, "success", None)

    async def closed(self) -> bool:
        """True if the server has closed without sending anything."""
        try:
            return await asyncio.wait_for(self.reader.read(), LIMIT_S) == b""
        except ConnectionResetError:
            return True


def result_of(method: str) -> Any:
    return getattr(SERVICE, f"{method}_result")()


class Listener:
    def __init__(self, server: ThriftServer, backend: FakeBackend, port: int) -> None:
        self.server = server
        self.backend = backend
        self.port = port
        self.clients: list[Client] = []

    async def connect(self, framed: bool = False) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port), framed)
        self.clients.append(client)
        return client


@asynccontextmanager
async def listening(answering: Any = answer, pool_bytes: int = 2**20, **limits: Any) -> AsyncIterator[Listener]:
    backend = FakeBackend({"m": answering}, pool_bytes)
    limits = {"max_body_bytes": pool_bytes, **limits}
    server = ThriftServer(backend, "m", LimitsConfig(**limits))
    _, port = await server.start("127.0.0.1", 0)
    listener = Listener(server, backend, port)
    try:
        yield listener
    finally:
        for client in listener.clients:
            client.writer.close()
        await server.close(1.0)


@pytest.mark.parametrize("framed", [False, True], ids=["buffered", "framed"])
@pytest.mark.parametrize("strict", [True, False], ids=["version", "no version"])
async def test_calls_of_one_connection_are_answered_in_their_framing(framed: bool, strict: bool) -> None:
    async with listening() as listener:
        client = await listener.connect(framed)
        client.send(message("ping", seqid=3, strict=strict))
        assert await client.answer("ping", 3) is None
        for size in (0, 5, 70_000):  # the last one is above what is sent to workers as it is
            client.send(infer(b"x" * size, strict=strict))
            result = await client.answer()
            assert (result.label, result.score) == (str(size), 0.5)
        assert listener.backend.used_bytes == 0
        assert [call.item.codec for call in listener.backend.calls] == ["thrift"] * 3


async def test_the_id_of_a_call_is_kept_if_it_is_printable() -> None:
    async with listening() as listener:
        client = await listener.connect()
        for uuid in ("a/b.jpg", "b\nc", "é", "y" * 200):
            client.send(infer(b"x", uuid))
            await client.answer()
        assert [call.item.request_id for call in listener.backend.calls] == ["a/b.jpg", "", "", ""]


async def test_a_call_may_arrive_in_any_pieces() -> None:
    async with listening() as listener:
        for framed in (False, True):
            client = await listener.connect(framed)
            data = infer(b"abc")
            for byte in struct.pack(">i", len(data)) + data if framed else data:
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert (await client.answer()).label == "3"


@pytest.mark.parametrize("framed", [False, True], ids=["buffered", "framed"])
async def test_pipelined_calls_run_one_by_one_in_their_order(framed: bool) -> None:
    async with listening() as listener:
        client = await listener.connect(framed)
        for seqid in range(50):
            client.send(infer(b"x" * seqid, seqid=seqid))
        for seqid in range(50):
            assert (await client.answer(seqid=seqid)).label == str(seqid)


async def test_a_call_completed_just_after_an_answer_runs_once(wait_until: Any) -> None:
    held: list[Call] = []
    async with listening(held.append) as listener:
        client = await listener.connect()
        client.send(infer(b"x") + infer(b"yy")[:-5])
        await wait_until(lambda: held)
        answer(held.pop())
        (connection,) = listener.server.listener.connections
        connection.data_received(infer(b"yy")[-5:])
        assert (await client.answer()).label == "1"
        (call,) = held
        answer(call)
        assert (await client.answer()).label == "2"


async def test_bytes_that_arrive_during_a_call_are_limited() -> None:
    async with listening(lambda call: None) as listener:
        client = await listener.connect()
        client.send(infer(b"x"))
        client.send(infer(b"x" * 900_000) * 20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.5)
        (connection,) = listener.server.listener.connections
        assert len(connection._arrived) < 2**20


def failing(error: PenstockError) -> Any:
    return lambda call: call.sink(ItemResult(error=error))


def streaming(call: Call) -> None:
    call.sink(ItemResult(b"part", final=False))
    call.sink(ItemResult(b""))


@pytest.mark.parametrize(
    ("answering", "state", "text"),
    [
        (failing(ItemFailed("node decode: no JPEG")), {}, "item_failed: node decode: no JPEG"),
        (failing(QueueFull("at its bound")), {}, "queue_full: at its bound"),
        (answer, {"refuse": QueueFull("the queue is full")}, "queue_full: the queue is full"),
        (streaming, {}, "streams its response"),
    ],
    ids=["failed", "full", "refused", "streamed"],
)
async def test_an_error_is_an_exception_with_its_code(answering: Any, state: dict[str, Any], text: str) -> None:
    async with listening(answering) as listener:
        vars(listener.backend).update(state)
        client = await listener.connect()
        client.send(infer(b"x"))
        found = await client.answer()
        assert found.type == TApplicationException.INTERNAL_ERROR
        assert text in found.message
        listener.backend.models["m"], listener.backend.refuse = answer, None
        listener.backend.is_ready = False
        client.send(message("ping"))
        assert (await client.answer("ping")).message == "model_not_ready: the server is loading or draining"
        client.send(infer(b"x"))
        assert (await client.answer()).label == "1"


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [
        (message("stop"), 1, "unknown method 'stop', expected ping or infer_batch"),
        (infer(b"x", kind=4), 2, "found a message of type 4, expected a call"),
        (infer(None), 7, "bad_request: params has no data, which is required"),
        (infer(b"x", None), 7, "bad_request: params has no uuid, which is required"),
    ],
)
async def test_an_unanswerable_call_leaves_its_connection_open(sent: bytes, kind: int, text: str) -> None:
    method = "stop" if kind == 1 else "infer_batch"
    async with listening() as listener:
        client = await listener.connect()
        client.send(sent)
        found = await client.answer(method)
        assert found.type == kind
        assert text in found.message
        client.send(infer(b"xy"))
        assert (await client.answer()).label == "2"


@pytest.mark.parametrize(
    "sent",
    [
        infer(b"x" * 100)[:-100] + b"\xff" * 110,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x82\x21\x01\x04ping\x00",  # the compact protocol
        b'[1,"ping",1,0,{}]' * 3,  # the JSON protocol
        struct.pack(">i", 2**31 - 1) + message("ping"),
        struct.pack(">i", 5) + message("ping"),
        struct.pack(">i", 60) + message("ping") + bytes(60),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
    ],
    ids=["fields", "http", "compact", "json", "frame too long", "frame too short", "frame of two", "tls"],
)
async def test_an_invalid_message_is_reported_and_ends_only_its_connection(sent: bytes) -> None:
    async with listening() as listener:
        other, client = await listener.connect(), await listener.connect()
        client.send(sent)
        said = await asyncio.wait_for(client.reader.read(), LIMIT_S)
        assert b"bad_request: " in said or b"payload_too_large: " in said
        other.send(infer(b"x"))
        assert (await other.answer()).label == "1"


async def test_data_above_the_limit_is_rejected_before_it_arrives() -> None:
    async with listening(pool_bytes=1000) as listener:
        client = await listener.connect()
        client.send(infer(b"x" * 1001)[:60])
        said = await asyncio.wait_for(client.reader.read(), LIMIT_S)
        assert b"payload_too_large: the data has 1001 bytes, at most 1000 are accepted" in said


async def test_calls_wait_for_memory_in_their_order(wait_until: Any) -> None:
    held: list[Call] = []
    async with listening(held.append, pool_bytes=200_000) as listener:
        clients = [await listener.connect() for _ in range(4)]
        for n, client in enumerate(clients):
            client.send(infer(b"x" * 150_000, str(n)))
            await wait_until(lambda: held)
            await wait_until(lambda n=n: len(listener.server.listener.memory) == n)
        for n, client in enumerate(clients):
            await wait_until(lambda: held)
            call = held.pop()
            assert call.item.request_id == str(n)
            answer(call)
            assert (await client.answer()).label == "150000"
        assert listener.backend.used_bytes == 0


async def test_a_client_that_disconnects_while_waiting_for_memory_blocks_no_other(wait_until: Any) -> None:
    held: list[Call] = []
    async with listening(held.append, pool_bytes=200_000) as listener:
        first, second, third = [await listener.connect() for _ in range(3)]
        for client in (first, second, third):
            client.send(infer(b"x" * 150_000))
        await wait_until(lambda: held and len(listener.server.listener.memory) == 2)
        next(iter(listener.server.listener.memory._stalled)).transport.abort()
        await wait_until(lambda: len(listener.server.listener.memory) == 1)
        answer(held.pop())
        await wait_until(lambda: held)
        answer(held.pop())
        answers = [client.answer() for client in (first, second, third)]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert sum(not isinstance(one, Exception) for one in found) == 2


async def test_incomplete_calls_use_no_more_than_the_whole_memory_pool(wait_until: Any) -> None:
    async with listening(pool_bytes=3_000_000, body_timeout_s=60.0) as listener:
        clients = [await listener.connect(framed=bool(n % 2)) for n in range(6)]
        call = infer(b"x" * 2_000_000)
        for client in clients:
            client.writer.write((struct.pack(">i", len(call)) + call if client.framed else call)[:-1])
        await wait_until(lambda: len(listener.server.listener.memory) == 5)
        arrived = [len(connection._arrived) for connection in listener.server.listener.memory._stalled]
        assert sum(arrived) < 5 * 600_000  # a read or two each
        for client in clients:
            client.writer.write(call[-1:])
        found = await asyncio.gather(*[client.answer() for client in clients])
        assert [one.label for one in found] == ["2000000"] * 6
        assert listener.backend.used_bytes == 0
        clients[0].send(call[:1_000_000])
        await wait_until(lambda: listener.backend.used_bytes)
        clients[0].writer.close()
        await wait_until(lambda: not listener.backend.used_bytes)


async def test_unused_memory_of_a_call_is_released(wait_until: Any) -> None:
    async with listening() as listener:
        client = await listener.connect()
        ping = message("ping")[:-1] + b"\x0b\0\x09" + struct.pack(">i", 80_000) + b"y" * 80_000 + b"\0"
        client.send(ping[:50_000])
        await wait_until(lambda: listener.backend.used_bytes)
        client.send(ping[50_000:])
        assert await client.answer("ping") is None
        assert listener.backend.used_bytes == 0


async def test_memory_for_a_call_grows_with_what_it_announces() -> None:
    async with listening(pool_bytes=2**20) as listener:
        client = await listener.connect()
        fields = b"\x0b\0\x09" + struct.pack(">i", 80_000) + b"y" * 80_000  # one that the service does not have
        call = infer(b"x" * 500_000)
        at = call.index(b"\x0c\0\x01") + 3
        call = call[:at] + fields + call[at:]
        for start in range(0, len(call), 50_000):
            client.writer.write(call[start : start + 50_000])
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer()).label == "500000"
        assert listener.backend.used_bytes == 0


async def test_a_call_larger_than_all_memory_is_rejected_even_if_others_wait(wait_until: Any) -> None:
    held: list[Call] = []
    async with listening(held.append, pool_bytes=200_000, max_body_bytes=10**6) as listener:
        first, second, third = [await listener.connect() for _ in range(3)]
        first.send(infer(b"x" * 150_000))
        await wait_until(lambda: held)
        second.send(infer(b"x" * 150_000))
        await wait_until(lambda: len(listener.server.listener.memory) == 1)
        third.writer.write(infer(b"x" * 900_000)[:100])
        await wait_until(lambda: len(listener.server.listener.memory) == 2)
        answer(held.pop())
        assert b"payload_too_large" in await asyncio.wait_for(third.reader.read(), LIMIT_S)
        await wait_until(lambda: held)
        answer(held.pop())
        assert (await second.answer()).label == "150000"


async def test_the_call_of_a_client_that_disconnects_is_cancelled(wait_until: Any) -> None:
    held: list[Call] = []
    async with listening(held.append) as listener:
        client = await listener.connect()
        client.send(infer(b"x"))
        await wait_until(lambda: held)
        client.writer.close()
        await wait_until(lambda: held[0].cancelled)
        held[0].sink(ItemResult(b"late"))  # must not be written, or raise


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with listening(max_connections=1) as listener:
        first, second = await listener.connect(), await listener.connect()
        assert await second.closed()
        first.send(infer(b"x"))
        assert (await first.answer()).label == "1"
        assert listener.server.listener.counts.refused == 1


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        (infer(b"x" * 100)[:50], {"body_timeout_s": 0.1, "thrift_idle_timeout_s": 600.0}),
        (b"", {"body_timeout_s": 600.0, "thrift_idle_timeout_s": 0.1}),
    ],
    ids=["half a call", "silent"],
)
async def test_an_incomplete_call_and_a_silent_client_time_out(sent: bytes, limits: dict[str, float]) -> None:
    async with listening(**limits) as listener:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        client = await listener.connect()
        client.send(sent)
        assert await client.closed()
        assert loop.time() - begun >= 0.1


async def test_shutdown_answers_all_calls_that_were_sent(wait_until: Any) -> None:
    held: list[Call] = []
    async with listening(held.append) as listener:
        client, idle = await listener.connect(), await listener.connect()
        client.send(infer(b"x"))
        await wait_until(lambda: held)
        client.send(infer(b"xy"))
        closing = asyncio.ensure_future(listener.server.close(5.0))
        assert await idle.closed()
        answer(held[0])
        assert (await client.answer()).label == "1"
        await wait_until(lambda: len(held) == 2)
        answer(held[1])
        assert (await client.answer()).label == "2"
        assert await client.closed()
        async with asyncio.timeout(2.0):  # long before the drain is over
            await closing


async def test_a_connection_that_ends_does_not_become_an_idle_one(wait_until: Any) -> None:
    async with listening() as listener:
        await listener.connect()
        await wait_until(lambda: len(listener.server.listener.connections) == 1)
        (connection,) = listener.server.listener.connections
        listener.server.listener.start_closing(5.0)
        connection.close_soon()
        connection.resume_writing()
        assert connection.deadline < asyncio.get_running_loop().time() + 2.0


async def test_calls_that_do_not_end_are_dropped_at_shutdown(wait_until: Any) -> None:
    async with listening(lambda call: None) as listener:
        client = await listener.connect()
        client.send(infer(b"x"))
        await wait_until(lambda: listener.backend.calls)
        await listener.server.close(0.05)
        assert not listener.server.listener.connections
        assert listener.backend.calls[0].cancelled


async def test_a_port_in_use_is_reported_with_its_key() -> None:
    async with listening() as listener:
        with pytest.raises(ConfigError, match=r"the port is in use; choose another with server.thrift_port"):
            await ThriftServer(listener.backend, "m", LimitsConfig()).start("127.0.0.1", listener.port)


async def test_calls_pass_through_tls(request: pytest.FixtureRequest) -> None:
    folder = request.path.parents[3] / "tls"
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    server = ThriftServer(FakeBackend({"m": answer}), "m", LimitsConfig(), ssl=make_ssl_context(cert, key, cert))
    _, port = await server.start("127.0.0.1", 0)
    context = ssl.create_default_context(cafile=cert)
    context.load_cert_chain(cert, key)
    client = Client(*await asyncio.open_connection("localhost", port, ssl=context), framed=True)
    for size in (5, 300_000):
        client.send(infer(b"x" * size))
        assert (await client.answer()).label == str(size)
    client.writer.close()
    plain = Client(*await asyncio.open_connection("127.0.0.1", port), framed=False)
    plain.send(infer(b"x"))
    assert b"infer_batch" not in await asyncio.wait_for(plain.reader.read(), LIMIT_S)  # an alert of TLS at most
    plain.writer.close()
    await server.close(1.0)


@given(pieces=st.lists(st.one_of(st.binary(max_size=40), st.just(infer(b"x")), st.just(message("ping"))), max_size=6))
@settings(max_examples=60, deadline=None)
def test_arbitrary_bytes_do_not_harm_the_server(pieces: list[bytes]) -> None:
    async def run() -> None:
        async with listening() as listener:
            client, good = await listener.connect(), await listener.connect()
            for piece in pieces:
                client.send(piece)
            client.writer.write_eof()
            await asyncio.wait_for(client.reader.read(), LIMIT_S)
            good.send(infer(b"abc"))
            assert (await good.answer()).label == "3"

    asyncio.run(run())


async def test_silent_connections_count_before_their_tls_handshake(request: pytest.FixtureRequest) -> None:
    folder = request.path.parents[3] / "tls"
    context = make_ssl_context(str(folder / "cert.pem"), str(folder / "key.pem"))
    server = ThriftServer(FakeBackend({"m": answer}), "m", LimitsConfig(max_connections=2), ssl=context)
    _, port = await server.start("127.0.0.1", 0)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    for _, each in (*silent, (reader, writer)):
        each.close()
    await server.close(1.0)
