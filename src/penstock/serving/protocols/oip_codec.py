"""What the codecs of the Open Inference routes share: checks of requests, answers, and one answer from parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import JSON, decode_json
from penstock.serving.protocols.native import BYTES, encode_response
from penstock.serving.protocols.oip import (
    HEADER_LENGTH,
    OipRequest,
    OipResponse,
    Tensor,
    TensorParameters,
    array_of_tensor,
    cut,
    write_head,
)
from penstock.serving.protocols.oip_tensors import MAX_DIMS, output_array, to_bytes, to_json
from penstock.types import Item, ItemResult, ModelMetadata, Response

if TYPE_CHECKING:
    import numpy as np


class OipContext(Struct):
    """What `encode` must know of the request: its id, the outputs that it wants (None: all), and whether in binary."""

    id: str | None = None
    outputs: list[tuple[str, bool]] | None = None
    binary: bool = False


class OipCodec(Codec):
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

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], OipContext]:
        """Input name -> array `[rows, ...]`; only rows [start, stop) for a part of a split request."""
        head, rest = self.head_of(item)
        request: OipRequest = decode_json(head, OipRequest)
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
        wanted: OipContext = context or OipContext()
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
        return _written(OipResponse(self.model, self.version, tensors, wanted.id, self.parameters), sections)

    def encode_part(self, value: Any, item: Item, context: Any) -> ItemResult:
        """A part in JSON. Raises BadRequest for binary outputs: their headers describe one whole body."""
        result = self.encode(value, item, context)
        if any(name == HEADER_LENGTH for name, _ in result.headers or ()):
            raise BadRequest("the model streams its answer, which is possible in JSON only")
        return result

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


def _context(request: OipRequest) -> OipContext:
    binary = request.parameters is not None and bool(request.parameters.binary_data_output)
    if not request.outputs:
        return OipContext(request.id, None, binary)
    wishes = []
    for wish in request.outputs:
        own = wish.parameters.binary_data if wish.parameters is not None else None
        wishes.append((wish.name, binary if own is None else own))
    return OipContext(request.id, wishes, binary)


def _key(tensor: Tensor) -> tuple[str, str, list[int], bool]:
    """What must be the same in every part of an answer."""
    return tensor.name, tensor.datatype, tensor.shape[1:], tensor.binary_bytes is None


def _parted(part: ItemResult) -> tuple[OipResponse, list[memoryview | None]]:
    body = memoryview(part.body)
    length = next((int(value) for name, value in part.headers or () if name == HEADER_LENGTH), len(body))
    answer = msgspec.json.decode(body[:length], type=OipResponse)
    return answer, cut(answer.outputs, body[length:], "output", BadOutput)


def _written(answer: OipResponse, sections: Sequence[bytes | memoryview]) -> ItemResult:
    if all(tensor.binary_bytes is None for tensor in answer.outputs):
        return ItemResult(body=msgspec.json.encode(answer), content_type=JSON)
    head = write_head(answer)
    headers = [(HEADER_LENGTH, str(len(head)))]
    return ItemResult(body=b"".join([head, *sections]), content_type=BYTES, headers=headers)
