"""Request: what a model may know of the request that an item came with."""

# The server process attaches the object that received the request to each item, and nothing else: models that do not
# ask pay for one attribute. A worker whose model asks says so when it is loaded. Its items then travel with the headers
# of their requests, and with what no header says as pseudo-headers (RFC 9113, section 8.3): `:method`, `:path`, and
# Penstock's own `:client`, `:model`, `:version` and `:claims`. No client can send a header whose name begins with ":".

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from penstock.tracing import traceparent_of
from penstock.types import Headers, Item


class RequestHeaders(Mapping[str, str]):
    """The headers of a request by their names, in any case. Several of one name are joined by ", "."""

    def __init__(self, headers: Headers) -> None:
        self._found: dict[str, str] = {}
        for raw, value in headers:
            name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
            self._found[name] = f"{self._found[name]}, {text}" if name in self._found else text

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Request(Struct, frozen=True, dict=True):
    """The request of an item: of HTTP, of gRPC (its metadata are the headers), or a call in Python, without fields.

    `id` is the x-request-id, or "". `target` is what the client asked for: the path and the query, or the path of the
    gRPC method. `client` is the peer's address, "" on a Unix socket: behind a proxy, the proxy's. `path_parameters` are
    `model` and `version`, as far as the path names them. `files` are the file names of a form, by its fields; a client
    chooses them. `claims` are what the application around an `InferenceApp` stored in `scope["state"]["claims"]`.
    `traceparent`: of the span that the server made for the request, if it is traced; not the client's.
    """

    id: str = ""
    method: str = ""
    target: str = ""
    client: str = ""
    path_parameters: dict[str, str] = {}
    raw_headers: Headers = []
    files: dict[str, list[str]] = {}
    claims: dict[str, Any] = {}
    traceparent: str = ""

    @cached_property
    def headers(self) -> RequestHeaders:
        """The headers."""
        return RequestHeaders(self.raw_headers)

    @property
    def path(self) -> str:
        """The path of `target`, still percent-encoded."""
        return self.target.partition("?")[0]

    @cached_property
    def query(self) -> dict[str, list[str]]:
        """The parameters of the query: a name may come several times."""
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True, errors="replace")


def whole_headers(item: Item) -> Headers | None:
    """The headers of an item's request after the pseudo-headers. In the worker the item has them already."""
    own = [] if item.source is None else item.source.pseudo_headers()
    return [*own, *(item.headers or ())] if own else item.headers


def request_of(item: Item) -> Request:
    """The request of an item."""
    headers, pseudo = [], {}
    for name, value in whole_headers(item) or ():
        if name[:1] == b":":
            pseudo[name] = value
        else:
            headers.append((name, value))
    text = {name: value.decode("utf-8", "replace") for name, value in pseudo.items()}
    named = {key: text[f":{key}".encode()] for key in ("model", "version") if f":{key}".encode() in text}
    return Request(
        item.request_id,
        text.get(b":method", ""),
        text.get(b":path", ""),
        text.get(b":client", ""),
        named,
        headers,
        dict(item.files or {}),
        msgspec.json.decode(pseudo.get(b":claims", b"{}")),
        "" if item.trace is None else traceparent_of(item.trace),
    )


def pseudo_headers(
    method: bytes, target: bytes, peer: Any, model: str = "", version: str | None = None, claims: bytes = b""
) -> Headers:
    """The pseudo-headers. `peer`: (address, port, ...) as of a socket, or anything else for none. `claims`: as JSON."""
    client = str(peer[0]) if isinstance(peer, tuple | list) and peer else ""
    found = [(b":method", method), (b":path", target), (b":client", client.encode())]
    found += [(b":model", model.encode())] if model else []
    found += [(b":version", version.encode())] if version else []
    return found + ([(b":claims", claims)] if claims else [])
