"""Whether the fields of a request or of its trailers keep the rules of HTTP/2. Pure.

A malformed message ends its stream with PROTOCOL_ERROR; the connection goes on.
Source: RFC 9113, sections 8.1 to 8.3; RFC 9110, sections 5, 7.2 and 8.6.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.types import Headers

NO_LENGTH: Final = -1
LENGTH_DIGITS: Final = 18  # below 2^63
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_CONNECT: Final = frozenset({b":method", b":authority"})
_OF_CONNECTION: Final = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_PORTS: Final = {b"http": b":80", b"https": b":443"}
_is_name: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_is_method: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_is_scheme: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*").fullmatch
_is_path: Final = re.compile(rb"/[^\0-\x20\x7f]*").fullmatch
_is_authority: Final = re.compile(rb"[^\0-\x20\x7f@/?#]*").fullmatch


def request_length(headers: Headers) -> int | None:
    """The length of the content that a request states, NO_LENGTH if it states none. None for a malformed request."""
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _PSEUDO:
            if regular or name in pseudo or not _is_value(value):
                return None
            pseudo[name] = value
        elif not _is_field(name, value) or (name in regular and name in (b"host", b"content-length")):
            return None
        else:
            regular[name] = value
    length = regular.get(b"content-length")
    if not _is_target(pseudo, regular.get(b"host")):
        return None
    if length is None:
        return NO_LENGTH
    return int(length) if length.isdigit() and len(length) <= LENGTH_DIGITS else None


def are_trailers(headers: Headers) -> bool:
    """Whether these fields may follow the content of a request."""
    return all(_is_field(name, value) for name, value in headers)


def _is_value(value: bytes) -> bool:
    # a regular expression would take 12 times as long, and a block of 90 bytes may stand for 60 KB of values
    return not (b"\n" in value or b"\r" in value or b"\0" in value) and value.strip(b" \t") == value


def _is_field(name: bytes, value: bytes) -> bool:
    if not (_is_name(name) and _is_value(value)) or name in _OF_CONNECTION:
        return False
    return name != b"te" or value.lower() == b"trailers"


def _is_target(pseudo: dict[bytes, bytes], host: bytes | None) -> bool:
    """Whether method, scheme, path and authority are there, valid, and without a host that contradicts them."""
    method, authority = pseudo.get(b":method", b""), pseudo.get(b":authority", host or b"")
    if not (_is_method(method) and _is_authority(authority)):
        return False
    if method == b"CONNECT":
        return pseudo.keys() == _OF_CONNECT
    if not pseudo.keys() >= _REQUIRED:
        return False
    scheme, path = pseudo[b":scheme"].lower(), pseudo[b":path"]
    if not (_is_scheme(scheme) and (_is_path(path) or (path == b"*" and method == b"OPTIONS"))):
        return False
    port = _PORTS.get(scheme, b"")
    return host is None or host.lower().removesuffix(port) == authority.lower().removesuffix(port)
