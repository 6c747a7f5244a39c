"""JSON schemas of tensors, and of the Open Inference Protocol's messages, for what a model declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.types import DTYPES, ModelMetadata, TensorSpec

_CELLS: Final = {"BOOL": "boolean", "BYTES": "string", "FP16": "number", "FP32": "number", "FP64": "number"}
_BYTES: Final = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b64": {"type": "string"}}}]}
_FLAG: Final = {"type": "boolean"}
_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_BINARY: Final = {"binary_data_size": _COUNT}


def nested(spec: TensorSpec, axis: int = 0, unbatched: bool = False) -> dict[str, Any]:
    """A tensor as nested lists, from this axis on. Axis 0 is the rows, of any number, unless it is `unbatched`."""
    schema: dict[str, Any] = _BYTES if spec.datatype == "BYTES" else {"type": _CELLS.get(spec.datatype, "integer")}
    for k in range(len(spec.shape) - 1, axis - 1, -1):
        schema = {"type": "array", "items": schema}
        if (k > 0 or unbatched) and (size := spec.shape[k]) >= 0:
            schema |= {"minItems": size, "maxItems": size}
    return schema


def request_content(model: ModelMetadata) -> dict[str, Any]:
    """A request in JSON; the binary forms have no schema."""
    outputs = {"name": _name(model.outputs), "parameters": _parameters(binary_data=_FLAG, classification=_COUNT)}
    parameters = _parameters(
        binary_data_output=_FLAG,
        timeout=_COUNT,
        priority=_COUNT,
        sequence_id={"type": ["integer", "string"]},
        sequence_start=_FLAG,
        sequence_end=_FLAG,
    )
    parameters["additionalProperties"] = model.takes_parameters
    needed = sum(not spec.optional for spec in model.inputs)
    request = {
        "inputs": _tensors(model.inputs, max(1, needed), model.unbatched),
        "id": _TEXT,
        "outputs": {"type": "array", "items": _object(outputs, "name")},
        "parameters": parameters,
    }
    return {"application/json": _object(request, "inputs"), "application/octet-stream": {}, "application/x-npy": {}}


def response_content(model: ModelMetadata) -> dict[str, Any]:
    """A response in JSON; the binary form has no schema."""
    response = {"model_name": _TEXT, "model_version": _TEXT, "id": _TEXT}
    response["outputs"] = _tensors(model.outputs, 0, model.unbatched)
    schema = _object(response, "model_name", "model_version", "outputs")
    return {"application/json": schema, "application/octet-stream": {}}


def _tensors(specs: Sequence[TensorSpec], least: int, unbatched: bool) -> dict[str, Any]:
    """A list of the declared tensors, or of any."""
    any_of = [_tensor(spec, unbatched) for spec in specs]
    items = any_of[0] if len(any_of) == 1 else {"anyOf": any_of} if any_of else _tensor(None)
    return {"type": "array", "items": items, "minItems": least, **({"maxItems": len(any_of)} if any_of else {})}


def _tensor(spec: TensorSpec | None, unbatched: bool = False) -> dict[str, Any]:
    name: dict[str, Any] = _TEXT
    datatype: dict[str, Any] = {"enum": list(DTYPES)}
    shape: dict[str, Any] = {"items": {"type": "integer", "minimum": 0}, "minItems": 1}
    data: dict[str, Any] = {}
    if spec is not None:
        name, datatype = {"const": spec.name}, {"enum": [spec.datatype]}
        sizes = [{"const": n} if n >= 0 and (k or unbatched) else shape["items"] for k, n in enumerate(spec.shape)]
        shape = {"prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)}
        data = {"items": {"type": [_CELLS.get(spec.datatype, "integer"), "array"]}}  # flat, or nested
    properties = {
        "name": name,
        "datatype": datatype,
        "shape": {"type": "array", **shape},
        "data": {"type": "array", **data},
        "parameters": _parameters(**_BINARY),
    }
    return _object(properties, "name", "datatype", "shape")


def _name(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {"enum": [spec.name for spec in specs]} if specs else _TEXT


def _parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}
