"""A listener of TorchServe's gRPC APIs."""

import ssl
from typing import cast

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.grpc.calls import Code, GrpcError
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService, HealthService, ReflectionService
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config.properties import ListenerConfig
from penstock.torchserve.grpc.calls import log_5xx, management_error
from penstock.torchserve.grpc.inference import InferenceService, OpenInferenceService
from penstock.torchserve.grpc.management import GATED, ManagementService
from penstock.torchserve.grpc.services import DISABLED, PROTOS, STANDARD
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.protocol.api import ApiError, Group


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
        services.append(GrpcService(InferenceService.NAME, [InferenceService(backend, administration)], "inference"))
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
