"""The transport of a client's calls: its interface, and HTTP with a pool of persistent connections."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.client.apis import ApiCall, PenstockApi
from penstock.client.calls import GRACE_S, Call
from penstock.client.endpoint import Endpoint, ResponseTimeout, authorization, check_token_privacy
from penstock.client.http import Buffer, ClientConnection, HttpCall
from penstock.client.response import HttpResponse, ResponseBody, UnexpectedResponse, check
from penstock.client.values import EVENTS, PartReader, decode_value, encode_value, raw_inputs
from penstock.errors import ConfigError
from penstock.serving.protocols.bodies import JSON

if TYPE_CHECKING:
    from penstock.serving.protocols.oip_messages import InferResponse


class ConnectionPool:
    """Sends requests, at most `size` at the same time; further ones wait for a connection in the order of arrival."""

    def __init__(self, endpoint: Endpoint, size: int, connect_timeout_s: float) -> None:
        self.endpoint = endpoint
        self._size = size
        self._connect_timeout_s = connect_timeout_s
        self._open: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []  # the last one used is the next: others may time out
        self._waiting: deque[asyncio.Future[ClientConnection]] = deque()

    async def send(self, call: HttpCall, *, timeout_s: float, max_response_bytes: int) -> HttpResponse:
        """The response, whatever its status. Raises as `ClientConnection.send`."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        connection = await self.take(timeout_s)
        try:
            left_s = end_s - asyncio.get_running_loop().time()
            return await connection.send(call, timeout_s=left_s, max_response_bytes=max_response_bytes)
        finally:
            self.give_back(connection)

    async def take(self, timeout_s: float) -> ClientConnection:
        """A connection, which the caller gives back. Raises ResponseTimeout if none becomes free in time."""
        if self._idle:
            return self._idle.pop()
        if len(self._open) < self._size:
            connection = ClientConnection(self.endpoint, connect_timeout_s=self._connect_timeout_s)
            self._open.add(connection)
            return connection
        waiter: asyncio.Future[ClientConnection] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():  # it was given a connection at the same time
                self.give_back(waiter.result())
            else:
                waiter.cancel()
            if isinstance(error, TimeoutError):
                url, size = self.endpoint.url, self._size
                raise ResponseTimeout(f"{url}: none of {size} connections became free within {timeout_s:g} s") from None
            raise

    def give_back(self, connection: ClientConnection) -> None:
        """Hands the connection to the next waiter, or keeps it."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)

    def close(self) -> None:
        """Closes all connections at once."""
        for connection in self._open:
            connection.close()


T = TypeVar("T")
Attempt = Callable[[float], Awaitable[T]]  # sends the request once; the argument is the time on the loop's clock


Parts = AsyncGenerator[Any, None]  # of a stream that has begun; `aclose` cancels its request unless it has ended


async def _parts(
    pool: ConnectionPool, connection: ClientConnection, response: HttpResponse, call: Call, max_part_bytes: int
) -> Parts:
    """The parts of a response, whose connection it returns to the pool. An early end closes the connection, which
    cancels the request at the server."""
    complete = False
    try:
        assert response.parts is not None
        reader = PartReader(response.headers, max_part_bytes)
        while (piece := await _next_piece(response.parts, call, pool.endpoint.url)) is not None:
            for part in reader.feed(piece):
                yield part
        rest = reader.end()
        complete = True
        for part in rest:
            yield part
    finally:
        if not complete:
            connection.close()
        pool.give_back(connection)


async def _next_piece(pieces: ResponseBody, call: Call, url: str) -> bytes | None:
    """None at the end."""
    wait_s = min(call.timeout_s, call.deadline_at + GRACE_S - asyncio.get_running_loop().time())
    try:
        async with asyncio.timeout(wait_s):
            return await anext(pieces, None)
    except TimeoutError:
        raise ResponseTimeout(f"{url}: the stream had no further part within {max(0.0, wait_s):g} s") from None


class Listener:
    """A server's listener: its connections, and the token that it requires."""

    def __init__(self, pool: ConnectionPool, token: str | None) -> None:
        check_token_privacy(pool.endpoint, token)
        self.pool = pool
        self.url = pool.endpoint.url
        self.authorization = authorization(token)


