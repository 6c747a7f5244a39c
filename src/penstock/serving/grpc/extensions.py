"""The gRPC calls of Triton's extensions: their messages, from and to the JSON form of `serving.triton`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format

from penstock.errors import BadRequest
from penstock.serving.protocols.oip_grpc import open_inference
from penstock.serving.triton.extensions import TritonExtensions
from penstock.serving.triton.settings import NO_CUDA

GUARDS: Final = dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload", "LogSettings"), "management")

_message = open_inference().message
_Loaded: Final = _message("inference.RepositoryModelLoadResponse")
_Unloaded: Final = _message("inference.RepositoryModelUnloadResponse")
_Traces: Final = _message("inference.TraceSettingResponse")
_Logs: Final = _message("inference.LogSettingsResponse")
_Registered: Final = _message("inference.SystemSharedMemoryRegisterResponse")
_Unregistered: Final = _message("inference.SystemSharedMemoryUnregisterResponse")
_CudaStatus: Final = _message("inference.CudaSharedMemoryStatusResponse")
_CudaUnregistered: Final = _message("inference.CudaSharedMemoryUnregisterResponse")
_LOG_KINDS: Final = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_FROM_JSON: Final = {
    name: _message(f"inference.{name}Response")
    for name in ("ModelConfig", "ModelStatistics", "RepositoryIndex", "SystemSharedMemoryStatus")
}


class ExtensionCalls:
    """Methods have the names of the calls."""

    def __init__(self, triton: TritonExtensions) -> None:
        self._triton = triton

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        found = self._triton.repository.model_config(request.name, request.version or None)
        return _answer("ModelConfig", {"config": found})

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        return _answer("ModelStatistics", self._triton.statistics(request.name, request.version or None))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        return _answer("RepositoryIndex", {"models": await self._triton.repository.index(request.ready)})

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        await self._triton.repository.load(request.model_name, _values(request.parameters))
        return _Loaded()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        await self._triton.repository.unload(request.model_name, _values(request.parameters))
        return _Unloaded()

    async def TraceSetting(self, request: Any, context: Any) -> Any:
        """A setting without values is reset, which changes nothing."""
        changes = {name: list(setting.value) or None for name, setting in request.settings.items()}
        answer = _Traces()
        for name, value in self._triton.trace_setting(request.model_name, changes).items():
            answer.settings[name].value.extend(value if isinstance(value, list) else [value])
        return answer

    async def LogSettings(self, request: Any, context: Any) -> Any:
        answer = _Logs()
        for name, value in self._triton.log_settings(_values(request.settings)).items():
            kind = (
                "bool_param"
                if isinstance(value, bool)
                else "uint32_param"
                if isinstance(value, int)
                else "string_param"
            )
            setattr(answer.settings[name], kind, value)
        return answer

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        regions = {region["name"]: region for region in self._triton.memory.status(request.name)}
        return _answer("SystemSharedMemoryStatus", {"regions": regions})

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        self._triton.memory.register(request.name, request.key, request.offset, request.byte_size)
        return _Registered()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        self._triton.memory.unregister(request.name)
        return _Unregistered()

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        return _CudaStatus()

    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        raise BadRequest(NO_CUDA)

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """Nothing is registered."""
        return _CudaUnregistered()


def _answer(call: str, value: Mapping[str, Any]) -> Any:
    return json_format.ParseDict(value, _FROM_JSON[call]())


def _values(parameters: Any) -> dict[str, Any]:
    """The values of a map of messages with the choice `parameter_choice`; None for one that is not set."""
    found = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found
