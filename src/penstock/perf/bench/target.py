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
import psutil
from msgspec import Struct

from penstock.client.endpoint import Endpoint, parse_url
from penstock.client.errors import Unreachable
from penstock.errors import ConfigError, ModelNotFound, ModelNotReady, PenstockError, Unauthorized, nearest
from penstock.perf.bench.origin import redacted
from penstock.perf.bench.server import Reply, ServerProcess, check_reachable, fetch
from penstock.plugins import is_whole_file
from penstock.types import TensorSpec

_MOST = 6  # listeners of one server that are looked at
_ASK_S = 2.0
_METRICS = (b"penstock_", b"ts_inference_", b"QueueTime", b"nv_inference_")


def process_at(port: int) -> int | None:
    """The process that listens at the port; None where it cannot be seen (another user's, or in a container)."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows only root those of others
        return None
    for connection in found:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return int(connection.pid)
    return None


def listeners_beside(endpoint: Endpoint, pid: int | None, token: str | None) -> tuple[Endpoint | None, Endpoint | None]:
    """(the listener of metrics, that of management) of the server at `endpoint`; None for what is not found.

    Where Penstock and TorchServe have them by default is looked at first: one and two ports on.
    """
    metrics = management = None
    token = None if pid is None else token  # whoever listens there may not be the one it is for
    for port in _ports(endpoint.port, pid):
        at = Endpoint(endpoint.host, port, "", endpoint.tls)
        if metrics is None and any(word in _body(at, "/metrics", token) for word in _METRICS):
            metrics = at
        if management is None and b'"models"' in _body(at, "/models", token):
            management = at
    return metrics, management


def _ports(port: int, pid: int | None) -> list[int]:
    usual = [port + 2, port + 1, port]
    if pid is None:
        return [p for p in usual if p < 65536]
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return [port]
    own = {int(c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    return sorted(own, key=lambda p: (p not in usual, p == port, p))[:_MOST]


def _body(at: Endpoint, path: str, token: str | None) -> bytes:
    try:
        reply = fetch(at, "GET", path, token=token, timeout_s=_ASK_S)
    except (PenstockError, ValueError):
        return b""
    return reply.body if reply.ok else b""


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
    ping = fetch(endpoint, "GET", "/ping", token=token).json()
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
    page = fetch(endpoint, "GET", "/openapi.json", token=token).json()
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
    reply = fetch(endpoint, "GET", route, token=token)
    if reply.status in (400, 404):
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, names)}")
    ready = fetch(endpoint, "GET", f"{route}/ready", token=token)
    if not ready.ok or reply.status == 503:
        raise ModelNotReady(f"model '{model}' of {endpoint.url} is not ready (status {ready.status}); try again later")
    said = reply.json()
    return said if reply.ok and isinstance(said, dict) else {}


def check_torchserve(endpoint: Endpoint, model: str, token: str | None) -> None:
    """Raises ModelNotFound, ModelNotReady; nothing where no management API is found."""
    management = _management(endpoint, token)
    if management is None:
        return
    reply = fetch(management, "GET", f"/models/{quote(model, safe='')}", token=token)
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
    reply = fetch(endpoint, "GET", path, token=token)
    if reply.status in (401, 403):
        raise Unauthorized(
            f"{endpoint.url} wants a token, found {'another' if token else 'none'}; give its file by --token-file"
        )
    return reply


def _nearest(model: str, names: list[str] | None) -> str:
    if names is None:
        return ""
    return nearest(model, names) or f"; it has {', '.join(names[:20]) or 'none'}"


DEFAULT_URL: Final = "http://127.0.0.1:8080"
_PREDICT: Final = re.compile(r"(.*?)/predictions/([^/]+)(?:/[^/]+)?")
_OIP: Final = re.compile(r"(.*?)/v2/models/([^/]+)(?:/versions/[^/]+)?(/infer)?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADDRESS: Final = re.compile(r"[\w.-]+:\d+(/.*)?")
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
        """Where inference requests go, as it may be told."""
        return redacted(self.endpoint.url + self.path)


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
    watched = None if metrics is None else _metrics_at(metrics, tls)
    if "://" not in text and is_served(text):
        with _server(text, options, sets, flags, management) as server:
            found = _of_server(asked, server)
            yield found if watched is None else msgspec.structs.replace(found, metrics=watched)
        return
    if options or sets or flags:
        raise ConfigError(f"'{text}' is a server that runs: --option and --set are for what is served for the run")
    found = _of_url(asked) if "://" in text else _of_name(asked)
    yield _with_processes(found, watched)


def _metrics_at(url: str, tls: ssl.SSLContext | None) -> Endpoint:
    """The listener, also when the URL is that of its page."""
    found = parse_url(url, tls)
    found = msgspec.structs.replace(found, prefix=found.prefix.removesuffix("/metrics"))
    check_reachable(found)
    return found


def is_served(text: str) -> bool:
    """Whether a target without a scheme is something to serve, and no name of a model."""
    if text.endswith((".py", ".mar")) or is_whole_file(text):
        return True
    return bool(text.rpartition(":")[0]) and not _ADDRESS.fullmatch(text)


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
        if set(archive.name) & set(",="):
            raise ConfigError(f"TARGET '{text}': a list of archives has ',' and '=' between them; rename the file")
        name = re.sub(r"[^\w.-]", "_", archive.stem, flags=re.ASCII).lstrip("_.-") or "model"
        words = ["--model-store", str(archive.resolve().parent), "--models", f"{name}={archive.name}"]
        return ServerProcess(words, verb="torchserve", management=management)
    words = [text, *flags]
    words += [word for option in options for word in ("--option", option)]
    words += [word for key in sets for word in ("--set", key)]
    return ServerProcess(words, management=management)


def _of_server(asked: _Asked, server: ServerProcess) -> Target:
    endpoint = parse_url(server.urls["inference"], asked.tls)
    addresses = {name: parse_url(server.urls[name], asked.tls) for name in ("metrics", "management")}
    try:
        named = _chosen(asked, models_of(addresses["management"], asked.token), endpoint)
        found = _checked(asked, endpoint, named)
    except ModelNotReady as error:
        raise ModelNotReady(f"{error.message}; the server said:\n{server.last_words()}") from None
    return msgspec.structs.replace(found, pids=(server.pid,), server=server, **addresses)


# ---- what runs already


def _of_name(asked: _Asked) -> Target:
    if not _NAME.fullmatch(asked.text):
        hint = f"; did you mean 'http://{asked.text}'?" if _ADDRESS.fullmatch(asked.text) else ""
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
        check_reachable(root)
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
    kind, names = kind_of(endpoint, asked.token, asked.protocol)
    if model is None:
        model = _chosen(asked, names, endpoint)
    protocol: Protocol = asked.protocol if asked.protocol != "auto" else _spoken(path, kind)
    if path and (protocol == "oip") != path.startswith("/v2/"):
        raise ConfigError(f"TARGET '{asked.text}' is no route of --protocol {protocol}; leave out the one or the other")
    quoted = quote(model, safe="")
    routes = {"native": f"/predictions/{quoted}", "oip": f"/v2/models/{quoted}/infer"}
    found: dict[str, Any] = {}
    if kind == "torchserve":
        check_torchserve(endpoint, model, asked.token)
    else:
        found = described(endpoint, model, names, asked.token)
    return Target(
        text=asked.text,
        endpoint=endpoint,
        model=model,
        path=path or routes.get(protocol, routes["native"]),
        protocol=protocol,
        token=asked.token,
        inputs=_specs(found.get("inputs")),
        parameters=found.get("parameters") or {},
    )


def _spoken(path: str, kind: Protocol) -> Protocol:
    return "oip" if path.startswith("/v2/") else kind


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


def _specs(found: object) -> tuple[TensorSpec, ...]:
    """The inputs as a model declares them; empty for what is no list of such."""
    try:
        return msgspec.convert(found or (), tuple[TensorSpec, ...])
    except msgspec.ValidationError:
        return ()
