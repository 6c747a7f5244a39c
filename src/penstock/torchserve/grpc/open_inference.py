"""The Open Inference service: a request becomes the JSON of KServe's second protocol, and the answer is made of it."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.torchserve.grpc.calling import model_of, whole
from penstock.torchserve.grpc.errors import Code, Refusal, failed, refused
from penstock.torchserve.grpc.messages import OPEN_INFERENCE, message
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.http.exchange import new_id
from penstock.torchserve.protocol.api import Administration
from penstock.types import Item

SERVICE: Final = f"{OPEN_INFERENCE}.GRPCInferenceService"
CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}  # datatype -> the field that holds its values

_Live: Final = message(f"{OPEN_INFERENCE}.ServerLiveResponse")
_Ready: Final = message(f"{OPEN_INFERENCE}.ServerReadyResponse")
_ModelReady: Final = message(f"{OPEN_INFERENCE}.ModelReadyResponse")
_Metadata: Final = message(f"{OPEN_INFERENCE}.ModelMetadataResponse")
_Infer: Final = message(f"{OPEN_INFERENCE}.ModelInferResponse")


class _Output(Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class _Answer(Struct):
    id: str | int
    model_name: str
    model_version: str | int
    outputs: list[_Output]


class OpenInference:
    """The functions of the service, by the names of its calls; ServerMetadata is not served."""

    def __init__(self, backend: Backend, administration: Administration, codec: str) -> None:
        self._backend = backend
        self._administration = administration
        self._codec = codec  # of the HTTP listener: what is JSON there is JSON here

    async def ServerLive(self, request: Any) -> Any:
        """It answers."""
        return _Live(live=True)

    async def ServerReady(self, request: Any) -> Any:
        """It is up, whatever its models are."""
        return _Ready(ready=True)

    async def ModelReady(self, request: Any) -> Any:
        """Whether the version has its workers."""
        return _ModelReady(ready=self._is_ready(*model_of(request.name, request.version, "name")))

    async def ModelMetadata(self, request: Any) -> Any:
        """Name and versions."""
        name, version = model_of(request.name, request.version)
        self._is_ready(name, version)  # raises for one that is not there
        described = await self._administration.describe(name, "all")
        return _Metadata(name=name, versions=[each["modelVersion"] for each in described])

    async def ModelInfer(self, request: Any) -> Any:
        """The handler gets JSON, and gives `{"id", "model_name", "model_version", "outputs"}`."""
        model, version = model_of(request.model_name, request.model_version)
        if request.raw_input_contents:
            raise Refusal(Code.INVALID_ARGUMENT, "found raw_input_contents, expected the contents of each input")
        body = {"id": request.id, "model_name": model, "inputs": [_input(each) for each in request.inputs]}
        item = Item(json.dumps(body).encode(), self._codec, "application/json", request_id=new_id())
        return _answer(await whole(self._backend, model, version, item))

    def _is_ready(self, name: str, version: str | None) -> bool:
        try:
            return self._backend.model_ready(name, version)
        except PenstockError as error:
            raise refused(api_error(error, self._backend, name, version)) from error


def _input(tensor: Any) -> dict[str, Any]:
    found = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
    field = CONTENTS.get(tensor.datatype)
    if field is not None:  # FP16 and BF16 have no field
        values = getattr(tensor.contents, field)
        found["data"] = [base64.b64encode(v).decode() for v in values] if tensor.datatype == "BYTES" else list(values)
    return found


def _answer(body: bytes) -> Any:
    try:
        answer = msgspec.convert(json.loads(body), _Answer)
        response = _Infer(id=str(answer.id), model_name=answer.model_name, model_version=str(answer.model_version))
        for output in answer.outputs:
            tensor = response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
            values = output.data
            if output.datatype == "BYTES":  # as JSON writes them, with their quotes: so clients know it
                values = [json.dumps(value).encode() for value in values]
            getattr(tensor.contents, CONTENTS[output.datatype]).extend(values)
            tensor.contents.SetInParent()
        return response
    except (ValueError, TypeError, RecursionError, KeyError, msgspec.ValidationError) as error:
        text = f"the handler's answer is no Open Inference response: {type(error).__name__}: {str(error)[:200]}"
        raise failed(500, text) from error
