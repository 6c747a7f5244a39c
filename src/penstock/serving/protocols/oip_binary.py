"""Open Inference Protocol v2 with binary tensors: the codec of the server, and functions for clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import decode_json
from penstock.serving.protocols.oip import (
    HEADER_BYTES,
    HEADER_LENGTH,
    InputParameters,
    InputTensor,
    OipCodec,
    OipRequest,
    OipResponse,
    RequestedOutput,
    array_of_tensor,
    header_length,
    sequence_of_json,
    split_sections,
    write_head,
)
from penstock.serving.protocols.oip_json import peek_json
from penstock.serving.protocols.oip_tensors import length_of, output_array, to_bytes
from penstock.types import SIZES, Item, SequenceRequest

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | bytearray | memoryview
MAX_ANSWER_HEAD_BYTES: Final = 64 * 2**20  # JSON of a response, which may hold all tensors


class OipBinaryCodec(OipCodec):
    """Codec of `/v2/models/{m}/infer` for requests with the header `HEADER_LENGTH`."""

    divisible = True
    reads_headers = True

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key) of a body; None for an invalid header."""
        try:
            length = header_length(item.headers) or 0
        except BadRequest:
            return None
        return peek_json(body[:length], len(body)) if length <= len(body) else None

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """The sequence that the JSON before the tensors names. Raises BadRequest."""
        length = header_length(item.headers) or 0
        return sequence_of_json(body[:length]) if 0 < length <= min(len(body), HEADER_BYTES) else None

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """(JSON, bytes after it). Raises BadRequest for a missing header or a shorter body."""
        body = memoryview(item.payload)
        length = header_length(item.headers)
        if length is None:
            raise BadRequest(f"binary tensors need the header {HEADER_LENGTH}")
        if length > len(body):
            raise BadRequest(f"header {HEADER_LENGTH} is {length}, but the body has {len(body)} bytes")
        return body[:length], body[length:]


# ---- clients


class InferResponse(Struct):
    """A whole response: output name -> array; BYTES outputs are object arrays of bytes."""

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
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, list[Buffer]]:
    """(JSON of a request, buffers to send after it). The length of the JSON is the value of `HEADER_LENGTH`.

    An input is (name, datatype, shape, data): little-endian elements in C order, which are not copied, or the elements
    of a BYTES tensor. `outputs` selects outputs, by default all. `parameters` are further ones of the request. Raises
    ValueError if data and shape disagree.
    """
    tensors: list[InputTensor] = []
    buffers: list[Buffer] = []
    for name, datatype, shape, data in inputs:
        if isinstance(data, (bytes, bytearray, memoryview)):
            parts: list[Buffer] = [data if isinstance(data, bytes) else memoryview(data).cast("B")]
            fits = datatype == "BYTES" or len(parts[0]) == math.prod(shape) * SIZES[datatype]
        else:
            parts = [part for cell in data for part in (length_of(cell), cell)]
            fits = datatype == "BYTES" and len(data) == math.prod(shape)
        if not fits:
            raise ValueError(f"input '{name}': {datatype} of shape {list(shape)} does not match its data")
        size = sum(len(part) for part in parts)
        tensors.append(InputTensor(name, list(shape), datatype, parameters=InputParameters(binary_data_size=size)))
        buffers += parts
    selected = None if outputs is None else [RequestedOutput(output) for output in outputs]
    every: Any = {**({"binary_data_output": True} if binary_outputs else {}), **(parameters or {})}
    return write_head(OipRequest(tensors, id, selected, every or None)), buffers


def encode_arrays(
    arrays: dict[str, np.ndarray[Any, Any]], *, binary_outputs: bool = False, id: str | None = None
) -> tuple[bytes, list[Buffer]]:
    """`encode_request` for arrays. Raises BadOutput for a dtype without a datatype."""
    inputs = []
    for name, value in arrays.items():
        datatype, array = output_array(name, value, None)
        inputs.append((name, datatype, array.shape, to_bytes(name, datatype, array)))
    return encode_request(inputs, binary_outputs=binary_outputs, id=id)


def decode_answer(body: bytes | memoryview, header_length: int | None) -> InferResponse:
    """The response in a body. `header_length` is the value of its header; None: the whole body is JSON.

    Binary outputs are views of the body. Raises BadOutput for an invalid response.
    """
    view = memoryview(body)
    length = len(view) if header_length is None else header_length
    if not 0 < length <= min(len(view), MAX_ANSWER_HEAD_BYTES):
        raise BadOutput(f"the response has {len(view)} bytes, but its header gives {length} bytes of JSON")
    try:
        head: OipResponse = decode_json(view[:length], OipResponse)
    except BadRequest as exc:
        raise BadOutput(f"the response does not follow the Open Inference Protocol: {exc.message}") from None
    return response_of(head, split_sections(head.outputs, view[length:], "output", BadOutput))


def response_of(head: OipResponse, sections: Sequence[memoryview | None]) -> InferResponse:
    """The response with the bytes of each output; None for data in the JSON. Raises BadOutput."""
    outputs: dict[str, np.ndarray[Any, Any]] = {}
    for tensor, data in zip(head.outputs, sections, strict=True):
        if tensor.name in outputs:
            raise BadOutput(f"output '{tensor.name[:100]}' is given twice")
        outputs[tensor.name] = array_of_tensor(tensor, data, "output", BadOutput)
    return InferResponse(head.model_name, head.model_version, outputs, head.id, head.parameters or {})
