"""What a server says of itself: of which kind it is, which models it has, and whether one is ready."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote, unquote

from penstock.client.endpoint import Endpoint
from penstock.errors import ModelNotFound, ModelNotReady, PenstockError, Unauthorized, nearest
from penstock.perf.bench.ask import Reply, ask
from penstock.perf.bench.listening import listeners_beside, process_at

Protocol = Literal["native", "torchserve", "oip"]


def kind_of(
    endpoint: Endpoint, token: str | None, said: Protocol | Literal["auto"]
) -> tuple[Protocol, list[str] | None]:
    """(which server it is, the names of its models where it lists them). Raises PenstockError for one that is neither.

    "oip" is a server of somebody else's that speaks the Open Inference Protocol. `said` is what the user takes it for.
    """
    reply = _asked(endpoint, "/v2", token)
    page = reply.json() if reply.ok else None
    name = str(page.get("name", "")) if isinstance(page, dict) else ""
    if name == "penstock":
        return "native", _native_names(endpoint, token)
    if name and name.lower() != "torchserve":
        return "oip", None
    ping = ask(endpoint, "GET", "/ping", token=token).json()
    if isinstance(ping, dict) and "status" in ping:
        management = _management(endpoint, token)
        return "torchserve", None if management is None else models_of(management, token)
    if said != "auto":
        return said, None
    raise PenstockError(
        f"{endpoint.url} answers, but neither as Penstock, nor as TorchServe, nor by the Open Inference Protocol"
        f" (GET /v2: {reply.status}); give the whole URL of its inference route"
    )


def _native_names(endpoint: Endpoint, token: str | None) -> list[str] | None:
    """Of the models that are ready: the routes of the server's own description."""
    page = ask(endpoint, "GET", "/openapi.json", token=token).json()
    paths = page.get("paths", {}) if isinstance(page, dict) else {}
    start = "/predictions/"
    return sorted(unquote(path.removeprefix(start)) for path in paths if path.startswith(start))


def models_of(management: Endpoint, token: str | None) -> list[str]:
    """The names of the models, of either management API. Raises Unauthorized."""
    page = _asked(management, "/models", token).json()
    models = page.get("models", []) if isinstance(page, dict) else []
    return sorted({str(each.get("name") or each.get("modelName")) for each in models})


def described(endpoint: Endpoint, model: str, names: list[str] | None, token: str | None) -> dict[str, Any]:
    """What the server says of the model. Raises ModelNotFound, ModelNotReady."""
    route = f"/v2/models/{quote(model, safe='')}"
    reply = ask(endpoint, "GET", route, token=token)
    if reply.status in (400, 404):
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, names)}")
    ready = ask(endpoint, "GET", f"{route}/ready", token=token)
    if not ready.ok or reply.status == 503:
        raise ModelNotReady(f"model '{model}' of {endpoint.url} is not ready (status {ready.status}); try again later")
    said = reply.json()
    return said if reply.ok and isinstance(said, dict) else {}


def check_torchserve(endpoint: Endpoint, model: str, token: str | None) -> None:
    """Raises ModelNotFound, ModelNotReady; nothing where no management API is found."""
    management = _management(endpoint, token)
    if management is None:
        return
    reply = ask(management, "GET", f"/models/{quote(model, safe='')}", token=token)
    if reply.status == 404:
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, models_of(management, token))}")
    said = reply.json()
    if isinstance(said, list) and said and not any(w.get("status") == "READY" for w in said[0].get("workers", [])):
        raise ModelNotReady(
            f"model '{model}' of {endpoint.url} has no worker that is ready; scale it, or try again later"
        )


def _management(endpoint: Endpoint, token: str | None) -> Endpoint | None:
    """The management API of a TorchServe of this machine."""
    return listeners_beside(endpoint, process_at(endpoint.port), token)[1] if endpoint.local else None


def _asked(endpoint: Endpoint, path: str, token: str | None) -> Reply:
    """Raises Unauthorized."""
    reply = ask(endpoint, "GET", path, token=token)
    if reply.status in (401, 403):
        raise Unauthorized(
            f"{endpoint.url} wants a token, found {'another' if token else 'none'}; give its file by --token-file"
        )
    return reply


def _nearest(model: str, names: list[str] | None) -> str:
    if names is None:
        return ""
    return nearest(model, names) or f"; it has {', '.join(names[:20]) or 'none'}"
