"""The Open Inference Protocol v2 with the binary tensor extension: its messages, and functions for clients.

The data of a tensor is part of the JSON, or follows it as bytes: then `parameters.binary_data_size` of the tensor is
their number. A request asks for binary outputs one by one (`parameters.binary_data` of an output) or for all of them
(`parameters.binary_data_output`). The form of its own inputs does not matter.

Source: the Open Inference Protocol's REST API, and Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import decode_json
from penstock.serving.protocols.oip_tensors import (
    Error,
    check_form,
    from_bytes,
    from_json,
    length_of,
    output_array,
    to_bytes,
)
from penstock.types import SIZES, Headers, SequenceRequest
from penstock.values import prepare

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | bytearray | memoryview
MAX_ANSWER_HEAD_BYTES: Final = 64 * 2**20  # JSON of a response, which may hold all tensors


HEADER_LENGTH: Final = "Inference-Header-Content-Length"
NPY: Final = "application/x-npy"
HEADER_BYTES: Final = 64 * 1024  # largest JSON before binary tensors: the server process reads it for the rows
ALIGNMENT: Final = 64  # of the first binary tensor; spaces pad the JSON
_HEADER_NAME: Final = HEADER_LENGTH.lower().encode()
TYPED: Final = "application/grpc+proto; contents=typed"
NO_DATA: Final = Raw(b"")


class SharedTensor(Struct, omit_defaults=True):
    """The place of a tensor in a registered region of shared memory; no region for a tensor in the body."""

    shared_memory_region: str | None = None
    shared_memory_byte_size: Annotated[int, Meta(ge=0)] | None = None
    shared_memory_offset: Annotated[int, Meta(ge=0)] = 0


class TensorParameters(SharedTensor, omit_defaults=True):
    """Parameters of a tensor. `binary_data_size` is None for data in the JSON or in shared memory."""

    binary_data_size: Annotated[int, Meta(ge=0)] | None = None


class Tensor(Struct, omit_defaults=True):
    """An input of a request, or an output of a response."""

    name: str
    shape: list[int]
    datatype: str
    data: Raw = NO_DATA
    parameters: TensorParameters | None = None

    @property
    def binary_bytes(self) -> int | None:
        """The size of its binary data; None for data in the JSON."""
        return None if self.parameters is None else self.parameters.binary_data_size


class OutputParameters(SharedTensor, omit_defaults=True):
    """Parameters of a requested output. `classification`: only the largest values of each row, this many."""

    binary_data: bool | None = None
    classification: Annotated[int, Meta(ge=0)] = 0


class RequestedOutput(Struct, omit_defaults=True):
    """An output that the client requests."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(Struct, omit_defaults=True):
    """Parameters of a request. `binary_data_output` is the default for all outputs. The server process reads `timeout`
    in microseconds and `priority` from 1, the highest; 0 is the default. `sequence_*` are for models with
    `max_sequences`, as in Triton's sequence extension."""

    binary_data_output: bool | None = None
    timeout: Annotated[int, Meta(ge=0)] = 0
    priority: Annotated[int, Meta(ge=0)] = 0
    sequence_id: int | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None


class OipRequest(Struct, omit_defaults=True):
    """The JSON of a request; unknown keys and parameters are ignored, see `AllParameters`."""

    inputs: list[Tensor] = []
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: dict[str, Any] | None = None


class _AnyParameters(Struct):
    parameters: dict[str, Any] | None = None


class AllParameters(_AnyParameters):
    """All parameters of a request, of its inputs and of its requested outputs."""

    inputs: list[_AnyParameters] = []
    outputs: list[_AnyParameters] | None = None

    def check_known(self, open: bool) -> None:
        """Raises BadRequest for a parameter that nothing reads. `open`: the model reads the request's own."""
        places: list[tuple[str, _AnyParameters, type[Struct]]] = [] if open else [("", self, RequestParameters)]
        places += [(f"inputs[{k}]", each, TensorParameters) for k, each in enumerate(self.inputs)]
        places += [(f"outputs[{k}]", each, OutputParameters) for k, each in enumerate(self.outputs or ())]
        for place, each, known in places:
            for name in each.parameters or ():
                if name not in known.__struct_fields__:
                    raise unsupported(name, place) or refusal(name, place, _SUPPORTED)


R = TypeVar("R", bound=Struct)
ADVICE: Final = {
    "timeout": "send the header x-deadline-ms",
    "priority": "send the header x-priority",
    "classification": "request the whole output and select the largest values",
    "sequence": "every request of this model is independent of the others",
    "shared_memory": "send tensors in the body",
}  # by the beginning of the parameter's name
_SUPPORTED: Final = (
    "a request takes binary_data_output, timeout and priority, an input binary_data_size, a requested output"
    " binary_data and classification; a model takes others in predict(items, parameters)"
)
NO_PARAMETERS: Final = OutputParameters()


