"""The gRPC listener under clients that may break every rule."""

from __future__ import annotations

import asyncio
import gc
import gzip
import random
import struct
import zlib
from itertools import pairwise
from typing import Any

import pytest
from hpack import Encoder

from penstock.errors import BadRequest
from penstock.serving.grpc import call as call_module
from penstock.serving.grpc import listener as listener_module
from penstock.serving.grpc.call import GrpcCall
from penstock.serving.grpc.listener import GrpcConnection
from penstock.serving.http import intake
from penstock.serving.http import listener as http_listener
from penstock.serving.http2 import frames as h2
from penstock.serving.http2.connection import Http2Connection
from penstock.serving.http2.frames import frame
from penstock.serving.http2.streams import RECEIVE_WINDOW
from support.backend import FakeBuffer
from support.grpc_site import INFER, LIMIT_S, LIVE, STREAM, request, site

# ---- messages


@pytest.mark.parametrize("size", [1, 7, 2**14, 2**17])
@pytest.mark.parametrize("length", [10, 60_000, 70_000, 300_000])
async def test_a_message_arrives_whole_in_frames_of_any_size(size, length):
    data = request(length)
    async with site() as found:
        client = await found.connect()
        if size == 1:
            data = request(min(length, 5000))
        await client.infer(1, data, size=min(size, 60_000))
        assert await client.reply(1) == ("0", "", data)
        assert found.backend.used_bytes == 0


async def test_large_frames_go_straight_into_memory_that_ends_aligned():
    data, seen = request(3_000_000), []

    def keep(call: Any) -> None:
        seen.append(len(call.item.payload.view))
        call.reply()

    async with site({"echo": keep}) as found:
        client = await found.connect()
        client.call(1, INFER)
        client.send(frame(h2.DATA, 0, 1, struct.pack(">BI", 0, len(data))))
        granted = RECEIVE_WINDOW - 5
        while granted < len(data):
            granted += (await client.until(lambda f: f.type == h2.WINDOW_UPDATE and f.stream_id == 1)).window_increment
        for at in range(0, len(data), 2**20):
            last = at + 2**20 >= len(data)
            client.send(frame(h2.DATA, int(last), 1, data[at : at + 2**20]))
        assert (await client.reply(1))[0] == "0"
        assert seen == [len(data)]


async def test_a_large_message_waits_for_memory_and_the_small_ones_pass_it(wait_until):
    held: list[Any] = []
    async with site({"echo": lambda call: call.reply(), "hold": held.append}, pool_bytes=300_000) as found:
        client = await found.connect()
        await client.infer(1, request(250_000, "hold"), size=60_000)
        await wait_until(lambda: held)
        client.call(3, INFER)
        client.send(frame(h2.DATA, 0, 3, struct.pack(">BI", 0, len(request(200_000))) + request(200_000)[:60_000]))
        assert (await client.ask(5))[0] == "0"
        assert len(found.backend.calls) == 2
        held[0].reply()
        await client.until(lambda f: f.type == h2.WINDOW_UPDATE and f.stream_id == 3)
        rest = request(200_000)[60_000:]
        client.send(frame(h2.DATA, 0, 3, rest[:70_000]), frame(h2.DATA, h2.END_STREAM, 3, rest[70_000:]))
        assert await client.reply(3) == ("0", "", request(200_000))


async def test_calls_that_end_early_free_their_memory():
    async with site(pool_bytes=300_000) as found:
        client = await found.connect()
        for id in (1, 3):  # the first has memory, the second waits for it
            client.call(id, INFER)
            client.send(frame(h2.DATA, 0, id, struct.pack(">BI", 0, 250_000) + bytes(1000)))
        client.send(frame(h2.RST_STREAM, 0, 3, bytes(4)), frame(h2.RST_STREAM, 0, 1, bytes(4)))
        assert (await client.ask(5))[0] == "0"
        assert found.backend.used_bytes == 0


