"""One chunk on the wire: the upload that carries it, and the captions or the error in its response."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from penstock.bulk.types import Chunk
from penstock.client.answers import one_line, read_error, retry_after_s
from penstock.client.endpoint import ConnectionLost
from penstock.client.response import HttpResponse
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


class _Tensor(Struct):
    name: str
    shape: list[int]
    data: Raw


class _Parameters(Struct):
    revision: str | None = None


class _Captions(Struct):
    model_name: str
    outputs: list[_Tensor]
    parameters: _Parameters | None = None


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
