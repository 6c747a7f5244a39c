"""The codec of `inference.GRPCInferenceService`: an Open Inference request is a message instead of JSON.

Source: the Open Inference Protocol's gRPC API, and Triton's extensions of it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from penstock.core.columns import RequestPlan, TensorRequest, TensorRows
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.columns import OutputColumn, SharedStack
from penstock.serving.protocols.oip import OipCodec, OipContext, is_steady
from penstock.serving.protocols.oip_messages import (
    TYPED,
    AllParameters,
    InferResponse,
    OipRequest,
    OipResponse,
    Tensor,
    TensorParameters,
    convert_request,
    response_of,
)
from penstock.serving.protocols.oip_protobuf import (
    ID,
    RAW_INPUTS,
    RAW_OUTPUTS,
    SHARED,
    field_of,
    known_head,
    open_inference,
    parse,
    peek_inputs,
    plain,
    read_head,
    set_parameters,
    split_field,
    varint_of,
)
from penstock.serving.protocols.oip_shared import shared_output
from penstock.serving.protocols.oip_tensors import check_form, from_bytes, length_of
from penstock.types import DTYPES, Item, ItemResult, Response, SequenceRequest

RAW: Final = "application/grpc+proto"
# parameters for the server process, and parameters of HTTP; the model has no use for them
_NOT_HERE: Final = {
    "priority", "timeout", "triton_enable_empty_final_response",
    "binary_data", "binary_data_output", "binary_data_size",
}  # fmt: skip
_INFER_RESPONSE: Final = 2  # number of the field in ModelStreamInferResponse
CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}  # datatype -> the field with its values; FP16 and BF16 have none
_CARRIERS: Final = {
    "bool_contents": "bool", "int_contents": "int32", "int64_contents": "int64", "uint_contents": "uint32",
    "uint64_contents": "uint64", "fp32_contents": "float32", "fp64_contents": "float64",
}  # fmt: skip

_protos = open_inference()
_Request: Final = _protos.message("inference.ModelInferRequest")
_Response: Final = _protos.message("inference.ModelInferResponse")
_StreamResponse: Final = _protos.message("inference.ModelStreamInferResponse")


class _GrpcRequest(OipRequest):
    """A request that came as a message. `typed`: its inputs are typed contents."""

    typed: bool = False


class OipGrpcCodec(OipCodec):
    """Codec of ModelInfer and ModelStreamInfer.

    Outputs are raw, which the clients of Triton and KServe read. With `typed_contents` they are typed contents if the
    inputs were, unless one is FP16 or BF16, which have none.
    """

    divisible = True

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key) of a message, see `peek_inputs`; 1 row if there are none, or more than bytes."""
        known = known_head(body)
        try:
            found = peek_inputs(read_head(body).inputs) if known is None else known[0].peeked
        except BadRequest:
            return None
        return found if found is None or 1 <= found[0] <= len(body) else (1, found[1])

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """The sequence that the parameters name. Raises BadRequest."""
        found = read_head(body).parameters
        id = found.get("sequence_id")
        if not id:
            return None
        return SequenceRequest(str(id), bool(found.get("sequence_start")), bool(found.get("sequence_end")))

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """(the message without its id and the bytes of its tensors, the id, the message and where its id ends)."""
        known = known_head(item.payload)
        return None if known is None else (known[1], known[2] or None, (item.payload, known[3]))

    def is_steady(self, item: Item, id: str | None) -> bool:
        """Whether its parameters belong to no single request."""
        return is_steady(self.read(item)[0])

    def plan_of(self, request: TensorRequest, values: Any, item: Item) -> RequestPlan | None:
        """The plan of a request with raw tensors or floats, or all tensors in shared memory."""
        plan, known = super().plan_of(request, values, item), known_head(values[0])
        if plan is None or known is None or type(plan.stack) is SharedStack:
            return plan
        typed = self.context_of(self.read(item)[0], True).typed  # so are its responses
        if typed or [size for _, size in known[0].sections] != [size for _, size in plan.sizes]:
            return None
        plan.sizes, plan.size = known[0].sections, len(values[0]) - values[1]
        return plan

    def response_head(self, columns: list[OutputColumn], rows: int, context: OipContext, has_id: bool) -> list[bytes]:
        """The message before the id of a response, after it, and the bytes before each raw output."""
        message = _Response(model_name=self.model, model_version=self.version)
        before = message.SerializeToString()
        set_parameters(message.parameters, self.parameters or {})
        for column in columns:
            message.outputs.add(name=column.name, datatype=column.datatype, shape=[rows, *column.tail])
        sizes = [0 if column.shared is not None else rows * column.row_bytes for column in columns]
        marks = [bytes([RAW_OUTPUTS << 3 | 2]) + varint_of(size) for size in sizes]
        return [before, message.SerializeToString()[len(before) :], *marks]

    def opening(self, text: bytes) -> tuple[bytes, str, None]:
        """The message up to the bytes of its only output, which `text` is."""
        return text, RAW, None

    def respond(
        self, head: list[bytes], columns: list[OutputColumn], found: TensorRows, id: str | None, item: Item
    ) -> ItemResult:
        """The response with these rows of the columns. Raises BadRequest for a place in shared memory."""
        pieces: list[bytes | memoryview] = [head[0], *(() if id is None else field_of(ID, id.encode())), head[1]]
        for mark, column in zip(head[2:], columns, strict=True):
            section = column.section(found.start, found.rows)
            if column.shared is None:
                pieces += [mark, section]
            else:
                shared_output(column.name, section, column.shared, item)
                pieces.append(mark)
        body = b"".join(pieces)
        return ItemResult(body, RAW)

    def read(self, item: Item) -> tuple[OipRequest, Sequence[memoryview | None]]:
        """The request, and the little-endian bytes of each input. Raises BadRequest."""
        head, raw = split_field(item.payload, RAW_INPUTS)
        message = parse(_Request, head)
        values = _values_of(message)
        request = convert_request(values, _GrpcRequest)
        if self.strict_parameters:
            convert_request(values, AllParameters).check_known(self.takes_parameters)
        if raw and request.typed:
            raise BadRequest("found contents of an input and raw_input_contents; send one of them")
        given = [tensor for tensor in message.inputs if SHARED not in tensor.parameters]
        if raw and len(raw) != len(given):
            raise BadRequest(f"found {len(raw)} raw_input_contents for {len(given)} inputs; send one for each")
        data = iter(raw or [memoryview(_bytes_of(tensor)) for tensor in given])
        sections = [None if SHARED in tensor.parameters else next(data) for tensor in message.inputs]
        for tensor, section in zip(request.inputs, sections, strict=True):
            if section is not None:
                tensor.parameters = tensor.parameters or TensorParameters()
                tensor.parameters.binary_data_size = len(section)
        return request, sections

    def context_of(self, request: OipRequest, binary: bool) -> OipContext:
        context = super().context_of(request, True)
        context.typed = self.typed_contents and isinstance(request, _GrpcRequest) and request.typed
        return context

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The response for a dict of arrays, or one array ("output_0"). Raises BadRequest for an unknown output."""
        if isinstance(value, Response):
            raise BadOutput("the model returned a Response, which has a form in HTTP only; return arrays for gRPC")
        return super().encode(value, item, context or OipContext(binary=True))

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """A part of a stream: a whole response."""
        return self.encode(value, item, context)

    def write(self, answer: OipResponse, sections: Sequence[bytes | memoryview], typed: bool) -> ItemResult:
        """The response as a message. See `OipContext` for `typed`."""
        message = _Response(model_name=answer.model_name, model_version=answer.model_version, id=answer.id or "")
        set_parameters(message.parameters, answer.parameters or {})
        typed = typed and all(tensor.datatype in CONTENTS for tensor in answer.outputs)
        rest = (section for section in sections if len(section))
        raw: list[bytes | memoryview] = []
        for tensor in answer.outputs:
            output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            data = _take(rest, tensor.binary_bytes or 0)
            if not typed:
                raw += field_of(RAW_OUTPUTS, *data)
            elif tensor.binary_bytes is not None:  # not in shared memory
                getattr(output.contents, CONTENTS[tensor.datatype]).extend(_values(tensor, b"".join(data)))
        body = b"".join([message.SerializeToString(), *raw])
        return ItemResult(body=body, content_type=TYPED if typed else RAW)

    def read_part(self, part: ItemResult) -> tuple[OipResponse, list[memoryview | None]]:
        """The response and the sections that `write` encoded."""
        head, raw = split_field(part.body, RAW_OUTPUTS)
        message = _Response.FromString(head)
        sections = raw or [memoryview(_bytes_of(output)) for output in message.outputs]
        outputs = [
            Tensor(each.name, list(each.shape), each.datatype, parameters=TensorParameters(binary_data_size=len(data)))
            for each, data in zip(message.outputs, sections, strict=True)
        ]
        parameters = plain(message.parameters) or None
        answer = OipResponse(message.model_name, message.model_version, outputs, message.id or None, parameters)
        return answer, list(sections)


def _take(sections: Iterator[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    """The next sections, `size` bytes in all: a joined response has one for each part of a split request."""
    found = []
    while size > 0:
        found.append(next(sections))
        size -= len(found[-1])
    return found


def _values_of(message: Any) -> dict[str, Any]:
    """The fields of a request as in JSON, without the data and without the parameters of `_NOT_HERE`."""

    def own(parameters: Any) -> dict[str, Any]:
        return {name: value for name, value in plain(parameters).items() if name not in _NOT_HERE}

    return {
        "inputs": [
            {"name": t.name, "shape": list(t.shape), "datatype": t.datatype, "parameters": own(t.parameters)}
            for t in message.inputs
        ],
        "id": message.id or None,
        "outputs": [{"name": o.name, "parameters": own(o.parameters)} for o in message.outputs] or None,
        "parameters": own(message.parameters),
        "typed": any(tensor.HasField("contents") for tensor in message.inputs),
    }


def _bytes_of(tensor: Any) -> bytes:
    """The typed contents of an input or an output as little-endian bytes. Raises BadRequest."""
    import numpy as np

    what = f"tensor '{tensor.name[:100]}'"
    check_form(what, tensor.datatype, tensor.shape, BadRequest)
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        raise BadRequest(f"{what}: {tensor.datatype} has no typed contents; send raw_input_contents")
    other = next((f.name for f, _ in tensor.contents.ListFields() if f.name != field), None)
    if other is not None:
        raise BadRequest(f"{what}: {tensor.datatype} belongs in {field}, found {other}")
    values = getattr(tensor.contents, field)
    if len(values) != (wanted := math.prod(tensor.shape)):
        raise BadRequest(f"{what}: shape {list(tensor.shape)[:8]} needs {wanted} elements, found {len(values)}")
    if tensor.datatype == "BYTES":
        return b"".join([part for cell in values for part in (length_of(cell), cell)])
    array = np.fromiter(values, _CARRIERS[field], len(values))
    dtype = np.dtype(DTYPES[tensor.datatype])
    if dtype.kind in "iu" and len(array) and not np.can_cast(array.dtype, dtype):
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise BadRequest(f"{what}: a value is not in the range of {tensor.datatype}")
    return array.astype(dtype.newbyteorder("<")).tobytes()


def _values(tensor: Tensor, data: bytes) -> list[Any]:
    """The elements of an output."""
    array = from_bytes("output", tensor.datatype, tensor.shape, memoryview(data), BadOutput)
    return array.ravel().tolist()


# ---- clients


def encode_infer(
    name: tuple[str, str, str],
    inputs: Sequence[tuple[str, str, tuple[int, ...], bytes | bytearray | memoryview]],
    outputs: Sequence[str] | None,
    parameters: dict[str, Any],
) -> bytes:
    """A ModelInferRequest with raw tensors. `name`: model, version and request id; `inputs` as of `encode_request`."""
    message = _Request(model_name=name[0], model_version=name[1], id=name[2])
    set_parameters(message.parameters, parameters)
    raw: list[bytes | memoryview] = []
    for input_name, datatype, shape, data in inputs:
        message.inputs.add(name=input_name, datatype=datatype, shape=shape)
        raw += field_of(RAW_INPUTS, memoryview(data))
    for output in outputs or ():
        message.outputs.add(name=output)
    return b"".join([message.SerializeToString(), *raw])


def decode_infer(body: bytes | memoryview) -> InferResponse:
    """The response in a ModelInferResponse. Arrays are views of the body. Raises BadOutput."""
    try:
        answer, sections = OipGrpcCodec("", "").read_part(ItemResult(body=body))
    except (BadRequest, DecodeError, ValueError):
        raise BadOutput("the response is not a valid inference.ModelInferResponse") from None
    return response_of(answer, sections)


def decode_stream_infer(body: bytes) -> tuple[str, InferResponse]:
    """(error text, response) in a ModelStreamInferResponse. Raises BadOutput."""
    try:
        head, found = split_field(body, _INFER_RESPONSE)
        text = _StreamResponse.FromString(head).error_message
    except (BadRequest, DecodeError):
        raise BadOutput("the response is not a valid inference.ModelStreamInferResponse") from None
    return text, decode_infer(found[-1] if found else b"")