async def test_a_message_larger_than_a_window_may_be_is_granted_in_parts(monkeypatch):
    monkeypatch.setattr(call_module, "SPACE_BYTES", 100_000)
    data = request(350_000)
    async with site() as found:
        client = await found.connect()
        await client.infer(1, data)
        assert await client.reply(1) == ("0", "", data)
        granted = [each.window_increment for each in client.frames if each.type == h2.WINDOW_UPDATE and each.stream_id]
        assert max(granted) <= 100_000


async def test_padding_leaves_the_window_to_the_message():
    data = request(200_000)
    whole, window = struct.pack(">BI", 0, len(data)) + data, RECEIVE_WINDOW
    async with site() as found:
        client = await found.connect()
        client.call(1, INFER)
        for at in range(0, len(whole), 300):
            part = b"\xff" + whole[at : at + 300] + bytes(255)
            while window < len(part):
                update = await client.until(lambda each: each.type == h2.WINDOW_UPDATE and each.stream_id == 1)
                window += update.window_increment
            window -= len(part)
            client.send(frame(h2.DATA, h2.PADDED | (at + 300 >= len(whole)), 1, part))
        assert await client.reply(1) == ("0", "", data)


@pytest.mark.parametrize("pack", [zlib.compress, gzip.compress])
@pytest.mark.parametrize("length", [10, 60_000, 100_000, 3_000_000])
async def test_messages_are_unpacked_a_large_one_into_shared_memory(length, pack):
    data, kinds = request(length, seed=7), []

    def keep(call: Any) -> None:
        kinds.append(type(call.item.payload))
        call.reply()

    async with site({"echo": keep}) as found:
        client = await found.connect()
        packed = pack(data)
        await client.infer(
            1, packed, flag=1, headers=[("grpc-encoding", "gzip" if pack is gzip.compress else "deflate")]
        )
        assert await client.reply(1) == ("0", "", data)
        assert kinds == [FakeBuffer if length > 2**16 else bytes]
        assert found.backend.used_bytes == 0


async def test_what_unpacks_to_a_small_size_may_have_any_ratio_and_more_may_not():
    async with site() as found:
        client = await found.connect()
        for id, size, status in ((1, 900_000, "0"), (3, 3_000_000, "8")):
            await client.infer(id, zlib.compress(request(size)), flag=1, headers=[("grpc-encoding", "deflate")])
            answer = await client.reply(id)
            assert answer[0] == status
        assert "200 times its size" in answer[1]
        assert found.backend.used_bytes == 0


async def test_unpacked_messages_share_the_memory_of_all_and_are_refused_without_it(wait_until):
    held: list[Any] = []
    async with site({"echo": held.append}, pool_bytes=1_000_000) as found:
        client = await found.connect()
        for id in range(1, 40, 2):
            await client.infer(id, zlib.compress(request(300_000)), flag=1, headers=[("grpc-encoding", "deflate")])
        for status, count in (("8", 17), ("0", 3)):
            for _ in range(count):
                end = await client.until(lambda each: each.type == h2.HEADERS and "grpc-status" in each.fields)
                assert end.fields["grpc-status"] == status, end.fields
                assert status == "0" or end.fields["grpc-message"].startswith("the memory for large bodies is full")
            await wait_until(lambda: len(held) == 3)
            for call in held:
                call.reply()


async def test_a_call_that_is_reset_while_its_message_is_unpacked_frees_its_memory(monkeypatch, wait_until):
    monkeypatch.setattr(intake, "PIECE_BYTES", 1000)
    async with site() as found:
        client = await found.connect()
        await client.infer(1, zlib.compress(request(900_000)), flag=1, headers=[("grpc-encoding", "deflate")])
        await wait_until(lambda: found.backend.used_bytes)
        client.send(frame(h2.RST_STREAM, 0, 1, bytes(4)))
        await wait_until(lambda: not found.backend.used_bytes)
        assert not found.backend.calls


