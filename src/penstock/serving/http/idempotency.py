"""Requests with an Idempotency-Key: a repeated request runs once, and every copy gets its response."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from penstock.core.contracts import Backend, Ticket
from penstock.errors import BadRequest
from penstock.serving.http.responses import KeyReused
from penstock.serving.protocols.bodies import data_of, free
from penstock.types import Item, ItemResult, Sink

KEPT_S: Final = 60.0  # clients retry within their back-off, which rarely exceeds half a minute
MAX_KEPT: Final = 8192  # responses: a minute of 130 requests a second
MAX_KEPT_BYTES: Final = 32 * 2**20  # of bodies: 4 kB each
_SAMPLED_BYTES: Final = 4096  # hashed at the start and the end of a body, and spread between them
_KEY: Final = re.compile(rb"[!-~]{1,255}")

_Key = tuple[bytes, str, str, str | None]


def parse_key(value: bytes, token: bytes) -> bytes:
    """The cache key of an `Idempotency-Key`: callers with different tokens never share one. Raises BadRequest."""
    if not _KEY.fullmatch(value):
        raise BadRequest("header Idempotency-Key must be 1 to 255 visible ASCII characters")
    return b"%b %b" % (value, token)


def _fingerprint(body: bytes | memoryview) -> tuple[int, int]:
    """Size and hash of a body, to detect one key used for two requests. Of a large body only samples are hashed, which
    takes a few microseconds."""
    size = len(body)
    if size <= 4 * _SAMPLED_BYTES:
        return size, hash(bytes(body))
    end = size - _SAMPLED_BYTES
    spread = bytes(body[_SAMPLED_BYTES : end : size // _SAMPLED_BYTES | 1])
    return size, hash((bytes(body[:_SAMPLED_BYTES]), spread, bytes(body[end:])))


class _Kept(Struct):
    """A final response and the fingerprint of its request."""

    fingerprint: tuple[int, int]
    result: ItemResult
    until: float


class _Caller:
    """A caller that waits for a shared response."""

    def __init__(self, shared: _Shared, sink: Sink) -> None:
        self._shared = shared
        self.sink = sink

    def cancel(self) -> None:
        """Leaves the other callers waiting; the last one cancels the request."""
        self._shared.leave(self)


class _Answered:
    """The ticket of a caller that got a cached response."""

    def cancel(self) -> None:
        """Does nothing."""


class _Shared:
    """A request in flight and its callers."""

    def __init__(self, cache: IdempotencyCache, key: _Key, fingerprint: tuple[int, int]) -> None:
        self.fingerprint = fingerprint
        self.ticket: Ticket | None = None
        self.streamed = False
        self._cache = cache
        self._key = key
        self._callers: list[_Caller] = []

    def join(self, sink: Sink) -> Ticket:
        caller = _Caller(self, sink)
        self._callers.append(caller)
        return caller

    def leave(self, caller: _Caller) -> None:
        if caller in self._callers:
            self._callers.remove(caller)
            if not self._callers:
                self._cache.forget(self._key, self)
                if self.ticket is not None:
                    self.ticket.cancel()

    def on_result(self, result: ItemResult) -> None:
        """The sink of the request. No caller can join once the first part of a stream was sent."""
        callers = list(self._callers)
        if result.final:
            self._callers.clear()
        if result.final or not self.streamed:
            self._cache.forget(self._key, self)
        if not result.final:
            self.streamed = True
        elif result.error is None and result.status < 400 and not self.streamed:
            self._cache.keep(self._key, self.fingerprint, result)
        for caller in callers:
            caller.sink(result)


class IdempotencyCache:
    """Runs requests with a key. All calls on the event loop's thread; the constants above bound its memory."""

    def __init__(self, backend: Backend, now: Callable[[], float]) -> None:
        self._backend = backend
        self._now = now
        self._shared: dict[_Key, _Shared] = {}
        self._kept: dict[_Key, _Kept] = {}  # oldest first
        self.kept_bytes = 0

    def submit(self, key: bytes, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """`Backend.submit` with a key, unless a request with it runs or was answered recently.

        Raises KeyReused if the body differs.
        """
        full = (key, item.codec, model, version)
        payload = item.payload
        fingerprint = _fingerprint(data_of(payload))
        self._expire()
        found = self._shared.get(full) or self._kept.get(full)
        if found is None:
            return self._run(full, fingerprint, item, sink)
        free(payload)
        if found.fingerprint != fingerprint:
            raise KeyReused(
                f"the Idempotency-Key belongs to another request, of {found.fingerprint[0]} bytes, found one of"
                f" {fingerprint[0]}; a key is for the same request sent again"
            )
        if isinstance(found, _Shared):
            return found.join(sink)
        sink(found.result)
        return _Answered()

    def _run(self, key: _Key, fingerprint: tuple[int, int], item: Item, sink: Sink) -> Ticket:
        shared = self._shared[key] = _Shared(self, key, fingerprint)
        caller = shared.join(sink)
        try:
            shared.ticket = self._backend.submit(key[2], key[3], item, shared.on_result)
        except BaseException:
            self.forget(key, shared)
            raise
        return caller

    def forget(self, key: _Key, shared: _Shared) -> None:
        """Lets no more callers join this request."""
        if self._shared.get(key) is shared:
            del self._shared[key]

    def keep(self, key: _Key, fingerprint: tuple[int, int], result: ItemResult) -> None:
        """Caches a final response, unless it alone exceeds the memory limit."""
        if len(result.body) > MAX_KEPT_BYTES:
            return
        self._kept[key] = _Kept(fingerprint, result, self._now() + KEPT_S)
        self.kept_bytes += len(result.body)
        self._expire()

    def _expire(self) -> None:
        now = self._now()
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.until > now and len(self._kept) <= MAX_KEPT and self.kept_bytes <= MAX_KEPT_BYTES:
                return
            del self._kept[key]
            self.kept_bytes -= len(oldest.result.body)
