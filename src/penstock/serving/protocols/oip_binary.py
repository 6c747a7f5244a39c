"""Open Inference Protocol v2 with binary tensors: JSON, and behind it the bytes of tensors. Both sides of the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import decode_json
from penstock.serving.protocols.oip import (
    HEADER_LENGTH,
    OipRequest,
    RequestedOutput,
    RequestParameters,
    Tensor,
    TensorParameters,
    array_of_tensor,
    cut,
    header_length,
    write_head,
)
from penstock.serving.protocols.oip import OipResponse as AnswerHead
from penstock.serving.protocols.oip_codec import OipCodec
from penstock.serving.protocols.oip_json import peek_json
from penstock.serving.protocols.oip_tensors import length_of, output_array, to_bytes
from penstock.types import SIZES, Item

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | bytearray | memoryview
MAX_ANSWER_HEAD_BYTES: Final = 64 * 2**20  # of JSON in an answer; its tensors may all stand there


class OipBinaryCodec(OipCodec):
    """Codec of `/v2/models/{m}/infer` for requests whose header says how long the JSON before their tensors is."""

    divisible = True
    reads_headers = True

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """Rows and shape key of the JSON at the start of a body; None where the header is wrong."""
        try:
            length = header_length(item.headers) or 0
        except BadRequest:
            return None
        return peek_json(body[:length], len(body)) if length <= len(body) else None

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """The JSON and what follows it. Raises BadRequest when there is less than the header says."""
        body = memoryview(item.payload)
        length = header_length(item.headers)
        if length is None:
            raise BadRequest(f"binary tensors need the header {HEADER_LENGTH}")
        if length > len(body):
            raise BadRequest(f"header {HEADER_LENGTH} is {length}, and the body has {len(body)} bytes")
        return body[:length], body[length:]


# ---- clients


class InferResponse(Struct):
    """A whole answer: output name -> array, objects of bytes for BYTES."""

    model_name: str
    model_version: str
    outputs: dict[str, np.ndarray[Any, Any]]
    id: str | None = None
    parameters: dict[str, Any] = {}


def encode_request(
    inputs: Sequence[tuple[str, str, tuple[int, ...], Buffer | Sequence[bytes]]],
    *,
    outputs: Sequence[str] | None = None,
    binary_outputs: bool = False,
    id: str | None = None,
) -> tuple[bytes, list[Buffer]]:
    """The JSON of a request and the buffers behind it, in order; its length is the value of `HEADER_LENGTH`.

    An input is (name, datatype, shape, data): little-endian elements in C order, which are not copied, or the elements
    of BYTES. `outputs`: those that are wanted, all by default. Raises ValueError when data and shape do not fit.
    """
    tensors: list[Tensor] = []
    buffers: list[Buffer] = []
    for name, datatype, shape, data in inputs:
        if isinstance(data, (bytes, bytearray, memoryview)):
            parts: list[Buffer] = [data if isinstance(data, bytes) else memoryview(data).cast("B")]
            wanted = math.prod(shape) * SIZES[datatype]
            fits = datatype == "BYTES" or len(parts[0]) == wanted
        else:
            parts = [part for cell in data for part in (length_of(cell), cell)]
            wanted = math.prod(shape)
            fits = datatype == "BYTES" and len(data) == wanted
        if not fits:
            raise ValueError(f"input '{name}': {datatype} of shape {list(shape)} does not fit its data")
        size = sum(len(part) for part in parts)
        tensors.append(Tensor(name, list(shape), datatype, parameters=TensorParameters(size)))
        buffers += parts
    wishes = None if outputs is None else [RequestedOutput(wish) for wish in outputs]
    parameters = RequestParameters(True) if binary_outputs else None
    return write_head(OipRequest(tensors, id, wishes, parameters)), buffers


def encode_arrays(
    arrays: dict[str, np.ndarray[Any, Any]], *, binary_outputs: bool = False, id: str | None = None
) -> tuple[bytes, list[Buffer]]:
    """`encode_request` of arrays, whose datatypes follow from their dtypes. Raises BadOutput for one that has none."""
    inputs = []
    for name, value in arrays.items():
        datatype, array = output_array(name, value, None)
        inputs.append((name, datatype, array.shape, to_bytes(name, datatype, array)))
    return encode_request(inputs, binary_outputs=binary_outputs, id=id)


def decode_answer(body: bytes | memoryview, header_length: int | None) -> InferResponse:
    """What a server answered; `header_length` is that of its header, None when all of the body is JSON.

    Arrays lie over the body where they are binary. Raises BadOutput for whatever is no Open Inference answer.
    """
    view = memoryview(body)
    length = len(view) if header_length is None else header_length
    if not 0 < length <= min(len(view), MAX_ANSWER_HEAD_BYTES):
        raise BadOutput(f"the answer has {len(view)} bytes, of which {length} are said to be its JSON")
    try:
        head: AnswerHead = decode_json(view[:length], AnswerHead)
    except BadRequest as exc:
        raise BadOutput(f"the answer is no Open Inference answer: {exc.message}") from None
    outputs: dict[str, np.ndarray[Any, Any]] = {}
    for tensor, data in zip(head.outputs, cut(head.outputs, view[length:], "output", BadOutput), strict=True):
        if tensor.name in outputs:
            raise BadOutput(f"output '{tensor.name[:100]}' is there twice")
        outputs[tensor.name] = array_of_tensor(tensor, data, "output", 0, BadOutput)
    return InferResponse(head.model_name, head.model_version, outputs, head.id, head.parameters or {})