BAD = {
    "no message": ([], (b"", 0, True), "13", "the call has no message; send one"),
    "another encoding": ([("grpc-encoding", "snappy")], (b"x", 1, True), "12", "grpc-encoding"),
    "no encoding": ([], (b"x", 1, True), "13", "grpc-encoding names no compression"),
    "not packed": ([("grpc-encoding", "gzip")], (b"x" * 30, 1, True), "13", "the message cannot be unpacked"),
    "packed in part": ([("grpc-encoding", "deflate")], (zlib.compress(bytes(99))[:-3], 1, True), "13", "truncated"),
    "too large": ([], (bytes(2000), 0, True), "8", "larger than max_body_bytes (1000)"),
    "damaged behind a good begin": (
        [("grpc-encoding", "gzip")], (gzip.compress(b"abc")[:-8] + bytes(8), 1, True), "13", "cannot be unpacked"
    ),
    "unpacked too large": ([("grpc-encoding", "deflate")], (zlib.compress(bytes(9999)), 1, True), "8", "larger than"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_message_ends_its_call_alone(name):
    more, (data, flag, end), status, text = BAD[name]
    async with site(max_body_bytes=1000) as found:
        client = await found.connect()
        client.call(1, INFER, *more)
        if data:
            await client.message(1, data, flag=flag, end=end)
        else:
            client.send(frame(h2.DATA, h2.END_STREAM, 1))
        answer = await client.reply(1)
        assert answer[0] == status
        assert text in answer[1]
        assert (await client.ask(3))[0] == "0"


async def test_a_second_message_and_an_end_within_a_message_are_refused():
    async with site() as found:
        client = await found.connect()
        await client.infer(1, request(10), end=False)
        await client.message(1, request(10))
        assert (await client.reply(1))[:2] == ("13", "found a second message, expected one")
        client.call(3, INFER)
        client.send(frame(h2.DATA, h2.END_STREAM, 3, b"\0\0\0\0\x09abc"))
        assert (await client.reply(3))[:2] == ("13", "the stream ended within a message")


# ---- heads

GET = [(":method", "GET"), (":scheme", "http"), (":path", LIVE)]


async def test_what_is_not_grpc_is_refused_by_its_stream():
    async with site() as found:
        client = await found.connect()
        client.call(1, "/no.Service/Call")
        assert (await client.reply(1))[:2] == ("12", "there is no method /no.Service/Call")
        client.send(frame(h2.HEADERS, 5, 3, h2.encode_headers(GET)))
        assert (await client.reply(3))[0] == "405"
        post = [(":method", "POST"), (":scheme", "http"), (":path", LIVE), ("content-type", "text/plain")]
        client.send(frame(h2.HEADERS, 5, 5, h2.encode_headers(post)))
        assert (await client.reply(5))[0] == "415"
        for n, fields in enumerate([GET[:2], [*post, ("grpc-timeout", "1x")]]):
            client.send(frame(h2.HEADERS, 5, 7 + 2 * n, h2.encode_headers(fields)))
            assert await client.reply(7 + 2 * n) == ("reset 1", "", b"")


async def test_a_client_of_http1_learns_what_the_port_speaks():
    async with site() as found:
        client = await found.connect(b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        answer = await asyncio.wait_for(client.reader.read(), LIMIT_S)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"gRPC needs HTTP/2" in answer


async def test_metadata_in_base64_is_decoded_and_the_deadline_is_the_budget():
    given = [("x-a-bin", "AAEC/w"), ("x-b", "text"), ("x-priority", "3"), ("grpc-timeout", "5S")]
    async with site() as found:
        client = await found.connect()
        await client.infer(1, request(10), headers=given)
        await client.infer(3, request(10))
        assert (await client.reply(1))[0] == (await client.reply(3))[0] == "0"
        call, plain = found.backend.calls
        assert dict(call.item.headers) == {b"x-a-bin": b"\0\1\2\xff", b"x-b": b"text", b"x-priority": b"3"}
        assert 0 < call.item.budget_s <= 5
        assert (call.item.priority, plain.item.priority, plain.item.budget_s) == (3, 0, None)


async def test_a_deadline_ends_a_call_that_the_client_leaves_open(wait_until):
    async with site({"echo": lambda call: None}) as found:
        client = await found.connect()
        await client.infer(1, request(10), headers=[("grpc-timeout", "50m")])
        assert (await client.reply(1))[:2] == ("4", "Deadline Exceeded")
        await wait_until(lambda: found.backend.calls[0].cancelled)
        client.call(3, STREAM, ("grpc-timeout", "50m"))
        assert (await client.reply(3))[0] == "4"


@pytest.mark.parametrize("seed", range(4))
async def test_a_call_has_its_own_metadata_whatever_came_before_on_the_connection(seed):
    chance, encoder = random.Random(seed), Encoder()
    needed = [(":method", "POST"), (":scheme", "http"), (":path", INFER), ("content-type", "application/grpc")]
    async with site() as found:
        client = await found.connect()
        for id in range(1, 121, 2):
            if chance.random() < 0.1:
                encoder.header_table_size = chance.choice([0, 100, 4096])
            given = {"x-priority": chance.choice(["", "1", "2"]), "x-request-id": chance.choice(["", "a", "b"])}
            given = {name: value for name, value in given.items() if value}
            block = encoder.encode([*needed, *((*field, chance.random() < 0.3) for field in given.items())])
            client.send(frame(h2.HEADERS, h2.END_HEADERS, id, block))
            await client.message(id, request(10))
            assert (await client.reply(id))[0] == "0"
            item = found.backend.calls[-1].item
            assert dict(item.headers) == {name.encode(): value.encode() for name, value in given.items()}
            assert (item.priority, item.request_id) == (int(given.get("x-priority", 0)), given.get("x-request-id", ""))


async def test_the_text_of_a_status_fits_into_the_headers_of_every_client():
    async with site({"echo": lambda call: call.reply(error=BadRequest("\u00fc" * 30_000))}) as found:
        client = await found.connect()
        await client.infer(1, request(10))
        status, text, _ = await client.reply(1)
        assert (status, text) == ("3", "%C3%BC" * (call_module.DETAILS_BYTES // 2))
        assert max(len(each.data) for each in client.frames if each.type == h2.HEADERS) < 2**13


async def test_a_client_without_a_header_table_reads_the_answers():
    async with site() as found:
        client = await found.connect(h2.PREFACE + h2.settings({1: 0}))
        client.decoder.max_allowed_table_size = 0  # the decoder insists on blocks that say so
        assert (await client.ask(1))[0] == "0"
        client.call(3, "/no.Service/Call")
        assert (await client.reply(3))[0] == "12"


# ---- windows


async def test_an_answer_waits_for_the_windows_of_the_client():
    data = request(200_000)
    async with site() as found:
        client = await found.connect(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 1000}))
        await client.infer(1, data)
        assert (await client.ask(3))[0] == "0"  # the first call does not hold it up
        held = sum(len(each.data) for each in client.frames if each.type == h2.DATA and each.stream_id == 1)
        assert held == 1000
        client.send(h2.window_update(0, 2**20), h2.settings({h2.INITIAL_WINDOW_SIZE: 2**20}))
        status, _, rest = await client.reply(1)
        assert (status, len(rest) + 5 + held) == ("0", len(data) + 5)


async def test_what_follows_the_end_of_an_answer_that_waits_for_its_window_is_not_kept():
    async with site() as found:
        client = await found.connect(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0}))
        message, bad = (struct.pack(">BI", flag, 16) + request(10)[:16] for flag in (0, 1))
        client.call(1, STREAM)
        client.send(frame(h2.DATA, 0, 1, message))
        await client.until(lambda each: each.type == h2.HEADERS)
        client.send(frame(h2.DATA, 0, 1, bad), frame(h2.DATA, 0, 1, message), frame(h2.DATA, 0, 1, message[:9]))
        client.send(frame(h2.PING, 0, 0, bytes(8)))
        await client.until(lambda each: each.type == h2.PING)
        (call,) = [each for each in gc.get_objects() if type(each) is GrpcCall and not each.closed]
        assert call.last
        assert not call.messages
        assert call._reader is None


async def test_a_client_that_reads_nothing_is_dropped():
    async with site(write_timeout_s=0.1) as found:
        client = await found.connect(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0}))
        await client.infer(1, request(1000))
        await client.ended()


