"""The messages and services of `protos/`, from the descriptors that `make protos` writes.

They live in a pool of their own: a program that has loaded the same protos from elsewhere keeps its own classes.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
OPEN_INFERENCE: Final = "org.pytorch.serve.grpc.openinference"
HEALTH: Final = "grpc.health.v1"


def _read() -> Any:
    data = resources.files(__package__).joinpath("protos", "descriptors.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL: Final = _read()


def message(name: str) -> Any:
    """The class of a message, by its full name."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def service(name: str) -> Any:
    """The descriptor of a service, by its full name."""
    return POOL.FindServiceByName(name)
