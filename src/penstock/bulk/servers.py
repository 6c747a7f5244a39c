"""The protocol of captioning servers: what they report about their model, the upload of a chunk, and its response."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import struct
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from penstock.bulk.types import Chunk
from penstock.client.endpoint import ConnectionLost, Endpoint, Unreachable, check_token_privacy, parse_url
from penstock.client.http import ClientConnection
from penstock.client.response import HttpResponse, one_line, read_error, retry_after_s
from penstock.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    ModelNotReady,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
    Unauthorized,
)
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, Buffer, encode_request

_logger = logging.getLogger("penstock.bulk")

METADATA_BYTES: Final = 1 << 20  # limit of a metadata response; some kilobytes are usual
MAX_SIDE: Final = 16384  # of the frames that a server may ask for
RETRY_S: Final = 1.0  # between attempts to reach a server that is not up yet


class NotACaptioner(PenstockError):
    """The server responds, but does not describe a captioner of frames."""

    code = "not_a_captioner"


class ServersDiffer(PenstockError):
    """The servers of one job would not produce the same captions."""

    code = "servers_differ"


class ServerInfo(Struct, frozen=True, kw_only=True):
    """A server, its model, and the model's description; every request carries `token`."""

    address: Endpoint
    model: str
    revision: str
    height: int
    width: int
    inputs: frozenset[str]  # "frames", "jpeg" or both
    instances: int = 1
    max_batch_size: int | None = None
    max_request_bytes: int | None = None
    parameters: dict[str, Any] = {}
    token: str | None = None

    def __repr__(self) -> str:
        return f"ServerInfo({self.url!r}, {self.model!r}, revision={self.revision!r})"  # no token

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def path(self) -> str:
        """The model's path below the prefix of the address."""
        return model_path(self.model)


class _Tensor(Struct):
    name: str
    datatype: str = ""


class _Parameters(Struct):
    task: str
    revision: str
    height: int
    width: int
    model: str = ""
    kernel: str = ""
    prompt: str | None = None
    max_new_tokens: int | None = None
    precision: str = ""
    instances: int = 1
    max_batch_size: int | None = None
    max_request_bytes: int | None = None


class _Metadata(Struct):
    name: str
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    parameters: msgspec.Raw
    versions: list[str] = []


def model_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def authorization(token: str | None) -> list[tuple[str, str]]:
    return [] if token is None else [("Authorization", f"Bearer {token}")]


def ask(
    url: str,
    model: str,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
    patience_s: float = 0.0,
) -> ServerInfo:
    """The description of `model` at `url`. Waits up to `patience_s` for a server or model that is not up yet.

    Must not be called in an event loop. Raises Unreachable, UntrustedCertificate, ConnectionLost, DeadlineExceeded,
    ModelNotFound, ModelNotReady, Unauthorized, Forbidden, NotACaptioner, and ConfigError for the address.
    """
    address = parse_url(url, tls)
    check_token_privacy(address, token)
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return asyncio.run(fetch(address, model, token, timeout_s))
        except (Unreachable, ConnectionLost, ModelNotReady, DeadlineExceeded) as exc:
            if time.monotonic() + RETRY_S > until_s:
                raise
            _logger.info("server=%s waited_for=%s", address.url, exc.code)
            time.sleep(RETRY_S)


async def fetch(address: Endpoint, model: str, token: str | None, timeout_s: float) -> ServerInfo:
    """The description of `model`, if it is ready. Raises as `ask` does."""
    path, headers = model_path(model), authorization(token)
    connection = ClientConnection(address, connect_timeout_s=timeout_s)

    async def get(path: str) -> bytes:
        response = await connection.request(
            "GET", path, headers, timeout_s=timeout_s, max_response_bytes=METADATA_BYTES
        )
        _check_status(response, address.url, model)
        return response.body

    try:
        info = read_metadata(await get(path), address, model, token)
        await get(f"{path}/ready")
        return info
    finally:
        connection.close()


def _check_status(response: HttpResponse, url: str, model: str) -> None:
    status = response.status
    if status == 200:
        return
    if status == 401:
        raise Unauthorized(f"{url} rejects the token (401); use the token that the server was started with")
    if status == 403:
        raise Forbidden(f"{url} does not allow this caller to use model '{model}' (403)")
    if status == 404:
        raise ModelNotFound(f"{url} has no model '{model}' (404); name the model that it serves")
    if status in (429, 503):
        raise ModelNotReady(f"{url}: model '{model}' is not ready ({status})")
    raise NotACaptioner(f"{url} answered {status} to the metadata request for model '{model}', expected 200")


