"""The addresses that a `host` means: both families for all addresses, and those that this machine has."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.serving.http.auth import make_ssl_context
from penstock.serving.http.server import HttpServer
from penstock.serving.http.sockets import PortInUse, listening_sockets
from penstock.torchpipe.thrift import ThriftServer
from support.backend import FakeBackend

TLS = Path(__file__).parents[1] / "tls"
BOTH = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def families(port: int) -> set[str]:
    """The addresses of this machine at which the port is open."""
    found = set()
    for address, family in BOTH.items():
        with socket.socket(family) as client:
            client.settimeout(5)
            if client.connect_ex((address, port)) == 0:
                found.add(address)
    return found


SERVERS: dict[str, Any] = {
    "http": lambda tls: HttpServer(FakeBackend(), LimitsConfig(), ssl=tls),
    "thrift": lambda tls: ThriftServer(FakeBackend(), "m", LimitsConfig(), ssl=tls),
}


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("host", "open_at"),
    [
        ("::", {"127.0.0.1", "::1"}),
        ("", {"127.0.0.1", "::1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
    ],
)
async def test_a_host_is_open_at_all_of_its_addresses_on_one_port(
    server: str, secure: bool, host: str, open_at: set[str]
) -> None:
    tls = make_ssl_context(str(TLS / "cert.pem"), str(TLS / "key.pem")) if secure else None
    found = SERVERS[server](tls)
    bound, port = await found.start(host, 0)
    assert bound == (host or "::")
    assert await asyncio.to_thread(families, port) == open_at
    other = HttpServer(FakeBackend(), LimitsConfig())
    with pytest.raises(PortInUse):
        await other.start(host, port)
    await found.close(0.0)
    assert await asyncio.to_thread(families, port) == set()


@pytest.mark.parametrize(
    ("missing", "host", "left"),
    [
        (socket.AF_INET6, "::", "0.0.0.0"),
        (socket.AF_INET6, "", "0.0.0.0"),
        (socket.AF_INET6, "localhost", "127.0.0.1"),
        (socket.AF_INET, "::", "::"),
        (socket.AF_INET, "localhost", "::1"),
    ],
)
@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
async def test_a_machine_without_a_family_serves_the_other(
    monkeypatch: pytest.MonkeyPatch, missing: int, host: str, left: str, error: int
) -> None:
    create = socket.create_server

    def created(address: Any, *, family: int, **keys: Any) -> socket.socket:
        if family == missing:
            raise OSError(error, "no such family")
        return create(address, family=family, **keys)

    async def resolved(loop: object, name: str | None, port: int, **flags: Any) -> list[Any]:
        names = ("0.0.0.0", "::") if name is None else ("127.0.0.1", "::1")
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[0], port))
        return [four, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (names[1], port, 0, 0))]

    if missing == socket.AF_INET and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "create_server", created)
    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", resolved)
    server = HttpServer(FakeBackend(), LimitsConfig())
    assert (await server.start(host, 0))[0] == left
    await server.close(0.0)


async def test_what_a_listener_accepts_sends_small_responses_at_once():
    """On any event loop: asyncio sets TCP_NODELAY only on sockets that name their protocol."""
    for listener in await listening_sockets("127.0.0.1", 0):
        with listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
