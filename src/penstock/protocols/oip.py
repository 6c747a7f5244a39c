"""The Open Inference Protocol v2, with the extension for binary tensors: what requests and answers say, and its codec.

Tensors stand in the JSON, or in the bytes behind it: `parameters.binary_data_size` of a tensor says how many are its
own. A request asks for binary outputs one by one (`parameters.binary_data` of an output) or for all of them
(`parameters.binary_data_output`); whether its own inputs are binary has nothing to do with it.

Source: the Open Inference Protocol's REST API, and Triton's binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.errors import BadOutput, BadRequest
from penstock.protocols.bodies import decode_json
from penstock.protocols.native import BYTES, JSON, encode_response
from penstock.protocols.oip_tensors import (
    MAX_DIMS,
    Error,
    check_form,
    from_bytes,
    from_json,
    output_array,
    to_bytes,
    to_json,
)
from penstock.types import Headers, Item, ItemResult, ModelMetadata, Response

if TYPE_CHECKING:
    import numpy as np

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
HEADER_BYTES: Final = 64 * 1024  # most of the JSON before binary tensors: the front process reads it for the rows
ALIGNMENT: Final = 64  # the first binary tensor of what we write begins at a multiple of it: the JSON ends in spaces
_HEADER_NAME: Final = HEADER_LENGTH.lower().encode()
_NO_DATA: Final = Raw(b"")


class TensorParameters(Struct, omit_defaults=True):
    """Of a tensor: how many bytes behind the JSON are its own; None: its data stand in the JSON."""

    binary_data_size: Annotated[int, Meta(ge=0)] | None = None


class Tensor(Struct, omit_defaults=True):
    """An input of a request, or an output of an answer."""

    name: str
    shape: list[int]
    datatype: str
    data: Raw = _NO_DATA
    parameters: TensorParameters | None = None

    @property
    def binary_bytes(self) -> int | None:
        """Its size behind the JSON; None where it stands in it."""
        return None if self.parameters is None else self.parameters.binary_data_size


class OutputParameters(Struct, omit_defaults=True):
    """Of an output that is asked for."""

    binary_data: bool | None = None


class Wish(Struct, omit_defaults=True):
    """An output that is asked for."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(Struct, omit_defaults=True):
    """Of a request. `binary_data_output`: of all outputs that do not say otherwise."""

    binary_data_output: bool | None = None


