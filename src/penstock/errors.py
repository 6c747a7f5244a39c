"""The error hierarchy: each class has a stable `code` and says whether a retry may help.

A message says what was found, what was expected and what to do. `message` may leave the process. `detail` (a
traceback, a path) may not: it is for logs and for callers in the same process. HTTP statuses are defined elsewhere:
every front-end has one table from class to status.
"""

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar, Final, Self

# these end the worker; any other exception is an error of items, including panics of native code
ENDS = (SystemExit, KeyboardInterrupt)


class DeviceLost(SystemExit):
    """A device that this process cannot use any more: the worker ends, and another one takes its place."""


# exit statuses of commands
FAILED: Final = 1
USAGE: Final = 2  # wrong usage, as of click and argparse
INTERRUPTED: Final = 130  # as shells report a program that Ctrl-C ended


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose. `original`: the model's exception behind it, see
    `core.wire.objects`. `status`: the HTTP status of the response that a client received."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    exit_status: ClassVar[int] = FAILED  # of a command that ends with it
    original: Any = None
    status: int | None = None

    def __init__(self, message: str, *, retry_after_s: float | None = None, detail: str = "") -> None:
        super().__init__(message)
        self.message = plain(message)
        self.retry_after_s = retry_after_s
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (type(self), self.message, self.retry_after_s, self.detail)
        return (_rebuild, fields, {"original": self.original})


def _rebuild(cls: type[PenstockError], message: str, retry_after_s: float | None, detail: str) -> PenstockError:
    return cls(message, retry_after_s=retry_after_s, detail=detail)


class BadRequest(PenstockError):
    """The request is invalid; a retry fails in the same way."""

    code = "bad_request"


class PayloadTooLarge(BadRequest):
    """The body exceeds `limits.max_body_bytes`, or the slab pool."""

    code = "payload_too_large"


class Quarantined(BadRequest):
    """The payload killed two workers and is refused for a while; see `[models.NAME.restart]`."""

    code = "quarantined"


class DecodeError(BadRequest):
    """The bytes of an item cannot be decoded as an image: empty, unknown format, damaged, truncated, or too large."""

    code = "undecodable"


class Unauthorized(PenstockError):
    """The token is missing or wrong."""

    code = "unauthorized"


class ModelNotFound(PenstockError):
    """The model or version is not registered."""

    code = "model_not_found"


class RegionNotFound(PenstockError):
    """No region of shared memory is registered under the name."""

    code = "region_not_found"


class RegionExists(BadRequest):
    """A region of shared memory is registered under the name already."""

    code = "region_exists"


class Conflict(PenstockError):
    """The change conflicts with the current state."""

    code = "conflict"


class Forbidden(PenstockError):
    """The configuration forbids this operation, whatever the token."""

    code = "forbidden"


class ModelNotReady(PenstockError):
    """The model is known, but loading, failed or draining."""

    code = "model_not_ready"
    retryable = True


class BrokerUnavailable(ModelNotReady):
    """The broker between callers and workers is unreachable or rejects requests."""

    code = "broker_unavailable"


class NotSupported(PenstockError):
    """The model, or the server, lacks the operation."""

    code = "not_supported"


class UnsupportedType(PenstockError):
    """The route does not accept this content type."""

    code = "unsupported_media_type"


class QueueFull(PenstockError):
    """The queue of the model is full, in items or in bytes."""

    code = "queue_full"
    retryable = True


class SequenceNotFound(PenstockError):
    """The sequence never began, has ended, or was idle for too long."""

    code = "sequence_not_found"


class SequenceLost(PenstockError):
    """The instance with the state of the sequence is gone; the sequence must begin again."""

    code = "sequence_lost"


class DeadlineExceeded(PenstockError, TimeoutError):
    """The deadline passed, or could not be met, before the request was answered. A built-in TimeoutError too."""

    code = "deadline_exceeded"
    retryable = True


class QueueTimeout(DeadlineExceeded):
    """The request waited in the queue for longer than its own `timeout`, or `batching.timeout_s`, allows."""

    code = "queue_timeout"


class Cancelled(PenstockError):
    """The caller cancelled before the request ran."""

    code = "cancelled"