async def test_no_call_begins_while_too_much_is_unread(monkeypatch):
    monkeypatch.setattr(listener_module, "UNREAD_BYTES", 50_000)
    async with site() as found:
        client = await found.connect(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0}))
        await client.infer(1, request(60_000))
        await client.until(lambda each: each.type == h2.HEADERS)
        for id in (3, 5, 7):
            await client.infer(id, request(10))
        client.send(frame(h2.RST_STREAM, 0, 5, bytes(4)), frame(h2.PING, 0, 0, b"12345678"))
        await client.until(lambda each: each.type == h2.PING)
        assert len(found.backend.calls) == 1
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 2**20}), h2.window_update(0, 2**20))
        assert (await client.reply(7))[0] == "0"
        assert len(found.backend.calls) == 3


async def test_calls_that_waited_begin_in_several_turns_of_the_event_loop(monkeypatch, wait_until):
    monkeypatch.setattr(listener_module, "UNREAD_BYTES", 50_000)
    loop, begun = asyncio.get_running_loop(), []
    async with site({"echo": lambda call: call.reply(), "count": lambda call: None}) as found:
        client = await found.connect(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0}))
        await client.infer(1, request(60_000))
        await client.until(lambda each: each.type == h2.HEADERS)
        for id in range(3, 403, 2):
            await client.infer(id, request(10, "count"))
        client.send(frame(h2.PING, 0, 0, bytes(8)))
        await client.until(lambda each: each.type == h2.PING)

        def watch() -> None:
            begun.append(len(found.backend.calls))
            if begun[-1] < 201:
                loop.call_soon(watch)

        watch()
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 2**20}), h2.window_update(0, 2**20))
        await wait_until(lambda: begun[-1] == 201)
        assert max(after - before for before, after in pairwise(begun)) <= 64


