"""How TorchServe's HTTP listeners speak: routing, token checks, response headers, errors and the access log.

Source: what clients of TorchServe 0.12.0 receive.
"""

import logging
import random
from collections.abc import Sequence
from typing import Final, cast
from urllib.parse import parse_qs, unquote

from penstock import errors
from penstock.serving.http import responses
from penstock.serving.http.auth import OriginPolicy
from penstock.serving.http.connection import Connection
from penstock.serving.http.context import RequestContext, ResponseWriter
from penstock.serving.http.server import read_common, split_target
from penstock.serving.protocols.route import Route, RouteTable, Template, remember
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config import ListenerConfig
from penstock.torchserve.protocol.api import JSON, ApiError, Group, error_body, no_worker
from penstock.torchserve.protocol.codec import WORKFLOW
from penstock.types import Headers, ItemResult

access_log = logging.getLogger("ACCESS_LOG")

NO_CACHE: Final = (
    b"Pragma: no-cache\r\n"
    b"Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
OWN_HEADERS: Final = frozenset(
    {
        "cache-control", "connection", "content-length", "content-type", "expires", "pragma", "transfer-encoding",
        "ts_stream_next", "x-request-id",
    }
)  # fmt: skip
KSERVE_PATHS: Final = ("/v1/", "/v2/")
LOGGED_TARGET_BYTES: Final = 80  # keeps a line of the access log below 170 bytes
_NOTHING: Final = Template("", "")
_UNROUTED: Final = Route(_NOTHING)
_random_bits = random.Random().getrandbits  # seeded by the system once: an id need not be hard to guess


def new_id() -> str:
    """A random UUID, version 4, generated without a system call."""
    h = _random_bits(128).to_bytes(16, "big").hex()
    return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[_random_bits(2)]}{h[17:20]}-{h[20:]}"


class GuardedRoute(Route, frozen=True):
    """A route with the group whose token opens it ("" for none), or the error that callers with the token receive."""

    guard: str = ""
    refusal: type[errors.PenstockError] | None = None


class TorchServeFlavor:
    """The API flavor of TorchServe's listeners. The first of `templates` that matches path and method is the route.

    The token is checked before anything else, also before a 404: an unknown path has the guard of the listener's
    first group.
    """

    guarded = True

    def __init__(self, administration: Administrator, config: ListenerConfig, templates: Sequence[Template]) -> None:
        logged = access_log.isEnabledFor(logging.INFO)  # checked once: without the log, requests pay nothing for it
        self.context: type[RequestContext] = LoggedRequest if logged else TorchServeRequest
        self.known: dict[bytes, Route] = {}
        self.fixed = NO_CACHE + _cors(config)
        only_tls = responses.status_line(
            403, "This TorchServe instance only accepts HTTPS requests"
        )  # clients show this line
        self.no_tls = b"%b%bcontent-length: 0\r\nconnection: close\r\n\r\n" % (only_tls, self.fixed)
        self.kserve_errors = config.properties.ts_open_inference_protocol
        self._administration = administration
        self._others: dict[bytes, Route] = {}  # of inference and health, by method and target
        self._table = RouteTable(templates)
        properties = config.properties
        origins = [properties.cors_allowed_origin] if properties.cors_allowed_origin else []
        keys = ("allowed_hosts", "cors_allowed_origin")
        self._policy = OriginPolicy(properties.allowed_hosts, origins, closed=config.open, keys=keys)
        self._check_host = config.open
        guards: tuple[Group, ...] = ("inference", "management")
        self._guard = next((group for group in guards if group in config.groups), "")

    def find(self, context: RequestContext, method: bytes, target: bytes) -> Route:
        """The route. Raises nothing: `read_head` raises the route's error after the token check."""
        key = b"%b %b" % (method, target)
        route = self._others.get(key)
        if route is None:
            route = self._search(method.decode("ascii"), *_segments(target))
            if route.template.codec:
                known, key = (self.known, target) if method == b"POST" else (self._others, key)
                remember(known, key, route)
            elif route.template.answer:
                remember(self.known if method == b"GET" else self._others, key, route)
        context.route = route
        return route

    def _search(self, method: str, segments: list[str], query: bytes) -> GuardedRoute:
        wrong: Template | None = None
        for template, names in self._table.matches(segments):
            if template.methods is None or method in template.methods:
                return _route(template, names, query)
            if method == "OPTIONS" and "model" in names:  # on any inference route, OPTIONS describes the model
                described = ["predictions", names["model"], *([names["version"]] if "version" in names else [])]
                if segments != described:
                    return self._search(method, described, query)
            wrong = wrong or template
        if wrong is not None:
            return GuardedRoute(_NOTHING, guard=wrong.guard, refusal=responses.MethodNotAllowed)
        return GuardedRoute(_NOTHING, guard=self._guard, refusal=responses.RouteNotFound)

    def read_head(self, context: RequestContext, special: dict[bytes, bytes]) -> None:
        """Sets the request's id and the headers of its route.

        Raises Forbidden for a foreign web page or host, ApiError without the token, RouteNotFound, MethodNotAllowed,
        and the errors of `read_common`.
        """
        context.request_id = new_id()
        route = cast(GuardedRoute, context.route)
        origin = special.get(b"origin")
        check_host = self._check_host and route.guard == "management"
        if origin is not None or check_host:
            self._policy.admit(context.headers, origin, check_host)
        if route.guard:
            self._administration.check_token(cast(Group, route.guard), special.get(b"authorization"))
        if route.refusal is not None:
            raise route.refusal("")
        if special:
            read_common(context, special)
        if route.headers:
            context.headers = context.headers + route.headers  # the list belongs to every request with this head


