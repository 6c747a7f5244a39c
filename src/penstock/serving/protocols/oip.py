"""The Open Inference Protocol v2 with the binary tensor extension: its messages, and the base of its codecs.

The data of a tensor is part of the JSON, or follows it as bytes: then `parameters.binary_data_size` of the tensor is
their number. A request asks for binary outputs one by one (`parameters.binary_data` of an output) or for all of them
(`parameters.binary_data_output`). The form of its own inputs does not matter.

Source: the Open Inference Protocol's REST API, and Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeGuard, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.core.contracts import Codec
from penstock.core.wire.regions import read_region, write_region
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import JSON, decode_json
from penstock.serving.protocols.native import BYTES, encode_response
from penstock.serving.protocols.oip_tensors import (
    MAX_DIMS,
    Error,
    check_form,
    from_bytes,
    from_json,
    output_array,
    to_bytes,
    to_json,
    top_classes,
)
from penstock.types import SIZES, Headers, Item, ItemResult, ModelMetadata, Response, SequenceRequest

if TYPE_CHECKING:
    import numpy as np

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
NPY: Final = "application/x-npy"
HEADER_BYTES: Final = 64 * 1024  # largest JSON before binary tensors: the server process reads it for the rows
ALIGNMENT: Final = 64  # of the first binary tensor; spaces pad the JSON
_HEADER_NAME: Final = HEADER_LENGTH.lower().encode()
TYPED: Final = "application/grpc+proto; contents=typed"
_NO_DATA: Final = Raw(b"")


class SharedTensor(Struct, omit_defaults=True):
    """The place of a tensor in a registered region of shared memory; no region for a tensor in the body."""

    shared_memory_region: str | None = None
    shared_memory_byte_size: Annotated[int, Meta(ge=0)] | None = None
    shared_memory_offset: Annotated[int, Meta(ge=0)] = 0


class TensorParameters(SharedTensor, omit_defaults=True):
    """Parameters of a tensor. `binary_data_size` is None for data in the JSON or in shared memory."""

    binary_data_size: Annotated[int, Meta(ge=0)] | None = None


class InputParameters(TensorParameters, forbid_unknown_fields=True):
    """Parameters of an input."""


class Tensor(Struct, omit_defaults=True):
    """An output of a response."""

    name: str
    shape: list[int]
    datatype: str
    data: Raw = _NO_DATA
    parameters: TensorParameters | None = None

    @property
    def binary_bytes(self) -> int | None:
        """The size of its binary data; None for data in the JSON."""
        return None if self.parameters is None else self.parameters.binary_data_size


class InputTensor(Tensor, omit_defaults=True):
    """An input of a request."""

    parameters: InputParameters | None = None


class OutputParameters(SharedTensor, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of a requested output. `classification`: only the largest values of each row, this many."""

    binary_data: bool | None = None
    classification: Annotated[int, Meta(ge=0)] = 0


class RequestedOutput(Struct, omit_defaults=True):
    """An output that the client requests."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(Struct, omit_defaults=True, forbid_unknown_fields=True):
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
    """The JSON of a request; unknown keys are ignored, unknown parameters are refused."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: RequestParameters | None = None


class OpenRequest(OipRequest):
    """A request to a model that takes parameters of its own."""

    parameters: dict[str, Any] | None = None  # type: ignore[assignment]


