"""What a line of the table of routes says, what a path makes of it, and what its function is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Struct, field
from msgspec.structs import force_setattr

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.protocols import native, oip_json
from penstock.types import Headers, ItemResult


class HttpRequest(Struct):
    """A request as the function of a route sees it: the whole body, at most `limits.max_body_bytes`.

    `path` is raw, with the query; `query` is decoded, every key with its values in their order; `names` is what stands
    in the place of the `{name}` of the template, decoded. A form's body is not looked into.
    """

    method: str
    path: str
    query: dict[str, list[str]] = field(default_factory=dict)
    headers: Headers = field(default_factory=list)
    content_type: str = ""
    body: bytes = b""
    names: dict[str, str] = field(default_factory=dict)


class Template(Struct, frozen=True):
    """A line of the table: with `codec` an inference route, else `answer` is called, or `serve` with the whole body.

    `serve` runs in a task of its own; what it raises is answered as an error. It goes on when the client leaves: a
    change that was begun is made. `path` may hold `{name}` for a segment, `{name}:verb` for one that ends so, and, as
    its last segment, `{name...}` for one or more.
    """

    path: str
    summary: str
    codec: str = ""
    answer: Callable[[Backend, Route], ItemResult] | None = None
    open: bool = False  # needs no token
    error_body: Callable[[PenstockError], bytes] = native.error_body
    serve: Callable[[HttpRequest], Awaitable[ItemResult]] | None = None
    methods: frozenset[str] | None = None  # None: any, or those of the face
    headers: Headers = field(default_factory=list)  # that the item of an inference route carries beside the client's
    guard: str = ""  # whose token opens it, in a dialect that has several
    query: bool = False  # the item of an inference route carries the query, as the header `:query`


class Route(Struct, frozen=True):
    """A template with the names that the path gave; `headers` are those that its item carries beside the client's."""

    template: Template
    model: str = ""
    version: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    headers: Headers = field(default_factory=list)
    takes_body: bool = False  # else only a small one is read, and forgotten

    def __post_init__(self) -> None:
        """`takes_body` follows from the template; it is kept because every request asks for it."""
        force_setattr(self, "takes_body", bool(self.template.codec) or self.template.serve is not None)


def error_body_of(route: Route | None, target: bytes) -> Callable[[PenstockError], bytes]:
    """How the answer tells an error; where there is no route, as its neighbours do, whose clients read it alike."""
    if route is not None:
        return route.template.error_body
    return oip_json.error_body if target.startswith(b"/v2/") else native.error_body
