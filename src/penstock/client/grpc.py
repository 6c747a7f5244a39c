"""The client's calls over gRPC: the Open Inference Protocol, and Triton's streams."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from penstock import errors
from penstock.client.calls import GRACE_S, ApiCall, Call, PenstockApi
from penstock.client.endpoint import (
    ConnectionLost,
    ResponseTimeout,
    ResponseTooLarge,
    Unreachable,
    check_token_privacy,
    parse_url,
)
from penstock.client.response import named_error
from penstock.client.transport import Attempt, Parts, raw_inputs
from penstock.serving.protocols.bodies import ERROR_CODE
from penstock.serving.protocols.oip_grpc import decode_infer, decode_stream_infer, encode_infer
from penstock.serving.protocols.oip_messages import InferResponse
from penstock.serving.protocols.oip_protobuf import open_inference

SERVICE: Final = "/inference.GRPCInferenceService/"
FINAL: Final = "triton_final_response"
PUSHBACK: Final = "grpc-retry-pushback-ms"

_BY_CODE: Final[dict[grpc.StatusCode, type[errors.PenstockError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: errors.Forbidden,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFound,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotSupported,
    grpc.StatusCode.DEADLINE_EXCEEDED: ResponseTimeout,
    grpc.StatusCode.UNAVAILABLE: ConnectionLost,  # the request may have been sent
}


class GrpcTransport:
    """One channel, which is opened by the first call. `tls_files`: CA, certificate, key, each of which may be None."""

    def __init__(
        self,
        url: str,
        token: str | None,
        tls_files: tuple[str | None, str | None, str | None],
        tls: ssl.SSLContext | None,
        max_response_bytes: int,
    ) -> None:
        endpoint = parse_url(f"http{url.removeprefix('grpc')}", tls)
        if endpoint.prefix:
            raise errors.ConfigError(
                f"found '{endpoint.prefix}' after the address of a gRPC server, expected grpc://HOST:PORT"
            )
        check_token_privacy(endpoint, token)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self._address = f"{host}:{endpoint.port}"
        self._url = url
        self._secure = endpoint.tls is not None
        self._tls_files = tls_files
        self._metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        self._options = [
            ("grpc.max_receive_message_length", max_response_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 5000),
        ]
        self._channel: Any = None

    def infer(
        self, call: Call, model: str, inputs: Mapping[str, Any], outputs: Sequence[str] | None
    ) -> Attempt[InferResponse]:
        if call.key:
            raise errors.NotSupported("gRPC has no idempotency keys; use an http:// URL, or leave the key out")
        request = encode_infer(
            (model, call.version or "", call.request_id), raw_inputs(inputs), outputs, call.triton_parameters()
        )

        async def attempt(now: float) -> InferResponse:
            return decode_infer(await self._send("ModelInfer", call, request))

        return attempt

    def stream(self, call: Call, model: str, value: Any, content_type: str | None, events: bool) -> Attempt[Parts]:
        parameters = {**call.triton_parameters(), "triton_enable_empty_final_response": True}
        request = encode_infer((model, call.version or "", call.request_id), raw_inputs(value), None, parameters)

        async def attempt(now: float) -> Parts:
            stream = self._open().stream_stream(SERVICE + "ModelStreamInfer")(metadata=self._headers(call))
            try:
                await _checked(self._url, stream.write(request))
                await _checked(self._url, stream.done_writing())
                left_s = call.ends_at - asyncio.get_running_loop().time()
                first = await _receive(self._url, stream, left_s)
            except BaseException:
                stream.cancel()
                raise
            return _responses(self._url, stream, call, first)

        return attempt

    def check_health(self, call: Call, ready: bool, model: str | None) -> Attempt[bool]:
        kind = ("Server" if model is None else "Model") + ("Ready" if ready else "Live")
        fields = {} if model is None else {"name": model, "version": call.version or ""}

        async def attempt(now: float) -> bool:
            answer = await self._ask(kind, call, fields)
            return bool(answer.ready if ready else answer.live)

        return attempt

    def metadata(self, call: Call, model: str) -> Attempt[dict[str, Any]]:
        async def attempt(now: float) -> dict[str, Any]:
            answer = await self._ask("ModelMetadata", call, {"name": model, "version": call.version or ""})
            found: dict[str, Any] = {"name": answer.name, "versions": list(answer.versions)}
            found["platform"] = answer.platform
            for side in ("inputs", "outputs"):
                tensors = getattr(answer, side)
                found[side] = [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]
            return found

        return attempt

    def predict(self, call: Call, model: str, value: Any, content_type: str | None) -> Attempt[Any]:
        raise errors.NotSupported("gRPC carries arrays only; call infer, or use an http:// URL")

    def ask(self, call: Call, prepare: Callable[[PenstockApi], ApiCall]) -> tuple[bool, Attempt[Any]]:
        raise errors.NotSupported(
            "gRPC has infer, stream, ready, live and metadata; use an http:// URL for other calls"
        )

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # ---- sending

    def _open(self) -> Any:
        if self._channel is None:
            if self._secure:
                ca, cert, key = (None if file is None else Path(file).read_bytes() for file in self._tls_files)
                credentials = grpc.ssl_channel_credentials(ca, key or cert, cert)
                self._channel = grpc.aio.secure_channel(self._address, credentials, self._options)
            else:
                self._channel = grpc.aio.insecure_channel(self._address, self._options)
        return self._channel

    def _headers(self, call: Call) -> list[tuple[str, str]]:
        id = [("x-request-id", call.request_id)] if call.request_id else []
        return [*self._metadata, *id, *((name.lower(), value) for name, value in call.headers)]

    async def _send(self, name: str, call: Call, request: bytes) -> bytes:
        left_s = call.ends_at - asyncio.get_running_loop().time()
        invoke = self._open().unary_unary(SERVICE + name)
        data: bytes = await _checked(self._url, invoke(request, timeout=left_s, metadata=self._headers(call)))
        return data

    async def _ask(self, name: str, call: Call, fields: Mapping[str, str]) -> Any:
        message = open_inference().message
        data = await self._send(name, call, message(f"inference.{name}Request")(**fields).SerializeToString())
        return message(f"inference.{name}Response").FromString(data)


async def _responses(url: str, stream: Any, call: Call, found: tuple[InferResponse, bool] | None) -> Parts:
    """The responses to one request of ModelStreamInfer, of which `found` is the first."""
    try:
        while found is not None:
            response, final = found
            if response.outputs or not final:
                yield response
            if final:
                return
            left_s = call.deadline_at + GRACE_S - asyncio.get_running_loop().time()
            found = await _receive(url, stream, min(call.timeout_s, left_s))
    finally:
        stream.cancel()


async def _receive(url: str, stream: Any, wait_s: float) -> tuple[InferResponse, bool] | None:
    """The next response, and whether it is the last; None at the end. Raises the error that a response reports."""
    try:
        async with asyncio.timeout(wait_s):
            data = await _checked(url, stream.read())
    except TimeoutError:
        raise ResponseTimeout(f"{url}: the stream had no part within {max(0.0, wait_s):g} s") from None
    if data is grpc.aio.EOF:
        return None
    text, response = decode_stream_infer(data)
    if text:
        raise named_error(str(response.parameters.get(ERROR_CODE, "")), text) or errors.ItemFailed(text)
    return response, bool(response.parameters.pop(FINAL, False))


async def _checked(url: str, answer: Awaitable[Any]) -> Any:
    """The result of a call. Raises the error that its status describes."""
    try:
        return await answer
    except grpc.aio.AioRpcError as error:
        raise _error_of(url, error) from None


def _error_of(url: str, error: grpc.aio.AioRpcError) -> errors.PenstockError:
    code, text = error.code(), (error.details() or "(no text)")[:2000]
    trailing = {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}
    found = named_error(trailing.get(ERROR_CODE, ""), text, 500)
    if found is None:
        kind = _BY_CODE.get(code, errors.ItemFailed)
        if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in text.lower():
            kind = Unreachable
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
            kind = ResponseTooLarge
        found = kind(f"{url}: {text} ({code.name})")
    pause_ms = trailing.get(PUSHBACK, "")
    found.retry_after_s = int(pause_ms) / 1000 if pause_ms.isdecimal() and len(pause_ms) < 9 else None
    return found
