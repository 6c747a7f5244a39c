"""Requests with an Idempotency-Key."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import BadRequest, ModelNotFound, QueueFull
from penstock.serving.http import idempotency
from penstock.serving.http.idempotency import KEPT_S, IdempotencyCache, parse_key
from penstock.serving.http.responses import KeyReused, status_of
from penstock.types import Item
from support.backend import Call, FakeBackend

KEY = "Idempotency-Key: k-1"


class CacheHarness:
    """An IdempotencyCache over a model that answers when it is told to, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.backend = FakeBackend({"m": lambda call: None})
        self.idempotency = IdempotencyCache(self.backend, lambda: self.now)

    def ask(self, body: Any = b"abc", key: bytes = b"k", version: str | None = None, codec: str = "native") -> Any:
        """The ticket, with `got`: the bodies or errors that its sink was given."""
        got: list[Any] = []
        sink = lambda result: got.append(result.error or result.body)  # noqa: E731
        item = Item(body, codec)
        ticket: Any = self.idempotency.submit(key, "m", version, item, sink)
        ticket.got = got
        return ticket

    @property
    def calls(self) -> list[Call]:
        return self.backend.calls


@pytest.fixture
async def harness() -> CacheHarness:
    return CacheHarness()


async def test_a_repeated_request_joins_the_first_or_gets_its_answer(harness):
    first, second = harness.ask(), harness.ask()
    assert len(harness.calls) == 1
    harness.calls[0].reply(b"one")
    third = harness.ask()
    assert [first.got, second.got, third.got] == [[b"one"]] * 3
    assert len(harness.calls) == 1
    for ticket in (first, second, third):
        ticket.cancel()
    assert not harness.calls[0].cancelled


async def test_an_answer_is_cached_for_a_minute(harness):
    harness.ask()
    harness.calls[0].reply(b"one")
    harness.now = KEPT_S - 0.001
    assert harness.ask().got == [b"one"]
    harness.now = KEPT_S
    assert harness.ask().got == []
    assert (len(harness.calls), harness.idempotency.kept_bytes) == (2, 0)


async def test_keys_of_other_routes_models_and_callers_are_other_keys(harness):
    for more in ({}, {"version": "1"}, {"codec": "oip_json"}, {"key": b"k2"}):
        harness.ask(**more)
    assert len(harness.calls) == 4
    assert parse_key(b"k", b"Bearer a") != parse_key(b"k", b"Bearer b")


async def test_another_length_under_the_same_key_is_refused_and_its_memory_given_back(harness):
    waiting = harness.ask()
    for _ in range(2):
        body = harness.backend.allocate(100_000)
        with pytest.raises(KeyReused, match="of 3 bytes, found one of 100000") as caught:
            harness.ask(body)
        assert status_of(caught.value) == 422
        assert harness.backend.used_bytes == 0
        if not waiting.got:
            harness.calls[0].reply(b"one")
    assert waiting.got == [b"one"]


