"""Values and arrays as request bodies, and a response or a stream as Python values. Pure."""

from __future__ import annotations

import binascii
import codecs
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.client.endpoint import ResponseTooLarge
from penstock.client.http import Buffer
from penstock.client.response import UnexpectedResponse, named_error
from penstock.errors import BadOutput, BadRequest, ItemFailed, PenstockError
from penstock.serving.protocols.bodies import BASE64, JSON, PART_TYPE, decode_text, encode_json, encode_text, split_type
from penstock.values import shorten

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
            return [_decode(JSON, "utf-8", line) for line in self._lines(piece) if line.strip()]
        if self._text is not None:
            text = self._text.decode(piece)
            return [text] if text else []
        return [piece]

    def end(self) -> list[Any]:
        """The parts that the end of the stream completes."""
        rest, self._rest = bytes(self._rest), bytearray()
        if self._kind == LINES and rest.strip():
            return [_decode(JSON, "utf-8", rest)]
        return self._event_line(b"") if self._kind == EVENTS else []

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
