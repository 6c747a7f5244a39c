"""Messages and services of Protocol Buffers, from the descriptors that `make protos` writes."""

from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


class ProtoSet:
    """The .proto files in the folders `protos` of packages.

    They live in a pool of their own, so that a program that loads the same files elsewhere keeps its own classes.
    """

    def __init__(self, *packages: str) -> None:
        self.pool = descriptor_pool.DescriptorPool()
        for package in packages:
            data = resources.files(package).joinpath("protos", "descriptors.binpb").read_bytes()
            for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
                self.pool.AddSerializedFile(file.SerializeToString())

    def message(self, name: str) -> Any:
        """The class of a message, by its full name."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def service(self, name: str) -> Any:
        """The descriptor of a service, by its full name."""
        return self.pool.FindServiceByName(name)


@cache
def open_inference() -> ProtoSet:
    """The Open Inference Protocol (package `inference`) and the standard health service."""
    return ProtoSet(__package__)
