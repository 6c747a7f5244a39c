from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BrokerUnavailable, ItemFailed, QueueFull
from penstock.streamer.redis.codec import Malformed
from penstock.streamer.redis.messages import (
    VERSION,
    Answer,
    Answers,
    Fault,
    Head,
    error_of,
    fault_of,
    read_answers,
    read_head,
    write,
)

CLIENT = "0123456789abcdef" * 2


def test_a_head_and_answers_come_back():
    head = Head(VERSION, CLIENT, 7, 1500, 2)
    answers = [Answer(7, b"x"), Answer(8, fault=Fault("queue_full", "full", 1.5))]
    assert read_head(write(head)) == head
    assert read_answers(write(Answers(VERSION, answers))) == answers


def test_an_error_keeps_class_message_and_time_and_leaves_its_detail():
    error = error_of(fault_of(QueueFull("full", retry_after_s=2.0, detail="/a/path")))
    assert (type(error), error.message, error.retry_after_s, error.detail) == (QueueFull, "full", 2.0, "")
    assert type(error_of(fault_of(BrokerUnavailable("away")))) is BrokerUnavailable
    assert type(error_of(fault_of(ItemFailed("bad")))) is ItemFailed


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
def test_a_head_that_no_client_writes_is_malformed(fields):
    with pytest.raises(Malformed, match="the head of the message cannot be read"):
        read_head(msgspec.msgpack.encode(fields))


def test_another_version_says_so():
    with pytest.raises(Malformed, match="version 2, expected 1"):
        read_head(write(Head(2, CLIENT, 7, 1500)))
    with pytest.raises(Malformed, match="version 2, expected 1"):
        read_answers(write(Answers(2, [])))


@given(st.binary(max_size=60))
def test_foreign_bytes_are_malformed_and_nothing_else(data):
    for read in (read_head, read_answers):
        try:
            read(data)
        except Malformed:
            pass