def unsupported(name: str, place: str = "") -> BadRequest | None:
    """The error for a parameter of the protocol or of Triton that this server does not support; None for others."""
    advice = next((text for start, text in ADVICE.items() if name.startswith(start)), None)
    return None if advice is None else refusal(name, place, advice)


def refusal(name: str, place: str, advice: str) -> BadRequest:
    return BadRequest(f"parameter '{name[:100]}'{place and f' of {place[:40]}'} is not supported; {advice}")


def convert_request(values: dict[str, Any], kind: type[R]) -> R:
    """The request with the fields of a JSON request. Raises BadRequest."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has the wrong form: {error}") from None


def split_parameters(values: dict[str, Any] | None) -> tuple[RequestParameters, dict[str, Any]]:
    """(the parameters of the protocol, the others). Raises BadRequest."""
    known: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in (values or {}).items():
        if name.startswith("triton_"):
            raise BadRequest(f"parameter '{name[:100]}': names that begin with triton_ are reserved; use another one")
        (known if name in RequestParameters.__struct_fields__ else others)[name] = value
    try:
        parameters = msgspec.convert(known, RequestParameters)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has the wrong form: {error} in its parameters") from None
    return parameters, others


class _SequenceParameters(Struct):
    sequence_id: int | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None


class _SequenceHead(Struct):
    parameters: _SequenceParameters | None = None


def sequence_of_json(head: bytes | memoryview) -> SequenceRequest | None:
    """The sequence that the JSON of a request names. Raises BadRequest."""
    found = decode_json(head, _SequenceHead).parameters
    if found is None or not found.sequence_id:
        return None
    return SequenceRequest(str(found.sequence_id), bool(found.sequence_start), bool(found.sequence_end))


class OipResponse(Struct, omit_defaults=True):
    """The JSON of a response."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None


prepare(OipRequest, AllParameters, _SequenceHead, OipResponse)


def header_length(headers: Headers | None) -> int | None:
    """The length of the JSON at the start of a body; None without the header. Raises BadRequest."""
    for name, value in headers or ():
        if len(name) == len(_HEADER_NAME) and name.lower() == _HEADER_NAME:
            return parse_length(value)
    return None


def parse_length(value: bytes) -> int:
    """The value of the header `HEADER_LENGTH`. Raises BadRequest."""
    if value.isdigit() and len(value) < 10 and (length := int(value)) <= HEADER_BYTES:
        return length
    raise BadRequest(
        f"header {HEADER_LENGTH} must be a whole number from 0 to {HEADER_BYTES}, the length of the JSON before"
        f" the tensors, found '{value[:40].decode('latin-1')}'"
    )


def split_sections(tensors: Sequence[Tensor], rest: memoryview, kind: str, error: Error) -> list[memoryview | None]:
    """The bytes of each tensor, None for data in the JSON. The slices fill `rest` exactly. Raises `error`."""
    found: list[memoryview | None] = []
    at = 0
    for tensor in tensors:
        size = tensor.binary_bytes
        if size is None:
            found.append(None)
            continue
        if size > len(rest) - at:
            raise error(
                f"{kind} '{tensor.name[:100]}': binary_data_size is {size}, but only {len(rest) - at} bytes remain"
                " after the JSON"
            )
        found.append(rest[at : at + size])
        at += size
    if at != len(rest):
        raise error(f"{len(rest)} bytes follow the JSON, but the binary_data_size of every {kind} adds up to {at}")
    return found


def array_of_tensor(tensor: Tensor, data: memoryview | None, kind: str, error: Error) -> np.ndarray[Any, Any]:
    """The tensor as an array. `data` is None for data in the JSON. Raises `error`."""
    what = f"{kind} '{tensor.name[:100]}'"
    check_form(what, tensor.datatype, tensor.shape, error)
    if data is None:
        if tensor.data is NO_DATA:
            raise error(f"{what}: missing required field `data`, and no parameters.binary_data_size is given")
        return from_json(what, tensor.datatype, tensor.shape, tensor.data, error)
    if tensor.data is not NO_DATA:
        raise error(f"{what}: both `data` and parameters.binary_data_size are given")
    return from_bytes(what, tensor.datatype, tensor.shape, data, error)


def write_head(message: OipRequest | OipResponse) -> bytes:
    """The JSON before binary tensors, padded to a multiple of `ALIGNMENT`."""
    head = msgspec.json.encode(message)
    return head + b" " * (-len(head) % ALIGNMENT)


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
    tensors: list[Tensor] = []
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
        tensors.append(Tensor(name, list(shape), datatype, parameters=TensorParameters(binary_data_size=size)))
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
