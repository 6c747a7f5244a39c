"""Clients that leave, do not read, do not speak, or come all at once: bounded memory, and the others are served."""

import asyncio
import contextlib
import http.client
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = """
    import time

    def echo(items):
        return items

    def large(items):
        return [b"%08d" % item * 625_000 for item in items]

    def finite(items):
        for i in range(300):
            yield [b"%08d" % i * 1250 for _ in items]

    def endless(items):
        while True:
            yield [bytes(10_000) for _ in items]
            time.sleep(0.0005)
"""
MB = 10**6


async def test_clients_gone_in_the_middle_of_a_stream_free_its_worker(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "endless", "echo")
    before, workers = 0, chaos.workers(server)
    for i in range(chaos.count(10, 100)):
        async with chaos.Client(server) as client:  # one instance: it answers only if the one before was let go
            client.send("/predictions/endless", b"1", content_type="application/json")
            async with asyncio.timeout(60):
                assert len(await client.reader.readexactly(30_000)) == 30_000
        if i == 1:
            await asyncio.sleep(0.5)
            before = chaos.descriptors(server)
    await chaos.until(lambda: chaos.descriptors(server) <= before)
    assert chaos.workers(server) == workers
    assert server.post("/predictions/echo", b"1") == (200, b"1")


@pytest.mark.parametrize(("model", "pipelined"), [("large", 10), ("endless", 1), ("endless", 20)])
async def test_slow_readers_cost_bounded_memory_and_no_time_of_others(
    guarded: Callable[..., Any], chaos: SimpleNamespace, model: str, pipelined: int
) -> None:
    limits = "--set", "limits.write_buffer_bytes=262144", "--set", "limits.max_pipelined=2"
    server = guarded(SOURCE, model, "echo", *limits)
    slow = [chaos.Client(server) for _ in range(20)]
    async with chaos.Crowd(server, "echo", 4) as others:
        await others.answered(50)
        before = chaos.anonymous_bytes(server)
        most = 0
        try:
            for client in slow:
                await client.__aenter__()
                client.writer.transport.pause_reading()
                for _ in range(pipelined):
                    client.send(f"/predictions/{model}", b"1", content_type="application/json")
            if model == "large":
                await chaos.until(lambda: server.metric("penstock_answers_total", model="large") >= 40)
            for _ in range(chaos.count(30 if model == "large" else 10, 100)):
                await asyncio.sleep(0.1)
                most = max(most, chaos.anonymous_bytes(server) - before)
            await others.answered(50)
        finally:
            for client in slow:
                await client.__aexit__()
    # each 2 answers of 5 MB, and as much again while they come from the worker, or of a stream 16 x write_buffer_bytes
    # and a little: its slow reader is dropped then
    assert most < 20 * 2 * 2 * 5 * MB
    assert server.metric("penstock_answers_total", model=model) < 20 * 5  # who does not read is not worked for
    assert others.wrong == []
    assert set(others.statuses) == {200}


@pytest.mark.parametrize("model", ["large", "finite"])
async def test_a_slow_reader_gets_every_byte(guarded: Callable[..., Any], chaos: SimpleNamespace, model: str) -> None:
    server = guarded(SOURCE, model, "echo", "--set", "limits.write_buffer_bytes=262144")
    head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1\r\n"
    loop = asyncio.get_running_loop()
    received = bytearray()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.connect(chaos.Client(server).address)
        slow.setblocking(False)
        await loop.sock_sendall(slow, f"{head}\r\n1{head}connection: close\r\n\r\n2".encode())
        async with chaos.Crowd(server, "echo", 4) as others:
            while part := await loop.sock_recv(slow, 65536):  # at most 13 MB a second, and the server can give 1 GB/s
                received += part
                await asyncio.sleep(0.005)
    assert received.count(b"HTTP/1.1 200 OK") == 2
    if model == "large":
        assert received.count(b"00000001" * 625_000) == received.count(b"00000002" * 625_000) == 1
    else:
        assert [received.count(b"%08d" % i * 1250) for i in range(300)] == [2] * 300
        assert received.endswith(b"\r\n0\r\n\r\n")
    assert others.wrong == []
    assert set(others.statuses) == {200}


