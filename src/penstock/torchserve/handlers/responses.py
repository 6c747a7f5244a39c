"""The responses of a handler as bytes with status and headers: final ones, and partial ones sent during a call."""

from __future__ import annotations

import io
import json
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from penstock.errors import BadOutput
from penstock.torchserve.protocol.api import error_body
from penstock.torchserve.protocol.codec import HandlerResponse

STREAMED = "ts_stream_next"  # header of a partial response: "true", on the last part "false"
SendParts = Callable[[list[HandlerResponse | None]], None]
"""Sends one partial response per item of the running call; None for an item without one."""


def batch_responses(returned: Any, context: Any, count: int, limit_bytes: int) -> list[HandlerResponse]:
    """The responses of a whole batch. Raises BadOutput with TorchServe's message."""
    check_results(returned, count)
    return [response_of(value, context.request_processor[i], limit_bytes) for i, value in enumerate(returned)]


def check_results(returned: Any, count: int) -> None:
    """Raises BadOutput, with TorchServe's message, unless this is a list of `count` results."""
    if not isinstance(returned, list):
        raise BadOutput("Invalid model predict output", detail=f"found a {type(returned).__name__}, expected a list")
    if len(returned) != count:
        detail = f"found {len(returned)} results, expected {count}"
        raise BadOutput("number of batch response mismatched", detail=detail)


def response_of(value: Any, processor: Any, limit_bytes: int, part: bool = False) -> HandlerResponse:
    """The response to one request, or a part of it; an error if it exceeds `limit_bytes` (0: no limit).

    `processor` is the context's processor for this request. Raises BadOutput.
    """
    body = _body(value)
    if limit_bytes and len(body) > limit_bytes:
        return error_response(500, f"The response of {len(body)} bytes is larger than max_response_size={limit_bytes}.")
    set_headers = processor.get_response_headers()
    if part:
        set_headers[STREAMED] = "true"
    elif set_headers.get(STREAMED) == "true":
        set_headers[STREAMED] = "false"
    content_type = ""
    headers = []
    for name, text in set_headers.items():
        if str(name).lower() == "content-type":
            content_type = "" if text is None else str(text)
        else:
            headers.append((str(name), str(text)))
    status, phrase = processor.get_response_status_code(), processor.get_response_status_phrase()
    reason = "" if phrase is None else str(phrase)
    return HandlerResponse(body, content_type, valid_status(status, 200), reason, headers)


def error_response(status: int, message: str) -> HandlerResponse:
    """An error as a response, because Penstock's error classes do not cover a handler's own statuses."""
    return HandlerResponse(error_body(status, "InternalServerException", message), "application/json", status)


def valid_status(code: Any, default: int) -> int:
    """The status that a handler set: `default` for None, 500 for anything that HTTP cannot carry."""
    if code is None:
        return default
    return int(code) if isinstance(code, int) and 200 <= code <= 999 else 500


def _body(value: Any) -> bytes | bytearray:
    """Bytes unchanged, text as UTF-8, a tensor in torch's file format, anything else as JSON. Raises BadOutput."""
    if isinstance(value, (bytes, bytearray)):
        return value
    try:
        if isinstance(value, str):
            return value.encode()
        torch = sys.modules.get("torch")  # loaded if the handler returns tensors
        if torch is not None and isinstance(value, torch.Tensor):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return buffer.getvalue()
        return _json(value)
    except (TypeError, ValueError, RecursionError) as e:
        detail = f"a result of type {type(value).__name__}: {type(e).__name__}: {e}"
        raise BadOutput("Unsupported model output data type.", detail=detail) from None


def _json(value: Any) -> bytes:
    """`json.dumps(value, indent=2)`, faster: the standard library indents in Python code."""
    text = json.dumps(value)
    try:
        return msgspec.json.format(text.encode(), indent=2)
    except msgspec.DecodeError:  # NaN, lone surrogates
        return json.dumps(value, indent=2).encode()


class PartialResponses:
    """A Context's `cl_socket`: sends partial responses to the callers of the running batch, from any thread.

    A part sent after the end of its batch is dropped, also during the next batch: a leftover thread of the handler
    must not reach another batch's callers. An installed `ts` sends bytes in TorchServe's worker protocol.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._send: SendParts | None = None
        self._ids: list[str] = []
        self._places: list[int] = []
        self._count = 0

    def begin(self, send: SendParts | None, ids: list[str], places: list[int], count: int) -> None:
        """Starts a batch: request i of the handler has the id `ids[i]` and is item `places[i]` of `count`."""
        with self._lock:
            self._send, self._ids, self._places, self._count = send, ids, places, count

    def end(self) -> None:
        """Ends the batch: later parts are dropped."""
        with self._lock:
            self._send = None

    def sendall(self, response: Any) -> None:
        """Sends the result of `create_predict_response`. Raises BadOutput."""
        with self._lock:
            if self._send is None:
                return
            parts: list[HandlerResponse | None] = [None] * self._count
            found = self._of_frame(response) if isinstance(response, (bytes, bytearray)) else self._of_values(response)
            for i, part in found:
                parts[self._places[i]] = part
            if any(part is not None for part in parts):
                self._send(parts)

    def _of_values(self, response: Any) -> Iterator[tuple[int, HandlerResponse]]:
        values: Mapping[int, Any] = response.values
        for i, value in values.items():
            if response.ids is None or (i < len(self._ids) and response.ids[i] == self._ids[i]):
                yield i, response_of(value, response.context.request_processor[i], self._limit_bytes, part=True)

    def _of_frame(self, data: bytes | bytearray) -> Iterator[tuple[int, HandlerResponse]]:
        """The responses in a message from TorchServe 0.12's worker to its server."""
        frame = _Frame(data)
        frame.number()
        frame.text()
        while (length := frame.number()) >= 0:
            request_id = frame.take(length).decode()
            content_type, status, reason = frame.text(), frame.number(), frame.text()
            headers = [(frame.text(), frame.text()) for _ in range(frame.number())]
            headers = [(k, v) for k, v in headers if k.lower() != "content-type"]
            body = frame.take(frame.number())
            if request_id in self._ids:
                yield self._ids.index(request_id), HandlerResponse(body, content_type, status, reason, headers)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialResponses:
        return self  # a copy of a context belongs to the same batch


class _Frame:
    """Reads big-endian numbers and length-prefixed texts."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = bytes(data)
        self._at = 0

    def number(self) -> int:
        return int(struct.unpack("!i", self.take(4))[0])

    def text(self) -> str:
        return self.take(self.number()).decode()

    def take(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        return self._data[start : self._at]
