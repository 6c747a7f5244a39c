"""The access log: one short line per response if it is enabled, and no cost otherwise."""

import asyncio
import logging
import re

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import ItemFailed
from penstock.serving.http.server import HttpServer
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.flavor import TorchServeRequest
from penstock.torchserve.http.listener import make_listener
from penstock.types import ItemResult
from support.backend import Call, FakeBackend
from support.torchserve import FakeAdministration


def stream(call: Call) -> None:
    call.reply(b"a", "", final=False)
    call.reply(b"b", "")


def listener() -> HttpServer:
    models = {
        "m": lambda call: call.reply(content_type=""),
        "bad": lambda call: call.sink(ItemResult(error=ItemFailed("no"))),
        "stream": stream,
    }
    config = ListenerConfig(frozenset({"inference", "management"}), Properties())
    return make_listener(FakeBackend(models), FakeAdministration(), config, LimitsConfig())


async def ask(port: int, data: bytes) -> str:
    """Sends the data, waits until the listener closes, and returns the client's address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await asyncio.wait_for(reader.read(), 10.0)
    host, mine = writer.get_extra_info("sockname")
    writer.close()
    return f"{host}:{mine}"


def test_without_the_log_requests_use_the_plain_class(caplog):
    caplog.set_level(logging.WARNING, "ACCESS_LOG")
    assert listener().flavor.context is TorchServeRequest


END = b" HTTP/1.1\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("data", "output"),
    [
        (b"GET /ping" + END + b"\r\n", '"GET /ping HTTP/1.1" 200'),
        (b"GET /nope?q=1" + END + b"\r\n", '"GET /nope?q=1 HTTP/1.1" 404'),
        (b"PUT /predictions/m" + END + b"Content-Length: 1\r\n\r\na", '"PUT /predictions/m HTTP/1.1" 200'),
        (b"POST /predictions/bad" + END + b"\r\n", '"POST /predictions/bad HTTP/1.1" 503'),
        (b"POST /predictions/stream" + END + b"\r\n", '"POST /predictions/stream HTTP/1.1" 200'),
        (b"POST /predictions/m HTTP/1.0\r\n\r\n", '"POST /predictions/m HTTP/1.0" 200'),
        (b"GET /models" + END + b"\r\n", '"GET /models HTTP/1.1" 200'),
        (b"POST /predictions/m" + END + b"Content-Length: 999999999\r\n\r\n", '"POST /predictions/m HTTP/1.1" 413'),
        (b"nonsense\r\n\r\n", '"-" 400'),
    ],
)
async def test_a_line_has_the_client_the_request_and_the_status(caplog, data, output):
    caplog.set_level(logging.INFO, "ACCESS_LOG")
    http = listener()
    _, port = await http.start("127.0.0.1", 0)
    peer = await ask(port, data)
    await http.close(1.0)
    lines = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert len(lines) == 1
    assert re.fullmatch(re.escape(f"{peer} {output} ") + r"\d+", lines[0])


async def test_pipelined_requests_have_separate_lines(caplog):
    caplog.set_level(logging.INFO, "ACCESS_LOG")
    http = listener()
    _, port = await http.start("127.0.0.1", 0)
    await ask(
        port, b"".join(b"POST /predictions/m?%d HTTP/1.1\r\n\r\n" % n for n in range(3)) + b"GET /z HTTP/1.1\r\n\r\n"
    )
    await http.close(1.0)
    asked = [record.getMessage().split('"')[1] for record in caplog.records]
    assert sorted(asked) == ["GET /z HTTP/1.1"] + [f"POST /predictions/m?{n} HTTP/1.1" for n in range(3)]


async def test_lines_are_bounded_and_escaped(caplog, tmp_path):
    caplog.set_level(logging.INFO, "ACCESS_LOG")
    http = listener()
    await http.start_unix(str(tmp_path / "s"))
    for target in (b"/" + b"x" * 5000, b"/\xff\xfe" * 500, b"/a%0d%0aGET%20/%20200"):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"GET %b HTTP/1.1\r\n\r\n" % target)
        await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
    await http.close(1.0)
    lines = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert len(lines) == 3
    assert all(len(line) <= 170 and line.isascii() and line.isprintable() for line in lines)
    assert lines[2].startswith('unix "GET /a%0d%0aGET%20/%20200 HTTP/1.1" 404 ')
