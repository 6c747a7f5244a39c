"""HTTP/2's frames, header blocks and their fields.

hpack and hyperframe parse; this module packs, checks the fields, and remembers repeated blocks.

A malformed message ends its stream with PROTOCOL_ERROR; the connection goes on.
Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK), and RFC 9110, sections 5, 7.2 and 8.6.
"""

import re
from collections.abc import Callable, Iterable
from struct import Struct as Packing
from typing import Final, Generic, TypeVar

from hpack import Decoder, Encoder
from hyperframe.exceptions import HyperframeError, InvalidFrameError
from hyperframe.frame import Frame

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


DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED = range(6)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM = range(6, 12)

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(2, 7)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD: Final = Packing(">HBBBI")  # of a frame: the length in two parts, type, flags, stream
HEAD_BYTES: Final = HEAD.size
DEFAULT_WINDOW: Final = 2**16 - 1  # RFC 9113, section 6.9.2
DEFAULT_FRAME: Final = 2**14  # RFC 9113, section 4.2
MAX_WINDOW: Final = 2**31 - 1  # RFC 9113, section 6.9.1
RECEIVE_FRAME: Final = 2**20  # larger frames cost less each; their data is not gathered
KNOWN_BLOCKS: Final = 64  # a choice: a client has a block for each of its methods
KNOWN_BYTES: Final = 2**15  # of all decoded blocks that a connection remembers: a block of 4 KiB may stand for 64 KiB
EMPTY_TABLE: Final = b"\x20"
CODED_PER_UNIT: Final = 16  # bytes of a block; Huffman's code costs most, 0.6 us a byte
DECODED_PER_UNIT: Final = 256  # bytes of its fields, which are checked and may be base64
FIELD_BYTES: Final = 32  # added to the size of each field, as in RFC 7541 section 4.1
_SETTING: Final = Packing(">HI")
WORD: Final = Packing(">I")
_encoder: Final = Encoder()
_too_many_updates: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\0-\x7f]){3}").match

T = TypeVar("T")


class Http2Error(Exception):
    """Ends the connection with this error code and a text for who debugs the client."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 255, kind, flags, stream) + payload


def data_head(size: int, stream: int) -> bytes:
    """The head of a DATA frame that does not end its stream."""
    return HEAD.pack(size >> 8, size & 255, DATA, 0, stream)


def window_update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, WORD.pack(more))


def rst_stream(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, WORD.pack(code))


def goaway(last: int, code: int, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, WORD.pack(last) + WORD.pack(code) + text.encode())


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*pair) for pair in values.items()]))


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """A header block that leaves the client's table empty, so that it may be sent at any time, and again.

    It begins with EMPTY_TABLE: a client that has made its table smaller expects this in the next block.
    """
    block: bytes = _encoder.encode([(name, value, True) for name, value in headers], huffman=False)
    return EMPTY_TABLE + block


def parse_frame(data: memoryview) -> Frame:
    """One whole frame. Raises Http2Error."""
    try:
        found, _ = Frame.parse_frame_header(data[:HEAD_BYTES])
        found.parse_body(data[HEAD_BYTES:])
    except InvalidFrameError as error:
        raise Http2Error(FRAME_SIZE_ERROR, str(error)) from None
    except HyperframeError as error:
        raise Http2Error(PROTOCOL_ERROR, str(error)) from None
    return found


def check_size(kind: int, size: int, most_headers: int) -> None:
    """Bounds the bytes gathered before they are parsed."""
    if kind > CONTINUATION:
        if size > RECEIVE_FRAME:
            raise Http2Error(FRAME_SIZE_ERROR, f"found a frame of {size} bytes, at most {RECEIVE_FRAME} are taken")
    elif kind in (HEADERS, CONTINUATION):
        most = max(DEFAULT_FRAME, most_headers)
        if size > most:
            raise Http2Error(ENHANCE_YOUR_CALM, f"found a frame of {size} bytes, at most {most} are taken")
    elif size > DEFAULT_FRAME:
        raise Http2Error(FRAME_SIZE_ERROR, f"found a frame of {size} bytes, at most {DEFAULT_FRAME} are taken")


def block_of(id: int, flags: int, payload: memoryview) -> memoryview:
    """The header block in a HEADERS frame, without padding and priority."""
    before = (1 if flags & PADDED else 0) + (5 if flags & PRIORITIZED else 0)
    if len(payload) < before:
        raise Http2Error(FRAME_SIZE_ERROR, f"found HEADERS of {len(payload)} bytes, expected {before} or more")
    end = len(payload) - (payload[0] if flags & PADDED else 0)
    if end < before:
        raise Http2Error(PROTOCOL_ERROR, "found more padding than the frame has room for")
    if flags & PRIORITIZED and int.from_bytes(payload[before - 5 : before - 1], "big") & MAX_WINDOW == id:
        raise Http2Error(PROTOCOL_ERROR, f"stream {id} depends on itself")
    return payload[before:end]


class HeaderReader(Generic[T]):
    """Decodes the header blocks of one connection, and reads each list of headers with `read`.

    Clients repeat their blocks. One that left the table of the decoder unchanged means the same again, until another
    block changes the table: until then it is looked up and not decoded.
    """

    def __init__(self, most_bytes: int, read: Callable[[Headers], T | None]) -> None:
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._read = read
        self._known: dict[bytes, tuple[T | None, int]] = {}
        self._known_bytes = 0
        self.work = 0  # of decoding since somebody set it to 0, in the units of a connection's turn

    def read(self, block: bytes) -> tuple[T | None, int]:
        """What a request says, None if it is malformed, and the length of its content. Raises Http2Error."""
        known = self._known.get(block)
        if known is not None:
            return known
        headers, size, changed = self._decode(block)
        length = request_length(headers)
        found = (None, NO_LENGTH) if length is None else (self._read(headers), length)
        if not changed and size <= KNOWN_BYTES // 4:
            if len(self._known) >= KNOWN_BLOCKS or self._known_bytes + size > KNOWN_BYTES:
                self._forget()
            self._known[block] = found
            self._known_bytes += size
        return found

    def decode(self, block: bytes) -> Headers:
        """The headers of any block. Raises Http2Error."""
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers, int, bool]:
        """The headers, their size, and whether the table has changed, which the known blocks do not survive.

        Raises Http2Error: after a bad block the tables of both sides differ, and the connection is useless.
        """
        table = self._decoder.header_table
        size, count, first = table.maxsize, len(table.dynamic_entries), next(iter(table.dynamic_entries), None)
        if _too_many_updates(block):  # one byte each, and 5 us: a block of them would stop the server for 0.3 s
            raise Http2Error(COMPRESSION_ERROR, "found more than two updates of the table's size in a block")
        try:
            headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except Exception as error:  # whatever the library did not foresee is as final as what it did
            raise Http2Error(COMPRESSION_ERROR, f"{type(error).__name__}: {error}") from None
        # an insertion puts another object first; whatever else changes the table makes it shorter
        changed = first is not next(iter(table.dynamic_entries), None)
        changed = changed or (size, count) != (table.maxsize, len(table.dynamic_entries))
        if changed:
            self._forget()
        size = len(block) + sum([FIELD_BYTES + len(name) + len(value) for name, value in headers])
        self.work += len(block) // CODED_PER_UNIT + size // DECODED_PER_UNIT
        return headers, size, changed

    def _forget(self) -> None:
        self._known.clear()
        self._known_bytes = 0
