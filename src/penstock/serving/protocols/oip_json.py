"""Open Inference Protocol v2 in JSON: its codec, its small answers, and what the front process peeks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from penstock.errors import BadRequest, PenstockError
from penstock.serving.protocols.oip import HEADER_BYTES, HEADER_LENGTH
from penstock.serving.protocols.oip_codec import OipCodec
from penstock.types import Item, ModelMetadata

PEEK_BYTES: Final = HEADER_BYTES
EXTENSIONS: Final = ("binary_tensor_data",)
_PICKLES: Final = tuple(bytes((0x80, version)) for version in range(2, 6))  # how pickles begin


class _PeekInput(Struct):
    shape: list[int]
    name: str = ""
    datatype: str = ""


class _Peek(Struct):
    inputs: list[_PeekInput]


_peek = msgspec.json.Decoder(_Peek)


def _peek_inputs(body: bytes | memoryview) -> list[_PeekInput]:
    if len(body) > PEEK_BYTES:
        return []
    try:
        return _peek.decode(body).inputs
    except (msgspec.DecodeError, ValueError, RecursionError):  # the worker tells what is wrong with it
        return []


def peek_json(head: bytes | memoryview, body_bytes: int) -> tuple[int, str] | None:
    """(rows, shape key) of the JSON `head` of a body of `body_bytes`; None for malformed JSON.

    Rows are axis 0 of the first input, 1 if there are more rows than bytes. The key holds names, datatypes and shapes
    without axis 0, such as "x:FP32:3x224x224".
    """
    inputs = _peek_inputs(head)
    if not inputs:
        return None
    rows = inputs[0].shape[0] if inputs[0].shape else 1
    keys = (f"{i.name}:{i.datatype}:{'x'.join(map(str, i.shape[1:]))}" for i in inputs)
    return rows if 1 <= rows <= body_bytes else 1, ";".join(sorted(keys))


def error_body(error: PenstockError) -> bytes:
    """`{"error": "..."}`; the detail of an error stays inside."""
    return msgspec.json.encode({"error": error.message})


def server_body(version: str) -> bytes:
    """Answer of `GET /v2`."""
    return msgspec.json.encode({"name": "penstock", "version": version, "extensions": EXTENSIONS})


def metadata_body(metadata: ModelMetadata, versions: Sequence[str]) -> bytes:
    """Answer of `GET /v2/models/{m}`."""
    return msgspec.json.encode(
        {
            "name": metadata.name,
            "versions": list(versions),
            "platform": metadata.platform,
            "inputs": metadata.inputs,
            "outputs": metadata.outputs,
            "parameters": metadata.parameters,
        }
    )


class OipJsonCodec(OipCodec):
    """Codec of `/v2/models/{m}/infer` for bodies that are JSON to their end, whatever their content type says."""

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """Rows and shape key of up to 64 KiB of JSON."""
        return peek_json(body, len(body)) if len(body) <= PEEK_BYTES else None

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """The whole body. Raises BadRequest for what is plainly something else: then the JSON's error would mislead."""
        payload = item.payload
        if bytes(payload[:2]) in _PICKLES:
            raise BadRequest("the body is a pickle, which is never loaded here; send JSON, or binary tensors")
        if item.content_type.startswith("application/octet-stream") and bytes(payload[:1]) != b"{":
            raise BadRequest(f"the body is no JSON; binary tensors need the header {HEADER_LENGTH}")
        return payload, memoryview(b"")
