"""Requests that carry an Idempotency-Key: however often one is sent, it is run once, and answered each time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from penstock.core.contracts import Backend, Ticket
from penstock.errors import BadRequest
from penstock.serving.http.answers import KeyReused
from penstock.types import Item, ItemResult, Sink

KEPT_S: Final = 60.0  # who sends again does so within its back-off, which rarely is more than half a minute
MAX_KEPT: Final = 8192  # answers: a minute of 130 requests a second, more than a server of prebatches gets
MAX_KEPT_BYTES: Final = 32 * 2**20  # of bodies: 4 kB for each, more than a prebatch of captions
_LOOKED_BYTES: Final = 4096  # at the head of a body, at its end, and spread over what is between
_KEY: Final = re.compile(rb"[!-~]{1,255}")

_Key = tuple[bytes, str, str, str | None]


def parse_key(value: bytes, token: bytes) -> bytes:
    """What an `Idempotency-Key` stands for: callers with different tokens do not share theirs. Raises BadRequest."""
    if not _KEY.fullmatch(value):
        raise BadRequest("header Idempotency-Key must be 1 to 255 visible ASCII characters")
    return b"%b %b" % (value, token)


def _look(body: bytes | memoryview) -> tuple[int, int]:
    """Size and hash of a body. A large one is only looked at in places, some microseconds long: it tells those who use
    a key for two requests, whose frames have one size, from those who send again."""
    size = len(body)
    if size <= 4 * _LOOKED_BYTES:
        return size, hash(bytes(body))
    end = size - _LOOKED_BYTES
    spread = bytes(body[_LOOKED_BYTES : end : size // _LOOKED_BYTES | 1])
    return size, hash((bytes(body[:_LOOKED_BYTES]), spread, bytes(body[end:])))


class _Kept(Struct):
    """A final answer, and what the request that it belongs to looks like."""

    look: tuple[int, int]
    result: ItemResult
    until: float


class _Caller:
    """One of those who wait for the same answer."""

    def __init__(self, shared: _Shared, sink: Sink) -> None:
        self._shared = shared
        self.sink = sink

    def cancel(self) -> None:
        """The others go on waiting; with the last one the request is cancelled."""
        self._shared.leave(self)


class _Answered:
    """Of one who was answered at once."""

    def cancel(self) -> None:
        """There is nothing to cancel."""


class _Shared:
    """A request that is under way, and those who wait for it."""

    def __init__(self, repeats: Repeats, key: _Key, look: tuple[int, int]) -> None:
        self.look = look
        self.ticket: Ticket | None = None
        self.streamed = False
        self._repeats = repeats
        self._key = key
        self._callers: list[_Caller] = []

    def join(self, sink: Sink) -> Ticket:
        """One more who waits."""
        caller = _Caller(self, sink)
        self._callers.append(caller)
        return caller

    def leave(self, caller: _Caller) -> None:
        if caller in self._callers:
            self._callers.remove(caller)
            if not self._callers:
                self._repeats.forget(self._key, self)
                if self.ticket is not None:
                    self.ticket.cancel()

    def on_result(self, result: ItemResult) -> None:
        """The sink of the request. Who comes after the first part of a stream has missed it: nobody can join then."""
        callers = list(self._callers)
        if result.final:
            self._callers.clear()
        if result.final or not self.streamed:
            self._repeats.forget(self._key, self)
        if not result.final:
            self.streamed = True
        elif result.error is None and result.status < 400 and not self.streamed:
            self._repeats.keep(self._key, self.look, result)
        for caller in callers:
            caller.sink(result)


class Repeats:
    """Runs what carries a key. All calls on the event loop's thread; memory is bounded by the constants above."""

    def __init__(self, backend: Backend, now: Callable[[], float]) -> None:
        self._backend = backend
        self._now = now
        self._shared: dict[_Key, _Shared] = {}
        self._kept: dict[_Key, _Kept] = {}  # the oldest first
        self.kept_bytes = 0

    def submit(
        self,
        key: bytes,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        """`Backend.submit`, unless a request with this key is under way, or was answered a short while ago.

        Raises KeyReused for another body: that is another request.
        """
        full = (key, item.codec, model, version)
        payload = item.payload
        look = _look(payload if isinstance(payload, bytes) else payload.view)
        self._expire()
        found = self._shared.get(full) or self._kept.get(full)
        if found is None:
            return self._run(full, look, item, sink, budget_s, priority)
        if not isinstance(payload, bytes):
            payload.release()
        if found.look != look:
            raise KeyReused(
                f"the Idempotency-Key belongs to another request, of {found.look[0]} bytes, found one of {look[0]}; a"
                " key is for the same request sent again"
            )
        if isinstance(found, _Shared):
            return found.join(sink)
        sink(found.result)
        return _Answered()

    def _run(
        self, key: _Key, look: tuple[int, int], item: Item, sink: Sink, budget_s: float | None, priority: int
    ) -> Ticket:
        shared = self._shared[key] = _Shared(self, key, look)
        caller = shared.join(sink)
        try:
            shared.ticket = self._backend.submit(
                key[2], key[3], item, shared.on_result, budget_s=budget_s, priority=priority
            )
        except BaseException:
            self.forget(key, shared)
            raise
        return caller

    def forget(self, key: _Key, shared: _Shared) -> None:
        """Nobody can join this request any more."""
        if self._shared.get(key) is shared:
            del self._shared[key]

    def keep(self, key: _Key, look: tuple[int, int], result: ItemResult) -> None:
        """A final answer for those who ask again; one that is too large would push out all others, and itself."""
        if len(result.body) > MAX_KEPT_BYTES:
            return
        self._kept[key] = _Kept(look, result, self._now() + KEPT_S)
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
