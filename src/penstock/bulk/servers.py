"""What a server says of the captioner that it runs: asked before a job begins, and while it is away."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct, field

from penstock.client.endpoint import Endpoint, parse_url
from penstock.client.errors import ConnectionLost, Unreachable
from penstock.client.http import ClientConnection, HttpResponse
from penstock.errors import (
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
    Unauthorized,
)

log = logging.getLogger("penstock.bulk")

METADATA_BYTES: Final = 1 << 20  # of an answer with a model's metadata: some kilobytes are usual
MOST_PIXELS: Final = 16384  # a side of the frames that a server may ask for
ASK_AGAIN_S: Final = 1.0  # while a server that is waited for is not there yet


class NotACaptioner(PenstockError):
    """The server answers, but not as a captioner of frames does."""

    code = "not_a_captioner"


class ServersDiffer(PenstockError):
    """The servers of one job would not caption alike."""

    code = "servers_differ"


class ServerInfo(Struct, frozen=True, kw_only=True):
    """A server, its model, and what that says of itself; `token` goes with every request."""

    endpoint: Endpoint
    model: str
    revision: str
    height: int
    width: int
    inputs: frozenset[str]  # of "frames", "jpeg"
    versions: tuple[str, ...] = ()
    model_id: str = ""
    kernel: str = ""
    prompt: str = ""
    max_new_tokens: int | None = None
    precision: str = ""
    instances: int = 1
    max_batch_size: int | None = None
    max_request_bytes: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    token: str | None = None

    def __repr__(self) -> str:
        return f"ServerInfo({self.url!r}, {self.model!r}, revision={self.revision!r})"  # no token

    @property
    def url(self) -> str:
        """Its address."""
        return self.endpoint.url

    @property
    def path(self) -> str:
        """Of the model, below the endpoint's prefix."""
        return f"/v2/models/{quote(self.model, safe='')}"


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


def authorization(token: str | None) -> list[tuple[str, str]]:
    """The header of a request with the token, if there is one."""
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
    """What the server at `url` says of `model`. A server or model that is not there yet is waited for `patience_s`.

    `tls` is used for https only; None trusts the system's authorities. Not to be called in an event loop.
    Raises Unreachable, UntrustedCertificate, ConnectionLost, DeadlineExceeded, ModelNotFound, ModelNotReady,
    Unauthorized, Forbidden, NotACaptioner, ConfigError for the address.
    """
    endpoint = parse_url(url, tls)
    if token is not None and endpoint.tls is None and not endpoint.local:
        log.warning("server=%s the token travels readable by all on the way; use https or a tunnel", endpoint.url)
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return asyncio.run(_ask_once(endpoint, model, token, timeout_s))
        except (Unreachable, ConnectionLost, ModelNotReady, DeadlineExceeded) as exc:
            if time.monotonic() + ASK_AGAIN_S > until_s:
                raise
            log.info("server=%s waited_for=%s", endpoint.url, exc.code)
            time.sleep(ASK_AGAIN_S)


async def _ask_once(endpoint: Endpoint, model: str, token: str | None, timeout_s: float) -> ServerInfo:
    connection = ClientConnection(endpoint, connect_timeout_s=timeout_s)
    try:
        return await fetch(connection, model, token, timeout_s)
    finally:
        connection.close()


async def fetch(connection: ClientConnection, model: str, token: str | None, timeout_s: float) -> ServerInfo:
    """What the server at the other end says of `model`. Raises as `ask` does."""
    path = f"/v2/models/{quote(model, safe='')}"
    headers = authorization(token)
    answer = await connection.request("GET", path, headers, timeout_s=timeout_s, max_response_bytes=METADATA_BYTES)
    check_status(answer, connection.endpoint.url, model)
    info = read_metadata(answer.body, connection.endpoint, model, token)
    ready = await connection.request(
        "GET", f"{path}/ready", headers, timeout_s=timeout_s, max_response_bytes=METADATA_BYTES
    )
    check_status(ready, connection.endpoint.url, model)
    return info


def check_status(answer: HttpResponse, url: str, model: str) -> None:
    """Nothing for 200. Raises what stands in `ask`."""
    status = answer.status
    if status == 200:
        return
    if status == 401:
        raise Unauthorized(f"{url} refuses the token (401); give the one that the server was started with")
    if status == 403:
        raise Forbidden(f"{url} does not allow this caller to use model '{model}' (403)")
    if status == 404:
        raise ModelNotFound(f"{url} has no model '{model}' (404); name the one that it serves")
    if status in (429, 503):
        raise ModelNotReady(f"{url}: model '{model}' is not ready ({status})")
    raise NotACaptioner(f"{url} answered {status} when asked for the metadata of model '{model}', expected 200")


def read_metadata(body: bytes, endpoint: Endpoint, model: str, token: str | None = None) -> ServerInfo:
    """The server by the answer of `GET /v2/models/{model}`. Raises NotACaptioner."""
    what = f"{endpoint.url}: model '{model}'"
    try:
        told = msgspec.json.decode(body, type=_Metadata)
        own = msgspec.json.decode(told.parameters, type=_Parameters)
        parameters = msgspec.json.decode(told.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NotACaptioner(f"{what} does not describe itself as a captioner does: {exc}") from None
    if own.task != "image-to-text":
        raise NotACaptioner(f"{what} has the task '{own.task[:40]}', expected 'image-to-text'")
    inputs = {(tensor.name, tensor.datatype) for tensor in told.inputs}
    takes = frozenset(name for name, datatype in (("frames", "UINT8"), ("jpeg", "BYTES")) if (name, datatype) in inputs)
    if not takes or ("frame_index", "INT64") not in inputs:
        raise NotACaptioner(f"{what} takes no UINT8 'frames' or BYTES 'jpeg' with an INT64 'frame_index'")
    if {"caption", "frame_index"} - {tensor.name for tensor in told.outputs}:
        raise NotACaptioner(f"{what} has no outputs 'caption' and 'frame_index'")
    if not (0 < own.height <= MOST_PIXELS and 0 < own.width <= MOST_PIXELS):
        raise NotACaptioner(f"{what} asks for {own.width}x{own.height} frames, expected 1 to {MOST_PIXELS} a side")
    return ServerInfo(
        endpoint=endpoint,
        model=model,
        revision=own.revision,
        height=own.height,
        width=own.width,
        inputs=takes,
        versions=tuple(told.versions),
        model_id=own.model,
        kernel=own.kernel,
        prompt=own.prompt or "",
        max_new_tokens=own.max_new_tokens,
        precision=own.precision,
        instances=max(1, own.instances),
        max_batch_size=own.max_batch_size,
        max_request_bytes=own.max_request_bytes,
        parameters=parameters,
        token=token,
    )


def agree(servers: Sequence[ServerInfo]) -> None:
    """Nothing if all of them caption alike. Raises ServersDiffer with the first difference."""
    first = servers[0]
    for other in servers[1:]:
        for name in ("revision", "height", "width", "inputs"):
            mine, its = getattr(first, name), getattr(other, name)
            if mine != its:
                raise ServersDiffer(
                    f"{first.url} has {name} {_told(mine)}, {other.url} has {_told(its)}; "
                    f"all servers of a job must run the same model with the same settings"
                )


def _told(value: object) -> str:
    return ", ".join(sorted(value)) if isinstance(value, frozenset) else f"'{value}'"
