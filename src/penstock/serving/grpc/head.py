"""What the headers of a gRPC call say.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from msgspec import Struct

from penstock.serving.grpc.calls import GrpcError
from penstock.serving.http2.frames import FIELD_BYTES
from penstock.types import Headers

UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
LONGEST_S: Final = 1e8  # three years
_OWN: Final = frozenset({b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"})


class Method(Struct, frozen=True):
    """What serves the calls of one path. `read` parses a message, `write` serializes one."""

    function: Any
    guard: str  # the group whose token opens it; empty: open to all
    refused: GrpcError | None  # how all calls fail
    read: Callable[[Any], Any]
    write: Callable[[Any], bytes]
    client_streaming: bool
    server_streaming: bool
    direct: bool


class CallHead(NamedTuple):
    """The headers of a call. A client's later calls commonly share it."""

    path: str
    method: Method | None
    metadata: Headers
    timeout_s: float | None
    encoding: bytes
    status: int  # of HTTP, for a request that is not gRPC; 0 for a call
    nbytes: int  # of the decoded metadata

    @property
    def authorization(self) -> bytes | None:
        return next((value for name, value in self.metadata if name == b"authorization"), None)


def read_head(headers: Headers, find: Callable[[str], Method | None]) -> CallHead | None:
    """What the headers of a request say; None for a time-out that is none. `find` returns the method of a path."""
    own: dict[bytes, bytes] = {}
    metadata: Headers = []
    for name, value in headers:
        if name[:1] == b":" or name in _OWN:
            own[name] = value
        else:
            metadata.append((name, _decoded(value) if name.endswith(b"-bin") else value))
    path = own.get(b":path", b"").decode("latin-1")
    status = 0
    if own[b":method"] != b"POST":
        status = 405
    elif not own.get(b"content-type", b"").startswith(b"application/grpc"):
        status = 415
    timeout, timeout_s = own.get(b"grpc-timeout"), None
    if timeout is not None:
        if not (timeout[:-1].isdigit() and len(timeout) <= 9 and timeout[-1:] in UNITS):
            return None
        timeout_s = min(int(timeout[:-1]) * UNITS[timeout[-1:]], LONGEST_S)
    nbytes = len(path) + sum([FIELD_BYTES + len(name) + len(value) for name, value in metadata])
    return CallHead(path, find(path), metadata, timeout_s, own.get(b"grpc-encoding", b"identity"), status, nbytes)


def _decoded(value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return value
