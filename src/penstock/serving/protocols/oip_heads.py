"""What the server process reads in the JSON of an Open Inference request: its rows, its shapes, and its terms."""

import sys
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.core.columns import MOST_KEY_BYTES, PlanMemory
from penstock.serving.protocols.columns import cut_id
from penstock.serving.protocols.oip_messages import HEADER_BYTES
from penstock.serving.protocols.route import Terms


class _PeekInput(Struct):
    shape: list[int]
    name: str = ""
    datatype: str = ""


class _Peek(Struct):
    inputs: list[_PeekInput]


_peek = msgspec.json.Decoder(_Peek)


def peek_json(head: bytes | memoryview, body_bytes: int) -> tuple[int, str] | None:
    """(rows, shape key) of the JSON `head` of a body of `body_bytes`; None for malformed or longer JSON.

    Rows are axis 0 of the first input, 1 if there are more rows than bytes. The key holds names, datatypes and shapes
    without axis 0, such as "x:FP32:3x224x224".
    """
    if len(head) > HEADER_BYTES:
        return None
    try:
        inputs = _peek.decode(head).inputs
    except (msgspec.DecodeError, ValueError, RecursionError):  # the worker reports the error
        return None
    if not inputs:
        return None
    rows = inputs[0].shape[0] if inputs[0].shape else 1
    keys = [f"{i.name}:{i.datatype}:{'x'.join(map(str, i.shape[1:]))}" for i in inputs]
    return rows if 1 <= rows <= body_bytes else 1, ";".join(sorted(keys))


class _TermsParameters(Struct):
    timeout: Annotated[int, Meta(ge=0)] = 0
    priority: Annotated[int, Meta(ge=0)] = 0


class _TermsHead(Struct):
    parameters: _TermsParameters | None = None


_terms = msgspec.json.Decoder(_TermsHead)


def terms_of(head: bytes) -> Terms | None:
    """The parameters `timeout` and `priority` of the JSON of a request; None without them, and for malformed JSON."""
    if b'"parameters"' not in head or (b'"timeout"' not in head and b'"priority"' not in head):
        return None
    try:
        found = _terms.decode(head).parameters
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if found is None:
        return None
    return Terms(found.timeout / 1e6 if found.timeout else None, found.priority - 1 if found.priority else None)


class _ParametersHead(Struct):
    parameters: Raw = Raw(b"")


_parameters = msgspec.json.Decoder(_ParametersHead)
_NAMES: Final = (b'"timeout"', b'"priority"', b'"sequence_id"')


def large_parameters(body: bytes | memoryview) -> bytes:
    """JSON with the parameters of a large body, if its first or last 64 KiB hold a name that the server process reads.

    Clients write them before `inputs` or at the end, where what remains is an object with one bracket more. A body with
    other contents behind them is read once, at about 1 GB/s. The worker reports malformed JSON.
    """
    start, end = bytes(body[:HEADER_BYTES]), bytes(body[-HEADER_BYTES:])
    if not any(name in start or name in end for name in _NAMES):
        return b"{}"
    last = b"{" + end[end.rfind(b'"parameters"') :]
    first = start.partition(b'"inputs"')[0].rstrip(b" \t\r\n,") + b"}"
    for text in (last, first, body):
        try:
            found = bytes(_parameters.decode(text).parameters)
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
        if found:
            return b'{"parameters":%b}' % found
    return b"{}"


class HeadFacts(Struct, frozen=True):
    """What the server process needs of the JSON before binary tensors: see `terms_of` and `peek_json`."""

    terms: Terms | None
    peeked: tuple[int, str] | None


_facts = PlanMemory()


def facts_of(head: bytes) -> HeadFacts:
    """The facts in the JSON before binary tensors, which clients repeat with other ids."""
    found: HeadFacts | None = _facts.get(head)
    if found is not None:
        return found
    cut = cut_id(head)
    found = None if cut is None else _facts.get(cut[0])
    if found is None:
        found = HeadFacts(terms_of(head), peek_json(head, sys.maxsize))
        if cut is not None and len(head) <= MOST_KEY_BYTES:
            _facts.keep(cut[0], found)
    return found