@pytest.mark.parametrize("size", [10, 10_000, 1_000_000])
async def test_another_body_of_the_same_length_is_another_request(harness, size):
    waiting = harness.ask(bytes(size))
    for place in (0, size // 2, size - 1):
        other = bytearray(size)
        other[place : place + 1000] = b"x" * min(1000, size - place)  # a hash of places: not of each byte
        with pytest.raises(KeyReused, match="belongs to another request"):
            harness.ask(bytes(other))
    harness.calls[0].reply(b"one")
    assert [waiting.got, harness.ask(bytes(size)).got] == [[b"one"], [b"one"]]


async def test_the_memory_of_a_repeated_body_is_given_back_at_once(harness):
    harness.ask(harness.backend.allocate(100_000))
    harness.ask(harness.backend.allocate(100_000))
    assert harness.backend.used_bytes == 100_000
    harness.calls[0].reply(b"one")
    harness.ask(harness.backend.allocate(100_000))
    assert harness.backend.used_bytes == 0


async def test_a_request_is_cancelled_with_its_last_waiter(harness):
    first, second = harness.ask(), harness.ask()
    first.cancel()
    first.cancel()
    assert not harness.calls[0].cancelled
    second.cancel()
    assert harness.calls[0].cancelled
    third = harness.ask()
    harness.calls[1].reply(b"two")
    assert (first.got, second.got, third.got) == ([], [], [b"two"])


async def test_errors_reach_every_waiter_and_are_not_cached(harness):
    waiting = [harness.ask(), harness.ask()]
    error = QueueFull("full")
    harness.calls[0].reply(b"", error=error)
    assert [ticket.got for ticket in waiting] == [[error], [error]]
    harness.ask()
    harness.calls[1].reply(b"", status=503)
    harness.ask()
    assert len(harness.calls) == 3


async def test_a_rejected_request_is_not_cached(harness):
    harness.backend.refuse = ModelNotFound("no")
    for _ in range(2):
        with pytest.raises(ModelNotFound):
            harness.ask()
    harness.backend.refuse = None
    harness.ask()
    assert len(harness.calls) == 1


async def test_a_stream_is_neither_cached_nor_joined(harness):
    first, second = harness.ask(), harness.ask()
    harness.calls[0].reply(b"a", final=False)
    late = harness.ask()
    harness.calls[0].reply(b"b")
    assert first.got == second.got == [b"a", b"b"]
    assert len(harness.calls) == 2
    harness.calls[1].reply(b"c")
    assert late.got == [b"c"]
    harness.now = KEPT_S
    harness.ask()
    harness.calls[2].reply(b"a", final=False)
    harness.calls[2].reply(b"")
    harness.ask()
    assert len(harness.calls) == 4


async def test_the_cache_is_bounded_in_answers_and_bytes(harness, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_KEPT", 3)
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 100)
    for n, size in enumerate((10, 10, 10, 10, 85, 1000)):
        harness.ask(key=b"k%d" % n)
        harness.calls[-1].reply(bytes(size))
        assert harness.idempotency.kept_bytes <= 100
        asked = len(harness.calls)
        harness.ask(key=b"k0")
        assert (len(harness.calls) == asked) == (n < 3)
        if n >= 3:
            harness.calls[-1].reply(b"", error=QueueFull(""))
    assert harness.idempotency.kept_bytes == 95  # what is larger than all that may be kept pushes nothing out


@pytest.mark.parametrize("value", [b"", b"a b", b"\xff", b"a" * 256])
def test_a_key_is_up_to_255_visible_characters(value):
    with pytest.raises(BadRequest, match="Idempotency-Key"):
        parse_key(value, b"")


async def test_the_listener_answers_a_repeated_request_without_the_model(listen, wait_until):
    backend = FakeBackend({"m": lambda call: None})
    async with listen(backend, write_timeout_s=0.4) as listener:
        one, two = await listener.connect(), await listener.connect()
        one.post("/predictions/m", b"abc", KEY)
        await wait_until(lambda: backend.calls)
        two.post("/predictions/m", b"abc", KEY, "X-Request-Id: r")
        two.post("/predictions/m", b"abcd", KEY)
        await two.writer.drain()
        await one.close()
        await wait_until(lambda: listener.server.connections == 1)
        assert not backend.calls[0].cancelled
        backend.calls[0].reply(b"one")
        answer = await two.answer()
        assert (answer.status, answer.body, answer.headers["x-request-id"]) == (200, b"one", "r")
        assert (await two.answer()).status == 422
        assert (await two.ask("/predictions/m", b"abc", KEY)).body == b"one"
        assert (await two.ask("/predictions/m", b"abc", "Idempotency-Key: ")).status == 400
        assert (await two.fetch("/ping", KEY)).status == 200
        two.post("/predictions/m", b"abc", KEY)
        two.post("/predictions/m", b"abc", KEY.replace("1", "2"))
        await wait_until(lambda: len(backend.calls) == 2)
        await two.close()
        await wait_until(lambda: backend.calls[1].cancelled)
