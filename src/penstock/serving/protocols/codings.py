"""Content codings of HTTP: gzip and deflate, with bounds.

A coding is "" (none), "gzip" or "deflate". `deflate` is the zlib format; some clients send the raw stream, which is
read too. Source: RFC 9110, section 8.4.1.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from msgspec.structs import replace

from penstock.errors import BadRequest, PayloadTooLarge, UnsupportedType
from penstock.types import Headers, Item, ItemResult

CONTENT_ENCODING: Final = b"content-encoding"
ACCEPT_ENCODING: Final = b"accept-encoding"
CODINGS: Final = {b"gzip": "gzip", b"x-gzip": "gzip", b"deflate": "deflate"}
LEVEL: Final = 1  # float tensors hardly become smaller at the default level 6, which takes 2.5 to 6 times as long
MAX_RATIO: Final = 1032  # of deflate: a match of 258 bytes takes 2 bits at least
_WBITS: Final = {"gzip": 31, "deflate": 15}
_RAW: Final = -15


def content_coding(value: bytes) -> str:
    """The coding that a Content-Encoding names. Raises UnsupportedType."""
    known = CODINGS.get(value.lower())
    if known is None and value.lower() not in (b"", b"identity"):
        found = value[:40].decode("latin-1")
        raise UnsupportedType(f"found Content-Encoding '{found}', expected gzip, deflate or identity")
    return known or ""


def accepted_coding(value: bytes) -> str:
    """The coding that an Accept-Encoding demands: it is the only one named.

    HTTP libraries and browsers send lists such as `gzip, deflate` with every request. To compress for them would cost
    all callers a worker's time that few of them want: one core compresses 20 to 60 MB/s.
    """
    return CODINGS.get(value.lower(), "")


def coding_of(item: Item) -> str:
    """The coding of a request's body. Raises UnsupportedType."""
    return content_coding(header_of(item.headers, CONTENT_ENCODING))


def header_of(headers: Headers | None, name: bytes) -> bytes:
    """The value of a header, `name` in lower case; b"" without it."""
    return next((value for key, value in headers or () if key.lower() == name), b"")


def _decompressor(data: bytes | memoryview, coding: str) -> Any:
    raw = coding == "deflate" and not (len(data) > 1 and data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0)
    return zlib.decompressobj(_RAW if raw else _WBITS[coding])


def decompress(data: bytes | memoryview, coding: str, most: int) -> bytes:
    """The body of a request. Raises PayloadTooLarge if it has more than `most` bytes, of which no more are made, and
    BadRequest if the stream is damaged or truncated, or if anything follows it."""
    stream = _decompressor(data, coding)
    try:
        body: bytes = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not a valid {coding} stream: {error}") from None
    if len(body) > most:
        raise PayloadTooLarge(f"decompressed, the body is larger than {most} bytes (limits.max_body_bytes)")
    if not stream.eof:
        raise BadRequest(f"the {coding} stream of the body is truncated: it ends after {len(data)} bytes")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes follow the {coding} stream; send exactly one")
    return body


def decompressed_head(data: bytes | memoryview, coding: str, most: int) -> bytes:
    """At most the first `most` bytes of a body; b"" of a damaged one."""
    try:
        head: bytes = _decompressor(data, coding).decompress(data, most)
    except zlib.error:  # the worker reports it
        return b""
    return head


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
