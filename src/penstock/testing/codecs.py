"""check_codec: the contract of codecs. Run it with some requests and values of a new codec."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest
from penstock.types import Item, ItemResult


class _Opaque:
    """A value that no protocol can encode."""


def check_codec(
    make: Callable[[], Codec], requests: Sequence[Item], values: Sequence[Any], *, holds_nan: bool = False
) -> None:
    """Raises AssertionError, which names the rule, if the codec breaks one.

    `requests` are valid requests; `values` are results that a model may return for each of them. `holds_nan`: the
    format can hold NaN and infinity.
    """
    refused = [None, _Opaque(), [_Opaque()], *([] if holds_nan else [[float("nan")], float("inf")])]
    for request in requests:
        _check_decode(make(), request)
        _check_damage(make(), request)
        for value in values:
            _check_encode(make(), request, value)
        _check_refusals(make(), request, refused)


def _same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


def _check_decode(codec: Codec, request: Item) -> None:
    before = copy.copy(request)
    value, _ = codec.decode(request)
    request.parameters, request.files = before.parameters, before.files  # decode may set these
    assert request == before, "decode changes the item"
    assert _same(codec.decode(request)[0], value), "a second decode returns another value: the codec keeps state"
    in_slab = msgspec.structs.replace(request, payload=memoryview(bytes(request.payload)).toreadonly())
    found = codec.decode(in_slab)[0]
    if isinstance(found, memoryview):
        found = found.tobytes()
    assert _same(found, value), "decode returns another value for a read-only memoryview"


def _check_damage(codec: Codec, request: Item) -> None:
    """Truncated bodies, and bodies with one changed byte, are decoded or raise BadRequest."""
    body = bytes(request.payload)
    step = max(1, len(body) // 64)
    damaged = [body[:n] for n in range(0, len(body), step)]
    damaged += [body[:n] + bytes([body[n] ^ 0x80]) + body[n + 1 :] for n in range(0, len(body), step)]
    for payload in damaged:
        try:
            codec.decode(msgspec.structs.replace(request, payload=payload))
        except BadRequest:
            continue


def _check_encode(codec: Codec, request: Item, value: Any) -> None:
    _, context = codec.decode(request)
    result = codec.encode(value, request, context)
    assert isinstance(result, ItemResult), f"encode returns {type(result).__name__}, not ItemResult"
    assert isinstance(result.body, bytes), (
        f"encode returns a body of type {type(result.body).__name__}, which cannot be sent"
    )
    assert result.final, "encode returns a part that is not final; codecs do not stream"
    assert result.error is None, "encode returns an error instead of raising it"
    assert codec.join([result]) == result, "join changes an answer that has one part"


def _check_refusals(codec: Codec, request: Item, refused: Sequence[Any]) -> None:
    _, context = codec.decode(request)
    for value in refused:
        try:
            codec.encode(value, request, context)
        except BadOutput:
            continue
        raise AssertionError(f"encode accepts {value!r}, which is not a valid result")
