"""The native protocol: the content type says what `predict` receives, the type of its result what goes out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.errors import BadOutput, BadRequest, PenstockError
from penstock.types import Item, ItemResult, Response

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"
MAX_FIELDS: Final = 1000  # of a form; more is an attack on the parser, not an input of a model

_BYTE = re.compile(r"byte (\d+)")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "connection", "content-type", "date"})


def error_body(error: PenstockError) -> bytes:
    """`{"error": {"code", "message"}}`; the detail of an error stays inside."""
    return msgspec.json.encode({"error": {"code": error.code, "message": error.message}})


def decode_json(body: bytes | memoryview, type: Any = Any) -> Any:
    """The value of a JSON body. Raises BadRequest with the byte where it stops being JSON."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"the JSON body has the wrong form: {exc}") from None
    except msgspec.DecodeError as exc:
        found = str(exc)
        if _BYTE.search(found) is None:  # msgspec names no byte when the input just ends
            found = f"the body ends at byte {len(body)} inside a value" if len(body) else "the body is empty (byte 0)"
        raise BadRequest(f"the body is not valid JSON: {found}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"the body is not valid JSON: {_bad_utf8(body)}") from None
    except RecursionError:
        raise BadRequest("the JSON body is nested too deeply") from None


def _bad_utf8(body: bytes | memoryview) -> str:
    """Where the body stops being UTF-8; the decoder itself counts from the start of a string."""
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as exc:
        return f"invalid UTF-8 (byte {exc.start})"
    return "an escape names half a character"


def split_type(content_type: str) -> tuple[str, str]:
    """Media type in lower case, and the charset ("utf-8" unless named)."""
    kind, _, params = content_type.partition(";")
    charset = "utf-8"
    for param in params.split(";"):
        name, _, value = param.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip('"')
    return kind.strip().lower(), charset


def decode_text(body: bytes | memoryview, charset: str) -> str:
    """The text of a body. Raises BadRequest for an unknown charset or bytes that are not in it."""
    try:
        return str(body, charset)
    except UnicodeDecodeError as exc:
        raise BadRequest(f"the text body is not {charset}: bad byte at offset {exc.start}") from None
    except (LookupError, ValueError):
        raise BadRequest(f"unknown charset {charset[:40]!r} in the content type") from None


def decode_form(body: bytes | memoryview) -> dict[str, Any]:
    """The fields of a urlencoded body; a name that comes several times has the list of its values."""
    try:
        pairs = parse_qsl(str(body, "utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as exc:  # UnicodeDecodeError is one
        raise BadRequest(f"the urlencoded body cannot be read: {exc}") from None
    return collect(pairs)


def collect(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Name to value; the list of values where a name comes several times."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in fields:
            fields[name] = value
        elif isinstance(fields[name], list):
            fields[name].append(value)
        else:
            fields[name] = [fields[name], value]
    return fields


def _hook(value: Any) -> Any:
    """Plain lists and numbers of whatever knows them: arrays and scalars of numpy, tensors, kinds of str and int."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise BadOutput(f"the model returned a value of type {type(value).__name__}, which JSON cannot hold")
    return tolist()


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_has_nan, value))
    if hasattr(value, "tolist"):
        return _has_nan(value.tolist())
    return isinstance(value, msgspec.Struct) and _has_nan(msgspec.structs.astuple(value))


def encode_json(value: Any) -> bytes:
    """The value as JSON. Raises BadOutput for NaN, infinity and for what JSON cannot hold."""
    try:
        body = msgspec.json.encode(value, enc_hook=_hook)
        # NaN becomes null in silence, so only an output that has a null somewhere is looked through
        if b"null" in body and _has_nan(value):
            raise BadOutput("the model returned NaN or infinity, which JSON cannot hold")
    except RecursionError:
        raise BadOutput("the model returned a value that is nested too deeply, or holds itself") from None
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadOutput(f"the model returned a {type(value).__name__} that JSON cannot hold: {exc}") from None
    return body


def encode_response(response: Response) -> ItemResult:
    """The answer that a model wrote itself. Raises BadOutput for headers that would break the framing."""
    body = response.body
    for name, value in response.headers.items():
        if not _HEADER_NAME.fullmatch(name) or any(c in value for c in "\r\n\0") or not value.isascii():
            raise BadOutput(f"the model returned a Response with an invalid header {name[:60]!r}")
        if name.lower() in _FRAMING:
            raise BadOutput(f"the model returned a Response with the header {name!r}, which the server sets itself")
    if any(c in response.content_type for c in "\r\n\0") or not response.content_type.isascii():
        raise BadOutput("the model returned a Response with an invalid content type")
    return ItemResult(
        body=body.encode() if isinstance(body, str) else bytes(body),
        content_type=str(response.content_type),
        status=response.status,
        headers=[(str(name), str(value)) for name, value in response.headers.items()] or None,
    )


class NativeCodec:
    """Codec of `/predictions`: JSON, text, forms, or the bytes as they are."""

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version

    def decode(self, item: Item) -> tuple[Any, None]:
        """JSON -> object, text -> str, form -> dict of name to str or bytes, anything else -> the payload itself."""
        kind, charset = split_type(item.content_type)
        value: Any = item.payload
        if kind == JSON or kind.endswith("+json"):
            value = decode_json(item.payload)
        elif kind.startswith("text/"):
            value = decode_text(item.payload, charset)
        elif kind == "multipart/form-data":
            from penstock.protocols.multipart import parse_multipart  # python-multipart is loaded by the first form

            value = collect(parse_multipart(item.payload, item.content_type, MAX_FIELDS))
        elif kind == "application/x-www-form-urlencoded":
            value = decode_form(item.payload)
        if item.stop < 0:
            return value, None
        if not isinstance(value, list):
            raise BadRequest(
                f"a request of {item.rows} rows is larger than the largest batch, and only a JSON list can be split"
            )
        return value[item.start : item.stop], None

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """bytes -> octet-stream, str -> text, Response as it says, anything else -> JSON."""
        if isinstance(value, bytes):
            return ItemResult(body=value if type(value) is bytes else bytes(value), content_type=BYTES)
        if isinstance(value, str):
            return ItemResult(body=value.encode("utf-8", "surrogatepass"), content_type=TEXT)
        if isinstance(value, (bytearray, memoryview)):
            return ItemResult(body=bytes(value), content_type=BYTES)
        if isinstance(value, Response):
            return encode_response(value)
        if value is None:
            raise BadOutput("the model returned None for this item; return a value, or an exception to fail the item")
        return ItemResult(body=encode_json(value), content_type=JSON)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The rows of all parts in one answer: JSON lists become one list, text and bytes are put end to end."""
        first = parts[0]
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
            if part.content_type != first.content_type:
                raise BadOutput("the parts of a split request were answered with different content types")
        bodies = [bytes(part.body) for part in parts]
        if first.content_type == JSON:
            if not all(body.startswith(b"[") for body in bodies):
                raise BadOutput("the answers to the parts of a split request can be joined only if they are lists")
            inner = b",".join(body[1:-1] for body in bodies if len(body) > 2)
            return ItemResult(body=b"[" + inner + b"]", content_type=JSON)
        return ItemResult(body=b"".join(bodies), content_type=first.content_type, status=first.status)