class HttpTransport:
    """HTTP/1.1 with pools of persistent connections. Used on one event loop.

    Its methods prepare a request, which may then be attempted several times; `GrpcTransport` has the same methods.
    """

    def __init__(
        self, api: PenstockApi, inference: Listener, management: Listener | None, max_response_bytes: int
    ) -> None:
        self._api = api
        self._inference = inference
        self._management = management
        self._max_response_bytes = max_response_bytes

    def predict(self, call: Call, model: str, value: Any, content_type: str | None) -> Attempt[Any]:
        path = self._api.predict(model, call.version)
        kind, body = encode_value(value, content_type)

        async def attempt(now: float) -> Any:
            response = await self._post(call, now, path, [("Content-Type", kind)], [body])
            return decode_value(response.headers, response.body)

        return attempt

    def infer(
        self, call: Call, model: str, inputs: Mapping[str, Any], outputs: Sequence[str] | None
    ) -> Attempt[InferResponse]:
        from penstock.serving.protocols.oip_messages import HEADER_LENGTH, decode_answer, encode_request

        path = self._api.infer(model, call.version)
        head, buffers = encode_request(
            raw_inputs(inputs),
            outputs=outputs,
            binary_outputs=True,
            id=call.request_id or None,
            parameters=self._api.parameters(call),
        )
        headers = [("Content-Type", "application/octet-stream"), (HEADER_LENGTH, str(len(head)))]

        async def attempt(now: float) -> InferResponse:
            response = await self._post(call, now, path, headers, [head, *buffers])
            length = response.headers.get(HEADER_LENGTH.lower(), "")
            return decode_answer(response.body, int(length) if length.isdecimal() else None)

        return attempt

    def stream(self, call: Call, model: str, value: Any, content_type: str | None, events: bool) -> Attempt[Parts]:
        """The attempt returns when the response has begun."""
        path = self._api.predict(model, call.version)
        kind, body = encode_value(value, content_type)
        accept = EVENTS if events and self._api.events else "*/*"

        async def attempt(now: float) -> Parts:
            headers = self._headers(self._inference, call, [("Content-Type", kind), ("Accept", accept)], now)
            http_call = HttpCall("POST", path, headers, [body], resend=bool(call.key))
            pool, most = self._inference.pool, self._max_response_bytes
            connection = await pool.take(call.ends_at - now)
            try:
                left_s = call.ends_at - asyncio.get_running_loop().time()
                response = await connection.send(http_call, timeout_s=left_s, max_response_bytes=most, stream=True)
                check(response, pool.endpoint.url)
            except BaseException:
                connection.close()
                pool.give_back(connection)
                raise
            return _parts(pool, connection, response, call, most)

        return attempt

    def check_health(self, call: Call, ready: bool, model: str | None) -> Attempt[bool]:
        api = self._api
        path = (api.ready if ready else api.live) if model is None else api.model_ready(model, call.version)

        async def attempt(now: float) -> bool:
            headers = self._headers(self._inference, call)
            response = await self._send(self._inference, call, HttpCall("GET", path, headers))
            if ready and response.status in (400, 500, 503):  # Triton and TorchServe have no 503 for it
                return False
            check(response, self._inference.url)
            return True

        return attempt

    def metadata(self, call: Call, model: str) -> Attempt[dict[str, Any]]:
        return self.ask(call, lambda api: api.metadata(model, call.version))[1]

    def ask(self, call: Call, prepare: Callable[[PenstockApi], ApiCall]) -> tuple[bool, Attempt[Any]]:
        """A request of the management or metadata API, and whether it may run twice."""
        asked = prepare(self._api)
        listener = self._management if asked.management else self._inference
        if listener is None:
            raise ConfigError("this call goes to the management listener; create the client with management_url=...")
        repeatable = asked.method == "GET"
        body = [] if asked.body is None else [msgspec.json.encode(asked.body)]

        async def attempt(now: float) -> Any:
            headers = self._headers(listener, call, [("Content-Type", JSON)] * len(body))
            response = await self._send(listener, call, HttpCall(asked.method, asked.path, headers, body, repeatable))
            check(response, listener.url)
            answer = decode_value({"content-type": JSON}, response.body)
            if not asked.key:
                return answer
            if not isinstance(answer, dict) or asked.key not in answer:
                raise UnexpectedResponse(f"{listener.url}{asked.path} answered without '{asked.key}'")
            return answer[asked.key]

        return repeatable, attempt

    async def close(self) -> None:
        self._inference.pool.close()
        if self._management is not None:
            self._management.pool.close()

    # ---- sending

    async def _post(
        self, call: Call, now: float, path: str, headers: list[tuple[str, str]], body: Sequence[Buffer]
    ) -> HttpResponse:
        headers = self._headers(self._inference, call, headers, now)
        http_call = HttpCall("POST", path, headers, body, resend=bool(call.key))
        response = await self._send(self._inference, call, http_call)
        check(response, self._inference.url)
        return response

    async def _send(self, listener: Listener, call: Call, http_call: HttpCall) -> HttpResponse:
        left_s = call.ends_at - asyncio.get_running_loop().time()
        return await listener.pool.send(http_call, timeout_s=left_s, max_response_bytes=self._max_response_bytes)

    def _headers(
        self, listener: Listener, call: Call, headers: Sequence[tuple[str, str]] = (), now: float | None = None
    ) -> list[tuple[str, str]]:
        """`now` is None for requests that run no model, and have none of its options."""
        options = [] if now is None else self._api.headers(call, now)
        return [*headers, *options, *listener.authorization, *call.headers]
