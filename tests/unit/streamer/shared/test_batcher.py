"""A batcher on the loop of the test, with its model in a thread, and clients of all kinds."""

import asyncio
import itertools
import os
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, LimitsConfig, ModelConfig
from penstock.core.wire.messages import FrameDecoder, FreeReplies, MessageWriter, frame_of, write
from penstock.core.wire.slabs import SlabPool, anonymous_file
from penstock.errors import ConfigError, ModelNotReady, PenstockError, QueueFull, WorkerDied
from penstock.streamer.model import wrapped
from penstock.streamer.shared import batcher, client, link, protocol
from penstock.streamer.shared.batcher import SharedBatcher
from penstock.streamer.shared.client import SharedCall, SharedClient
from penstock.streamer.shared.link import Joined, join
from penstock.streamer.shared.protocol import (
    CallMessage,
    JoinMessage,
    WelcomeMessage,
    connected,
    listening,
    offer_of,
    put_values,
    seal,
    socket_path,
)
from penstock.types import Item, ItemResult
from support.waiting import until


def echo(batch: list[Any]) -> list[Any]:
    for delay in batch:
        if isinstance(delay, float):
            time.sleep(delay)
    return batch


OFFER = offer_of(
    ModelConfig(
        target="echo",
        transport="thread",
        instances=1,
        batching=BatchingConfig(max_batch_size=4, max_queue=8, max_hold_s=0.1),
    ),
    wrapped(echo),
    LimitsConfig(),
    0.05,
)


class Running:
    """A batcher that others join as `unix:PATH`."""

    def __init__(self, path: str) -> None:
        self.path, self.socket = path, f"{path}.{OFFER.identity}"
        self.stop = asyncio.Event()
        self.batcher = SharedBatcher(OFFER, listening(self.socket), self.socket, self.stop)

    def connect(self) -> Any:
        """A raw connection."""
        sock = connected(self.socket)
        sock.setblocking(False)
        return sock

    async def client(self) -> SharedClient:
        found = SharedClient(self.path, None)
        assert await call(found, "first") == "first"
        return found


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    found = Running(socket_path("unit"))
    yield found
    await found.batcher.close()


async def call(client: SharedClient, value: Any) -> Any:
    future: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()
    client.submit("", None, Item(value), future.set_result)
    result = await asyncio.wait_for(future, 20)
    if result.error is not None:
        raise result.error
    return result.body


async def receive(sock: Any) -> bytes:
    """The next bytes; empty at the end."""
    loop = asyncio.get_running_loop()
    try:
        return await asyncio.wait_for(loop.sock_recv(sock, 2**16), 20)
    except ConnectionResetError:
        return b""


def a_call(number: int, value: Any) -> list[Any]:
    outbox = MessageWriter(None)
    item = Item(put_values(outbox, [seal(value)]), many=True)
    return write(CallMessage(number, item, []), outbox.buffers)


