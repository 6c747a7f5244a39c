"""The transport of a client's calls: values and arrays as bodies, and HTTP with pools of persistent connections."""

from __future__ import annotations

import asyncio
import binascii
import codecs
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from penstock.client.calls import GRACE_S, ApiCall, Call, PenstockApi
from penstock.client.endpoint import ResponseTimeout, ResponseTooLarge, authorization, check_token_privacy
from penstock.client.http import Buffer, ClientConnection, ConnectionPool, HttpCall
from penstock.client.response import HttpResponse, ResponseBody, UnexpectedResponse, check, named_error
from penstock.errors import BadOutput, BadRequest, ConfigError, ItemFailed, PenstockError
from penstock.serving.protocols.bodies import BASE64, JSON, PART_TYPE, decode_text, encode_json, encode_text, split_type
from penstock.values import shorten

if TYPE_CHECKING:
    from penstock.serving.protocols.oip_messages import InferResponse

# ---- values and arrays as request bodies, and a response or a stream as Python values. Pure


TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"


def encode_value(value: Any, content_type: str | None = None) -> tuple[str, Buffer]:
    """(content type, body). Bytes and text are sent as they are, and any other value as JSON: numbers, lists, dicts,
    dataclasses, msgspec and pydantic models, and, as nested lists, arrays and tensors.

    Raises BadRequest for a value that JSON cannot hold, such as NaN.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return content_type or BYTES, value
    dump = getattr(value, "model_dump", None)  # pydantic
    try:
        if isinstance(value, str):
            return content_type or TEXT, encode_text(value)
        return content_type or JSON, encode_json(dump(mode="json") if callable(dump) else value)
    except BadOutput as error:
        raise BadRequest(error.message.replace("the model returned", "the value is or holds", 1)) from None


def decode_value(headers: Mapping[str, str], body: bytes) -> Any:
    """The value of a body: JSON, text as `str`, any other type as `bytes`, and None without a body.

    TorchServe's responses may have no content type: then JSON if it is JSON, else text, else bytes. Raises
    UnexpectedResponse for a body that is not of its type.
    """
    kind, charset = split_type(headers.get("content-type", ""))
    if not body:
        return "" if kind.startswith("text/") else b"" if kind == BYTES else None
    if kind:
        return _decode(kind, charset, body)
    for guess in (JSON, "text/plain"):
        try:
            return _decode(guess, charset, body)
        except UnexpectedResponse:
            pass
    return body


def _decode(kind: str, charset: str, body: bytes) -> Any:
    if kind == JSON or kind.endswith("+json"):
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise UnexpectedResponse(f"the response is not the JSON that its content type says: {exc}") from None
    if kind.startswith("text/"):
        try:
            return decode_text(body, charset)
        except BadRequest as exc:
            raise UnexpectedResponse(f"the response is not text: {exc.message}") from None
    return body


class PartReader:
    """The parts of a stream, from its pieces: server-sent events, lines of JSON, or chunks of text or bytes.

    `max_bytes` limits a part. `feed` and `end` raise ResponseTooLarge, UnexpectedResponse, and the error that a stream
    of events reports.
    """

    def __init__(self, headers: Mapping[str, str], max_bytes: int) -> None:
        self._kind, charset = split_type(headers.get("content-type", ""))
        self._max_bytes = max_bytes
        self._rest = bytearray()  # of a line
        self._last: list[bytes] = []  # a line that is the error of the stream if the stream breaks off after it
        self._event: bytes | None = None
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._part_type = headers.get(PART_TYPE, "")
        text = self._kind.startswith("text/") or not self._kind
        try:
            self._text = codecs.getincrementaldecoder(charset)("replace") if text else None
        except LookupError:
            raise UnexpectedResponse(f"the stream has the unknown charset {shorten(charset, 40)!r}") from None

    def feed(self, piece: bytes) -> list[Any]:
        """The parts that this piece completes."""
        if self._kind == EVENTS:
            return [part for line in self._lines(piece) for part in self._event_line(line)]
        if self._kind == LINES:
            lines = [*self._last, *(line for line in self._lines(piece) if line.strip())]
            self._last = [line for line in lines[-1:] if line.startswith(b'{"error":')]
            return [_decode(JSON, "utf-8", line) for line in lines[: len(lines) - len(self._last)]]
        if self._text is not None:
            text = self._text.decode(piece)
            return [text] if text else []
        return [piece]

    def end(self) -> list[Any]:
        """The parts that the end of the stream completes."""
        rest, self._rest = bytes(self._rest), bytearray()
        if self._kind == LINES:
            return [_decode(JSON, "utf-8", line) for line in (*self._last, rest) if line.strip()]
        return self._event_line(b"") if self._kind == EVENTS else []

    def error(self) -> PenstockError | None:
        """Why the server broke the stream off, if it said so."""
        return _stream_error(self._last[0]) if self._last else None

    def _lines(self, piece: bytes) -> list[bytes]:
        self._rest += piece
        if b"\n" not in piece:
            found = []
        else:
            *found, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
        if len(self._rest) > self._max_bytes:
            raise self._too_large()
        return found

    def _too_large(self) -> PenstockError:
        return ResponseTooLarge(f"a part of the stream exceeds the {self._max_bytes} bytes allowed")

    def _event_line(self, line: bytes) -> list[Any]:
        """The part that a line ends; see https://html.spec.whatwg.org/multipage/server-sent-events.html."""
        line = line.removesuffix(b"\r")
        if not line:
            event, data, given = self._event, b"\n".join(self._data), bool(self._data)
            self._event, self._data, self._data_bytes = None, [], 0
            if not given:
                return []
            if event == b"error":
                raise _stream_error(data)
            return [self._event_value(data, event == BASE64)]
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
            if self._data_bytes > self._max_bytes:
                raise self._too_large()
        elif name == b"event":
            self._event = value
        return []

    def _event_value(self, data: bytes, base64: bool) -> Any:
        """Without the header `PART_TYPE`, as from other servers, or if it cannot be of that type: JSON if it is JSON,
        else text; bytes in base64."""
        kind = self._part_type
        if base64 != kind.endswith(";base64"):
            kind = BYTES if base64 else ""
        try:
            return decode_value({"content-type": kind}, binascii.a2b_base64(data, strict_mode=True) if base64 else data)
        except binascii.Error as exc:
            raise UnexpectedResponse(f"an event of the stream is not the base64 that its name says: {exc}") from None


