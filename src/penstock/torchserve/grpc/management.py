"""TorchServe's management service: what the HTTP API does, and the texts that it answers."""

from __future__ import annotations

from typing import Any, Final

from penstock.torchserve.grpc.messages import MANAGEMENT, message
from penstock.torchserve.protocol.api import Administration, ApiError, ChangeResult, Registration, json_text
from penstock.torchserve.protocol.management import PAGE, check_registration

SERVICE: Final = f"{MANAGEMENT}.ManagementAPIsService"
GATED: Final = frozenset({"RegisterModel", "UnregisterModel"})  # need enable_model_api

_Response: Final = message(f"{MANAGEMENT}.ManagementResponse")


class Management:
    """The functions of the service, by the names of its calls. A number that is not above 0 was not said."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    async def DescribeModel(self, request: Any) -> Any:
        """The JSON of `GET /models/{m}[/{version}|/all]`."""
        version = request.model_version or None
        customized = request.customized and version != "all"
        described = await self._administration.describe(request.model_name, version, customized=customized)
        return _Response(msg=json_text(described))

    async def ListModels(self, request: Any) -> Any:
        """The JSON of `GET /models`."""
        limit = request.limit if 1 <= request.limit <= PAGE else PAGE
        models, token = self._administration.models(limit, max(request.next_page_token, 0))
        found = [{"modelName": name, "modelUrl": url} for name, url in models]
        return _Response(msg=json_text({"nextPageToken": None if token is None else str(token), "models": found}))

    async def RegisterModel(self, request: Any) -> Any:
        """Returns at once what the workers go on to do, unless `synchronous` is said."""
        registration = Registration(
            url=request.url or None,
            model_name=request.model_name or None,
            handler=request.handler or None,
            runtime=request.runtime or None,
            batch_size=_count(request.batch_size),
            max_batch_delay=_count(request.max_batch_delay),
            initial_workers=_count(request.initial_workers),
            synchronous=request.synchronous,
            response_timeout=_count(request.response_timeout),
            startup_timeout=_count(request.startup_timeout),
            s3_sse_kms=request.s3_sse_kms,
        )
        return _done(await self._administration.register(check_registration(registration)))

    async def ScaleWorker(self, request: Any) -> Any:
        """No workers cannot be asked for here: 0 is the default, 1."""
        least = _count(request.min_worker) or 1
        most = _count(request.max_worker) or least
        if most < least:
            raise ApiError("BadRequestException", "max_worker cannot be less than min_worker.")
        done = await self._administration.scale(
            request.model_name,
            request.model_version or None,
            min_worker=least,
            max_worker=most,
            synchronous=request.synchronous,
        )
        return _done(done)

    async def SetDefault(self, request: Any) -> Any:
        """Makes a version the default one."""
        return _done(await self._administration.set_default(request.model_name, request.model_version))

    async def UnregisterModel(self, request: Any) -> Any:
        """Takes a version away, or the model."""
        if not request.model_name:
            raise ApiError("BadRequestException", "Parameter url is required.")
        return _done(await self._administration.unregister(request.model_name, request.model_version or None))


def _count(number: int) -> int | None:
    return number if number > 0 else None


def _done(done: ChangeResult) -> Any:
    return _Response(msg=done.message)
