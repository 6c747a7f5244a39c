"""The Open Inference codecs for bodies in a content coding: the same formats inside gzip or deflate.

The worker decompresses and compresses. The server process sees only the first bytes of an encoded request, from which
it reads rows, shape, sequence, timeout and priority.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from penstock.config.schema import LimitsConfig
from penstock.serving.protocols.codings import (
    ACCEPT_ENCODING,
    MAX_RATIO,
    accepted_coding,
    coding_of,
    compress,
    decompress,
    decompressed_head,
    header_of,
)
from penstock.serving.protocols.oip import OipCodec, OipContext, header_length
from penstock.serving.protocols.oip_binary import OipBinaryCodec
from penstock.serving.protocols.oip_json import CODED_HEAD_BYTES, OipJsonCodec, coded_head, peek_json
from penstock.serving.protocols.oip_npy import OipNpyCodec
from penstock.types import Item, ItemResult, ModelMetadata, SequenceRequest

if TYPE_CHECKING:
    import numpy as np

_SSE: Final = b"text/event-stream"


class CodedBody(OipCodec):
    """Goes before the codec of a format: decompresses requests and compresses whole responses.

    A request that was split has a response without coding, because its parts are joined in the server process.
    """

    reads_headers = True

    def __init__(
        self,
        model: str,
        version: str,
        metadata: ModelMetadata | None = None,
        max_body_bytes: int = LimitsConfig().max_body_bytes,
    ) -> None:
        super().__init__(model, version, metadata)
        self._most = max_body_bytes

    @classmethod
    def peek(cls, item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """As of the format, if the first bytes suffice."""
        return super().peek(item, coded_head(item, body) if coding_of(item) else body)

    @classmethod
    def peek_sequence(cls, item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """As of the format, if the first bytes suffice. Raises BadRequest."""
        head = coded_head(item, body) if coding_of(item) else body
        return super().peek_sequence(item, head) if head else None

    def came_late(self, item: Item) -> bool:
        """Of a longer JSON the server process reads no parameters."""
        if not coding_of(item):
            return super().came_late(item)
        return (header_length(item.headers) or len(item.payload)) > CODED_HEAD_BYTES

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], OipContext]:
        """As of the format. Raises BadRequest, and PayloadTooLarge above `max_body_bytes` decompressed bytes."""
        coding = coding_of(item)
        plain = replace(item, payload=decompress(item.payload, coding, self._most)) if coding else item
        value, context = super().decode(plain)
        item.parameters = plain.parameters
        if item.stop < 0 and _SSE not in header_of(item.headers, b"accept"):
            context.coding = accepted_coding(header_of(item.headers, ACCEPT_ENCODING))
        return value, context

    def encode(self, value: Any, item: Item, context: OipContext) -> ItemResult:
        """As of the format, in the coding that the client demands."""
        result = super().encode(value, item, context)
        return compress(result, context.coding) if context.coding else result

    def encode_part(self, value: Any, item: Item, context: OipContext, first: bool) -> ItemResult:
        """As of the format, without coding, as all that follows in the stream."""
        context.coding = ""
        return super().encode_part(value, item, context, first)


class CodedJsonCodec(CodedBody, OipJsonCodec):
    """JSON."""


class CodedBinaryCodec(CodedBody, OipBinaryCodec):
    """Binary tensors. `HEADER_LENGTH` counts decompressed bytes."""

    @classmethod
    def peek(cls, item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key); the rows are bounded by what the body may hold."""
        if not coding_of(item):
            return super().peek(item, body)
        return peek_json(coded_head(item, body), MAX_RATIO * len(body))


class CodedNpyCodec(CodedBody, OipNpyCodec):
    """NumPy's file format."""

    @classmethod
    def peek(cls, item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key); 1 if there are more rows than `CODED_HEAD_BYTES`."""
        coding = coding_of(item)
        return OipNpyCodec.peek(item, decompressed_head(body, coding, CODED_HEAD_BYTES) if coding else body)
