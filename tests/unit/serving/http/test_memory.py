"""Closed connections are freed at once: a server that collects garbage rarely must not make any."""

from __future__ import annotations

import gc

import pytest

from penstock.serving.http.connection import Connection
from support.backend import FakeBackend

POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: test\r\n"
USES = {
    "answered": b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n" * 2,
    "never_used": b"",
    "half_a_head": POST,
    "half_a_body": POST + b"Content-Length: 1000\r\n\r\nxyz",
    "half_a_large_body": POST + b"Content-Length: 100000\r\n\r\nxyz",
    "half_a_chunked_body": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    "no_such_route": b"GET /nowhere HTTP/1.1\r\nHost: test\r\n\r\n",
    "too_large": POST + b"Content-Length: 99999999999\r\n\r\n",
    "malformed": b"no HTTP at all\r\n\r\n",
    "waits_for_its_answer": POST + b"Content-Length: 2\r\n\r\n{}",
    "waits_for_more_than_one": (POST + b"Content-Length: 2\r\n\r\n{}") * 3,
}


def connections() -> list[Connection]:
    return [o for o in gc.get_objects() if type(o) is Connection]


@pytest.mark.parametrize("use", USES)
async def test_a_closed_connection_is_freed_without_the_garbage_collector(use, listen, wait_until):
    async with listen(FakeBackend({"m": lambda call: None}), write_timeout_s=0.4) as listener:  # four sweeps
        gc.collect()
        others = connections()  # what other tests hold
        gc.disable()
        try:
            for _ in range(20):
                client = await listener.connect()
                client.send(USES[use])
                await wait_until(lambda: listener.server.connections)
                if use in ("answered", "no_such_route", "too_large", "malformed"):
                    await client.head()
                await client.close()
            await wait_until(lambda: not listener.server.connections)
            assert not [c for c in connections() if not any(c is other for other in others)]
        finally:
            gc.enable()