async def test_a_thousand_idle_connections_cost_nothing(guarded: Callable[..., Any], chaos: SimpleNamespace) -> None:
    server = guarded(SOURCE, "echo")
    host, port = chaos.Client(server).address
    server.post("/predictions/echo", b"1")
    memory, open_files = chaos.anonymous_bytes(server), chaos.descriptors(server)
    idle = [await asyncio.open_connection(host, port) for _ in range(1000)]
    try:
        await chaos.until(lambda: chaos.descriptors(server) >= open_files + 990)
        cpu = chaos.cpu_s(server)
        await asyncio.sleep(3.0)
        assert chaos.cpu_s(server) - cpu < 0.3  # of 3 s
        assert chaos.anonymous_bytes(server) - memory < 30 * MB
        async with chaos.Crowd(server, "echo", 4) as others:
            await others.answered(200)
        assert set(others.statuses) == {200}
        assert others.wrong == []
        assert others.longest_s < 1.0
        for reader, writer in idle:  # all of them still work
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200 ")
    finally:
        for _, writer in idle:
            writer.transport.abort()
    await chaos.until(lambda: chaos.descriptors(server) <= open_files + 2)


def ask_on(server: Any, waits: list[float], over: threading.Event) -> None:
    """Appends to `waits` how long each prediction takes, on one connection, until `over`."""
    with contextlib.closing(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as connection:
        while not over.is_set():
            at = time.monotonic()
            connection.request("POST", "/predictions/echo", b"7", {"content-type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"7")
            waits.append(time.monotonic() - at)


@pytest.mark.parametrize("room", [20_000, 2_000])
async def test_ten_thousand_connections_at_once_are_served_or_refused(
    guarded: Callable[..., Any], chaos: SimpleNamespace, room: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000
    if soft < wanted + 500:
        soft = min(hard, wanted + 500) if hard != resource.RLIM_INFINITY else wanted + 500
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    number = min(wanted, soft - 500)
    if number < wanted:
        print(f"only {number} connections: RLIMIT_NOFILE is {soft}")
    server = guarded(SOURCE, "echo", "--set", f"limits.max_connections={room}")
    host, port = chaos.Client(server).address
    loop = asyncio.get_running_loop()
    found: Counter[str] = Counter()
    sockets = []
    waits: list[float] = []
    over = threading.Event()
    neighbour = asyncio.create_task(asyncio.to_thread(ask_on, server, waits, over))  # this loop will be busy
    await chaos.until(lambda: len(waits) > 20)
    waits.clear()
    began = time.monotonic()
    for _ in range(number):
        s = socket.socket()
        s.setblocking(False)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no port waiting
        sockets.append(s)
        s.connect_ex((host, port))

    async def ask(s: socket.socket) -> None:
        try:
            async with asyncio.timeout(60):
                await loop.sock_sendall(s, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = await loop.sock_recv(s, 4096)
            found[answer[9:12].decode() or "closed"] += 1
        except ConnectionError:
            found["reset"] += 1

    try:
        await asyncio.gather(*map(ask, sockets))
        took = time.monotonic() - began
        over.set()
        await neighbour
        async with chaos.Client(server) as client:
            if room > number:
                assert (await client.ask("/predictions/echo", b"1")).status == 200
    finally:
        over.set()
        for s in sockets:
            s.close()
    assert took < 15.0  # 1.5 s on two idle cores, of which this client takes most
    assert len(waits) > 50  # 500 and more
    assert max(waits) < 2.0  # 0.1
    assert found.total() == number
    if room > number:
        assert found["200"] == number, found
    else:
        assert found["200"] >= room - 10
        assert found["200"] + found["503"] + found["reset"] + found["closed"] == number
    await chaos.until(lambda: server.get("/healthz")[0] == 200)
    assert server.post("/predictions/echo", b"1") == (200, b"1")
    assert len(chaos.workers(server)) == 1
