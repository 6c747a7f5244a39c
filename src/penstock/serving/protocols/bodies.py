"""Request and response bodies: JSON, text, forms and content codings. Errors name the position of an invalid byte."""

from __future__ import annotations

import math
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from msgspec.structs import replace

from penstock.errors import HALF_PAIR, BadOutput, BadRequest, UnsupportedType
from penstock.types import Headers, ItemResult

JSON: Final = "application/json"
ERROR_CODE: Final = "x-error-code"  # header of every error: not every protocol's body has a code
PART_TYPE: Final = "x-part-type"  # header of a stream of events: the content type of its first part
BASE64: Final = b"base64"  # name of a server-sent event whose data is base64, because only text fits into an event
BLANKS: Final = b" \t"  # around the value of a header, to which they do not belong (RFC 9110, section 5.5)
BOM: Final = b"\xef\xbb\xbf"  # Windows programs begin files with it; RFC 8259, section 8.1, allows to ignore it
MAX_FIELDS: Final = 1000  # of a form; more is an attack on the parser
MAX_COUNTED: Final = 2**17  # elements of a list that the server process counts, in 13 ms
MAX_COUNTED_BYTES: Final = 8 * 2**20  # JSON without many elements is skipped at more than 1 GB/s
SMALL_BYTES: Final = 2**16  # it has fewer elements than MAX_COUNTED
raw_list: Final = msgspec.json.Decoder(list[msgspec.Raw])

_POSITION = re.compile(r"byte (\d+)")
# in JSON: a first half that no second one follows, or a second one that follows no first one
_FIRST, _SECOND = rb"\\ud[89ab]..", rb"\\ud[c-f].."
_HALF: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:%b(?=[^\\]|\\[^u]|\\u[^d]|\\ud[^c-f])|%b(?<!%b%b))" % (_FIRST, _SECOND, _FIRST, _SECOND),
    re.IGNORECASE | re.DOTALL,
)


def data_of(payload: Any) -> Any:
    """The bytes of a payload, which is `bytes` or a Buffer."""
    return payload if isinstance(payload, bytes) else payload.view


def free(payload: Any) -> None:
    """Releases the memory of a payload that is not used: `bytes`, or a Buffer."""
    if not isinstance(payload, bytes):
        payload.release()


def decode_json(body: bytes | memoryview, type: Any = Any) -> Any:
    """The value of a JSON body. Raises BadRequest with the position of the first invalid byte."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"the JSON body has the wrong form: {exc}") from None
    except msgspec.DecodeError as exc:
        if body[:3] == BOM:
            return decode_json(body[3:], type)
        found = str(exc)
        truncated = _POSITION.search(found) is None  # msgspec says the same of a first half without a second one
        if half := _HALF.search(body) if truncated or "surrogate" in found else None:
            found = f"a string holds half a surrogate pair (byte {half.end() - 6})"
        elif truncated:
            found = f"the body ends at byte {len(body)} inside a value" if len(body) else "the body is empty (byte 0)"
        raise BadRequest(f"the body is not valid JSON: {found}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"the body is not valid JSON: {_bad_utf8(body)}") from None
    except RecursionError:
        raise BadRequest("the JSON body is nested too deeply") from None


def _bad_utf8(body: bytes | memoryview) -> str:
    """The position of the first byte that is not UTF-8. The decoder's own position is relative to the string."""
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as exc:
        return f"invalid UTF-8 (byte {exc.start})"
    return "a string holds half a surrogate pair"


def is_countable(body: bytes | memoryview) -> bool:
    """Whether the lists in a JSON body are short enough for `raw_list` in the server process."""
    size = len(body)
    return size <= SMALL_BYTES or (size <= MAX_COUNTED_BYTES and bytes(body).count(b",") < MAX_COUNTED)


def split_type(content_type: str) -> tuple[str, str]:
    """(media type in lower case, charset or "utf-8")."""
    kind, _, params = content_type.partition(";")
    charset = "utf-8"
    for param in params.split(";"):
        name, _, value = param.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip('"')
    return kind.strip().lower(), charset


