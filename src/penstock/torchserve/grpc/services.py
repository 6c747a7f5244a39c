"""TorchServe's gRPC services by name, the standard Open Inference service, and their messages."""

from typing import Final

from penstock.serving import protocols
from penstock.serving.grpc.calls import Code, GrpcError
from penstock.serving.grpc.dispatch import HEALTH as HEALTH
from penstock.serving.protocols.oip_grpc import ProtoSet

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
OPEN_INFERENCE: Final = "org.pytorch.serve.grpc.openinference"
STANDARD: Final = "inference.GRPCInferenceService"  # its messages have the same fields
DISABLED: Final = GrpcError(
    Code.PERMISSION_DENIED, "Model API disabled\norg.pytorch.serve.archive.model.ModelException"
)
PROTOS: Final = ProtoSet(__package__, protocols.__name__)
message_class = PROTOS.message
service_descriptor = PROTOS.service
