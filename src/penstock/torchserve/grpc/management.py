"""TorchServe's gRPC management service. It returns the texts and JSON of the HTTP API."""

from typing import Any, Final

from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.grpc.services import MANAGEMENT, message_class
from penstock.torchserve.protocol.api import ApiError, ChangeResult, RegisterRequest, json_text, model_page
from penstock.torchserve.protocol.management import PAGE_SIZE, check_registration

GATED: Final = frozenset({"RegisterModel", "UnregisterModel"})  # need enable_model_api

_Response: Final = message_class(f"{MANAGEMENT}.ManagementResponse")


class ManagementService:
    """Methods have the names of the calls. A number that is not above 0 means not given."""

    NAME: Final = f"{MANAGEMENT}.ManagementAPIsService"

    def __init__(self, administration: Administrator) -> None:
        self._administration = administration

    async def DescribeModel(self, request: Any, context: Any) -> Any:
        """The JSON of `GET /models/{m}[/{version}|/all]`."""
        version = request.model_version or None
        customized = request.customized and version != "all"
        described = await self._administration.describe(request.model_name, version, customized=customized)
        return _Response(msg=json_text(described))

    async def ListModels(self, request: Any, context: Any) -> Any:
        """The JSON of `GET /models`."""
        limit = request.limit if 1 <= request.limit <= PAGE_SIZE else PAGE_SIZE
        page = self._administration.models(limit, max(request.next_page_token, 0))
        return _Response(msg=json_text(model_page(*page)))

    async def RegisterModel(self, request: Any, context: Any) -> Any:
        """Returns before the workers are up, unless `synchronous` is set."""
        sent = {name: getattr(request, name) for name in RegisterRequest.__struct_fields__}
        given = {k: v for k, v in sent.items() if isinstance(v, bool) or (v if isinstance(v, str) else v > 0)}
        change = await self._administration.register(check_registration(RegisterRequest(**given)))
        return _response(change)

    async def ScaleWorker(self, request: Any, context: Any) -> Any:
        """Cannot scale to zero workers: 0 means the default, 1."""
        change = await self._administration.scale(
            request.model_name,
            request.model_version or None,
            min_worker=max(request.min_worker, 0) or None,
            max_worker=max(request.max_worker, 0) or None,
            synchronous=request.synchronous,
        )
        return _response(change)

    async def SetDefault(self, request: Any, context: Any) -> Any:
        return _response(await self._administration.set_default(request.model_name, request.model_version))

    async def UnregisterModel(self, request: Any, context: Any) -> Any:
        if not request.model_name:
            raise ApiError("BadRequestException", "Parameter url is required.")
        return _response(await self._administration.unregister(request.model_name, request.model_version or None))


def _response(change: ChangeResult) -> Any:
    return _Response(msg=change.message)
