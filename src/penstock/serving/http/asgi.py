"""Penstock inside an ASGI application such as FastAPI: the native routes to mount, and responses to its errors."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.errors import Cancelled, PayloadTooLarge, PenstockError
from penstock.request import pseudo_headers
from penstock.serving.http.context import STREAM_BACKLOG
from penstock.serving.http.idempotency import IdempotencyCache
from penstock.serving.http.intake import BIG_BYTES, Intake, Unpacking, unpacked_headers
from penstock.serving.http.responses import (
    SSE,
    RequestOptions,
    error_event,
    error_result,
    stream_part,
    stream_start,
    stream_type,
)
from penstock.serving.http.server import check_method, find_route, inference_table, read_special
from penstock.serving.protocols.bodies import BLANKS
from penstock.serving.protocols.route import Route, error_body, name_model
from penstock.serving.protocols.routes import SPECIAL_NAMES, error_body_of
from penstock.types import Headers, Item, ItemResult

log = logging.getLogger("penstock.serving")

SERVER_NAMES = (b"expect", b"transfer-encoding")  # headers that the ASGI server handles

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _Gone(Exception):
    """The client disconnected."""


class _Call(RequestOptions):
    """One request: the options from its headers, and the results so far."""

    length = 0
    claims = b""
    scope: Message

    def __init__(self, most_unread: int) -> None:
        self.results: asyncio.Queue[ItemResult] = asyncio.Queue()
        self._unread = most_unread

    def sink(self, result: ItemResult) -> None:
        """Queues a result for the client; cancels the request of a client that reads a stream too slowly."""
        self._unread -= 0 if result.final else len(result.body)
        if self._unread > 0:
            self.results.put_nowait(result)
        elif self.ticket is not None:
            self.ticket.cancel()
            self.ticket = None
            self.results.put_nowait(ItemResult(error=Cancelled("the stream was read too slowly")))

    def pseudo_headers(self) -> Headers:
        """What the headers do not say, see `penstock.request`."""
        scope, route = self.scope, self.route
        query: bytes = scope["query_string"]
        target = b"%b?%b" % (self.target, query) if query else self.target
        named = ("", None) if route is None else (route.model, route.version)
        return pseudo_headers(scope["method"].encode("ascii"), target, scope.get("client"), *named, self.claims)

    async def next(self, gone: asyncio.Future[None]) -> ItemResult:
        """The next result. Raises _Gone if the client disconnects first."""
        if self.results.empty():
            coming = asyncio.ensure_future(self.results.get())
            await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise _Gone
            result = coming.result()
        else:
            result = self.results.get_nowait()
        self._unread += 0 if result.final else len(result.body)
        return result


class InferenceApp:
    """ASGI 3 (http and lifespan) over a Backend. Mount it anywhere: `root_path` is stripped from the path."""

    def __init__(
        self, backend: Backend, config: LimitsConfig | None = None, *, tokens: frozenset[bytes] = frozenset()
    ) -> None:
        self.backend = backend
        self.config = config or LimitsConfig()
        self.tokens = tokens
        self._table = inference_table(lambda: bool(self.tokens), page=False)
        self._known: dict[bytes, Route] = {}
        self._unpacking = Unpacking(backend)
        self.idempotency = IdempotencyCache(backend, time.monotonic)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            call = _Call(STREAM_BACKLOG * self.config.write_buffer_bytes)
            try:
                await self._http(call, scope, receive, send)
            except PenstockError as error:
                await self._whole(call, error_result(error, error_body_of(call.route, call.target)), send)
            except _Gone:
                pass
        else:
            raise RuntimeError(f"InferenceApp speaks http, found a {scope['type']} connection")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})

    async def _http(self, call: _Call, scope: Message, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
        root = quote(scope.get("root_path", "").rstrip("/")).encode("ascii")
        if root and raw.startswith(root + b"/"):
            raw = raw[len(root) :]
        special: dict[bytes, bytes] = {}
        headers = [(name, value.strip(BLANKS)) for name, value in scope["headers"]]
        for name, value in headers:
            if name == b"content-type":
                call.content_type = value.decode("latin-1")
            elif name == b"content-length":
                call.length = int(value)
            elif name in SPECIAL_NAMES and name not in SERVER_NAMES:
                special[name] = value
        call.target, call.scope = raw, scope
        if (claims := scope.get("state", {}).get("claims")) is not None:
            call.claims = msgspec.json.encode(claims, enc_hook=str)  # here, where an error fails no other request
        call.route = route = find_route(self._known, raw, self._table)
        check_method(route, scope["method"].encode("ascii"))
        read_special(call, route, special, self.tokens)
        template = route.template
        if template.answer is not None:
            await self._whole(call, template.answer(self.backend, route), send, head_only=scope["method"] == "HEAD")
            return
        payload = await self._body(call, route, receive)
        if call.coding:
            most = template.limit(self.config.max_body_bytes)
            payload = await self._unpacking.unpack(payload, call.coding, most)
            headers = unpacked_headers(headers)
        call.route = route = name_model(route, payload)
        codec = call.codec or template.codec
        item = Item(payload, codec, call.content_type, request_id=call.request_id, headers=headers)
        submit = partial(self.idempotency.submit, call.key) if call.key else self.backend.submit
        item.budget_s, item.priority, item.head_bytes = call.budget_s, call.priority, call.head_bytes
        item.source = call
        if template.read_terms is not None and (terms := template.read_terms(item)) is not None:
            terms.apply(item)
        call.ticket = submit(route.model, route.version, item, call.sink)
        try:
            gone = asyncio.ensure_future(_until_gone(receive))
            try:
                await self._answer(call, gone, send)
            finally:
                gone.cancel()
        except BaseException:
            if call.ticket is not None:
                call.ticket.cancel()
            raise

    async def _body(self, call: _Call, route: Route, receive: Receive) -> Any:
        """The body, `bytes` or a Buffer. Raises PayloadTooLarge, ModelNotFound, QueueFull, _Gone."""
        most = route.template.limit(self.config.max_body_bytes)
        if call.length > most:
            raise PayloadTooLarge(f"the body has {call.length} bytes, at most {most} are taken (limits.max_body_bytes)")
        if call.length > BIG_BYTES and route.model:
            self.backend.model_ready(route.model, route.version)
        intake = Intake(self.backend, most)
        try:
            if call.length > BIG_BYTES:
                intake.begin(call.length, most)
                while not intake.reserve():
                    free = asyncio.Event()
                    self.backend.when_free(free.set)
                    await free.wait()
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                if body := message.get("body", b""):
                    intake.add(body)
                more = message.get("more_body", False)
            return intake.take()
        except BaseException:
            intake.release()
            raise

    async def _answer(self, call: _Call, gone: asyncio.Future[None], send: Send) -> None:
        """Writes the results of the call until the final one. Raises _Gone."""
        started = False
        while True:
            result = await call.next(gone)
            assert call.route is not None
            error_body = call.route.template.error_body
            if not started and (result.error is not None or (result.final and not call.sse)):
                whole = result if result.error is None else error_result(result.error, error_body)
                await self._whole(call, whole, send)
                return
            if not started:
                started = True
                call.sse = call.sse or result.content_type.startswith(SSE)
                result = stream_start(result, call.sse)
                await self._start(call, result, stream_type(result.content_type, call.sse), send)
            if result.error is not None:
                if not call.sse:
                    raise RuntimeError("the stream failed: the server must cut it off")  # ASGI has no other way
                body = error_event(call.route, error_body(result.error))
            else:
                body = stream_part(result, call.sse)
            await send({"type": "http.response.body", "body": body, "more_body": not result.final})
            if result.final:
                return

    async def _whole(self, call: _Call, result: ItemResult, send: Send, head_only: bool = False) -> None:
        await self._start(call, result, result.content_type, send, len(result.body))
        await send({"type": "http.response.body", "body": b"" if head_only else bytes(result.body)})

    async def _start(
        self, call: _Call, result: ItemResult, content_type: str, send: Send, length: int | None = None
    ) -> None:
        await send(_start_message(result, content_type, length, call.request_id))


class ErrorResponse:
    """An ASGI application that responds with an error as the native routes do: status, JSON body, Retry-After."""

    def __init__(self, error: PenstockError) -> None:
        self.error = error
        self.result = error_result(error, error_body)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        result = self.result
        if scope["type"] != "http":
            raise self.error
        if result.status >= 500:
            error = self.error
            log.error("event=failed path=%s status=%d error=%s %s", scope["path"], result.status, error, error.detail)
        await send(_start_message(result, result.content_type, len(result.body)))
        await send({"type": "http.response.body", "body": bytes(result.body)})


async def error_response(request: object, error: Exception) -> ErrorResponse:
    """The response to an error of Penstock; other errors are raised again. For FastAPI and Starlette:
    `app.add_exception_handler(PenstockError, error_response)`.
    """
    if not isinstance(error, PenstockError):
        raise error
    return ErrorResponse(error)


def _start_message(result: ItemResult, content_type: str, length: int | None = None, request_id: str = "") -> Message:
    pairs = [(name.lower(), value) for name, value in result.headers or ()]
    bodiless = result.status in (204, 304)
    if content_type and not bodiless:
        pairs.append(("content-type", content_type))
    if length is not None and not bodiless:
        pairs.append(("content-length", str(length)))
    if request_id:
        pairs.append(("x-request-id", request_id))
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    return {"type": "http.response.start", "status": result.status, "headers": headers}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