def decode_text(body: bytes | memoryview, charset: str) -> str:
    """The text of a body. Raises BadRequest for an unknown charset or invalid bytes."""
    try:
        return str(body, charset)
    except UnicodeDecodeError as exc:
        raise BadRequest(f"the text body is not {charset}: bad byte at offset {exc.start}") from None
    except (LookupError, ValueError):
        raise BadRequest(f"unknown charset {charset[:40]!r} in the content type") from None


def decode_form(body: bytes | memoryview) -> dict[str, Any]:
    """The fields of a urlencoded body; see `collect`."""
    try:
        pairs = parse_qsl(str(body, "utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as exc:  # including UnicodeDecodeError
        raise BadRequest(f"the urlencoded body cannot be read: {exc}") from None
    return collect(pairs)


def collect(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Name -> value; a repeated name has a list of its values."""
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
    """Converts arrays, tensors, NumPy scalars and subclasses of str, int and float to plain values."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    dump = getattr(value, "model_dump", None)  # of a pydantic model
    if dump is not None:
        return dump()
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise BadOutput(f"the model returned a value of type {type(value).__name__}, which JSON cannot hold")
    return _texts(tolist()) if getattr(getattr(value, "dtype", None), "kind", "") in ("O", "S") else tolist()


def _texts(cells: Any) -> Any:
    """Nested lists of an array, with bytes as `json_bytes`."""
    if isinstance(cells, list):
        return list(map(_texts, cells))
    return json_bytes(cells) if isinstance(cells, bytes) else cells


def json_bytes(cell: bytes) -> str | dict[str, str]:
    """An element of an array in JSON: its text, or `{"b64": Base64}` if it is not UTF-8, as in KServe."""
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return {"b64": b64encode(cell).decode()}


def _nan_in(value: Any) -> str | None:
    """Where lists, dicts and numbers hold NaN or infinity, such as ".scores[3]"; None if they hold neither."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    named = isinstance(value, dict)
    for key, each in value.items() if named else enumerate(value) if isinstance(value, (list, tuple)) else ():
        if (found := _nan_in(each)) is not None:
            return f".{key}{found}" if named else f"[{key}]{found}"
    return None


def encode_json(value: Any) -> bytes:
    """The value as JSON. Raises BadOutput for NaN, infinity and other values that JSON cannot hold."""
    try:
        body = msgspec.json.encode(value, enc_hook=_hook)
        # msgspec writes NaN as null, so only an output with a null needs the search
        if b"null" in body and (at := _nan_in(msgspec.to_builtins(value, enc_hook=_hook))) is not None:
            raise BadOutput(f"the model returned NaN or infinity at ${at:.100}, which JSON cannot hold")
    except UnicodeEncodeError:
        raise BadOutput(HALF_PAIR) from None
    except RecursionError:
        raise BadOutput("the model returned a value that is nested too deeply, or contains itself") from None
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadOutput(f"the model returned a {type(value).__name__} that JSON cannot hold: {exc}") from None
    return body


def encode_text(value: str) -> bytes:
    """The text as UTF-8. Raises BadOutput."""
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise BadOutput(HALF_PAIR) from None


# ---- multipart forms


class FormPart(NamedTuple):
    """One part of a form. `content_type` is "" if the client sent none; `file`: its file name, None without one."""

    name: str
    body: bytearray
    content_type: str
    file: str | None


class _Parts:
    """Receives the parser's events. `found` holds the parts; `ended` is set at the closing boundary."""

    def __init__(self, max_fields: int) -> None:
        self.found: list[FormPart] = []
        self.ended = False
        self._max_fields = max_fields

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_part_data": lambda data, start, end: self._body.extend(data[start:end]),
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.found) >= self._max_fields:
            raise BadRequest(f"the multipart body has more than {self._max_fields} parts")
        self._field, self._value, self._body = bytearray(), bytearray(), bytearray()
        self._headers: dict[str, bytes] = {}

    def _header_end(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _part_end(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get("content-disposition"))
        if b"name" not in options:
            raise BadRequest(f"part {len(self.found) + 1} of the multipart body has no name in its content-disposition")
        name = options[b"name"].decode("utf-8", "replace")
        content_type = self._headers.get("content-type", b"").decode("latin-1")
        file = options[b"filename"].decode("utf-8", "replace") if b"filename" in options else None
        self.found.append(FormPart(name, self._body, content_type, file))

    def _end(self) -> None:
        self.ended = True


def parse_parts(body: bytes | memoryview, content_type: str, max_fields: int) -> list[FormPart]:
    """The parts of a `multipart/form-data` body, in order. Raises BadRequest."""
    from python_multipart.exceptions import FormParserError  # only forms need this library
    from python_multipart.multipart import MultipartParser, parse_options_header

    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise BadRequest("the content type multipart/form-data has no boundary")
    parts = _Parts(max_fields)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        parser.write(bytes(body))
    except FormParserError as exc:
        where = max(getattr(exc, "offset", 0), 0)
        raise BadRequest(f"the multipart body is malformed at byte {where}") from None
    if not parts.ended:
        raise BadRequest(f"the multipart body ends at byte {len(body)} before its closing boundary")
    return parts.found


def part_value(part: FormPart) -> str | bytes:
    """The value of a part: `str` for a text field, otherwise `bytes`. Raises BadRequest."""
    kind, charset = split_type(part.content_type or "text/plain")
    text = part.file is None and kind.startswith("text/")
    return decode_text(bytes(part.body), charset) if text else bytes(part.body)


# ---- content codings: "" (none), "gzip" or "deflate". `deflate` is the zlib format; some clients send the raw stream,
# which is read too. Source: RFC 9110, section 8.4.1.

CONTENT_ENCODING: Final = b"content-encoding"
ACCEPT_ENCODING: Final = b"accept-encoding"
CODINGS: Final = {b"gzip": "gzip", b"x-gzip": "gzip", b"deflate": "deflate"}
LEVEL: Final = 1  # float tensors hardly become smaller at the default level 6, which takes 2.5 to 6 times as long
_WBITS: Final = {"gzip": 31, "deflate": 15}
_RAW: Final = -15


class UnsupportedCoding(UnsupportedType):
    """The body has a content coding that `CODINGS` does not list."""


def content_coding(value: bytes) -> str:
    """The coding that a Content-Encoding names. Raises UnsupportedCoding."""
    known = CODINGS.get(value.lower())
    if known is None and value.lower() not in (b"", b"identity"):
        found = value[:40].decode("latin-1")
        raise UnsupportedCoding(f"found Content-Encoding '{found}', expected gzip, deflate or identity")
    return known or ""


def accepted_coding(value: bytes) -> str:
    """The coding that an Accept-Encoding demands: it is the only one named.

    HTTP libraries and browsers send lists such as `gzip, deflate` with every request. To compress for them would cost
    all callers a worker's time that few of them want: one core compresses 20 to 60 MB/s.
    """
    return CODINGS.get(value.lower(), "")


def header_of(headers: Headers | None, name: bytes) -> bytes:
    """The value of a header, `name` in lower case; b"" without it."""
    return next((value for key, value in headers or () if key.lower() == name), b"")


def unpacker(data: bytes | memoryview, coding: str) -> zlib._Decompress:
    """What unpacks a body that begins with `data`."""
    raw = coding == "deflate" and not (len(data) > 1 and data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0)
    return zlib.decompressobj(_RAW if raw else _WBITS[coding])


def compress(result: ItemResult, coding: str) -> ItemResult:
    """The response with its body in a coding, unless that is no shorter or the model has chosen a coding itself."""
    headers = result.headers or []
    if any(name.lower() == "content-encoding" for name, _ in headers):
        return result
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _WBITS[coding])
    body = packer.compress(result.body) + packer.flush()
    if len(body) >= len(result.body):
        return result
    return replace(result, body=body, headers=[*headers, ("Content-Encoding", coding), ("Vary", "Accept-Encoding")])
