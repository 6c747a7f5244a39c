"""The HTTP server, and the native API flavor: its routes, who may call them, and which headers it reads."""

import math
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.errors import BadRequest, DeadlineExceeded, Forbidden
from penstock.serving.http.auth import OriginPolicy, check_token
from penstock.serving.http.connection import Connection
from penstock.serving.http.context import ApiFlavor, RequestContext
from penstock.serving.http.idempotency import parse_key
from penstock.serving.http.listener import Listener
from penstock.serving.http.openapi import DOCS_ROUTES, openapi_route
from penstock.serving.http.responses import (
    ExpectationFailed,
    MethodNotAllowed,
    NotImplementedHere,
    RequestOptions,
    RouteNotFound,
)
from penstock.serving.http.sockets import SocketServer
from penstock.serving.protocols.bodies import ACCEPT_ENCODING, CONTENT_ENCODING, content_coding
from penstock.serving.protocols.route import HttpRequest, Route, RouteTable, Template, remember
from penstock.serving.protocols.routes import TEMPLATES
from penstock.types import ItemResult

CONTINUE: Final = b"100-continue"
CHUNKED: Final = b"chunked"
_ORIGIN = re.compile(rb"^https?://[^/]+", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class NativeFlavor:
    """Penstock's own routes, with bearer tokens: `templates`, by default the inference API after the `further` routes.

    `policy` judges requests with an `Origin`, and with `check_host` every request except to open routes. Routes with
    a `guard` are always judged; the tokens of `guards` open them, and None closes them.
    """

    context = RequestContext
    no_tls = b""

    def __init__(
        self,
        tokens: frozenset[bytes] = frozenset(),
        templates: Sequence[Template] = (),
        *,
        policy: OriginPolicy | None = None,
        check_host: bool = False,
        further: Sequence[Template] = (),
        guards: Mapping[str, frozenset[bytes] | None] | None = None,
    ) -> None:
        self.known: dict[bytes, Route] = {}
        self._policy = policy or OriginPolicy()
        self._check_host = check_host
        self.set_tokens(tokens, guards)
        self._table = RouteTable(templates) if templates else inference_table(lambda: bool(self._tokens), further)
        self._routes: dict[bytes, Route] = {}  # of all methods

    def set_tokens(self, tokens: frozenset[bytes], guards: Mapping[str, frozenset[bytes] | None] | None = None) -> None:
        """Applies to requests whose head arrives from now on."""
        self.guarded = bool(tokens) or self._check_host
        self._tokens = tokens
        self._guards = guards or {}

    def find(self, context: RequestContext, method: bytes, target: bytes) -> Route:
        """Raises RouteNotFound, BadRequest, MethodNotAllowed."""
        if method == b"OPTIONS" and self._policy.origins:
            context.route = PREFLIGHT
            return PREFLIGHT
        context.route = route = find_route(self._routes, target, self._table)
        check_method(route, method)
        if route.template.codec:
            remember(self.known, target, route)
        elif route.template.answer is not None and not route.template.guard and method == b"GET":
            remember(self.known, b"GET " + target, route)
        elif route.template.guard:
            # here, because `read_head` is not called for every request
            special = {name.lower(): value for name, value in context.headers}
            self._policy.admit(context.headers, special.get(b"origin"), True)
            self.check_guard(route.template.guard, special.get(b"authorization"))
        return route

    def check_guard(self, guard: str, authorization: bytes | None) -> None:
        """Raises Forbidden, Unauthorized. A guard without tokens of its own uses the listener's."""
        tokens = self._guards.get(guard, self._tokens)
        if tokens is None:
            raise Forbidden(f"on a public address this call needs a token: set auth.{guard}_token_file")
        check_token(tokens, authorization)

    def read_head(self, context: RequestContext, special: dict[bytes, bytes]) -> None:
        """Raises Forbidden, Unauthorized, BadRequest, DeadlineExceeded, NotImplementedHere, ExpectationFailed."""
        assert context.route is not None
        origin = special.get(b"origin")
        if origin is not None or self._check_host:
            check_host = self._check_host and not context.route.template.open
            context.cors = self._policy.admit(context.headers, origin, check_host)
            context.plain = context.plain and not context.cors
        read_special(context, context.route, special, frozenset() if context.route.template.guard else self._tokens)


async def _preflight(request: HttpRequest) -> ItemResult:
    """Allows the headers that a web page asks for; without `access-control-allow-origin` the browser still refuses."""
    asked = next((value for name, value in request.headers if name.lower() == b"access-control-request-headers"), b"")
    headers = [("access-control-allow-methods", "DELETE, GET, HEAD, POST, PUT"), ("access-control-max-age", "600")]
    if asked:
        headers.append(("access-control-allow-headers", asked.decode("latin-1")))
    return ItemResult(status=204, headers=headers)


PREFLIGHT: Final = Route(Template("*", "Whether a web page may call", serve=_preflight, open=True))


# ---- routing


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """The path and the query of a request target, both raw."""
    path, _, query = target.partition(b"#")[0].partition(b"?")
    if not path.startswith(b"/"):  # as a proxy may send it: http://host/path
        path = _ORIGIN.sub(b"", path)
    return path, query


def inference_table(guarded: Callable[[], bool], further: Sequence[Template] = (), *, page: bool = True) -> RouteTable:
    """The routes of the inference API, with the `page` /docs or without, after `further` routes that /openapi.json does
    not describe. `guarded`: whether they require a token."""
    routes = (*further, *TEMPLATES, openapi_route(TEMPLATES, guarded), *(DOCS_ROUTES if page else ()))
    return RouteTable(routes, hint="; /openapi.json lists them")


def resolve(path: bytes, table: RouteTable) -> Route:
    """The route of a raw (still percent-encoded) path; a query is ignored. Raises RouteNotFound, BadRequest."""
    try:
        raw = split_target(path)[0].decode("ascii")
        found = [unquote(part, errors="strict") for part in raw.split("/")[1:]]
    except UnicodeDecodeError:
        raise BadRequest("the path is not percent-encoded UTF-8") from None
    if len(found) > 1 and found[-1] == "":
        found.pop()  # one slash at the end is forgiven
    for template, names in table.matches(found):
        return Route(template, names.get("model", template.model), names.get("version"), names)
    raise RouteNotFound("no route has this path" + table.hint)


def check_method(route: Route, method: bytes) -> None:
    """Raises MethodNotAllowed."""
    allowed = route.template.allowed()
    if method.decode("ascii") not in allowed:
        raise MethodNotAllowed.only(*sorted(allowed))


def find_route(known: dict[bytes, Route], path: bytes, table: RouteTable) -> Route:
    """`resolve` with a cache of recent paths."""
    route = known.get(path)
    if route is None:
        route = resolve(path, table)
        remember(known, path, route)
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


def read_common(options: RequestOptions, special: dict[bytes, bytes]) -> None:
    """Reads the headers that mean the same to every listener of ours. Raises ExpectationFailed, NotImplementedHere."""
    if b"traceparent" in special:
        options.traceparent = special[b"traceparent"].decode("latin-1")
    if special.get(b"expect", CONTINUE).lower() != CONTINUE:
        raise ExpectationFailed("the only expectation that is met is 100-continue")
    if special.get(b"transfer-encoding", CHUNKED).lower() != CHUNKED:
        raise NotImplementedHere("the only transfer coding that is understood is chunked")


def read_special(options: RequestOptions, route: Route, special: dict[bytes, bytes], tokens: frozenset[bytes]) -> None:
    """Reads the headers of `SPECIAL_NAMES` (keys in lower case) and the content type; checks the token.

    Raises Unauthorized, BadRequest, UnsupportedType, DeadlineExceeded, NotImplementedHere, ExpectationFailed.
    """
    get = special.get
    options.request_id = parse_request_id(get(b"x-request-id", b""))
    template = route.template  # one whose body names the model has its own streams
    own = template.name_of is not None or template.own_events
    options.sse = b"text/event-stream" in get(b"accept", b"") and bool(template.codec) and not own
    if tokens and not route.template.open:
        check_token(tokens, get(b"authorization"))
    read_common(options, special)
    if template.answer is None:
        options.coding = content_coding(get(CONTENT_ENCODING, b""))
    if route.template.select is not None:
        options.codec, options.head_bytes = route.template.select(special, options.content_type.encode("latin-1"))
    budget, priority, key = get(b"x-deadline-ms"), get(b"x-priority"), get(b"idempotency-key")
    if key is not None and route.template.codec:
        # the stored response has the coding that the first request demanded
        options.key = parse_key(key, b"%b %b" % (get(ACCEPT_ENCODING, b""), get(b"authorization", b"")))
    if priority is not None:
        options.priority = parse_priority(priority)
    if budget is not None:
        options.budget_s = parse_budget(budget)
    if options.request_id or options.sse or options.key or budget is not None or priority is not None:
        options.plain = False


class HttpServer(SocketServer):
    """Serves `backend` over HTTP/1.1 in an API flavor: Penstock's own by default, guarded by `tokens`."""

    def __init__(
        self,
        backend: Backend,
        config: LimitsConfig,
        *,
        tokens: frozenset[bytes] = frozenset(),
        ssl: ssl.SSLContext | None = None,
        flavor: ApiFlavor | None = None,
    ) -> None:
        self.flavor = found = flavor or NativeFlavor(tokens)
        listener = Listener(backend, config)
        super().__init__(listener, lambda: Connection(listener, found), found.no_tls, ssl)
