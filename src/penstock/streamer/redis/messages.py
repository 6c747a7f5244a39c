"""What callers and workers write to each other through a broker. Pure.

An entry of the queue has the fields `h` (a Head) and `p` (the value, see `codec.py`); an entry of a client's replies
has one field, `a` (Answers): one message for all answers of one batch to one client.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.errors import PenstockError, describe, from_code, plain
from penstock.streamer.redis.codec import Malformed

VERSION = 1
MAX_BUDGET_MS = 7 * 24 * 3600 * 1000

ClientId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Number = Annotated[int, Meta(ge=0)]


class Head(Struct, array_like=True, frozen=True):
    """Who asks, and how long they wait: `budget_ms` from the time that the broker gave the entry its id.

    `due`: that is a deadline of the caller's own, by which requests may be put in order; else it is only the longest
    wait, and their order is that of their coming.
    """

    version: int
    client: ClientId
    number: Number
    budget_ms: Annotated[int, Meta(ge=0, le=MAX_BUDGET_MS)]
    priority: Annotated[int, Meta(ge=0, le=255)] = 0
    due: bool = False


class Fault(Struct, array_like=True, frozen=True):
    """An error on its way: its detail stays where it was raised."""

    code: str
    message: str
    retry_after_s: float | None = None


class Answer(Struct, array_like=True, frozen=True):
    """The outcome of one request of a client: a value as bytes, or an error."""

    number: Number
    body: bytes = b""
    fault: Fault | None = None


class Answers(Struct, array_like=True, frozen=True):
    """What one batch has for one client."""

    version: int
    answers: list[Answer]


write = msgspec.msgpack.Encoder().encode
_head = msgspec.msgpack.Decoder(Head)
_answers = msgspec.msgpack.Decoder(Answers)


def read_head(data: bytes) -> Head:
    """Raises Malformed."""
    try:
        head = _head.decode(data)
    except Exception as e:
        raise Malformed(f"the head of the message cannot be read: {describe(e)}") from None
    if head.version != VERSION:
        raise Malformed(f"the message has version {head.version}, expected {VERSION}: callers and workers differ")
    return head


def read_answers(data: bytes) -> list[Answer]:
    """Raises Malformed."""
    try:
        found = _answers.decode(data)
    except Exception as e:
        raise Malformed(f"the answer cannot be read: {describe(e)}") from None
    if found.version != VERSION:
        raise Malformed(f"the answer has version {found.version}, expected {VERSION}: callers and workers differ")
    return found.answers


def fault_of(error: PenstockError) -> Fault:
    """An error as it is sent."""
    return Fault(error.code, plain(error.message), error.retry_after_s)


def error_of(fault: Fault) -> PenstockError:
    """The error that was sent."""
    error = from_code(fault.code, fault.message)
    error.retry_after_s = fault.retry_after_s
    return error
