"""The gRPC listener of `penstock serve`: the Open Inference service, health and reflection."""

import ssl
from collections.abc import Callable
from typing import Final

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService, HealthService
from penstock.serving.grpc.extensions import GUARDS, ExtensionCalls
from penstock.serving.grpc.inference import DIRECT_CALLS, NAME, RAW_CALLS, OpenInferenceService, failure
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.serving.grpc.reflection import ReflectionService
from penstock.serving.protocols.protobuf import open_inference
from penstock.serving.triton.extensions import TritonExtensions

GUARD: Final = "inference"

Authorize = Callable[[str, bytes | None], None]


def make_grpc_listener(
    backend: Backend,
    triton: TritonExtensions,
    limits: LimitsConfig,
    check: Authorize,
    tls: ssl.SSLContext | None = None,
) -> GrpcListener:
    """A listener that is not started. `check` receives a guard ("inference" or "management") and the value of the
    metadata key `authorization`; it raises Unauthorized or Forbidden."""

    def authorize(guard: str, authorization: bytes | None) -> None:
        try:
            check(guard, authorization)
        except PenstockError as error:
            raise failure(error) from None

    protos = open_inference()
    service = OpenInferenceService(backend, limits.max_pipelined, limits.grpc_idle_timeout_s)
    health = HealthService(protos, [NAME], backend.ready)
    services = [
        GrpcService(NAME, [service, ExtensionCalls(triton)], GUARD, GUARDS, raw=RAW_CALLS, direct=DIRECT_CALLS),
        GrpcService(HealthService.NAME, [health]),
        GrpcService(ReflectionService.NAME, [ReflectionService(protos, [NAME, HealthService.NAME])], GUARD),
    ]
    dispatcher = CallDispatcher(protos, services, authorize, failure)
    return GrpcListener(backend, dispatcher, GrpcLimits(limits), tls, service.drain)
