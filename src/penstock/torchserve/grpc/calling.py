"""One request to a model, and the parts of its answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from penstock.core.contracts import Backend
from penstock.errors import PenstockError, QueueFull
from penstock.torchserve.grpc.errors import failed, not_taken, required
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.protocol.api import read_error
from penstock.types import Item, ItemResult

BACKLOG_BYTES: Final = 16 * 2**20  # of parts that a client has not taken


class _Parts:
    """The sink of one request. Bodies are copied: they may be views that last no longer than the call."""

    def __init__(self) -> None:
        self._waiting: deque[ItemResult] = deque()
        self._bytes = 0  # of those that wait
        self._behind = False  # the client left too much unread: what is not sent yet is dropped
        self._arrival: asyncio.Future[None] | None = None

    def take(self, result: ItemResult) -> None:
        if self._behind:
            return
        if self._waiting and self._bytes - len(self._waiting[0].body) > BACKLOG_BYTES:
            self._behind = True
            self._waiting.clear()
            return
        result.body = bytes(result.body)
        self._bytes += len(result.body)
        self._waiting.append(result)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> ItemResult:
        if not self._waiting and not self._behind:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._behind:
            raise QueueFull(f"the client left more than {BACKLOG_BYTES} bytes of its answer unread")
        result = self._waiting.popleft()
        self._bytes -= len(result.body)
        return result


async def parts(backend: Backend, model: str, version: str | None, item: Item) -> AsyncGenerator[bytes, None]:
    """The parts of the answer, one or more. Raises Refusal. A request whose caller leaves is cancelled."""
    answer = _Parts()
    try:
        ticket = backend.submit(model, version, item, answer.take)
    except PenstockError as error:
        raise not_taken(api_error(error, backend, model, version)) from error
    final = False
    try:
        while not final:
            result = await answer.next()
            final = result.final
            yield _body(result, backend, model, version)
    except QueueFull as error:
        raise failed(429, error.message) from error
    finally:
        if not final:
            ticket.cancel()


def _body(result: ItemResult, backend: Backend, model: str, version: str | None) -> bytes:
    """A status that the handler set has no meaning here; an error that it raised with a status has."""
    if result.error is not None:
        found = api_error(result.error, backend, model, version)
        raise failed(found.status, found.message) from result.error
    body: bytes = result.body
    said = read_error(result.status, body) if result.status >= 400 else None
    if said is not None:
        raise failed(result.status, said)
    return body


async def whole(backend: Backend, model: str, version: str | None, item: Item) -> bytes:
    """The answer, its parts joined. Raises Refusal."""
    return b"".join([part async for part in parts(backend, model, version, item)])


def model_of(name: str, version: str, parameter: str = "model_name") -> tuple[str, str | None]:
    """Model and version that a request names. Raises Refusal for one without a model."""
    if not name:
        raise required(parameter)
    return name, version or None
