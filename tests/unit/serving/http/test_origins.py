"""Which hosts and web pages may call: DNS rebinding, foreign pages, and CORS for configured pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import Forbidden
from penstock.serving.http.admin import management_routes
from penstock.serving.http.auth import KNOWN, OriginPolicy
from penstock.serving.http.server import HttpServer, NativeFlavor
from support.backend import FakeBackend

PAGE = "https://app.example.com"
OWN = ["127.0.0.1", "127.0.0.1:8081", "10.1.2.3:80", "[::1]:8081", "localhost", "LOCALHOST:1", "a.localhost", "box.:80"]
FOREIGN = [
    "evil.example",
    "evil.example:8081",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "notbox",
    "[x]:1",
    ":1",
]


def admit(policy: OriginPolicy, host: str | None, origin: str | None = None, check_host: bool = True) -> bytes:
    headers = [] if host is None else [(b"hOsT", host.encode())]
    return policy.admit(headers, None if origin is None else origin.encode(), check_host)


@pytest.mark.parametrize("host", [*OWN, "deep.inside.lan", None])
def test_own_and_configured_hosts_are_admitted(host: str | None) -> None:
    assert admit(OriginPolicy(["box", "*.inside.lan"]), host) == b""
    assert admit(OriginPolicy(["*"]), "evil.example") == b""


@pytest.mark.parametrize("host", [*FOREIGN, "inside.lan"])
def test_other_hosts_are_refused_with_the_key_that_adds_them(host: str) -> None:
    policy = OriginPolicy(["box", "*.inside.lan"])
    for _ in range(2):
        with pytest.raises(Forbidden, match=r"Host header is .*server\.allowed_hosts"):
            admit(policy, host)
    with pytest.raises(Forbidden):
        policy.admit([(b"host", b"localhost"), (b"Host", host.encode())], None, True)
    assert admit(policy, host, check_host=False) == b""


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8080", "http://localhost:3000"),  # another program of this machine
        ("localhost:8080", "https://evil.example"),
        ("evil.example:8080", "http://evil.example:8080"),  # DNS rebinding
        ("localhost:8080", "null"),
        ("localhost:8080", ""),
        (None, "null"),
        (None, ""),
        ("app.example.com", PAGE + ".evil.example"),
    ],
)
def test_a_closed_policy_refuses_foreign_pages(host: str | None, origin: str) -> None:
    for check_host in (False, True):
        with pytest.raises(Forbidden):
            admit(OriginPolicy(["app.example.com"], [PAGE], closed=True), host, origin, check_host)
    assert admit(OriginPolicy(), host, origin, check_host=False) == b""


def test_own_and_configured_pages_are_admitted_and_only_the_configured_get_cors_headers() -> None:
    policy = OriginPolicy([], [PAGE], closed=True)
    assert admit(policy, "localhost:8080", "http://LocalHost:8080", False) == b""
    assert b"access-control-allow-origin: https://APP.example.com\r\n" in admit(
        policy, "localhost:8080", "https://APP.example.com"
    )
    assert b"access-control-allow-origin: http://x\r\n" in admit(OriginPolicy([], ["*"]), "localhost", "http://x")


def test_the_memory_for_hosts_is_bounded() -> None:
    policy = OriginPolicy(["*"])
    for n in range(2 * KNOWN):
        admit(policy, f"h{n}")
    assert len(policy._known) == KNOWN


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[int]:
    server = HttpServer(FakeBackend(), LimitsConfig(), flavor=NativeFlavor(**options))
    _, port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close(1.0)


async def test_the_inference_api_refuses_foreign_pages_and_nothing_else(connect: Callable[..., Any]) -> None:
    async with serving(policy=OriginPolicy([], [PAGE], closed=True)) as port, connect(port) as client:
        for origin, status in (("", 200), (f"Origin: {PAGE}", 200), ("ORIGIN: http://evil.example", 403)):
            for path in ("/predictions/echo", "/v2/models/echo/infer"):
                client.send(f"POST {path} HTTP/1.1\r\nhost: evil.example\r\n".encode())
                client.send(f"{origin + chr(13) + chr(10) if origin else ''}content-length: 2\r\n\r\n{{}}".encode())
                answer = await client.answer()
                assert answer.status == status
                assert answer.headers.get("access-control-allow-origin") == (PAGE if PAGE in origin else None)


async def test_a_page_that_may_call_can_read_errors_and_streams_too(connect: Callable[..., Any]) -> None:
    tokens = frozenset({b"t"})
    async with serving(tokens=tokens, policy=OriginPolicy([], ["*"])) as port, connect(port) as client:
        for lines in ((), ("authorization: Bearer t",), ("authorization: Bearer t", "accept: text/event-stream")):
            answer = await client.ask("/predictions/echo", b"x", f"origin: {PAGE}", *lines)
            assert answer.status == (200 if lines else 401)
            assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (PAGE, "origin")


async def test_a_preflight_is_answered_when_pages_are_configured(connect: Callable[..., Any]) -> None:
    asked = "Access-Control-Request-Method: PUT", "Access-Control-Request-Headers: authorization, content-type"
    tokens = frozenset({b"t"})
    async with serving(tokens=tokens, policy=OriginPolicy([], [PAGE])) as port, connect(port) as client:
        answer = await client.fetch("/predictions/echo", f"Origin: {PAGE}", *asked, method="OPTIONS")
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "PUT" in answer.headers["access-control-allow-methods"]
        answer = await client.fetch("/predictions/echo", "Origin: http://evil.example", *asked, method="OPTIONS")
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (204, None)
    async with serving() as port, connect(port) as client:
        assert (await client.fetch("/predictions/echo", f"Origin: {PAGE}", *asked, method="OPTIONS")).status == 405


async def test_management_refuses_foreign_hosts_in_every_request_except_health(connect: Callable[..., Any]) -> None:
    routes = management_routes(FakeBackend(), None)
    policy = OriginPolicy(["box"], closed=True)
    async with serving(templates=routes, policy=policy, check_host=True) as port, connect(port) as client:
        for method, path, host, status in (
            ("GET", "/models", "evil.example", 403),
            ("DELETE", "/models/echo", "evil.example:8081", 403),
            ("GET", "/models", "box:8081", 200),
            ("GET", "/models", "127.0.0.1:8081", 200),
            ("GET", "/ping", "probe.lan", 200),
        ):
            client.send(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = await client.answer()
            assert answer.status == status, (host, answer.body)
        client.send(b"DELETE /models/echo HTTP/1.1\r\nHost: box\r\nOrigin: http://evil.example\r\n\r\n")
        answer = await client.answer()
        assert answer.status == 403
        assert b"server.cors_origins" in answer.body
