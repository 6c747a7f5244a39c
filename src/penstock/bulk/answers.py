"""What an answer says: the captions of a chunk, or what is wrong and whether sending it again may help."""

from __future__ import annotations

import email.utils
import math
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from penstock.client.errors import ConnectionLost
from penstock.client.http import HttpResponse
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

TOLD_BYTES: Final = 500  # of a server's own words that stand in an error
LONGEST_PAUSE_S: Final = 300.0  # whatever Retry-After says: a server that lives again is not left alone for long


class WrongAnswer(PenstockError):
    """The answer has status 200, but is not one of the captioner's to this request."""

    code = "wrong_answer"
    retryable = True


class ServerFault(PenstockError):
    """The server failed on this request (a 5xx that is not 502, 503 or 504)."""

    code = "server_fault"
    retryable = True


class RevisionChanged(PenstockError):
    """Another model, or the same with other settings, answers now: its captions must not be mixed with the others."""

    code = "revision_changed"


def changed(url: str, model: str, was: str, found: str | None) -> RevisionChanged:
    """The error of a server whose model is not that of the job's beginning."""
    now = "none" if found is None else f"'{found[:80]}'"
    return RevisionChanged(
        f"{url}: model '{model}' had revision '{was}' when the job began, and now has {now}; "
        f"what it answers is not kept"
    )


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


class _Error(Struct):
    error: str


_decode = msgspec.json.Decoder(_Captions).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_numbers = msgspec.json.Decoder(list[int]).decode


def read_captions(answer: HttpResponse, model: str, revision: str, frames: list[int], url: str) -> list[str]:
    """One caption for each frame, in their order. Raises what `check_status` does, WrongAnswer, RevisionChanged."""
    check_status(answer, url)
    kind = answer.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise WrongAnswer(f"{url}: the answer has content type '{kind[:60]}', expected application/json")
    try:
        told = _decode(answer.body)
        found = told.parameters.revision if told.parameters else None
        if found != revision:
            raise changed(url, model, revision, found)
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in told.outputs}
        captions: list[str] = _column(tensors, "caption", _decode_texts)
        echoed: list[int] = _column(tensors, "frame_index", _decode_numbers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise WrongAnswer(f"{url}: the answer is no Open Inference answer with captions: {exc}") from None
    except KeyError as exc:
        raise WrongAnswer(f"{url}: the answer has no output {exc}") from None
    if told.model_name != model:
        raise WrongAnswer(f"{url}: model '{told.model_name[:80]}' answered, expected '{model}'")
    if len(captions) != len(frames):
        raise WrongAnswer(f"{url}: the answer has {len(captions)} captions, expected {len(frames)}")
    if echoed != frames:
        raise WrongAnswer(f"{url}: the answer is for frames {_some(echoed)}, expected {_some(frames)}")
    return captions


def _column(tensors: dict[str, Any], name: str, decode: Any) -> Any:
    """Raises KeyError, msgspec.DecodeError."""
    tensor = tensors[name]
    cells = decode(tensor.data)
    if math.prod(tensor.shape) != len(cells):
        raise msgspec.ValidationError(f"output '{name}' has shape {tensor.shape[:4]} and {len(cells)} elements")
    return cells


def _some(frames: list[int]) -> str:
    return ", ".join(map(str, frames[:6])) + (" ..." if len(frames) > 6 else "")


def check_status(answer: HttpResponse, url: str) -> None:
    """Nothing for 200. Raises the error that the status stands for, with what the server told and its Retry-After."""
    status = answer.status
    if status == 200:
        return
    message = f"{url} answered {status}: {_words(answer.body)}"
    if status in (429, 503):
        kind: type[PenstockError] = QueueFull if status == 429 else ModelNotReady
        raise kind(message, retry_after_s=retry_after_s(answer.headers.get("retry-after", "")))
    if status in (408, 504):
        raise DeadlineExceeded(message)
    if status == 502:  # of a gateway: the server behind it is away, or went away with the request
        raise ConnectionLost(message)
    if status >= 500:
        raise ServerFault(message)
    kinds = {401: Unauthorized, 403: Forbidden, 404: ModelNotFound, 413: PayloadTooLarge}
    if status in kinds:
        raise kinds[status](message)
    if status == 409:  # the same chunk is still being answered there, as it says
        raise ServerFault(message)
    if status >= 400:
        raise BadRequest(message)
    raise WrongAnswer(f"{url} answered {status}, expected 200; a redirect is not followed")


def _words(body: bytes) -> str:
    """What the server said in its error, short and on one line."""
    try:
        text = msgspec.json.decode(body, type=_Error).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body[:TOLD_BYTES].decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text[:TOLD_BYTES]).split()) or "(no words)"


def retry_after_s(value: str) -> float | None:
    """Seconds that a Retry-After asks for, in either of its forms; None for none or nonsense."""
    value = value.strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(value)
        except (ValueError, TypeError, OverflowError):
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_PAUSE_S) if math.isfinite(seconds) else None
