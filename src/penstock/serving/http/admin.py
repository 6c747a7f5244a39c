"""The management and metrics APIs, and the uvicorn that serves them inside our own event loop."""

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
from penstock.errors import BadRequest, Forbidden, PayloadTooLarge, PenstockError, nearest
from penstock.serving.http.auth import check_token
from penstock.serving.http.responses import MethodNotAllowed, RouteNotFound, error_result
from penstock.serving.http.sockets import bind_error
from penstock.serving.protocols import admin
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.route import error_body

MAX_BODY_BYTES: Final = 2**20  # of a management request
MOST_BATCHES: Final = 1000  # in one response of /debug/batches
GRACE_S: Final = 2  # for responses in flight when an admin listener closes

Handler = Callable[[Request], Awaitable[Response]]
Change = Callable[[ManagementBackend, Request], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]


def admin_app(
    backend: Backend, tokens: frozenset[bytes] = frozenset(), management: ManagementBackend | None = None
) -> Starlette:
    """The management API: the routes of `management_routes`, and GET /ping. Only /ping needs no token."""

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
    """GET /metrics: the result of `scrape`, in the Prometheus text format. GET /debug/batches: recent batches as JSON.

    `batches` receives ?model= (None: all models) and ?limit= (1 to 1000, default 100), newest first.
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
    """An ASGI app over the handlers of one path. It takes every method: no other route with this path can match."""

    def __init__(self, table: dict[str, Handler]) -> None:
        self._table = table
        self._allow = sorted({*table, "HEAD"} if "GET" in table else table)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        handler = self._table.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise MethodNotAllowed.only(*self._allow)
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
    result = error_result(error, error_body)
    return Response(result.body, result.status, dict(result.headers or ()), JSON)


async def _http_error(request: Request, exc: HTTPException) -> Response:
    return await _error(request, RouteNotFound("no route has this path"))


class _Uvicorn(uvicorn.Server):
    """uvicorn inside our own event loop: without its signal handlers and its ten ticks a second."""

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
    """One ASGI app on one address. Neither `start` nor `close` touches the process's signals."""

    def __init__(
        self, app: Any, *, tls_cert: str | None = None, tls_key: str | None = None, tls_client_ca: str | None = None
    ) -> None:
        self._config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            date_header=False,  # without the ticks it would never change
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
        """Binds and returns the actual address. Raises ConfigError, naming `key`, if it cannot."""
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
            await self._task  # raises the reason
            raise PenstockError("the application ended while it was starting")
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        """Answers the requests in flight for up to GRACE_S, then closes."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.stop.set()
            await self._task


# ---- the management routes


def management_routes(backend: Backend, management: ManagementBackend | None) -> Routes:
    """path -> method -> handler. Without `management` every change is refused."""
    statuses = backend.statuses if management is None else management.statuses

    async def models(request: Request) -> Response:
        return Response(admin.models_body(statuses()), media_type=JSON)

    async def model(request: Request) -> Response:
        return Response(admin.model_body(statuses(), request.path_params["model"]), media_type=JSON)

    async def version(request: Request) -> Response:
        name, number = request.path_params["model"], request.path_params["version"]
        learned = {} if management is None else management.learned(name, number)
        return Response(admin.version_body(statuses(), name, number, learned), media_type=JSON)

    def change(apply: Change) -> Handler:
        """A handler that answers with the resulting state of the model. Refuses a change before it reads a body."""

        async def handler(request: Request) -> Response:
            if management is None:
                raise Forbidden("changing models is off: set management = true in [server]")
            management.check_open()
            await apply(management, request)
            return Response(admin.changed_body(statuses(), request.path_params["model"]), media_type=JSON)

        return handler

    put, unload, scale = change(_put), change(_unload), change(_scale)
    return {
        "/models": {"GET": models},
        "/models/{model}": {"GET": model, "PUT": put, "DELETE": unload},
        "/models/{model}/scale": {"PUT": scale},
        "/models/{model}/default": {"PUT": change(_set_default)},
        "/models/{model}/traffic": {"PUT": change(_set_traffic)},
        "/models/{model}/{version}": {"GET": version, "PUT": put, "DELETE": unload},
        "/models/{model}/{version}/scale": {"PUT": scale},
    }


async def _put(management: ManagementBackend, request: Request) -> None:
    await management.put(*_names(request), admin.read_keys(await _body(request)))


async def _unload(management: ManagementBackend, request: Request) -> None:
    await management.unload(*_names(request))


async def _scale(management: ManagementBackend, request: Request) -> None:
    await management.scale(*_names(request), admin.read_instances(await _body(request)))


async def _set_default(management: ManagementBackend, request: Request) -> None:
    await management.set_default(request.path_params["model"], admin.read_version(await _body(request)))


async def _set_traffic(management: ManagementBackend, request: Request) -> None:
    await management.set_traffic(request.path_params["model"], admin.read_weights(await _body(request)))


def _names(request: Request) -> tuple[str, str | None]:
    return request.path_params["model"], request.path_params.get("version")


async def _body(request: Request) -> bytes:
    """Raises PayloadTooLarge."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body
