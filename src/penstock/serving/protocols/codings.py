"""Content codings of HTTP: gzip and deflate, with bounds.

A coding is "" (none), "gzip" or "deflate". `deflate` is the zlib format; some clients send the raw stream, which is
read too. Source: RFC 9110, section 8.4.1.
"""

from __future__ import annotations

import zlib
from typing import Final

from msgspec.structs import replace

from penstock.errors import UnsupportedType
from penstock.types import Headers, ItemResult

CONTENT_ENCODING: Final = b"content-encoding"
ACCEPT_ENCODING: Final = b"accept-encoding"
CODINGS: Final = {b"gzip": "gzip", b"x-gzip": "gzip", b"deflate": "deflate"}
LEVEL: Final = 1  # float tensors hardly become smaller at the default level 6, which takes 2.5 to 6 times as long
_WBITS: Final = {"gzip": 31, "deflate": 15}
_RAW: Final = -15


class UnsupportedCoding(UnsupportedType):
    """The body has a content coding other than those of `CODINGS`."""


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
