"""What a handler returned as answers: bytes, with the status and the headers that it set."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import msgspec

from penstock.errors import BadOutput
from penstock.torchserve.protocol.api import error_body
from penstock.torchserve.protocol.codec import HandlerAnswer

STREAMED = "ts_stream_next"  # header of an answer in parts: "true", and "false" with the last


def batch_answers(returned: Any, context: Any, count: int, limit_bytes: int) -> list[HandlerAnswer]:
    """The answers of a whole batch. Raises BadOutput, with TorchServe's own words."""
    if not isinstance(returned, list):
        raise BadOutput("Invalid model predict output", detail=f"found a {type(returned).__name__}, expected a list")
    if len(returned) != count:
        detail = f"found {len(returned)} results, expected {count}"
        raise BadOutput("number of batch response mismatched", detail=detail)
    return [answer(value, context.request_processor[i], limit_bytes) for i, value in enumerate(returned)]


def answer(value: Any, processor: Any, limit_bytes: int, part: bool = False) -> HandlerAnswer:
    """The answer of one request, or one part of it; one that is larger than `limit_bytes` (0: any) is an error.

    `processor` is the request's own in the context. Raises BadOutput.
    """
    body = _body(value)
    if limit_bytes and len(body) > limit_bytes:
        return refusal(500, f"The response of {len(body)} bytes is larger than max_response_size={limit_bytes}.")
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
    return HandlerAnswer(body, content_type, status_of(status, 200), "" if phrase is None else str(phrase), headers)


def refusal(status: int, message: str) -> HandlerAnswer:
    """An error as an answer: the worker's own statuses have no class among Penstock's errors."""
    return HandlerAnswer(error_body(status, "InternalServerException", message), "application/json", status)


def status_of(code: Any, default: int) -> int:
    """The status that a handler set: None is the default, and what HTTP cannot carry a 500."""
    if code is None:
        return default
    return int(code) if isinstance(code, int) and 200 <= code <= 999 else 500


def _body(value: Any) -> bytes | bytearray:
    """bytes as they are, text as UTF-8, a tensor as torch saves it, anything else as JSON. Raises BadOutput."""
    if isinstance(value, (bytes, bytearray)):
        return value
    try:
        if isinstance(value, str):
            return value.encode()
        torch = sys.modules.get("torch")  # a handler that returns tensors has loaded it
        if torch is not None and isinstance(value, torch.Tensor):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return buffer.getvalue()
        return _json(value)
    except (TypeError, ValueError, RecursionError) as e:
        detail = f"a result of type {type(value).__name__}: {type(e).__name__}: {e}"
        raise BadOutput("Unsupported model output data type.", detail=detail) from None


def _json(value: Any) -> bytes:
    """As `json.dumps(value, indent=2)`, of which C does nothing."""
    text = json.dumps(value)
    try:
        return msgspec.json.format(text.encode(), indent=2)
    except msgspec.DecodeError:  # NaN, halves of characters
        return json.dumps(value, indent=2).encode()
