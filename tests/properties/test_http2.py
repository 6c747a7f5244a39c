"""HTTP/2: however its bytes are cut, a client's frames mean the same; whatever they are, only one error comes out."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import Frame
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serving.http2 import connection, streams
from penstock.serving.http2 import frames as h2
from penstock.serving.http2.connection import Http2Connection
from penstock.serving.http2.frames import HeaderReader, Http2Error, frame
from penstock.serving.http2.streams import Outbox, Stream

BOUNDS = SimpleNamespace(max_streams=20, max_header_bytes=2**15)
START = h2.PREFACE + h2.settings({})


class Echo(Stream):
    """Sends back what it received. Data of streams whose number is 3 modulo 4 goes to memory of its own."""

    def __init__(self, connection: Any, id: int, headers: Any, log: list[Any]) -> None:
        super().__init__(connection, id)
        self.headers, self.log = headers, log
        self.data = bytearray()
        self.memory = bytearray(100)

    def on_open(self) -> None:
        self.log.append((self.id, "open", self.headers))
        if self.id % 4 == 3:
            self.space = memoryview(self.memory)
        if self.ended:
            self.on_end()

    def on_data(self, data: memoryview, last: bool) -> int:
        self.data += data
        return len(data)

    def on_filled(self) -> None:
        self.data += self.memory

    def on_end(self) -> None:
        left = bytes(self.memory[: len(self.memory) - len(self.space)]) if self.space else b""
        data = bytes(self.data + left)
        self.log.append((self.id, "end", data))
        trailers = frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self.id, h2.encode_headers([("grpc-status", "0")]))
        self.connection.outbox.send(self, (data,), trailers)

    def on_closed(self) -> None:
        self.log.append((self.id, "closed"))


class Server:
    """A connection whose calls and output are recorded."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.out = bytearray()
        outbox = Outbox(self.out.extend, lambda parts: self.out.extend(b"".join(parts)))
        reader: HeaderReader[Any] = HeaderReader(BOUNDS.max_header_bytes, tuple)
        self.connection = Http2Connection(
            BOUNDS, outbox, reader, lambda connection, id, headers: Echo(connection, id, headers, self.log)
        )
        self.rest = b""
        self.now = 0.0

    def receive(self, data: bytes) -> int:
        """Passes bytes in; returns the code of the error that ended the connection, or -1."""
        if not self.rest and (space := self.connection.direct()) is not None:
            space = space[: len(data)]
            space[:] = data[: len(space)]
            self.connection.filled(len(space))
            data = data[len(space) :]
        whole = self.rest + data
        try:
            self.rest = whole
            while self.turns():
                pass
        except Http2Error as error:
            self.connection.fail(error)
            self.log.append(("error", error.code, str(error)))
            return error.code
        return -1

    def turns(self) -> bool:
        """Handles the bytes of one turn of the event loop; whether others wait."""
        self.rest = self.rest[self.connection.receive(memoryview(self.rest), self.now) :]
        return self.connection.turn <= 0

    def feed(self, data: bytes, cuts: list[int]) -> None:
        edges = [0, *sorted(cuts), len(data)]
        for begin, end in pairwise(edges):
            if self.receive(data[begin:end]) >= 0:
                return

    def frames(self) -> list[Frame]:
        found, data = [], memoryview(bytes(self.out))
        while data:
            each, size = Frame.parse_frame_header(data[:9])
            each.parse_body(data[9 : 9 + size])
            found.append(each)
            data = data[9 + size :]
        return found


def headers(encoder: Encoder, id: int, path: str = "/a", flags: int = h2.END_HEADERS) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), ("x-id", str(id % 3))]
    return frame(h2.HEADERS, flags, id, encoder.encode(fields))


def word(value: int) -> bytes:
    return value.to_bytes(4, "big")


ids = st.integers(0, 12).map(lambda n: 2 * n + 1) | st.integers(0, 9)
payloads = st.binary(max_size=300)


@st.composite
def good_streams(draw: Any) -> bytes:
    """What a client might send that keeps the rules: calls whose frames are interleaved."""
    encoder, out = Encoder(), [START]
    pending: dict[int, int] = {}
    for id in range(1, 2 * draw(st.integers(1, 8)), 2):
        block = headers(encoder, id, draw(st.sampled_from(["/a", "/b"])))
        out.append(block)
        pending[id] = draw(st.integers(0, 4))
        while pending and draw(st.booleans()):
            out.append(one_more(draw, pending))
    while pending:
        out.append(one_more(draw, pending))
    return b"".join(out)


