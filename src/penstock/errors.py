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

    def __init_subclass__(
        cls, *, code: str | None = None, retryable: bool | None = None, exit_status: int | None = None
    ) -> None:
        """What a class does not give, it inherits."""
        given = {"code": code, "retryable": retryable, "exit_status": exit_status}
        for name in given:
            if given[name] is not None:
                setattr(cls, name, given[name])

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


class BadRequest(PenstockError, code="bad_request"):
    """The request is invalid; a retry fails in the same way."""


class PayloadTooLarge(BadRequest, code="payload_too_large"):
    """The body exceeds `limits.max_body_bytes`, or the slab pool."""


class Quarantined(BadRequest, code="quarantined"):
    """The payload killed two workers and is refused for a while; see `[models.NAME.restart]`."""


class DecodeError(BadRequest, code="undecodable"):
    """The bytes of an item cannot be decoded as an image: empty, unknown format, damaged, truncated, or too large."""


class Unauthorized(PenstockError, code="unauthorized"):
    """The token is missing or wrong."""


class ModelNotFound(PenstockError, code="model_not_found"):
    """The model or version is not registered."""


class RegionNotFound(PenstockError, code="region_not_found"):
    """No region of shared memory is registered under the name."""


class RegionExists(BadRequest, code="region_exists"):
    """A region of shared memory is registered under the name already."""


class Conflict(PenstockError, code="conflict"):
    """The change conflicts with the current state."""


class Forbidden(PenstockError, code="forbidden"):
    """The configuration forbids this operation, whatever the token."""


class ModelNotReady(PenstockError, code="model_not_ready", retryable=True):
    """The model is known, but loading, failed or draining."""


class BrokerUnavailable(ModelNotReady, code="broker_unavailable"):
    """The broker between callers and workers is unreachable or rejects requests."""


class NotSupported(PenstockError, code="not_supported"):
    """The model, or the server, lacks the operation."""


class UnsupportedType(PenstockError, code="unsupported_media_type"):
    """The route does not accept this content type."""


class QueueFull(PenstockError, code="queue_full", retryable=True):
    """The queue of the model is full, in items or in bytes."""


class SequenceNotFound(PenstockError, code="sequence_not_found"):
    """The sequence never began, has ended, or was idle for too long."""


class SequenceLost(PenstockError, code="sequence_lost"):
    """The instance with the state of the sequence is gone; the sequence must begin again."""


class DeadlineExceeded(PenstockError, TimeoutError, code="deadline_exceeded", retryable=True):
    """The deadline passed, or could not be met, before the request was answered. A built-in TimeoutError too."""


class QueueTimeout(DeadlineExceeded, code="queue_timeout"):
    """The request waited in the queue for longer than its own `timeout`, or `batching.timeout_s`, allows."""


class Cancelled(PenstockError, code="cancelled"):
    """The caller cancelled before the request ran."""


class WorkerDied(PenstockError, code="worker_died", retryable=True):
    """The worker died while running the request."""


class RunTimeout(WorkerDied, TimeoutError, code="run_timeout"):
    """The run of the batch exceeded `run_timeout_s`, and its worker was replaced."""


class ItemFailed(PenstockError, code="item_failed"):
    """The model failed on this item; other items in its batch are not affected."""


class OutOfMemory(ItemFailed, code="out_of_memory"):
    """The device ran out of memory for this item, even alone in its batch."""


class BadOutput(ItemFailed, code="bad_output"):
    """The model returned an invalid result: the wrong number of results, or one that cannot be serialised."""


class WrongRowCount(BadOutput):
    """A batch came back with another number of rows. Smaller batches may not, so the batch is repeated in halves."""


class LoadFailed(PenstockError, code="load_failed"):
    """The model could not be loaded."""


class LoadOutOfMemory(LoadFailed, code="load_out_of_memory"):
    """The model did not load because memory ran out."""


class ArchiveError(PenstockError, code="archive_error"):
    """A model archive breaks a rule, which the message names, or cannot be read or written."""


class ConfigError(PenstockError, code="config_error", exit_status=USAGE):
    """A configuration file, variable or flag is wrong."""


class ListenFailed(ConfigError, exit_status=FAILED):
    """An address cannot be bound now; another one, or a later start, may succeed."""


class TargetNotFound(ConfigError, code="target_not_found"):
    """A TARGET such as `app.py:Model` names nothing that can be imported."""


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
