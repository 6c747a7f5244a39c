"""The routes of the management listener: what is loaded, and the changes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.contracts import Backend, ManagementBackend
from penstock.errors import Forbidden, PayloadTooLarge
from penstock.serving.http.answers import JSON
from penstock.serving.protocols import admin

MAX_BODY_BYTES: Final = 2**20
Handler = Callable[[Request], Awaitable[Response]]
Routes = dict[str, dict[str, Handler]]


def management_routes(backend: Backend, management: ManagementBackend | None) -> Routes:
    """path -> method -> handler. Without `management` nothing can be changed."""
    looking = _Looking(backend, management)
    changing = _Changing(management)
    routes: Routes = {
        "/models": {"GET": looking.models},
        "/models/{model}": {"GET": looking.model, "PUT": changing.put, "DELETE": changing.unload},
        "/models/{model}/scale": {"PUT": changing.scale},
        "/models/{model}/default": {"PUT": changing.default},
        "/models/{model}/traffic": {"PUT": changing.traffic},
        "/models/{model}/{version}": {"GET": looking.version, "PUT": changing.put, "DELETE": changing.unload},
        "/models/{model}/{version}/scale": {"PUT": changing.scale},
    }
    return routes


class _Looking:
    """What changes nothing."""

    def __init__(self, backend: Backend, management: ManagementBackend | None) -> None:
        self._statuses = backend.statuses if management is None else management.statuses
        self._learned = (lambda model, version: {}) if management is None else management.learned

    async def models(self, request: Request) -> Response:
        return Response(admin.models_body(self._statuses()), media_type=JSON)

    async def model(self, request: Request) -> Response:
        return Response(admin.model_body(self._statuses(), request.path_params["model"]), media_type=JSON)

    async def version(self, request: Request) -> Response:
        model, version = request.path_params["model"], request.path_params["version"]
        learned = self._learned(model, version)
        return Response(admin.version_body(self._statuses(), model, version, learned), media_type=JSON)


class _Changing:
    """Every change answers with the model as it is afterwards."""

    def __init__(self, management: ManagementBackend | None) -> None:
        self._management = management

    def _open(self) -> ManagementBackend:
        """Raises Forbidden, ModelNotReady, before a body is read."""
        if self._management is None:
            raise Forbidden("changing models is off: set management = true in [server]")
        self._management.check_open()
        return self._management

    async def put(self, request: Request) -> Response:
        management = self._open()
        await management.put(*_names(request), admin.read_keys(await _body(request)))
        return _changed(request, management)

    async def unload(self, request: Request) -> Response:
        management = self._open()
        await management.unload(*_names(request))
        return _changed(request, management)

    async def scale(self, request: Request) -> Response:
        management = self._open()
        await management.scale(*_names(request), admin.read_instances(await _body(request)))
        return _changed(request, management)

    async def default(self, request: Request) -> Response:
        management = self._open()
        await management.set_default(request.path_params["model"], admin.read_version(await _body(request)))
        return _changed(request, management)

    async def traffic(self, request: Request) -> Response:
        management = self._open()
        await management.set_traffic(request.path_params["model"], admin.read_weights(await _body(request)))
        return _changed(request, management)


def _names(request: Request) -> tuple[str, str | None]:
    return request.path_params["model"], request.path_params.get("version")


def _changed(request: Request, management: ManagementBackend) -> Response:
    return Response(admin.changed_body(management.statuses(), request.path_params["model"]), media_type=JSON)


async def _body(request: Request) -> bytes:
    """Raises PayloadTooLarge."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body
