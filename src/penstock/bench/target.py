"""What is measured: a model of a server that runs, or of one that is started for it; found and checked before a run."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec
from msgspec import Struct

from penstock.bench.ask import ask, reach
from penstock.bench.listening import listeners_beside, process_at
from penstock.bench.server import ServerProcess
from penstock.client.endpoint import Endpoint, parse_url
from penstock.client.errors import Unreachable
from penstock.errors import ConfigError, ModelNotFound, ModelNotReady, PenstockError, Unauthorized, nearest
from penstock.plugins import is_whole_file
from penstock.types import TensorSpec

Protocol = Literal["native", "torchserve", "oip"]

DEFAULT_URL: Final = "http://127.0.0.1:8080"
_PREDICT: Final = re.compile(r"(.*?)/predictions/([^/]+)(?:/[^/]+)?")
_OIP: Final = re.compile(r"(.*?)/v2/models/([^/]+)(?:/versions/[^/]+)?(/infer)?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FORMS: Final = (
    "a URL such as http://127.0.0.1:8080, something to serve such as app.py:Model or model.onnx, or the name of a model"
    f" at {DEFAULT_URL}"
)


class Target(Struct, frozen=True, kw_only=True):
    """One model of one server. `path` is that of an inference request, below the endpoint's prefix.

    `text` is what the user said, `inputs` what the model declares. `metrics` and `management` are None where they were
    not found. `pids` are the server's processes on this machine, without their children; `server` is there when it was
    started for the run.
    """

    text: str
    endpoint: Endpoint
    model: str
    path: str
    protocol: Protocol = "native"
    metrics: Endpoint | None = None
    management: Endpoint | None = None
    pids: tuple[int, ...] = ()
    token: str | None = None
    inputs: tuple[TensorSpec, ...] = ()
    parameters: dict[str, Any] = {}
    server: ServerProcess | None = None

    @property
    def url(self) -> str:
        """Where inference requests go."""
        return self.endpoint.url + self.path


class _Asked(Struct, frozen=True, kw_only=True):
    """What the user wishes, beside the target itself."""

    text: str
    protocol: Protocol | Literal["auto"]
    model: str | None
    token: str | None
    tls: ssl.SSLContext | None


@contextmanager
def open_target(
    text: str,
    *,
    protocol: Protocol | Literal["auto"] = "auto",
    model: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    metrics: str | None = None,
    options: Sequence[str] = (),
    sets: Sequence[str] = (),
    flags: Sequence[str] = (),
    management: bool = False,
) -> Iterator[Target]:
    """The target that `text` names, ready to answer; what was started for it ends with the context. Blocks.

    `text` is a URL (of a server, or of an inference route), something to serve (`app.py:Model`, `model.onnx`,
    `x.toml`, `model.mar`), or the name of a model at 127.0.0.1:8080. `model` chooses one of several. `metrics` is the
    address of the metrics listener, where it cannot be found. `options`, `sets`, `flags` (more words for `penstock
    serve`) and `management` are for what is served. Raises ConfigError for a text that is none of these, Unreachable,
    ModelNotFound, ModelNotReady, Unauthorized, PenstockError for a server that does not start.
    """
    asked = _Asked(text=text, protocol=protocol, model=model, token=token, tls=tls)
    if "://" not in text and is_served(text):
        with _server(text, options, sets, flags, management) as server:
            found = _of_server(asked, server)
            yield found if metrics is None else msgspec.structs.replace(found, metrics=parse_url(metrics, tls))
        return
    if options or sets or flags:
        raise ConfigError(f"'{text}' is a server that runs: --option and --set are for what is served for the run")
    found = _of_url(asked) if "://" in text else _of_name(asked)
    yield _with_processes(found, None if metrics is None else parse_url(metrics, tls))


def is_served(text: str) -> bool:
    """Whether a target without a scheme is something to serve, and no name of a model."""
    if text.endswith((".py", ".mar")) or is_whole_file(text):
        return True
    before, colon, after = text.rpartition(":")
    return bool(colon and before) and not after.isdigit()


# ---- what is served for the run


def _server(
    text: str, options: Sequence[str], sets: Sequence[str], flags: Sequence[str], management: bool
) -> ServerProcess:
    if text.endswith(".mar"):
        archive = Path(text)
        if not archive.is_file():
            raise ConfigError(f"TARGET '{text}': no such file")
        if options or sets or flags:
            raise ConfigError(f"TARGET '{text}' is served as TorchServe does, which takes no --option and no --set")
        words = ["--model-store", str(archive.resolve().parent), "--models", f"{archive.stem}={archive.name}"]
        return ServerProcess(words, verb="torchserve", management=management)
    words = [text, *flags]
    words += [word for option in options for word in ("--option", option)]
    words += [word for key in sets for word in ("--set", key)]
    return ServerProcess(words, management=management)


def _of_server(asked: _Asked, server: ServerProcess) -> Target:
    endpoint = parse_url(server.urls["inference"], asked.tls)
    addresses = {name: parse_url(server.urls[name], asked.tls) for name in ("metrics", "management")}
    named = _chosen(asked, _models(asked, addresses["management"]), endpoint)
    found = _checked(asked, endpoint, named)
    return msgspec.structs.replace(found, pids=(server.pid,), server=server, **addresses)


# ---- what runs already


def _of_name(asked: _Asked) -> Target:
    if not _NAME.fullmatch(asked.text):
        hint = f"; did you mean 'http://{asked.text}'?" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", asked.text) else ""
        raise ConfigError(f"TARGET '{asked.text}' is not known; expected {_FORMS}{hint}")
    endpoint = parse_url(DEFAULT_URL)
    try:
        return _checked(asked, endpoint, asked.model or asked.text)
    except Unreachable as error:
        raise Unreachable(
            f"TARGET '{asked.text}' was taken for the name of a model, and no server is there to have it"
            f" ({error.message}); expected {_FORMS}"
        ) from None


def _of_url(asked: _Asked) -> Target:
    parts = urlsplit(asked.text)
    endpoint = parse_url(parts._replace(query="", fragment="").geturl(), asked.tls)
    path = endpoint.prefix
    for route, protocol in ((_PREDICT, None), (_OIP, "oip")):
        if match := route.fullmatch(path):
            root = msgspec.structs.replace(endpoint, prefix=match[1])
            inner = path.removeprefix(match[1])
            whole = inner if protocol is None or match[3] else f"{inner}/infer"
            return _checked(asked, root, unquote(match[2]), path=whole + (f"?{parts.query}" if parts.query else ""))
    if path and asked.model is None:  # somebody else's route: what is sent there is the user's affair
        root = msgspec.structs.replace(endpoint, prefix="")
        reach(root)
        protocol_said: Protocol = "native" if asked.protocol == "auto" else asked.protocol
        return Target(
            text=asked.text,
            endpoint=root,
            model="",
            path=path + (f"?{parts.query}" if parts.query else ""),
            protocol=protocol_said,
            token=asked.token,
        )
    return _checked(asked, endpoint, asked.model)


def _with_processes(target: Target, metrics: Endpoint | None) -> Target:
    """The target with what can be found of its server on this machine."""
    if not target.endpoint.local:
        return msgspec.structs.replace(target, metrics=metrics)
    pid = process_at(target.endpoint.port)
    found_metrics, management = listeners_beside(target.endpoint, pid, target.token)
    return msgspec.structs.replace(
        target,
        pids=() if pid is None else (pid,),
        metrics=metrics or found_metrics,
        management=management,
    )


# ---- the model


def _checked(asked: _Asked, endpoint: Endpoint, model: str | None, path: str = "") -> Target:
    """The target, after its server said that the model is there and ready. `model` None: the only one."""
    kind, names = _kind(asked, endpoint)
    if model is None:
        model = _chosen(asked, names, endpoint)
    protocol: Protocol = asked.protocol if asked.protocol != "auto" else _spoken(path, kind)
    quoted = quote(model, safe="")
    routes = {"native": f"/predictions/{quoted}", "oip": f"/v2/models/{quoted}/infer"}
    described: dict[str, Any] = {}
    if kind == "torchserve":
        _check_torchserve(asked, endpoint, model)
    else:
        described = _check_oip(asked, endpoint, model, names)
    return Target(
        text=asked.text,
        endpoint=endpoint,
        model=model,
        path=path or routes.get(protocol, routes["native"]),
        protocol=protocol,
        token=asked.token,
        inputs=_specs(described.get("inputs")),
        parameters=described.get("parameters") or {},
    )


def _spoken(path: str, kind: Protocol) -> Protocol:
    return "oip" if path.startswith("/v2/") else kind


def _kind(asked: _Asked, endpoint: Endpoint) -> tuple[Protocol, list[str] | None]:
    """(which server it is, the names of its models where it lists them). Raises PenstockError for one that is neither.

    "oip" is a server of somebody else's that speaks the Open Inference Protocol.
    """
    reply = ask(endpoint, "GET", "/v2", token=asked.token)
    if reply.status == 401:
        raise Unauthorized(f"{endpoint.url} wants a token, found {'another' if asked.token else 'none'}; give --token")
    said = reply.json() if reply.ok else None
    name = str(said.get("name", "")) if isinstance(said, dict) else ""
    if name == "penstock":
        return "native", _native_names(asked, endpoint)
    if name and name.lower() != "torchserve":
        return "oip", None
    ping = ask(endpoint, "GET", "/ping", token=asked.token).json()
    if isinstance(ping, dict) and "status" in ping:
        return "torchserve", None
    if asked.protocol != "auto":
        return asked.protocol, None
    raise PenstockError(
        f"{endpoint.url} answers, but neither as Penstock, nor as TorchServe, nor by the Open Inference Protocol"
        f" (GET /v2: {reply.status}); give the whole URL of its inference route"
    )


def _native_names(asked: _Asked, endpoint: Endpoint) -> list[str] | None:
    """Of the models that are ready: the routes of the server's own description."""
    page = ask(endpoint, "GET", "/openapi.json", token=asked.token).json()
    paths = page.get("paths", {}) if isinstance(page, dict) else {}
    start = "/predictions/"
    return sorted(unquote(path.removeprefix(start)) for path in paths if path.startswith(start))


