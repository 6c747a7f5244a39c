"""TorchServe's inference service: predictions, in one piece or in parts, and the health of the server.

A client's metadata and deadline do not reach the handler; a request whose client has left is not run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from penstock.core.contracts import Backend
from penstock.torchserve.grpc.calling import model_of, parts, whole
from penstock.torchserve.grpc.errors import Code, Refusal
from penstock.torchserve.grpc.messages import INFERENCE, message
from penstock.torchserve.http.exchange import new_id
from penstock.torchserve.protocol.api import Administration, json_text
from penstock.types import Item

SERVICE: Final = f"{INFERENCE}.InferenceAPIsService"
CODEC: Final = "torchserve_inputs"

_Response: Final = message(f"{INFERENCE}.PredictionResponse")
_Health: Final = message(f"{INFERENCE}.TorchServeHealthResponse")
_encode = msgspec.msgpack.Encoder().encode


class Inference:
    """The functions of the service, by the names of its calls."""

    def __init__(self, backend: Backend, administration: Administration) -> None:
        self._backend = backend
        self._administration = administration

    async def Ping(self, request: Any) -> Any:
        """The text that `GET /ping` answers."""
        status = "Healthy" if self._administration.healthy() else "Unhealthy"
        return _Health(health=json_text({"status": status}))

    async def Predictions(self, request: Any) -> Any:
        """The answer as a whole, though the handler sent it in parts."""
        return _Response(prediction=await whole(self._backend, *_model(request), _item(request)))

    async def StreamPredictions(self, request: Any) -> AsyncIterator[Any]:
        """One message for each part that the handler sends."""
        async with aclosing(parts(self._backend, *_model(request), _item(request))) as found:
            async for part in found:
                yield _Response(prediction=part)

    async def StreamPredictions2(self, requests: Any) -> AsyncIterator[Any]:
        """Is not served."""
        raise Refusal(Code.UNIMPLEMENTED, "sequences are not served: use Predictions or StreamPredictions")
        yield  # what makes it one that answers in parts


def _model(request: Any) -> tuple[str, str | None]:
    return model_of(request.model_name, request.model_version)


def _item(request: Any) -> Item:
    return Item(_encode(dict(request.input)), CODEC, request_id=new_id())
