"""The standard reflection service: clients without the .proto files ask it for the services and their messages.

Source: https://github.com/grpc/grpc/blob/master/doc/server-reflection.md
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2

from penstock.serving.grpc.calls import Code, GrpcError
from penstock.serving.protocols.protobuf import ProtoSet

_PACKAGE: Final = "grpc.reflection.v1alpha"


class ReflectionService:
    """Describes the services `names`, and itself."""

    NAME: Final = f"{_PACKAGE}.ServerReflection"

    def __init__(self, protos: ProtoSet, names: Sequence[str]) -> None:
        self._pool = protos.pool
        self._names = sorted([*names, self.NAME])
        self._response = protos.message(f"{_PACKAGE}.ServerReflectionResponse")

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        """One response to each request; what does not exist is a response too."""
        async for request in requests:
            if isinstance(request, GrpcError):
                raise request
            response = self._response(original_request=request)
            try:
                self._answer(request, response)
            except KeyError:
                response.error_response.error_code = Code.NOT_FOUND
                response.error_response.error_message = "not found"
            yield response

    def _answer(self, request: Any, response: Any) -> None:
        """Raises KeyError."""
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in self._names:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                self._add(self._pool.FindFileByName(request.file_by_filename), response)
            case "file_containing_symbol":
                self._add(self._pool.FindFileContainingSymbol(request.file_containing_symbol), response)
            case "file_containing_extension":  # only proto2 has extensions
                self._pool.FindMessageTypeByName(request.file_containing_extension.containing_type)
                raise KeyError
            case "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                self._pool.FindMessageTypeByName(name)
                response.all_extension_numbers_response.base_type_name = name
            case _:
                response.error_response.error_code = Code.INVALID_ARGUMENT
                response.error_response.error_message = "the request asks for nothing"

    def _add(self, file: Any, response: Any) -> None:
        """Adds a file and all that it imports."""
        found: dict[str, Any] = {}
        pending = [file]
        while pending:
            each = pending.pop()
            if each.name not in found:
                found[each.name] = each
                pending += each.dependencies
        for each in found.values():
            proto = descriptor_pb2.FileDescriptorProto()
            each.CopyToProto(proto)
            response.file_descriptor_response.file_descriptor_proto.append(proto.SerializeToString())