async def test_calls_that_are_reset_before_they_begin_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(listener_module, "UNREAD_BYTES", 50_000)
    monkeypatch.setattr(listener_module, "MAX_STREAMS", 10)
    async with site() as found:
        client = await found.connect(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0}))
        await client.infer(1, request(60_000))
        await client.until(lambda each: each.type == h2.HEADERS)
        for id in range(3, 203, 2):
            await client.infer(id, request(10))
            client.send(frame(h2.RST_STREAM, 0, id, bytes(4)))
        await client.infer(203, request(10))
        client.send(frame(h2.PING, 0, 0, bytes(8)))
        await client.until(lambda each: each.type == h2.PING)
        gc.collect()  # calls of other tests
        assert sum(type(each) is GrpcCall for each in gc.get_objects()) <= 2 * 10 + 2
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 2**20}), h2.window_update(0, 2**20))
        assert (await client.reply(203))[0] == "0"


# ---- times and the end


async def test_a_message_that_stays_away_ends_its_call():
    async with site(body_timeout_s=0.1) as found:
        client = await found.connect()
        for id in (1, 3, 5):
            client.call(id, INFER)
        client.send(frame(h2.DATA, 0, 1, struct.pack(">BI", 0, 250_000) + bytes(1000)))
        client.send(frame(h2.DATA, 0, 3, struct.pack(">BI", 0, 250) + bytes(100)))
        text = "the message did not arrive within 0.1 s (limits.body_timeout_s)"
        ends = [await client.until(lambda each: "END_STREAM" in each.flags) for _ in range(3)]  # what came gives time
        assert {each.stream_id for each in ends} == {1, 3, 5}
        assert {(each.fields["grpc-status"], each.fields["grpc-message"]) for each in ends} == {("4", text)}
        assert found.backend.used_bytes == 0


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("length", [60_000, 200_000])
async def test_a_message_that_drips_ends_its_call_after_a_fixed_time(path, length):
    async with site(body_timeout_s=0.2) as found:
        client = await found.connect()
        client.call(1, path)
        client.send(frame(h2.DATA, 0, 1, struct.pack(">BI", 0, length)))

        async def drip() -> None:
            while True:
                client.send(frame(h2.DATA, 0, 1, b"x"))
                await asyncio.sleep(0.02)

        task = asyncio.ensure_future(drip())
        try:
            assert (await client.reply(1))[0] == "4"
        finally:
            task.cancel()
        assert found.backend.used_bytes == 0


