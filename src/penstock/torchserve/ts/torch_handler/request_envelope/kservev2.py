"""KServe's second protocol, as TorchServe speaks it: {"id", "inputs": [...]} and {"id", ..., "outputs": [...]}."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from penstock.torchserve.ts.torch_handler.request_envelope.base import BaseEnvelope, body_of

_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "object": "BYTES",
}


class KServev2Envelope(BaseEnvelope):
    """The handler sees the inputs of the batch's first request, `[{name, shape, datatype, data}]`.

    `data` is nested to its shape; of BYTES it is the first element. The handler's answers are the outputs, flat, each
    under the name of the input in its place.
    """

    def parse_input(self, data: Any) -> Any:
        body = body_of(data[0])
        if isinstance(body, (bytes, bytearray)):
            body = json.loads(body)
        inputs = body["inputs"]
        for tensor in inputs:
            if tensor["datatype"] == "BYTES":
                tensor["data"] = tensor["data"][0]
            else:
                tensor["data"] = np.array(tensor["data"]).reshape(tuple(tensor["shape"])).tolist()
        self.context.input_names = [tensor["name"] for tensor in inputs]
        request_id = body.get("id")
        if request_id and request_id.strip():
            self.context.input_request_id = request_id
        elif hasattr(self.context, "input_request_id"):  # of a request that failed
            del self.context.input_request_id
        return inputs

    def format_output(self, data: Any) -> Any:
        context = self.context
        if hasattr(context, "input_request_id"):
            request_id = context.input_request_id
            del context.input_request_id
        else:
            request_id = context.get_request_id(0)
        names = context.input_names
        del context.input_names
        model = context.manifest.get("model")
        return [
            {
                "id": request_id,
                "model_name": model.get("modelName"),
                "model_version": model.get("modelVersion"),
                "outputs": [_output(names[i], values) for i, values in enumerate(data)],
            }
        ]


def _output(name: str, values: Any) -> dict[str, Any]:
    flat = np.array(values).flatten()
    datatype = "BYTES" if flat.dtype.kind == "U" else _DATATYPES[str(flat.dtype)]
    return {"name": name, "datatype": datatype, "data": flat.tolist(), "shape": list(flat.shape)}