class WorkerDied(PenstockError):
    """The worker died while running the request."""

    code = "worker_died"
    retryable = True


class RunTimeout(WorkerDied, TimeoutError):
    """The run of the batch exceeded `run_timeout_s`, and its worker was replaced."""

    code = "run_timeout"


class ItemFailed(PenstockError):
    """The model failed on this item; other items in its batch are not affected."""

    code = "item_failed"


class OutOfMemory(ItemFailed):
    """The device ran out of memory for this item, even alone in its batch."""

    code = "out_of_memory"


class BadOutput(ItemFailed):
    """The model returned an invalid result: the wrong number of results, or one that cannot be serialised."""

    code = "bad_output"


class WrongRowCount(BadOutput):
    """A batch came back with another number of rows. Smaller batches may not, so the batch is repeated in halves."""


class LoadFailed(PenstockError):
    """The model could not be loaded."""

    code = "load_failed"


class LoadOutOfMemory(LoadFailed):
    """The model did not load because memory ran out."""

    code = "load_out_of_memory"


class ArchiveError(PenstockError):
    """A model archive breaks a rule, which the message names, or cannot be read or written."""

    code = "archive_error"


class ConfigError(PenstockError):
    """A configuration file, variable or flag is wrong."""

    code = "config_error"
    exit_status = USAGE


class ListenFailed(ConfigError):
    """An address cannot be bound now; another one, or a later start, may succeed."""

    exit_status = FAILED


class TargetNotFound(ConfigError):
    """A TARGET such as `app.py:Model` names nothing that can be imported."""

    code = "target_not_found"


def _tree(cls: type[PenstockError]) -> Iterable[type[PenstockError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _tree(sub)


def from_code(code: str, message: str, detail: str = "") -> PenstockError:
    """The error for a code received from another process; unknown codes become `PenstockError`."""
    cls = next((c for c in _tree(PenstockError) if c.code == code), PenstockError)
    return cls(message, detail=detail)


HALF_PAIR: Final = "the model returned text with half a surrogate pair, which UTF-8 cannot hold"


def plain(text: object) -> str:
    """The text with lone surrogates escaped, because UTF-8 cannot encode them; a model may pass any type."""
    text = text if isinstance(text, str) else str(text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def describe(error: BaseException) -> str:
    """`Type: first line of its text`, even if the text of the error cannot be read."""
    try:
        text = plain(error).partition("\n")[0]
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, also from frameworks that are not imported here.

    Checks the class name (torch.cuda.OutOfMemoryError) and the text: CUDA libraries raise plain RuntimeErrors.
    """
    if isinstance(error, MemoryError) or any("OutOfMemory" in c.__name__ for c in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in describe(error).lower()


class ErrorList:
    """Collects ConfigErrors so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        """Keeps a ConfigError that the block raised and goes on after the block."""
        if isinstance(error, ConfigError):
            self.messages.append(error.message)
            return True
        return False

    def check(self) -> None:
        """Raises one ConfigError with all messages, a line each, if there are any."""
        if self.messages:
            head = f"{len(self.messages)} errors:\n" if len(self.messages) > 1 else ""
            raise ConfigError(head + "\n".join(self.messages))


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the most similar known word; empty if there is none, or the word itself is known."""
    known = list(known)
    if word in known:  # it is no slip: the word is right, and not here
        return ""
    close = [k for k in known if k.lower() == word.lower()] or difflib.get_close_matches(word, known, n=1, cutoff=0.51)
    if not close:  # of words that share just half their letters, only one that begins alike looks like a slip
        close = difflib.get_close_matches(word, [k for k in known if k[:1] == word[:1]], n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def install_hint(extra: str) -> str:
    """The command that installs what an extra brings, from wherever Penstock came: it is on no package index."""
    from importlib.metadata import distributions  # only messages need it

    needs = [need.partition(";") for found in distributions(name="penstock") for need in found.requires or ()]
    of_extra = dict.fromkeys(f"'{need.strip()}'" for need, _, when in needs if f"{extra!r}" in when.replace('"', "'"))
    return f"pip install {' '.join(of_extra) or extra}"