def one_more(draw: Any, pending: dict[int, int]) -> bytes:
    id = draw(st.sampled_from(sorted(pending)))
    pending[id] -= 1
    data: bytes = draw(payloads)
    if draw(st.booleans()):
        noise = [frame(h2.PING, 0, 0, bytes(8)), frame(0xEE, 3, id, data), h2.window_update(0, 7)]
        noise += [h2.window_update(id, 5), frame(h2.PRIORITY, 0, id, word(0) + b"\1"), h2.settings({5: 2**15, 99: 1})]
        extra = draw(st.sampled_from(noise))
    else:
        extra = b""
    flags = 0
    if pending[id] < 0:
        del pending[id]
        flags = h2.END_STREAM
        if draw(st.booleans()):
            return extra + frame(h2.RST_STREAM, 0, id, word(8))
    padding = draw(st.integers(-1, 9))
    if padding >= 0:
        return extra + frame(h2.DATA, flags | h2.PADDED, id, bytes([padding]) + data + bytes(padding))
    return extra + frame(h2.DATA, flags, id, data)


@settings(max_examples=150, deadline=None)
@given(good_streams(), st.data())
def test_any_cut_of_the_bytes_gives_the_same_calls_and_answers(data: bytes, more: Any) -> None:
    whole, cut = Server(), Server()
    whole.feed(data, [])
    least = more.draw(st.sampled_from([1, 2**16]))  # with 1, all that can be is received in place
    with patch.object(streams, "DIRECT_BYTES", least):
        cut.feed(data, more.draw(st.lists(st.integers(0, len(data)), max_size=30)))
    assert whole.log == cut.log
    assert not [entry for entry in whole.log if entry[0] == "error"]
    assert whole.out == cut.out
    opened = {entry[0] for entry in whole.log if entry[1] == "open"}
    over = [entry[0] for entry in whole.log if entry[1] in ("end", "closed")]
    assert sorted(over) == sorted(opened)
    ended = {entry[0]: entry[2] for entry in whole.log if entry[1] == "end"}
    sent: dict[int, bytes] = dict.fromkeys(ended, b"")
    for each in whole.frames():
        if each.type == h2.DATA:
            sent[each.stream_id] += each.data
    assert sent == ended


def wild_frames() -> st.SearchStrategy[bytes]:
    """Frames of any kind, flags and stream, some with a payload that fits."""
    kinds = st.integers(0, 9) | st.integers(0, 255)
    flags = st.sampled_from([0, 1, 4, 5, 8, 9, 0xC, 0xD, 0x20, 0x24, 0x25, 0xFF])
    wild = st.builds(frame, kinds, flags, ids, payloads)
    numbers = st.integers(0, 2**32 - 1)
    words = st.builds(lambda kind, id, n: frame(kind, 0, id, word(n)), st.sampled_from([3, 8]), ids, numbers)
    heads = st.builds(lambda id, f: headers(Encoder(), id, flags=f), ids, st.sampled_from([0, 1, 4, 5]))
    data = st.builds(lambda id, f, p: frame(h2.DATA, f, id, p), ids, st.sampled_from([0, 1]), payloads)
    changes = st.dictionaries(
        st.integers(1, 7), st.sampled_from([0, 1, 2**14, 2**24, 2**31 - 1, 2**32 - 1]), max_size=4
    )
    return wild | words | heads | data | changes.map(h2.settings)


@settings(max_examples=400, deadline=None)
@given(st.lists(wild_frames(), max_size=40), st.data())
def test_any_frames_end_in_at_most_one_protocol_error(sequence: list[bytes], more: Any) -> None:
    data = START + b"".join(sequence)
    server = Server()
    server.feed(data, more.draw(st.lists(st.integers(0, len(data)), max_size=10)))
    assert len(server.connection.streams) <= BOUNDS.max_streams
    server.frames()
    server.connection.close()
    assert not server.connection.streams
    assert server.connection.outbox.unsent_bytes == 0
    assert not server.connection.outbox.waiting


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_end_in_at_most_one_protocol_error(data: bytes) -> None:
    Server().receive(data)
    Server().receive(START + data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=60), st.integers(0, 200))
