"""The target of a measurement: a model of a running server, or of one started for the run; checked before the run."""

import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec
import psutil
from msgspec import Struct, structs

from penstock.client.endpoint import Endpoint, Unreachable, parse_url
from penstock.client.response import HttpResponse
from penstock.errors import ConfigError, ModelNotFound, ModelNotReady, PenstockError, Unauthorized, nearest
from penstock.perf.bench.results import redacted
from penstock.perf.bench.server import ServerProcess, check_reachable, fetch
from penstock.plugins import is_whole_file, located
from penstock.types import TensorSpec

Protocol = Literal["native", "torchserve", "oip"]

DEFAULT_URL: Final = "http://127.0.0.1:8080"
_PREDICT: Final = re.compile(r"(.*?)/predictions/([^/]+)(?:/[^/]+)?")
_OIP: Final = re.compile(r"(.*?)/v2/models/([^/]+)(?:/versions/[^/]+)?(/infer)?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADDRESS: Final = re.compile(r"[\w.-]+:\d+(/.*)?")
_FORMS: Final = (
    "a URL such as http://127.0.0.1:8080, something to serve such as app.py:Model or model.onnx, or the name of a model"
    f" at {DEFAULT_URL}"
)
_MOST_LISTENERS: Final = 6  # of one server that are examined
_FETCH_S: Final = 2.0  # a listener of another protocol may never respond
_METRICS: Final = (b"penstock_", b"ts_inference_", b"QueueTime", b"nv_inference_")


class Target(Struct, frozen=True, kw_only=True):
    """One model of one server. `path` is the route of inference requests below the endpoint's prefix.

    `text` is the user's word for it, `inputs` the model's declaration. `metrics` and `management` are None if not
    found. `pids` are the server's processes on this machine, without their children. `server` is the process started
    for the run, if any.
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
        """Where inference requests go, without secrets."""
        return redacted(self.endpoint.url + self.path)


class _TargetOptions(Struct, frozen=True, kw_only=True):
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
    management: bool = False,
) -> Iterator[Target]:
    """The target that `text` names, ready for requests; a server started for it stops with the context. Blocks.

    `text` is a URL of a server or of an inference route, something to serve (`app.py:Model`, `model.onnx`, `x.toml`,
    `model.mar`), or the name of a model at 127.0.0.1:8080. `model` selects one of several. `metrics` is the URL of the
    metrics listener if it cannot be found. `options`, `sets` and `management` apply to a started server. Many
    parameters: each is one option of a command. Raises ConfigError for any other text, Unreachable, ModelNotFound,
    ModelNotReady, Unauthorized, PenstockError for a server that does not start.
    """
    given = _TargetOptions(text=text, protocol=protocol, model=model, token=token, tls=tls)
    watched = None if metrics is None else _metrics_at(metrics, tls)
    if "://" not in text and is_served(text):
        with _server(text, options, sets, management) as server:
            found = _of_server(given, server)
            yield found if watched is None else structs.replace(found, metrics=watched)
        return
    if options or sets:
        raise ConfigError(f"'{text}' is a running server; --option and --set are for a server started for the run")
    found = _of_url(given) if "://" in text else _of_name(given)
    yield _with_processes(found, watched)


def _metrics_at(url: str, tls: ssl.SSLContext | None) -> Endpoint:
    """The listener, also for the URL of its page."""
    found = parse_url(url, tls)
    found = structs.replace(found, prefix=found.prefix.removesuffix("/metrics"))
    check_reachable(found)
    return found


def is_served(text: str) -> bool:
    """Whether a target without a scheme is something to serve rather than the name of a model."""
    if text.endswith((".py", ".mar")) or is_whole_file(text):
        return True
    return bool(text.rpartition(":")[0]) and not _ADDRESS.fullmatch(text)


# ---- servers started for the run


def _server(text: str, options: Sequence[str], sets: Sequence[str], management: bool) -> ServerProcess:
    if text.endswith(".mar"):
        archive = Path(text)
        if not archive.is_file():
            raise ConfigError(f"TARGET '{text}': no such file")
        if options or sets:
            raise ConfigError(f"TARGET '{text}' is served like TorchServe does, without --option and --set")
        if set(archive.name) & set(",="):
            raise ConfigError(f"TARGET '{text}': ',' and '=' separate archives in a list; rename the file")
        name = re.sub(r"[^\w.-]", "_", archive.stem, flags=re.ASCII).lstrip("_.-") or "model"
        words = ["--model-store", str(located(archive).parent), "--models", f"{name}={archive.name}"]
        return ServerProcess(words, verb="torchserve", management=management)
    options = [word for option in options for word in ("--option", option)]
    sets = [word for key in sets for word in ("--set", key)]
    return ServerProcess([text, *options, *sets], management=management)


def _of_server(given: _TargetOptions, server: ServerProcess) -> Target:
    endpoint = parse_url(server.urls["inference"], given.tls)
    addresses = {name: parse_url(server.urls[name], given.tls) for name in ("metrics", "management")}
    try:
        model = _choose(given, model_names(addresses["management"], given.token), endpoint)
        found = _check(given, endpoint, model)
    except ModelNotReady as error:
        raise ModelNotReady(f"{error.message}; the server output:\n{server.output_tail()}") from None
    return structs.replace(found, pids=(server.pid,), server=server, **addresses)


# ---- running servers


def _of_name(given: _TargetOptions) -> Target:
    if not _NAME.fullmatch(given.text):
        hint = f"; did you mean 'http://{given.text}'?" if _ADDRESS.fullmatch(given.text) else ""
        raise ConfigError(f"TARGET '{given.text}' is not known; expected {_FORMS}{hint}")
    try:
        return _check(given, parse_url(DEFAULT_URL), given.model or given.text)
    except Unreachable as error:
        raise Unreachable(
            f"TARGET '{given.text}' was taken as a model name, but no server is there ({error.message}); "
            f"expected {_FORMS}"
        ) from None


def _of_url(given: _TargetOptions) -> Target:
    parts = urlsplit(given.text)
    endpoint = parse_url(parts._replace(query="", fragment="").geturl(), given.tls)
    path, query = endpoint.prefix, f"?{parts.query}" if parts.query else ""
    for route, suffix in ((_PREDICT, ""), (_OIP, "/infer")):
        if match := route.fullmatch(path):
            inner = path.removeprefix(match[1]).removesuffix(suffix) + suffix + query
            return _check(given, structs.replace(endpoint, prefix=match[1]), unquote(match[2]), path=inner)
    if not path or given.model is not None:
        return _check(given, endpoint, given.model)
    root = structs.replace(endpoint, prefix="")  # a route of another kind of server: nothing to check
    check_reachable(root)
    protocol: Protocol = "native" if given.protocol == "auto" else given.protocol
    return Target(text=given.text, endpoint=root, model="", path=path + query, protocol=protocol, token=given.token)


def _with_processes(target: Target, metrics: Endpoint | None) -> Target:
    """The target with its server's processes and listeners on this machine."""
    if not target.endpoint.local:
        return structs.replace(target, metrics=metrics)
    pid = listening_process(target.endpoint.port)
    found, management = find_listeners(target.endpoint, pid, target.token)
    pids = () if pid is None else (pid,)
    return structs.replace(target, pids=pids, metrics=metrics or found, management=management)


def listening_process(port: int) -> int | None:
    """The process that listens on the port; None if it is not visible (another user's, or in a container)."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows other users' connections only to root
        return None
    for connection in found:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return int(connection.pid)
    return None


def find_listeners(endpoint: Endpoint, pid: int | None, token: str | None) -> tuple[Endpoint | None, Endpoint | None]:
    """(metrics listener, management listener) of the server at `endpoint`; None if not found."""
    metrics = management = None
    token = None if pid is None else token  # an unknown process must not receive it
    # No server names its other listeners, so the likely ports are asked for a page that only these listeners have.
    for port in _ports(endpoint.port, pid):
        at = Endpoint(endpoint.host, port, "", endpoint.tls)
        if metrics is None and any(word in _page(at, "/metrics", token) for word in _METRICS):
            metrics = at
        if management is None and b'"models"' in _page(at, "/models", token):
            management = at
    return metrics, management


def _ports(port: int, pid: int | None) -> list[int]:
    """The ports to examine: first the defaults of Penstock and TorchServe, one and two above the inference port."""
    usual = [port + 2, port + 1, port]
    if pid is None:
        return [p for p in usual if p < 65536]
    try:
        process = psutil.Process(pid)
        found = (getattr(process, "net_connections", None) or process.connections)("tcp")  # the name before psutil 6
    except psutil.Error:
        return [port]
    own = {int(c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    return sorted(own, key=lambda p: (p not in usual, p == port, p))[:_MOST_LISTENERS]


def _page(at: Endpoint, path: str, token: str | None) -> bytes:
    try:
        response = fetch(at, "GET", path, token=token, timeout_s=_FETCH_S)
    except (PenstockError, ValueError):
        return b""
    return response.body if response.ok else b""


# ---- the model


def _check(given: _TargetOptions, endpoint: Endpoint, model: str | None, path: str = "") -> Target:
    """The target, after the server reported the model as ready. `model` None: the only one."""
    kind, names = server_kind(endpoint, given.token, given.protocol)
    if model is None:
        model = _choose(given, names, endpoint)
    protocol: Protocol = given.protocol if given.protocol != "auto" else "oip" if path.startswith("/v2/") else kind
    if path and (protocol == "oip") != path.startswith("/v2/"):
        raise ConfigError(f"TARGET '{given.text}' is not a route of --protocol {protocol}; leave one of them out")
    quoted = quote(model, safe="")
    route = f"/v2/models/{quoted}/infer" if protocol == "oip" else f"/predictions/{quoted}"
    found: dict[str, Any] = {}
    if kind == "torchserve":
        _check_torchserve(endpoint, model, given.token)
    else:
        found = _describe(endpoint, model, names, given.token)
    return Target(
        text=given.text,
        endpoint=endpoint,
        model=model,
        path=path or route,
        protocol=protocol,
        token=given.token,
        inputs=_specs(found.get("inputs")),
        parameters=found.get("parameters") or {},
    )


def _choose(given: _TargetOptions, names: list[str] | None, endpoint: Endpoint) -> str:
    """The requested model, else the only one. Raises ConfigError."""
    if given.model is not None:
        return given.model
    if names is not None and len(names) == 1:
        return names[0]
    if names == []:
        raise ModelNotReady(f"{endpoint.url} has no model that is ready")
    there = "does not list its models" if names is None else f"has the models {', '.join(names[:20])}"
    raise ConfigError(f"{endpoint.url} {there}; choose one with --model NAME")


def _specs(found: object) -> tuple[TensorSpec, ...]:
    """The inputs that a model declares; empty if the declaration is not valid."""
    try:
        return msgspec.convert(found or (), tuple[TensorSpec, ...])
    except msgspec.ValidationError:
        return ()


def server_kind(
    endpoint: Endpoint, token: str | None, given: Protocol | Literal["auto"]
) -> tuple[Protocol, list[str] | None]:
    """(kind of server, names of its models if listed). Raises PenstockError for an unknown kind.

    "oip" is a third-party server with the Open Inference Protocol. `given` is the user's choice of protocol.
    """
    response = _authorized(endpoint, "/v2", token)
    page = response.json() if response.ok else None
    name = str(page.get("name", "")) if isinstance(page, dict) else ""
    if name == "penstock":
        return "native", _native_names(endpoint, token)
    if name and name.lower() != "torchserve":
        return "oip", None
    ping = fetch(endpoint, "GET", "/ping", token=token).json()
    if isinstance(ping, dict) and "status" in ping:
        management = _management(endpoint, token)
        return "torchserve", None if management is None else model_names(management, token)
    if given != "auto":
        return given, None
    raise PenstockError(
        f"{endpoint.url} responds, but not like Penstock, TorchServe or the Open Inference Protocol "
        f"(GET /v2: {response.status}); give the whole URL of its inference route"
    )


def _native_names(endpoint: Endpoint, token: str | None) -> list[str] | None:
    """The models that are ready, from the routes in the server's OpenAPI description."""
    page = fetch(endpoint, "GET", "/openapi.json", token=token).json()
    paths = page.get("paths", {}) if isinstance(page, dict) else {}
    start = "/predictions/"
    return sorted(unquote(path.removeprefix(start)) for path in paths if path.startswith(start))


def model_names(management: Endpoint, token: str | None) -> list[str]:
    """The models listed by the management API of Penstock or TorchServe. Raises Unauthorized."""
    page = _authorized(management, "/models", token).json()
    models = page.get("models", []) if isinstance(page, dict) else []
    return sorted({str(each.get("name") or each.get("modelName")) for each in models})


def _describe(endpoint: Endpoint, model: str, names: list[str] | None, token: str | None) -> dict[str, Any]:
    """The server's description of the model. Raises ModelNotFound, ModelNotReady."""
    route = f"/v2/models/{quote(model, safe='')}"
    response = fetch(endpoint, "GET", route, token=token)
    if response.status in (400, 404):
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, names)}")
    ready = fetch(endpoint, "GET", f"{route}/ready", token=token)
    if not ready.ok or response.status == 503:
        raise ModelNotReady(f"model '{model}' of {endpoint.url} is not ready (status {ready.status}); try again later")
    found = response.json()
    return found if response.ok and isinstance(found, dict) else {}


