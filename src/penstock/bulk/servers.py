"""What a captioning server reports about its model: read before a job begins, and while the server is away."""

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from penstock.client.endpoint import ConnectionLost, Endpoint, Unreachable, check_token_privacy, parse_url
from penstock.client.http import ClientConnection
from penstock.client.response import HttpResponse
from penstock.errors import DeadlineExceeded, Forbidden, ModelNotFound, ModelNotReady, PenstockError, Unauthorized

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
