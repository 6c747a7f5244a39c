"""The Context that gives a handler access to its worker and to the requests of a batch, and the request envelopes.

A worker reuses one Context for every batch; handlers may attach attributes to it. Header lookup ignores case, and
headers keep the client's spelling. An envelope converts requests of another format for a handler, and its results
back.
"""

import abc
import copy
import json
import threading
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from penstock.torchserve import sequence_headers


class Context:
    """A worker's context. The parameters are TorchServe's.

    `request_ids` {place in the batch: id} and `request_processor`, one per request, are None while the model loads.
    """

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int | None,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.system_properties = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.metrics = metrics
        self.model_yaml_config = {} if model_yaml_config is None else model_yaml_config
        self.request_ids: dict[int, str] | None = None
        self.request_processor: Any = None  # a list of RequestProcessor
        self.stopping_criteria: Any = None
        self.cl_socket: Any = None  # sends partial responses
        names = (name.decode() for name in sequence_headers())
        self.header_key_sequence_id, self.header_key_sequence_start, self.header_key_sequence_end = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def _request_processor(self) -> Any:
        """An old name of `request_processor`."""
        return self.request_processor

    @_request_processor.setter
    def _request_processor(self, processors: Any) -> None:
        self.request_processor = processors

    # ---- requests; `idx` is the place in the batch

    def get_request_id(self, idx: int = 0) -> str | None:
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        headers: dict[str, Any] = self.request_processor[idx].get_request_properties()
        return headers

    def get_sequence_id(self, idx: int) -> Any:
        return self.get_request_header(idx, self.header_key_sequence_id)

    # ---- responses

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        headers: dict[str, str] = self.request_processor[idx].get_response_headers()
        return headers

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        if self.request_processor is not None and self.request_processor[idx] is not None:
            self.request_processor[idx].report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for processor in self.request_processor:
            processor.report_status(code, reason_phrase=phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()


def context_of(context: Context, i: int) -> Context:
    """A copy of the context for request i alone, at place 0."""
    own = copy.copy(context)
    own.request_processor = [context.request_processor[i]]
    own.request_ids = {0: (context.request_ids or {}).get(i, "")}
    return own


class ThreadsContext(Context):
    """A proxy for one Context per thread, so that concurrent steps of two batches each have their own.

    A thread without a Context of its own, such as a handler's, gets the last one set.
    """

    def __init__(self, context: Context) -> None:
        object.__setattr__(self, "_own", threading.local())
        object.__setattr__(self, "_last", context)

    def become(self, context: Context) -> None:
        """Makes this the proxy of `context` in this thread."""
        object.__setattr__(self, "_last", context)
        object.__getattribute__(self, "_own").context = context

    def __getattribute__(self, name: str) -> Any:
        if name == "become":
            return object.__getattribute__(self, name)
        return getattr(_context_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_context_of(self), name, value)


def _context_of(proxy: ThreadsContext) -> Context:
    own = object.__getattribute__(proxy, "_own")
    found: Context = getattr(own, "context", None) or object.__getattribute__(proxy, "_last")
    return found


class RequestProcessor:
    """The headers of one request, and the headers and status that the handler sets for its response."""

    def __init__(self, request_header: dict[str, Any]) -> None:
        self._request_header = request_header
        self._response_header: dict[str, str] = {}
        self._status_code = 200
        self._reason_phrase: str | None = None

    def get_request_property(self, key: str) -> Any:
        return self.get_request_properties().get(key)

    def get_request_properties(self) -> dict[str, Any]:
        if type(self._request_header) is not HeaderMap:
            self._request_header = HeaderMap(self._request_header)
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        return self._response_header.get(key)


class HeaderMap(dict[str, Any]):
    """Headers by name, in any case; the exact spelling wins."""

    def __missing__(self, key: str) -> Any:
        lower = key.lower() if isinstance(key, str) else key
        for name, value in reversed(self.items()):
            if name.lower() == lower:
                return value
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and self.get(key, self) is not self)


# ---- envelopes


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
