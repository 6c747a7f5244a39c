"""The one table of routes, for the listener, the ASGI app and the OpenAPI page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import unquote

import msgspec

from penstock._version import __version__
from penstock.core.contracts import Backend
from penstock.errors import BadRequest, DeadlineExceeded
from penstock.serving.http.answers import (
    JSON,
    ExpectationFailed,
    MethodNotAllowed,
    NotImplementedHere,
    PostOnly,
    RouteNotFound,
    UnsupportedType,
)
from penstock.serving.http.auth import check_token
from penstock.serving.http.openapi import openapi_body
from penstock.serving.http.repeats import parse_key
from penstock.serving.http.table import Table, remember
from penstock.serving.http.template import Route, Template
from penstock.serving.protocols import oip_json
from penstock.serving.protocols.oip import parse_length
from penstock.types import ItemResult

SPECIAL_NAMES: Final = frozenset(
    {
        b"accept",
        b"authorization",
        b"connection",
        b"content-encoding",
        b"expect",
        b"idempotency-key",
        b"inference-header-content-length",
        b"transfer-encoding",
        b"x-deadline-ms",
        b"x-priority",
        b"x-request-id",
    }
)
CONTINUE: Final = b"100-continue"
CHUNKED: Final = b"chunked"
_ORIGIN = re.compile(rb"^https?://[^/]+", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def _json(body: bytes, status: int = 200) -> ItemResult:
    return ItemResult(body=body, content_type=JSON, status=status)


def _server(backend: Backend, route: Route) -> ItemResult:
    return _json(oip_json.server_body(__version__))


def _live(backend: Backend, route: Route) -> ItemResult:
    return _json(b'{"live":true}')


def _ready(backend: Backend, route: Route) -> ItemResult:
    return _json(b'{"ready":true}') if backend.ready() else _json(b'{"ready":false}', 503)


def _ping(backend: Backend, route: Route) -> ItemResult:
    return _json(b'{"status":"Healthy"}') if backend.ready() else _json(b'{"status":"Unhealthy"}', 503)


def _model_ready(backend: Backend, route: Route) -> ItemResult:
    ready = backend.model_ready(route.model, route.version)
    return _json(msgspec.json.encode({"name": route.model, "ready": ready}), 200 if ready else 503)


def _metadata(backend: Backend, route: Route) -> ItemResult:
    return _json(oip_json.metadata_body(*backend.metadata(route.model, route.version)))


def _openapi(backend: Backend, route: Route) -> ItemResult:
    return _json(openapi_body(backend, __version__, TEMPLATES))


def _oip(path: str, summary: str, answer: Callable[[Backend, Route], ItemResult], open: bool = False) -> Template:
    return Template(path, summary, answer=answer, open=open, error_body=oip_json.error_body)


def _infer(path: str) -> Template:
    return Template(path, "Infer by the Open Inference Protocol", codec="oip_json", error_body=oip_json.error_body)


TEMPLATES: Final = (
    Template("/predictions/{model}", "Predict one item", codec="native"),
    Template("/predictions/{model}/{version}", "Predict one item", codec="native"),
    _infer("/v2/models/{model}/infer"),
    _infer("/v2/models/{model}/versions/{version}/infer"),
    _oip("/v2", "Name and version of the server", _server),
    _oip("/v2/health/live", "Whether the server lives", _live, open=True),
    _oip("/v2/health/ready", "Whether every model can answer", _ready, open=True),
    _oip("/v2/models/{model}", "Inputs and outputs of a model", _metadata),
    _oip("/v2/models/{model}/versions/{version}", "Inputs and outputs of a model", _metadata),
    _oip("/v2/models/{model}/ready", "Whether a model can answer", _model_ready),
    _oip("/v2/models/{model}/versions/{version}/ready", "Whether a model can answer", _model_ready),
    Template("/ping", "Whether every model can answer", answer=_ping, open=True),
    Template("/healthz", "Whether the server lives", answer=_live, open=True),
    Template("/readyz", "Whether every model can answer", answer=_ready, open=True),
    Template("/openapi.json", "This page", answer=_openapi),
)
_TABLE: Final = Table(TEMPLATES)


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """The path and the query of a request target, both raw."""
    path, _, query = target.partition(b"#")[0].partition(b"?")
    if not path.startswith(b"/"):  # as a proxy may send it: http://host/path
        path = _ORIGIN.sub(b"", path)
    return path, query


def resolve(path: bytes) -> Route:
    """The route of a raw (still percent-encoded) path; a query is ignored. Raises RouteNotFound, BadRequest."""
    try:
        raw = split_target(path)[0].decode("ascii")
        found = [unquote(part, errors="strict") for part in raw.split("/")[1:]]
    except UnicodeDecodeError:
        raise BadRequest("the path is not percent-encoded UTF-8") from None
    if len(found) > 1 and found[-1] == "":
        found.pop()  # one slash at the end is forgiven
    for template, names in _TABLE.matches(found):
        return Route(template, names.get("model", ""), names.get("version"))
    raise RouteNotFound("no route has this path; /openapi.json lists them")


def check_method(route: Route, method: bytes) -> None:
    """Raises MethodNotAllowed."""
    if route.template.codec:
        if method != b"POST":
            raise PostOnly("this route takes POST only")
    elif method not in (b"GET", b"HEAD"):
        raise MethodNotAllowed("this route takes GET and HEAD only")


class Router:
    """`resolve` with a memory for the paths that come again and again."""

    def __init__(self) -> None:
        self.known: dict[bytes, Route] = {}

    def resolve(self, path: bytes) -> Route:
        """The route of a raw path. Raises RouteNotFound, BadRequest."""
        route = self.known.get(path)
        if route is None:
            route = resolve(path)
            remember(self.known, path, route)
        return route


def parse_budget(value: bytes) -> float:
    """Seconds of an `x-deadline-ms` header. Raises BadRequest, and DeadlineExceeded when nothing is left of it."""
    try:
        budget_s = float(value) / 1000.0
    except ValueError:
        budget_s = math.nan
    if not math.isfinite(budget_s):
        raise BadRequest("header x-deadline-ms must be a number of milliseconds")
    if budget_s <= 0.0:
        raise DeadlineExceeded("the deadline of the request had passed when it arrived")
    return budget_s


def parse_priority(value: bytes) -> int:
    """Class of an `x-priority` header: 0 is the most urgent. Raises BadRequest."""
    if not value.isdigit() or len(value) > 9:
        raise BadRequest("header x-priority must be a whole number from 0")
    return int(value)


def parse_request_id(value: bytes) -> str:
    """The id if it is up to 128 visible ASCII characters, else "": it is then neither echoed nor logged."""
    return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else ""


def check_framing(special: dict[bytes, bytes]) -> None:
    """Raises ExpectationFailed, NotImplementedHere for what no listener of ours does."""
    if special.get(b"expect", CONTINUE).lower() != CONTINUE:
        raise ExpectationFailed("the only expectation that is met is 100-continue")
    if special.get(b"transfer-encoding", CHUNKED).lower() != CHUNKED:
        raise NotImplementedHere("the only transfer coding that is understood is chunked")


def is_telling(content_type: bytes) -> bool:
    """Whether a content type says how the tensors of a body are to be read; most say nothing that matters."""
    kind = content_type.lower()
    return b"x-npy" in kind or b"pickle" in kind


def tensor_codec(special: dict[bytes, bytes]) -> str:
    """The codec of an Open Inference request that is not plain JSON, else "". Raises BadRequest, UnsupportedType."""
    kind = special.get(b"content-type", b"").lower()
    if b"pickle" in kind:
        raise UnsupportedType("the body is a pickle, which is never loaded here; send JSON, or binary tensors")
    coding = special.get(b"content-encoding", b"identity")
    if coding.lower() != b"identity":
        raise UnsupportedType(f"the body is coded by {coding[:40].decode('latin-1')}; send it as it is")
    length = special.get(b"inference-header-content-length")
    if length is not None:
        parse_length(length)
        return "oip_binary"
    return "oip_npy" if b"x-npy" in kind else ""


class Wishes(Protocol):
    """What the headers of one request may set."""

    codec: str
    key: bytes
    request_id: str
    sse: bool
    plain: bool
    budget_s: float | None
    priority: int


def read_special(wishes: Wishes, route: Route, special: dict[bytes, bytes], tokens: frozenset[bytes]) -> None:
    """Reads the headers of `SPECIAL_NAMES` (keys in lower case) and a content type that `is_telling`; checks the token.

    Raises Unauthorized, BadRequest, UnsupportedType, DeadlineExceeded, NotImplementedHere, ExpectationFailed.
    """
    get = special.get
    wishes.request_id = parse_request_id(get(b"x-request-id", b""))
    wishes.sse = b"text/event-stream" in get(b"accept", b"") and bool(route.template.codec)
    if tokens and not route.template.open:
        check_token(tokens, get(b"authorization"))
    check_framing(special)
    if route.template.codec == "oip_json":
        wishes.codec = tensor_codec(special)
    budget, priority, key = get(b"x-deadline-ms"), get(b"x-priority"), get(b"idempotency-key")
    if key is not None and route.template.codec:
        wishes.key = parse_key(key, get(b"authorization", b""))
    if priority is not None:
        wishes.priority = parse_priority(priority)
    if budget is not None:
        wishes.budget_s = parse_budget(budget)
    if wishes.request_id or wishes.sse or wishes.key or budget is not None or priority is not None:
        wishes.plain = False