def _models(asked: _Asked, management: Endpoint) -> list[str]:
    """The names of the models, of either management API."""
    page = ask(management, "GET", "/models", token=asked.token).json()
    models = page.get("models", []) if isinstance(page, dict) else []
    return sorted({str(each.get("name") or each.get("modelName")) for each in models})


def _chosen(asked: _Asked, names: list[str] | None, endpoint: Endpoint) -> str:
    """The model that was asked for, else the only one. Raises ConfigError."""
    if asked.model is not None:
        return asked.model
    if names is not None and len(names) == 1:
        return names[0]
    there = "does not tell its models" if names is None else f"has the models {', '.join(names[:20])}"
    if names == []:
        raise ModelNotReady(f"{endpoint.url} has no model that is ready")
    raise ConfigError(f"{endpoint.url} {there}; choose one with --model NAME")


def _check_oip(asked: _Asked, endpoint: Endpoint, model: str, names: list[str] | None) -> dict[str, Any]:
    """What the server says of the model. Raises ModelNotFound, ModelNotReady."""
    route = f"/v2/models/{quote(model, safe='')}"
    reply = ask(endpoint, "GET", route, token=asked.token)
    if reply.status in (400, 404):
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, names)}")
    ready = ask(endpoint, "GET", f"{route}/ready", token=asked.token)
    if not ready.ok or reply.status == 503:
        raise ModelNotReady(f"model '{model}' of {endpoint.url} is not ready (status {ready.status}); try again later")
    said = reply.json()
    return said if reply.ok and isinstance(said, dict) else {}


def _check_torchserve(asked: _Asked, endpoint: Endpoint, model: str) -> None:
    """Raises ModelNotFound, ModelNotReady; nothing where no management API is found."""
    management = listeners_beside(endpoint, process_at(endpoint.port), asked.token)[1] if endpoint.local else None
    if management is None:
        return
    reply = ask(management, "GET", f"/models/{quote(model, safe='')}", token=asked.token)
    if reply.status == 404:
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, _models(asked, management))}")
    said = reply.json()
    if isinstance(said, list) and said and not any(w.get("status") == "READY" for w in said[0].get("workers", [])):
        raise ModelNotReady(
            f"model '{model}' of {endpoint.url} has no worker that is ready; scale it, or try again later"
        )


def _nearest(model: str, names: list[str] | None) -> str:
    if names is None:
        return ""
    return nearest(model, names) or f"; it has {', '.join(names[:20]) or 'none'}"


def _specs(found: object) -> tuple[TensorSpec, ...]:
    """The inputs as a model declares them; empty for what is no list of such."""
    try:
        return msgspec.convert(found or (), tuple[TensorSpec, ...])
    except msgspec.ValidationError:
        return ()