async def test_a_message_that_comes_steadily_may_take_longer(monkeypatch):
    monkeypatch.setattr(http_listener, "BODY_RATE", 1000)
    data = request(2000)
    whole = struct.pack(">BI", 0, len(data)) + data
    async with site(body_timeout_s=0.4) as found:
        client = await found.connect()
        client.call(1, INFER)
        for at in range(0, len(whole), 100):
            client.send(frame(h2.DATA, at + 100 >= len(whole), 1, whole[at : at + 100]))
            await asyncio.sleep(0.04)
        assert (await client.reply(1))[0] == "0"


async def test_each_message_of_a_stream_has_its_own_time():
    async with site(body_timeout_s=0.5) as found:
        client = await found.connect()
        client.call(1, STREAM)
        whole = struct.pack(">BI", 0, len(request(10))) + request(10)
        for _ in range(6):
            client.send(frame(h2.DATA, 0, 1, whole[:3]))
            await asyncio.sleep(0.1)
            client.send(frame(h2.DATA, 0, 1, whole[3:]))
            await client.until(lambda each: each.type == h2.DATA)
        client.send(frame(h2.DATA, 0, 1, whole[:3]))
        assert (await client.reply(1))[0] == "4"


UNFINISHED = {
    "an open block": [frame(h2.HEADERS, 0, 1, b"\x83"), *[frame(h2.CONTINUATION, 0, 1, b"\x10\1a\1b")] * 1000],
    "a frame in part": [frame(h2.SETTINGS, 0, 0, bytes(600))[:9], *[b"\0"] * 1000],
    "an open block beside a call": [
        frame(h2.HEADERS, 4, 1, h2.encode_headers([(":method", "POST"), (":scheme", "http"), (":path", STREAM)])),
        frame(h2.HEADERS, 0, 3, b"\x83"),
        *[frame(h2.CONTINUATION, 0, 3)] * 1000,
    ],
}


@pytest.mark.parametrize("name", UNFINISHED)
async def test_headers_and_frames_that_stay_unfinished_end_the_connection(name):
    async with site(header_timeout_s=0.2, idle_timeout_s=60.0) as found:
        client = await found.connect()
        await client.until(lambda each: each.type == h2.SETTINGS and not each.flags)

        async def drip() -> None:
            for part in UNFINISHED[name]:
                client.send(part)
                await asyncio.sleep(0.01)

        task = asyncio.ensure_future(drip())
        try:
            goaway = await client.ended()
        finally:
            task.cancel()
        assert b"limits.header_timeout_s" in goaway.additional_data


async def test_a_client_whose_every_read_ends_within_a_frame_goes_on():
    async with site(header_timeout_s=0.5, idle_timeout_s=60.0) as found:
        client = await found.connect()
        await client.until(lambda each: each.type == h2.SETTINGS and not each.flags)
        whole = frame(h2.PING, 0, 0, bytes(8))
        client.send(whole[:5])
        for _ in range(8):
            await asyncio.sleep(0.08)
            client.send(whole[5:] + whole[:5])
            await client.until(lambda each: each.type == h2.PING)


async def test_a_read_full_of_calls_lets_others_have_their_turn_and_keeps_the_order():
    async with site() as found:
        client = await found.connect()
        begun: list[int] = []
        others = [0]

        def other() -> None:
            others[0] += 1
            if len(begun) < 500:
                asyncio.get_running_loop().call_soon(other)

        client.send(
            *(frame(h2.HEADERS, 5, id, h2.encode_headers([*GET, ("x", str(id))])) for id in range(1, 1001, 2)),
            frame(h2.PING, 0, 0, bytes(8)),
        )
        asyncio.get_running_loop().call_soon(other)
        while (each := await client.next()).type != h2.PING:
            if each.type == h2.HEADERS:
                begun.append(each.stream_id)
        assert begun == list(range(1, 1001, 2))
        assert others[0] >= 8