def test_a_header_block_means_the_same_whether_it_was_seen_before_or_not(
    sent: list[tuple[int, int, bool]], size: int
) -> None:
    encoder, plain = Encoder(), Decoder()
    reader: HeaderReader[Any] = HeaderReader(2**16, tuple)
    for n, (name, value, secret) in enumerate(sent):
        if n == len(sent) // 2:
            encoder.header_table_size = size
        more = [("content-length", "7")] if name == 5 else []
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/"), *more]
        block = encoder.encode([*fields, (f"x-{name}", f"value-{value % 3}" * (1 + value // 20), secret)])
        found = tuple(plain.decode(block, raw=True))
        assert reader.read(block) == (found, 7 if b"content-length" in dict(found) else -1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=5), st.integers(0, 2**32), st.booleans())
def test_no_more_is_sent_than_the_client_accepts(sizes: list[int], seed: int, full: bool) -> None:
    chance, server = random.Random(seed), Server()
    outbox = server.connection.outbox
    initial = chance.choice([0, 10, 20_000])
    server.receive(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: initial}))
    encoder = Encoder()
    bodies = {2 * n + 1: chance.randbytes(size) for n, size in enumerate(sizes)}
    windows = {0: 65535, **dict.fromkeys(bodies, initial)}
    for id, body in bodies.items():
        parts = [body[n : n + 2**14] for n in range(0, len(body), 2**14)]
        server.receive(headers(encoder, id) + b"".join(frame(h2.DATA, 0, id, part) for part in parts))
    server.out.clear()
    got = dict.fromkeys(bodies, b"")
    outbox.paused = full
    server.receive(b"".join(frame(h2.DATA, h2.END_STREAM, id) for id in bodies))
    for _ in range(10_000):
        for each in server.frames():
            if each.type == h2.DATA:
                got[each.stream_id] += each.data
                windows[0] -= len(each.data)
                windows[each.stream_id] -= len(each.data)
        server.out.clear()
        assert min(windows.values()) >= 0
        if got == bodies:
            break
        if outbox.paused:
            outbox.paused = False
            outbox.flush()
            continue
        id = chance.choice(list(windows))
        more = chance.choice([1, 1000, 2**16])
        windows[id] += more
        server.receive(h2.window_update(id, more))
    assert got == bodies
    assert outbox.unsent_bytes == 0


# ---- the cases of RFC 9113 that end a connection or a stream


def opened(*more: bytes) -> bytes:
    return START + headers(Encoder(), 1) + b"".join(more)


UNFINISHED = headers(Encoder(), 3, flags=0)
SMALL = b"\x83\x86\x84"  # a whole request of three bytes
PING = frame(h2.PING, 0, 0, bytes(8))
# the rules for single frames are in tests/unit/serving/http2
CASES = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", h2.PROTOCOL_ERROR),
    "no settings": (h2.PREFACE + PING, h2.PROTOCOL_ERROR),
    "large headers": (START + frame(h2.HEADERS, 0, 1, bytes(2**15 + 1)), h2.ENHANCE_YOUR_CALM),
    "many continuations": (
        opened(UNFINISHED, *[frame(h2.CONTINUATION, 0, 3, bytes(2**14))] * 3),
        h2.ENHANCE_YOUR_CALM,
    ),
    "empty continuations": (opened(UNFINISHED, *[frame(9, 0, 3)] * 3000), h2.ENHANCE_YOUR_CALM),
    "pings": (START + PING * 3000, h2.ENHANCE_YOUR_CALM),
    "windows": (START + h2.window_update(0, 1) * 3000, h2.ENHANCE_YOUR_CALM),
    "pings and windows in turn": (START + (PING + h2.window_update(0, 1)) * 1500, h2.ENHANCE_YOUR_CALM),
    "windows of a stream": (opened(h2.window_update(1, 1) * 3000), h2.ENHANCE_YOUR_CALM),
    "data of closed streams": (opened(frame(3, 0, 1, word(8)), frame(0, 0, 1) * 3000), h2.ENHANCE_YOUR_CALM),
    "resets": (
        START + b"".join(frame(h2.HEADERS, 4, n, SMALL) + frame(3, 0, n, word(8)) for n in range(1, 6001, 2)),
        h2.ENHANCE_YOUR_CALM,
    ),
    "more streams than allowed": (START + b"".join(frame(h2.HEADERS, 4, n, SMALL) for n in range(1, 100, 2)), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_breach_of_the_rules_has_the_code_of_the_standard(name: str) -> None:
    data, code = CASES[name]
    server = Server()
    assert server.receive(data) == code
    assert len(server.connection.streams) <= BOUNDS.max_streams


def test_streams_above_the_bound_are_refused_and_the_others_go_on() -> None:
    server = Server()
    assert server.receive(START + b"".join(frame(h2.HEADERS, 5, n, SMALL) for n in range(1, 100, 2))) == -1
    server = Server()
    encoder = Encoder()
    assert server.receive(START + b"".join(headers(encoder, n) for n in range(1, 100, 2))) == -1
    refused = [each.stream_id for each in server.frames() if each.type == h2.RST_STREAM]
    assert refused == list(range(41, 100, 2))
    server.receive(frame(h2.DATA, h2.END_STREAM, 1, b"x"))
    assert server.log[-1] == (1, "end", b"x")


def test_a_stream_whose_window_overflows_is_reset_alone() -> None:
    server = Server()
    server.receive(opened(headers(Encoder(), 3), h2.window_update(1, 2**31 - 1)))
    assert (1, "closed") in server.log
    assert list(server.connection.streams) == [3]


def test_streams_that_waited_may_all_be_reset_and_late_resets_of_answered_ones_may_come() -> None:
    server, encoder = Server(), Encoder()
    server.receive(START)
    for first in range(1, 12_001, 40):  # 20 streams at a time
        ids = range(first, first + 40, 2)
        assert server.receive(b"".join(headers(encoder, id) for id in ids)) == -1
        server.now += 2 * connection.PREMATURE_S
        for id in ids[:10]:
            server.connection.streams[id].reset(h2.CANCEL)  # the server's own clock was faster
        assert server.receive(b"".join(frame(h2.RST_STREAM, 0, id, word(8)) for id in ids)) == -1


def test_the_frames_of_a_flood_have_a_bound_for_each_tick() -> None:
    server = Server()
    server.receive(START)
    for _ in range(3):
        server.connection.tick()
        assert server.receive(PING * 1500) == -1


def test_one_turn_handles_a_bounded_number_of_calls_and_the_next_goes_on_in_order() -> None:
    server, encoder = Server(), Encoder()
    server.receive(START)
    calls = [headers(encoder, id) + frame(h2.DATA, h2.END_STREAM, id, b"x") for id in range(1, 2001, 2)]
    server.rest, begun = b"".join(calls), [0]
    while server.turns():
        begun.append(sum(entry[1] == "open" for entry in server.log))
    assert max(after - before for before, after in pairwise(begun)) <= 40
    assert [entry[0] for entry in server.log if entry[1] == "end"] == list(range(1, 2001, 2))


def test_a_long_header_block_ends_its_turn() -> None:
    server = Server()
    server.receive(START)
    heads = [frame(h2.HEADERS, 5, id, SMALL + b"\x10\1a\x7f\xb1\xe9\1" + b"b" * 30_000) for id in range(1, 20, 2)]
    server.rest = b"".join(heads)
    turns = 1
    while server.turns():
        turns += 1
    assert turns == 10


def test_a_client_may_ping_after_each_answer_as_that_of_go_does() -> None:
    server, encoder = Server(), Encoder()
    server.receive(START + h2.window_update(0, 2**20))
    for id in range(1, 6001, 2):
        call = headers(encoder, id) + frame(h2.DATA, h2.END_STREAM, id, b"x")
        assert server.receive(call + PING + h2.window_update(0, 1)) == -1


@pytest.mark.parametrize("drip", [h2.window_update(1, 1), h2.window_update(1, 1) + PING, h2.settings({4: 1})])
def test_windows_that_let_one_byte_go_explain_nothing(drip: bytes) -> None:
    server = Server()
    server.receive(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0}) + headers(Encoder(), 1))
    server.connection.outbox.send(server.connection.streams[1], (bytes(9000),))
    codes = [server.receive(drip + (h2.settings({4: 0}) if drip[3] == h2.SETTINGS else b"")) for _ in range(1100)]
    codes += [server.receive(drip) for _ in range(1100)]
    assert h2.ENHANCE_YOUR_CALM in codes


def test_a_client_may_ping_after_each_part_of_a_long_answer() -> None:
    server = Server()
    server.receive(opened(h2.window_update(0, 2**20), h2.window_update(1, 2**20)))
    for _ in range(6000):
        server.connection.outbox.send(server.connection.streams[1], (b"part",))
        assert server.receive(PING + h2.window_update(0, 4) + h2.window_update(1, 4)) == -1


def test_a_draining_connection_tells_when_no_stream_can_come() -> None:
    server = Server()
    encoder = Encoder()
    server.receive(START + headers(encoder, 1))
    server.connection.drain()
    ping = next(each for each in server.frames() if each.type == h2.PING)
    server.receive(headers(encoder, 3))
    assert not server.connection.drained
    server.receive(frame(h2.PING, h2.ACK, 0, ping.opaque_data) + headers(encoder, 5))
    assert server.connection.drained
    last = [each for each in server.frames() if each.type == h2.GOAWAY][-1]
    assert last.last_stream_id == 3
    assert sorted(server.connection.streams) == [1, 3]