def _check_torchserve(endpoint: Endpoint, model: str, token: str | None) -> None:
    """Raises ModelNotFound or ModelNotReady; without a management API it cannot know."""
    management = _management(endpoint, token)
    if management is None:
        return
    response = fetch(management, "GET", f"/models/{quote(model, safe='')}", token=token)
    if response.status == 404:
        raise ModelNotFound(f"{endpoint.url} has no model '{model}'{_nearest(model, model_names(management, token))}")
    found = response.json()
    if isinstance(found, list) and found and not any(w.get("status") == "READY" for w in found[0].get("workers", [])):
        raise ModelNotReady(f"model '{model}' of {endpoint.url} has no worker that is ready; scale it, or wait")


def _management(endpoint: Endpoint, token: str | None) -> Endpoint | None:
    return find_listeners(endpoint, listening_process(endpoint.port), token)[1] if endpoint.local else None


def _authorized(endpoint: Endpoint, path: str, token: str | None) -> HttpResponse:
    """The response to a GET. Raises Unauthorized."""
    response = fetch(endpoint, "GET", path, token=token)
    if response.status in (401, 403):
        found = "another" if token else "none"
        raise Unauthorized(f"{endpoint.url} wants a token, found {found}; give its file by --token-file")
    return response


def _nearest(model: str, names: list[str] | None) -> str:
    if names is None:
        return ""
    return nearest(model, names) or f"; it has {', '.join(names[:20]) or 'none'}"
