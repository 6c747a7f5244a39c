"""Codecs between request bodies and the dicts of TorchServe's handlers. Pure.

A body that is not a form becomes one input named `body`. `application/json` is decoded by Python's json and `text/*`
as UTF-8; undecodable bodies and all other types become a bytearray. Source: TorchServe 0.12.0.
"""

import json
import re
import uuid
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Struct, field

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import MAX_FIELDS
from penstock.torchserve import sequence_headers
from penstock.types import Item, ItemResult, SequenceRequest

WORKFLOW: Final = "/"  # before a workflow's name where a route has a model's, which has no slash
QUERY: Final = b":query"  # pseudo-header of routes whose query reaches the handler
OWN_ID: Final = b"ts-seq-"  # before the ids of sequences that the server made
FILE: Final = "application/octet-stream"  # of a form file without a content type

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FRAMING: Final = frozenset({"connection", "content-length", "transfer-encoding"})  # set by the server

_inputs = msgspec.msgpack.Decoder(dict[str, bytes])


class HandlerRequest(Struct):
    """One request to a handler. `inputs` is the dict that the handler gets; `headers` keep the client's spelling.

    The last of repeated headers wins. The server adds `explain` ("True" or "False") and, for a longer path,
    `url_path`. The headers of a form's parts are `{field: {"content-type": ...}}`.
    """

    id: str
    inputs: dict[str, Any]
    headers: dict[str, Any] = field(default_factory=dict)
    streamed: bool = False  # a part of the response is sent


class HandlerResponse(Struct):
    """A handler's response to one request, encoded; `reason` is the phrase next to the status."""

    body: bytes | bytearray | memoryview
    content_type: str = ""
    status: int = 200
    reason: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)


class TorchServeCodec(Codec):
    """The codec of TorchServe's HTTP routes."""

    reads_headers = True
    decodes = True  # JSON and text; if False, every input is a bytearray

    def __init__(self, model: str, version: str) -> None:
        pass

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest:
        """The sequence of the headers, which begins if it is not in progress. A request without an id begins one of its
        own; the handler finds its id in the headers. A later request with such an id begins none: its state is gone."""
        id_name, start_name, end_name = sequence_headers()
        sent = {name.lower(): value for name, value in item.headers or ()}
        id = sent.get(id_name.lower(), b"")
        start = False if id.startswith(OWN_ID) and start_name.lower() not in sent else None
        if not id:
            id = OWN_ID + str(uuid.uuid4()).encode()
            item.headers = [*(item.headers or ()), (id_name, id), (start_name, b"true")]
        return SequenceRequest(id.decode("latin-1"), start, sent.get(end_name.lower(), b"").lower() == b"true")

    def decode(self, item: Item) -> tuple[HandlerRequest, None]:
        """The handler's request. Raises BadRequest."""
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
        headers.update(sent)  # headers and form fields share one map; a header hides a field of the same name
        return HandlerRequest(item.request_id, inputs, headers), None

    def _take(self, item: Item, inputs: dict[str, Any], headers: dict[str, Any]) -> None:
        kind = media_type(item.content_type)
        if kind == "application/x-www-form-urlencoded":
            for name, value in _fields(item.payload):
                inputs[name], headers[name] = value, {"content-type": ""}
        elif kind == "multipart/form-data":
            from penstock.serving.protocols.bodies import parse_parts  # the first form loads python-multipart

            for part in parse_parts(item.payload, item.content_type, MAX_FIELDS):
                kind = (media_type(part.content_type) or FILE) if part.file is not None else ""
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

    def encode(self, value: HandlerResponse, item: Item, context: Any) -> ItemResult:
        """The encoded response. Raises BadOutput for another value and for headers that would break HTTP's framing."""
        if not isinstance(value, HandlerResponse):
            raise BadOutput(f"the model returned a {type(value).__name__}, expected a handler's response")
        headers = []
        for name, text in value.headers:
            if not _HEADER_NAME.fullmatch(name):
                raise BadOutput(f"the handler set a header with the invalid name {name[:60]!r}")
            if name.lower() not in _FRAMING:
                headers.append((name, _line(text)))
        content_type, reason = _line(value.content_type), _line(value.reason)
        body = value.body if type(value.body) is bytes else bytes(value.body)
        return ItemResult(body, content_type, value.status, headers or None, reason=reason)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The only part: each request to a handler is one row."""
        return parts[0]


class RawCodec(TorchServeCodec):
    """The codec with `decode_input_request=false`: it decodes nothing."""

    decodes = False


class InputsCodec(TorchServeCodec):
    """The codec of TorchServe's gRPC API: the payload is msgpack of {name: bytes}; every input is a bytearray."""

    def _take(self, item: Item, inputs: dict[str, Any], headers: dict[str, Any]) -> None:
        try:
            found = _inputs.decode(item.payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadRequest("the inputs of the request cannot be decoded") from None
        for name, value in found.items():
            inputs[name], headers[name] = bytearray(value), {"content-type": ""}


def media_type(content_type: str) -> str:
    """The content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def _line(text: str) -> str:
    """The text in Latin-1, as a header carries it; other characters become "?". Raises BadOutput."""
    if _CONTROL.search(text):
        raise BadOutput(f"the handler set a header with control characters: {text[:60]!r}")
    return text if text.isascii() else text.encode("latin-1", "replace").decode("latin-1")


def _fields(data: bytes | memoryview) -> list[tuple[str, bytearray]]:
    """The fields of a urlencoded body or query, with raw bytes as values. Raises BadRequest."""
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
