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

from penstock.client.endpoint import Endpoint, parse_url
from penstock.client.errors import Unreachable
from penstock.errors import ConfigError, ModelNotReady
from penstock.perf.bench.ask import reach
from penstock.perf.bench.catalog import Protocol, check_torchserve, described, kind_of, models_of
from penstock.perf.bench.listening import listeners_beside, process_at
from penstock.perf.bench.redact import redacted
from penstock.perf.bench.server import ServerProcess
from penstock.plugins import is_whole_file
from penstock.types import TensorSpec

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
    reach(found)
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