def _stream_error(data: bytes) -> PenstockError:
    try:
        found = msgspec.json.decode(data)["error"]
        message = str(found["message"] if isinstance(found, dict) else found)
        code = str(found["code"]) if isinstance(found, dict) else ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        code, message = "", data[:500].decode("utf-8", "replace")
    return named_error(code, message, 500) or ItemFailed(message)


# ---- arrays and tensors

RawInput = tuple[str, str, tuple[int, ...], Buffer]  # name, datatype, shape, little-endian elements in C order


def raw_inputs(inputs: Mapping[str, Any]) -> list[RawInput]:
    """The inputs of a request. Values are NumPy arrays, torch tensors, or what `numpy.asarray` takes.

    Contiguous arrays and CPU tensors are not copied. A tensor of bfloat16 becomes BF16. Raises BadRequest for a dtype
    that the Open Inference Protocol lacks.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise BadRequest(f"inputs is a {type(inputs).__name__}, expected a dict of at least one name and array")
    return [_raw_input(str(name), value) for name, value in inputs.items()]


def _raw_input(name: str, value: Any) -> RawInput:
    from penstock.serving.protocols.oip_tensors import output_array, to_bytes  # NumPy, which few clients need

    datatype = ""
    try:
        if type(value).__module__.partition(".")[0] == "torch":
            datatype, value = _of_torch(value)
        found, array = output_array(name, value, None)
        datatype = datatype or found
        # a view of the 16 bits of BF16 is sent as it is
        return name, datatype, array.shape, to_bytes(name, found, array)
    except BadOutput as error:
        raise BadRequest(error.message.replace("output", "input", 1)) from None


def _of_torch(tensor: Any) -> tuple[str, Any]:
    """("BF16", its bits as int16), or ("", array): NumPy has no bfloat16. Raises BadOutput."""
    torch = sys.modules["torch"]
    try:
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            return "BF16", tensor.view(torch.int16).numpy(force=True)
        return "", tensor.numpy(force=True)
    except (TypeError, RuntimeError, AttributeError) as exc:
        raise BadOutput(f"output of type {type(tensor).__name__} is not an array: {exc}") from None


# ---- HTTP


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
        while (piece := await _next_piece(response.parts, call, pool.endpoint.url, reader)) is not None:
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


async def _next_piece(pieces: ResponseBody, call: Call, url: str, reader: PartReader) -> bytes | None:
    """None at the end. Raises the error that the server reported before it broke the stream off."""
    wait_s = min(call.timeout_s, call.deadline_at + GRACE_S - asyncio.get_running_loop().time())
    try:
        async with asyncio.timeout(wait_s):
            return await anext(pieces, None)
    except TimeoutError:
        raise ResponseTimeout(f"{url}: the stream had no further part within {max(0.0, wait_s):g} s") from None
    except PenstockError as error:
        raise reader.error() or error from None


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
