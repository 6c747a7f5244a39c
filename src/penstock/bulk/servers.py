"""The protocol of captioning servers: what they report about their model, the upload of a chunk, and its response."""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw, Struct

from penstock import errors
from penstock.bulk.types import Answer, Answers, Chunk, PixelMode
from penstock.client.calls import APIS
from penstock.client.client import AsyncClient
from penstock.client.endpoint import ConnectionLost, Endpoint, Unreachable, parse_url, tls_context
from penstock.client.response import HttpResponse, UnexpectedResponse, one_line, read_error, retry_after_s
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, Buffer, encode_request
from penstock.values import shorten

_logger = logging.getLogger("penstock.bulk")

METADATA_BYTES: Final = 1 << 20  # limit of a metadata response; some kilobytes are usual
MAX_SIDE: Final = 16384  # of the frames that a server may ask for
RETRY_S: Final = 1.0  # between attempts to reach a server that is not up yet
NOT_UP: Final = (
    Unreachable,
    ConnectionLost,
    errors.DeadlineExceeded,
    errors.ModelNotReady,
    errors.QueueFull,
)  # it may be up later


class NotACaptioner(errors.PenstockError, code="not_a_captioner"):
    """The server responds, but does not describe a captioner of frames."""


class ServersDiffer(errors.PenstockError, code="servers_differ"):
    """The servers of one job would not produce the same captions."""


class ServerInfo(Struct, frozen=True, kw_only=True):
    """A server, its model, and the model's description; every request carries `token`. `ca`: see `tls_context`.

    Every frame has `height` and `width`; a model with `max_pixels` takes any size up to that instead.
    `concurrent` is the number of requests to begin with at a server that forms its batches while it runs.
    """

    address: Endpoint
    model: str
    revision: str
    height: int = 0
    width: int = 0
    max_pixels: int | None = None
    concurrent: int | None = None
    inputs: frozenset[str]  # "frames", "jpeg" or both
    instances: int = 1
    max_batch_size: int | None = None
    max_request_bytes: int | None = None
    parameters: dict[str, Any] = {}
    token: str | None = None
    ca: str | None = None
    backend: Backend = msgspec.field(default_factory=lambda: PENSTOCK)

    def __repr__(self) -> str:
        return f"ServerInfo({self.url!r}, {self.model!r}, revision={self.revision!r})"  # no token

    @property
    def url(self) -> str:
        return self.address.url


Headers: TypeAlias = Sequence[tuple[str, str]]
Post: TypeAlias = Callable[[Sequence[Buffer]], Awaitable[HttpResponse]]
"""Posts another body to the same server, with the headers of the upload."""


class Asked(Struct, frozen=True, kw_only=True):
    """What the user asks of a model. `prompt` may name {video}, {frame}, {time} and {end}; None leaves it to the
    backend.

    `schema` is a JSON schema that answers must fulfil, and `request` further fields of each request.
    """

    prompt: str | None = None
    system: str | None = None
    max_tokens: int = 128
    max_pixels: int = 1_003_520  # 1280 patches of 28 x 28: what Qwen's models see of an image by common settings
    schema: dict[str, Any] | None = None
    request: dict[str, Any] = {}


class Backend:
    """What one kind of server takes and returns: one object for all servers of a job.

    `pixels` is how frames travel and `model` the name of the model unless the user chooses; `base64` makes JPEG files
    base64 where they are encoded, `headers` go with every request, and with `shows_queue`, /metrics is read.
    With `errors_are_rows`, a chunk whose attempts are used up gets rows with an error, and its video goes on.
    docs/caption-backends.md is for authors.
    Raises ConfigError for what it cannot ask.
    """

    pixels: PixelMode = "server-size"
    model = ""
    base64 = False
    headers: Headers = ()
    shows_queue = False
    errors_are_rows = False

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def __reduce__(self) -> tuple[type[Backend], tuple[Asked]]:
        return type(self), (self.asked,)

    async def describe(self, url: str, model: str, token: str | None, ca: str | None, timeout_s: float) -> ServerInfo:
        """The model at `url`, if it is ready. Raises one of `NOT_UP` if it may be ready later."""
        raise NotImplementedError

    def path(self, info: ServerInfo) -> str:
        """The path of captioning requests."""
        raise NotImplementedError

    def encode(self, chunk: Chunk, info: ServerInfo, job: str) -> tuple[Headers, Sequence[Buffer]]:
        """The headers and the body of a chunk's request, for every server of the job."""
        raise NotImplementedError

    async def answers(self, chunk: Chunk, body: Sequence[Buffer], info: ServerInfo, post: Post) -> Answers:
        """Posts the body of a chunk, and what else it takes: one caption or answer for each frame.

        Raises the error that decides what happens next: see `endpoints.LATER` and `endpoints.AGAIN`.
        """
        raise NotImplementedError

    def queued(self, metrics: str) -> int | None:
        """The requests that wait at a server, from its /metrics page; None if the page does not say."""
        return None


