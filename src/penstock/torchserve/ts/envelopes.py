"""Request envelopes: they convert requests of another format for a handler, and its results back."""

import abc
import json
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from penstock.torchserve.ts.context import context_of


class BaseEnvelope(abc.ABC):
    """Wraps a handler's `handle`: `parse_input` converts its data, `format_output` its results."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        """The handler's responses in the envelope's format. Empty data (the initializing call) passes through."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results else results

    @abc.abstractmethod
    def parse_input(self, data: Any) -> Any:
        """The handler's data from `[{"body" or field: value}]`."""

    @abc.abstractmethod
    def format_output(self, data: Any) -> Any:
        """The responses from the handler's results."""


class BodyEnvelope(BaseEnvelope):
    """The handler gets a list of bodies; its results stay unchanged."""

    def parse_input(self, data: Any) -> Any:
        return [_body_of(row) for row in data]

    def format_output(self, data: Any) -> Any:
        return data


class JSONEnvelope(BaseEnvelope):
    """TensorFlow Serving's row format: {"instances": [...]} and {"predictions": [...]}.

    The handler gets the instances of all requests in one list; each request gets its own predictions back.
    {"b64": text}, as an instance or as a column of one, becomes bytes.
    """

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._lengths: list[int] = []

    def parse_input(self, data: Any) -> Any:
        requests = [_instances(row) for row in data]
        self._lengths = [len(rows) for rows in requests]
        return [row for rows in requests for row in rows]

    def format_output(self, data: Any) -> Any:
        responses, start = [], 0
        for length in self._lengths:
            responses.append(json.dumps({"predictions": data[start : start + length]}))
            start += length
        return responses


class _PerRequest(BaseEnvelope):
    """Calls the handler once for each request of a batch, with a context of its own: its inputs are a batch already."""

    def handle(self, data: Any, context: Any) -> Any:
        if not data or len(data) == 1:
            return super().handle(data, context)
        responses = []
        for i, row in enumerate(data):
            responses += super().handle([row], context_of(context, i))
        return responses


class KServeEnvelope(_PerRequest):
    """KServe's V1 protocol: {"instances": [...]} and {"predictions" or "explanations": [...]}.

    The handler gets the instances of one request, and all its results are that request's.
    """

    def parse_input(self, data: Any) -> Any:
        return _json_body_of(data[0]).get("instances")

    def format_output(self, data: Any) -> Any:
        explain = bool(self.context) and self.context.get_request_header(0, "explain") == "True"
        return [{"explanations" if explain else "predictions": data}]


class KServev2Envelope(_PerRequest):
    """KServe's V2 protocol in TorchServe's variant: {"id", "inputs": [...]} and {"id", ..., "outputs": [...]}.

    The handler gets the inputs of one request, `[{name, shape, datatype, data}]`, with `data` nested to
    its shape; for BYTES it is the first element. The results become flat outputs with the names of the inputs.
    """

    def parse_input(self, data: Any) -> Any:
        import numpy as np

        body = _json_body_of(data[0])
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
        elif hasattr(self.context, "input_request_id"):  # left by a failed request
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
    import numpy as np

    flat = np.array(values).flatten()
    datatype = "BYTES" if flat.dtype.kind in "UO" else flat.dtype.name.upper().replace("FLOAT", "FP")
    return {"name": name, "datatype": datatype, "data": flat.tolist(), "shape": list(flat.shape)}


def _body_of(row: Any) -> Any:
    """The field "data" of a request, otherwise its body."""
    return row.get("data") or row.get("body")


def _json_body_of(row: Any) -> Any:
    body = _body_of(row)
    return json.loads(body) if isinstance(body, (bytes, bytearray)) else body


def _instances(request: Any) -> Any:
    rows = (_body_of(request) or request)["instances"]
    if rows and isinstance(rows[0], dict):
        rows = [_decoded(row) for row in rows]
    return rows


def _decoded(row: dict[str, Any]) -> Any:
    if list(row) == ["b64"]:
        return b64decode(row["b64"])
    return {k: b64decode(v["b64"]) if isinstance(v, dict) and list(v) == ["b64"] else v for k, v in row.items()}
