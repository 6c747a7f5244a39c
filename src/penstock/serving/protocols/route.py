"""HTTP routes as values: templates, the route table, and the cache of known request targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.contracts import Backend, Ticket
from penstock.errors import PenstockError
from penstock.serving.protocols.bodies import JSON, data_of, free
from penstock.types import Headers, Item, ItemResult, Sink

PAGE_HEADERS: Final = [  # of pages for browsers: nothing comes from other hosts, or runs in the page
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
]
CACHED_PATHS: Final = 1024  # a choice: more than the paths of a server's models
CACHED_PATH_BYTES: Final = 256  # a choice: longer paths are rare, and not worth memory


def error_body(error: PenstockError) -> bytes:
    """`{"error": {"code", "message"}}`; the detail of an error stays inside."""
    return msgspec.json.encode({"error": {"code": error.code, "message": error.message}})


class HttpRequest(Struct):
    """A request as a route's function receives it: the whole body, at most 64 KiB.

    `path` is raw, with the query. `query` is decoded: every key with its values, in order. `names` holds the decoded
    values of the template's `{name}` parts. Form bodies are not parsed.
    """

    method: str
    path: str
    query: dict[str, list[str]] = field(default_factory=dict)
    headers: Headers = field(default_factory=list)
    content_type: str = ""
    body: bytes = b""
    names: dict[str, str] = field(default_factory=dict)


Serve = Callable[[HttpRequest], Awaitable[ItemResult]]
INFER: Final = frozenset({"POST", "PUT"})  # PUT as `curl -T` sends a file
READINESS: Final = (200, 503)  # statuses of routes that report whether something is ready
POST: Final = frozenset({"POST"})
GET: Final = frozenset({"GET", "HEAD"})


class Terms(Struct, frozen=True):
    """Handling options in a request body: its longest wait in the queue in seconds, and its priority class."""

    wait_s: float | None = None
    priority: int | None = None

    def apply(self, item: Item) -> None:
        """Sets them on an item, over the values from headers."""
        item.wait_s = self.wait_s
        if self.priority is not None:
            item.priority = self.priority


class Template(Struct, frozen=True):
    """A line of the route table: with `codec` an inference route, else `answer` is called, or `serve` with the body, or
    `subscribe`.

    `serve` runs in its own task; an exception becomes an error response. The task continues when the client leaves, so
    a change that began is completed. `path` may hold `{name}` for a segment, `{name}:verb` for a segment with that
    suffix, and, as its last segment, `{name...}` for one or more.
    """

    path: str
    summary: str
    codec: str = ""
    model: str = ""  # of an inference route whose path names none
    answer: Callable[[Backend, Route], ItemResult] | None = None
    open: bool = False  # requires no token
    error_body: Callable[[PenstockError], bytes] = error_body
    serve: Serve | None = None
    # begins a stream that ends when the server or the client does
    subscribe: Callable[[Route, Sink], Ticket] | None = None
    methods: frozenset[str] | None = None  # None: any, or the methods of the flavor
    headers: Headers = field(default_factory=list)  # added to the item of an inference route
    guard: str = ""  # the token group that it requires, in a flavor with several
    query: bool = False  # the item of an inference route carries the query, as the header `:query`
    # (headers of `select_headers`, content type) -> the codec of this request, "" for `codec`, and `Item.head_bytes`
    select: Callable[[Mapping[bytes, bytes], bytes], tuple[str, int]] | None = None
    select_headers: tuple[bytes, ...] = ()  # the headers that `select` reads, in lower case
    name_of: Callable[[bytes | memoryview], str] | None = None  # the model that the body of this route names
    own_events: bool = False  # its codec decides on events, whatever is accepted, and its errors are events too
    max_body_bytes: int | None = None  # ... below `limits.max_body_bytes`
    task: str = ""  # ... if a model of this task is loaded, for OpenAPI
    read_terms: Callable[[Item], Terms | None] | None = None  # of the body of an inference request; never raises
    response: Any = None  # of `answer`: the type of its JSON, for OpenAPI
    statuses: tuple[int, ...] = (200,)  # ... and the statuses with which it is sent

    def limit(self, most: int) -> int:
        """The largest body of an inference route, where `most` is `limits.max_body_bytes`."""
        return most if self.max_body_bytes is None else min(self.max_body_bytes, most)

    def allowed(self) -> frozenset[str]:
        """The methods of a native route."""
        return self.methods or (INFER if self.codec else GET)


def methods_route(
    path: str,
    summary: str,
    *,
    guard: str = "",
    error_body: Callable[[PenstockError], bytes] = error_body,
    **functions: Serve,
) -> Template:
    """A path with the function of each method; the function of GET also answers HEAD. See `Template` for the others."""
    if "GET" in functions:
        functions["HEAD"] = functions["GET"]

    async def serve(request: HttpRequest) -> ItemResult:
        return await functions[request.method](request)

    methods = frozenset(functions)
    return Template(path, summary, serve=serve, methods=methods, guard=guard, error_body=error_body)


Read = Callable[[Backend, str, "str | None"], Any]


def json_route(
    path: str,
    summary: str,
    read: Read,
    response: type[Struct],
    *,
    open: bool = False,
    error_body: Callable[[PenstockError], bytes] = error_body,
) -> Template:
    """A GET route that answers with `read(backend, model, version)` as JSON, of the type `response`.

    The status is 503 where the field `ready` is false.
    """

    def answer(backend: Backend, route: Route) -> ItemResult:
        found = read(backend, route.model, route.version)
        return ItemResult(msgspec.json.encode(found), JSON, 200 if getattr(found, "ready", True) else 503)

    statuses = READINESS if "ready" in response.__struct_fields__ else (200,)
    return Template(
        path, summary, answer=answer, open=open, error_body=error_body, response=response, statuses=statuses
    )


class Route(Struct, frozen=True):
    """A template with the names from the path; `headers` are added to its item."""

    template: Template
    model: str = ""
    version: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    headers: Headers = field(default_factory=list)


def name_model(route: Route, payload: Any) -> Route:
    """The route with the model that its path or the body names. Raises BadRequest, and then frees a Buffer."""
    name_of = route.template.name_of
    if name_of is None:
        return route
    try:
        return replace(route, model=name_of(data_of(payload)))
    except PenstockError:
        free(payload)
        raise


class RouteTable:
    """Templates in matching order. `hint` is added to the error of an unknown path."""

    def __init__(self, templates: Iterable[Template], hint: str = "") -> None:
        self.hint = hint
        self.templates = tuple(templates)
        self._rows = [(template, template.path.split("/")[1:]) for template in self.templates]

    def matches(self, segments: list[str]) -> Iterator[tuple[Template, dict[str, str]]]:
        """Every template that matches the decoded segments of a path, with the values of its names."""
        for template, wanted in self._rows:
            names = _match(wanted, segments)
            if names is not None:
                yield template, names


def _match(wanted: list[str], found: list[str]) -> dict[str, str] | None:
    names: dict[str, str] = {}
    if wanted[-1].endswith("...}"):
        if len(found) < len(wanted):
            return None
        names[wanted[-1][1:-4]] = "/".join(found[len(wanted) - 1 :])
        wanted, found = wanted[:-1], found[: len(wanted) - 1]
    elif len(wanted) != len(found):
        return None
    for want, have in zip(wanted, found, strict=True):
        if not want.startswith("{"):
            if want != have:
                return None
            continue
        name, _, verb = want[1:].partition("}")
        value = have.removesuffix(verb)
        if not value or not have.endswith(verb):
            return None
        names[name] = value
    return names


def remember(known: dict[bytes, Route], target: bytes, route: Route) -> None:
    """Caches the route of a request target, unless the target is long; clears a full cache."""
    if len(target) <= CACHED_PATH_BYTES:
        if len(known) >= CACHED_PATHS:
            known.clear()
        known[target] = route
