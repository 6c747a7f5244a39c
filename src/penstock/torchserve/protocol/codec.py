"""Requests as TorchServe's handlers receive them, and their answers. Pure.

A body that is no form is one input, `body`. `application/json` is decoded by Python's json, `text/*` as UTF-8; what
cannot be decoded, and everything else, is a bytearray. Source: section 2.3 of what TorchServe 0.12.0 does.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import MAX_FIELDS
from penstock.torchserve.protocol.requests import HandlerAnswer, HandlerRequest
from penstock.types import Item, ItemResult

QUERY: Final = b":query"  # pseudo header of routes whose query reaches the handler
FILE: Final = "application/octet-stream"  # of a file of a form that names no type

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FRAMING: Final = frozenset({"connection", "content-length", "transfer-encoding"})  # the server's own affair

_inputs = msgspec.msgpack.Decoder(dict[str, bytes])


class TorchServeCodec:
    """Codec of TorchServe's HTTP routes."""

    decodes = True  # JSON and text; False: every input is a bytearray

    def __init__(self, model: str, version: str) -> None:
        pass

    def decode(self, item: Item) -> tuple[HandlerRequest, None]:
        """The handler's dict of this request, and its headers. Raises BadRequest."""
        inputs: dict[str, Any] = {}
        headers: dict[str, Any] = {}
        sent: dict[str, str] = {}
        for name, value in item.headers or ():
            if name == QUERY:
                for key, text in _fields(value):
                    inputs[key], headers[key] = text, {"content-type": ""}
            else:
                sent[name.decode("latin-1")] = value.decode("latin-1")
        self._take(item, inputs, headers)
        headers.update(sent)  # in the one map that both share, a header hides a field of its name
        return HandlerRequest(item.request_id, inputs, headers), None

    def _take(self, item: Item, inputs: dict[str, Any], headers: dict[str, Any]) -> None:
        kind = media_type(item.content_type)
        if kind == "application/x-www-form-urlencoded":
            for name, value in _fields(item.payload):
                inputs[name], headers[name] = value, {"content-type": ""}
        elif kind == "multipart/form-data":
            from penstock.serving.protocols.multipart import parse_parts  # python-multipart is loaded by the first form

            for part in parse_parts(item.payload, item.content_type, MAX_FIELDS):
                kind = (media_type(part.content_type) or FILE) if part.is_file else ""
                inputs[part.name] = self._value(part.body, kind)
                headers[part.name] = {"content-type": kind}
        else:
            inputs["body"] = self._value(item.payload, kind)
            headers["body"] = {"content-type": kind}

    def _value(self, data: bytes | bytearray | memoryview, kind: str) -> Any:
        try:
            if self.decodes and kind == "application/json":
                return json.loads(str(data, "utf-8"))
            if self.decodes and kind.startswith("text/"):
                return str(data, "utf-8")
        except (ValueError, RecursionError):
            pass
        return data if type(data) is bytearray else bytearray(data)

    def encode(self, value: HandlerAnswer, item: Item, context: Any) -> ItemResult:
        """The answer as it goes out. Raises BadOutput for what is none, or has headers that would break the framing."""
        if not isinstance(value, HandlerAnswer):
            raise BadOutput(f"the model returned a {type(value).__name__}, expected the answer of a handler")
        headers = []
        for name, text in value.headers:
            if not _HEADER_NAME.fullmatch(name):
                raise BadOutput(f"the handler set a header of the invalid name {name[:60]!r}")
            if name.lower() not in _FRAMING:
                headers.append((name, _line(text)))
        content_type, reason = _line(value.content_type), _line(value.reason)
        body = value.body if type(value.body) is bytes else bytes(value.body)
        return ItemResult(body, content_type, value.status, headers or None, reason=reason)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """Requests to handlers are one row each: there is one part."""
        return parts[0]


class RawCodec(TorchServeCodec):
    """The same with `decode_input_request=false`: nothing is decoded."""

    decodes = False


class InputsCodec(TorchServeCodec):
    """Codec of TorchServe's gRPC: the payload is msgpack of {name: bytes}; every input is a bytearray."""

    def _take(self, item: Item, inputs: dict[str, Any], headers: dict[str, Any]) -> None:
        try:
            found = _inputs.decode(item.payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadRequest("the inputs of the request cannot be read") from None
        for name, value in found.items():
            inputs[name], headers[name] = bytearray(value), {"content-type": ""}


def media_type(content_type: str) -> str:
    """The content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def _line(text: str) -> str:
    """The text as a head can carry it: what Latin-1 lacks is "?". Raises BadOutput."""
    if _CONTROL.search(text):
        raise BadOutput(f"the handler set a header with control characters: {text[:60]!r}")
    return text if text.isascii() else text.encode("latin-1", "replace").decode("latin-1")


def _fields(data: bytes | memoryview) -> list[tuple[str, bytearray]]:
    """The fields of a urlencoded body or of a query, values as the very bytes. Raises BadRequest."""
    pairs = bytes(data).split(b"&", MAX_FIELDS)
    if len(pairs) > MAX_FIELDS:
        raise BadRequest(f"the form has more than {MAX_FIELDS} fields")
    found = []
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        if pair:
            text = unquote_to_bytes(name.replace(b"+", b" ")).decode("utf-8", "replace")
            found.append((text, bytearray(unquote_to_bytes(value.replace(b"+", b" ")))))
    return found