async def test_a_client_with_calls_must_answer_a_ping():
    async with site({"echo": lambda call: None}, idle_timeout_s=0.1, write_timeout_s=0.1) as found:
        client = await found.connect()
        await client.infer(1, request(10))
        for _ in range(3):
            await client.until(lambda each: each.type == h2.PING)
            client.send(frame(h2.PING, h2.ACK, 0, bytes(8)))
        await client.until(lambda each: each.type == h2.PING)
        assert await client.ended() is None
        assert found.backend.calls[0].cancelled


async def test_a_close_answers_what_was_sent_before_the_client_knew(wait_until):
    held: list[Any] = []
    async with site({"echo": held.append}) as found:
        client = await found.connect()
        await client.infer(1, request(10))
        await client.until(lambda each: each.type == h2.SETTINGS)
        closing = asyncio.ensure_future(found.listener.close(LIMIT_S))
        ping = await client.until(lambda each: each.type == h2.PING)
        await client.infer(3, request(10))
        client.send(frame(h2.PING, h2.ACK, 0, ping.opaque_data))
        await wait_until(lambda: len(held) == 2)
        for call in held:
            call.reply()
        assert [(await client.reply(id))[0] for id in (1, 3)] == ["0", "0"]
        assert (await client.ended()).last_stream_id == 3
        await closing


async def test_a_breach_of_the_protocol_is_named_and_cancels_the_calls(wait_until):
    async with site({"echo": lambda call: None}) as found:
        client = await found.connect()
        await client.infer(1, request(10))
        await wait_until(lambda: found.backend.calls)
        client.send(frame(h2.PING, 0, 1, bytes(8)))
        goaway = await client.ended()
        assert (goaway.error_code, goaway.last_stream_id) == (h2.PROTOCOL_ERROR, 1)
        assert b"Stream ID must be zero" in goaway.additional_data
        assert found.backend.calls[0].cancelled


async def test_a_breach_frees_the_memory_of_all_calls_and_writes_no_more():
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    async with site(pool_bytes=300_000) as found:
        client = await found.connect()
        for id in (1, 3):  # the second waits for the memory of the first
            client.call(id, INFER)
            client.send(frame(h2.DATA, 0, id, struct.pack(">BI", 0, 250_000) + bytes(1000)))
        client.send(frame(h2.PING, 0, 1, bytes(8)))
        assert (await client.ended()).error_code == h2.PROTOCOL_ERROR
        assert found.backend.used_bytes == 0
    assert not errors


USES = {
    "answered": (INFER, request(10)),
    "waits for its answer": (INFER, request(10, "hold")),
    "half a message": (INFER, b""),
    "a stream": (STREAM, request(10)),
    "no such method": ("/no.Service/Call", b""),
    "a breach": (INFER, b""),
}


@pytest.mark.parametrize("use", USES)
async def test_a_closed_connection_and_its_calls_are_freed_without_the_garbage_collector(use, wait_until):
    def left() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) in (GrpcConnection, GrpcCall, Http2Connection)]

    path, data = USES[use]
    async with site({"echo": lambda call: call.reply(), "hold": lambda call: None}) as found:
        gc.collect()
        before = len(left())
        gc.disable()
        try:
            for _ in range(5):
                client = await found.connect()
                client.call(1, path)
                if data:
                    await client.message(1, data, end=path == INFER)
                elif use == "half a message":
                    client.send(frame(h2.DATA, 0, 1, struct.pack(">BI", 0, 90_000) + bytes(100)))
                elif use == "a breach":
                    client.send(frame(h2.PING, 0, 1, bytes(8)))
                await client.until(lambda each: each.type in (h2.SETTINGS, h2.DATA))
                client.writer.close()
                found.clients.clear()
            await wait_until(lambda: (found.backend.calls.clear(), len(left()) == before)[1])
        finally:
            gc.enable()