R = TypeVar("R", bound=OipRequest)
_UNKNOWN_PARAMETER: Final = re.compile(r"unknown field `(.*)` - at `\$\.?(.*?)\.?parameters`")
_ADVICE: Final = {
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
_NO_PARAMETERS: Final = OutputParameters()


def unsupported(name: str, place: str = "") -> BadRequest | None:
    """The error for a parameter of the protocol or of Triton that this server does not support; None for others."""
    advice = next((text for start, text in _ADVICE.items() if name.startswith(start)), None)
    return None if advice is None else _refusal(name, place, advice)


def _refusal(name: str, place: str, advice: str) -> BadRequest:
    return BadRequest(f"parameter '{name[:100]}'{place and f' of {place[:40]}'} is not supported; {advice}")


def decode_request(head: bytes | memoryview, kind: type[R]) -> R:
    """The JSON of a request. Raises BadRequest, also for parameters that would have no effect."""
    try:
        request: R = decode_json(head, kind)
    except BadRequest as error:
        raise _explained(error) from None
    return request


def convert_request(values: dict[str, Any], kind: type[R]) -> R:
    """The request with the fields of a JSON request. Raises BadRequest as `decode_request` does."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explained(BadRequest(f"the request has the wrong form: {error}")) from None


def split_parameters(values: dict[str, Any]) -> tuple[RequestParameters, dict[str, Any]]:
    """(the parameters of the protocol, the others). Raises BadRequest."""
    known = {name: value for name, value in values.items() if name in RequestParameters.__struct_fields__}
    try:
        parameters = msgspec.convert(known, RequestParameters)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has the wrong form: {error} in its parameters") from None
    return parameters, {name: value for name, value in values.items() if name not in known}


def _explained(error: BadRequest) -> BadRequest:
    """The error for an unknown parameter, with advice; other errors as they are."""
    if found := _UNKNOWN_PARAMETER.search(error.message):
        name, place = found.groups()
        return unsupported(name, place) or _refusal(name, place, _SUPPORTED)
    return error


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


def header_length(headers: Headers | None) -> int | None:
    """The length of the JSON at the start of a body; None without the header. Raises BadRequest."""
    for name, value in headers or ():
        if len(name) == len(_HEADER_NAME) and name.lower() == _HEADER_NAME:
            return parse_length(value)
    return None


def parse_length(value: bytes) -> int:
    """The value of the header `HEADER_LENGTH`. Raises BadRequest."""
    if value.isdigit() and len(value) < 10 and 1 <= (length := int(value)) <= HEADER_BYTES:
        return length
    raise BadRequest(
        f"header {HEADER_LENGTH} must be a whole number from 1 to {HEADER_BYTES}, the length of the JSON before"
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
        if tensor.data is _NO_DATA:
            raise error(f"{what}: missing required field `data`, and no parameters.binary_data_size is given")
        return from_json(what, tensor.datatype, tensor.shape, tensor.data, error)
    if tensor.data is not _NO_DATA:
        raise error(f"{what}: both `data` and parameters.binary_data_size are given")
    return from_bytes(what, tensor.datatype, tensor.shape, data, error)


def write_head(message: OipRequest | OipResponse) -> bytes:
    """The JSON before binary tensors, padded to a multiple of `ALIGNMENT`."""
    head = msgspec.json.encode(message)
    return head + b" " * (-len(head) % ALIGNMENT)


# ---- codecs


class Selection(Struct):
    """A requested output; with `classes`, only the largest values of each row, this many. `shared`: where it goes."""

    name: str
    binary: bool
    classes: int = 0
    shared: SharedTensor | None = None


class OipContext(Struct):
    """The part of the request that `encode` needs. `outputs` None means all outputs.

    `typed`: over gRPC, outputs are typed contents. `coding`: the response is compressed, see `codings`.
    """

    id: str | None = None
    outputs: list[Selection] | None = None
    binary: bool = False
    typed: bool = False
    coding: str = ""


class OipCodec(Codec):
    """Base of the codecs of `/v2/models/{m}/infer`. Checks requests against the inputs of `metadata`, if given."""

    def __init__(self, model: str, version: str, metadata: ModelMetadata | None = None) -> None:
        self.model = model
        self.version = version
        known = metadata or ModelMetadata(model, version)
        self.inputs = {spec.name: spec for spec in known.inputs}
        self.outputs = {spec.name: spec.datatype for spec in known.outputs}
        self.takes_parameters, self.unbatched = known.takes_parameters, known.unbatched
        revision = known.parameters.get("revision")
        self.parameters = None if revision is None else {"revision": revision}

    # ---- requests

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """(JSON of a body, bytes after it). Raises BadRequest."""
        raise NotImplementedError

    def read(self, item: Item) -> tuple[OipRequest, Sequence[memoryview | None]]:
        """The request, and the bytes of each input; None for data in the JSON. Raises BadRequest."""
        head, rest = self.head_of(item)
        request = decode_request(head, OpenRequest if self.takes_parameters else OipRequest)
        return request, split_sections(request.inputs, rest, "input", BadRequest)

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], OipContext]:
        """Input name -> array `[rows, ...]`; only rows [start, stop) for a part of a split request."""
        request, sections = self.read(item)
        if isinstance(request.parameters, dict):
            request.parameters, item.parameters = split_parameters(request.parameters)
        if request.parameters is not None:
            self._check_parameters(request.parameters, item)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for tensor, data in zip(request.inputs, sections, strict=True):
            if tensor.name in arrays:
                raise BadRequest(f"input '{tensor.name[:100]}' is given twice")
            self._check(tensor)
            place = tensor.parameters
            if is_shared(place, f"input '{tensor.name[:100]}'"):
                data = _shared_input(tensor, place)
            arrays[tensor.name] = array_of_tensor(tensor, data, "input", BadRequest)
        return self._rows(arrays, item), self.context_of(request)

    def _check_parameters(self, found: RequestParameters, item: Item) -> None:
        """Raises BadRequest for parameters that had no effect."""
        for name in ("sequence_id", "sequence_start", "sequence_end") if item.sequence is None else ():
            if getattr(found, name):
                raise _refusal(name, "", _ADVICE["sequence"])
        if self.came_late(item):
            for name in ("timeout", "priority"):
                if getattr(found, name):
                    raise _refusal(name, "", f"the body is too large to read it in time: {_ADVICE[name]}")

    def _rows(self, arrays: dict[str, np.ndarray[Any, Any]], item: Item) -> dict[str, np.ndarray[Any, Any]]:
        """The rows of this item. Raises BadRequest for missing inputs or different numbers of rows."""
        self._check_set(arrays)
        if item.stop < 0:
            return arrays
        return {name: array[item.start : item.stop] for name, array in arrays.items()}

    def _check(self, tensor: Tensor) -> None:
        if not self.inputs:
            return
        spec = self.inputs.get(tensor.name)
        if spec is None:
            raise BadRequest(f"unknown input '{tensor.name[:100]}'; the model has {', '.join(self.inputs)}")
        if tensor.datatype != spec.datatype:
            raise BadRequest(f"input '{spec.name}': datatype must be {spec.datatype}, found '{tensor.datatype[:40]}'")
        shape = tensor.shape
        wanted = [*(spec.shape if self.unbatched else (-1, *spec.shape[1:]))]  # rows may be of any number
        if len(shape) != len(wanted) or any(w not in (-1, f) for w, f in zip(wanted, shape, strict=True)):
            raise BadRequest(f"input '{spec.name}': shape must be {wanted} (-1 is any size), found {shape[:MAX_DIMS]}")

    def _check_set(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if not arrays:
            raise BadRequest("inputs is empty, expected at least one tensor")
        needed = [name for name, spec in self.inputs.items() if not spec.optional]
        missing = [name for name in needed if name not in arrays]
        if missing:
            raise BadRequest(f"input '{missing[0]}' is missing; the model needs {', '.join(needed)}")
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) > 1 and not self.unbatched:
            counts = ", ".join(f"'{name[:100]}' {n}" for name, n in list(rows.items())[:4])
            raise BadRequest(f"inputs must all have the same number of rows (axis 0), found {counts}")

    # ---- responses

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The response for a dict of arrays, or one array ("output_0"). Raises BadRequest for an unknown output."""
        if isinstance(value, Response):
            return encode_response(value)
        outputs = named_outputs(value)
        requested: OipContext = context or OipContext()
        selected = requested.outputs
        if selected is None:
            selected = [Selection(name, requested.binary) for name in outputs]
        tensors, sections = [], []
        for wanted in selected:
            name = wanted.name
            if name not in outputs:
                raise BadRequest(f"unknown output '{name[:100]}' requested; the model returned {', '.join(outputs)}")
            datatype, array = output_array(name, outputs[name], self.outputs.get(name))
            if wanted.classes:
                rows = array.reshape(1, -1) if self.unbatched else array
                best = top_classes(name, datatype, rows, wanted.classes)
                datatype, array = "BYTES", best[0] if self.unbatched else best
            tensor = Tensor(name, list(array.shape), datatype)
            if wanted.shared is not None:
                tensor.parameters = _shared_output(name, to_bytes(name, datatype, array), wanted.shared, item)
            elif wanted.binary:
                sections.append(to_bytes(name, datatype, array))
                tensor.parameters = TensorParameters(binary_data_size=len(sections[-1]))
            else:
                tensor.data = to_json(name, datatype, array)
            tensors.append(tensor)
        answer = OipResponse(self.model, self.version, tensors, requested.id, self.parameters)
        return self.write(answer, sections, requested.typed)

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """A part of a stream, in JSON. Raises BadRequest for binary outputs: their header describes one whole body."""
        result = self.encode(value, item, context)
        if any(name == HEADER_LENGTH for name, _ in result.headers or ()):
            raise BadRequest("the model streams its response, which requires JSON outputs")
        return result

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """One response: the outputs of all parts, concatenated along axis 0. Raises BadOutput if they differ."""
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
        answers = [self.read_part(part) for part in parts]
        first = answers[0][0]
        sections: list[bytes | memoryview] = []
        for position, tensor in enumerate(first.outputs):
            same = [(a.outputs[position], split[position]) for a, split in answers if position < len(a.outputs)]
            key = _key(tensor)
            if len(same) != len(answers) or any(_key(t) != key for t, _ in same):
                raise BadOutput(f"output '{tensor.name}' differs between the parts of a split request")
            tensor.shape = [sum(t.shape[0] for t, _ in same), *tensor.shape[1:]]
            if tensor.binary_bytes is None:
                flat = b",".join(inner for t, _ in same if (inner := bytes(t.data)[1:-1]))
                tensor.data = Raw(b"[" + flat + b"]")
            else:
                sections += [data for _, data in same if data is not None]
                tensor.parameters = TensorParameters(binary_data_size=sum(t.binary_bytes or 0 for t, _ in same))
        return self.write(first, sections, parts[0].content_type == TYPED)

    # ---- the form of the messages

    def came_late(self, item: Item) -> bool:
        """Whether the server process could not read the parameters of a request."""
        return False

    def context_of(self, request: OipRequest) -> OipContext:
        binary = request.parameters is not None and bool(request.parameters.binary_data_output)
        if not request.outputs:
            return OipContext(request.id, None, binary)
        selected = []
        for output in request.outputs:
            asked = output.parameters or _NO_PARAMETERS
            own = binary if asked.binary_data is None else asked.binary_data
            shared = asked if is_shared(asked, f"output '{output.name[:100]}'") else None
            selected.append(Selection(output.name, own, asked.classification, shared))
        return OipContext(request.id, selected, binary)

    def write(self, answer: OipResponse, sections: Sequence[bytes | memoryview], typed: bool) -> ItemResult:
        """The response with the bytes of its binary outputs. See `OipContext` for `typed`."""
        if all(tensor.binary_bytes is None for tensor in answer.outputs):
            return ItemResult(body=msgspec.json.encode(answer), content_type=JSON)
        head = write_head(answer)
        headers = [(HEADER_LENGTH, str(len(head)))]
        return ItemResult(body=b"".join([head, *sections]), content_type=BYTES, headers=headers)

    def read_part(self, part: ItemResult) -> tuple[OipResponse, list[memoryview | None]]:
        """What `write` wrote."""
        body = memoryview(part.body)
        length = next((int(value) for name, value in part.headers or () if name == HEADER_LENGTH), len(body))
        answer = msgspec.json.decode(body[:length], type=OipResponse)
        return answer, split_sections(answer.outputs, body[length:], "output", BadOutput)


def is_shared(place: SharedTensor | None, what: str) -> TypeGuard[SharedTensor]:
    """Whether a tensor is in shared memory. Raises BadRequest for a place without a region."""
    if place is None or place.shared_memory_region is not None:
        return place is not None
    if place.shared_memory_byte_size is not None or place.shared_memory_offset:
        raise BadRequest(f"{what}: found a place in shared memory without the parameter shared_memory_region")
    return False


def _shared_input(tensor: Tensor, place: SharedTensor) -> memoryview:
    """The bytes of an input in shared memory. Raises BadRequest."""
    what, size = f"input '{tensor.name[:100]}'", place.shared_memory_byte_size
    if tensor.data is not _NO_DATA or tensor.binary_bytes is not None:
        raise BadRequest(f"{what}: found data and parameters.shared_memory_region; send one of them")
    check_form(what, tensor.datatype, tensor.shape, BadRequest)
    needed = None if tensor.datatype == "BYTES" else math.prod(tensor.shape) * SIZES[tensor.datatype]
    if size is None or needed not in (None, size):
        raise BadRequest(f"{what}: shared_memory_byte_size is {size}, but shape and datatype need {needed or 'it'}")
    return read_region(what, place.shared_memory_region or "", place.shared_memory_offset, size)


def _shared_output(name: str, data: bytes | memoryview, place: SharedTensor, item: Item) -> TensorParameters:
    """Writes an output to shared memory. Raises BadRequest."""
    what, size = f"output '{name[:100]}'", place.shared_memory_byte_size
    if item.stop >= 0:
        raise BadRequest(f"{what}: it goes to shared memory, so the request may have max_batch_size rows at most")
    if size is None or len(data) > size:
        raise BadRequest(f"{what}: it has {len(data)} bytes, but shared_memory_byte_size is {size}")
    region, offset = place.shared_memory_region, place.shared_memory_offset
    write_region(what, region or "", offset, data)
    return TensorParameters(region, len(data), offset)


def named_outputs(value: Any) -> dict[str, Any]:
    """Output name -> value for a result of the model. Raises BadOutput."""
    if value is None:
        raise BadOutput("the model returned None for this item; return an array or a dict of name to array")
    return {str(name): one for name, one in value.items()} if isinstance(value, dict) else {"output_0": value}


def _key(tensor: Tensor) -> tuple[str, str, list[int], bool]:
    """The properties of an output that must agree between parts."""
    return tensor.name, tensor.datatype, tensor.shape[1:], tensor.binary_bytes is None
