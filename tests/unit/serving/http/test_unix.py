"""The listener at a path."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError
from penstock.serving.http.server import HttpServer
from support.backend import FakeBackend


def server() -> HttpServer:
    return HttpServer(FakeBackend(), LimitsConfig())


async def ask(path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /ping HTTP/1.1\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10.0)
    writer.close()
    return answer


async def test_it_answers_there_and_takes_the_path_away_with_it(tmp_path):
    http = server()
    await http.start_unix(str(tmp_path / "s"))
    assert (await ask(str(tmp_path / "s"))).startswith(b"HTTP/1.1 200 OK\r\n")
    await http.close(1.0)
    assert os.listdir(tmp_path) == []


async def test_a_client_that_left_is_dropped_and_one_that_only_ended_its_request_is_answered(tmp_path, wait_until):
    backend = FakeBackend({"m": lambda call: None})
    http = HttpServer(backend, LimitsConfig())
    await http.start_unix(str(tmp_path / "s"))
    clients = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(2)]
    for _, writer in clients:
        writer.write(b"POST /predictions/m HTTP/1.1\r\ncontent-length: 1\r\n\r\n1")
        await wait_until(lambda: backend.calls)
        writer.write_eof()
    await wait_until(lambda: len(backend.calls) == 2)
    clients[0][1].close()
    await wait_until(lambda: backend.calls[0].cancelled)
    backend.calls[1].reply()
    answer = await asyncio.wait_for(clients[1][0].read(), 10.0)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n1")
    clients[1][1].close()
    await http.close(1.0)


async def test_the_stale_socket_of_a_killed_server_is_replaced(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    http = server()
    await http.start_unix(path)
    assert (await ask(path)).startswith(b"HTTP/1.1 200 OK\r\n")
    await http.close(1.0)


async def test_a_path_where_another_listens_is_refused_and_left_alone(tmp_path):
    path = str(tmp_path / "s")
    first = server()
    await first.start_unix(path)
    with pytest.raises(ConfigError, match=r"unix:.*another process listens there; .* inference_address"):
        await server().start_unix(path, "inference_address")
    assert (await ask(path)).startswith(b"HTTP/1.1 200 OK\r\n")
    await first.close(1.0)


async def test_a_file_other_than_a_socket_is_refused_and_kept(tmp_path):
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="a file that is not a socket is there"):
        await server().start_unix(str(path))
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["no/such/folder/s", "x" * 200, "nul\0l"])
async def test_a_path_that_cannot_be_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        await server().start_unix(str(tmp_path / name))
