"""Triton's extension "generate": a plain JSON object, answered with another one, or with server-sent events.

A member with the name of an input becomes its tensor: a scalar is one element, and the elements of a list fill the
declared sizes first, then the last axis of any size. Other members are parameters, and so are the members of
`parameters`. The answer has the outputs by name: one element as a scalar, several as a flat list. A model that declares
no inputs receives the object as it is.

Source: Triton's page of the extension; what it leaves open is as in Triton 2.51.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from penstock.core.arrays import array_of
from penstock.errors import BadRequest
from penstock.serving.protocols.bodies import JSON, decode_json, encode_json
from penstock.serving.protocols.native import encode_response
from penstock.serving.protocols.oip import OipCodec, named_outputs
from penstock.serving.protocols.oip_messages import refusal, unsupported
from penstock.serving.protocols.oip_tensors import flat_schema, output_array, to_json
from penstock.types import Item, ItemResult, Many, ModelMetadata, Parts, Response, TensorSpec, plain_result

if TYPE_CHECKING:
    import numpy as np

EVENTS: Final = "text/event-stream; charset=utf-8"


class GenerateCodec(OipCodec):
    """Codec of `/v2/models/{m}/generate`. The context of `encode` is the id of the request."""

    @staticmethod
    def request_content(model: ModelMetadata) -> dict[str, Any]:
        """The inputs with any parameters; of a model without declared inputs its type."""
        whole = model.schemas.item or {"type": "object"}
        return {JSON: flat_schema(model.inputs) if model.inputs else whole}

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """The outputs, with the name and the version of the model."""
        return {JSON: flat_schema(model.outputs, "model_name", "model_version")}

    # ---- requests

    def decode(self, item: Item) -> tuple[Any, Any]:
        """One item of `Many`, because the parts of a stream are gathered for those; and the id."""
        value, id = self.members_of(item)
        return Many([value]), id

    def members_of(self, item: Item) -> tuple[Any, str]:
        """(input name -> array, or the whole object; the id, "" without one). Raises BadRequest."""
        members = _object(decode_json(item.payload), "the body")
        if not isinstance(id := members.get("id", ""), str):
            raise BadRequest(f"'id' must be a string, found {type(id).__name__}")
        if not self.inputs:
            return members, id
        given = {name: members.pop(name) for name in self.inputs if name in members}
        parameters = {**_object(members.pop("parameters", {}), "'parameters'"), **members}
        for name, value in parameters.items():
            if not isinstance(value, str | int | float):
                raise BadRequest(
                    f"'{name[:100]}' is none of the inputs {', '.join(self.inputs)}, and a parameter must be a string,"
                    f" a number or a boolean, found {type(value).__name__}"
                )
        if self.takes_parameters:
            item.parameters = parameters
        elif self.strict_parameters and (unknown := next((name for name in parameters if name != "id"), None)):
            raise unsupported(unknown) or refusal(unknown, "", f"the model has the inputs {', '.join(self.inputs)}")
        arrays = {name: self._tensor(self.inputs[name], value) for name, value in given.items()}
        return self._rows(arrays, item), id

    def _tensor(self, spec: TensorSpec, value: Any) -> np.ndarray[Any, Any]:
        """The value of an input with the shape that Triton gives it. Raises BadRequest."""
        elements = value if isinstance(value, list) else [value]
        wanted = [*(spec.shape if self.unbatched else (-1, *spec.shape[1:]))]
        rest, extra = divmod(len(elements), math.prod(n for n in wanted if n != -1) or 1)
        shape: list[int] = []
        for size in reversed(wanted):
            shape.insert(0, rest if size == -1 else size)
            rest = 1 if size == -1 else rest
        array = array_of(spec.name, elements, spec.datatype)
        if extra or rest != 1 or array.size != math.prod(shape):
            raise BadRequest(
                f"input '{spec.name}': the shape {wanted} (-1 is any size) needs a flat list that fills it, found"
                f" {len(elements)} elements of {array.size} values"
            )
        return array.reshape(shape)

    # ---- responses

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The only response of the model. Raises BadRequest for a stream of none or several."""
        (result,) = value
        if isinstance(result, Parts):
            if len(result) != 1:
                raise BadRequest(f"the model gave {len(result)} responses, expected one: use generate_stream")
            (result,) = result
        if isinstance(result, Response):
            return encode_response(result)
        return ItemResult(self.answer(result, context), JSON)

    def answer(self, value: Any, id: str) -> bytes:
        """The object of a response, with its members in Triton's order, which is sorted. Raises BadOutput."""
        value = plain_result(value)
        outputs = {"text_output": value} if isinstance(value, str) and not self.outputs else named_outputs(value)
        members = {**(self.parameters or {}), **{name: self._member(name, one) for name, one in outputs.items()}}
        members |= {"model_name": self.model, "model_version": self.version} | ({"id": id} if id else {})
        return msgspec.json.encode(dict(sorted(members.items())))

    def _member(self, name: str, value: Any) -> Raw:
        """An output as JSON: a tensor is flat; what a model without declared tensors returns stays as it is."""
        if not (self.inputs or self.outputs or isinstance(value, bytes) or hasattr(value, "dtype")):
            return Raw(encode_json(value))
        datatype, array = output_array(name, value, self.outputs.get(name))
        cells = to_json(name, datatype, array, self.strict_json)
        return Raw(bytes(cells)[1:-1]) if array.size == 1 else cells


class GenerateStreamCodec(GenerateCodec):
    """Codec of `/v2/models/{m}/generate_stream`: one event for each response of the model."""

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """Events; the data of each is an answer of `generate`."""
        return {EVENTS: {"type": "string"}}

    def decode(self, item: Item) -> tuple[Any, Any]:
        """(input name -> array, or the whole object; the id)."""
        return self.members_of(item)

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The event of a response."""
        return ItemResult(b"data: %b\n\n" % self.answer(value, context), EVENTS)

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """The event of one response of a stream."""
        return self.encode(value, item, context)

    def encode_end(self, item: Item, context: Any) -> ItemResult:
        """No event: the end of the body ends a stream, which may have been empty."""
        return ItemResult(b"", EVENTS)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object, found {type(value).__name__}")
    return value
