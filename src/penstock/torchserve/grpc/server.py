"""A listener of TorchServe's gRPC APIs, and the management service, with the HTTP API's texts and JSON."""

import ssl
from typing import Any, Final, cast

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService, HealthService, ReflectionService
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.serving.grpc.messages import Code, GrpcError
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config import ListenerConfig
from penstock.torchserve.grpc.services import (
    DISABLED,
    MANAGEMENT,
    PROTOS,
    STANDARD,
    InferenceService,
    OpenInferenceService,
    log_5xx,
    management_error,
    message_class,
)
from penstock.torchserve.http.flavor import api_error
from penstock.torchserve.protocol.api import ApiError, ChangeResult, Group, RegisterRequest, json_text, page
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
        found = page("model", self._administration.models(), limit, max(request.next_page_token, 0))
        return _Response(msg=json_text(found))

    async def RegisterModel(self, request: Any, context: Any) -> Any:
        """Returns before the workers are up, unless `synchronous` is set."""
        sent = {name: getattr(request, name) for name in RegisterRequest.__struct_fields__}
        given = {k: v for k, v in sent.items() if isinstance(v, bool) or (v if isinstance(v, str) else v > 0)}
        return _changed(await self._administration.register(check_registration(RegisterRequest(**given))))

    async def ScaleWorker(self, request: Any, context: Any) -> Any:
        """Cannot scale to zero workers: 0 means the default, 1."""
        change = await self._administration.scale(
            request.model_name,
            request.model_version or None,
            min_worker=max(request.min_worker, 0) or None,
            max_worker=max(request.max_worker, 0) or None,
            synchronous=request.synchronous,
        )
        return _changed(change)

    async def SetDefault(self, request: Any, context: Any) -> Any:
        return _changed(await self._administration.set_default(request.model_name, request.model_version))

    async def UnregisterModel(self, request: Any, context: Any) -> Any:
        if not request.model_name:
            raise ApiError("BadRequestException", "Parameter url is required.")
        return _changed(await self._administration.unregister(request.model_name, request.model_version or None))


def _changed(change: ChangeResult) -> Any:
    return _Response(msg=change.message)


def make_grpc_listener(
    backend: Backend,
    administration: Administrator,
    config: ListenerConfig,
    limits: GrpcLimits,
    tls: ssl.SSLContext | None = None,
) -> GrpcListener:
    """The services of the groups of `config`, with reflection."""

    def authorize(guard: str, authorization: bytes | None) -> None:
        try:
            administration.check_token(cast(Group, guard), authorization)
        except ApiError as error:
            raise GrpcError(Code.PERMISSION_DENIED, error.message) from None

    def failure(error: PenstockError) -> GrpcError:
        found = api_error(error, backend)
        log_5xx("", None, "", found.status, error)
        return management_error(found)

    services = _services(backend, administration, config)
    dispatcher = CallDispatcher(PROTOS, services, authorize, failure)
    return GrpcListener(backend, dispatcher, limits, tls)


def _services(backend: Backend, administration: Administrator, config: ListenerConfig) -> list[GrpcService]:
    services = []
    if "inference" in config.groups:
        services.append(GrpcService(InferenceService.NAME, [InferenceService(administration)], "inference"))
        if config.properties.ts_open_inference_protocol:
            for name in (OpenInferenceService.NAME, STANDARD):
                quoted = name != STANDARD
                open_inference = OpenInferenceService(backend, administration, config.codec, quoted=quoted)
                services.append(GrpcService(name, [open_inference], "inference"))
    if "management" in config.groups:
        refused = {} if config.properties.enable_model_api else dict.fromkeys(GATED, DISABLED)
        management = ManagementService(administration)
        services.append(GrpcService(ManagementService.NAME, [management], "management", refused=refused))
    names = [service.name for service in services]
    health = GrpcService(HealthService.NAME, [HealthService(PROTOS, names, administration.healthy)])
    reflection = ReflectionService(PROTOS, [*names, HealthService.NAME])
    return [*services, health, GrpcService(ReflectionService.NAME, [reflection])]
