"""The HTTP APIs of the servers that a client talks to: Penstock, TorchServe, and Triton. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from msgspec import Struct

from penstock.client.calls import Call
from penstock.errors import BadRequest, ConfigError, NotSupported, nearest


class ApiCall(Struct, frozen=True):
    """A request of the management or metadata APIs: its response is JSON. `body` is JSON too; None: no body.

    `management`: it goes to the management listener. `key`: the part of the response to return; "" for all of it.
    """

    method: str
    path: str
    body: Any = None
    management: bool = False
    key: str = ""


def path_of(*segments: str | None) -> str:
    """The quoted segments; None is left out. Raises BadRequest for an empty one."""
    if "" in segments:
        raise BadRequest("found an empty name or version of a model, expected text")
    return "".join(f"/{quote(segment, safe='')}" for segment in segments if segment is not None)


class PenstockApi:
    """The API of `penstock serve`, and what the others share with it."""

    name = "penstock"
    server = "Penstock"
    events = True  # streams can be server-sent events
    live, ready = "/healthz", "/readyz"

    def predict(self, model: str, version: str | None) -> str:
        """The path of `predict` and `stream`."""
        return path_of("predictions", model, version)

    def infer(self, model: str, version: str | None) -> str:
        """The path of `infer`."""
        return self.tensors(model, version) + "/infer"

    def tensors(self, model: str, version: str | None) -> str:
        return "/v2" + path_of("models", model, None if version is None else "versions", version)

    def headers(self, call: Call, now: float) -> list[tuple[str, str]]:
        """The headers for the options of a call."""
        return call.native_headers(now)

    def parameters(self, call: Call) -> dict[str, Any]:
        """The parameters of `infer` for the options of a call."""
        return {}

    def model_ready(self, model: str, version: str | None) -> str:
        return self.tensors(model, version) + "/ready"

    def metadata(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", self.tensors(model, version))

    def models(self) -> ApiCall:
        return ApiCall("GET", "/v2/models", key="versions")

    # ---- management

    def load(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, version), dict(keys), True)

    def unload(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("DELETE", path_of("models", model, version), None, True)

    def scale(self, model: str, version: str | None, instances: int) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, version, "scale"), {"instances": instances}, True)

    def set_default(self, model: str, version: str) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, "default"), {"version": version}, True)

    def set_traffic(self, model: str, weights: Mapping[str, float]) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, "traffic"), dict(weights), True)

    def statistics(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", path_of("models", model, version), None, True)

    def lacks(self, operation: str, advice: str) -> NotSupported:
        return NotSupported(f"{self.server} has no {operation}; {advice}")


class TorchServeApi(PenstockApi):
    """The API of TorchServe, and of `penstock torchserve`."""

    name = "torchserve"
    server = "TorchServe"
    events = False
    live = ready = "/ping"

    def tensors(self, model: str, version: str | None) -> str:
        raise self.lacks("binary tensors", "call predict")

    def model_ready(self, model: str, version: str | None) -> str:
        raise self.lacks("readiness of one model", "call metadata, which lists its workers")

    def metadata(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", path_of("models", model, version), None, True)

    def models(self) -> ApiCall:
        return ApiCall("GET", "/models?limit=100", None, True, "models")

    def load(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ApiCall:
        """`POST /models`: `url` is the archive; `initial_workers` is 1 unless given. The archive has the version."""
        given = {"model_name": model, "initial_workers": 1, "synchronous": True, **keys}
        if "url" not in given:
            raise BadRequest("found no url, expected the archive to load, such as url='model.mar'")
        return ApiCall("POST", "/models" + _query(given), None, True)

    def scale(self, model: str, version: str | None, instances: int) -> ApiCall:
        wanted = {"min_worker": instances, "max_worker": instances, "synchronous": True}
        return ApiCall("PUT", path_of("models", model, version) + _query(wanted), None, True)

    def set_default(self, model: str, version: str) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, version, "set-default"), None, True)

    def set_traffic(self, model: str, weights: Mapping[str, float]) -> ApiCall:
        raise self.lacks("split of traffic", "call set_default")

    def statistics(self, model: str, version: str | None) -> ApiCall:
        raise self.lacks("statistics of a model", "read its metrics API")


class TritonApi(PenstockApi):
    """The Open Inference Protocol with Triton's extensions, on one listener."""

    name = "triton"
    server = "The Open Inference Protocol"
    live, ready = "/v2/health/live", "/v2/health/ready"

    def predict(self, model: str, version: str | None) -> str:
        raise self.lacks("predict", "call infer with a dict of arrays")

    def headers(self, call: Call, now: float) -> list[tuple[str, str]]:
        return [("triton-request-id", call.request_id)] if call.request_id else []

    def parameters(self, call: Call) -> dict[str, Any]:
        return call.triton_parameters()

    def models(self) -> ApiCall:
        return ApiCall("POST", "/v2/repository/index", {})

    def load(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ApiCall:
        """`keys` are parameters of the load request, such as `config`."""
        return ApiCall("POST", "/v2/repository" + path_of("models", model, "load"), _parameters(keys))

    def unload(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("POST", "/v2/repository" + path_of("models", model, "unload"), {})

    def scale(self, model: str, version: str | None, instances: int) -> ApiCall:
        raise self.lacks("scaling of a model", "load it with another instance_group")

    def set_default(self, model: str, version: str) -> ApiCall:
        raise self.lacks("default version", "load the model with another version_policy")

    def set_traffic(self, model: str, weights: Mapping[str, float]) -> ApiCall:
        raise self.lacks("split of traffic", "name the version in each request")

    def statistics(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", self.tensors(model, version) + "/stats", key="model_stats")


def _parameters(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": dict(keys)} if keys else {}


def _query(values: Mapping[str, Any]) -> str:
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return "?" + urlencode(shown)


APIS: Final = {api.name: api for api in (PenstockApi(), TorchServeApi(), TritonApi())}


def find_api(protocol: str) -> PenstockApi:
    """Raises ConfigError."""
    if protocol not in APIS:
        raise ConfigError(f"protocol is '{protocol}', expected one of {', '.join(APIS)}{nearest(protocol, APIS)}")
    return APIS[protocol]