def read_metadata(body: bytes, address: Endpoint, model: str, token: str | None = None) -> ServerInfo:
    """The server described by the response to `GET /v2/models/{model}`. Raises NotACaptioner."""
    subject = f"{address.url}: model '{model}'"
    try:
        metadata = msgspec.json.decode(body, type=_Metadata)
        own = msgspec.json.decode(metadata.parameters, type=_Parameters)
        parameters = msgspec.json.decode(metadata.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NotACaptioner(f"{subject} does not describe itself as a captioner: {exc}") from None
    if own.task != "image-to-text":
        raise NotACaptioner(f"{subject} has the task '{own.task[:40]}', expected 'image-to-text'")
    inputs = {(tensor.name, tensor.datatype) for tensor in metadata.inputs}
    accepted = frozenset(name for name, kind in (("frames", "UINT8"), ("jpeg", "BYTES")) if (name, kind) in inputs)
    if not accepted or ("frame_index", "INT64") not in inputs:
        raise NotACaptioner(f"{subject} takes no UINT8 'frames' or BYTES 'jpeg' with an INT64 'frame_index'")
    if {"caption", "frame_index"} - {tensor.name for tensor in metadata.outputs}:
        raise NotACaptioner(f"{subject} has no outputs 'caption' and 'frame_index'")
    if not (0 < own.height <= MAX_SIDE and 0 < own.width <= MAX_SIDE):
        raise NotACaptioner(f"{subject} asks for {own.width}x{own.height} frames, expected 1 to {MAX_SIDE} a side")
    return ServerInfo(
        address=address,
        model=model,
        revision=own.revision,
        height=own.height,
        width=own.width,
        inputs=accepted,
        instances=max(1, own.instances),
        max_batch_size=own.max_batch_size,
        max_request_bytes=own.max_request_bytes,
        parameters=parameters,
        token=token,
    )


def require_same(servers: Sequence[ServerInfo]) -> None:
    """Raises ServersDiffer with the first difference between servers that would not produce the same captions."""
    first = servers[0]
    for other in servers[1:]:
        for name in ("revision", "height", "width", "inputs"):
            one, two = getattr(first, name), getattr(other, name)
            if one != two:
                raise ServersDiffer(
                    f"{first.url} has {name} {_shown(one)}, {other.url} has {_shown(two)}; "
                    f"all servers of a job must run the same model with the same settings"
                )


def _shown(value: object) -> str:
    return ", ".join(sorted(value)) if isinstance(value, frozenset) else f"'{value}'"


OUTPUTS = ("caption", "frame_index")


class WrongAnswer(PenstockError):
    """The response has status 200, but does not hold the captions of this request."""

    code = "wrong_answer"
    retryable = True


class ServerFault(PenstockError):
    """The server failed on this request: a 5xx other than 502, 503 and 504."""

    code = "server_fault"
    retryable = True


class RevisionChanged(PenstockError):
    """The server now runs another model or other settings; their captions must not be mixed with earlier ones."""

    code = "revision_changed"


def revision_changed(url: str, model: str, expected: str, found: str | None) -> RevisionChanged:
    now = "none" if found is None else f"'{found[:80]}'"
    return RevisionChanged(
        f"{url}: model '{model}' had revision '{expected}' when the job began, and now has {now}; "
        f"its captions are discarded"
    )


# ---- the upload


class UploadChunk:
    """A chunk and its request, encoded once for all attempts. Orders by arrival, the oldest first."""

    __slots__ = ("attempts", "body", "body_bytes", "chunk", "headers", "last_endpoint", "order")

    def __init__(self, chunk: Chunk, order: int, job: str) -> None:
        self.chunk = chunk
        self.order = order
        self.attempts = 0  # failed ones
        self.last_endpoint: object = None  # where the last attempt went
        head, buffers = encode_request(_inputs(chunk), outputs=OUTPUTS)
        if isinstance(chunk.pixels, list):  # for many small files one write is cheaper than avoiding the copy
            buffers = [b"".join(buffers)]
        self.body: Sequence[Buffer] = (head, *buffers)
        self.body_bytes = sum([len(part) for part in self.body])
        self.headers = [
            ("Content-Type", "application/octet-stream"),
            (HEADER_LENGTH, str(len(head))),
            ("Idempotency-Key", idempotency_key(chunk, job)),
        ]

    def __lt__(self, other: UploadChunk) -> bool:
        return self.order < other.order


def idempotency_key(chunk: Chunk, job: str) -> str:
    """The same for all attempts of this chunk and for no other: job, video, first frame, number of frames."""
    video = chunk.video
    text = f"{video.name}\0{video.bytes}\0{video.mtime_ns}"
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{job}-{digest}-{chunk.frames[0]}-{len(chunk.frames)}"


def _inputs(chunk: Chunk) -> list[tuple[str, str, tuple[int, ...], Buffer | Sequence[bytes]]]:
    count = len(chunk.frames)
    index = struct.pack(f"<{count}q", *chunk.frames)
    pixels = chunk.pixels
    if isinstance(pixels, list):
        return [("jpeg", "BYTES", (len(pixels),), pixels), ("frame_index", "INT64", (count,), index)]
    return [("frames", "UINT8", pixels.shape, pixels.data.cast("B")), ("frame_index", "INT64", (count,), index)]


# ---- the response


class _Output(Struct):
    name: str
    shape: list[int]
    data: Raw


class _Revision(Struct):
    revision: str | None = None


class _Captions(Struct):
    model_name: str
    outputs: list[_Output]
    parameters: _Revision | None = None


_decode = msgspec.json.Decoder(_Captions).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_numbers = msgspec.json.Decoder(list[int]).decode


def read_captions(response: HttpResponse, model: str, revision: str, frames: list[int], url: str) -> list[str]:
    """One caption for each frame, in order. Raises as `check_status`, and WrongAnswer or RevisionChanged."""
    check_status(response, url)
    kind = response.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise WrongAnswer(f"{url}: the answer has content type '{kind[:60]}', expected application/json")
    try:
        answer = _decode(response.body)
        found = answer.parameters.revision if answer.parameters else None
        if found != revision:
            raise revision_changed(url, model, revision, found)
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in answer.outputs}
        captions: list[str] = _column(tensors, "caption", _decode_texts)
        echoed: list[int] = _column(tensors, "frame_index", _decode_numbers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise WrongAnswer(f"{url}: the answer is no Open Inference answer with captions: {exc}") from None
    except KeyError as exc:
        raise WrongAnswer(f"{url}: the answer has no output {exc}") from None
    if answer.model_name != model:
        raise WrongAnswer(f"{url}: model '{answer.model_name[:80]}' answered, expected '{model}'")
    if len(captions) != len(frames):
        raise WrongAnswer(f"{url}: the answer has {len(captions)} captions, expected {len(frames)}")
    if echoed != frames:
        raise WrongAnswer(f"{url}: the answer is for frames {_abridged(echoed)}, expected {_abridged(frames)}")
    return captions


def _column(tensors: dict[str, Any], name: str, decode: Any) -> Any:
    """Raises KeyError, msgspec.DecodeError."""
    tensor = tensors[name]
    cells = decode(tensor.data)
    if math.prod(tensor.shape) != len(cells):
        raise msgspec.ValidationError(f"output '{name}' has shape {tensor.shape[:4]} and {len(cells)} elements")
    return cells


def _abridged(frames: list[int]) -> str:
    return ", ".join(map(str, frames[:6])) + (" ..." if len(frames) > 6 else "")


_ERRORS: Final[dict[int, type[PenstockError]]] = {
    401: Unauthorized,
    403: Forbidden,
    404: ModelNotFound,
    408: DeadlineExceeded,
    409: ServerFault,  # the server is still working on the same chunk
    413: PayloadTooLarge,
    502: ConnectionLost,  # from a gateway: its server is down, or went down with the request
    504: DeadlineExceeded,
}


def check_status(response: HttpResponse, url: str) -> None:
    """Returns for 200. Otherwise raises the error for the status, with the server's text and its Retry-After."""
    status = response.status
    if status == 200:
        return
    if status < 400:
        raise WrongAnswer(f"{url} answered {status}, expected 200; redirects are not followed")
    message = f"{url} answered {status}: {one_line(read_error(response.body)[1])}"
    if status in (429, 503):
        busy = QueueFull if status == 429 else ModelNotReady
        raise busy(message, retry_after_s=retry_after_s(response.headers.get("retry-after", "")))
    raise _ERRORS.get(status, ServerFault if status >= 500 else BadRequest)(message)
