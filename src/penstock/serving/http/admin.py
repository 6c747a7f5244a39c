"""The management and metrics apps, and the uvicorn that serves them inside our own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.core.contracts import Backend, ManagementBackend
from penstock.errors import BadRequest, PenstockError, nearest
from penstock.serving.http.answers import JSON, MethodNotAllowed, RouteNotFound, error_result
from penstock.serving.http.auth import check_token
from penstock.serving.http.binding import bind_error
from penstock.serving.http.management import Handler, Routes, management_routes
from penstock.serving.protocols import native

MOST_BATCHES: Final = 1000  # of one answer of /debug/batches
GRACE_S: Final = 2  # for answers in flight when an admin listener closes


def admin_app(
    backend: Backend, tokens: frozenset[bytes] = frozenset(), management: ManagementBackend | None = None
) -> Starlette:
    """The management API: see `management_routes`, and GET /ping. Tokens, if any, open all but /ping."""

    async def ping(request: Request) -> Response:
        if backend.ready():
            return Response(b'{"status":"Healthy"}', media_type=JSON)
        return Response(b'{"status":"Unhealthy"}', 503, media_type=JSON)

    routes = {
        path: {method: _guarded(handler, tokens) for method, handler in by_method.items()}
        for path, by_method in management_routes(backend, management).items()
    }
    return _app({**routes, "/ping": {"GET": ping}})


def metrics_app(
    scrape: Callable[[], Awaitable[bytes]],
    batches: Callable[[str | None, int], bytes],
    tokens: frozenset[bytes] = frozenset(),
) -> Starlette:
    """GET /metrics: what `scrape` gives, in the Prometheus text format. GET /debug/batches: the last batches as JSON.

    `batches` is asked with ?model= (None: all models) and ?limit= (1 to 1000, by default 100), newest first.
    """

    async def metrics(request: Request) -> Response:
        check_token(tokens, _authorization(request))
        return Response(await scrape(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def last_batches(request: Request) -> Response:
        check_token(tokens, _authorization(request))
        asked = request.query_params
        unknown = next((key for key in asked if key not in ("model", "limit")), None)
        if unknown is not None:
            raise BadRequest(f"unknown parameter {unknown[:100]!r}{nearest(unknown[:100], ('model', 'limit'))}")
        limit = asked.get("limit", "100")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST_BATCHES:
            raise BadRequest(f"limit is {limit[:100]!r}, expected a whole number from 1 to {MOST_BATCHES}")
        return Response(batches(asked.get("model"), int(limit)), media_type=JSON)

    return _app({"/metrics": {"GET": metrics}, "/debug/batches": {"GET": last_batches}})


def _app(routes: Routes) -> Starlette:
    handlers: dict[Any, Any] = {PenstockError: _error, HTTPException: _http_error}
    return Starlette(
        routes=[Route(path, _ByMethod(table)) for path, table in routes.items()],
        exception_handlers=handlers,
    )


class _ByMethod:
    """An ASGI app over the handlers of one path. It takes every method, so that no other route with this path does."""

    def __init__(self, table: dict[str, Handler]) -> None:
        self._table = table
        self._allow = sorted({*table, "HEAD"} if "GET" in table else table)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        handler = self._table.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            error = MethodNotAllowed(f"this route takes {' and '.join(self._allow)} only")
            error.allow = ", ".join(self._allow)
            raise error
        response = await handler(request)
        await response(scope, receive, send)


def _guarded(handler: Handler, tokens: frozenset[bytes]) -> Handler:
    async def guarded(request: Request) -> Response:
        check_token(tokens, _authorization(request))
        return await handler(request)

    return guarded


def _authorization(request: Request) -> bytes | None:
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


async def _error(request: Request, error: PenstockError) -> Response:
    result = error_result(error, native.error_body)
    return Response(result.body, result.status, dict(result.headers or ()), JSON)


async def _http_error(request: Request, exc: HTTPException) -> Response:
    return await _error(request, RouteNotFound("no route has this path"))


class _Uvicorn(uvicorn.Server):
    """uvicorn as a guest: no signal handlers, no ten ticks a second, and it tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        await self.stop.wait()


class UvicornServer:
    """One ASGI app on one address. `start` binds, `close` ends it; neither touches the process's signals."""

    def __init__(
        self, app: Any, *, tls_cert: str | None = None, tls_key: str | None = None, tls_client_ca: str | None = None
    ) -> None:
        self._config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            date_header=False,  # it would stand still without the ticks
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
            ssl_ca_certs=tls_client_ca,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls_client_ca else ssl.CERT_NONE,
        )
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, key: str = "the port's key") -> tuple[str, int]:
        """The address really bound. Raises ConfigError naming `key` when it cannot be."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, UnicodeError) as exc:
            raise bind_error(host, port, exc, key) from None
        bound = listener.getsockname()
        self._server = _Uvicorn(self._config)
        self._task = asyncio.create_task(self._server.serve([listener]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait((self._task, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            listener.close()
            await self._task  # tells why
            raise PenstockError("the application ended while it was starting")
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        """Answers what is in flight, for a short while, and closes."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.stop.set()
            await self._task
