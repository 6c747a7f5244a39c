"""The routes of the Open Inference Protocol that TorchServe has over REST beside inference."""

from __future__ import annotations

from typing import Any, Final

from penstock._version import __version__
from penstock.serving.http.template import HttpRequest
from penstock.torchserve.http.actions import Action, Serve, answer
from penstock.torchserve.protocol.openapi import Operation
from penstock.types import ItemResult

SERVER: Final = {"name": "Torchserve", "version": __version__, "extenstion": ["kserve", "kubeflow"]}  # sic, on the wire
NO_VERSIONS: Final = {"error": "Model versioning is not yet supported."}


def open_inference_actions() -> tuple[Action, ...]:
    """`/v2`, its health, and the refusal of versions."""
    return (
        _action("/v2", "serverMetadata", "Tells name and version of the server.", SERVER),
        _action("/v2/health/live", "serverLive", "Tells that the server lives.", {"live": True}),
        _action("/v2/health/ready", "serverReady", "Tells that the server is up.", {"ready": True}),
        _action("/v2/models/{model_name}/versions/{rest...}", "modelVersions", "Is not supported.", NO_VERSIONS, 501),
    )


def _action(path: str, name: str, description: str, value: dict[str, Any], status: int = 200) -> Action:
    operation = Operation("GET", path, name, description, answers=((status, description, "object"),))
    return Action(operation, _always(value, status), any_method=True)


def _always(value: dict[str, Any], status: int) -> Serve:
    async def serve(request: HttpRequest) -> ItemResult:
        return answer(value, status)

    return serve
