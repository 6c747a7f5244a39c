import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BrokerUnavailable, ItemFailed, QueueFull
from penstock.streamer.redis.codec import MalformedMessage
from penstock.streamer.redis.protocol import (
    VERSION,
    BrokerReplies,
    BrokerReply,
    RequestHeader,
    WireError,
    dump,
    from_wire,
    load_header,
    load_replies,
    to_wire,
)

CLIENT = "0123456789abcdef" * 2


def test_a_header_and_replies_survive_the_round_trip():
    header = RequestHeader(VERSION, CLIENT, 7, 1500, 2)
    replies = [BrokerReply(7, b"x"), BrokerReply(8, error=WireError("queue_full", "full", 1.5))]
    assert load_header(dump(header)) == header
    assert load_replies(dump(BrokerReplies(VERSION, replies))) == replies


def test_an_error_keeps_its_class_message_and_retry_time_but_not_its_detail():
    error = from_wire(to_wire(QueueFull("full", retry_after_s=2.0, detail="/a/path")))
    assert (type(error), error.message, error.retry_after_s, error.detail) == (QueueFull, "full", 2.0, "")
    assert type(from_wire(to_wire(BrokerUnavailable("away")))) is BrokerUnavailable
    assert type(from_wire(to_wire(ItemFailed("bad")))) is ItemFailed


@pytest.mark.parametrize(
    "fields",
    [
        [VERSION, "../other", 7, 1500, 0],
        [VERSION, CLIENT.upper(), 7, 1500, 0],
        [VERSION, CLIENT, -1, 1500, 0],
        [VERSION, CLIENT, 7, -5, 0],
        [VERSION, CLIENT, 7, 10**12, 0],
        [VERSION, CLIENT, 7, 1500, 10**6],
        [VERSION],
        {"client": CLIENT},
        "text",
    ],
)
def test_an_invalid_header_is_malformed(fields):
    with pytest.raises(MalformedMessage, match="the header of the message cannot be read"):
        load_header(msgspec.msgpack.encode(fields))


def test_another_version_is_malformed():
    with pytest.raises(MalformedMessage, match="version 2, expected 1"):
        load_header(dump(RequestHeader(2, CLIENT, 7, 1500)))
    with pytest.raises(MalformedMessage, match="version 2, expected 1"):
        load_replies(dump(BrokerReplies(2, [])))


@given(st.binary(max_size=60))
def test_foreign_bytes_raise_nothing_but_malformed_message(data):
    for read in (load_header, load_replies):
        try:
            read(data)
        except MalformedMessage:
            pass
