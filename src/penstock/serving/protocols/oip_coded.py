"""The Open Inference codecs whose responses are compressed in the worker: the same formats inside gzip or deflate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.serving.protocols.codings import ACCEPT_ENCODING, accepted_coding, compress, header_of
from penstock.serving.protocols.oip import OipCodec, OipContext
from penstock.serving.protocols.oip_binary import OipBinaryCodec
from penstock.serving.protocols.oip_json import OipJsonCodec
from penstock.serving.protocols.oip_npy import OipNpyCodec
from penstock.types import Item, ItemResult

if TYPE_CHECKING:
    import numpy as np

_SSE: Final = b"text/event-stream"


class CodedBody(OipCodec):
    """Goes before the codec of a format: compresses whole responses.

    A request that was split has a response without coding, because its parts are joined in the server process.
    """

    reads_headers = True

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], OipContext]:
        """As of the format."""
        value, context = super().decode(item)
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
    """Binary tensors. `HEADER_LENGTH` counts bytes without coding."""


class CodedNpyCodec(CodedBody, OipNpyCodec):
    """NumPy's file format."""
