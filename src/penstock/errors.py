"""The one tree of errors: a stable `code`, whether a retry may help, and a message.

A message says what was found, what was expected and what to do. `message` may leave the process; `detail` (a
traceback, a path) may not: it is for logs and for callers in the same process. No HTTP word stands here: every
front-end has one table from class to status.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None, detail: str = "") -> None:
        super().__init__(message)
        self.message = plain(message)
        self.retry_after_s = retry_after_s
        self.detail = detail

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.retry_after_s, self.detail))


def _rebuild(cls: type[PenstockError], message: str, retry_after_s: float | None, detail: str) -> PenstockError:
    return cls(message, retry_after_s=retry_after_s, detail=detail)


class BadRequest(PenstockError):
    """The request itself is wrong: it fails in the same way every time."""

    code = "bad_request"


class PayloadTooLarge(BadRequest):
    """The body is larger than `limits.max_body_bytes`, or than the slab pool."""

    code = "payload_too_large"


class DecodeError(BadRequest):
    """An item's bytes are no image that can be decoded: empty, of no known format, broken, cut short, or too large."""

    code = "undecodable"


class Unauthorized(PenstockError):
    """No token, or a wrong one."""

    code = "unauthorized"


class ModelNotFound(PenstockError):
    """No model, or no such version of it, is registered."""

    code = "model_not_found"


class Conflict(PenstockError):
    """The change does not fit what is there now."""

    code = "conflict"


class Forbidden(PenstockError):
    """The caller may not do this, whoever they are: the configuration does not allow it."""

    code = "forbidden"


class ModelNotReady(PenstockError):
    """The model is known, but loading, failed or draining."""

    code = "model_not_ready"
    retryable = True


class BrokerUnavailable(ModelNotReady):
    """The broker between callers and workers cannot be reached, or does not take what it is given."""

    code = "broker_unavailable"


class UnsupportedType(PenstockError):
    """The content type is one that this route never reads."""

    code = "unsupported_media_type"


class QueueFull(PenstockError):
    """The queue of the model is at its bound, in items or in bytes."""

    code = "queue_full"
    retryable = True


class DeadlineExceeded(PenstockError, TimeoutError):
    """The deadline passed, or could not be met, before the request was answered. A built-in TimeoutError too."""

    code = "deadline_exceeded"
    retryable = True


class Cancelled(PenstockError):
    """The caller went away before the request was run."""

    code = "cancelled"


class WorkerDied(PenstockError):
    """The worker that ran the request ended without an answer."""

    code = "worker_died"
    retryable = True


class ItemFailed(PenstockError):
    """The model raised on this item; its batch-mates were answered."""

    code = "item_failed"


class OutOfMemory(ItemFailed):
    """The device had no memory for this item, even alone in its batch."""

    code = "out_of_memory"


class BadOutput(ItemFailed):
    """The model returned what cannot be an answer: a wrong number of results, or one that cannot be serialised."""

    code = "bad_output"


class LoadFailed(PenstockError):
    """The model could not be loaded."""

    code = "load_failed"


class LoadOutOfMemory(LoadFailed):
    """There was no memory to load the model."""

    code = "load_out_of_memory"


class ArchiveError(PenstockError):
    """A model archive breaks a rule, which the message names, or cannot be read or written."""

    code = "archive_error"


class ConfigError(PenstockError):
    """A configuration file, variable or flag is wrong."""

    code = "config_error"


class TargetNotFound(ConfigError):
    """A TARGET such as `app.py:Model` names nothing that can be imported."""

    code = "target_not_found"


def _tree(cls: type[PenstockError]) -> Iterable[type[PenstockError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _tree(sub)


def from_code(code: str, message: str, detail: str = "") -> PenstockError:
    """The error that `code` names, as it was on the other side of a wire; unknown codes become `PenstockError`."""
    cls = next((c for c in _tree(PenstockError) if c.code == code), PenstockError)
    return cls(message, detail=detail)


def plain(text: object) -> str:
    """The text without halves of characters, which no wire can carry; from a model it may be of any type."""
    text = text if isinstance(text, str) else str(text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def describe(error: BaseException) -> str:
    """`Type: first line of its text`, also of an error whose text cannot be had."""
    try:
        text = plain(error).partition("\n")[0]
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}"


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the most similar known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def install_hint(extra: str) -> str:
    """The command that installs an extra from a checkout: Penstock is on no package index."""
    return f"pip install '.[{extra}]'"


def not_installed(what: str, extra: str, error: ImportError) -> LoadFailed:
    """The error for a package that cannot be imported, with the command that installs it."""
    return LoadFailed(f"{what} cannot be imported ({describe(error)}): {install_hint(extra)}")