def failed_row(error: errors.PenstockError, info: ServerInfo, tokens: tuple[int, int] | None = None) -> Answer:
    """The row of an error, without the server's address, which may be another in the next run."""
    return Answer(error=error.message.removeprefix(info.url).lstrip(": "), tokens=tokens)


class PenstockBackend(Backend):
    """`penstock serve`, or another server of the Open Inference Protocol with a captioner."""

    model = "captioner"
    headers: Headers = (("x-priority", "1"),)

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        if asked != Asked():
            raise errors.ConfigError(
                "the captioner of `penstock serve` has its own prompt and limits, which its options set; "
                "--prompt, --system, --max-tokens, --max-pixels, --schema and --request need --backend openai"
            )

    async def describe(self, url: str, model: str, token: str | None, ca: str | None, timeout_s: float) -> ServerInfo:
        async with open_client(url, token, ca, timeout_s) as client:
            return await fetch(client, model, parse_url(url, tls_context(ca) if ca else None))

    def path(self, info: ServerInfo) -> str:
        return APIS["penstock"].infer(info.model, None)

    def encode(self, chunk: Chunk, info: ServerInfo, job: str) -> tuple[Headers, Sequence[Buffer]]:
        head, buffers = encode_request(_inputs(chunk), outputs=OUTPUTS)
        if isinstance(chunk.pixels, list):  # for many small files one write is cheaper than avoiding the copy
            buffers = [b"".join(buffers)]
        headers = [
            ("Content-Type", "application/octet-stream"),
            (HEADER_LENGTH, str(len(head))),
            ("Idempotency-Key", idempotency_key(chunk, job)),
        ]
        return headers, (head, *buffers)

    async def answers(self, chunk: Chunk, body: Sequence[Buffer], info: ServerInfo, post: Post) -> Answers:
        response = await post(body)
        return read_captions(response, info.model, info.revision, chunk.frames, info.url)


PENSTOCK: Final[Backend] = PenstockBackend(Asked())


class _Tensor(Struct):
    name: str
    datatype: str = ""


class _Parameters(Struct):
    task: str
    revision: str
    height: int
    width: int
    instances: int = 1
    max_batch_size: int | None = None
    max_request_bytes: int | None = None


class _Metadata(Struct):
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    parameters: dict[str, Any]


def ask(
    url: str,
    model: str,
    *,
    token: str | None = None,
    ca: str | None = None,
    timeout_s: float = 10.0,
    patience_s: float = 0.0,
    backend: Backend = PENSTOCK,
    check: Callable[[], None] = lambda: None,
) -> ServerInfo:
    """The description of `model` at `url`. Waits up to `patience_s` for a server or model that is not up yet.

    Must not be called in an event loop. Raises what `describe` and, between attempts, `check` raise, and
    ConfigError for the address.
    """

    async def described() -> ServerInfo:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                found = await backend.describe(url, model, token, ca, timeout_s)
                return msgspec.structs.replace(found, token=token, ca=ca, backend=backend)
            except NOT_UP as exc:
                check()
                if time.monotonic() + RETRY_S > until_s:
                    raise
                _logger.info("server=%s waited_for=%s", url, exc.code)
            await asyncio.sleep(RETRY_S)

    return asyncio.run(described())


def open_client(url: str, token: str | None, ca: str | None, timeout_s: float) -> AsyncClient:
    """A client for the metadata of one server."""
    return AsyncClient(
        url,
        token=token,
        ca=ca,
        timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
        retries=0,
        connections=1,
        max_response_bytes=METADATA_BYTES,
    )


async def fetch(client: AsyncClient, model: str, address: Endpoint) -> ServerInfo:
    """The description of `model`, if it is ready. Raises Unreachable, UntrustedCertificate, ConnectionLost,
    DeadlineExceeded, ModelNotFound, ModelNotReady, QueueFull, Unauthorized, Forbidden, NotACaptioner."""
    try:
        info = read_metadata(await client.metadata(model), address, model)
    except (errors.BadRequest, errors.ItemFailed, errors.NotSupported, UnexpectedResponse) as exc:
        raise NotACaptioner(f"{address.url}: model '{model}' does not describe itself: {exc.message}") from None
    except errors.ModelNotReady as exc:
        raise errors.ModelNotReady(f"{address.url}: model '{model}' is not ready: {exc.message}") from None
    if not await client.ready(model):
        raise errors.ModelNotReady(f"{address.url}: model '{model}' is not ready")
    return info