async def test_a_peer_that_has_not_joined_takes_a_few_kilobytes_at_most(running: Running) -> None:
    peers: list[Any] = []
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            peers.append(running.connect())
            peers[-1].send(struct.pack("<II", batcher.JOIN_BYTES, 0) + bytes(batcher.JOIN_BYTES // 2))
        async with asyncio.timeout(20):
            while len(running.batcher.sessions) < len(peers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20 * 10_000
    for peer in peers:
        peer.close()


async def test_a_peer_may_announce_large_frames_only_after_it_has_joined(running: Running) -> None:
    (frame,) = write(FreeReplies([]))
    large = b"".join(frame_of(bytes(frame[8:]), [bytes(batcher.JOIN_BYTES)]))
    stranger, member = running.connect(), running.connect()
    stranger.send(large[:16])
    assert await receive(stranger) == b""
    member.send(b"".join(write(JoinMessage(protocol.VERSION, True))))
    assert await receive(member)
    member.send(large + b"".join(a_call(1, "answered")))
    assert await receive(member)
    stranger.close()
    member.close()


async def test_a_client_that_can_start_no_thread_answers_its_callers(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread")

    found = SharedClient(running.path, None)
    with monkeypatch.context() as patch:
        patch.setattr(client.os_threads, "start_thread", no_more)
        with pytest.raises(ModelNotReady, match="no thread can be started"):
            await call(found, 1)
    await asyncio.sleep(0.15)  # calls of the next 0.1 s fail alike
    assert await call(found, 2) == 2
    await found.close(1)


async def test_it_ends_after_its_last_client_and_not_before(running: Running) -> None:
    one, two = await running.client(), await running.client()
    await one.close(1)
    await asyncio.sleep(0.1)
    assert not running.stop.is_set()
    assert await call(two, 1) == 1
    await two.close(1)
    await asyncio.wait_for(running.stop.wait(), 20)


async def test_a_batcher_that_nobody_joins_ends(running: Running) -> None:
    await asyncio.wait_for(running.stop.wait(), 20)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"".join(frame_of(b"\xc1")),
        b"".join(write(FreeReplies([1]))),
        b"".join(map(bytes, a_call(1, 5))),
        b"".join([*write(JoinMessage("other", True)), *write(FreeReplies([7]))]),
    ],
    ids=["http", "random", "no_message", "not_joined", "call_before_join", "other_version"],
)
async def test_a_peer_that_does_not_speak_the_protocol_is_disconnected_alone(running: Running, sent: bytes) -> None:
    client = await running.client()
    with running.connect() as sock:
        await asyncio.get_running_loop().sock_sendall(sock, sent)
        while await receive(sock):
            pass
    assert len(running.batcher.sessions) == 1
    assert await call(client, 2) == 2
    await client.close(1)


async def test_a_joined_client_that_breaks_the_protocol_is_disconnected_alone(running: Running) -> None:
    client = await running.client()
    for bad in (write(JoinMessage(protocol.VERSION, True)), write(FreeReplies([12345])), [b"\0" * 16]):
        with running.connect() as sock:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"".join(write(JoinMessage(protocol.VERSION, True))))
            assert await receive(sock)
            await loop.sock_sendall(sock, b"".join(map(bytes, bad)))
            while await receive(sock):
                pass
    assert await call(client, 2) == 2
    await client.close(1)


async def test_a_silent_client_is_disconnected(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "JOIN_S", 0.02)
    client = await running.client()
    with running.connect() as sock:
        assert await receive(sock) == b""
    assert await call(client, 2) == 2
    await client.close(1)


async def test_a_process_of_another_user_is_disconnected(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await running.client()
    with running.connect() as sock:
        monkeypatch.setattr(protocol, "peer_uid", lambda sock: os.geteuid() + 1)
        assert await receive(sock) == b""
    monkeypatch.undo()
    assert await call(client, 2) == 2
    await client.close(1)


async def test_one_client_more_than_allowed_is_told_so(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await running.client()
    monkeypatch.setattr(batcher, "MAX_CLIENTS", 1)
    with pytest.raises(QueueFull, match="1 processes share this batcher"):
        await asyncio.to_thread(join, running.path, None)
    await client.close(1)


async def test_a_client_of_another_version_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await running.client()
    monkeypatch.setattr(protocol, "VERSION", "9.9")
    with pytest.raises(ConfigError, match=r"the batcher runs Penstock 9\.9"):
        await asyncio.to_thread(join, running.path, None)
    await client.close(1)


async def test_guests_leave_a_batcher_that_has_no_other_clients_for_a_newer_one(
    running: Running, tmp_path: Path
) -> None:
    guest = await running.client()
    owner = SharedClient(running.path, OFFER)
    assert await call(owner, 1) == 1
    newer = f"{running.path}.{'f' * protocol.IDENTITY}"
    with listening(newer):
        os.utime(newer, (time.time() + 1,) * 2)
        assert await call(guest, 2) == 2
        assert not running.stop.is_set()
        await owner.close(1)
        await asyncio.wait_for(running.stop.wait(), 20)
    await guest.close(1)


async def test_a_batcher_that_ends_disconnects_all_its_guests(running: Running) -> None:
    guests = [await running.client() for _ in range(2)]
    os.unlink(running.socket)  # first, so that new clients come to no batcher that ends
    await running.batcher.close()
    assert not running.batcher.sessions
    for guest in guests:
        await guest.close(1)


async def test_a_client_that_takes_no_answer_is_disconnected_and_no_more_is_read_from_it(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "STALL_S", 0.2)
    client = await running.client()
    sock = running.connect()
    with sock:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"".join(write(JoinMessage(protocol.VERSION, True))))
        assert await receive(sock)
        sent = 0
        try:
            for number in itertools.count(1):  # without end, unless the batcher stops to read
                for piece in a_call(number, b"x" * 60_000):
                    await asyncio.wait_for(loop.sock_sendall(sock, piece), 0.1)
                    sent += len(piece)
        except TimeoutError:
            pass
        assert sent < 64 * 2**20
        assert await call(client, 2) == 2, "another client is served meanwhile"
        await until(lambda: len(running.batcher.sessions) == 1)
    assert await call(client, 3) == 3
    await client.close(1)


async def test_a_call_keeps_its_deadline_and_its_priority(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = await running.client()
    backend, received = running.batcher.backend, list[Item]()
    submit = backend.submit
    monkeypatch.setattr(backend, "submit", lambda *given: (received.append(given[2]), submit(*given))[1])
    answers: asyncio.Queue[ItemResult] = asyncio.Queue()
    for item in (Item("urgent", budget_s=30.0), Item("bulk", priority=2)):
        asking.submit("", None, item, answers.put_nowait)
        assert (await asyncio.wait_for(answers.get(), 20)).error is None
    assert [item.priority for item in received] == [0, 2]
    assert 0 < (received[0].budget_s or 0.0) <= 30
    assert received[1].budget_s is None
    await asking.close(1.0)


async def test_the_items_in_flight_of_one_client_are_bounded(running: Running) -> None:
    client = await running.client()
    running.batcher.max_rows = 2
    results: list[ItemResult] = []
    for value in (0.2, 1, 2):
        client.submit("", None, Item([value, 0], rows=2, many=True), results.append)
    await until(lambda: len(results) == 3)
    assert sorted(type(result.error).__name__ for result in results) == ["NoneType", "QueueFull", "QueueFull"]
    assert await call(client, 5) == 5, "their places are free again"
    await client.close(1)


async def test_an_abandoned_call_is_confirmed_and_its_memory_is_free(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[SlabPool] = []

    def pool(*arguments: Any) -> SlabPool:
        pools.append(SlabPool(*arguments))
        return pools[-1]

    monkeypatch.setattr(link, "SlabPool", pool)  # the client's; the batcher has its own
    client = await running.client()
    answers: list[ItemResult] = []
    client.submit("", None, Item(0.2), answers.append)
    tickets = [client.submit("", None, Item(bytearray(10**6)), answers.append) for _ in range(5)]
    assert pools[0].in_use_bytes > 5 * 10**6
    for ticket in tickets:
        assert isinstance(ticket, SharedCall)
        ticket.cancel()
        ticket.cancel()
    await until(lambda: not client.statistics("")["unanswered"])
    assert len(answers) == 1, "an abandoned call is not answered"
    assert pools[0].in_use_bytes == 0
    assert client.statistics("") == {"unanswered": 0, "unanswered_bytes": 0}
    await client.close(1)


async def test_an_accepted_call_is_answered_when_the_batcher_ends_and_a_later_one_is_not_read(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running.client()
    joins: list[object] = []

    def refuse(*arguments: object) -> None:
        joins.append(arguments)
        raise ModelNotReady("there is no other")

    monkeypatch.setattr("penstock.streamer.shared.client.join", refuse)
    backend, taken = running.batcher.backend, []

    def submit(*arguments: Any) -> Any:
        taken.append(arguments)
        return type(backend).submit(backend, *arguments)

    monkeypatch.setattr(backend, "submit", submit)
    early = asyncio.create_task(call(client, 0.2))
    await until(lambda: taken)
    closing = asyncio.create_task(running.batcher.close())
    await asyncio.sleep(0)
    late = asyncio.create_task(call(client, "late"))
    assert await early == 0.2
    with pytest.raises(ModelNotReady, match="there is no other"):
        await late
    assert len(joins) == 1
    await closing
    await client.close(1)


async def test_after_a_failure_calls_fail_at_once_until_the_pause_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    tried: list[float] = []

    def fail(*arguments: object) -> None:
        tried.append(time.monotonic())
        raise ConfigError("another model has this name")

    monkeypatch.setattr(client, "join", fail)
    found = SharedClient("nothing", OFFER)
    with pytest.raises(ConfigError):
        await call(found, 1)
    for _ in range(100):
        with pytest.raises(ConfigError, match="another model has this name"):
            await call(found, 1)
    assert len(tried) <= 2
    now = time.monotonic()
    monkeypatch.setattr(client.time, "monotonic", lambda: now + client.LAST_RETRY_S)
    with pytest.raises(ConfigError):
        await call(found, 1)
    assert len(tried) >= 2
    await found.close(0)
    with pytest.raises(PenstockError, match="the streamer is closed"):
        await call(found, 1)


async def test_frames_may_arrive_in_any_pieces(running: Running) -> None:
    with running.connect() as sock:
        loop = asyncio.get_running_loop()
        for byte in b"".join(write(JoinMessage(protocol.VERSION, True))):
            await loop.sock_sendall(sock, bytes([byte]))
        assert len(FrameDecoder().feed(await receive(sock))) == 1


async def test_batchers_that_die_before_they_answer_are_started_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIRST_RETRY_S", 0.001)
    started = []

    def join_a_dying_one(*arguments: object) -> Joined:
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.setblocking(False)
        started.append(ours)
        fds = [anonymous_file(4096), anonymous_file(4096)]
        return Joined(ours, WelcomeMessage(1, 4096, 4096, 10, 10**6, idempotent=True, loading=False), fds)

    monkeypatch.setattr(client, "join", join_a_dying_one)
    found = SharedClient("dying", None)
    with pytest.raises(WorkerDied, match="the shared batcher that ran this call died"):
        await call(found, 1)
    assert len(started) == 3
    await found.close(0)
    assert all(sock.fileno() == -1 for sock in started)
