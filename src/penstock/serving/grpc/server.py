"""The gRPC listener of `penstock serve`: the Open Inference service, health and reflection."""

from collections.abc import Callable
from typing import Final

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.errors import Unauthorized
from penstock.serving.grpc.calls import Code, GrpcError
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService, HealthService
from penstock.serving.grpc.inference import NAME, RAW_CALLS, OpenInferenceService, failure
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener, GrpcTls, serve_reflection
from penstock.serving.http.auth import check_token
from penstock.serving.protocols.protobuf import open_inference

GUARD: Final = "inference"

Tokens = Callable[[str], frozenset[bytes]]


def make_grpc_listener(
    backend: Backend, limits: LimitsConfig, tokens: Tokens, tls: GrpcTls | None = None
) -> GrpcListener:
    """A listener that is not started. `tokens` returns those that open the calls of a guard; none open to all."""

    def authorize(guard: str, authorization: bytes | None) -> None:
        try:
            check_token(tokens(guard), authorization)
        except Unauthorized as error:
            raise GrpcError(Code.UNAUTHENTICATED, error.message) from None

    protos = open_inference()
    service = OpenInferenceService(backend, limits.max_pipelined, limits.grpc_idle_timeout_s)
    health = HealthService(protos, [NAME], backend.ready)
    services = [GrpcService(NAME, service, GUARD, raw=RAW_CALLS), GrpcService(HealthService.NAME, health)]
    dispatcher = CallDispatcher(protos, services, authorize, failure)
    serve_reflection(dispatcher, protos, [each.name for each in services], GUARD)
    return GrpcListener(dispatcher, GrpcLimits(limits), tls)