def read_metadata(found: object, address: Endpoint, model: str) -> ServerInfo:
    """The server that the metadata of a model describes. Raises NotACaptioner."""
    subject = f"{address.url}: model '{model}'"
    try:
        metadata = msgspec.convert(found, _Metadata)
        own = msgspec.convert(metadata.parameters, _Parameters)
    except msgspec.ValidationError as exc:
        raise NotACaptioner(f"{subject} does not describe itself as a captioner: {exc}") from None
    if own.task != "image-to-text":
        raise NotACaptioner(f"{subject} has the task '{shorten(own.task, 40)}', expected 'image-to-text'")
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
        parameters=metadata.parameters,
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


class WrongAnswer(errors.PenstockError, code="wrong_answer", retryable=True):
    """The response has status 200, but does not hold the captions of this request."""


class ServerFault(errors.PenstockError, code="server_fault", retryable=True):
    """The server failed on this request: a 5xx other than 502, 503 and 504."""


class RevisionChanged(errors.PenstockError, code="revision_changed"):
    """The server now runs another model or other settings; their captions must not be mixed with earlier ones."""


def revision_changed(url: str, model: str, expected: str, found: str | None) -> RevisionChanged:
    now = "none" if found is None else f"'{shorten(found, 80)}'"
    return RevisionChanged(
        f"{url}: model '{model}' had revision '{expected}' when the job began, and now has {now}; "
        f"its captions are discarded"
    )


# ---- the upload


class UploadChunk:
    """A chunk and its request, encoded once for all attempts. Orders by arrival, the oldest first."""

    __slots__ = ("attempts", "body", "body_bytes", "chunk", "headers", "last_endpoint", "order", "tokens")

    def __init__(self, chunk: Chunk, order: int, headers: Headers, body: Sequence[Buffer]) -> None:
        self.chunk = chunk
        self.order = order
        self.attempts = 0  # failed ones
        self.tokens = 0.0  # that its current attempt may take
        self.last_endpoint: object = None  # where the last attempt went
        self.headers, self.body = headers, body
        self.body_bytes = sum([len(part) for part in self.body])

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
        raise WrongAnswer(f"{url}: the response has content type '{shorten(kind, 60)}', expected application/json")
    try:
        answer = _decode(response.body)
        found = answer.parameters.revision if answer.parameters else None
        if found != revision:
            raise revision_changed(url, model, revision, found)
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in answer.outputs}
        captions: list[str] = _column(tensors, "caption", _decode_texts)
        echoed: list[int] = _column(tensors, "frame_index", _decode_numbers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise WrongAnswer(f"{url}: the response is no Open Inference response with captions: {exc}") from None
    except KeyError as exc:
        raise WrongAnswer(f"{url}: the response has no output {exc}") from None
    if answer.model_name != model:
        raise WrongAnswer(f"{url}: model '{shorten(answer.model_name, 80)}' answered, expected '{model}'")
    if len(captions) != len(frames):
        raise WrongAnswer(f"{url}: the response has {len(captions)} captions, expected {len(frames)}")
    if echoed != frames:
        raise WrongAnswer(f"{url}: the response is for frames {_abridged(echoed)}, expected {_abridged(frames)}")
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


_ERRORS: Final[dict[int, type[errors.PenstockError]]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.ModelNotFound,
    408: errors.DeadlineExceeded,
    409: ServerFault,  # the server is still working on the same chunk
    413: errors.PayloadTooLarge,
    429: errors.QueueFull,
    502: ConnectionLost,  # from a gateway: its server is down, or went down with the request
    503: errors.ModelNotReady,
    504: errors.DeadlineExceeded,
}


def check_status(response: HttpResponse, url: str) -> None:
    """Returns for a 200. Otherwise raises the error for the status, with the server's text and its Retry-After.

    The status alone selects the class, unlike in `penstock.client`: whatever failed at the server, the chunk may be
    repeated.
    """
    status = response.status
    if status == 200:
        return
    if status < 400:
        raise WrongAnswer(f"{url} answered {status}, expected 200; redirects are not followed")
    error = _ERRORS.get(status, ServerFault if status >= 500 else errors.BadRequest)
    message = f"{url} answered {status}: {one_line(read_error(response.body)[1])}"
    raise error(message, retry_after_s=retry_after_s(response.headers.get("retry-after", "")))