class TorchServeRequest(RequestContext):
    """One request, and its response as TorchServe writes it."""

    def plain_head(self, writer: ResponseWriter, result: ItemResult) -> bytes | None:
        """The head of a successful inference on a connection that stays open: the frequent case."""
        if result.headers:
            return None
        kind = f"content-type: {result.content_type}\r\n".encode("latin-1") if result.content_type else b""
        return b"%b%bx-request-id: %b\r\n%bconnection: keep-alive\r\ncontent-length: " % (
            self._status_line(result),
            kind,
            self._id(),
            cast(TorchServeFlavor, writer.flavor).fixed,
        )

    def head_lines(self, writer: responses.ResponseOutput, result: ItemResult, content_type: str) -> list[bytes]:
        """The head of any other response. Every error closes the connection."""
        self.close = self.close or result.status >= 400
        lines = [self._status_line(result)]
        for name, value in result.headers or ():
            if name.lower() not in OWN_HEADERS:
                lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        if self.started:
            lines.append(b"ts_stream_next: true\r\n")
        if content_type:
            lines.append(f"content-type: {content_type}\r\n".encode("latin-1"))
        lines.append(b"x-request-id: %b\r\n" % self._id())
        lines.append(cast(TorchServeFlavor, writer.flavor).fixed)
        lines.append(b"connection: close\r\n" if self.close else b"connection: keep-alive\r\n")
        return lines

    def failure(self, writer: responses.ResponseOutput, error: errors.PenstockError) -> ItemResult:
        """The error as JSON; 413 has an empty body."""
        route = self.route or _UNROUTED
        found = api_error(error, route.model, route.version)
        reason = responses.REASONS.get(found.status, "")
        if found.status == 413:
            return ItemResult(status=413, reason=reason)
        kserve = route.template.path.startswith(KSERVE_PATHS) and cast(TorchServeFlavor, writer.flavor).kserve_errors
        body = error_body(found.status, found.kind, found.message, kserve=kserve)
        return ItemResult(body=body, content_type=JSON, status=found.status, reason=reason)

    def part_type(self, result: ItemResult) -> str:
        return result.content_type

    def part_data(self, result: ItemResult) -> bytes:
        return bytes(result.body)

    def _id(self) -> bytes:
        if not self.request_id:
            self.request_id = new_id()
        return self.request_id.encode("ascii")

    def _status_line(self, result: ItemResult) -> bytes:
        """A prediction has the handler's reason phrase or none."""
        if result.reason is None and self.route is not None and self.route.template.codec:
            return b"HTTP/1.1 %d \r\n" % result.status
        return responses.status_line(result.status, result.reason)


class LoggedRequest(TorchServeRequest):
    """A request that logs `127.0.0.1:53124 "GET /ping HTTP/1.1" 200 3` after its response; the last number is ms.

    A line has at most 170 bytes.
    """

    def __init__(self, writer: ResponseWriter) -> None:
        super().__init__(writer)
        connection = writer.connection
        assert isinstance(connection, Connection)
        self._began_s = writer.listener.now()
        self._status = 0
        head = connection.head
        if head.url and not head.request_line:
            method = connection.parser.get_method().decode("ascii")
            target = head.url[:LOGGED_TARGET_BYTES].decode("ascii", "backslashreplace")[:LOGGED_TARGET_BYTES]
            head.request_line = f"{method} {target} HTTP/{connection.parser.get_http_version()}"
        self._request_line = head.request_line or "-"
        peer = writer.transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"

    def on_result(self, result: ItemResult) -> None:
        writer = self.writer
        super().on_result(result)
        if writer is not None and self.writer is None:
            took_ms = round(1000 * (writer.listener.now() - self._began_s))
            access_log.info('%s "%s" %d %d', self._peer, self._request_line, self._status, took_ms)

    def plain_head(self, writer: ResponseWriter, result: ItemResult) -> bytes | None:
        self._status = result.status
        return super().plain_head(writer, result)

    def head_lines(self, writer: responses.ResponseOutput, result: ItemResult, content_type: str) -> list[bytes]:
        self._status = result.status
        return super().head_lines(writer, result, content_type)