class Request(Struct, omit_defaults=True):
    """The JSON of a request; what else is in it is ignored."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[Wish] | None = None
    parameters: RequestParameters | None = None


class Answer(Struct, omit_defaults=True):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None


class Context(Struct):
    """What `encode` must know of the request: its id, the outputs that it wants (None: all), and whether in binary."""

    id: str | None = None
    outputs: list[tuple[str, bool]] | None = None
    binary: bool = False


def header_length(headers: Headers | None) -> int | None:
    """Bytes of the JSON at the start of a body, as its header says; None without one. Raises BadRequest."""
    for name, value in headers or ():
        if len(name) == len(_HEADER_NAME) and name.lower() == _HEADER_NAME:
            return parse_length(value)
    return None


def parse_length(value: bytes) -> int:
    """The value of the header. Raises BadRequest."""
    if value.isdigit() and len(value) < 10 and 1 <= (length := int(value)) <= HEADER_BYTES:
        return length
    raise BadRequest(
        f"header {HEADER_LENGTH} must be a whole number from 1 to {HEADER_BYTES}, the bytes of the JSON before the"
        f" tensors, found '{value[:40].decode('latin-1')}'"
    )


def cut(tensors: Sequence[Tensor], rest: memoryview, kind: str, error: Error) -> list[memoryview | None]:
    """The bytes of each tensor, None where it stands in the JSON: slices that exactly fill `rest`. Raises `error`."""
    found: list[memoryview | None] = []
    at = 0
    for tensor in tensors:
        size = tensor.binary_bytes
        if size is None:
            found.append(None)
            continue
        if size > len(rest) - at:
            raise error(
                f"{kind} '{tensor.name[:100]}': binary_data_size is {size}, and {len(rest) - at} bytes are left behind"
                " the JSON"
            )
        found.append(rest[at : at + size])
        at += size
    if at != len(rest):
        raise error(f"{len(rest)} bytes stand behind the JSON, and the binary_data_size of every {kind} sum up to {at}")
    return found


def array_of_tensor(
    tensor: Tensor, data: memoryview | None, kind: str, least_rows: int, error: Error
) -> np.ndarray[Any, Any]:
    """The tensor as an array, from the JSON or from its bytes. Raises `error`."""
    what = f"{kind} '{tensor.name[:100]}'"
    check_form(what, tensor.datatype, tensor.shape, least_rows, error)
    if data is None:
        if tensor.data is _NO_DATA:
            raise error(f"{what}: missing required field `data`, and no parameters.binary_data_size is given")
        return from_json(what, tensor.datatype, tensor.shape, tensor.data, error)
    if tensor.data is not _NO_DATA:
        raise error(f"{what}: both `data` and parameters.binary_data_size are given")
    return from_bytes(what, tensor.datatype, tensor.shape, data, error)


def write_head(message: Request | Answer) -> bytes:
    """The JSON before binary tensors, as long as a multiple of `ALIGNMENT`."""
    head = msgspec.json.encode(message)
    return head + b" " * (-len(head) % ALIGNMENT)


def _written(answer: Answer, sections: Sequence[bytes | memoryview]) -> ItemResult:
    if all(tensor.binary_bytes is None for tensor in answer.outputs):
        return ItemResult(body=msgspec.json.encode(answer), content_type=JSON)
    head = write_head(answer)
    headers = [(HEADER_LENGTH, str(len(head)))]
    return ItemResult(body=b"".join([head, *sections]), content_type=BYTES, headers=headers)


def is_binary(result: ItemResult) -> bool:
    """Whether an answer has tensors behind its JSON: its headers say where, so that it cannot be a part of a stream."""
    return any(name == HEADER_LENGTH for name, _ in result.headers or ())


class OipCodec:
    """What the codecs of `/v2/models/{m}/infer` share. With `metadata`, requests are checked against its inputs."""

    def __init__(self, model: str, version: str, metadata: ModelMetadata | None = None) -> None:
        self.model = model
        self.version = version
        known = metadata or ModelMetadata(model, version)
        self.inputs = {spec.name: spec for spec in known.inputs}
        self.outputs = {spec.name: spec.datatype for spec in known.outputs}
        revision = known.parameters.get("revision")
        self.parameters = None if revision is None else {"revision": revision}

    # ---- requests

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """The JSON of a body, and the bytes behind it. Raises BadRequest."""
        raise NotImplementedError

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], Context]:
        """Input name -> array `[rows, ...]`; only rows [start, stop) for a part of a split request."""
        head, rest = self.head_of(item)
        request: Request = decode_json(head, Request)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for tensor, data in zip(request.inputs, cut(request.inputs, rest, "input", BadRequest), strict=True):
            if tensor.name in arrays:
                raise BadRequest(f"input '{tensor.name[:100]}' is given twice")
            self._check(tensor)
            arrays[tensor.name] = array_of_tensor(tensor, data, "input", 1, BadRequest)
        return self._rows(arrays, item), _context(request)

    def _rows(self, arrays: dict[str, np.ndarray[Any, Any]], item: Item) -> dict[str, np.ndarray[Any, Any]]:
        """The rows that are this item's own. Raises BadRequest when the inputs do not belong together."""
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
        fits = len(shape) == len(spec.shape) and all(
            w in (-1, f) for w, f in zip(spec.shape[1:], shape[1:], strict=True)
        )
        if not fits:  # axis 0 is rows: any number of them
            wanted = [-1, *spec.shape[1:]]
            raise BadRequest(f"input '{spec.name}': shape must be {wanted} (-1 is any size), found {shape[:MAX_DIMS]}")

    def _check_set(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if not arrays:
            raise BadRequest("inputs is empty, expected at least one tensor")
        needed = [name for name, spec in self.inputs.items() if not spec.optional]
        missing = [name for name in needed if name not in arrays]
        if missing:
            raise BadRequest(f"input '{missing[0]}' is missing; the model needs {', '.join(needed)}")
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"'{name[:100]}' {n}" for name, n in list(rows.items())[:4])
            raise BadRequest(f"inputs must all have the same number of rows (axis 0), found {told}")

    # ---- answers

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """A dict of name to array, or one array ("output_0"), as a response. BadRequest for an output it has not."""
        if isinstance(value, Response):
            return encode_response(value)
        outputs = named_outputs(value)
        wanted: Context = context or Context()
        wishes = wanted.outputs
        if wishes is None:
            wishes = [(name, wanted.binary) for name in outputs]
        tensors, sections = [], []
        for name, binary in wishes:
            if name not in outputs:
                raise BadRequest(
                    f"unknown output '{name[:100]}' was asked for; the model returned {', '.join(outputs)}"
                )
            datatype, array = output_array(name, outputs[name], self.outputs.get(name))
            tensor = Tensor(name, list(array.shape), datatype)
            if binary:
                sections.append(to_bytes(name, datatype, array))
                tensor.parameters = TensorParameters(len(sections[-1]))
            else:
                tensor.data = to_json(name, datatype, array)
            tensors.append(tensor)
        return _written(Answer(self.model, self.version, tensors, wanted.id, self.parameters), sections)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The rows of all parts in one answer, put end to end along axis 0. Raises BadOutput when they do not fit."""
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
        answers = [_parted(part) for part in parts]
        first = answers[0][0]
        sections: list[bytes | memoryview] = []
        for position, tensor in enumerate(first.outputs):
            same = [(a.outputs[position], cuts[position]) for a, cuts in answers if position < len(a.outputs)]
            key = _key(tensor)
            if len(same) != len(answers) or any(_key(t) != key for t, _ in same):
                raise BadOutput(f"output '{tensor.name}' differs between the parts of a split request")
            tensor.shape = [sum(t.shape[0] for t, _ in same), *tensor.shape[1:]]
            if tensor.binary_bytes is None:
                flat = b",".join(inner for t, _ in same if (inner := bytes(t.data)[1:-1]))
                tensor.data = Raw(b"[" + flat + b"]")
            else:
                sections += [data for _, data in same if data is not None]
                tensor.parameters = TensorParameters(sum(t.binary_bytes or 0 for t, _ in same))
        return _written(first, sections)


def named_outputs(value: Any) -> dict[str, Any]:
    """What a model returned by the names of its outputs. Raises BadOutput."""
    if value is None:
        raise BadOutput("the model returned None for this item; return an array or a dict of name to array")
    return {str(name): one for name, one in value.items()} if isinstance(value, dict) else {"output_0": value}


def _context(request: Request) -> Context:
    binary = request.parameters is not None and bool(request.parameters.binary_data_output)
    if not request.outputs:
        return Context(request.id, None, binary)
    wishes = []
    for wish in request.outputs:
        own = wish.parameters.binary_data if wish.parameters is not None else None
        wishes.append((wish.name, binary if own is None else own))
    return Context(request.id, wishes, binary)


def _key(tensor: Tensor) -> tuple[str, str, list[int], bool]:
    """What must be the same in every part of an answer."""
    return tensor.name, tensor.datatype, tensor.shape[1:], tensor.binary_bytes is None


def _parted(part: ItemResult) -> tuple[Answer, list[memoryview | None]]:
    body = memoryview(part.body)
    length = next((int(value) for name, value in part.headers or () if name == HEADER_LENGTH), len(body))
    answer = msgspec.json.decode(body[:length], type=Answer)
    return answer, cut(answer.outputs, body[length:], "output", BadOutput)
