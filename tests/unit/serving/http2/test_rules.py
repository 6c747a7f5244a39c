"""The rules of RFC 9113 as raw frames, each with what a server must do: nothing, end the stream, or the connection."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hyperframe.frame import Frame

from penstock.serving.http2 import frames as h2
from penstock.serving.http2.connection import Http2Connection
from penstock.serving.http2.frames import RECEIVE_FRAME, HeaderReader, Http2Error, frame
from penstock.serving.http2.streams import Outbox, Stream

BOUNDS = SimpleNamespace(max_streams=20, max_header_bytes=2**16)
START = h2.PREFACE + h2.settings({})
Fields = list[tuple[bytes, bytes]]


class Quiet(Stream):
    """A stream that never answers, except on the path `/now`: with one frame, before the client has ended it."""

    def __init__(self, connection: Any, id: int, headers: Fields, log: list[Any]) -> None:
        super().__init__(connection, id)
        self.headers, self.log = dict(headers), log

    def on_open(self) -> None:
        self.log.append((self.id, "open"))
        if self.headers.get(b":path") == b"/now":
            last = frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self.id, h2.encode_headers([(":status", "400")]))
            self.connection.outbox.send(self, (), last)
        elif self.ended:
            self.on_end()

    def on_end(self) -> None:
        self.log.append((self.id, "end"))

    def on_closed(self) -> None:
        self.log.append((self.id, "closed"))


def block(fields: Fields) -> bytes:
    """A header block of literals that no table keeps."""
    return b"".join(b"\0" + text(name) + text(value) for name, value in fields)


def text(data: bytes) -> bytes:
    size = len(data)
    head = bytes([size]) if size < 127 else b"\x7f" + bytes([(size - 127) & 127 | 128, (size - 127) >> 7])
    return head + data


def head(*more: tuple[bytes, bytes], id: int = 1, end: bool = False, **pseudo: bytes | None) -> bytes:
    """HEADERS of a good request with further fields; a pseudo field is replaced, or left out if it is None."""
    fields = {"method": b"POST", "scheme": b"http", "path": b"/a", "authority": b"here:80"} | pseudo
    known = [(b":" + name.encode(), value) for name, value in fields.items() if value is not None]
    return frame(h2.HEADERS, h2.END_HEADERS | end, id, block([*known, *more]))


def heads(fields: Fields) -> bytes:
    return frame(h2.HEADERS, h2.END_HEADERS, 1, block(fields))


def data(size: int, *, id: int = 1, end: bool = True) -> bytes:
    return frame(h2.DATA, h2.END_STREAM if end else 0, id, bytes(size))


def trailers(*fields: tuple[bytes, bytes], end: bool = True, id: int = 1) -> bytes:
    return frame(h2.HEADERS, h2.END_HEADERS | end, id, block(list(fields)))


def word(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def reaction(sent: bytes) -> tuple[str, int]:
    """What the server does: ("connection" or "stream", code), or "fine"."""
    log: list[Any] = []
    out = bytearray()
    outbox = Outbox(out.extend, lambda parts: out.extend(b"".join(parts)))
    reader: HeaderReader[Any] = HeaderReader(BOUNDS.max_header_bytes, lambda headers: headers)
    found = Http2Connection(BOUNDS, outbox, reader, lambda owner, id, headers: Quiet(owner, id, headers, log))
    rest = START + sent
    try:
        while True:
            rest = rest[found.receive(memoryview(rest), 0.0) :]
            if found.turn > 0:
                break
    except Http2Error as error:
        return "connection", error.code
    assert not rest
    view, codes = memoryview(bytes(out)), []
    while view:
        each, size = Frame.parse_frame_header(view[:9])
        each.parse_body(view[9 : 9 + size])
        view = view[9 + size :]
        if each.type == h2.RST_STREAM:
            assert each.stream_id not in found.streams
            codes.append(each.error_code)
    if not codes:
        return "fine", 0
    assert len(codes) == 1, codes
    return "stream", codes[0]


FINE = ("fine", 0)
MALFORMED = ("stream", h2.PROTOCOL_ERROR)
CLOSED = ("stream", h2.STREAM_CLOSED)
PROTOCOL = ("connection", h2.PROTOCOL_ERROR)
SIZE = ("connection", h2.FRAME_SIZE_ERROR)
POST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"here")]

FIELDS = {
    "a good request": (head((b"x-a", b"b c\xff"), (b"te", b"trailers"), (b"empty", b"")), FINE),
    "no authority": (head(authority=None), FINE),
    "only a host": (head((b"host", b"here"), authority=None), FINE),
    "the same host": (head((b"host", b"HERE")), FINE),
    "options of all": (head(method=b"OPTIONS", path=b"*"), FINE),
    "connect": (head(method=b"CONNECT", scheme=None, path=None), FINE),
    "an upper-case name": (head((b"X-a", b"b")), MALFORMED),
    "an empty name": (head((b"", b"b")), MALFORMED),
    "a blank in a name": (head((b"x a", b"b")), MALFORMED),
    "a colon in a name": (head((b"x:a", b"b")), MALFORMED),
    "a control in a name": (head((b"x\x01", b"b")), MALFORMED),
    "a high byte in a name": (head((b"x\xe4", b"b")), MALFORMED),
    "a delete in a name": (head((b"x\x7f", b"b")), MALFORMED),
    "a line feed in a value": (head((b"x", b"a\nb")), MALFORMED),
    "a return in a value": (head((b"x", b"a\rb")), MALFORMED),
    "a zero in a value": (head((b"x", b"a\0b")), MALFORMED),
    "a line feed at the end of a value": (head((b"x", b"a\n")), MALFORMED),
    "a leading blank": (head((b"x", b" a")), MALFORMED),
    "a trailing blank": (head((b"x", b"a ")), MALFORMED),
    "a leading tab": (head((b"x", b"\ta")), MALFORMED),
    "a trailing tab": (head((b"x", b"a\t")), MALFORMED),
    "only a blank": (head((b"x", b" ")), MALFORMED),
    "a line feed in a pseudo field": (head(path=b"/a\nb"), MALFORMED),
    "a blank in a path": (head(path=b"/a b"), MALFORMED),
    **{
        f"the field {name.decode()}": (head((name, b"x")), MALFORMED)
        for name in (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
    },
    "another te": (head((b"te", b"gzip")), MALFORMED),
    "a te with more than trailers": (head((b"te", b"trailers, gzip")), MALFORMED),
    **{f"no {name}": (head(**{name: None}), MALFORMED) for name in ("method", "scheme", "path")},
    **{f"an empty {name}": (head(**{name: b""}), MALFORMED) for name in ("method", "scheme", "path")},
    **{f"two of {name.decode()}": (heads([*POST, (name, value)]), MALFORMED) for name, value in POST},
    "a path without a slash": (head(path=b"a"), MALFORMED),
    "a star that is no options": (head(path=b"*"), MALFORMED),
    "a method with a blank": (head(method=b"PO ST"), MALFORMED),
    "a scheme that begins with a digit": (head(scheme=b"1http"), MALFORMED),
    "a user in the authority": (head(authority=b"me@here"), MALFORMED),
    "a path in the authority": (head(authority=b"here/a"), MALFORMED),
    "an unknown pseudo field": (head((b":x", b"y")), MALFORMED),
    "a protocol that was not offered": (head(method=b"CONNECT", protocol=b"websocket"), MALFORMED),
    "a pseudo field of a response": (heads([*POST, (b":status", b"200")]), MALFORMED),
    "a pseudo field after a regular one": (heads([POST[0], (b"x", b"y"), *POST[1:]]), MALFORMED),
    "connect with a path": (head(method=b"CONNECT", scheme=None), MALFORMED),
    "connect with a scheme": (head(method=b"CONNECT", path=None), MALFORMED),
    "connect without an authority": (head(method=b"CONNECT", scheme=None, path=None, authority=None), MALFORMED),
    "another host": (head((b"host", b"there")), MALFORMED),
    "two hosts": (head((b"host", b"here"), (b"host", b"here")), MALFORMED),
    "a user in the host": (head((b"host", b"me@here"), authority=None), MALFORMED),
    "an empty block": (heads([]), MALFORMED),
    # the length of the content
    "the stated length": (head((b"content-length", b"5")) + data(2, end=False) + data(3), FINE),
    "the stated length with padding": (
        head((b"content-length", b"5"))
        + frame(h2.DATA, h2.PADDED, 1, b"\3ab\0\0\0")
        + frame(h2.DATA, h2.PADDED | h2.END_STREAM, 1, b"\1abc\0"),
        FINE,
    ),
    "the stated length and trailers": (head((b"content-length", b"5")) + data(5, end=False) + trailers(), FINE),
    "no content, as stated": (head((b"content-length", b"0"), end=True), FINE),
    "less than the stated length": (head((b"content-length", b"5")) + data(4), MALFORMED),
    "more than the stated length": (head((b"content-length", b"5")) + data(3, end=False) + data(3), MALFORMED),
    "nothing of the stated length": (head((b"content-length", b"5")) + data(0), MALFORMED),
    "headers that end below the stated length": (head((b"content-length", b"5"), end=True), MALFORMED),
    "trailers below the stated length": (head((b"content-length", b"5")) + data(4, end=False) + trailers(), MALFORMED),
    "a length that is no number": (head((b"content-length", b"5x")), MALFORMED),
    "a negative length": (head((b"content-length", b"-5")), MALFORMED),
    "an endless length": (head((b"content-length", b"9" * 5000)), MALFORMED),
    "two lengths": (head((b"content-length", b"5"), (b"content-length", b"6")), MALFORMED),
    "a list of lengths": (head((b"content-length", b"5, 5")), MALFORMED),
    # trailers
    "trailers": (head() + data(1, end=False) + trailers((b"x", b"y")), FINE),
    "trailers that do not end the stream": (head() + data(1, end=False) + trailers((b"x", b"y"), end=False), MALFORMED),
    "a pseudo field in trailers": (head() + trailers((b":path", b"/a")), MALFORMED),
    "a bad name in trailers": (head() + trailers((b"X", b"y")), MALFORMED),
    "a bad value in trailers": (head() + trailers((b"x", b"y ")), MALFORMED),
    "a field of the connection in trailers": (head() + trailers((b"connection", b"x")), MALFORMED),
}  # fmt: skip

NOW = head(path=b"/now")  # answered before the client has ended it
RESET = frame(h2.RST_STREAM, 0, 1, word(h2.CANCEL))
OPEN = frame(h2.HEADERS, 0, 1, block(POST))  # its block goes on
PRIORITY_OF_3 = word(3) + b"\x10"
STATES = {
    "data of an idle stream": (data(1), PROTOCOL),
    "a reset of an idle stream": (RESET, PROTOCOL),
    "a window for an idle stream": (h2.window_update(1, 5), PROTOCOL),
    "a window of nothing for an idle stream": (h2.window_update(1, 0), PROTOCOL),
    "a priority of an idle stream": (frame(h2.PRIORITY, 0, 1, PRIORITY_OF_3), FINE),
    "a continuation of an idle stream": (frame(h2.CONTINUATION, h2.END_HEADERS, 1, block(POST)), PROTOCOL),
    "data after the end": (head() + data(1) + data(1), CLOSED),
    "headers after the end": (head(end=True) + trailers((b"x", b"y")), CLOSED),
    "a continuation after the end": (head(end=True) + frame(h2.CONTINUATION, 4, 1, b""), PROTOCOL),
    "a window after the end": (head(end=True) + h2.window_update(1, 5), FINE),
    "a priority after the end": (head(end=True) + frame(h2.PRIORITY, 0, 1, PRIORITY_OF_3), FINE),
    "a reset after the end": (head(end=True) + RESET, FINE),
    "data after a reset": (head() + RESET + data(1), CLOSED),
    "headers after a reset": (head() + RESET + head(), ("connection", h2.STREAM_CLOSED)),
    "a window after a reset": (head() + RESET + h2.window_update(1, 5), FINE),
    "a reset after a reset": (head() + RESET + RESET, FINE),
    "a priority after a reset": (head() + RESET + frame(h2.PRIORITY, 0, 1, PRIORITY_OF_3), FINE),
    "data that was under way to an answered stream": (NOW + data(1, end=False) + data(1), FINE),
    "trailers that were under way to an answered stream": (NOW + trailers((b"x", b"y")), FINE),
    "data that was under way to a malformed stream": (head((b"X", b"y")) + data(1, end=False) + data(1), MALFORMED),
    "data that was under way to a stream with bad trailers": (head() + trailers((b"X", b"y")) + data(1), MALFORMED),
    "a reset of an answered stream": (NOW + RESET, FINE),
    "an even stream": (head(id=2), PROTOCOL),
    "stream 0": (head(id=0), PROTOCOL),
    "a lower stream": (head(id=5) + head(id=3), PROTOCOL),
    "a stream that was skipped": (head(id=5) + data(1, id=3), CLOSED),
    "data of an even stream": (head(id=5) + data(1, id=4), PROTOCOL),
    "data of stream 0": (data(1, id=0), PROTOCOL),
}  # fmt: skip

BOTH = h2.END_HEADERS | h2.PADDED | h2.PRIORITIZED
FRAMES = {
    "padding and priority": (frame(h2.HEADERS, BOTH, 1, b"\2" + PRIORITY_OF_3 + block(POST) + b"\0\0"), FINE),
    "padding that fills a data frame": (head() + frame(h2.DATA, h2.PADDED, 1, b"\3\0\0\0"), FINE),
    "a long padded frame": (head() + frame(h2.DATA, h2.PADDED, 1, b"\3" + bytes(70_000)), FINE),
    "padding as long as a data frame": (head() + frame(h2.DATA, h2.PADDED, 1, b"\4\0\0\0"), PROTOCOL),
    "data without its padding length": (head() + frame(h2.DATA, h2.PADDED, 1), SIZE),
    "padding longer than headers": (frame(h2.HEADERS, 4 | h2.PADDED, 1, b"\xff" + block(POST)), PROTOCOL),
    "padding that covers the priority": (frame(h2.HEADERS, BOTH, 1, b"\3" + PRIORITY_OF_3 + b"\0"), PROTOCOL),
    "headers without their padding length": (frame(h2.HEADERS, 4 | h2.PADDED, 1), SIZE),
    "headers without their priority": (frame(h2.HEADERS, 4 | h2.PRIORITIZED, 1, b"\0\0\0"), SIZE),
    "headers that depend on themselves": (frame(h2.HEADERS, 0x24, 3, PRIORITY_OF_3 + block(POST)), PROTOCOL),
    "a priority that depends on itself": (frame(h2.PRIORITY, 0, 3, PRIORITY_OF_3), PROTOCOL),
    "a priority of stream 0": (frame(h2.PRIORITY, 0, 0, PRIORITY_OF_3), PROTOCOL),
    "a priority of 4 bytes": (head() + frame(h2.PRIORITY, 0, 1, bytes(4)), ("stream", h2.FRAME_SIZE_ERROR)),
    "a priority of 6 bytes": (head() + frame(h2.PRIORITY, 0, 1, bytes(6)), ("stream", h2.FRAME_SIZE_ERROR)),
    "a reset of 3 bytes": (head() + frame(h2.RST_STREAM, 0, 1, bytes(3)), SIZE),
    "a reset of 5 bytes": (head() + frame(h2.RST_STREAM, 0, 1, bytes(5)), SIZE),
    "a reset of stream 0": (frame(h2.RST_STREAM, 0, 0, bytes(4)), PROTOCOL),
    "settings of 5 bytes": (frame(h2.SETTINGS, 0, 0, bytes(5)), SIZE),
    "settings of a stream": (frame(h2.SETTINGS, 0, 1), PROTOCOL),
    "an acknowledgement with settings": (frame(h2.SETTINGS, h2.ACK, 0, bytes(6)), SIZE),
    "settings that are not known": (h2.settings({0x99: 7}), FINE),
    "a push setting of 2": (h2.settings({2: 2}), PROTOCOL),
    "a window setting of 2^31": (h2.settings({4: 2**31}), ("connection", h2.FLOW_CONTROL_ERROR)),
    "a frame size of 2^14-1": (h2.settings({5: 2**14 - 1}), PROTOCOL),
    "a frame size of 2^24": (h2.settings({5: 2**24}), PROTOCOL),
    "a window setting that makes a stream's too large": (
        head() + h2.window_update(1, 2**31 - 1 - 65535) + h2.settings({4: 65536}),
        ("connection", h2.FLOW_CONTROL_ERROR),
    ),
    "a push": (head() + frame(h2.PUSH_PROMISE, 4, 1, word(2)), PROTOCOL),
    "a ping": (frame(h2.PING, 0, 0, bytes(8)), FINE),
    "a ping of 7 bytes": (frame(h2.PING, 0, 0, bytes(7)), SIZE),
    "a ping of 9 bytes": (frame(h2.PING, 0, 0, bytes(9)), SIZE),
    "a ping of a stream": (frame(h2.PING, 0, 1, bytes(8)), PROTOCOL),
    "a goaway": (frame(h2.GOAWAY, 0, 0, word(0, 0) + b"text"), FINE),
    "a goaway of 7 bytes": (frame(h2.GOAWAY, 0, 0, bytes(7)), SIZE),
    "a goaway of a stream": (frame(h2.GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "a window update of 3 bytes": (frame(h2.WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    "a window update of 5 bytes": (frame(h2.WINDOW_UPDATE, 0, 0, bytes(5)), SIZE),
    "a window of nothing more": (h2.window_update(0, 0), PROTOCOL),
    "a window of nothing more for a stream": (head() + h2.window_update(1, 0), MALFORMED),
    "too large a window": (h2.window_update(0, 2**31 - 1), ("connection", h2.FLOW_CONTROL_ERROR)),
    "too large a window of a stream": (head() + h2.window_update(1, 2**31 - 1), ("stream", h2.FLOW_CONTROL_ERROR)),
    "more data than the window": (
        head() + data(2**16, end=False) + data(2**16, end=False),
        ("connection", h2.FLOW_CONTROL_ERROR),
    ),
    "a frame of an unknown kind": (frame(0xBE, 0xFF, 77, bytes(9)), FINE),
    "a long frame of an unknown kind": (frame(0xBE, 0, 0, bytes(50_000)) + head(), FINE),
    "too long a frame of an unknown kind": (frame(0xBE, 0, 0, bytes(RECEIVE_FRAME + 1)), SIZE),
    "too long a data frame": (head() + frame(h2.DATA, 0, 1, bytes(RECEIVE_FRAME + 1)), SIZE),
    "an unknown flag": (frame(h2.PING, 0xFE, 0, bytes(8)), FINE),
    "the reserved bit of a stream": (head()[:5] + b"\x80" + head()[6:] + data(1), FINE),
    # header blocks
    "a block in two frames": (OPEN + frame(h2.CONTINUATION, 4, 1, block([(b"x", b"y")])), FINE),
    "a block with a long second frame": (OPEN + frame(h2.CONTINUATION, 4, 1, block([(b"x", b"y" * 15_000)] * 2)), FINE),
    "trailers in two frames": (
        head() + frame(h2.HEADERS, h2.END_STREAM, 1, block([(b"x", b"y")])) + frame(h2.CONTINUATION, 4, 1), FINE
    ),
    "a malformed block in two frames": (OPEN + frame(h2.CONTINUATION, 4, 1, block([(b"X", b"y")])), MALFORMED),
    "a ping within a block": (OPEN + frame(h2.PING, 0, 0, bytes(8)), PROTOCOL),
    "a window within a block": (OPEN + h2.window_update(0, 1), PROTOCOL),
    "data within a block": (OPEN + data(1), PROTOCOL),
    "padded data within a block": (OPEN + frame(h2.DATA, h2.PADDED, 1, b"\0a"), PROTOCOL),
    "headers within a block": (OPEN + head(id=3), PROTOCOL),
    "a priority within a block": (OPEN + frame(h2.PRIORITY, 0, 1, PRIORITY_OF_3), PROTOCOL),
    "a frame of an unknown kind within a block": (OPEN + frame(0xBE, 0, 1), PROTOCOL),
    "a continuation of another stream": (OPEN + frame(h2.CONTINUATION, 4, 3), PROTOCOL),
    "a continuation of nothing": (head() + frame(h2.CONTINUATION, 4, 1), PROTOCOL),
    "a block that is cut": (frame(h2.HEADERS, 4, 1, b"\x40\x0a"), ("connection", h2.COMPRESSION_ERROR)),
    "an index beyond the table": (frame(h2.HEADERS, 4, 1, b"\xff\x80\x80\x01"), ("connection", h2.COMPRESSION_ERROR)),
    "too large a table": (frame(h2.HEADERS, 4, 1, b"\x3f\xff\xff\x03"), ("connection", h2.COMPRESSION_ERROR)),
    "a table's size within a block": (
        frame(h2.HEADERS, 4, 1, block(POST) + b"\x20"),
        ("connection", h2.COMPRESSION_ERROR),
    ),
    "many sizes of the table": (
        frame(h2.HEADERS, 4, 1, b"\x20" * 60_000 + block(POST)),
        ("connection", h2.COMPRESSION_ERROR),
    ),
    "two sizes of the table": (frame(h2.HEADERS, 4, 1, b"\x20\x3f\xe1\x1f" + block(POST)), FINE),
    "bad huffman": (frame(h2.HEADERS, 4, 1, b"\0\x84\xff\xff\xff\xff\0"), ("connection", h2.COMPRESSION_ERROR)),
    "a list that is longer unpacked": (
        frame(h2.HEADERS, 4, 1, b"\x40\1x" + text(b"y" * 4000) + b"\xbe" * 30),
        ("connection", h2.COMPRESSION_ERROR),
    ),
    "a bad block for a stream that was answered": (
        NOW + frame(h2.HEADERS, 5, 1, b"\x40\x0a"),
        ("connection", h2.COMPRESSION_ERROR),
    ),
}  # fmt: skip

CASES = {**FIELDS, **STATES, **FRAMES}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_has_the_reaction_of_the_standard(name: str) -> None:
    sent, expected = CASES[name]
    assert reaction(sent) == expected


@pytest.mark.parametrize("name", [name for name, (_, found) in CASES.items() if found[0] == "stream"])
def test_what_ends_a_stream_leaves_the_others(name: str) -> None:
    sent, expected = CASES[name]
    assert reaction(sent + head(id=9) + data(1, id=9)) == expected


def test_whatever_the_decoder_raises_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    reader: HeaderReader[Any] = HeaderReader(2**16, tuple)
    monkeypatch.setattr(reader._decoder, "decode", lambda *_, **__: [][0])
    with pytest.raises(Http2Error) as raised:
        reader.read(b"\x82")
    assert raised.value.code == h2.COMPRESSION_ERROR