def _segments(target: bytes) -> tuple[list[str], bytes]:
    """(path segments, raw query). As in TorchServe, an encoded slash separates segments; trailing slashes do not."""
    path, query = split_target(target)
    segments = unquote(path.decode("latin-1"), errors="replace").split("/")[1:]
    while len(segments) > 1 and not segments[-1]:
        segments.pop()
    return segments, query


def _route(template: Template, names: dict[str, str], query: bytes) -> GuardedRoute:
    headers: Headers = list(template.headers)
    if "url_path" in names:
        headers[-1] = (b"url_path", names["url_path"].encode())
    if template.query and query:
        headers.append((b":query", query))
    model = WORKFLOW + names["workflow"] if "workflow" in names else names.get("model", "")
    if template.query and not names:
        model = parse_qs(query.decode("latin-1")).get("model_name", [""])[0]
    return GuardedRoute(template, model, names.get("version"), names, headers, guard=template.guard)


def _cors(config: ListenerConfig) -> bytes:
    p = config.properties
    allowed = {"Origin": p.cors_allowed_origin, "Methods": p.cors_allowed_methods, "Headers": p.cors_allowed_headers}
    lines = [f"Access-Control-Allow-{name}: {value}\r\n" for name, value in allowed.items() if value]
    return "".join(lines).encode("latin-1")


# ---- errors

UNKNOWN_ROUTE: Final = "Requested resource is not found, please refer to API document."
WRONG_METHOD: Final = "Requested method is not allowed, please refer to API document."
NO_HTTP: Final = "Invalid HTTP message."

# class -> (type, status unless the type determines it, text unless the error's own); the nearest ancestor counts
_TABLE: Final[dict[type[errors.PenstockError], tuple[str, int | None, str | None]]] = {
    errors.BadRequest: ("BadRequestException", None, None),
    errors.PayloadTooLarge: ("BadRequestException", 413, None),
    errors.Quarantined: ("BadRequestException", 422, None),
    responses.MalformedHttp: ("BadRequestException", None, NO_HTTP),
    responses.HeadTooLarge: ("BadRequestException", None, NO_HTTP),
    responses.ExpectationFailed: ("BadRequestException", 417, None),
    errors.Forbidden: ("IllegalArgumentException", None, None),
    errors.ModelNotFound: ("ModelNotFoundException", None, None),
    responses.RouteNotFound: ("ResourceNotFoundException", None, UNKNOWN_ROUTE),
    responses.MethodNotAllowed: ("MethodNotAllowedException", None, WRONG_METHOD),
    responses.RequestTimeout: ("RequestTimeoutException", None, None),
    errors.DeadlineExceeded: ("RequestTimeoutException", None, None),
    errors.Conflict: ("ConflictStatusException", None, None),
    errors.SequenceNotFound: ("ServiceUnavailableException", None, None),
    errors.SequenceLost: ("ServiceUnavailableException", None, None),
    errors.WorkerDied: ("InternalServerException", None, "Worker died."),
    errors.PenstockError: ("InternalServerException", None, None),
    responses.NotImplementedHere: ("InternalServerException", 501, None),
    errors.ItemFailed: ("InternalServerException", 503, "Prediction failed"),
    errors.BadOutput: ("InternalServerException", 503, None),
    errors.OutOfMemory: ("InternalServerException", 507, "Out of resources"),
}


def api_error(error: errors.PenstockError, model: str = "", version: str | None = None) -> ApiError:
    """The error that a client of TorchServe receives for a request to this model and version."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (errors.QueueFull, errors.ModelNotReady, errors.Cancelled)) and model:
        return no_worker(model, version)
    if isinstance(error, (errors.QueueFull, errors.ModelNotReady, errors.Cancelled)):
        return ApiError("ServiceUnavailableException", error.message)
    kind, status, text = next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)
    return ApiError(kind, error.message if text is None else text, status=status)
